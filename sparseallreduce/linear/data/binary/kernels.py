"""The loop over non-zeros that checks the content of a binary file, compiled by numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.compilation import kernel

__all__ = ["ABOVE", "NOT_FINITE", "UNSORTED", "first_fault"]

Array = NDArray[Any]

ABOVE, UNSORTED, NOT_FINITE = 1, 2, 3


@kernel
def first_fault(indptr: Array, indices: Array, values: Array, features: int) -> tuple[int, int, int]:
    """Return the first fault (0: none), with its row and entry: an index not below ``features``, an unsorted row, a non-finite value."""
    for row in range(indptr.size - 1):
        least = np.uint64(0)
        for entry in range(indptr[row], indptr[row + 1]):
            index = np.uint64(indices[entry])
            if index >= np.uint64(features):
                return ABOVE, row, entry
            if index < least:
                return UNSORTED, row, entry
            if not np.isfinite(values[entry]):
                return NOT_FINITE, row, entry
            least = index + np.uint64(1)
    return 0, 0, 0
