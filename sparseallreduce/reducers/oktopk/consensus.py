"""Small vectors that the ranks agree on: sums of counts, and counts of all ranks."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.dense import rabenseifner
from sparseallreduce.algorithms.steps import Share, Step
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["shared", "total"]

Counts = NDArray[np.int64]


def total(vector: Counts, most: int, k: int, rank: int, ranks: int) -> Generator[Step, Any, Counts]:
    """The sum of the ranks' vectors.

    Where that is little beside the k values that travel anyway, every rank tells its vector to all, which takes one message's time;
    otherwise by an allreduce of 2 words an element. Its messages are its own, and not those of a collective of the MPI library, which
    several operations in flight would enter one after the other.

    Parameters
    ----------
    vector : ndarray
    most : int
        That no element of the sum exceeds.
    k : int
    rank, ranks : int
    """
    vector = vector.astype(np.int32 if most < 2**31 else np.int64)
    if (ranks - 1) * len(vector) <= k // 64:
        told = yield Share(vector.tobytes())
        summed: Counts = np.sum([np.frombuffer(record, vector.dtype) for record in told], axis=0, dtype=np.int64)
        return summed
    stream = yield from rabenseifner(SparseStream._dense_form(vector, len(vector)), rank, ranks, Reduction())
    return stream.to_dense().astype(np.int64)


def shared(count: int, most: int, ranks: int) -> Generator[Step, Any, list[int]]:
    """The counts of all ranks, of which none exceeds ``most``, in as few bytes as that takes."""
    if ranks == 1:
        return [count]
    records = yield Share(count.to_bytes((most.bit_length() + 7) // 8, "little"))
    return [int.from_bytes(record, "little") for record in records]
