"""TopkA: every rank's top k, gathered on all ranks (Ok-Topk section 2.2, gTop-k algorithm 1)."""

from __future__ import annotations

from sparseallreduce.algorithms.exchange import gather_parts
from sparseallreduce.reducers.base import Array, Reduced, Reducer, Reducing
from sparseallreduce.streams.selection import ExactTopK

__all__ = ["TopkA"]


class TopkA(Reducer):
    """The sum of the ranks' top k by an allgather: 2 k (P - 1) words a rank, and up to k P entries in the result."""

    name = "topka"

    def reduce(self, accumulator: Array, gradient: Array | None, rank: int, ranks: int) -> Reducing:
        chosen = ExactTopK(self.k)(accumulator, gradient)
        streams = yield from gather_parts(self.reduction.enter(chosen), rank, ranks)
        return Reduced(self.reduction.leave(self.reduction.many(streams)), chosen.indices)
