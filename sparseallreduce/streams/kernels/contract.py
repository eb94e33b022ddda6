"""Conventions shared by callers, NumPy code and compiled kernels: array types, format constants, and special return values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import StreamError

__all__ = [
    "ABSENT",
    "LEVEL_PARTS",
    "LEVEL_ROUNDS",
    "MALFORMED",
    "GAPS_BLOCK",
    "GAPS_HEADER",
    "GAPS_LONGEST",
    "GAPS_LOW",
    "GAPS_PLACE",
    "GAPS_RUN",
    "LONG_FLOATS",
    "PIECE",
    "QSGD_BLOCK",
    "QSGD_LEVELS",
    "SHORT_FLOATS",
    "UINT32",
    "UINT64",
    "Array",
    "Indices",
    "Positions",
    "Values",
    "unlike",
]

Array = NDArray[Any]
Indices = NDArray[np.unsignedinteger[Any]]
Values = NDArray[Any]
Positions = NDArray[np.uint64]

UINT32, UINT64 = np.dtype(np.uint32), np.dtype(np.uint64)
# Constants of the gap code (see streams.kernels.reference.gaps).
GAPS_BLOCK = 1024  # indices in a block, which has its own parameters
GAPS_HEADER = 6  # bytes
GAPS_PLACE = 10  # bits of an index's position in a block
GAPS_LOW = 56  # most low bits, so that they fit into eight bytes at any bit offset
GAPS_RUN = 255  # replaces the number of low bits if all gaps except the exceptions are zero
GAPS_LONGEST = 27  # largest high part written as zeros and a one, so that two fit into eight bytes at any bit offset

SHORT_FLOATS = {"float16": (10, 15), "bfloat16": (7, 127)}  # bits of the mantissa, and the bias of the exponent
LONG_FLOATS: dict[np.dtype[Any], tuple[int, int]] = {np.dtype(np.float32): (23, 127), np.dtype(np.float64): (52, 1023)}
QSGD_BLOCK = 256  # values in a block, which has its own scale
LEVEL_PARTS, LEVEL_ROUNDS = 65535, 3  # resolution of the search for two levels, and its iterations
QSGD_LEVELS = {8: 127, 4: 7}  # non-zero levels of each sign, by the bits of a level

PIECE = 1 << 14  # entries of all rows summed at a time; with the sums of two tree levels they fit into the L2 cache

# Special return values of kernels, in place of a count or position; a kernel without such a result returns 0.
ABSENT = -1  # not found: no violation, no sum within the limit
MALFORMED = -2  # arrays have wrong lengths or are not contiguous, or an index is out of range; the caller raises an error


def unlike(what: str, **arrays: NDArray[Any]) -> StreamError:
    """Return the error for arrays whose dtypes or dimensions do not match."""
    kinds = ", ".join(
        f"{name} of {array.dtype} with {array.ndim} dimensions{'' if array.flags.writeable else ', read-only'}"
        for name, array in arrays.items()
    )
    return StreamError(f"arrays cannot be {what} that differ in dtype or dimensions, or outputs that are read-only: {kinds}")
