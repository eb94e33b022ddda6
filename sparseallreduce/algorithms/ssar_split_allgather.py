"""SSAR_Split_AlGa: static sparse allreduce by splitting the index space (thesis section 3.3.3, figures 3.10 and 3.11)."""

from __future__ import annotations

from sparseallreduce.algorithms.boundaries import Cutter, bounds_of
from sparseallreduce.algorithms.exchange import exchange_parts, gather_parts
from sparseallreduce.algorithms.steps import Schedule
from sparseallreduce.streams.partition import concatenate
from sparseallreduce.streams.reduction import Reduction, Tree
from sparseallreduce.streams.stream import SparseStream

__all__ = ["ssar_split_allgather"]


def ssar_split_allgather(
    stream: SparseStream, rank: int, ranks: int, reduction: Reduction, cut: Cutter | None = None
) -> Schedule:
    """Every rank adds up one P-th of the index space, and all gather the parts.

    The algorithm has two steps:

    1. Split: the index space is cut in parts, and every part is sent straight to the rank that is responsible for it, which adds
       up what arrives.
    2. Sparse allgather of the sums by recursive doubling, in which joining is concatenation.

    Latency ((P - 1) + log2 P) alpha; bandwidth from 2 (P - 1)/P k beta (the same k indices on all ranks) to P k beta (disjoint
    ones), ((P - 1)/P k + (P - 1) f(k/P, N/P, P)) beta expected for uniform ones (thesis table 3.1).

    Parameters
    ----------
    cut : callable, optional
        Of the index space into parts, by where the ranks' entries lie; by default they are of equal widths.
    """
    parts = Tree(reduction, ranks)
    yield from exchange_parts(stream, bounds_of(stream, ranks, cut), rank, 0, parts.add)
    gathered = yield from gather_parts(parts.result(), rank, ranks)
    return concatenate(gathered, reduction)
