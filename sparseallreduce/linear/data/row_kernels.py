"""Loops that sort the features of rows, compiled by numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.compilation import kernel

__all__ = ["increasing", "merge_rows"]

Array = NDArray[Any]


@kernel
def increasing(indptr: Array, indices: Array) -> bool:
    """Return True if the features of each row are strictly ascending."""
    for row in range(indptr.size - 1):
        for entry in range(indptr[row] + 1, indptr[row + 1]):
            if indices[entry] <= indices[entry - 1]:
                return False
    return True


@kernel
def merge_rows(indptr: Array, indices: Array, values: Array) -> int:
    """Sort the features of every row and add duplicates; return the total number of entries left."""
    written = begin = 0
    for row in range(indptr.size - 1):
        end = indptr[row + 1]
        order = np.argsort(indices[begin:end], kind="mergesort")
        found, given = indices[begin:end].copy(), values[begin:end].copy()
        first = written
        for place in order:
            if written > first and indices[written - 1] == found[place]:
                values[written - 1] += given[place]
            else:
                indices[written], values[written] = found[place], given[place]
                written += 1
        begin = end
        indptr[row + 1] = written
    return written
