"""Index sets and dense arrays encoded as bitmaps: a bit for each position, and the values at the set bits."""

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
    """Encode a sorted index set as a bitmap that starts at ``lo``, the lowest bit of a byte first.

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
        If indices are not increasing or out of range, ``out`` has another length, or an array is not contiguous or has another dtype.

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
    """Decode a bitmap written by :func:`encode_bitmap` into an array with one element for each index.

    Returns
    -------
    bool
        True if ``bits`` has ``len(out)`` bits set, and none beyond ``extent``. Otherwise the content of ``out`` is undefined.

    Raises
    ------
    StreamError
        If ``bits`` has the wrong length, the range exceeds the dtype, or an array is not contiguous or has another dtype.
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
    """Encode the non-zero elements or rows of a dense array as a bitmap and their values.

    Parameters
    ----------
    dense : ndarray, shape (size,) or (size, width)
        Of any dtype with items of 1, 2, 4, 8 or 16 bytes. An element counts as non-zero if any of its bits is set, so -0.0 does.
    bits : ndarray of uint8, shape (ceil(size / 8),)
        Overwritten, as by :func:`encode_bitmap`.
    out : ndarray, shape (room,) or (room, width)
        Of the dtype of ``dense``. Its content is undefined if it is too short.

    Returns
    -------
    int
        The number of non-zero elements or rows, which may exceed the length of ``out``.

    Raises
    ------
    StreamError
        If lengths, widths or dtypes do not match, or an array is not contiguous.

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
    """Decode into a dense array what :func:`encode_nonzero` wrote.

    Parameters
    ----------
    bits : ndarray of uint8, shape (ceil(size / 8),)
    values : ndarray, shape (n,) or (n, width)
    out : ndarray, shape (size,) or (size, width)
        Of the dtype of ``values``; overwritten.

    Returns
    -------
    bool
        True if ``bits`` has as many bits set as there are values, and none beyond ``out``. Otherwise the content of ``out`` is undefined.

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
    """Raise an error unless ``octets`` are bytes and the arrays have the same dtype and width."""
    first = next(iter(arrays.values()))
    same = all(array.dtype == first.dtype and array.shape[1:] == first.shape[1:] and array.ndim in (1, 2) for array in arrays.values())
    if not same or octets.ndim != 1 or octets.dtype != _BYTES or ("indices" in arrays and first.ndim != 1):
        raise unlike(what, octets=octets, **arrays)


def _check_writeable(*arrays: Values) -> None:
    for array in arrays:
        if not array.flags.writeable:
            raise StreamError(f"an output of {array.dtype} and shape {array.shape} is read-only")


def _unsigned(array: Values) -> Any:
    """Return a view as unsigned integers; items of 16 bytes become two."""
    if not array.flags.c_contiguous or array.itemsize not in (1, 2, 4, 8, 16):
        raise StreamError(f"an array of {array.dtype} with strides {array.strides} is not C-contiguous, or of items that have no bitmap")
    if array.itemsize < 16:
        return array.view(f"u{array.itemsize}")
    return array.reshape(-1).view(UINT64).reshape(len(array), 2 * math.prod(array.shape[1:]))


def _succeeded(result: int, *arrays: Values) -> bool:
    if result == MALFORMED:
        raise StreamError(f"arrays of shapes {[array.shape for array in arrays]} do not fit together, or are not C-contiguous")
    return result == 0
