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


def total(vector: Counts, most: int, rank: int, ranks: int) -> Generator[Step, Any, Counts]:
    """The sum of the ranks' vectors, of which no element exceeds ``most``, in 2 words an element.

    Messages of its own rather than a collective of the MPI library, which several operations in flight would take in turn.
    """
    dtype = np.int32 if most < 2**31 else np.int64
    stream = SparseStream._dense_form(vector.astype(dtype), len(vector))
    summed = yield from rabenseifner(stream, rank, ranks, Reduction())
    return summed.to_dense().astype(np.int64)


def shared(count: int, most: int, ranks: int) -> Generator[Step, Any, list[int]]:
    """The counts of all ranks, of which none exceeds ``most``, in as few bytes as that takes."""
    if ranks == 1:
        return [count]
    records = yield Share(count.to_bytes((most.bit_length() + 7) // 8, "little"))
    return [int.from_bytes(record, "little") for record in records]
