"""MSTopK: a binary search for two thresholds around the k-th magnitude (CommLib section 3.1, algorithm 1)."""

from __future__ import annotations

import math

import numpy as np

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels import magnitude
from sparseallreduce.streams.kernels import selection as loops
from sparseallreduce.streams.kernels.backend import cuda_kernels, on_device
from sparseallreduce.streams.kernels.searches import thresholds
from sparseallreduce.streams.selection.base import Array, Selector, clear_places
from sparseallreduce.streams.selection.exact import bracket
from sparseallreduce.streams.selection.measures import mean_and_largest
from sparseallreduce.streams.stream import index_dtype

__all__ = ["MSTopK"]


class MSTopK(Selector):
    """Selects all values above the upper of two thresholds, and a random run of those between the two, together k.

    The thresholds result from a binary search between the mean magnitude and the largest one.

    Parameters
    ----------
    k : int
        Exact number of values to select.
    searches : int
        Steps of the binary search, N in the paper, which uses 30.
    seed : int
        Seed of the random run. The result depends on it, on the number of previous selections, and on the values.

    Notes
    -----
    The paper counts the whole vector in each search. Here the vector is read once, to copy slightly more than k values as estimated from a
    sample. The magnitude of rank k + 1 among those shows for any threshold whether it selects more than k, with the same result. Non-finite
    values are not part of mean and maximum, and are above every threshold.

    Examples
    --------
    >>> MSTopK(2)(np.array([0.1, -3.0, 0.2, 0.1, 2.0, -0.1])).indices
    array([1, 4], dtype=uint32)
    """

    passes: float = 4.0  # add and measure (3), copy the largest (1)

    def __init__(self, k: int, searches: int = 30, *, seed: int = 0) -> None:
        super().__init__(k)
        if searches < 1:
            raise StreamError(f"searches is the number of thresholds to try, at least 1, not {searches}")
        self.searches = searches
        self.seed = seed
        self.steps: int = 0

    def choose(self, accumulator: Array, gradient: Array | None, clear: bool) -> tuple[Array, Array]:
        mean, largest = mean_and_largest(accumulator, gradient)
        if on_device(accumulator):
            return self._by_histograms(accumulator, (mean, largest), clear)
        indices, values, floor = self._largest(accumulator)
        upper, lower = thresholds(_magnitude(values, self.k + 1), mean, largest, self.searches, accumulator.dtype)
        if lower < floor:  # the searches stopped further away than the sample
            indices, values, _ = loops.select(accumulator, None, lower - 1, indices.dtype)
        places = self._between(magnitude.keys(values), upper, lower)
        indices, values = indices[places], values[places]
        if clear:
            clear_places(accumulator, indices)
        self.steps += 1
        return indices, values

    def _by_histograms(self, accumulator: Array, measures: tuple[float, float], clear: bool) -> tuple[Array, Array]:
        """Select on a GPU, where histograms of the whole vector replace the sample and the copy."""
        seeds, dtype = (self.seed, self.steps), index_dtype(len(accumulator))
        indices = cuda_kernels().mstopk_places(accumulator, self.k, measures, dtype, self.searches, seeds)
        values = accumulator[indices]
        if clear:
            clear_places(accumulator, indices)
        self.steps += 1
        return indices, values

    def _largest(self, accumulator: Array) -> tuple[Array, Array, int]:
        """Return more than k values (or all), and the key that they all reach."""
        size = len(accumulator)
        floor, _ = bracket(accumulator, None, self.k) if self.k else (magnitude.last(accumulator), 0)
        indices, values, _ = loops.select(accumulator, None, floor - 1, index_dtype(size), expected=self.k + self.k // 2)
        if len(indices) <= self.k < size and floor > 0:  # the sample was wrong
            floor = 0
            indices, values, _ = loops.select(accumulator, None, -1, index_dtype(size), expected=size)
        return indices, values, floor

    def _between(self, keys: Array, upper: int, lower: int) -> Array:
        """Return the positions from ``upper`` on, and a run of those from ``lower`` up to it (lines 25 to 28)."""
        above = np.flatnonzero(keys >= upper)
        inside = np.flatnonzero((keys < upper) & (keys >= lower))
        wanted = self.k - len(above)
        start = int(np.random.default_rng([self.seed, self.steps]).integers(0, len(inside) - wanted + 1))
        return np.sort(np.concatenate([above, inside[start : start + wanted]]))


def _magnitude(values: Array, rank: int) -> float:
    """Return the magnitude of a rank, from 1; infinity for NaN, and -infinity if there are fewer values."""
    if len(values) < rank:
        return -math.inf
    found = magnitude.from_key(loops.kth(values, rank)[0], values.dtype)
    return math.inf if math.isnan(found) else found
