"""NaNs, of which there are many with different bits: whether an array has any, and how they all become the same one.

A sum of two NaNs is one of them, usually the first. Compilers swap the operands of a sum as they like, and do so in the loop over most
values and not in that over the last few, or the other way round; MPI libraries add in an order that differs from rank to rank. So what
several ranks compute, each for itself, has to have its NaNs made the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.dtypes import DTYPES
from sparseallreduce.streams.kernels.contract import MALFORMED, UINT32, Values
from sparseallreduce.streams.kernels.dispatch import find, known
from sparseallreduce.streams.kernels.reference import nans as reference

__all__ = ["has_nan", "unify_nans"]


class _Coding(NamedTuple):
    """How a dtype, or the parts of a complex one, represents NaNs: by bits above those of infinity, but for the sign."""

    bits: np.dtype[Any]
    mask: int  # without the sign
    infinity: int
    nan: int  # NumPy's


def _coding(dtype: np.dtype[Any]) -> _Coding:
    real = dtype.type(0).real.dtype if dtype.kind == "c" else dtype
    bits = np.dtype(f"u{real.itemsize}")
    infinity, nan = np.array([np.inf, np.nan]).astype(real).view(bits).tolist()
    mask = (1 << (8 * real.itemsize - 1)) - 1
    return _Coding(bits, mask, infinity, nan & mask)


_CODINGS = {dtype: _coding(dtype) for dtype in DTYPES if dtype.kind != "i"}


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
    coding = _coding_of(values)
    return coding is not None and _has_nan(_bits(values, coding), coding)


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
    coding = _coding_of(values)
    if coding is None:
        return
    bits = _bits(values, coding)
    if _has_nan(bits, coding):
        bits[(bits & coding.bits.type(coding.mask)) > coding.infinity] = coding.nan


def _coding_of(values: Values) -> _Coding | None:
    return _CODINGS.get(values.dtype) if isinstance(values, np.ndarray) else None


def _bits(values: Values, coding: _Coding) -> Values:
    if not values.flags.c_contiguous:
        raise StreamError(f"the array of shape {values.shape} and strides {values.strides} is not C-contiguous")
    return values.reshape(-1).view(coding.bits)


def _has_nan(bits: Values, coding: _Coding) -> bool:
    entry = known(("nans.any_above", None, UINT32, bits.dtype, 1)) or find("nans.any_above", None, UINT32, bits.dtype, 1)
    if entry is None:
        return reference.any_above(bits, coding.mask, coding.infinity)
    found: int = entry(bits, coding.mask, coding.infinity)
    if found == MALFORMED:
        raise StreamError(f"the array of shape {bits.shape} and strides {bits.strides} has gaps")
    return bool(found)
