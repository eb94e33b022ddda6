"""Early switching DSAR: dense partial sums within groups of ranks (thesis section 3.3.4, figures 3.12 and 3.13)."""

from __future__ import annotations

from sparseallreduce.algorithms.dsar_split_allgather import DenseBlock
from sparseallreduce.algorithms.exchange import exchange_parts, fold, halve, halvings, lower_power_of_two
from sparseallreduce.algorithms.steps import DenseAllgather, Quantise, Schedule
from sparseallreduce.streams.partition import parts_of, slice_range
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["dsar_early_switch"]


def dsar_early_switch(stream: SparseStream, rank: int, ranks: int, reduction: Reduction, group_size: int = 8) -> Schedule:
    """Where the sum over a few ranks is dense already, the rest of the way is a dense reduce-scatter.

    The algorithm has four steps:

    1. If P is not ``group_size`` times a power of two, the ranks in excess hand their streams to a rank below.
    2. Split within each group of g ranks: the index space is cut in g, and every rank adds up one part, densely.
    3. Dense reduce-scatter by recursive halving among the ranks that hold the same part, one of each group.
    4. Dense allgather of the blocks of about N/P over all ranks.

    Latency ((g - 1) + log2(P/g) + log2 P) alpha; bandwidth ((g - 1)/g k + (1/g - 1/P) N + (P - 1)/P N) beta for uniform indices:
    fewer messages than DSAR_Split_AG where P is large.

    Parameters
    ----------
    group_size : int, default 8
        Ranks of a group, the paper's g; all ranks are one group if there are no more than that.
    """
    group = min(group_size, ranks)
    groups = lower_power_of_two(ranks // group)
    core = group * groups
    blocks = tuple(_block(stream, group, groups, other) for other in range(ranks))
    folded = yield from fold(stream, rank, ranks, core, reduction)
    if folded is None:
        mine = reduction.densify(slice_range(stream, stream.hi, stream.hi))
    else:
        block = DenseBlock(reduction, group)
        yield from exchange_parts(folded, parts_of(stream, group), rank, rank - rank % group, block.add)
        mine = block.result()
        partners = [_partner(rank, group, distance) for distance in halvings(groups)]
        mine = yield from halve(mine, rank, partners, reduction)
    result: SparseStream = yield DenseAllgather((yield Quantise(mine, rank, rank)), blocks, reduction.op)
    return result


def _partner(rank: int, group: int, distance: int) -> int:
    """The rank at the same place of the group whose number differs in the bit ``distance``."""
    return (rank // group ^ distance) * group + rank % group


def _block(stream: SparseStream, group: int, groups: int, rank: int) -> tuple[int, int]:
    """The range of the block that ``rank`` ends up with: empty for ranks in excess."""
    if rank >= group * groups:
        return stream.hi, stream.hi
    number, place = divmod(rank, group)
    lo, hi = parts_of(stream, group)[place : place + 2]
    for distance in halvings(groups):
        middle = (lo + hi) // 2
        lo, hi = (middle, hi) if number & distance else (lo, middle)
    return lo, hi
