"""How many steps share a threshold: found from what its evaluation costs, and from how fast a threshold that is reused goes wrong.

Ok-Topk section 3.1.3 evaluates thresholds every tau' steps, 32 or 128 by the model; figure 6 shows by how many values a reused one is off.
Take a step for 1, an evaluation for c more, and let a threshold of age a be off by a share b + s a of the k values, which is so much of the
step's work that is lost. With tau' steps from one evaluation to the next, a step costs

    1 + c / tau' + (b (tau' - 1) + s tau' (tau' - 1) / 2) / tau'

in the mean, which is least at tau' = sqrt(2 (c - b) / s), like the interval of checkpoints beside failures (Young, 1974). Where b is c or
more, each step had better evaluate.

The line is that of least squares. How many values pass a threshold is a matter of chance, too: so s is taken for no more than is certain,
two standard errors less than what comes out. Where a threshold does not get worse that can be told from chance, the period grows, and with
it what can be told.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

from sparseallreduce.errors import AlgorithmError

__all__ = ["AUTO", "FIRST", "LEAST", "MOST", "Drift", "checked_period"]

AUTO = "auto"
LEAST, FIRST, MOST = 4, 32, 512  # steps
_GROWTH = 2  # times: how much longer or shorter than the one before a period may be
_CERTAIN = 2.0  # standard errors
_KEPT = 0.5  # of the weight of what was seen, from one evaluation to the next


class Drift(NamedTuple):
    """The current period, and what was seen of thresholds that were reused: sums for a line through shares by ages.

    >>> drift = Drift()
    >>> for age in range(1, 32):
    ...     drift = drift.seen(0.001 * age)
    >>> drift.evaluated(0.5).period, drift.evaluated(0.008).period, drift.evaluated(50.0).period
    (31, 16, 64)
    """

    period: int = FIRST
    age: int = 0  # steps since the latest evaluation
    number: float = 0.0  # of them
    ages: float = 0.0
    squares: float = 0.0  # of ages
    shares: float = 0.0
    deviations: float = 0.0  # squares of shares
    products: float = 0.0

    @classmethod
    def of(cls, saved: Any) -> Drift:
        """From a state, where it may have become a list."""
        period, age, *sums = saved
        return cls(int(period), int(age), *map(float, sums))

    @property
    def is_due(self) -> bool:
        """Whether the next step evaluates."""
        return self.age == 0 or self.age >= self.period

    def seen(self, share: float) -> Drift:
        """A step has reused a threshold, which was off by this share of k."""
        share = min(max(share, 0.0), 1.0)
        age = max(self.age, 1)
        return Drift(
            self.period,
            age + 1,
            self.number + 1,
            self.ages + age,
            self.squares + age * age,
            self.shares + share,
            self.deviations + share * share,
            self.products + age * share,
        )

    def evaluated(self, cost: float) -> Drift:
        """A step has evaluated the threshold, for ``cost`` times what a step takes besides; the next period follows."""
        wanted = self._wanted(cost) if self.number else float(self.period)
        lowest, highest = max(LEAST, self.period // _GROWTH), min(MOST, self.period * _GROWTH)
        period = highest if wanted >= highest else max(lowest, int(wanted))
        return Drift(period, 1, *(_KEPT * each for each in self[2:]))

    def _wanted(self, cost: float) -> float:
        slope, error = self._slope()
        start = (self.shares - slope * self.ages) / self.number
        if slope < 0:
            slope, start = 0.0, self.shares / self.number
        elif start < 0:
            slope, start = self.products / self.squares, 0.0
        if cost <= start:
            return 1.0
        slope -= _CERTAIN * error
        return math.inf if slope <= 0 else math.sqrt(2 * (cost - start) / slope)

    def _slope(self) -> tuple[float, float]:
        """That of the line, and its standard error."""
        spread = self.number * self.squares - self.ages * self.ages
        if spread <= 0 or self.number <= 2:
            return 0.0, 0.0
        slope = (self.number * self.products - self.ages * self.shares) / spread
        unexplained = self.number * self.deviations - self.shares * self.shares - slope * slope * spread
        return slope, math.sqrt(max(unexplained, 0.0) / (spread * (self.number - 2)))


def checked_period(option: str, value: Any) -> int | str:
    """A number of steps, or "auto".

    Raises
    ------
    AlgorithmError
        If it is below 1, or another text.
    """
    if isinstance(value, str):
        if value != AUTO:
            raise AlgorithmError(f"{option} is a number of steps, or {AUTO!r}, not {value!r}")
        return value
    if operator.index(value) < 1:
        raise AlgorithmError(f"{option} is at least 1, not {value}")
    return operator.index(value)
