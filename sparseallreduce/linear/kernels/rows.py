"""Where the rows of a batch lie in memory, and asking for them before their turn."""

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

FAR = 64  # entries that a weight, or a sum, is fetched before its turn
NEAR = 1 << 20  # bytes that lie in the cache of a core anyway
MANY_LINES = np.uint64(16)  # of a row that are fetched, where indices are looked at before their turn
ROW_AHEAD = 3  # rows that a row's entries are fetched before its turn
_ROWS_AHEAD = 8  # that it is fetched where a row begins
_ROWS_FAR = 32  # where nothing but its beginning is asked for
_FAR = np.uint64(FAR)
_BAND = 1 << 19  # bytes that lie in the cache of a core beside rows that are gone through
_PART = 32  # entries of a row that lie in a band at least, on average


@kernel
def extents(indptr: Array, rows: Array, starts: Array, out: Array) -> int:
    """Write where each of these rows begins, and where when they stand one behind the other, and the last ends; returns the latter."""
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
    """How many entries some rows have."""
    total = 0
    for i in range(rows.size):
        if i + _ROWS_FAR < rows.size:
            prefetch(indptr, np.uint64(rows[i + _ROWS_FAR]))
        total += indptr[rows[i] + 1] - indptr[rows[i]]
    return total


@inlined
def write_extents(indptr: Array, starts: Array, places: Array, ends: Array, shifts: Array) -> None:
    """Where the indices of each row begin and end, and how much further on its values begin, which is at ``starts[i]``."""
    for i in range(places.size):
        places[i], ends[i] = indptr[i], indptr[i + 1]
        shifts[i] = starts[i] - indptr[i]


@inlined
def bands_of(indptr: Array, size: int, itemsize: int) -> Any:
    """In how many bands to go through the columns of some rows, and how many entries of an array of ``size`` a band has.

    What the array says of a band stays in the cache until all rows have used it. The part of a row that lies in a band must have some
    length, since its beginning has to be fetched.
    """
    rows = indptr.size - 1
    if rows == 0 or size * itemsize <= NEAR:
        return 1, np.uint64(size)
    bands = max(1, min(-(-size * itemsize // _BAND), (indptr[rows] - indptr[0]) // (rows * _PART)))
    return bands, np.uint64(-(-size // bands))


@inlined
def fetch_row(indptr: Array, indices: Array, values: Array, rows: Array, i: int, lines: int) -> None:
    """Ask for the beginning of row ``rows[i]``, if there is one."""
    if i + _ROWS_AHEAD < rows.size:  # where a row begins has to be fetched, too
        prefetch(indptr, np.uint64(rows[i + _ROWS_AHEAD]))
    if i >= rows.size:
        return
    begin, end = np.uint64(indptr[rows[i]]), np.uint64(indptr[rows[i] + 1])
    fetch(indices, begin, min(lines, lines_of(indices, end - begin)))
    fetch(values, begin, min(lines, lines_of(values, end - begin)))


@inlined
def fetch_first(indptr: Array, indices: Array, rows: Array, i: int, weights: Array) -> None:
    """Ask for the weights of the first entries of row ``rows[i]``, if there is one."""
    if i < rows.size:
        begin, end = np.uint64(indptr[rows[i]]), np.uint64(indptr[rows[i] + 1])
        for entry in range(begin, min(begin + _FAR, end)):
            prefetch(weights, np.uint64(indices[entry]))


@inlined
def fetch(array: Array, entry: int, lines: int) -> None:
    """Ask for so many cache lines from an entry on; the hardware notices the direction and fetches what follows."""
    for line in range(lines):
        prefetch(array, entry + np.uint64(line) * np.uint64(LINE // array.itemsize))


@inlined
def stride_of(array: Array) -> Any:
    """Bytes from one element to the next, where there are any."""
    return max(array.strides[0], array.itemsize)


@inlined
def lines_of(array: Array, entries: int) -> Any:
    """How many cache lines hold so many entries."""
    return (entries * np.uint64(array.itemsize) + np.uint64(LINE - 1)) // np.uint64(LINE)
