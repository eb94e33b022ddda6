"""Random-k: places that do not depend on the values, for comparison."""

from __future__ import annotations

import numpy as np

from sparseallreduce.streams.kernels.backend import array_module
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
        rng = np.random.default_rng([self.seed, self.steps])
        indices = np.sort(rng.choice(size, self.k, replace=False, shuffle=False)).astype(index_dtype(size))
        indices = array_module(accumulator).asarray(indices)
        values = accumulator[indices]
        if clear:
            clear_places(accumulator, indices)
        self.steps += 1
        return indices, values
