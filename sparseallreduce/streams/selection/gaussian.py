"""Gaussian-k: a threshold from the mean and standard deviation of the values (Ok-Topk sections 2 and 5.4)."""

from __future__ import annotations

import math
import sys
from statistics import NormalDist

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.selection.base import Array, Selector, add, clear_places
from sparseallreduce.streams.selection.exact import kth_magnitude
from sparseallreduce.streams.selection.measures import mean_and_deviation
from sparseallreduce.streams.selection.threshold import choose_at_least

__all__ = ["Gaussian"]


class Gaussian(Selector):
    """Selects values beyond a quantile of the normal distribution with the mean and standard deviation of the values.

    Real gradients have more values near zero and a shorter tail, so this threshold selects too few. As in the comparison of Ok-Topk's
    authors, it is scaled down until more than ``least * k`` are selected. There is no upper bound on their number.

    Parameters
    ----------
    k : int
        Approximate number of values to select.
    least : float
        Fraction of k that counts as too few; 0 keeps the threshold of the distribution.
    scale : float
        Factor by which the threshold is multiplied repeatedly, between 0 and 1.

    Notes
    -----
    More than m values reach a threshold if the (m + 1)-th magnitude does. One exact selection therefore shows where the scaling stops,
    instead of a count of the vector for each factor.

    Examples
    --------
    >>> import numpy as np
    >>> Gaussian(2)(np.array([0.1, -3.0, 0.2, 0.1, 2.0, -0.1])).indices
    array([1, 4], dtype=uint32)
    """

    passes: float = 6.0  # add and measure (3), choose (1); where that falls short find how far to scale (1), and choose again (1)

    def __init__(self, k: int, *, least: float = 0.75, scale: float = 0.95) -> None:
        super().__init__(k)
        if not 0 <= least < 1:
            raise StreamError(f"least is a share of k, from 0 to below 1, not {least}")
        if not 0 < scale < 1:
            raise StreamError(f"scale makes the threshold smaller, so it is between 0 and 1, not {scale}")
        self.least = least
        self.scale = scale

    def choose(self, accumulator: Array, gradient: Array | None, clear: bool) -> tuple[Array, Array]:
        if self.k == 0:
            add(accumulator, gradient)
            return choose_at_least(accumulator[:0], None, 0.0)
        threshold = _quantile(self.k, len(accumulator), *mean_and_deviation(accumulator, gradient))
        indices, values = choose_at_least(accumulator, None, threshold, False, self.k)
        enough = math.floor(self.least * self.k) + 1
        if self.least > 0 and len(indices) < enough:
            threshold = self._scaled(threshold, kth_magnitude(accumulator, enough))
            indices, values = choose_at_least(accumulator, None, threshold, clear, self.k)
        elif clear:
            clear_places(accumulator, indices)
        return indices, values

    def _scaled(self, threshold: float, enough: float) -> float:
        """Return the threshold scaled until it is at most ``enough``, computed in a few operations."""
        if enough == 0:
            return 0.0
        if not threshold > enough:
            return threshold
        threshold = min(threshold, sys.float_info.max)  # a tail of the distribution may lie beyond all floats
        times = max(1, math.floor((math.log(threshold) - math.log(enough)) / -math.log(self.scale)))
        while self._scaled_so_often(threshold, times) > enough:
            times += 1
        return self._scaled_so_often(threshold, times)

    def _scaled_so_often(self, threshold: float, times: int) -> float:
        half = times // 2  # the whole power may underflow where the product does not
        return threshold * self.scale**half * self.scale ** (times - half)


def _quantile(k: int, size: int, mean: float, deviation: float) -> float:
    """Return the magnitude beyond which a normal distribution has a share k / size, on both sides of its mean together."""
    share = k / size
    return abs(mean) + deviation * (NormalDist().inv_cdf(1 - share / 2) if share < 1 else 0.0)
