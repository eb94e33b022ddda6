"""Warn about long waits, and read the environment variables that limit them.

A waiting rank reads the clock only once its wait has become long; it then also checks that processes of the host are running. A blocking
MPI call cannot do that: a thread reports it, which sleeps until there may be something to report.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timedelta
from functools import lru_cache
from time import perf_counter, sleep
from typing import Any, TypeVar

from sparseallreduce.errors import WaitTimeoutError
from sparseallreduce.streams.kernels.compilations import compiling_seconds

__all__ = [
    "STALL_VARIABLE",
    "TIMEOUT_VARIABLE",
    "LongWait",
    "activity",
    "blocked",
    "collective",
    "default_timeout",
    "stall_seconds",
]

STALL_VARIABLE, TIMEOUT_VARIABLE = "SPARSEALLREDUCE_STALL_SECONDS", "SPARSEALLREDUCE_TIMEOUT"

F = TypeVar("F", bound=Callable[..., Any])

_STALL_SECONDS = 60.0
_CHECK_SECONDS = 0.2  # between two reads of the clock in a long wait
_LONGEST_NAP = 5.0  # longest sleep of the thread between two checks of blocking calls

_log = logging.getLogger("sparseallreduce")
_activities: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("sparseallreduce activities", default=())


def stall_seconds() -> float:
    """Return the seconds before the first warning, infinity for no warnings. An invalid setting is logged once and ignored."""
    return _stall_seconds(os.environ.get(STALL_VARIABLE, "").strip())


def default_timeout() -> float | None:
    """Return the default timeout in seconds, None for no limit. An invalid setting is logged once and ignored."""
    return _default_timeout(os.environ.get(TIMEOUT_VARIABLE, "").strip())


@lru_cache(maxsize=16)
def _stall_seconds(text: str) -> float:
    if not text:
        return _STALL_SECONDS
    seconds = _number(text)
    if 0 <= seconds < math.inf:
        return seconds or math.inf
    _log.warning("%s must be a number of seconds, 0 for no warnings, not %r: %g is taken", STALL_VARIABLE, text, _STALL_SECONDS)
    return _STALL_SECONDS


@lru_cache(maxsize=16)
def _default_timeout(text: str) -> float | None:
    if not text:
        return None
    seconds = _number(text)
    if 0 < seconds < math.inf:
        return seconds
    _log.warning("%s must be a positive number of seconds, not %r: it is ignored, and ranks wait indefinitely", TIMEOUT_VARIABLE, text)
    return None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


@contextmanager
def activity(name: str, hint: str = "") -> Iterator[None]:
    """Name what this rank is doing, for warnings of waits inside the block; ``hint`` is appended to them."""
    token = _activities.set((*_activities.get(), (name, hint)))
    try:
        yield
    finally:
        _activities.reset(token)


def collective(name: str) -> Callable[[F], F]:
    """Return a decorator that makes a call an :func:`activity` whose hint says that all ranks must call it."""
    hint = f"{name} is collective: every rank of the communicator must call it"
    return activity(name, f"{hint}; predict is local")


class LongWait:
    """A wait of this rank that may become long.

    Parameters
    ----------
    describe : callable
        Returns two texts: who waits, and in what and for whom, as in ``("rank 0 of 2", "an allreduce: rank 1 has not entered it")``.
    limited : bool
        Whether :meth:`check` raises when the default timeout expires.
    verb : str
        What the rank does, for the warning.
    """

    def __init__(self, describe: Callable[[], tuple[str, str]], limited: bool = False, verb: str = "waited") -> None:
        self._describe, self._limited, self._verb = describe, limited, verb
        self._activity = (*_activities.get(), ("", ""))[0]  # the outermost is the call of the user
        self._begin, self._compiling = perf_counter(), compiling_seconds()
        self._next_check = self._begin + _CHECK_SECONDS
        self._next = 0.0  # seconds of waiting at which to warn next; 0 until they are read
        self._reported = ""

    def check(self) -> None:
        """Warn if a warning is due. Call this periodically while waiting; it costs a read of the clock.

        Raises
        ------
        WaitTimeoutError
            If the wait is limited and the default timeout has expired.
        """
        now = perf_counter()
        if now < self._next_check:
            return
        self._next_check, waited = now + _CHECK_SECONDS, now - self._begin
        self.warn_after(waited)
        timeout = default_timeout() if self._limited else None
        if timeout is not None and waited > timeout:
            raise WaitTimeoutError(f"not done within {timeout:g} s: {self._texts()[1]}")

    def over(self) -> None:
        """Log that the wait has ended, if it was reported."""
        if self._reported:
            reported, self._reported = self._reported, ""
            _quietly(lambda: _log.info("%s after %s", reported, _shown(perf_counter() - self._begin)))

    def warn_after(self, waited: float) -> None:
        """Warn if a warning is due after ``waited`` seconds, of which those spent on compiling kernels do not count."""
        waited -= compiling_seconds() - self._compiling
        due = self._next or stall_seconds()
        if waited < due:
            return
        while due <= waited:
            due *= 2
        self._next = due
        _quietly(lambda: self._warn(waited))

    @property
    def waited(self) -> float:
        """The seconds since the wait began."""
        return perf_counter() - self._begin

    def _warn(self, waited: float) -> None:
        who, where = self._texts()
        name, hint = self._activity
        since = (datetime.now() - timedelta(seconds=waited)).strftime("%H:%M:%S")
        self._reported = f"{who} went on in {name or where.partition(':')[0]}"
        text = f"{who} has {self._verb} for {_shown(waited)}, since {since}, in {f'{name}, in ' if name else ''}{where}"
        _log.warning("%s", " ".join(f"{text}. {hint}".split()) if hint else text)

    def _texts(self) -> tuple[str, str]:
        try:
            return self._describe()
        except Exception:  # MPI may have been finalised; a warning must not make a wait fail
            return "a rank", "a call of the library"


class blocked:
    """A context manager around a blocking MPI call, during which this rank cannot read the clock.

    Parameters
    ----------
    rank, ranks : int
    what : str
        What this rank does, and for whom it waits if known.
    """

    __slots__ = ("_rank", "_ranks", "_what")

    def __init__(self, rank: int, ranks: int, what: str) -> None:
        self._rank, self._ranks, self._what = rank, ranks, what

    def __enter__(self) -> None:
        _watch.waits[self] = LongWait(self._describe)
        _watch.start()

    def __exit__(self, *_: object) -> None:
        wait = _watch.waits.pop(self, None)
        if wait is not None:
            wait.over()

    def _describe(self) -> tuple[str, str]:
        return f"rank {self._rank} of {self._ranks}", self._what


class _Watch:
    """A thread that reports calls that block inside MPI."""

    def __init__(self) -> None:
        self.waits: dict[blocked, LongWait] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if it is not running; in a forked process it has to be started again."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="sparseallreduce-stalls", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            sleep(min(_LONGEST_NAP, max(_CHECK_SECONDS, stall_seconds() / 8)))
            for wait in tuple(self.waits.values()):
                wait.warn_after(wait.waited)


_watch = _Watch()


def _shown(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _quietly(action: Callable[[], object]) -> None:
    """Call a function that logs, and ignore exceptions of the user's handlers or filters."""
    try:
        action()
    except Exception:
        logging.getLogger(__name__).debug("a warning could not be logged", exc_info=True)
