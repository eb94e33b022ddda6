"""SSAR_Split_AlGa: static sparse allreduce by splitting the index space (thesis section 3.3.3, figures 3.10 and 3.11)."""

from __future__ import annotations

from sparseallreduce.algorithms.boundaries import Cutter, bounds_of, is_uneven
from sparseallreduce.algorithms.exchange import exchange_parts, gather_parts
from sparseallreduce.algorithms.steps import Schedule
from sparseallreduce.streams.partition import concatenate
from sparseallreduce.streams.reduction import Reduction, Tree
from sparseallreduce.streams.stream import SparseStream

__all__ = ["ssar_split_allgather"]


def ssar_split_allgather(stream: SparseStream, rank: int, ranks: int, reduction: Reduction, cut: Cutter | None = None) -> Schedule:
    """Split the index space so that every rank adds one P-th of it, and gather the parts.

    The algorithm has two steps:

    1. Split: the index space is cut into parts, and every part is sent directly to the rank responsible for it, which adds what arrives.
    2. Sparse allgather of the sums by recursive doubling; they are concatenated.

    Latency ((P - 1) + log2 P) alpha; bandwidth from 2 (P - 1)/P k beta (the same k indices on all ranks) to P k beta (disjoint ones), ((P -
    1)/P k + (P - 1) f(k/P, N/P, P)) beta expected for uniform ones (thesis table 3.1).

    Parameters
    ----------
    cut : callable, optional
        Returns the bounds of parts, based on where the ranks' entries are; by default parts have equal widths.
    """
    parts = Tree(reduction, ranks)
    bounds = bounds_of(stream, ranks, cut)
    yield from exchange_parts(stream, bounds, rank, 0, parts.add)
    gathered = yield from gather_parts(parts.result(), rank, ranks, in_step=is_uneven(stream, bounds))
    return concatenate(gathered, reduction)
