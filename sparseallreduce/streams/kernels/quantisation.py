"""Encode values in fewer bits: rounded to 16-bit floats, or to levels between zero and the largest magnitude of a block (QSGD)."""

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
    """Round to 16-bit floats, to nearest, ties to even. NaN keeps its sign, and infinity stays infinity.

    Parameters
    ----------
    values : ndarray of float32 or float64, shape (n,)
    form : {"float16", "bfloat16"}
    out : ndarray of uint16, shape (n,)
        The bits of the rounded values.

    Returns
    -------
    int
        The position of the first finite value that would become infinite, in which case ``out`` is undefined; -1 if there is none.

    Raises
    ------
    StreamError
        If lengths or dtypes do not match, or an array is not contiguous.

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
    """Convert 16-bit floats to longer floats, exactly.

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
    """Draw a level for each value, between zero and the largest magnitude of its block, with the value as expectation.

    The result depends on the key alone, however a message is cut into pieces at multiples of ``QSGD_BLOCK``. The format is described in
    :mod:`sparseallreduce.streams.kernels.reference.quantisation`; :func:`restore` decodes it.

    Parameters
    ----------
    values : ndarray of float32 or float64, shape (n,)
    bits : {8, 4}
        Bits of a level.
    key : int
        Seed of the random numbers, in ``[0, 2**64)``.
    start : int
        Position of ``values[0]`` in the message, a multiple of ``QSGD_BLOCK``.
    scales : ndarray of float32, shape (ceil(n / QSGD_BLOCK),)
    codes : ndarray of uint8, shape (n,) or (ceil(n / 2),)

    Returns
    -------
    int
        The position of the first value that is not finite or lies beyond float32; then the outputs are undefined. -1 if there is none.

    Raises
    ------
    StreamError
        If lengths or dtypes do not match, an array is not contiguous, or ``start`` is not at the start of a block.

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
    """Decode levels: ``scale * level / s`` in float64, rounded to the dtype.

    Parameters
    ----------
    scales, codes, bits
        As for :func:`quantise`.
    out : ndarray of float32 or float64, shape (n,)

    Returns
    -------
    bool
        True if all scales are finite and non-negative, and all levels valid. Otherwise the content of ``out`` is undefined.

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
    """Encode values in 2 bits: a sign, and the nearer of two magnitudes of their block.

    The two magnitudes minimise the squared error, approximately. The code is biased, and suits values of similar magnitude whose errors are
    fed back, such as the largest of a gradient. The format is that of :mod:`sparseallreduce.streams.kernels.reference.quantisation`.

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
        raise StreamError("the scales are read-only: pass a writeable array")
    key = ("quantisation.to_two_levels", None, UINT32, values.dtype, 1)
    entry = known(key) or find(*key)
    if entry is None:
        _fit_two_levels(scales, codes, values)
        return reference.to_two_levels(values, scales, codes)
    position: int = entry(values, scales, codes)
    _fit(position, values, scales, codes)
    return position


def from_two_levels(scales: Values, codes: Array, out: Values) -> bool:
    """Decode codes of 2 bits.

    Parameters
    ----------
    scales, codes
        As for :func:`to_two_levels`.
    out : ndarray of float32 or float64, shape (n,)

    Returns
    -------
    bool
        True if all scales are finite, non-negative and in order, and unused bits are zero. Otherwise the content of ``out`` is undefined.

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
    """Raise an error for dtypes and dimensions that are not compiled."""
    same = all(array.dtype == dtype and array.ndim == 1 for array, dtype in others.values())
    if not same or values.dtype not in LONG_FLOATS or values.ndim != 1 or not output.flags.writeable:
        kinds = ", ".join(f"{name} of {array.dtype}" for name, (array, _) in others.items())
        raise StreamError(f"values of {values.dtype} and shape {values.shape} with {kinds} cannot be converted, or an output is read-only")


def _fit(result: int, *arrays: Array) -> None:
    if result == MALFORMED:
        raise StreamError(f"arrays of shapes {[array.shape for array in arrays]} do not fit together, or are not C-contiguous")
