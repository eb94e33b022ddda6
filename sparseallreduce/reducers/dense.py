"""The dense sum as a reducer, for comparison with the lossy ones."""

from __future__ import annotations

from sparseallreduce.algorithms.steps import DenseAllreduce
from sparseallreduce.reducers.base import Array, Reduced, Reducer, Reducing
from sparseallreduce.streams import memory
from sparseallreduce.streams.selection.base import add
from sparseallreduce.streams.stream import SparseStream

__all__ = ["Dense"]


class Dense(Reducer):
    """A reducer that sums all values by MPI's own allreduce; ``k`` is the size."""

    name = "dense"

    def reduce(self, accumulator: Array, gradient: Array | None, rank: int, ranks: int) -> Reducing:
        add(accumulator, gradient)
        own = SparseStream._dense_form(memory.copy(accumulator), self.size, owned=True)
        total = yield DenseAllreduce(own, self.reduction.op)
        return Reduced(self.reduction.leave(total), slice(None))
