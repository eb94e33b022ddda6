"""Building blocks of CUDA kernels: operators on two values, searching, hashing, reading bits, and views as unsigned integers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.core import config

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels.cuda.launching import device

__all__ = [
    "OPERATORS",
    "U",
    "as_bits",
    "check_together",
    "larger",
    "lower_bound",
    "operator_of",
    "product_of",
    "read_bits",
    "replace",
    "smaller",
    "split_mix",
]

U: Any = np.uint64
_VALUES = tuple(np.dtype(name) for name in ("float32", "float64", "int32", "int64"))
_COMPLEX = tuple(np.dtype(name) for name in ("complex64", "complex128"))


@device
def smaller(a: Any, b: Any) -> Any:
    """Return ``min(a, b)``, which numba 0.68 does not compile for CUDA."""
    return a if a < b else b


@device
def larger(a: Any, b: Any) -> Any:
    return a if a > b else b


@device
def _add(a: Any, b: Any) -> Any:
    return a + b


@device
def _multiply(a: Any, b: Any) -> Any:
    return a * b


@device
def _minimum(a: Any, b: Any) -> Any:
    """Return the minimum; NaN propagates as in NumPy."""
    return a if a < b or a != a else b


@device
def _maximum(a: Any, b: Any) -> Any:
    return a if a > b or a != a else b


@device
def replace(a: Any, b: Any) -> Any:
    return b


OPERATORS: dict[Any, Any] = {np.add: _add, np.multiply: _multiply, np.minimum: _minimum, np.maximum: _maximum}


def operator_of(ufunc: Any, dtype: np.dtype[Any]) -> Any:
    """Return the device function of an operator, or None if it is evaluated on whole arrays."""
    if dtype in _VALUES or (dtype in _COMPLEX and ufunc is np.add):
        return OPERATORS.get(ufunc)
    return None


def as_bits(values: Any) -> tuple[Any, int]:
    """Return a view as a vector of unsigned integers, and their number for each entry; items of 16 bytes count as two."""
    if not values.flags.c_contiguous or values.dtype.itemsize not in (1, 2, 4, 8, 16):
        raise StreamError(f"an array of {values.dtype} with strides {values.strides} has gaps, or items that cannot be copied as integers")
    parts = 2 if values.dtype.itemsize == 16 else 1
    return values.reshape(-1).view(f"u{values.dtype.itemsize // parts}"), math.prod(values.shape[1:]) * parts


def check_together(what: str, indices: Any, values: Any) -> None:
    """Raise an error unless indices and values form entries."""
    fit = indices.ndim == 1 and values.ndim in (1, 2) and len(indices) == len(values)
    if not fit or indices.dtype not in (np.uint32, np.uint64) or not (indices.flags.c_contiguous and values.flags.c_contiguous):
        raise StreamError(
            f"cannot be {what}: {indices.dtype} indices of shape {indices.shape} and {values.dtype} values of shape {values.shape}; each "
            "index is uint32 or uint64 and needs a value, and both arrays must be C-contiguous"
        )


@device
def lower_bound(array: Any, lo: Any, hi: Any, value: Any) -> Any:
    """Return the first position from ``lo`` on and before ``hi`` whose value is at least ``value``, or ``hi``."""
    while lo < hi:
        middle = (lo + hi) // 2
        if array[middle] < value:
            lo = middle + 1
        else:
            hi = middle
    return lo


@device
def read_bits(octets: Any, bit: Any, width: Any) -> Any:
    """Return ``width`` bits, at most 64, from a bit position on, the lowest bit of a byte first."""
    value, filled = U(0), 0
    while filled < width:
        skipped = bit & 7
        taken = smaller(8 - skipped, width - filled)
        piece = (U(octets[bit >> 3]) >> U(skipped)) & ((U(1) << U(taken)) - U(1))
        value |= piece << U(filled)
        bit += taken
        filled += taken
    return value


@device
def split_mix(number: Any) -> Any:
    """Return a 64-bit hash (SplitMix64)."""
    number = (number + U(1)) * U(0x9E3779B97F4A7C15)
    number = (number ^ (number >> U(30))) * U(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> U(27))) * U(0x94D049BB133111EB)
    return number ^ (number >> U(31))


def product_of(dtype: np.dtype[Any]) -> Any:
    """Return a device function for products that are rounded before anything is added to them.

    The CUDA compiler otherwise fuses a product and a sum into one operation with one rounding, where the CPU's kernels round twice.
    """
    if config.ENABLE_CUDASIM:
        return _multiply
    from numba.cuda import libdevice

    return libdevice.fmul_rn if dtype == np.float32 else libdevice.dmul_rn
