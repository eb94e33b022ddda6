"""Random-k: positions that do not depend on the values, for comparison."""

from __future__ import annotations

import numpy as np

from sparseallreduce.streams.kernels.backend import array_module
from sparseallreduce.streams.selection.base import Array, Selector, add, clear_places
from sparseallreduce.streams.stream import index_dtype

__all__ = ["RandomK"]


class RandomK(Selector):
    """Selects k random positions, every set with equal probability; the same on all ranks with the same seed.

    Parameters
    ----------
    k : int
        Exact number of values to select.
    seed : int
        Seed. The result depends on it, on the number of previous selections, and on the size, but not on the values.

    Examples
    --------
    >>> RandomK(3, seed=1)(np.arange(8.0)).nnz
    3
    """

    passes: float = 3.0

    def __init__(self, k: int, seed: int = 0) -> None:
        super().__init__(k)
        self.seed = seed
        self.steps: int = 0

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
