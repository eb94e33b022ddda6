"""The clock of a training run: seconds by phase."""

from __future__ import annotations

import time
from collections import defaultdict

__all__ = ["Clock"]


class Clock:
    """Seconds by phase: each moment belongs to the phase that ends after it.

    >>> clock = Clock()
    >>> clock.lap("compute")
    >>> list(clock.seconds)
    ['compute']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """End a phase: the time since the last call, or since the clock was made, is its."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def part(self, phase: str, seconds: float) -> None:
        """Give a phase so many seconds of the one that goes on."""
        self.seconds[phase] += seconds
        self._last += seconds
