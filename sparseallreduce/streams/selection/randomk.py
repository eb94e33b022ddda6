"""Random-k: places that do not depend on the values, for comparison."""

from __future__ import annotations

import math

import numpy as np

from sparseallreduce.streams.selection.base import Array, Selector, add, clear_places
from sparseallreduce.streams.stream import index_dtype

__all__ = ["RandomK"]


class RandomK(Selector):
    """k places, each set of k as probable as any other; the same ones on all ranks with the same seed.

    Parameters
    ----------
    k : int
        How many to choose, exactly.
    seed : int
        The result depends on it, on the number of selections before this one, and on the size, not on the values.

    Examples
    --------
    >>> RandomK(3, seed=1)(np.arange(8.0)).nnz
    3
    """

    passes = 3.0

    def __init__(self, k: int, seed: int = 0) -> None:
        super().__init__(k)
        self.seed = seed
        self.steps = 0

    def choose(self, accumulator: Array, gradient: Array | None, clear: bool) -> tuple[Array, Array]:
        add(accumulator, gradient)
        size = len(accumulator)
        indices = _random_set(np.random.default_rng([self.seed, self.steps]), size, self.k).astype(index_dtype(size))
        values = accumulator[indices]
        if clear:
            clear_places(accumulator, indices)
        self.steps += 1
        return indices, values


def _random_set(rng: np.random.Generator, size: int, k: int) -> Array:
    """k of ``size`` numbers, in increasing order."""
    if k > size // 2:
        left = np.ones(size, np.bool_)
        left[_random_set(rng, size, size - k)] = False
        return np.flatnonzero(left)
    drawn = np.empty(0, np.int64)
    while len(drawn) < k:  # some are drawn twice, k * k / (2 * size) of them, so a few more than that are added at once
        missing = k - len(drawn)
        more = rng.integers(0, size, missing + missing * k // size + 4 * math.isqrt(missing) + 4)
        drawn = np.union1d(drawn, more)
    kept = np.ones(len(drawn), np.bool_)
    kept[rng.permutation(len(drawn))[: len(drawn) - k]] = False
    return drawn[kept]
