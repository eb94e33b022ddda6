"""Reduce the streams of all ranks, and return one index range of the result on each rank."""

from __future__ import annotations

from collections.abc import Sequence

from sparseallreduce.algorithms.exchange import exchange_parts, halve, halvings, lower_power_of_two
from sparseallreduce.algorithms.hierarchical import Hosts
from sparseallreduce.algorithms.steps import HostReduceScatter, Quantise, Recv, Schedule, Send
from sparseallreduce.streams.partition import slice_range
from sparseallreduce.streams.reduction import Reduction, Tree
from sparseallreduce.streams.stream import SparseStream

__all__ = ["reduce_scatter_halving", "reduce_scatter_split"]


def reduce_scatter_split(
    stream: SparseStream, rank: int, ranks: int, reduction: Reduction, *, bounds: Sequence[int], hosts: Hosts
) -> Schedule:
    """Send every range directly to its rank, which adds what it receives: the first step of SSAR_Split_AlGa (figure 3.11).

    Ranks of one host use shared memory where possible. Latency (P - 1) alpha; bandwidth (P - 1)/P k beta for ranges with equal numbers of
    entries, which is optimal.
    """
    if len(hosts.members) == 1 and hosts.share_memory:
        return (yield HostReduceScatter(stream, hosts.members[0], tuple(bounds), reduction))  # type: ignore[no-any-return]
    sums = Tree(reduction, ranks)
    yield from exchange_parts(stream, bounds, rank, 0, sums.add)
    return sums.result()


def reduce_scatter_halving(
    stream: SparseStream, rank: int, ranks: int, reduction: Reduction, *, bounds: Sequence[int], hosts: Hosts
) -> Schedule:
    """Reduce by recursive halving (thesis figure 3.8): in each round a rank sends half of its ranges, and keeps the other half.

    The algorithm has three steps:

    1. If P is not a power of two, the first ranks form pairs, and the second of each pair sends its stream to the first.
    2. Recursive halving among the other ranks, in which the first of a pair keeps the ranges of both.
    3. The second of each pair receives its range.

    Latency log2(P) alpha, with one more alpha at each end if P is not a power of two; bandwidth from (P - 1)/P k beta (the same k indices
    on all ranks) to log2(P)/2 k beta (disjoint indices).
    """
    core = lower_power_of_two(ranks)
    pairs = ranks - core
    is_paired = rank < 2 * pairs
    if is_paired and rank % 2:
        yield Send(rank - 1, (yield Quantise(stream, rank, rank - 1)))
        part: SparseStream = yield Recv(rank - 1)
        return part
    if is_paired:
        stream = reduction.pair(stream, (yield Recv(rank + 1)))
    members = [*range(0, 2 * pairs, 2), *range(2 * pairs, ranks)]
    place = members.index(rank)
    cuts = [bounds[member] for member in members] + [bounds[ranks]]
    part = yield from halve(stream, rank, [members[place ^ distance] for distance in halvings(core)], reduction, cuts)
    if is_paired:
        theirs = slice_range(part, bounds[rank + 1], bounds[rank + 2])
        yield Send(rank + 1, (yield Quantise(theirs, rank, rank + 1)))
        part = slice_range(part, bounds[rank], bounds[rank + 1])
    return part
