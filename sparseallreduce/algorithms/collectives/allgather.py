"""Gather the streams of all ranks on every rank, and join them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from sparseallreduce.algorithms.exchange import gather_parts
from sparseallreduce.algorithms.steps import Quantise, Schedule, Shift
from sparseallreduce.errors import MismatchError
from sparseallreduce.streams.partition import concatenate
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["DISJOINT", "RANGES", "allgather_doubling", "allgather_ring", "join_streams"]

RANGES, DISJOINT = "ranges", "disjoint"  # how streams are joined without an operator


def allgather_doubling(stream: SparseStream, rank: int, ranks: int, reduction: Reduction, *, join: str) -> Schedule:
    """Gather by recursive doubling (thesis figure 3.6), or by dissemination if P is not a power of two.

    Latency log2(P) alpha and bandwidth (P - 1) k beta, both optimal.
    """
    return join_streams((yield from gather_parts(stream, rank, ranks)), reduction, join)  # type: ignore[no-any-return]


def allgather_ring(stream: SparseStream, rank: int, ranks: int, reduction: Reduction, *, join: str) -> Schedule:
    """Pass every stream once around the ring: each rank sends to the next rank what it has received from the previous one.

    Latency (P - 1) alpha, bandwidth (P - 1) k beta. Every rank communicates with its neighbours only.
    """
    stream = yield Quantise(stream, rank, rank)
    streams = {rank: stream}
    for hop in range(1, ranks):
        stream = yield Shift((rank + 1) % ranks, stream, (rank - 1) % ranks)
        streams[(rank - hop) % ranks] = stream
    return join_streams([streams[number] for number in range(ranks)], reduction, join)  # type: ignore[no-any-return]


def join_streams(streams: Sequence[SparseStream], reduction: Reduction, join: str) -> Any:
    """Return the joined streams of all ranks, or the error that all ranks raise."""
    if join == RANGES:
        return _behind_each_other(streams, reduction)
    clash = _clash(streams) if join == DISJOINT else None
    return clash or reduction.same_nans(reduction.many(streams))


def _behind_each_other(streams: Sequence[SparseStream], reduction: Reduction) -> SparseStream:
    """Concatenate the streams in their order."""
    bounds = [0, *accumulate(stream.size for stream in streams)]
    size = bounds[-1]
    dtype = index_dtype(size)
    moved = []
    for stream, lo, hi in zip(streams, bounds, bounds[1:]):
        if stream.is_dense:
            moved.append(SparseStream._dense_form(stream._stored, size, lo, hi))
        else:
            indices, values = stream._entries()
            indices = indices.astype(dtype)
            indices += dtype.type(lo)
            moved.append(SparseStream._sparse_form(indices, values, size, lo, hi))
    return concatenate(moved, reduction)


def _clash(streams: Sequence[SparseStream]) -> MismatchError | None:
    """Return an error if two streams have an entry at the same position, otherwise None; the same on all ranks.

    The error is raised later, with the result, because other ranks may still wait for messages from this one.
    """
    sets = [stream.to_host()._entries()[0] for stream in streams]
    every = np.sort(np.concatenate(sets))
    twice = np.flatnonzero(every[1:] == every[:-1])
    if not len(twice):
        return None
    position = every[twice[0]]
    first, second = [rank for rank, indices in enumerate(sets) if position in indices][:2]
    error = MismatchError(
        f"ranks {first} and {second} both have an entry at position {int(position)}, and streams with join='disjoint' share none: join "
        "them by an operator, as with join='sum'"
    )
    error.on_all_ranks = True
    return error
