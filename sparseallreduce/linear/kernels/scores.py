"""Scores of rows: their inner products with the weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels.bands import bands_in_place, product, products, scores_in_bands
from sparseallreduce.linear.kernels.rows import (
    MANY_LINES,
    NEAR,
    ROW_AHEAD,
    bands_of,
    entries_of,
    fetch_first,
    fetch_row,
    stride_of,
    write_extents,
)
from sparseallreduce.streams.kernels.compilation import inlined, kernel

__all__ = ["compact_scores", "scores"]

Array = NDArray[Any]

_ZERO = np.uint64(0)
_TOGETHER = 4096  # largest number of rows scored together in bands
_EVERY = np.uint64(2**64 - 1)  # larger than any index


@kernel
def scores(indptr: Array, indices: Array, values: Array, rows: Array, weights: Array, out: Array) -> None:
    """Write the inner product of row ``rows[i]`` with the weights to ``out[i]``."""
    groups = -(-rows.size // _TOGETHER)
    for group in range(groups):
        first, last = rows.size * group // groups, rows.size * (group + 1) // groups
        some, found = rows[first:last], out[first:last]
        bands = bands_in_place(entries_of(indptr, some), some.size, weights.size, stride_of(weights))
        if bands == 1:
            _scores_by_row(indptr, indices, values, some, weights, found)
        else:
            places, ends, shifts = np.empty(some.size, np.uint64), np.empty(some.size, np.uint64), np.zeros(some.size, np.uint64)
            for i in range(some.size):
                places[i], ends[i] = indptr[some[i]], indptr[some[i] + 1]
            sums = np.zeros((some.size, 4), weights.dtype)
            scores_in_bands(indices, values, shifts, places, ends, weights, bands, -(-weights.size // bands), sums, found)


@inlined
def _scores_by_row(indptr: Array, indices: Array, values: Array, rows: Array, weights: Array, out: Array) -> None:
    far = weights.size * stride_of(weights) > NEAR
    zero = weights.dtype.type(0)
    for i in range(rows.size):
        fetch_row(indptr, indices, values, rows, i + ROW_AHEAD, MANY_LINES)
        begin, end = np.uint64(indptr[rows[i]]), np.uint64(indptr[rows[i] + 1])
        sums = zero, zero, zero, zero
        if far:
            fetch_first(indptr, indices, rows, i + 1, weights)
            begin, sums = products(indices, values, _ZERO, begin, end, weights, _EVERY, sums, True)
        else:
            begin, sums = products(indices, values, _ZERO, begin, end, weights, _EVERY, sums, False)
        out[i] = product(indices, values, _ZERO, begin, end, weights, sums)


@kernel
def compact_scores(indptr: Array, indices: Array, values: Array, starts: Array, weights: Array, out: Array) -> None:
    """Write the scores of all rows of a batch with renumbered features, bitwise identical to :func:`scores`.

    The values of row i start at ``starts[i]``.
    """
    bands, width = bands_of(indptr, weights.size, weights.itemsize)
    places, ends, shifts = np.empty(out.size, np.uint64), np.empty(out.size, np.uint64), np.empty(out.size, np.uint64)
    write_extents(indptr, starts, places, ends, shifts)
    scores_in_bands(indices, values, shifts, places, ends, weights, bands, width, np.zeros((out.size, 4), weights.dtype), out)
