"""Magnitudes as integer keys: the bits of a float without its sign have the same order as the magnitudes, with NaN above infinity."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["bits_of", "from_key", "key_of", "keys", "last", "mask", "nan"]

Array = NDArray[Any]

_DTYPES = (np.dtype("i4"), np.dtype("i8"))
_INFINITY = {dtype: int(np.array(np.inf, f"f{dtype.itemsize}").view(dtype)) for dtype in _DTYPES}
_MASK = {dtype: int(np.iinfo(dtype).max) for dtype in _DTYPES}


def bits_of(array: Array) -> Array:
    """Return a view as signed integers."""
    return array.view(f"i{array.itemsize}")


def mask(dtype: np.dtype[Any]) -> int:
    """Return a mask of all bits but the sign."""
    return _MASK[dtype]


def last(array: Array) -> int:
    """Return the largest possible key of an array's values."""
    return mask(np.dtype(f"i{array.itemsize}"))


def nan(dtype: np.dtype[Any]) -> int:
    """Return the key of every NaN."""
    return _INFINITY[dtype] + 1


def keys(array: Array) -> Array:
    """Return the keys of an array's magnitudes."""
    bits = bits_of(array)
    magnitudes: Array = np.minimum(bits & bits.dtype.type(mask(bits.dtype)), bits.dtype.type(nan(bits.dtype)))
    return magnitudes


def key_of(threshold: float, dtype: np.dtype[Any]) -> int:
    """Return the smallest key of a magnitude that is at least ``threshold``, which may lie between two floats of ``dtype``.

    Examples
    --------
    >>> from_key(key_of(0.1, np.dtype("float32")), np.dtype("float32")) >= 0.1
    True
    """
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.array([threshold], dtype)
        if float(rounded[0]) < threshold:
            rounded = np.nextafter(rounded, rounded.dtype.type(np.inf))
    return int(keys(rounded)[0])


def from_key(key: int, dtype: np.dtype[Any]) -> float:
    """Return the magnitude that a key represents."""
    return float(np.array([key], f"i{dtype.itemsize}").view(dtype)[0])
