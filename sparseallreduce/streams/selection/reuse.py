"""Threshold reuse: an exact threshold now and then, adjusted in between (Ok-Topk section 3.1.3)."""

from __future__ import annotations

import math

import numpy as np

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels import magnitude
from sparseallreduce.streams.selection.base import Array, Selector, clear_places
from sparseallreduce.streams.selection.exact import choose_top, kth_magnitude
from sparseallreduce.streams.selection.threshold import choose_at_least

__all__ = ["ThresholdForecast", "ThresholdReuse", "adjusted_threshold"]


TREND = 0.2  # weight of the latest change; half as much follows too slowly, twice as much swings where residuals have long tails


class ThresholdReuse(Selector):
    """The top k at first, then what is at least as large as the smallest of them, until the threshold is found anew.

    The distribution of gradients changes slowly, and so does the k-th magnitude. Where the number chosen drifts from k all the same,
    the threshold for the next step is adjusted by what was chosen (:class:`ThresholdForecast`), without another look at the vector.

    Parameters
    ----------
    k : int
        How many to choose, about.
    period : int
        Steps from one exact threshold to the next, the paper's tau'; 1 always chooses the top k.
    drift : float
        Share of k by which the number chosen may differ before the threshold is adjusted.
    most : int, optional
        Where more are above the threshold, only so many of largest magnitude are chosen.

    Attributes
    ----------
    forecast : ThresholdForecast
        What the next step will compare with.

    Examples
    --------
    >>> selector = ThresholdReuse(2, period=32)
    >>> [selector(np.array(gradient)).nnz for gradient in ([4.0, 1.0, 3.0], [4.0, 3.5, 3.2], [4.0, 3.5, 3.2])]
    [2, 3, 2]
    """

    passes = 3.0  # also when the exact threshold is found

    def __init__(self, k: int, period: int = 32, *, drift: float = 0.05, most: int | None = None) -> None:
        super().__init__(k)
        if most is not None and most < k:
            raise StreamError(f"most is the largest number to choose, at least k = {k}, not {most}")
        self.forecast = ThresholdForecast(k, period, drift)
        self.most = most

    def choose(self, accumulator: Array, gradient: Array | None, clear: bool) -> tuple[Array, Array]:
        threshold = self.forecast.threshold
        if threshold is None:
            indices, all_values = choose_top(accumulator, gradient, self.k)
        else:
            indices, all_values = choose_at_least(accumulator, gradient, threshold, clear and self.most is None, self.k)
        values = all_values
        if self.most is not None and len(values) > self.most:
            places, values = choose_top(values, None, self.most)
            indices = indices[places]
        if clear and (threshold is None or self.most is not None):
            clear_places(accumulator, indices)
        self.forecast.observe(all_values)
        return indices, values


class ThresholdForecast:
    """Thresholds that choose about k of a slowly changing sequence of vectors, each told by what the one before chose.

    Parameters
    ----------
    k : int
    period : int
        Steps from one exact threshold to the next.
    drift : float
        Share of k by which the number chosen may differ before the threshold is adjusted.

    Attributes
    ----------
    threshold : float or None
        To choose with; None where the k largest are to be found instead.
    steps : int
        Choices so far.

    Notes
    -----
    The threshold that would have chosen k (:func:`adjusted_threshold`) is multiplied by what it has lately grown by in a step, a mean
    with weights that fade: where a residual builds up, or gradients shrink, a threshold that only follows always comes too late.
    """

    def __init__(self, k: int, period: int = 32, drift: float = 0.05) -> None:
        if period < 1:
            raise StreamError(f"period is the number of steps that share an exact threshold, at least 1, not {period}")
        self.k = k
        self.period = period
        self.drift = drift
        self.threshold: float | None = None
        self.steps = 0
        self._right: float | None = None  # what would have chosen k
        self._trend = 0.0  # of its logarithm

    def observe(self, values: Array) -> None:
        """Note what the threshold chose: all values of at least its magnitude, or the k largest where there was none."""
        if self.threshold is not None:
            right = adjusted_threshold(self.threshold, values, self.k, self.drift)
        else:
            right = magnitude.from_key(int(magnitude.keys(values).min()), values.dtype) if len(values) else math.inf
        self._follow(right)
        self.steps += 1
        self.threshold = None if right is None or self.steps % self.period == 0 else right * math.exp(self._trend)

    def _follow(self, right: float | None) -> None:
        if right is None or self._right is None or not (0 < right < math.inf and 0 < self._right < math.inf):
            self._trend = 0.0
        else:
            self._trend += TREND * (math.log(right / self._right) - self._trend)
        self._right = right


def adjusted_threshold(threshold: float, values: Array, k: int, drift: float = 0.05) -> float | None:
    """A threshold that would have chosen about k values, judged by those that ``threshold`` chose.

    Parameters
    ----------
    threshold : float
    values : ndarray
        All that are at least as large.
    k : int
    drift : float
        Share of k by which their number may differ before the threshold is adjusted.

    Returns
    -------
    float or None
        The threshold itself within the drift; if there are more values, exactly the k-th magnitude; if there are fewer, but half of k,
        one extrapolated by Hill's estimate of the tail: magnitudes above t are as probable as t ** -a, with 1 / a the mean of
        ``log(magnitude / t)``. None if there are fewer still, which tell too little.
    """
    count = len(values)
    if abs(count - k) <= drift * k:
        return threshold
    if count > k:
        return kth_magnitude(values, k) if k else math.inf
    if count < k / 2 or not 0 < threshold < math.inf:
        return None
    finite = values[np.isfinite(values)]
    if len(finite) == 0:
        return None
    mean_log = float(np.log(np.abs(finite) / finite.dtype.type(threshold)).mean(dtype=np.float64))
    lowered: float = threshold * (count / k) ** mean_log
    return lowered
