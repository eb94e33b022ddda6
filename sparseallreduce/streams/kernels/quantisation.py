"""Values in fewer bits: rounded to shorter floats, or to levels drawn at random between zero and the largest of a block (QSGD)."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels.contract import LONG_FLOATS, MALFORMED, QSGD_BLOCK, QSGD_LEVELS, SHORT_FLOATS, UINT32, Array, Values
from sparseallreduce.streams.kernels.dispatch import find, known
from sparseallreduce.streams.kernels.reference import quantisation as reference

__all__ = ["from_two_levels", "narrow", "quantise", "restore", "to_two_levels", "widen"]

_BYTES, _HALVES, _SINGLE = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.float32)


def narrow(values: Values, form: str, out: Array) -> int:
    """Round to floats of 16 bits, to the nearest and to even. NaN stays NaN with its sign, and infinity stays infinity.

    Parameters
    ----------
    values : ndarray of float32 or float64, shape (n,)
    form : {"float16", "bfloat16"}
    out : ndarray of uint16, shape (n,)
        The bits of the rounded values.

    Returns
    -------
    int
        The position of the first finite value that becomes infinite; then ``out`` is undefined. -1 if there is none.

    Raises
    ------
    StreamError
        If lengths or dtypes do not fit together, or an array has gaps.

    Examples
    --------
    >>> halves = np.empty(3, np.uint16)
    >>> narrow(np.array([1.0, np.inf, 65519.0]), "float16", halves), halves.view(np.float16)
    (-1, array([1.000e+00,       inf, 6.550e+04], dtype=float16))
    >>> narrow(np.array([1.0, np.inf, 65520.0]), "float16", halves)
    2
    """
    _check(values, halves=(out, _HALVES), output=out)
    key = ("quantisation.narrow", None, UINT32, values.dtype, 1)
    entry = known(key) or find(*key)
    if entry is None:
        return reference.narrow(values, form, out)
    position: int = entry(values, *LONG_FLOATS[values.dtype], *SHORT_FLOATS[form], out)
    _fit(position, values, out)
    return position


def widen(halves: Array, form: str, out: Values) -> None:
    """Write the values that floats of 16 bits stand for, exactly.

    Parameters
    ----------
    halves : ndarray of uint16, shape (n,)
    form : {"float16", "bfloat16"}
    out : ndarray of float32 or float64, shape (n,)

    Raises
    ------
    StreamError
        If lengths or dtypes do not fit together, or an array has gaps.
    """
    _check(out, halves=(halves, _HALVES), output=out)
    bits = np.dtype(f"u{out.itemsize}")
    key = ("quantisation.widen", None, UINT32, bits, 1)
    entry = known(key) or find(*key)
    if entry is None:
        reference.widen(halves, form, out)
    else:
        _fit(entry(halves, *LONG_FLOATS[out.dtype], *SHORT_FLOATS[form], out.view(bits)), halves, out)


def quantise(values: Values, bits: int, key: int, start: int, scales: Values, codes: Array) -> int:
    """Draw a level for each value, between zero and the largest magnitude of its block, so that its mean is the value.

    The same key gives the same bits, however a message is cut into pieces at multiples of ``QSGD_BLOCK``. The format is that of
    :mod:`sparseallreduce.streams.kernels.reference.quantisation`, and what readers make of it is what :func:`restore` gives.

    Parameters
    ----------
    values : ndarray of float32 or float64, shape (n,)
    bits : {8, 4}
        Of a level.
    key : int
        What the numbers are drawn by, in ``[0, 2**64)``.
    start : int
        The place of ``values[0]`` in the message, a multiple of ``QSGD_BLOCK``.
    scales : ndarray of float32, shape (ceil(n / QSGD_BLOCK),)
    codes : ndarray of uint8, shape (n,) or (ceil(n / 2),)

    Returns
    -------
    int
        The position of the first value that is not finite or lies beyond float32; then the outputs are undefined. -1 if there is none.

    Raises
    ------
    StreamError
        If lengths or dtypes do not fit together, an array has gaps, or ``start`` is in the midst of a block.

    Examples
    --------
    >>> values, scales, codes = np.array([0.5, -1.0, 0.0]), np.empty(1, np.float32), np.empty(3, np.uint8)
    >>> quantise(values, 8, 1, 0, scales, codes), restore(scales, codes, 8, values)
    (-1, True)
    >>> values[1:], bool(abs(values[0] - 0.5) < 1 / 127)
    (array([-1.,  0.]), True)
    """
    _check(values, scales=(scales, _SINGLE), codes=(codes, _BYTES), output=codes)
    if start % QSGD_BLOCK or bits not in QSGD_LEVELS or not scales.flags.writeable:
        raise StreamError(f"a piece cannot begin at {start} with levels of {bits} bits: only at multiples of {QSGD_BLOCK}, with 8 or 4")
    entry_key = ("quantisation.quantise", None, UINT32, values.dtype, 1)
    entry = known(entry_key) or find(*entry_key)
    if entry is None:
        return reference.quantise(values, bits, key, start, scales, codes)
    position: int = entry(values, start, key, bits, scales, codes)
    _fit(position, values, scales, codes)
    return position


def restore(scales: Values, codes: Array, bits: int, out: Values) -> bool:
    """Write the values that levels stand for: ``scale * level / s`` in float64, rounded to the dtype.

    Parameters
    ----------
    scales, codes, bits
        As for :func:`quantise`.
    out : ndarray of float32 or float64, shape (n,)

    Returns
    -------
    bool
        Whether all scales are finite and not negative, and all levels those of values. If not, what ``out`` holds is undefined.

    Raises
    ------
    StreamError
        If lengths or dtypes do not fit together, or an array has gaps.
    """
    _check(out, scales=(scales, _SINGLE), codes=(codes, _BYTES), output=out)
    if bits not in QSGD_LEVELS:
        raise StreamError(f"levels have 8 or 4 bits, not {bits}")
    key = ("quantisation.restore", None, UINT32, out.dtype, 1)
    entry = known(key) or find(*key)
    if entry is None:
        return reference.restore(scales, codes, bits, out)
    result: int = entry(scales, codes, bits, out)
    _fit(result, scales, codes, out)
    return result == 0


def to_two_levels(values: Values, scales: Values, codes: Array) -> int:
    """Write values in 2 bits: a sign, and one of two magnitudes of their block, the nearer one. It is not right on the mean.

    The two magnitudes are chosen for a small squared error, so that this suits values of about one size, as the largest of many are, whose
    errors are fed back. The format is that of :mod:`sparseallreduce.streams.kernels.reference.quantisation`.

    Parameters
    ----------
    values : ndarray of float32 or float64, shape (n,)
    scales : ndarray of float32, shape (2 * ceil(n / QSGD_BLOCK),)
        The magnitudes of each block, the smaller one first.
    codes : ndarray of uint8, shape (ceil(n / 4),)

    Returns
    -------
    int
        The position of the first value that is not finite or lies beyond float32; then the outputs are undefined. -1 if there is none.

    Raises
    ------
    StreamError
        If lengths or dtypes do not fit together, or an array has gaps.

    Examples
    --------
    >>> values, scales, codes = np.array([0.5, -1.0, -0.5, 1.0, 1.0]), np.empty(2, np.float32), np.empty(2, np.uint8)
    >>> to_two_levels(values, scales, codes), scales
    (-1, array([0.5, 1. ], dtype=float32))
    >>> from_two_levels(scales, codes, values), values
    (True, array([ 0.5, -1. , -0.5,  1. ,  1. ]))
    """
    _check(values, scales=(scales, _SINGLE), codes=(codes, _BYTES), output=codes)
    if not scales.flags.writeable:
        raise StreamError("the scales are read-only: pass an array to write in")
    key = ("quantisation.to_two_levels", None, UINT32, values.dtype, 1)
    entry = known(key) or find(*key)
    if entry is None:
        _fit_two_levels(scales, codes, values)
        return reference.to_two_levels(values, scales, codes)
    position: int = entry(values, scales, codes)
    _fit(position, values, scales, codes)
    return position


def from_two_levels(scales: Values, codes: Array, out: Values) -> bool:
    """Write the values that codes of 2 bits stand for.

    Parameters
    ----------
    scales, codes
        As for :func:`to_two_levels`.
    out : ndarray of float32 or float64, shape (n,)

    Returns
    -------
    bool
        Whether all scales are finite, not negative and in order, and unused bits are zero. If not, what ``out`` holds is undefined.

    Raises
    ------
    StreamError
        If lengths or dtypes do not fit together, or an array has gaps.
    """
    _check(out, scales=(scales, _SINGLE), codes=(codes, _BYTES), output=out)
    key = ("quantisation.from_two_levels", None, UINT32, out.dtype, 1)
    entry = known(key) or find(*key)
    if entry is None:
        _fit_two_levels(scales, codes, out)
        return reference.from_two_levels(scales, codes, out)
    result: int = entry(scales, codes, out)
    _fit(result, scales, codes, out)
    return result == 0


def _fit_two_levels(scales: Values, codes: Array, values: Values) -> None:
    fits = len(scales) == 2 * -(-len(values) // QSGD_BLOCK) and len(codes) == -(-len(values) // 4)
    _fit(0 if fits else MALFORMED, scales, codes, values)


def _check(values: Values, output: Array, **others: tuple[Array, Any]) -> None:
    """Refuse dtypes and dimensions that are not compiled."""
    alike = all(array.dtype == dtype and array.ndim == 1 for array, dtype in others.values())
    if not alike or values.dtype not in LONG_FLOATS or values.ndim != 1 or not output.flags.writeable:
        kinds = ", ".join(f"{name} of {array.dtype}" for name, (array, _) in others.items())
        raise StreamError(f"values of {values.dtype} and shape {values.shape} with {kinds} cannot be converted, or an output is read-only")


def _fit(result: int, *arrays: Array) -> None:
    if result == MALFORMED:
        raise StreamError(f"arrays of shapes {[array.shape for array in arrays]} do not fit together, or are not C-contiguous")
