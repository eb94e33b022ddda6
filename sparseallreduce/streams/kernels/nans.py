"""NaNs, of which there are many with different bits: whether an array has any, and how they all become the same one.

A sum of two NaNs is one of them, usually the first. Compilers swap the operands of a sum as they like, and do so in the loop over most
values and not in that over the last few, or the other way round; MPI libraries add in an order that differs from rank to rank. So what
several ranks compute, each for itself, has to have its NaNs made the same.
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
    """How a dtype, or the parts of a complex one, represents NaNs: by bits above those of infinity, but for the sign."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        real = dtype.type(0).real.dtype if dtype.kind == "c" else dtype
        self.bits = np.dtype(f"u{real.itemsize}")
        self.mask = (1 << (8 * real.itemsize - 1)) - 1  # without the sign
        self.infinity, nan = np.array([np.inf, np.nan]).astype(real).view(self.bits).tolist()
        self.nan = nan & self.mask  # NumPy's
        self.entry: Callable[..., int] | None = None  # the compiled kernel, once it was looked for

    def bits_of(self, values: Values) -> Values:
        """The same memory as unsigned integers."""
        if values.ndim == 1 and values.itemsize == self.bits.itemsize:
            return values.view(self.bits)
        if not values.flags.c_contiguous:
            raise _gaps(values)
        return values.reshape(-1).view(self.bits)

    def is_in(self, bits: Values) -> bool:
        """Whether one of these is that of a NaN."""
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
    """Return True if an array has a NaN, or a complex number of which a part is one.

    Parameters
    ----------
    values : ndarray
        C-contiguous. It takes a pass over the array at the speed of the memory, and 0.5 microseconds. Of an array on a GPU, which knows one
        NaN, the answer is no.

    Raises
    ------
    StreamError
        If the array has gaps.
    """
    coding = _CODINGS.get(values.dtype)
    return coding is not None and isinstance(values, np.ndarray) and coding.is_in(coding.bits_of(values))


def unify_nans(values: Values) -> None:
    """Replace every NaN of an array, and of the parts of complex numbers, by NumPy's.

    Parameters
    ----------
    values : ndarray
        C-contiguous. Nothing is written if it has no NaN, or lies on a GPU.

    Raises
    ------
    StreamError
        If the array has gaps.
    """
    coding = _CODINGS.get(values.dtype)
    if coding is None or not isinstance(values, np.ndarray):
        return
    bits = coding.bits_of(values)
    if coding.is_in(bits):
        bits[(bits & coding.bits.type(coding.mask)) > coding.infinity] = coding.nan


def _gaps(array: Values) -> StreamError:
    return StreamError(f"the array of shape {array.shape} and strides {array.strides} is not C-contiguous")
