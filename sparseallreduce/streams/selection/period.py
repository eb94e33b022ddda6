"""Choose how many steps share a threshold, from the cost of evaluating it and from how fast a reused threshold becomes inaccurate.

Ok-Topk section 3.1.3 evaluates thresholds every tau' steps (32 or 128, by model); its figure 6 shows the error in the number of values of a
reused one. Let a step cost 1, an evaluation c more, and let a threshold of age a be off by a share b + s a of the k values, which wastes
that share of the step's work. With tau' steps from one evaluation to the next, a step costs on average

    1 + c / tau' + (b (tau' - 1) + s tau' (tau' - 1) / 2) / tau'

which is least at tau' = sqrt(2 (c - b) / s), like the interval between checkpoints for a failure rate (Young, 1974). If b is at least c,
every step should evaluate.

The line is fitted by least squares. The number of values that pass a threshold also varies randomly, so s is reduced by two standard
errors. If no growth of the error is significant, the period grows, and with it the precision of the fit.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

from sparseallreduce.errors import AlgorithmError

__all__ = ["AUTO", "FIRST", "LEAST", "MOST", "Drift", "checked_period"]

AUTO = "auto"
LEAST, FIRST, MOST = 4, 32, 512  # steps
_GROWTH = 2  # largest ratio of successive periods
_CERTAIN = 2.0  # standard errors
_KEPT = 0.5  # factor of the weights of observations at each evaluation


class Drift(NamedTuple):
    """The current period, and the observed errors of reused thresholds as sums for a linear fit of shares by age.

    Examples
    --------
    >>> drift = Drift()
    >>> for age in range(1, 32):
    ...     drift = drift.seen(0.001 * age)
    >>> drift.evaluated(0.5).period, drift.evaluated(0.008).period, drift.evaluated(50.0).period
    (31, 16, 64)
    """

    period: int = FIRST
    age: int = 0  # steps since the latest evaluation
    number: float = 0.0  # weighted number of observations
    ages: float = 0.0
    squares: float = 0.0  # squares of ages
    shares: float = 0.0
    deviations: float = 0.0  # squares of shares
    products: float = 0.0

    @classmethod
    def of(cls, saved: Any) -> Drift:
        """Return the drift stored in a state, in which it may have become a list."""
        period, age, *sums = saved
        return cls(int(period), int(age), *map(float, sums))

    @property
    def is_due(self) -> bool:
        """True if the next step evaluates the threshold."""
        return self.age == 0 or self.age >= self.period

    def seen(self, share: float) -> Drift:
        """Return the drift after a step that reused a threshold, which was off by this share of k."""
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
        """Return the drift, with the next period, after an evaluation that cost ``cost`` times the rest of a step."""
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
        """Return the slope of the fitted line, and its standard error."""
        spread = self.number * self.squares - self.ages * self.ages
        if spread <= 0 or self.number <= 2:
            return 0.0, 0.0
        slope = (self.number * self.products - self.ages * self.shares) / spread
        unexplained = self.number * self.deviations - self.shares * self.shares - slope * slope * spread
        return slope, math.sqrt(max(unexplained, 0.0) / (spread * (self.number - 2)))


def checked_period(option: str, value: Any) -> int | str:
    """Return a checked number of steps, or "auto".

    Raises
    ------
    AlgorithmError
        If it is below 1, or another string.
    """
    if isinstance(value, str):
        if value != AUTO:
            raise AlgorithmError(f"{option} is a number of steps, or {AUTO!r}, not {value!r}")
        return value
    if operator.index(value) < 1:
        raise AlgorithmError(f"{option} is at least 1, not {value}")
    return operator.index(value)
