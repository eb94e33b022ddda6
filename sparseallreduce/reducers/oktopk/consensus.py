"""Sums and exchanges of small vectors of counts."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.exchange import halvings, lower_power_of_two
from sparseallreduce.algorithms.steps import Exchange, Recv, Send, Share, Step
from sparseallreduce.streams.stream import SparseStream

__all__ = ["shared", "total"]

Counts = NDArray[np.int64]

WORD = 4  # bytes
WIDTHS = [np.dtype(name) for name in ("u8", "u4", "u2", "u1")]
FEW = 4  # up to this many counts are exchanged whole instead of in halves, which saves a message


def total(counts: Counts, k: int, rank: int, ranks: int) -> Generator[Step, Any, Counts]:
    """Return the sum of the ranks' vectors of non-negative integers.

    If that is small compared with the k values that are sent anyway, every rank sends its vector to all, in the time of one message.
    Otherwise it uses Rabenseifner's algorithm, with the number of bytes per count that the largest count of a message needs, which is
    mostly one. The messages are its own rather than an MPI collective, which several operations in flight would have to enter one after the
    other.

    Parameters
    ----------
    counts : ndarray of int64
        Of the same length on all ranks, at least one.
    k : int
    rank, ranks : int
    """
    if 2 * (ranks - 1) * len(counts) <= k // 64:
        records = yield Share(counts.tobytes())
        summed: Counts = np.sum([np.frombuffer(record, np.int64) for record in records], axis=0, dtype=np.int64)
        return summed
    core = lower_power_of_two(ranks)
    if rank >= core:
        yield Send(rank - core, _packed(counts))
        return _unpacked((yield Recv(rank - core)), len(counts))
    summed = counts.copy()
    if rank + core < ranks:
        summed += _unpacked((yield Recv(rank + core)), len(counts))
    yield from _summed_in_place(summed, rank, core)
    if rank + core < ranks:
        yield Send(rank + core, _packed(summed))
    return summed


def _summed_in_place(counts: Counts, rank: int, ranks: int) -> Generator[Step, Any, None]:
    """Run Rabenseifner's algorithm on a power of two of ranks; the last few counts are summed by recursive doubling."""
    first, end, halved = 0, len(counts), []
    for distance in halvings(ranks):
        if end - first <= FEW:
            counts[first:end] += _unpacked((yield Exchange(rank ^ distance, _packed(counts[first:end]))), end - first)
            continue
        halved.append((distance, first, end))
        middle = (first + end) // 2
        given = slice(middle, end) if rank & distance == 0 else slice(first, middle)
        first, end = (first, middle) if rank & distance == 0 else (middle, end)
        counts[first:end] += _unpacked((yield Exchange(rank ^ distance, _packed(counts[given]))), end - first)
    for distance, lower, upper in reversed(halved):
        missing = slice(end, upper) if first == lower else slice(lower, first)
        theirs = yield Exchange(rank ^ distance, _packed(counts[first:end]))
        counts[missing] = _unpacked(theirs, missing.stop - missing.start)
        first, end = lower, upper


def _packed(counts: Counts) -> SparseStream:
    """Return counts as a stream of as few words as the largest of them allows; no words if all are zero."""
    words = -(-len(counts) * np.min_scalar_type(counts.max(initial=0)).itemsize // WORD) if counts.any() else 0
    record = counts.astype(_dtype(len(counts), words)).tobytes().ljust(words * WORD, b"\0")[: words * WORD]
    return SparseStream._dense_form(np.frombuffer(record, np.int32), words)


def _unpacked(stream: SparseStream, count: int) -> Counts:
    if stream.extent == 0:
        return np.zeros(count, np.int64)
    return np.frombuffer(stream._stored, _dtype(count, stream.extent), count).astype(np.int64)


def _dtype(count: int, words: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the longest integer dtype of which ``count`` fit into ``words`` words."""
    return next((dtype for dtype in WIDTHS if count * dtype.itemsize <= words * WORD), WIDTHS[-1])


def shared(count: int, most: int, ranks: int) -> Generator[Step, Any, list[int]]:
    """Exchange one count of each rank, none above ``most``, in as few bytes as possible."""
    if ranks == 1:
        return [count]
    records = yield Share(count.to_bytes((most.bit_length() + 7) // 8, "little"))
    return [int.from_bytes(record, "little") for record in records]
