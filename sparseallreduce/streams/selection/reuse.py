"""Threshold reuse: an exact threshold now and then, adjusted in between (Ok-Topk section 3.1.3)."""

from __future__ import annotations

import math

import numpy as np

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels import magnitude
from sparseallreduce.streams.selection.base import Array, Selector, clear_places
from sparseallreduce.streams.selection.exact import choose_top, kth_magnitude
from sparseallreduce.streams.selection.threshold import choose_at_least

__all__ = ["ThresholdReuse", "adjusted_threshold"]


TREND = 0.2  # weight of the latest change; half as much follows too slowly, twice as much swings where residuals have long tails


class ThresholdReuse(Selector):
    """The top k at first, then what is at least as large as the smallest of them, until the threshold is found anew.

    The distribution of gradients changes slowly, and so does the k-th magnitude. Where the number chosen drifts from k all the same,
    the threshold for the next step is adjusted by what was chosen, without another look at the vector.

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
    threshold : float or None
        What the next step will compare with; None if it will find the top k.
    steps : int
        Selections so far.
    right : float or None
        The threshold that would have chosen k in the latest step.
    trend : float
        Of the logarithm of ``right``, a step.

    Notes
    -----
    The threshold that would have chosen k (:func:`adjusted_threshold`) is multiplied by what it has lately grown by in a step, a mean
    with weights that fade: where a residual builds up, or gradients shrink, a threshold that only follows always comes too late.

    Examples
    --------
    >>> selector = ThresholdReuse(2, period=32)
    >>> [selector(np.array(gradient)).nnz for gradient in ([4.0, 1.0, 3.0], [4.0, 3.5, 3.2])]
    [2, 3]
    """

    passes = 3.0  # also when the exact threshold is found

    def __init__(self, k: int, period: int = 32, *, drift: float = 0.05, most: int | None = None) -> None:
        super().__init__(k)
        if period < 1:
            raise StreamError(f"period is the number of steps that share an exact threshold, at least 1, not {period}")
        if drift < 0:
            raise StreamError(f"drift is a share of k, at least 0, not {drift}")
        if most is not None and most < k:
            raise StreamError(f"most is the largest number to choose, at least k = {k}, not {most}")
        self.period = period
        self.drift = drift
        self.most = most
        self.threshold: float | None = None
        self.steps = 0
        self.right: float | None = None
        self.trend = 0.0

    def choose(self, accumulator: Array, gradient: Array | None, clear: bool) -> tuple[Array, Array]:
        if self.threshold is None:
            indices, above = choose_top(accumulator, gradient, self.k)
        else:
            indices, above = choose_at_least(accumulator, gradient, self.threshold, clear and self.most is None, self.k)
        values = above
        if self.most is not None and len(values) > self.most:
            places, values = choose_top(values, None, self.most)
            indices = indices[places]
        if clear and (self.threshold is None or self.most is not None):
            clear_places(accumulator, indices)
        self._learn(above)
        return indices, values

    def _learn(self, above: Array) -> None:
        """Set the threshold for the next step by all values above that of this one, or by the top k."""
        before = self.right
        if self.threshold is not None:
            self.right = adjusted_threshold(self.threshold, above, self.k, self.drift)
        else:
            self.right = magnitude.from_key(int(magnitude.keys(above).min()), above.dtype) if len(above) else math.inf
        if before is None or self.right is None or not (0 < self.right < math.inf and 0 < before < math.inf):
            self.trend = 0.0
        else:
            self.trend += TREND * (math.log(self.right / before) - self.trend)
        self.steps += 1
        self.threshold = None if self.right is None or self.steps % self.period == 0 else self.right * math.exp(self.trend)


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
