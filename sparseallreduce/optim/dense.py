"""The dense sum as a reducer: what the lossy ones are compared with."""

from __future__ import annotations

import numpy as np

from sparseallreduce.algorithms.dense import dense
from sparseallreduce.reducers.base import Array, Reduced, Reducer, Reducing
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["Dense"]


class Dense(Reducer):
    """The sum of all values, by MPI's own allreduce; ``k`` is the size."""

    name = "dense"

    def reduce(self, accumulator: Array, gradient: Array | None, rank: int, ranks: int) -> Reducing:
        if gradient is not None:
            np.add(accumulator, gradient, out=accumulator)
        entered = self.reduction.enter(SparseStream._dense_form(accumulator.copy(), self.size))
        total = yield from dense(entered, rank, ranks, self.reduction)
        return Reduced(self.reduction.leave(total), np.arange(self.size, dtype=index_dtype(self.size)))
