"""Gaussian-k: a threshold from the mean and deviation of the values (Ok-Topk sections 2 and 5.4)."""

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
    """What is beyond the quantile of a normal distribution with the mean and deviation of the values.

    Real gradients have more values near zero and a shorter tail, so that this threshold chooses too few; it is scaled down, as
    Ok-Topk's authors do in their comparison, until more than ``least * k`` are chosen. There is no bound on how many that are.

    Parameters
    ----------
    k : int
        How many to choose, roughly.
    least : float
        The share of k that is too few; 0 leaves the threshold of the distribution as it is.
    scale : float
        By which the threshold is multiplied again and again, between 0 and 1.

    Notes
    -----
    Whether more than m values reach a threshold is whether the (m + 1)-th magnitude does. So one exact selection says where the
    scaling stops, however many times that is, instead of one count of the vector for each.

    Examples
    --------
    >>> import numpy as np
    >>> Gaussian(2)(np.array([0.1, -3.0, 0.2, 0.1, 2.0, -0.1])).indices
    array([1, 4], dtype=uint32)
    """

    passes = 6.0  # add and measure (3), choose (1); where that falls short find how far to scale (1), and choose again (1)

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
        """The threshold scaled until it is at most ``enough``, in a few operations whatever the two are."""
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
    """The magnitude beyond which a normal distribution of that mean and deviation has a share k / size, on two sides of its mean."""
    share = k / size
    return abs(mean) + deviation * (NormalDist().inv_cdf(1 - share / 2) if share < 1 else 0.0)
