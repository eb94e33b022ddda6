"""The dtypes that the values of a stream may have.

bfloat16 is provided by ml_dtypes; without that package it is not supported.
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

# Messages identify a dtype by its position here. bfloat16 is the last, so that the positions of the others do not depend on ml_dtypes.
# A new dtype must leave position 7 to it.
DTYPES: tuple[np.dtype[Any], ...] = (
    *(np.dtype(name) for name in ("float32", "float64", "float16", "int32", "int64", "complex64", "complex128")),
    *_PRESENT,
)
NAMES = ", ".join(dtype.name for dtype in DTYPES)
HALVES = (np.dtype(np.float16), *_PRESENT)  # two-byte floats, which compiled code only copies


def is_supported(dtype: np.dtype[Any]) -> bool:
    """Return True if a stream may have values of this dtype."""
    return dtype in DTYPES


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return True for real floating-point dtypes, including bfloat16, which NumPy does not classify as one.

    Examples
    --------
    >>> is_float(np.dtype("float16")), is_float(np.dtype("complex64"))
    (True, False)
    """
    return dtype.kind == "f" or dtype == BFLOAT16


def epsilon(dtype: DTypeLike) -> float:
    """Return the distance from 1 to the next larger number of a floating-point dtype, or of the parts of a complex one.

    Examples
    --------
    >>> epsilon("float32") == 2**-23
    True
    """
    dtype = np.dtype(dtype)
    return 2.0**-7 if dtype == BFLOAT16 else float(np.finfo(dtype).eps)


def smallest_normal(dtype: DTypeLike) -> float:
    """Return the smallest positive normal number of a floating-point dtype, or of the parts of a complex one.

    Examples
    --------
    >>> smallest_normal("float32") == 2**-126
    True
    """
    dtype = np.dtype(dtype)
    return 2.0**-126 if dtype == BFLOAT16 else float(np.finfo(dtype).tiny)


def as_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return a supported dtype in the native byte order.

    Raises
    ------
    StreamTypeError
        If streams do not support it.
    """
    try:
        wanted = np.dtype(dtype).newbyteorder("=")
    except TypeError as error:
        needed = "install ml_dtypes for it, or " if dtype == "bfloat16" else ""
        raise StreamTypeError(f"{dtype!r} is no dtype here ({error}): {needed}take one of {NAMES}") from None
    if not is_supported(wanted):
        raise StreamTypeError(f"values of dtype {wanted} are not supported: convert them to one of {NAMES}")
    return wanted
