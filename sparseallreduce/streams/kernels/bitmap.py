"""Index sets and dense arrays as bitmaps: a bit for each place, and the values of those that are taken."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels.backend import device_kernels
from sparseallreduce.streams.kernels.contract import MALFORMED, UINT32, UINT64, Indices, Values, unlike
from sparseallreduce.streams.kernels.dispatch import find, known
from sparseallreduce.streams.kernels.reference import bitmap as reference

__all__ = ["decode_bitmap", "decode_nonzero", "encode_bitmap", "encode_nonzero"]

Bytes = NDArray[np.uint8]

_BYTES = np.dtype(np.uint8)


def encode_bitmap(indices: Indices, lo: int, extent: int, out: Bytes) -> None:
    """Write a sorted index set as a bit for each index from ``lo`` on, the lowest bit of a byte first.

    Parameters
    ----------
    indices : ndarray of uint32 or uint64, shape (n,)
        Strictly increasing, in ``[lo, lo + extent)``.
    lo, extent : int
    out : ndarray of uint8, shape (ceil(extent / 8),)
        Overwritten; bits beyond ``extent`` become zero.

    Raises
    ------
    StreamError
        If indices do not increase or lie outside of that range, ``out`` is of another length, or an array has gaps or another dtype.

    Examples
    --------
    >>> bits, indices = np.empty(2, np.uint8), np.array([100, 101, 109], np.uint32)
    >>> encode_bitmap(indices, 100, 12, bits)
    >>> bits, decode_bitmap(bits, 100, 12, indices)
    (array([3, 2], dtype=uint8), True)
    """
    if not type(indices) is type(out) is np.ndarray:
        device = device_kernels(indices, out)
        if device is not None:
            device.encode_bitmap(indices, lo, extent, out)
            return
    _check_bytes("encoded", out, indices=indices)
    _check_writeable(out)
    key = ("bitmap.encode", None, indices.dtype, UINT32, 1)
    entry = known(key) or find(*key)
    if len(out) != -(-extent // 8) or (entry or reference.encode_bitmap)(indices, lo, extent, out) == MALFORMED:
        raise StreamError(
            f"{len(indices)} indices cannot be written as {extent} bits from {lo} on into {len(out)} bytes: they must increase and lie "
            "in that range, the bytes must be as many as the bits take, and both arrays must be C-contiguous"
        )


def decode_bitmap(bits: Bytes, lo: int, extent: int, out: Indices) -> bool:
    """Read what :func:`encode_bitmap` wrote, into an array as long as there are indices.

    Returns
    -------
    bool
        Whether ``bits`` has as many bits set as ``out`` is long, and none beyond ``extent``. If not, what ``out`` holds is undefined.

    Raises
    ------
    StreamError
        If ``bits`` is of another length than ``extent`` takes, the range leaves the dtype, or an array has gaps or another dtype.
    """
    if not type(bits) is type(out) is np.ndarray:
        device = device_kernels(bits, out)
        if device is not None:
            return device.decode_bitmap(bits, lo, extent, out)  # type: ignore[no-any-return]
    _check_bytes("decoded", bits, out=out)
    _check_writeable(out)
    key = ("bitmap.decode", None, out.dtype, UINT32, 1)
    entry = known(key) or find(*key)
    if len(bits) != -(-extent // 8) or lo + extent > 256**out.itemsize:
        raise StreamError(f"{len(bits)} bytes are no bitmap of {extent} indices of {out.dtype} from {lo} on")
    if entry is None:
        return reference.decode_bitmap(bits, lo, extent, out)
    return _succeeded(entry(bits, lo, extent, out), bits, out)


def encode_nonzero(dense: Values, bits: Bytes, out: Values) -> int:
    """Write which elements or rows of a dense array are not zero, and those.

    Parameters
    ----------
    dense : ndarray, shape (size,) or (size, width)
        Of any dtype with items of 1, 2, 4, 8 or 16 bytes. An element is not zero if any of its bits is set, so -0.0 is not.
    bits : ndarray of uint8, shape (ceil(size / 8),)
        Overwritten, as by :func:`encode_bitmap`.
    out : ndarray, shape (room,) or (room, width)
        Of the dtype of ``dense``. What it holds is undefined if there is not enough room for all.

    Returns
    -------
    int
        How many are not zero, which may be more than there is room for.

    Raises
    ------
    StreamError
        If lengths, widths or dtypes do not fit together, or an array has gaps.

    Examples
    --------
    >>> bits, values, dense = np.empty(1, np.uint8), np.empty(4), np.array([0.0, 1.5, 0.0, -0.0])
    >>> count = encode_nonzero(dense, bits, values)
    >>> bits, values[:count], decode_nonzero(bits, values[:count], dense)
    (array([10], dtype=uint8), array([ 1.5, -0. ]), True)
    """
    if not type(dense) is type(out) is np.ndarray:
        device = device_kernels(dense, bits, out)
        if device is not None:
            return device.encode_nonzero(dense, bits, out)  # type: ignore[no-any-return]
    _check_bytes("encoded", bits, dense=dense, out=out)
    _check_writeable(bits, out)
    if len(bits) != -(-len(dense) // 8):
        raise StreamError(f"{len(dense)} elements take {-(-len(dense) // 8)} bytes as bits, not {len(bits)}")
    unsigned, room = _unsigned(dense), _unsigned(out)
    key = ("bitmap.encode_nonzero", None, UINT32, unsigned.dtype, unsigned.ndim)
    entry = known(key) or find(*key)
    if entry is None:
        return reference.encode_nonzero(unsigned, bits, room)
    count: int = entry(unsigned, 256**unsigned.itemsize - 1, bits, room)
    _succeeded(count, bits, dense, out)
    return count


def decode_nonzero(bits: Bytes, values: Values, out: Values) -> bool:
    """Fill a dense array with what :func:`encode_nonzero` wrote.

    Parameters
    ----------
    bits : ndarray of uint8, shape (ceil(size / 8),)
    values : ndarray, shape (n,) or (n, width)
    out : ndarray, shape (size,) or (size, width)
        Of the dtype of ``values``; overwritten.

    Returns
    -------
    bool
        Whether ``bits`` has as many bits set as there are values, and none beyond ``out``. If not, what ``out`` holds is undefined.

    Raises
    ------
    StreamError
        As :func:`encode_nonzero`.
    """
    if not type(values) is type(out) is np.ndarray:
        device = device_kernels(bits, values, out)
        if device is not None:
            return device.decode_nonzero(bits, values, out)  # type: ignore[no-any-return]
    _check_bytes("decoded", bits, values=values, out=out)
    _check_writeable(out)
    if len(bits) != -(-len(out) // 8):
        raise StreamError(f"{len(out)} elements take {-(-len(out) // 8)} bytes as bits, not {len(bits)}")
    given, unsigned = _unsigned(values), _unsigned(out)
    key = ("bitmap.decode_nonzero", None, UINT32, unsigned.dtype, unsigned.ndim)
    entry = known(key) or find(*key)
    if entry is None:
        return reference.decode_nonzero(bits, given, unsigned)
    return _succeeded(entry(bits, given, unsigned), bits, values, out)


def _check_bytes(what: str, octets: Bytes, **arrays: Values) -> None:
    """Refuse bytes that are none, and arrays that are not alike."""
    first = next(iter(arrays.values()))
    alike = all(array.dtype == first.dtype and array.shape[1:] == first.shape[1:] and array.ndim in (1, 2) for array in arrays.values())
    if not alike or octets.ndim != 1 or octets.dtype != _BYTES or ("indices" in arrays and first.ndim != 1):
        raise unlike(what, octets=octets, **arrays)


def _check_writeable(*arrays: Values) -> None:
    for array in arrays:
        if not array.flags.writeable:
            raise StreamError(f"an output of {array.dtype} and shape {array.shape} is read-only")


def _unsigned(array: Values) -> Any:
    """The same memory as unsigned integers, of 16 bytes as two."""
    if not array.flags.c_contiguous or array.itemsize not in (1, 2, 4, 8, 16):
        raise StreamError(f"an array of {array.dtype} with strides {array.strides} is not C-contiguous, or of items that have no bitmap")
    if array.itemsize < 16:
        return array.view(f"u{array.itemsize}")
    return array.reshape(-1).view(UINT64).reshape(len(array), 2 * math.prod(array.shape[1:]))


def _succeeded(result: int, *arrays: Values) -> bool:
    if result == MALFORMED:
        raise StreamError(f"arrays of shapes {[array.shape for array in arrays]} do not fit together, or are not C-contiguous")
    return result == 0
