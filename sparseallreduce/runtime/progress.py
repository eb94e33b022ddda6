"""What is in flight on this rank, and who moves it on: whoever tests or waits for an operation, or a thread.

Every operation in flight is moved on whenever one of them is, so that operations may be completed in any order, a different one on each
rank.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator
from time import perf_counter, sleep
from typing import TYPE_CHECKING

from mpi4py import MPI

from sparseallreduce.errors import ForkError, SparseAllreduceError
from sparseallreduce.runtime.stalls import LongWait
from sparseallreduce.runtime.states import FREED
from sparseallreduce.runtime.work import waiting

if TYPE_CHECKING:
    from sparseallreduce.runtime.channel import Channel
    from sparseallreduce.runtime.operation import Operation

__all__ = [
    "COLLECTIVE_SPINS",
    "HANDSHAKE_SPINS",
    "advance",
    "alone",
    "channels",
    "done_within",
    "freed",
    "give_back_freed",
    "give_up",
    "leave_to_parent",
    "operations",
    "preparing",
    "progress_thread",
    "recall_freed",
    "wait_until",
]

_SPINS = 64  # polls, of about 3 microseconds each, before a rank with a core of its own offers it to other programs
HANDSHAKE_SPINS = 256  # likewise, of half a microsecond, before a handshake that should be over at once is taken for a long one
COLLECTIVE_SPINS = 16  # polls in a row of a collective, which moves on in each by a fragment of some kilobytes
_PATIENCE = 5000  # looks at what is to be given back, after which it is left for later
_looks = 0  # since the last time that something was given back
_ALIVE = 0.2  # seconds between two looks whether the processes of this host are there
_FORKED = "this operation belongs to the rank from which this process was forked, and which goes on with it: wait for it there"

operations: list[Operation] = []  # in flight
channels: list[Channel] = []
preparing: list[Channel] = []  # those of them that are being prepared
freed: list[Generator[bool, None, None]] = []  # each gives back what was kept for a communicator that the user has freed
_late_freed: list[Generator[bool, None, None]] = []  # those of them for which other ranks have been waited for long
_lock = threading.RLock()  # of the thread, and of what is given back


def advance() -> None:
    """Move every operation in flight on this rank as far as it goes now."""
    if freed:
        give_back_freed()
    for channel in tuple(preparing):
        channel.advance()
    for operation in tuple(operations):
        operation.advance()


def give_back_freed() -> None:
    """Go on with giving back what was kept for freed communicators. What takes long for want of other ranks is left for later."""
    global _looks
    if not _lock.acquire(blocking=False):
        return
    try:
        for each in tuple(freed):
            if next(each, True):
                freed.remove(each)
                _looks = 0
        _looks += 1
        if _looks > _PATIENCE:
            _late_freed.extend(freed)
            freed.clear()
            _looks = 0
    finally:
        _lock.release()


def recall_freed() -> bool:
    """Return whether anything is still to be given back; what was left for later goes on."""
    freed.extend(_late_freed)
    _late_freed.clear()
    return bool(freed)


def alone() -> bool:
    """Whether there is at most one operation in flight on this rank, and nothing being prepared."""
    return len(operations) <= 1 and not preparing


def give_up(operation: Operation, error: BaseException) -> None:
    """Let an operation fail because of what has hit this rank outside of it. If it is complete, tell the other ranks of the error."""
    with operation.channel.lock:
        if not operation.ended or operation.owes():
            operation.fail(error)
        elif operation.error is None:
            operation.channel.late.leave(error, operation.sequence)
        else:
            operation.channel.late.mark(error)  # that this operation has failed


def leave_to_parent() -> None:
    """End, in a forked process, what its parent has in flight: here without a result, and without a word to other ranks."""
    for operation in operations:
        operation.error, operation.ended, operation.done = ForkError(_FORKED), True, True
    for channel in channels:
        channel.state = FREED  # so that no error here is told to ranks
    for mine in (operations, channels, preparing, freed, _late_freed):
        mine.clear()
    waiting.clear()


def done_within(requests: list[MPI.Request], oversubscribed: bool, spins: int = HANDSHAKE_SPINS) -> bool:
    """Whether the requests are done, or within so many looks, by default the time that a small message takes.

    Where ranks share cores, what is waited for may have to be done by one that waits for this core.
    """
    for _ in range(spins):
        if MPI.Request.Testall(requests):
            return True
        if oversubscribed:
            os.sched_yield()
    return False


def wait_until(done: Callable[[], bool], said: Callable[[], tuple[str, str]] | None = None, limited: bool = False) -> None:
    """Move operations on until ``done``. Between two rounds, leave the core to others after some, or at once where ranks share cores.

    Parameters
    ----------
    done : callable
    said : callable, optional
        Returns who waits, and in what, for a warning if this takes long, as of :class:`~sparseallreduce.runtime.stalls.LongWait`.
    limited : bool
        Whether to raise WaitTimeoutError when the default timeout is over.
    """
    rounds, looked = 0, 0.0
    wait: LongWait | None = None
    while not done():
        advance()
        if rounds >= _SPINS or any(channel.oversubscribed for channel in channels):
            os.sched_yield()
            now = perf_counter()
            if now > looked + _ALIVE:
                if looked:
                    _check_processes()
                    if wait is not None:
                        wait.look()
                    elif said is not None:
                        wait = LongWait(said, limited)
                looked = now
        rounds += 1
    if wait is not None:
        wait.over()


def _check_processes() -> None:
    """End the operations for which a rank that has ended would be waited for."""
    for channel in {operation.channel for operation in tuple(operations)}:
        try:
            channel.check_processes()
        except SparseAllreduceError as error:
            error.on_all_ranks = True  # as they all look for themselves
            for operation in tuple(channel.in_flight):
                operation.end(error)


class _ProgressThread:
    """A thread that moves operations on while the program computes; it runs while there are any, and starts again when asked."""

    def __init__(self) -> None:
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self) -> None:
        with _lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="sparseallreduce-progress", daemon=True)
                self._thread.start()
            self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            with contextlib.suppress(Exception):  # that of an operation which has failed of it, and whose request raises it
                advance()
            with _lock:
                if not operations:
                    self._wanted.clear()
            sleep(20e-6)  # leaves the interpreter to the program between two rounds


progress_thread = _ProgressThread()
