"""DSAR_Split_AG: dynamic sparse allreduce, in which the sums of the parts are dense (thesis section 3.3.4)."""

from __future__ import annotations

from itertools import pairwise

from sparseallreduce.algorithms.boundaries import Cutter, bounds_of, is_uneven
from sparseallreduce.algorithms.exchange import exchange_parts
from sparseallreduce.algorithms.steps import DenseAllgather, Quantise, Schedule
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["DenseBlock", "dsar_split_allgather"]


def dsar_split_allgather(stream: SparseStream, rank: int, ranks: int, reduction: Reduction, cut: Cutter | None = None) -> Schedule:
    """Split the index space as SSAR_Split_AlGa, with dense sums, for sums known to be too full for sparse forms.

    The algorithm has two steps:

    1. Split: every part of the sparse stream is sent directly to the rank responsible for it, which adds what arrives in a dense block.
    2. Dense allgather of the blocks.

    Latency ((P - 1) + log2 P) alpha; bandwidth from (P - 1)/P N beta to (k + (P - 1)/P N) beta, (P - 1)/P (k + N) beta expected for uniform
    indices (thesis table 3.1).

    Parameters
    ----------
    cut : callable, optional
        Returns the bounds of parts, based on where the ranks' entries are; by default parts have equal widths.
    """
    bounds = bounds_of(stream, ranks, cut)
    block = DenseBlock(reduction, ranks)
    yield from exchange_parts(stream, bounds, rank, 0, block.add)
    mine = yield Quantise(block.result(), rank, rank)
    result: SparseStream = yield DenseAllgather(mine, tuple(pairwise(bounds)), reduction.op, is_uneven(stream, bounds))
    return result


class DenseBlock:
    """A dense sum of ``count`` streams on one range, added in the order of their positions, whatever their order of arrival."""

    def __init__(self, reduction: Reduction, count: int) -> None:
        self._reduction = reduction
        self._count = count
        self._next = 0
        self._early: dict[int, SparseStream] = {}
        self._sum: SparseStream | None = None

    def add(self, position: int, stream: SparseStream) -> None:
        """Accept the stream at ``position``, and add it once all streams before it have been added."""
        self._early[position] = stream
        while self._next in self._early:
            stream = self._early.pop(self._next)
            self._sum = self._reduction.densify(stream) if self._sum is None else self._reduction.pair(self._sum, stream)
            self._next += 1

    def result(self) -> SparseStream:
        """Return the sum, once all streams have been added."""
        assert self._sum is not None and self._next == self._count
        return self._sum
