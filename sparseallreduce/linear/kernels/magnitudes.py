"""Loops that measure the magnitudes of features and samples."""

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
    """Set ``largest[index] = max(largest[index], abs(value))`` for every non-zero."""
    for entry in range(indices.size):
        index = np.uint64(indices[entry])
        largest[index] = max(largest[index], abs(values[entry]))


@kernel
def sum_of_squares(indptr: Array, values: Array, counts: Array) -> float:
    """Return the sum over all rows of their squared values, times the row's weight in ``counts``, or 1 if that is empty."""
    total = 0.0
    for row in range(indptr.size - 1):
        own = 0.0
        for entry in range(indptr[row], indptr[row + 1]):
            own += np.float64(values[entry]) * np.float64(values[entry])
        total += own * counts[row] if counts.size else own
    return total


@kernel
def column_sums(indptr: Array, indices: Array, values: Array, counts: Array, out: Array) -> None:
    """Add four numbers per feature to ``out``: the weight of its entries, their number, and the sum and sum of squares of their values.

    If ``counts`` is empty, each row has weight 1.
    """
    for row in range(indptr.size - 1):
        count = counts[row] if counts.size else 1.0
        for entry in range(indptr[row], indptr[row + 1]):
            place, value = _FOUR * np.uint64(indices[entry]), np.float64(values[entry])
            out[place] += count
            out[place + _ONE] += 1.0
            out[place + _TWO] += count * value
            out[place + _THREE] += count * value * value
