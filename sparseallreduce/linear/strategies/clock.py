"""The clock of a training run, which measures seconds by phase."""

from __future__ import annotations

import time
from collections import defaultdict

__all__ = ["Clock"]


class Clock:
    """Seconds by phase. The time between two calls of :meth:`lap` belongs to the phase of the second.

    >>> clock = Clock()
    >>> clock.lap("compute")
    >>> list(clock.seconds)
    ['compute']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Add the time since the last call, or since the clock was created, to a phase."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def part(self, phase: str, seconds: float) -> None:
        """Attribute this many seconds of the current phase to another phase."""
        self.seconds[phase] += seconds
        self._last += seconds
