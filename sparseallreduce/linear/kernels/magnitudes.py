"""How large features and samples are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.compilation import kernel

__all__ = ["column_sums", "raise_to_magnitudes", "sum_of_squares"]

Array = NDArray[Any]

_ONE, _TWO, _THREE, _FOUR = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)


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


@kernel
def column_sums(indptr: Array, indices: Array, values: Array, counts: Array, out: Array) -> None:
    """Add to ``out``, four numbers a place: how much its entries count, their number, the sum and the sum of squares of their values.

    Of no ``counts``, each row counts once.
    """
    for row in range(indptr.size - 1):
        count = counts[row] if counts.size else 1.0
        for entry in range(indptr[row], indptr[row + 1]):
            place, value = _FOUR * np.uint64(indices[entry]), np.float64(values[entry])
            out[place] += count
            out[place + _ONE] += 1.0
            out[place + _TWO] += count * value
            out[place + _THREE] += count * value * value
