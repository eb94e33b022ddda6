"""SSAR on a ring: a reduce-scatter ring, then an allgather ring (thesis section 1.1, after Dryden et al.; figure 3.7)."""

from __future__ import annotations

from sparseallreduce.algorithms.boundaries import Cutter, bounds_of
from sparseallreduce.algorithms.steps import Quantise, Schedule, Shift
from sparseallreduce.streams.merging import Merging
from sparseallreduce.streams.partition import concatenate, split
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["ssar_ring"]


def ssar_ring(stream: SparseStream, rank: int, ranks: int, reduction: Reduction, cut: Cutter | None = None) -> Schedule:
    """Send partial sums of each part of the index space once around the ring, and then the sums.

    The algorithm has two steps:

    1. Reduce-scatter: P - 1 times, send the partial sum of one part to the next rank, and add this rank's part to the one that arrives.
    2. Allgather: P - 1 times, send the sum that arrived last to the next rank.

    Latency 2 (P - 1) alpha; bandwidth from 2 (P - 1)/P k beta (the same k indices on all ranks) to (P - 1)/2 k + (P - 1) k beta (disjoint
    ones, where a partial sum grows by k/P at each of its hops); messages are sent to the nearest neighbour only.

    Parameters
    ----------
    cut : callable, optional
        Returns the bounds of parts, based on where the ranks' entries are; by default parts have equal widths.
    """
    if ranks == 1:
        return stream
    behind, ahead = (rank - 1) % ranks, (rank + 1) % ranks
    parts = split(stream, bounds_of(stream, ranks, cut))
    partial = parts[rank]
    for hop in range(1, ranks):
        partial = yield Quantise(partial, rank, hop)
        partial = yield Shift(ahead, partial, behind, Merging(reduction, parts[(rank - hop) % ranks], first=False))
    # The part received last is complete: every rank has added to it.
    partial = yield Quantise(partial, rank, 0)
    sums = {ahead: partial}
    for hop in range(1, ranks):
        partial = yield Shift(ahead, partial, behind)
        sums[(ahead - hop) % ranks] = partial
    return concatenate([sums[part] for part in range(ranks)], reduction)
