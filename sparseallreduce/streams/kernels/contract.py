"""What callers, NumPy and compiled kernels agree on: how arrays are called, and what the numbers mean that kernels return."""

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
# Of the code for gaps (see streams.kernels.reference.gaps).
GAPS_BLOCK = 1024  # indices with parameters of their own
GAPS_HEADER = 6  # bytes
GAPS_PLACE = 10  # bits that name an index in a block
GAPS_LOW = 56  # low bits at most, so that they lie within eight bytes wherever they begin
GAPS_RUN = 255  # in the place of the number of low bits: all gaps are zero but for the exceptions
GAPS_LONGEST = 27  # largest high part that is written as zeros and a one, so that two lie within eight bytes wherever they begin

SHORT_FLOATS = {"float16": (10, 15), "bfloat16": (7, 127)}  # bits of the mantissa, and the bias of the exponent
LONG_FLOATS = {np.dtype(np.float32): (23, 127), np.dtype(np.float64): (52, 1023)}
QSGD_BLOCK = 256  # values with a scale of their own
LEVEL_PARTS, LEVEL_ROUNDS = 65535, 3  # of the largest magnitude, in which two levels are looked for, and how often they are improved
QSGD_LEVELS = {8: 127, 4: 7}  # besides zero, and of either sign, by the bits of a level

PIECE = 1 << 14  # entries of all rows that are summed at a time: with the sums of two levels of a tree they lie in the L2 cache

# What a kernel returns in the place of a count or a position, none of which is negative; one that has neither to return, 0.
ABSENT = -1  # nothing is wrong, but there is no such thing: no violation, no sum within the limit
MALFORMED = -2  # arrays are of wrong length or have gaps, or an index lies beyond a dense array: the caller raises an error


def unlike(what: str, **arrays: NDArray[Any]) -> StreamError:
    """The error for arrays that do not go together, whatever they hold."""
    kinds = ", ".join(
        f"{name} of {array.dtype} with {array.ndim} dimensions{'' if array.flags.writeable else ', read-only'}"
        for name, array in arrays.items()
    )
    return StreamError(f"arrays cannot be {what} that differ in dtype or dimensions, or outputs that are read-only: {kinds}")
