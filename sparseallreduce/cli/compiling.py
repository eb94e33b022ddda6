"""What numba compiles while a command runs: how much that is, and a line that says why the command waits."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import click
from tqdm import tqdm

from sparseallreduce.cli.terminal import wrapped
from sparseallreduce.runtime.launchers import launched_rank

__all__ = ["Compilations", "announce_compiling"]

_KEY = "sparseallreduce.compilations"
_PATIENCE = 1.0  # seconds of compiling of which nothing is said
_SAID = "compiling kernels, once on this machine; doctor --compile does it beforehand"


class Compilations:
    """Counts the functions that numba compiles, without those that it loads from its cache.

    Attributes
    ----------
    count : int
    seconds : float
        Of those that have ended.
    """

    count: int
    seconds: float

    def __init__(self, is_shown: Callable[[], bool] | None = None) -> None:
        self.count, self.seconds = 0, 0.0
        self._is_shown, self._said = is_shown, is_shown is None
        self._depth, self._began = 0, 0.0
        self._timer: threading.Timer | None = None

    def on_start(self, event: Any) -> None:
        """Note that a compilation begins; numba lets one thread compile at a time, and kernels compile what they call."""
        self._depth += 1
        if self._depth > 1:
            return
        self._began = perf_counter()
        if not self._said:
            self._timer = threading.Timer(max(0.0, _PATIENCE - self.seconds), self._say)
            self._timer.daemon = True
            self._timer.start()

    def on_end(self, event: Any) -> None:
        """Note that a compilation has ended."""
        self._depth -= 1
        if self._depth:
            return
        self.count += 1
        self.seconds += perf_counter() - self._began
        if self._timer is not None:
            self._timer.cancel()

    def _say(self) -> None:
        self._said = True
        if launched_rank() == 0 and self._is_shown is not None and self._is_shown():
            tqdm.write(wrapped(_SAID), file=sys.stderr)

    @contextlib.contextmanager
    def counted(self) -> Iterator[Compilations]:
        """Count in this block."""
        from numba.core import event

        listener = _listener(self)
        event.register("numba:compile", listener)  # type: ignore[no-untyped-call]
        try:
            yield self
        finally:
            event.unregister("numba:compile", listener)  # type: ignore[no-untyped-call]


def announce_compiling(context: click.Context, is_shown: Callable[[], bool]) -> None:
    """Have rank 0 say once, on the standard error, that kernels are compiled, if that takes more than a second and ``is_shown`` is true."""
    if "numba" in sys.modules and _KEY not in context.meta:
        context.meta[_KEY] = context.with_resource(Compilations(is_shown).counted())


def _listener(compilations: Compilations) -> Any:
    from numba.core.event import Listener

    class Counting(Listener):
        def on_start(self, event: Any) -> None:
            compilations.on_start(event)

        def on_end(self, event: Any) -> None:
            compilations.on_end(event)

    return Counting()
