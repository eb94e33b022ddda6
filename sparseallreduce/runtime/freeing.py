"""Release what the library keeps for a communicator after the user has freed it.

MPI calls a callback when a communicator is freed, possibly inside another MPI call, where MPI must not be called; and ranks may free their
communicators in different orders. The callback therefore only queues a generator that makes the necessary MPI calls. Later calls of the
library, and an exit handler, advance it step by step; it yields while it waits for other ranks.
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
from sparseallreduce.runtime.failing import CommonError
from sparseallreduce.runtime.handshake.messages import WITHDRAWAL_SECONDS
from sparseallreduce.runtime.states import FAILED, FREED, PREPARING, READY, SETTLING

if TYPE_CHECKING:
    from sparseallreduce.runtime.channel import Channel

__all__ = ["channel_given_back", "finish", "keyval", "note_channel", "returned"]

_IN_FLIGHT = "the communicator was freed while an operation on it was in flight: wait for it before"
_EXIT_SECONDS = 3.0  # limit for waiting at exit for ranks that have not freed their communicators

Returning = Generator[bool, None, None]


def keyval(give_back: Callable[[Any], Returning], note: Callable[[Any], None] | None = None) -> int:
    """Return a new key for attributes of communicators.

    Parameters
    ----------
    give_back : callable
        Called with the attribute's value when its communicator is freed; returns the generator that releases it. The generator yields False
        while it waits.
    note : callable, optional
        Called with the value inside MPI's callback, where MPI must not be called.
    """
    key: int = MPI.Comm.Create_keyval(delete_fn=partial(_deleted, give_back, note))
    return key


def returned(*comms: Any) -> Returning:
    """Free internal communicators on which no message is in flight."""
    for comm in comms:
        comm.Free()
    return
    yield False


def note_channel(channel: Channel) -> None:
    """Release the memory of a channel whose communicator is being freed, unless operations on it are in flight."""
    # Open MPI crashes if a communicator is freed while it is being duplicated. Open MPI may be called here.
    while channel.duplicating is not None and _is_open_mpi() and not channel.duplicating.Test():
        os.sched_yield()
    if channel.state in (READY, FAILED) and not any(operation.channel is channel for operation in tuple(progress.operations)):
        channel.release_memory()


def channel_given_back(channel: Channel) -> Returning:
    """Free the duplicates of a channel, together with the other ranks. Operations in flight fail."""
    for operation in tuple(progress.operations):
        if operation.channel is channel and not operation.own:
            operation.fail(CommonError(_IN_FLIGHT))
            operation.end(common_error([{"error": "SparseAllreduceError", "text": _IN_FLIGHT}]))
    while channel.state in (PREPARING, SETTLING):
        yield False
    channel.state = FREED
    progress.channels.remove(channel)
    channel.release_memory()
    mailbox = channel.mailbox
    if mailbox is None or channel.collectives.comm is None:
        return
    # Announcements of a rank that gave up, sent to ranks that had finished, must not be received on the next communicator, to which MPI may
    # give the same context.
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
    """Release everything that is pending, waiting for other ranks for a limited time."""
    limit = perf_counter() + _EXIT_SECONDS
    progress.wait_until(lambda: not progress.recall_freed() or perf_counter() > limit)


@atexit.register
def _finish_at_exit() -> None:
    if MPI.Is_initialized() and not MPI.Is_finalized():
        finish()


@lru_cache(maxsize=1)
def _is_open_mpi() -> bool:
    return bool(MPI.Get_library_version().startswith("Open MPI"))


def _deleted(give_back: Callable[[Any], Returning], note: Callable[[Any], None] | None, _comm: MPI.Comm, _key: int, value: Any) -> None:
    if children.generation:  # in a forked process the communicator belongs to the parent, which still uses it
        return
    if note is not None:
        note(value)
    progress.freed.append(give_back(value))
