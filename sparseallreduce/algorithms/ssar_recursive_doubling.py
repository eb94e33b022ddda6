"""SSAR_Rec_Dbl: static sparse allreduce by recursive doubling (thesis section 3.3.3, figure 3.9)."""

from __future__ import annotations

from sparseallreduce.algorithms.exchange import fold, halvings, lower_power_of_two, unfold
from sparseallreduce.algorithms.steps import Exchange, Quantise, Schedule
from sparseallreduce.streams.merging import Merging
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["ssar_recursive_doubling"]


def ssar_recursive_doubling(stream: SparseStream, rank: int, ranks: int, reduction: Reduction) -> Schedule:
    """Exchange and add partial sums between ranks at half the number of ranks apart, then a quarter, ..., then neighbours.

    The algorithm has three steps:

    1. If P is not a power of two, the ranks in excess send their streams to a lower rank.
    2. log2 P rounds of pairwise exchange and addition; after t rounds, all ranks of a group of 2**t have the group's sum.
    3. The ranks in excess receive the result.

    The thesis's figure begins with neighbours. If these share a host and its link to other hosts, it is better to end with them: messages
    between hosts then carry sums of few ranks' streams, instead of the sum of the whole host, which each of its ranks would send.

    Latency log2(P) alpha, the optimum; bandwidth from log2(P) k beta (the same k indices on all ranks) to (P - 1) k beta (disjoint
    indices), sum over t of f(k, N, 2**t) beta expected for uniform ones (thesis table 3.1); one more alpha and at most k beta in step 1,
    and the same for the size of the result in step 3.
    """
    core = lower_power_of_two(ranks)
    mine = yield from fold(stream, rank, ranks, core, reduction)
    if mine is not None:
        for distance in halvings(core):
            partner = rank ^ distance
            mine = yield Quantise(mine, rank % (2 * distance), distance)
            mine = yield Exchange(partner, mine, Merging(reduction, mine, first=rank < partner))
        mine = reduction.same_nans(mine)
    return (yield from unfold(mine, rank, ranks, core))
