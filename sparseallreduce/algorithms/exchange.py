"""Patterns that several algorithms share: folding to a power of two, the split phase, and gathering over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from sparseallreduce.algorithms.steps import Exchange, Quantise, Recv, RecvAny, Send, Shift, Step
from sparseallreduce.streams.merging import Merging
from sparseallreduce.streams.partition import slice_range, split
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["exchange_parts", "fold", "gather_parts", "halve", "halvings", "lower_power_of_two", "unfold"]


def lower_power_of_two(ranks: int) -> int:
    """The largest power of two that is not above ``ranks``."""
    return 1 << (ranks.bit_length() - 1)


def halvings(ranks: int) -> list[int]:
    """The distances of recursive halving over a power of two of ranks: half of them, a quarter, ... 1.

    >>> halvings(8)
    [4, 2, 1]
    """
    return [1 << bit for bit in reversed(range(ranks.bit_length() - 1))]


def fold(
    stream: SparseStream, rank: int, ranks: int, core: int, reduction: Reduction
) -> Generator[Step, Any, SparseStream | None]:
    """The pre-step for ranks in excess of ``core`` (thesis section 3.1.4): rank ``core + i`` hands its stream to rank ``i``.

    Returns the stream to go on with, or None on a rank that has handed it over; ``core <= ranks <= 2 * core``.
    """
    if rank >= core:
        yield Send(rank - core, (yield Quantise(stream, rank, rank - core)))
        return None
    if rank + core < ranks:
        stream = reduction.pair(stream, (yield Recv(rank + core)))
    return stream


def unfold(stream: SparseStream | None, rank: int, ranks: int, core: int) -> Generator[Step, Any, SparseStream]:
    """The post-step to :func:`fold`: the ranks in excess receive the result."""
    if stream is None:
        result: SparseStream = yield Recv(rank - core)
        return result
    if rank + core < ranks:
        yield Send(rank + core, stream)
    return stream


def exchange_parts(
    stream: SparseStream, bounds: Sequence[int], rank: int, first: int, take: Callable[[int, SparseStream], None]
) -> Generator[Step, Any, None]:
    """The split phase (thesis figure 3.11): part j of the stream goes to rank ``first + j``, directly.

    ``take(j, part)`` is called with our part of each of these ranks' streams, as soon as it is there, so that adding overlaps
    with what is still on its way (thesis section 4.1.4).
    """
    parts = split(stream, bounds)
    place, ranks = rank - first, len(parts)
    for distance in range(1, ranks):  # starting behind ourselves, so that no rank is sent everything at once
        other = (place + distance) % ranks
        yield Send(first + other, (yield Quantise(parts[other], rank, first + other)))
    take(place, parts[place])
    missing = set(range(first, first + ranks)) - {rank}
    while missing:
        source, part = yield RecvAny(missing)
        missing.remove(source)  # a new set each time would cost P**2
        take(source - first, part)


def halve(
    block: SparseStream, rank: int, partners: Iterable[int], reduction: Reduction
) -> Generator[Step, Any, SparseStream]:
    """A reduce-scatter by recursive halving (thesis figure 3.8): what is left of ``block``, reduced over all ranks concerned.

    With each partner in turn, the lower rank of the two keeps the lower half of the range and the other the upper half.
    """
    for partner in partners:
        middle = (block.lo + block.hi) // 2
        halves = slice_range(block, block.lo, middle), slice_range(block, middle, block.hi)
        kept, given = halves if rank < partner else halves[::-1]
        given = yield Quantise(given, rank, partner)
        block = yield Exchange(partner, given, Merging(reduction, kept, first=rank < partner))
    return block


def gather_parts(
    part: SparseStream, rank: int, ranks: int, *, near_first: bool = False
) -> Generator[Step, Any, list[SparseStream]]:
    """The streams of all ranks, in the order of the ranks, on every rank.

    By recursive doubling where the number of ranks is a power of two (thesis figure 3.6), by dissemination (Bruck) otherwise:
    ceil(log2 P) messages, and every stream reaches every rank once. Streams travel side by side, so that nothing is joined
    before the end. Recursive doubling begins with the ranks that are farthest away, as long as there is little to send, and ends with
    neighbours, which may be on one host; with ``near_first`` the other way round.
    """
    part = yield Quantise(part, rank, rank)
    if ranks == lower_power_of_two(ranks):
        distances = halvings(ranks)
        found = {rank: part}
        for distance in reversed(distances) if near_first else distances:
            partner, ours = rank ^ distance, sorted(found)
            theirs = yield Exchange(partner, tuple(found[each] for each in ours))
            found |= zip(sorted(each ^ distance for each in ours), theirs, strict=True)
        return [found[each] for each in range(ranks)]
    held = [part]  # of the ranks rank, rank + 1, ... modulo P
    while len(held) < ranks:
        distance = len(held)
        outgoing = tuple(held[: ranks - distance])
        held += yield Shift((rank - distance) % ranks, outgoing, (rank + distance) % ranks)
    return held[ranks - rank :] + held[: ranks - rank]
