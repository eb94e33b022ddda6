"""Encode sorted index sets as the gaps between indices, in close to their entropy."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels.backend import device_kernels
from sparseallreduce.streams.kernels.contract import GAPS_BLOCK, GAPS_HEADER, GAPS_LOW, MALFORMED, UINT32, Indices, unlike
from sparseallreduce.streams.kernels.dispatch import find, known
from sparseallreduce.streams.kernels.reference import gaps as reference

__all__ = ["decode_gaps", "encode_gaps", "gaps_bound"]

Bytes = NDArray[np.uint8]

_BYTES = np.dtype(np.uint8)
_SLACK = 160  # bytes for words written beyond the end, and for a few gaps of more than GAPS_LOW bits


def gaps_bound(count: int, index_dtype: DTypeLike) -> int:
    """Return the buffer size in bytes that :func:`encode_gaps` needs.

    Examples
    --------
    >>> gaps_bound(0, np.uint32), gaps_bound(8192, np.uint32)
    (160, 34024)
    """
    bits = 1 + min(8 * np.dtype(index_dtype).itemsize, GAPS_LOW)
    return -(-count * bits // 8) + -(-count // GAPS_BLOCK) * (GAPS_HEADER + 3) + _SLACK


def encode_gaps(indices: Indices, lo: int, out: Bytes) -> int:
    """Encode a sorted index set as the gaps between indices, in blocks of Rice codes with a parameter for each block.

    Uniformly random sets take 1 to 3 % more than the entropy of their gaps, runs of consecutive indices far less than a bit for each index.
    The format is described in :mod:`sparseallreduce.streams.kernels.reference.gaps`.

    Parameters
    ----------
    indices : ndarray of uint32 or uint64, shape (n,)
        Strictly increasing.
    lo : int
        Start of the first gap; the decoder must know it.
    out : ndarray of uint8
        At least ``gaps_bound(n, indices.dtype)`` bytes. Its content beyond the returned length is undefined.

    Returns
    -------
    int
        The number of bytes written.

    Raises
    ------
    StreamError
        If indices are not increasing or less than ``lo``, ``out`` is too short, or an array is not contiguous or has another dtype.

    Examples
    --------
    >>> indices, out = np.arange(5000, 9000, dtype=np.uint32), np.empty(gaps_bound(4000, np.uint32), np.uint8)
    >>> length = encode_gaps(indices, 0, out)
    >>> length, decode_gaps(out[:length], 0, 10_000, indices)
    (27, True)
    """
    if not type(indices) is type(out) is np.ndarray:
        device = device_kernels(indices, out)
        if device is not None:
            return device.encode_gaps(indices, lo, out)  # type: ignore[no-any-return]
    if indices.ndim != 1 or out.ndim != 1 or out.dtype != _BYTES or not out.flags.writeable:
        raise unlike("encoded", indices=indices, out=out)
    key = ("gaps.encode", None, indices.dtype, UINT32, 1)
    entry = known(key) or find(*key)
    enough = len(out) >= gaps_bound(len(indices), indices.dtype)
    length: int = MALFORMED if not enough else reference.encode_gaps(indices, lo, out) if entry is None else entry(indices, lo, out)
    if length == MALFORMED:
        raise StreamError(
            f"{len(indices)} indices cannot be written as gaps from {lo} on into {len(out)} bytes: they must increase from there, "
            f"there must be room for {gaps_bound(len(indices), indices.dtype)} bytes, and both arrays must be C-contiguous"
        )
    return length


def decode_gaps(octets: Bytes, lo: int, hi: int, out: Indices) -> bool:
    """Decode an index set written by :func:`encode_gaps`.

    Parameters
    ----------
    octets : ndarray of uint8
        The bytes written; any other bytes are safe, too.
    lo, hi : int
        The range of the indices.
    out : ndarray of uint32 or uint64, shape (n,)
        One element for each index.

    Returns
    -------
    bool
        True if ``out`` holds strictly increasing indices in ``[lo, hi)``, decoded from exactly these bytes. Otherwise its content is
        undefined.

    Raises
    ------
    StreamError
        If an array is not contiguous or has another dtype.
    """
    if not type(octets) is type(out) is np.ndarray:
        device = device_kernels(octets, out)
        if device is not None:
            return device.decode_gaps(octets, lo, hi, out)  # type: ignore[no-any-return]
    if octets.ndim != 1 or out.ndim != 1 or octets.dtype != _BYTES or not out.flags.writeable:
        raise unlike("decoded", octets=octets, out=out)
    key = ("gaps.decode", None, out.dtype, UINT32, 1)
    entry = known(key) or find(*key)
    if entry is None:
        return reference.decode_gaps(octets, lo, hi, out)
    result: int = entry(octets, lo, hi, out)
    if result == MALFORMED:
        raise StreamError(
            f"bytes of strides {octets.strides} cannot be read to indices of strides {out.strides}: both must be C-contiguous"
        )
    return result == 0
