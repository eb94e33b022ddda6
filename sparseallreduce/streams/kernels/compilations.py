"""Count the kernels that are compiled while a program runs, and give notice once that takes long."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from time import perf_counter

__all__ = ["NOTICE", "REMEDY", "Compilations", "begin", "compiling_seconds", "end"]

NOTICE = "compiling kernels, once on this machine"
REMEDY = "doctor --compile does it beforehand"
_PATIENCE = 3.0  # seconds of compiling before the log says so
_log = logging.getLogger("sparseallreduce")


class Compilations:
    """Counts the kernels that numba compiles, without those that it loads from its cache.

    Parameters
    ----------
    notify : callable, optional
        Called once, by a thread of its own, when compiling has taken ``patience`` seconds. Never called by default.
    patience : float
        In seconds.
    is_wanted : callable, optional
        Whether ``notify`` may be called, asked whenever a compilation begins. Without it, always.

    Attributes
    ----------
    count : int
        Number of compilations that have ended.
    seconds : float
        Time that they took, including the time to wait for other processes that compile the same kernel.
    """

    count: int
    seconds: float

    def __init__(
        self, notify: Callable[[], object] | None = None, patience: float = 0.0, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        self.count, self.seconds = 0, 0.0
        self._notify, self._patience, self._is_wanted = notify, patience, is_wanted
        self._lock = threading.Lock()
        self._depth, self._compiling, self._began = 0, 0, 0.0
        self._timer: threading.Timer | None = None

    def begin(self, compiles: bool) -> None:
        """Note that a compilation begins, or the wait for another process; kernels compile what they call."""
        with self._lock:
            self._compiling += compiles
            self._depth += 1
            if self._depth > 1:
                return
            self._began = perf_counter()
            if self._notify is not None and self._is_wanted():
                self._timer = threading.Timer(max(0.0, self._patience - self.seconds), self._give_notice)
                self._timer.daemon = True
                with contextlib.suppress(RuntimeError):  # no thread can be started, as when the interpreter ends
                    self._timer.start()

    def end(self, compiles: bool) -> None:
        """Note that a compilation, or the wait for another process, has ended."""
        with self._lock:
            self._compiling -= compiles
            self.count += compiles and not self._compiling
            self._depth -= 1
            if self._depth:
                return
            self.seconds += perf_counter() - self._began
            if self._timer is not None:
                self._timer.cancel()

    def _give_notice(self) -> None:
        with self._lock:
            notify, self._notify = self._notify, None
        if notify is not None:
            notify()

    @contextlib.contextmanager
    def counted(self) -> Iterator[Compilations]:
        """Count what this process compiles inside the block."""
        _counting.append(self)
        try:
            yield self
        finally:
            _counting.remove(self)


def _for_the_log(patience: float) -> Compilations:
    """Return an instance that logs, for programs that have set the logger's level to INFO; for others it starts no thread."""
    return Compilations(lambda: _log.info("%s; sparseallreduce %s", NOTICE, REMEDY), patience, lambda: _log.isEnabledFor(logging.INFO))


_counting = [_for_the_log(_PATIENCE)]


def compiling_seconds() -> float:
    """Return the time that this process has spent on compilations that have ended."""
    return _counting[0].seconds


def begin(compiles: bool) -> None:
    """Report that this process begins to compile a kernel (``compiles``), or to wait for another process that does."""
    for compilations in tuple(_counting):
        compilations.begin(compiles)


def end(compiles: bool) -> None:
    """Report the end of what :func:`begin` has reported."""
    for compilations in tuple(_counting):
        compilations.end(compiles)
