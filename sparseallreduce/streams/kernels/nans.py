"""Detect NaNs, and replace them by NumPy's NaN, since NaNs can have different bits.

The sum of two NaNs is one of them, usually the first. Compilers swap the operands of a sum freely, and differently in the vectorised part
of a loop and in the rest; MPI libraries add in an order that differs from rank to rank. Results that several ranks compute separately
therefore need their NaNs made equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.dtypes import DTYPES
from sparseallreduce.streams.kernels.contract import UINT32, Values
from sparseallreduce.streams.kernels.dispatch import find
from sparseallreduce.streams.kernels.reference import nans as reference

__all__ = ["has_nan", "unify_nans"]


class _Coding:
    """The representation of NaNs in a dtype, or in the parts of a complex one: bits, without the sign, above those of infinity."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        real = dtype.type(0).real.dtype if dtype.kind == "c" else dtype
        self.bits = np.dtype(f"u{real.itemsize}")
        self.mask = (1 << (8 * real.itemsize - 1)) - 1  # without the sign
        self.infinity, nan = np.array([np.inf, np.nan]).astype(real).view(self.bits).tolist()
        self.nan = nan & self.mask  # NumPy's
        self.entry: Callable[..., int] | None = None  # the compiled kernel, once it was looked for

    def bits_of(self, values: Values) -> Values:
        """Return a view as unsigned integers."""
        if values.ndim == 1 and values.itemsize == self.bits.itemsize:
            return values.view(self.bits)
        if not values.flags.c_contiguous:
            raise _gaps(values)
        return values.reshape(-1).view(self.bits)

    def is_in(self, bits: Values) -> bool:
        """Return True if any element is a NaN."""
        entry = self.entry
        if entry is None:
            entry = self.entry = find("nans.any_above", None, UINT32, self.bits, 1)
        if entry is None:
            return reference.any_above(bits, self.mask, self.infinity)
        found = entry(bits, self.mask, self.infinity)
        if found < 0:
            raise _gaps(bits)
        return found > 0


_CODINGS = {dtype: _Coding(dtype) for dtype in DTYPES if dtype.kind != "i"}


def has_nan(values: Values) -> bool:
    """Return True if an array has a NaN, or a complex number with a NaN part.

    Parameters
    ----------
    values : ndarray
        C-contiguous. The time is one pass over memory plus 0.5 microseconds. The result is False for an array on a GPU, which produces only
        one NaN.

    Raises
    ------
    StreamError
        If the array is not contiguous.
    """
    coding = _CODINGS.get(values.dtype)
    return coding is not None and isinstance(values, np.ndarray) and coding.is_in(coding.bits_of(values))


def unify_nans(values: Values) -> None:
    """Replace every NaN of an array, and of the parts of complex numbers, by NumPy's.

    Parameters
    ----------
    values : ndarray
        C-contiguous. Nothing is written if it has no NaN, or is on a GPU.

    Raises
    ------
    StreamError
        If the array is not contiguous.
    """
    coding = _CODINGS.get(values.dtype)
    if coding is None or not isinstance(values, np.ndarray):
        return
    bits = coding.bits_of(values)
    if coding.is_in(bits):
        bits[(bits & coding.bits.type(coding.mask)) > coding.infinity] = coding.nan


def _gaps(array: Values) -> StreamError:
    return StreamError(f"the array of shape {array.shape} and strides {array.strides} is not C-contiguous")
