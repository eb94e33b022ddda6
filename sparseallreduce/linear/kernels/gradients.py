"""The gradient of a batch: the sum of its rows, each times a coefficient."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels.bands import add, add_in_bands, bands_in_place
from sparseallreduce.linear.kernels.rows import MANY_LINES, NEAR, ROW_AHEAD, bands_of, entries_of, fetch_row, write_extents
from sparseallreduce.streams.kernels.compilation import kernel

__all__ = ["accumulate", "compact_accumulate"]

Array = NDArray[Any]

_ZERO = np.uint64(0)
_EVERY = np.uint64(2**64 - 1)  # larger than any index


@kernel
def accumulate(
    indptr: Array, indices: Array, values: Array, rows: Array, coefficients: Array, features: int, low: int, total: Array
) -> None:
    """Add ``coefficients[i]`` times row ``rows[i]``, for all i, to the dense sums of the features from ``low`` on.

    Features outside the range of the sums are skipped; rows of coefficient zero cost nothing.
    """
    counted = np.empty(rows.size, rows.dtype)
    factors = np.empty(rows.size, coefficients.dtype)
    count = 0
    for i in range(rows.size):
        if coefficients[i] != 0:
            counted[count], factors[count] = rows[i], coefficients[i]
            count += 1
    counted, factors = counted[:count], factors[:count]
    bands = bands_in_place(entries_of(indptr, counted), count, features, total.itemsize)
    if bands > 1:
        width = -(-features // bands)
        shifts, places, ends = np.zeros(count, np.uint64), np.empty(count, np.uint64), np.empty(count, np.uint64)
        for i in range(count):
            places[i], ends[i] = indptr[counted[i]], indptr[counted[i] + 1]
        add_in_bands(indices, values, shifts, places, ends, factors, low, total, -(-total.size // width), width)
        return
    far = total.size * total.itemsize > NEAR
    for i in range(count):
        fetch_row(indptr, indices, values, counted, i + ROW_AHEAD, MANY_LINES)
        begin, end = np.uint64(indptr[counted[i]]), np.uint64(indptr[counted[i] + 1])
        if far:
            add(indices, values, _ZERO, begin, end, factors[i], low, total, _EVERY, True)
        else:
            add(indices, values, _ZERO, begin, end, factors[i], low, total, _EVERY, False)


@kernel
def compact_accumulate(indptr: Array, indices: Array, values: Array, starts: Array, coefficients: Array, low: int, total: Array) -> None:
    """Compute the same as :func:`accumulate` for a batch with renumbered features; the values of row i start at ``starts[i]``."""
    bands, width = bands_of(indptr, total.size, total.itemsize)
    rows = coefficients.size
    places, ends, shifts = np.empty(rows, np.uint64), np.empty(rows, np.uint64), np.empty(rows, np.uint64)
    write_extents(indptr, starts, places, ends, shifts)
    add_in_bands(indices, values, shifts, places, ends, coefficients, low, total, bands, width)
