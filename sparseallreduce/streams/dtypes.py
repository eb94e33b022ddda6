"""The dtypes that the values of a stream may have.

bfloat16 is that of ml_dtypes, which NumPy itself does not know: without that package there are no streams of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from sparseallreduce.errors import StreamTypeError

try:
    from ml_dtypes import bfloat16
except ImportError:
    bfloat16 = None

__all__ = ["BFLOAT16", "DTYPES", "HALVES", "NAMES", "as_dtype", "epsilon", "is_float", "is_supported", "smallest_normal"]

BFLOAT16: np.dtype[Any] | None = None if bfloat16 is None else np.dtype(bfloat16)
_PRESENT = () if BFLOAT16 is None else (BFLOAT16,)

# Messages name a dtype by its position here. That of bfloat16 is the last, so that the others have theirs with and without ml_dtypes:
# whoever appends another keeps its place, 7, for it.
DTYPES: tuple[np.dtype[Any], ...] = (
    *(np.dtype(name) for name in ("float32", "float64", "float16", "int32", "int64", "complex64", "complex128")),
    *_PRESENT,
)
NAMES = ", ".join(dtype.name for dtype in DTYPES)
HALVES = (np.dtype(np.float16), *_PRESENT)  # floats of two bytes, of which compiled code only copies the bits


def is_supported(dtype: np.dtype[Any]) -> bool:
    """Whether a stream may have values of this dtype."""
    return dtype in DTYPES


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether these are real floating-point numbers; NumPy takes bfloat16 for a type without a kind.

    >>> is_float(np.dtype("float16")), is_float(np.dtype("complex64"))
    (True, False)
    """
    return dtype.kind == "f" or dtype == BFLOAT16


def epsilon(dtype: DTypeLike) -> float:
    """The distance from 1 to the next larger number of a floating-point dtype, or of the parts of a complex one.

    >>> epsilon("float32") == 2**-23
    True
    """
    dtype = np.dtype(dtype)
    return 2.0**-7 if dtype == BFLOAT16 else float(np.finfo(dtype).eps)


def smallest_normal(dtype: DTypeLike) -> float:
    """The smallest positive number of a floating-point dtype, or of the parts of a complex one, that has all its digits.

    >>> smallest_normal("float32") == 2**-126
    True
    """
    dtype = np.dtype(dtype)
    return 2.0**-126 if dtype == BFLOAT16 else float(np.finfo(dtype).tiny)


def as_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """The dtype in the native byte order.

    Raises
    ------
    StreamTypeError
        If streams do not carry it.
    """
    try:
        wanted = np.dtype(dtype).newbyteorder("=")
    except TypeError as error:
        needed = "install ml_dtypes for it, or " if dtype == "bfloat16" else ""
        raise StreamTypeError(f"{dtype!r} is no dtype here ({error}): {needed}take one of {NAMES}") from None
    if not is_supported(wanted):
        raise StreamTypeError(f"values of dtype {wanted} are not supported: convert them to one of {NAMES}")
    return wanted
