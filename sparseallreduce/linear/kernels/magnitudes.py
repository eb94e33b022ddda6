"""How large features and samples are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.compilation import kernel

__all__ = ["raise_to_magnitudes", "sum_of_squares"]

Array = NDArray[Any]


@kernel
def raise_to_magnitudes(indices: Array, values: Array, largest: Array) -> None:
    """``largest[index] = max(largest[index], abs(value))`` for every non-zero."""
    for entry in range(indices.size):
        index = np.uint64(indices[entry])
        largest[index] = max(largest[index], abs(values[entry]))


@kernel
def sum_of_squares(indptr: Array, values: Array, counts: Array) -> float:
    """The sum over all rows of the squares of their values, times what the row counts; of no counts, each counts once."""
    total = 0.0
    for row in range(indptr.size - 1):
        own = 0.0
        for entry in range(indptr[row], indptr[row + 1]):
            own += np.float64(values[entry]) * np.float64(values[entry])
        total += own * counts[row] if counts.size else own
    return total
