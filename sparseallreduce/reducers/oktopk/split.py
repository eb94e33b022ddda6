"""Split and reduce: every rank receives all ranks' values of its region, and adds them (Ok-Topk section 3.1.1, figure 2)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from sparseallreduce.algorithms.steps import RecvAny, Send, Step
from sparseallreduce.streams import kernels
from sparseallreduce.streams.partition import split
from sparseallreduce.streams.reduction import Reduction, Tree
from sparseallreduce.streams.stream import SparseStream

__all__ = ["split_and_reduce"]


def split_and_reduce(
    stream: SparseStream,
    bounds: Sequence[int],
    rank: int,
    ranks: int,
    reduction: Reduction,
    bucket: int,
    copy: SparseStream | None = None,
) -> Generator[Step, Any, SparseStream]:
    """Return the sum of all ranks' streams on this rank's region.

    Destinations rotate, so that every rank sends to a different one at a time. They are grouped in buckets, and each bucket is in transit
    while the previous one is received and added.

    Parameters
    ----------
    stream : SparseStream
    bounds : sequence of int
        Region j is ``[bounds[j], bounds[j + 1])``.
    rank, ranks : int
    reduction : Reduction
    bucket : int
        Destinations in a bucket.
    copy : SparseStream, optional
        For a stream on a GPU, its copy on the host, from which parts are sent.
    """
    cut = split(stream if copy is None else copy, bounds)
    if copy is not None and stream.on_device:
        first, last = kernels.cuts(copy._entries()[0], bounds[rank : rank + 2], stream.lo, stream.hi)
        indices, values = (array[first:last] for array in stream._entries())
        cut[rank] = SparseStream._sparse_form(indices, values, stream.size, bounds[rank], bounds[rank + 1])
    parts = [reduction.enter(part) for part in cut]
    buckets = [range(first, min(first + bucket, ranks)) for first in range(1, ranks, bucket)]
    sums = Tree(reduction, ranks)  # ordered by distance, so that values received together are added together, in a fixed order
    sums.add(0, parts[rank])
    for number in range(-1, len(buckets)):
        for distance in buckets[number + 1] if number + 1 < len(buckets) else ():
            dest = (rank + distance) % ranks
            yield Send(dest, parts[dest])
        missing = {(rank - distance) % ranks for distance in buckets[number]} if number >= 0 else set()
        while missing:
            source, part = yield RecvAny(missing)
            missing.remove(source)
            sums.add((rank - source) % ranks, part)
    return sums.result()
