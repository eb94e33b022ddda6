"""SSAR_Rec_Dbl: static sparse allreduce by recursive doubling (thesis section 3.3.3, figure 3.9)."""

from __future__ import annotations

from sparseallreduce.algorithms.exchange import fold, halvings, lower_power_of_two, unfold
from sparseallreduce.algorithms.steps import Exchange, Quantise, Schedule
from sparseallreduce.streams.merging import Merging
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["ssar_recursive_doubling"]


def ssar_recursive_doubling(stream: SparseStream, rank: int, ranks: int, reduction: Reduction) -> Schedule:
    """In every round, ranks at a distance exchange what they have and add it up: half of all ranks apart, a quarter, ..., neighbours.

    The algorithm has three steps:

    1. If P is no power of two, the ranks in excess hand their streams to a rank below.
    2. log2 P rounds of pairwise exchange and addition; the sum of a group of 2**t ranks is on all of them after t rounds.
    3. The ranks in excess are handed the result.

    The thesis's figure begins with neighbours. Where these are on one host, which shares a link to other hosts, it is better to end with
    them: what goes between hosts is then added up of few ranks' streams, and not of all of a host's, which each of them would send.

    Latency log2(P) alpha, the optimum; bandwidth from log2(P) k beta (the same k indices on all ranks) to (P - 1) k beta
    (disjoint indices), sum over t of f(k, N, 2**t) beta expected for uniform ones (thesis table 3.1); one alpha and at most
    k beta more in step 1 and again, with the size of the result, in step 3.
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
