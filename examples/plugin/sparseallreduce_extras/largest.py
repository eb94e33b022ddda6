"""A lossy reducer: the ranks gather their k largest values, and keep the k largest of the sum."""

import numpy as np

from sparseallreduce import Reducer, SparseStream
from sparseallreduce.algorithms.allgather import allgather
from sparseallreduce.reducers import Reduced


class LargestOfAll(Reducer):
    """Sums the k largest magnitudes of each rank; the update is the k largest of that sum.

    What the sum holds beyond these is not in the update, and each rank's own part of it counts as not contributed.
    """

    name = "largestofall"

    def reduce(self, accumulator, gradient, rank, ranks):
        if gradient is not None:  # error feedback: the accumulator is a residual, which takes the gradient in first
            accumulator += gradient.to_dense() if isinstance(gradient, SparseStream) else gradient
        mine = self._largest(np.arange(self.size), accumulator)
        total = yield from allgather(mine, rank, ranks, self.reduction)
        total = self.reduction.leave(total)
        update = self._largest(np.asarray(total.indices), np.asarray(total.values))
        self.returned = SparseStream([], np.empty(0, accumulator.dtype), self.size)
        return Reduced(update, np.intersect1d(mine.indices, update.indices))

    def _largest(self, indices, values):
        """Return the k largest magnitudes, the lower index first among equals."""
        order = np.lexsort((indices, -np.abs(values)))[: self.k]
        chosen = np.sort(order)
        return SparseStream(indices[chosen], values[chosen], self.size)
