"""Progress of the duality gap per cost, and whether one rank would be faster than all ranks side by side."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["CHECK_INTERVAL", "Pace"]

#: Largest number of rounds between two primal objectives while the ranks process their own samples.
CHECK_INTERVAL = 8

_WINDOW = 5  # smallest number of rounds over which the decrease of the gap is measured
# Expected number of passes that one rank needs over the active samples of all ranks. On sets on which two ranks took 100 to 300 rounds of
# the squared hinge to a gap of 1e-3, or did not converge, it took 2 to 8.
_ALONE = 6


class _Mark(NamedTuple):
    round: int
    cost: float
    gap: float


class Pace:
    """A record of gaps and costs, the same on all ranks, that decides whether one rank should process all active samples.

    If samples of different ranks have frequent features in common, a rank that changes its dual variables sees the whole curvature along
    those features, although changes on another rank could balance its own. Dual variables of different ranks then take many rounds to
    converge, for any ``sigma``, while the samples' own gaps, as a rank sees them, are small. So progress is measured by the gap between
    both objectives, and the remedy is one rank that processes the active samples of all ranks.

    Costs are the non-zeros that the busiest rank processes.
    """

    def __init__(self) -> None:
        self._cost = 0.0
        self._marks: list[_Mark] = []  # since the last switch between all ranks and one
        self._apart = math.inf  # expected cost to the end when the ranks stopped working separately
        self.alone_for_pace: bool = False  # whether one rank works alone because all ranks were too slow
        self._tried = False

    def spend(self, nonzeros: float) -> None:
        """Add the cost of the busiest rank in a round."""
        self._cost += nonzeros

    def overdue(self, number: int) -> bool:
        """Return True if the gap has not been measured for too long at round ``number``."""
        return number - (self._marks[-1].round if self._marks else 0) >= CHECK_INTERVAL

    def mark(self, number: int, gap: float) -> None:
        """Record the gap after a round."""
        self._marks.append(_Mark(number, self._cost, gap))

    def prefers_one(self, aim: float, nonzeros: int) -> bool:
        """Return True if ranks that work separately are expected to cost more than one rank alone until the gap is small enough.

        Parameters
        ----------
        aim : float
            The gap to reach.
        nonzeros : int
            Number of non-zeros of the active samples of all ranks.
        """
        rest = self._rest(aim)
        if self._tried or not rest > _ALONE * nonzeros:
            return False
        self._tried = self.alone_for_pace = True
        self._apart = rest
        self._marks = self._marks[-1:]
        return True

    def prefers_all(self, aim: float, nonzeros: int) -> bool:
        """Return True if one rank that has worked alone since :meth:`prefers_one` is no faster than all ranks were."""
        spent = self._cost - self._marks[0].cost if self._marks else 0.0
        if not self.alone_for_pace or spent < _ALONE * nonzeros or not self._rest(aim, window=1) > self._apart:
            return False
        self.alone_for_pace = False
        self._marks = self._marks[-1:]
        return True

    def _rest(self, aim: float, window: int = _WINDOW) -> float:
        """Return the expected cost to the end if the gap keeps decreasing at its recent rate; zero if the rate is unknown."""
        if not self._marks:
            return 0.0
        last = self._marks[-1]
        before = next((mark for mark in reversed(self._marks) if mark.round <= last.round - window), None)
        if before is None or not last.gap > aim > 0:
            return 0.0
        fall = math.log(before.gap / last.gap)
        return (last.cost - before.cost) * math.log(last.gap / aim) / fall if fall > 0 else math.inf
