"""Balance and allgatherv: gather the selected values of all regions, with balanced loads (Ok-Topk section 3.1.2)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.exchange import gather_parts, lower_power_of_two
from sparseallreduce.algorithms.steps import Exchange, Recv, Send, Step
from sparseallreduce.streams.kernels.backend import array_module
from sparseallreduce.streams.stream import SparseStream

__all__ = ["balance_and_gather", "gather_loads", "plan"]

SMALL = 512  # average values per rank below which blocks are joined in each round: copying four times as many takes as long as a header
LARGE = 1 / 3  # fraction of all values above which a rank gets no share in the allgatherv


class Piece(NamedTuple):
    """The values at positions ``start`` to ``stop``, in the order of indices, of those that rank ``source`` has selected."""

    source: int
    start: int
    stop: int


class Transfer(NamedTuple):
    """A piece that is sent from its source to ``dest``."""

    piece: Piece
    dest: int


def balance_and_gather(
    chosen: SparseStream, sizes: Sequence[int], k: int, rank: int, ranks: int, max_imbalance: float | None
) -> Generator[Step, Any, SparseStream]:
    """Return the values of all ranks in one stream.

    Parameters
    ----------
    chosen : SparseStream
        Values of this rank's region; the regions of ranks 0, 1, ... are in increasing order.
    sizes : sequence of int
        Number of values that each rank has selected, together at most k.
    k, rank, ranks : int
    max_imbalance : float or None
        As for :func:`plan`.
    """
    transfers = plan(sizes, k, max_imbalance)
    if not transfers and ranks == lower_power_of_two(ranks) and sum(sizes) <= SMALL * ranks:
        return (yield from _joined_on_the_way(chosen, rank, ranks))
    contents = _contents(sizes, transfers)
    block = yield from _balance(chosen, transfers, contents[rank], rank)
    blocks = yield from gather_parts(block, rank, ranks, near_first=True)  # as its loads are counted
    return _joined(blocks, contents)


def _joined_on_the_way(block: SparseStream, rank: int, ranks: int) -> Generator[Step, Any, SparseStream]:
    """Gather small blocks by recursive doubling, joining them in each round, which takes less time than their headers."""
    distance = 1
    while distance < ranks:
        theirs = yield Exchange(rank ^ distance, block)
        block = _concatenated([block, theirs] if rank & distance == 0 else [theirs, block])
        distance *= 2
    return block


def plan(sizes: Sequence[int], k: int, max_imbalance: float | None) -> list[Transfer]:
    """Return the transfers before the allgatherv; every rank derives the same from the sizes.

    Parameters
    ----------
    sizes : sequence of int
    k : int
        Upper bound of the sum of the sizes.
    max_imbalance : float or None
        Balance if the largest size is more than this multiple of the mean (4 in the paper). This alone does not bound what the ranks send,
        because recursive doubling forwards whatever is contiguous. Balancing also happens if a rank would send more than its share of the
        bound, less the k values of the split and about 5 P words of counts. None never balances.
    """
    ranks, entries = len(sizes), sum(sizes)
    if max_imbalance is None or entries == 0:
        return []
    share = (2 - 3 / ranks) * k  # 3 k (P - 1)/P less k
    least = 4 * (ranks - 1) / (3 * ranks - 2) * entries  # sent by the busiest rank if one rank held all: see _shares
    allowed = max(least, min(0.8 * share, share - 2.5 * ranks))
    if max(sizes) * ranks <= max_imbalance * entries and gather_loads(sizes).max() <= allowed:
        return []
    return _transfers(sizes, _shares(sizes))


def gather_loads(sizes: Sequence[int]) -> NDArray[np.int64]:
    """Return how many values each rank sends in the allgatherv of blocks of these sizes."""
    ranks, distance = len(sizes), 1
    ends = np.concatenate([[0], np.cumsum([*sizes, *sizes])])
    loads, every = np.zeros(ranks, np.int64), np.arange(ranks)
    while distance < ranks:
        passed_on = min(distance, ranks - distance)
        first = every // distance * distance if ranks == lower_power_of_two(ranks) else every
        loads += ends[first + passed_on] - ends[first]
        distance *= 2
    return loads


def _shares(sizes: Sequence[int]) -> list[int]:
    """Return how many values each rank should have before the allgatherv.

    These are equal numbers, unless one rank holds a large share of all. That rank has sent its part of the split, and sends what it gives
    away, k (1 - 1/P) or more each. With an equal share it would send as much again in the allgatherv, and the paper's bound of 6 k (P -
    1)/P words would leave no words for the counts. The values are therefore given to ranks far from it: most to those that it exchanges
    with in the last round, whose values it never forwards, and the rest to those of the round before.
    """
    ranks, entries, largest = len(sizes), sum(sizes), int(np.argmax(sizes))
    weights = np.ones(ranks)
    if ranks > 2 and sizes[largest] > LARGE * entries:
        far, near = _by_round(largest, ranks)
        weights[:] = 0
        weights[far] = 2 * ranks / len(far)
        weights[near] = (ranks - 2) / len(near)
    ends = np.floor(np.cumsum(weights) * (entries / weights.sum()) + 0.5).astype(int)
    ends[-1] = entries
    return [int(share) for share in np.diff(ends, prepend=0)]


def _by_round(rank: int, ranks: int) -> tuple[list[int], list[int]]:
    """Return the ranks whose values reach ``rank`` in the last round of the allgatherv, and in the round before."""
    last = 1 << ((ranks - 1).bit_length() - 1)
    ways = [rank ^ other if ranks == lower_power_of_two(ranks) else (other - rank) % ranks for other in range(ranks)]
    far = [other for other, way in enumerate(ways) if way >= last]
    near = [other for other, way in enumerate(ways) if last // 2 <= way < last]
    return far, near


def _transfers(sizes: Sequence[int], shares: Sequence[int]) -> list[Transfer]:
    """Return transfers in which ranks with more than their share keep their first values, and send the others to ranks with less.

    Examples
    --------
    >>> _transfers([5, 0, 1], [2, 2, 2])
    [Transfer(piece=Piece(source=0, start=2, stop=4), dest=1), Transfer(piece=Piece(source=0, start=4, stop=5), dest=2)]
    """
    found, dest = [], 0
    missing = [max(0, share - size) for size, share in zip(sizes, shares)]
    for source, (size, share) in enumerate(zip(sizes, shares)):
        start = share
        while start < size:
            while missing[dest] == 0:
                dest += 1
            stop = min(size, start + missing[dest])
            found.append(Transfer(Piece(source, start, stop), dest))
            missing[dest] -= stop - start
            start = stop
    return found


def _contents(sizes: Sequence[int], transfers: Sequence[Transfer]) -> list[list[Piece]]:
    """Return the pieces that each rank has after the transfers, in the order of indices."""
    kept = list(sizes)
    for piece, _ in transfers:
        kept[piece.source] = min(kept[piece.source], piece.start)
    contents = [[Piece(rank, 0, size)] for rank, size in enumerate(kept)]
    for piece, dest in transfers:
        contents[dest].append(piece)
    return [sorted(pieces) for pieces in contents]


def _balance(
    chosen: SparseStream, transfers: Sequence[Transfer], content: Sequence[Piece], rank: int
) -> Generator[Step, Any, SparseStream]:
    """Send and receive the values to move, and return this rank's values after that."""
    for piece, dest in transfers:
        if piece.source == rank:
            yield Send(dest, _cut(chosen, piece.start, piece.stop))
    parts = []
    for source, start, stop in content:
        parts.append(_cut(chosen, start, stop) if source == rank else (yield Recv(source)))
    return parts[0] if len(parts) == 1 else _concatenated(parts)


def _joined(blocks: Sequence[SparseStream], contents: Sequence[Sequence[Piece]]) -> SparseStream:
    """Return the blocks of all ranks as one stream in the order of indices."""
    parts = {}
    for block, content in zip(blocks, contents):
        at = 0
        for piece in content:
            parts[piece] = _cut(block, at, at + piece.stop - piece.start)
            at += piece.stop - piece.start
    return _concatenated([parts[piece] for piece in sorted(parts)])


def _cut(stream: SparseStream, start: int, stop: int) -> SparseStream:
    indices, values = stream._entries()
    return SparseStream._sparse_form(indices[start:stop], values[start:stop], stream.size)


def _concatenated(streams: Sequence[SparseStream]) -> SparseStream:
    indices, values = zip(*(stream._entries() for stream in streams))
    xp = array_module(values[0])
    return SparseStream._sparse_form(xp.concatenate(indices), xp.concatenate(values), streams[0].size)
