"""Positions of a batch's rows in memory, and prefetching of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.intrinsics import LINE, prefetch

__all__ = [
    "FAR",
    "MANY_LINES",
    "NEAR",
    "ROW_AHEAD",
    "bands_of",
    "entries_of",
    "extents",
    "fetch",
    "fetch_first",
    "fetch_row",
    "lines_of",
    "stride_of",
    "write_extents",
]

Array = NDArray[Any]

FAR = 64  # number of entries by which a weight or a sum is prefetched ahead
NEAR = 1 << 20  # bytes that fit the cache of a core, and need no prefetching
MANY_LINES = np.uint64(16)  # cache lines prefetched of a row, if its indices are read ahead
ROW_AHEAD = 3  # number of rows by which a row's entries are prefetched ahead
_ROWS_AHEAD = 8  # number of rows by which a row's start position is prefetched ahead
_ROWS_FAR = 32  # the same, if only start positions are read
_FAR = np.uint64(FAR)
_BAND = 1 << 19  # bytes that fit the cache of a core together with the rows being processed
_PART = 32  # smallest mean number of entries of a row in a band


@kernel
def extents(indptr: Array, rows: Array, starts: Array, out: Array) -> int:
    """Write the start of each row, and its start in a contiguous copy followed by the copy's end; return that end."""
    total = out.dtype.type(0)
    for i in range(rows.size):
        if i + _ROWS_FAR < rows.size:
            prefetch(indptr, np.uint64(rows[i + _ROWS_FAR]))
        starts[i] = indptr[rows[i]]
        out[i] = total
        total += indptr[rows[i] + 1] - starts[i]
    out[rows.size] = total
    return int(total)


@inlined
def entries_of(indptr: Array, rows: Array) -> Any:
    """Return the total number of entries of some rows."""
    total = 0
    for i in range(rows.size):
        if i + _ROWS_FAR < rows.size:
            prefetch(indptr, np.uint64(rows[i + _ROWS_FAR]))
        total += indptr[rows[i] + 1] - indptr[rows[i]]
    return total


@inlined
def write_extents(indptr: Array, starts: Array, places: Array, ends: Array, shifts: Array) -> None:
    """Write where the indices of each row start and end, and the distance to its values, which start at ``starts[i]``."""
    for i in range(places.size):
        places[i], ends[i] = indptr[i], indptr[i + 1]
        shifts[i] = starts[i] - indptr[i]


@inlined
def bands_of(indptr: Array, size: int, itemsize: int) -> Any:
    """Return the number of bands for the columns of some rows, and the number of entries of an array of ``size`` per band.

    The array's part for a band stays in the cache until all rows have used it. A row's part in a band has to have a minimum length, because
    its start has to be fetched.
    """
    rows = indptr.size - 1
    if rows == 0 or size * itemsize <= NEAR:
        return 1, np.uint64(size)
    bands = max(1, min(-(-size * itemsize // _BAND), (indptr[rows] - indptr[0]) // (rows * _PART)))
    return bands, np.uint64(-(-size // bands))


@inlined
def fetch_row(indptr: Array, indices: Array, values: Array, rows: Array, i: int, lines: int) -> None:
    """Prefetch the start of row ``rows[i]``, if it exists."""
    if i + _ROWS_AHEAD < rows.size:  # the start positions have to be prefetched, too
        prefetch(indptr, np.uint64(rows[i + _ROWS_AHEAD]))
    if i >= rows.size:
        return
    begin, end = np.uint64(indptr[rows[i]]), np.uint64(indptr[rows[i] + 1])
    fetch(indices, begin, min(lines, lines_of(indices, end - begin)))
    fetch(values, begin, min(lines, lines_of(values, end - begin)))


@inlined
def fetch_first(indptr: Array, indices: Array, rows: Array, i: int, weights: Array) -> None:
    """Prefetch the weights of the first entries of row ``rows[i]``, if it exists."""
    if i < rows.size:
        begin, end = np.uint64(indptr[rows[i]]), np.uint64(indptr[rows[i] + 1])
        for entry in range(begin, min(begin + _FAR, end)):
            prefetch(weights, np.uint64(indices[entry]))


@inlined
def fetch(array: Array, entry: int, lines: int) -> None:
    """Prefetch this many cache lines, starting at an entry; the hardware recognises the pattern and prefetches the following ones."""
    for line in range(lines):
        prefetch(array, entry + np.uint64(line) * np.uint64(LINE // array.itemsize))


@inlined
def stride_of(array: Array) -> Any:
    """Return the number of bytes from one element to the next."""
    return max(array.strides[0], array.itemsize)


@inlined
def lines_of(array: Array, entries: int) -> Any:
    """Return the number of cache lines that this many entries take."""
    return (entries * np.uint64(array.itemsize) + np.uint64(LINE - 1)) // np.uint64(LINE)
