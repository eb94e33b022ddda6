"""The operations in flight on this rank, and the code that progresses them: in any call that tests or waits, or in a thread.

Every call progresses all operations in flight, so that operations may complete in any order, and in a different order on each rank.
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
    from sparseallreduce.runtime.interfaces import AnyChannel, AnyOperation

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

_SPINS = 64  # polls, of about 3 microseconds each, before a rank with a core of its own yields it
HANDSHAKE_SPINS = 256  # polls, of half a microsecond each, before the wait for a handshake counts as long
COLLECTIVE_SPINS = 16  # consecutive polls of a collective, each of which progresses it by some kilobytes
_MOST_ATTEMPTS = 5000  # attempts to release what is pending before it is postponed
_attempts = 0  # attempts since something was last released
_ALIVE = 0.2  # seconds between checks that the processes of this host are running
_FORKED = "this operation belongs to the rank from which this process was forked, and which goes on with it: wait for it there"

operations: list[AnyOperation] = []  # in flight
channels: list[AnyChannel] = []
preparing: list[AnyChannel] = []  # channels that are being prepared
freed: list[Generator[bool, None, None]] = []  # generators that release what was kept for freed communicators
_late_freed: list[Generator[bool, None, None]] = []  # postponed ones, which have waited long for other ranks
_lock = threading.RLock()  # guards the thread and the releases


def advance() -> None:
    """Progress every operation in flight on this rank as far as possible without waiting."""
    if freed:
        give_back_freed()
    for channel in tuple(preparing):
        channel.advance()
    for operation in tuple(operations):
        operation.advance()


def give_back_freed() -> None:
    """Continue to release what was kept for freed communicators. Releases that wait long for other ranks are postponed."""
    global _attempts
    if not _lock.acquire(blocking=False):
        return
    try:
        for each in tuple(freed):
            if next(each, True):
                freed.remove(each)
                _attempts = 0
        _attempts += 1
        if _attempts > _MOST_ATTEMPTS:
            _late_freed.extend(freed)
            freed.clear()
            _attempts = 0
    finally:
        _lock.release()


def recall_freed() -> bool:
    """Resume postponed releases; return True if anything is still to be released."""
    freed.extend(_late_freed)
    _late_freed.clear()
    return bool(freed)


def alone() -> bool:
    """Return True if at most one operation is in flight on this rank and no channel is being prepared."""
    return len(operations) <= 1 and not preparing


def give_up(operation: AnyOperation, error: BaseException) -> None:
    """Fail an operation because of an error that hit this rank elsewhere. If it is complete, report the error to the other ranks."""
    with operation.channel.lock:
        if not operation.ended or operation.has_unsent():
            operation.fail(error)
        elif operation.error is None:
            operation.channel.late.leave(error, operation.sequence)
        else:
            operation.channel.late.mark(error)  # the failure of this operation has announced it


def leave_to_parent() -> None:
    """End the parent's operations in a forked process, without results and without notifying other ranks."""
    for operation in operations:
        operation.error, operation.ended, operation.done = ForkError(_FORKED), True, True
    for channel in channels:
        channel.state = FREED  # so that no error in this process is sent to ranks
    for mine in (operations, channels, preparing, freed, _late_freed):
        mine.clear()
    waiting.clear()


def done_within(requests: list[MPI.Request], oversubscribed: bool, spins: int = HANDSHAKE_SPINS) -> bool:
    """Return True if all requests complete within ``spins`` polls, by default about the time that a small message takes.

    If ranks share cores, the core is offered to other processes between polls, since the awaited rank may need it.
    """
    for _ in range(spins):
        if MPI.Request.Testall(requests):
            return True
        if oversubscribed:
            os.sched_yield()
    return False


def wait_until(done: Callable[[], bool], describe: Callable[[], tuple[str, str]] | None = None, limited: bool = False) -> None:
    """Progress operations until ``done`` returns True.

    After some rounds without success, or immediately if ranks share cores, the core is offered to other processes between rounds.

    Parameters
    ----------
    done : callable
    describe : callable, optional
        Returns who waits and for what, for the warning about a long wait, as in :class:`~sparseallreduce.runtime.stalls.LongWait`.
    limited : bool
        Whether to raise WaitTimeoutError when the default timeout expires.
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
                        wait.check()
                    elif describe is not None:
                        wait = LongWait(describe, limited)
                looked = now
        rounds += 1
    if wait is not None:
        wait.over()


def _check_processes() -> None:
    """End the operations that wait for a rank whose process has ended."""
    for channel in {operation.channel for operation in tuple(operations)}:
        try:
            channel.check_processes()
        except SparseAllreduceError as error:
            error.on_all_ranks = True  # every rank finds this itself
            for operation in tuple(channel.in_flight):
                operation.end(error)


class _ProgressThread:
    """A thread that progresses operations while the program computes. It sleeps when there are none."""

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
            with contextlib.suppress(Exception):  # the error of a failed operation, which its request raises
                advance()
            with _lock:
                if not operations:
                    self._wanted.clear()
            sleep(20e-6)  # lets the program run between two rounds


progress_thread: _ProgressThread = _ProgressThread()
