"""Early switching DSAR: dense partial sums within groups of ranks (thesis section 3.3.4, figures 3.12 and 3.13)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sparseallreduce.algorithms.boundaries import Cutter, bounds_of, is_uneven
from sparseallreduce.algorithms.dsar_split_allgather import DenseBlock
from sparseallreduce.algorithms.exchange import (
    exchange_parts,
    exchange_sections,
    fold,
    halve,
    halve_streams,
    halvings,
    lower_power_of_two,
    places_of,
)
from sparseallreduce.algorithms.steps import DenseAllgather, Quantise, Schedule
from sparseallreduce.streams.partition import slice_range, split
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["GROUP_SIZE", "core_of", "dsar_early_switch"]

GROUP_SIZE = 8  # default


def dsar_early_switch(
    stream: SparseStream, rank: int, ranks: int, reduction: Reduction, group_size: int = GROUP_SIZE, cut: Cutter | None = None
) -> Schedule:
    """Reduce sparsely within groups, and, since the sum of a few ranks is already dense, by a dense reduce-scatter between groups.

    The algorithm has four steps:

    1. If P is not ``group_size`` times a power of two, the ranks in excess send their streams to a lower rank.
    2. Split within each group of g ranks: the index space is cut into g parts, and every rank adds one part, densely.
    3. Dense reduce-scatter by recursive halving among the ranks that hold the same part, one of each group.
    4. Dense allgather of the blocks of about N/P over all ranks.

    Latency ((g - 1) + log2(P/g) + log2 P) alpha; bandwidth ((g - 1)/g k + (1/g - 1/P) N + (P - 1)/P N) beta for uniform indices: fewer
    messages than DSAR_Split_AG if P is large.

    Parameters
    ----------
    group_size : int, default 8
        Ranks of a group, g in the paper; there is one group if there are no more ranks.
    cut : callable, optional
        Returns the bounds of parts, based on where the ranks' entries are; by default parts have equal widths. Parts of unequal widths are
        interleaved: a rank's section consists of every g-th part, so that frequent positions are spread over all sections.
    """
    group, groups = core_of(ranks, group_size)
    core = group * groups
    bounds = bounds_of(stream, core, cut, group)
    interleaved = is_uneven(stream, bounds)
    places = places_of(core, group, interleaved)
    blocks = tuple((bounds[part], bounds[part + 1]) for part in places) + ((stream.hi, stream.hi),) * (ranks - core)
    folded = yield from fold(stream, rank, ranks, core, reduction)
    if folded is None:
        mine = reduction.densify(slice_range(stream, stream.hi, stream.hi))
    else:
        first = rank - rank % group
        partners = [_partner(rank, group, distance) for distance in halvings(groups)]
        if interleaved:
            parts = split(folded, bounds)
            sections = [tuple(parts[part] for part in places[place::group]) for place in range(group)]
            sums = [DenseBlock(reduction, group) for _ in range(groups)]
            yield from exchange_sections(sections, rank, first, partial(_add, sums))
            (mine,) = yield from halve_streams(tuple(each.result() for each in sums), rank, partners, reduction)
        else:
            block, own = DenseBlock(reduction, group), (rank - first) * groups
            yield from exchange_parts(folded, bounds[::groups], rank, first, block.add)
            mine = yield from halve(block.result(), rank, partners, reduction, bounds[own : own + groups + 1])
    result: SparseStream = yield DenseAllgather((yield Quantise(mine, rank, rank)), blocks, reduction.op, interleaved)
    return result


def _add(sums: Sequence[DenseBlock], place: int, parts: Sequence[SparseStream]) -> None:
    """Add the parts of the rank at ``place`` to their sums."""
    for each, part in zip(sums, parts, strict=True):
        each.add(place, part)


def core_of(ranks: int, group_size: int = GROUP_SIZE) -> tuple[int, int]:
    """Return the number of ranks of a group, and the number of groups, a power of two, that take part."""
    group = min(group_size, ranks)
    return group, lower_power_of_two(ranks // group)


def _partner(rank: int, group: int, distance: int) -> int:
    """Return the rank at the same place of the group whose number differs in the bit ``distance``."""
    return (rank // group ^ distance) * group + rank % group
