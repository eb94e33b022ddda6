"""How what is kept for a communicator is given back after the user has freed it.

MPI then calls back, maybe amid another call of its own, where it must not be called; and ranks may free their communicators in another
order. So the callback only takes note. What takes calls of MPI is a generator, which goes on with the next calls of the library, a step at
a time, or at exit; it waits for the other ranks by yielding.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Generator
from functools import lru_cache, partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from sparseallreduce.algorithms.agreement import common_error
from sparseallreduce.runtime import children, progress
from sparseallreduce.runtime.failing import Alike
from sparseallreduce.runtime.handshake.messages import WITHDRAWAL_SECONDS
from sparseallreduce.runtime.states import FAILED, FREED, PREPARING, READY, SETTLING

if TYPE_CHECKING:
    from sparseallreduce.runtime.channel import Channel

__all__ = ["channel_given_back", "finish", "keyval", "note_channel", "returned"]

_IN_FLIGHT = "the communicator was freed while an operation on it was in flight: wait for it before"
_EXIT_SECONDS = 3.0  # to wait at exit for ranks that have not freed theirs

Returning = Generator[bool, None, None]


def keyval(give_back: Callable[[Any], Returning], note: Callable[[Any], None] | None = None) -> int:
    """Return a new key for attributes of communicators.

    Parameters
    ----------
    give_back : callable
        Makes of an attribute's value, once its communicator is freed, the generator that gives it back. It yields False whenever it waits.
    note : callable, optional
        Called with the value inside MPI's callback, where MPI must not be called.
    """
    key: int = MPI.Comm.Create_keyval(delete_fn=partial(_deleted, give_back, note))
    return key


def returned(*comms: Any) -> Returning:
    """Free communicators of the library's own that no message is under way on."""
    for comm in comms:
        comm.Free()
    return
    yield False


def note_channel(channel: Channel) -> None:
    """Give back the memory of a channel whose communicator is being freed, unless operations on it are in flight."""
    # Open MPI ends in a segmentation fault if a communicator goes before it has been duplicated. It may be called here.
    while channel.duplicating is not None and _is_open_mpi() and not channel.duplicating.Test():
        os.sched_yield()
    if channel.state in (READY, FAILED) and not any(operation.channel is channel for operation in tuple(progress.operations)):
        channel.let_go()


def channel_given_back(channel: Channel) -> Returning:
    """Give the duplicates of a channel back to MPI, with the other ranks. Operations in flight fail."""
    for operation in tuple(progress.operations):
        if operation.channel is channel and not operation.own:
            operation.fail(Alike(_IN_FLIGHT))
            operation.end(common_error([{"error": "SparseAllreduceError", "text": _IN_FLIGHT}]))
    while channel.state in (PREPARING, SETTLING):
        yield False
    channel.state = FREED
    progress.channels.remove(channel)
    channel.let_go()
    mailbox = channel.mailbox
    if mailbox is None or channel.collectives.comm is None:
        return
    # What a rank that gave up has sent to those that were done already must not be taken for a message of the next communicator, to which
    # MPI may give the same context.
    for _ in range(2):
        barrier, limit = channel.messages.Ibarrier(), perf_counter() + WITHDRAWAL_SECONDS
        while not barrier.Test() or (mailbox.leftovers and perf_counter() < limit):
            mailbox.drain()
            channel.drop([MPI.ANY_TAG, 0])
            yield False
    mailbox.leftovers.cancel()
    for comm in (channel.messages, channel.collectives.comm):
        comm.Free()


def finish() -> None:
    """Give back all that is still to be given back, unless other ranks make this wait for long."""
    limit = perf_counter() + _EXIT_SECONDS
    progress.wait_until(lambda: not progress.recall_freed() or perf_counter() > limit)


@atexit.register
def _finish_at_exit() -> None:
    if MPI.Is_initialized() and not MPI.Is_finalized():
        finish()


@lru_cache(maxsize=1)
def _is_open_mpi() -> bool:
    return bool(MPI.Get_library_version().startswith("Open MPI"))


def _deleted(
    give_back: Callable[[Any], Returning], note: Callable[[Any], None] | None, _comm: MPI.Comm, _key: int, value: Any
) -> None:
    if children.generation:  # in a forked process it is the parent's, who goes on with it
        return
    if note is not None:
        note(value)
    progress.freed.append(give_back(value))
