"""Communication patterns shared by algorithms: folding to a power of two, the split phase, and gathering over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import numpy as np

from sparseallreduce.algorithms.steps import Exchange, Payload, Quantise, Recv, RecvAny, Send, Shift, Step
from sparseallreduce.streams.merging import Merging
from sparseallreduce.streams.partition import slice_range, split
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = [
    "exchange_parts",
    "exchange_sections",
    "fold",
    "gather_parts",
    "halve",
    "halve_streams",
    "halvings",
    "lower_power_of_two",
    "places_of",
    "rounds_in_step",
    "unfold",
]


_FEW, _LARGE = 32, 16  # ranks below which none wait in step; rounds in which they do carry this part of everything, or more
_READY = SparseStream._dense_form(np.empty(0, np.int32), 0)


def lower_power_of_two(ranks: int) -> int:
    """Return the largest power of two that is not above ``ranks``."""
    return 1 << (ranks.bit_length() - 1)


def halvings(ranks: int) -> list[int]:
    """Return the distances of recursive halving over a power of two of ranks: half of them, a quarter, ..., 1.

    Examples
    --------
    >>> halvings(8)
    [4, 2, 1]
    """
    return [1 << bit for bit in reversed(range(ranks.bit_length() - 1))]


def places_of(parts: int, group: int, interleaved: bool) -> list[int]:
    """Return the part that each rank ends up with, if groups of ranks split, and halve their sections among the groups.

    A rank takes the section of its place in its group: adjacent parts, or every ``group``-th part if interleaved. Interleaved sections are
    halved by alternate parts, so that neighbouring parts, which may be similar, are separated as long as possible.

    Examples
    --------
    >>> places_of(8, 2, False), places_of(8, 2, True)
    ([0, 4, 1, 5, 2, 6, 3, 7], [0, 1, 4, 5, 2, 3, 6, 7])
    """
    groups, bits = parts // group, (parts // group - 1).bit_length()
    if not interleaved:
        return [rank % group * groups + rank // group for rank in range(parts)]
    mirrored = [sum((number >> bit & 1) << (bits - 1 - bit) for bit in range(bits)) for number in range(groups)]
    return [mirrored[rank // group] * group + rank % group for rank in range(parts)]


def fold(stream: SparseStream, rank: int, ranks: int, core: int, reduction: Reduction) -> Generator[Step, Any, SparseStream | None]:
    """Send the streams of ranks in excess of ``core`` to lower ranks (thesis section 3.1.4): rank ``core + i`` to rank ``i``.

    Return the stream to continue with, or None on a rank that has sent its stream; ``core <= ranks <= 2 * core``.
    """
    if rank >= core:
        yield Send(rank - core, (yield Quantise(stream, rank, rank - core)))
        return None
    if rank + core < ranks:
        stream = reduction.pair(stream, (yield Recv(rank + core)))
    return stream


def unfold(stream: SparseStream | None, rank: int, ranks: int, core: int) -> Generator[Step, Any, SparseStream]:
    """Send the result to the ranks in excess, after :func:`fold`."""
    if stream is None:
        result: SparseStream = yield Recv(rank - core)
        return result
    if rank + core < ranks:
        yield Send(rank + core, stream)
    return stream


def exchange_parts(
    stream: SparseStream, bounds: Sequence[int], rank: int, first: int, take: Callable[[int, SparseStream], None]
) -> Generator[Step, Any, None]:
    """Perform the split phase (thesis figure 3.11): send part j of the stream directly to rank ``first + j``.

    ``take(j, part)`` is called with this rank's part of each of these ranks' streams as soon as it arrives, so that adding overlaps with
    messages in transit (thesis section 4.1.4).
    """
    sections = [(part,) for part in split(stream, bounds)]
    return (yield from exchange_sections(sections, rank, first, lambda place, parts: take(place, *parts)))


def exchange_sections(
    sections: Sequence[tuple[SparseStream, ...]], rank: int, first: int, take: Callable[[int, tuple[SparseStream, ...]], None]
) -> Generator[Step, Any, None]:
    """Exchange as :func:`exchange_parts`, with several parts of the stream for rank ``first + j`` in one message."""
    place, ranks = rank - first, len(sections)
    for distance in range(1, ranks):  # starting with the next rank, so that messages are spread over receivers
        other = (place + distance) % ranks
        yield Send(first + other, (yield from _quantised(sections[other], rank, first + other)))
    take(place, sections[place])
    missing, several = set(range(first, first + ranks)) - {rank}, len(sections[place]) > 1
    while missing:
        source, parts = yield RecvAny(missing, several)
        missing.remove(source)  # modified in place: a new set each time would cost P**2
        take(source - first, parts if several else (parts,))


def _quantised(streams: tuple[SparseStream, ...], holder: int, place: int) -> Generator[Step, Any, Payload]:
    """Return streams as their receivers decode them; a single one without a tuple."""
    known = []
    for number, stream in enumerate(streams):
        known.append((yield Quantise(stream, holder, place if number == 0 else (place << 32) + number)))
    return tuple(known) if len(known) > 1 else known[0]


def halve(
    block: SparseStream, rank: int, partners: Iterable[int], reduction: Reduction, bounds: Sequence[int] | None = None
) -> Generator[Step, Any, SparseStream]:
    """Reduce-scatter by recursive halving (thesis figure 3.8): return the rest of ``block``, reduced over all ranks concerned.

    With each partner in turn, the lower rank of the two keeps the lower half of the range and the other the upper half; with ``bounds``,
    which has a part for each rank, the lower or upper half of the parts.
    """
    for partner in partners:
        half = 0 if bounds is None else len(bounds) // 2
        middle = (block.lo + block.hi) // 2 if bounds is None else bounds[half]
        halves = slice_range(block, block.lo, middle), slice_range(block, middle, block.hi)
        kept, given = halves if rank < partner else halves[::-1]
        if bounds is not None:
            bounds = bounds[: half + 1] if rank < partner else bounds[half:]
        given = yield Quantise(given, rank, partner)
        block = yield Exchange(partner, given, Merging(reduction, kept, first=rank < partner))
    return block


def halve_streams(
    streams: tuple[SparseStream, ...], rank: int, partners: Iterable[int], reduction: Reduction
) -> Generator[Step, Any, tuple[SparseStream, ...]]:
    """Reduce-scatter as :func:`halve`, where the lower rank keeps the first half of several streams, and the other the second."""
    for partner in partners:
        half = len(streams) // 2
        halves = streams[:half], streams[half:]
        kept, given = halves if rank < partner else halves[::-1]
        theirs = yield Exchange(partner, (yield from _quantised(given, rank, partner)))
        pairs = zip(kept, theirs if isinstance(theirs, tuple) else (theirs,), strict=True)
        streams = tuple(reduction.pair(*(pair if rank < partner else pair[::-1])) for pair in pairs)
    return streams


def gather_parts(
    part: SparseStream, rank: int, ranks: int, *, near_first: bool = False, in_step: bool = False
) -> Generator[Step, Any, list[SparseStream]]:
    """Gather the streams of all ranks, in the order of ranks, on every rank.

    It uses recursive doubling if the number of ranks is a power of two (thesis figure 3.6), otherwise dissemination (Bruck): ceil(log2 P)
    messages, and every stream reaches every rank once. Streams are sent side by side, without being joined. Recursive doubling begins with
    the most distant ranks, while there is little to send, and ends with neighbours, which may be on one host; with ``near_first`` the order
    is reversed.

    With ``in_step``, a rank sends a long message only once the receiver waits for it (see :func:`rounds_in_step`), which is meant for
    streams of different lengths. Otherwise an early rank sends to one that still receives from another rank, and halves the bandwidth
    of that. The early rank then waits for the delayed one, so that delays double from round to round.
    """
    part = yield Quantise(part, rank, rank)
    if ranks == lower_power_of_two(ranks):
        distances = halvings(ranks)
        found = {rank: part}
        for distance in reversed(distances) if near_first else distances:
            partner, ours = rank ^ distance, sorted(found)
            if in_step and _is_large(len(found), ranks):
                yield Exchange(partner, (_READY,))
            theirs = yield Exchange(partner, tuple(found[each] for each in ours))
            found |= zip(sorted(each ^ distance for each in ours), theirs, strict=True)
        return [found[each] for each in range(ranks)]
    held = [part]  # of the ranks rank, rank + 1, ... modulo P
    while len(held) < ranks:
        distance = len(held)
        if in_step and _is_large(distance, ranks):
            yield Shift((rank + distance) % ranks, (_READY,), (rank - distance) % ranks)
        outgoing = tuple(held[: ranks - distance])
        held += yield Shift((rank - distance) % ranks, outgoing, (rank + distance) % ranks)
    return held[ranks - rank :] + held[: ranks - rank]


def rounds_in_step(ranks: int) -> int:
    """Return the number of rounds of an allgather in step in which partners first exchange a message that they are ready.

    >>> rounds_in_step(16), rounds_in_step(256)
    (0, 4)
    """
    return sum(_is_large(1 << number, ranks) for number in range((ranks - 1).bit_length()))


def _is_large(held: int, ranks: int) -> bool:
    """Return True if partners exchange ready messages before a round in which each sends ``held`` of ``ranks`` parts."""
    return ranks >= _FEW and held * _LARGE >= ranks
