"""How fast the duality gap falls beside what the rounds cost, and whether one rank alone would be faster than all side by side."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["PATIENCE", "Pace"]

#: Rounds from one primal objective to the next, at most, while the ranks go over their own samples.
PATIENCE = 8

_WINDOW = 5  # rounds, at least, over which the fall of the gap is measured
# Passes over the active samples of all ranks after which one rank alone is expected to be done, going on from where they are. On sets
# on which two ranks took 100 to 300 rounds of the squared hinge to a gap of 1e-3, or did not end, it took 2 to 8.
_ALONE = 6


class _Mark(NamedTuple):
    round: int
    cost: float
    gap: float


class Pace:
    """What gaps have come to at what cost, the same on all ranks.

    Where samples of different ranks have frequent features in common, a rank that changes its dual variables meets the whole curvature
    along those features, though the changes of another rank could balance its own: dual variables of one rank against those of another
    then take many rounds to settle, at any ``sigma``. The samples' own gaps, as a rank sees them, are small all the while. So the pace is
    that of gaps between both objectives, and the answer is one rank that goes over the active samples of all.

    Costs are non-zeros that the busiest rank goes over.
    """

    def __init__(self) -> None:
        self._cost = 0.0
        self._marks: list[_Mark] = []  # since ranks last began to work apart, or one alone
        self._apart = math.inf  # what the rest was expected to cost when the ranks no longer worked apart
        self.alone_for_pace = False  # whether one rank works alone because the ranks were slow
        self._tried = False

    def spend(self, nonzeros: float) -> None:
        """Count what the busiest rank has gone over in a round."""
        self._cost += nonzeros

    def overdue(self, number: int) -> bool:
        """Whether the gap has not been known for long, by the number of a round."""
        return number - (self._marks[-1].round if self._marks else 0) >= PATIENCE

    def mark(self, number: int, gap: float) -> None:
        """Note the gap after a round."""
        self._marks.append(_Mark(number, self._cost, gap))

    def prefers_one(self, aim: float, nonzeros: int) -> bool:
        """Whether ranks that work apart would go over more than one rank alone, until the gap is small enough.

        Parameters
        ----------
        aim : float
            The gap to reach.
        nonzeros : int
            Of the active samples of all ranks.
        """
        rest = self._rest(aim)
        if self._tried or not rest > _ALONE * nonzeros:
            return False
        self._tried = self.alone_for_pace = True
        self._apart = rest
        self._marks = self._marks[-1:]
        return True

    def prefers_all(self, aim: float, nonzeros: int) -> bool:
        """Whether one rank that works alone since :meth:`prefers_one` is no faster than all were."""
        spent = self._cost - self._marks[0].cost if self._marks else 0.0
        if not self.alone_for_pace or spent < _ALONE * nonzeros or not self._rest(aim, window=1) > self._apart:
            return False
        self.alone_for_pace = False
        self._marks = self._marks[-1:]
        return True

    def _rest(self, aim: float, window: int = _WINDOW) -> float:
        """What the rest costs if the gap goes on to fall as it has; zero where that is not known."""
        if not self._marks:
            return 0.0
        last = self._marks[-1]
        before = next((mark for mark in reversed(self._marks) if mark.round <= last.round - window), None)
        if before is None or not last.gap > aim > 0:
            return 0.0
        fall = math.log(before.gap / last.gap)
        return (last.cost - before.cost) * math.log(last.gap / aim) / fall if fall > 0 else math.inf
