"""CUDA kernels for index sets and dense arrays as bitmaps, in the format of the CPU (``streams.kernels.bitmap``)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import DTypeLike

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels.cuda.arrays import U, as_bits, lower_bound, smaller
from sparseallreduce.streams.kernels.cuda.launching import BLOCK, exclusive, kernel, launch, threads_for

__all__ = ["decode_bitmap", "decode_nonzero", "encode_bitmap", "encode_nonzero"]

WORD = 8  # bytes that one thread writes of an index set


def encode_bitmap(indices: Any, lo: int, extent: int, xp: Any, *, block: int = BLOCK) -> Any:
    """Encode a sorted index set as a bitmap that starts at ``lo``, the lowest bit of a byte first.

    Parameters
    ----------
    indices : device array of uint32 or uint64, shape (n,)
        Strictly increasing, in ``[lo, lo + extent)``; checking this makes the host wait.
    lo, extent : int
    xp : module
        NumPy or CuPy.

    Returns
    -------
    device array of uint8, shape (ceil(extent / 8),)

    Raises
    ------
    StreamError
        If indices are not increasing or out of range, or not a contiguous vector of these dtypes.
    """
    _check_indices(indices)
    out = xp.empty(-(-extent // 8), np.uint8)
    if len(indices):
        places = indices.astype(np.uint64) - U(lo)
        wrong = (places.max() >= extent) | (places[1:] <= places[:-1]).any()
        if bool(wrong):
            raise StreamError(f"{len(indices)} indices cannot be written as {extent} bits from {lo} on: they must increase and lie there")
    launch(_write_bits, threads_for(len(out), WORD), block, xp, indices, U(lo), out)
    return out


def decode_bitmap(bits: Any, lo: int, extent: int, count: int, index_dtype: DTypeLike, xp: Any, *, block: int = BLOCK) -> Any:
    """Decode a bitmap written by :func:`encode_bitmap`.

    Returns
    -------
    device array, shape (count,), or None
        None unless ``bits`` has ``count`` bits set, and none beyond ``extent``; checking this makes the host wait.

    Raises
    ------
    StreamError
        If ``bits`` has the wrong length or dtype, or the range exceeds the dtype of indices.
    """
    index_dtype = np.dtype(index_dtype)
    _check_bytes(bits, extent)
    if lo + extent > 256**index_dtype.itemsize:
        raise StreamError(f"{len(bits)} bytes are no bitmap of {extent} indices of {index_dtype} from {lo} on")
    starts = _starts(bits, extent, count, xp, block)
    if starts is None:
        return None
    out = xp.empty(count, index_dtype)
    launch(_read_places, len(bits), block, xp, bits, U(lo), starts, out)
    return out


def encode_nonzero(dense: Any, xp: Any, *, block: int = BLOCK) -> tuple[Any, Any]:
    """Encode the non-zero elements or rows of a dense array as a bitmap and their values.

    Parameters
    ----------
    dense : device array, shape (size,) or (size, width)
        Of any dtype with items of 1, 2, 4, 8 or 16 bytes. An element counts as non-zero if any of its bits is set, so -0.0 does.

    Returns
    -------
    bits : device array of uint8, shape (ceil(size / 8),)
    values : device array, shape (n,) or (n, width)
        Their number is copied to the host.

    Raises
    ------
    StreamError
        If the array is not contiguous, or has items of another size.
    """
    unsigned, width = as_bits(dense)
    octets = -(-len(dense) // 8)
    bits, counts = xp.empty(octets, np.uint8), xp.empty(octets, np.int64)
    launch(_mark_nonzero, octets, block, xp, unsigned, width, len(dense), bits, counts)
    starts, total = exclusive(counts, xp)
    values = xp.empty((int(total[0]), *dense.shape[1:]), dense.dtype)
    launch(_copy_marked, octets if width else 0, block, xp, unsigned, width, bits, starts, as_bits(values)[0])
    return bits, values


def decode_nonzero(bits: Any, values: Any, size: int, xp: Any, *, block: int = BLOCK) -> Any:
    """Decode the dense array that :func:`encode_nonzero` encoded.

    Returns
    -------
    device array, shape (size,) or (size, width), or None
        None unless ``bits`` has as many bits set as there are values, and none beyond ``size``; checking this makes the host wait.

    Raises
    ------
    StreamError
        As :func:`encode_nonzero`, and if ``bits`` has the wrong length or dtype.
    """
    _check_bytes(bits, size)
    unsigned, width = as_bits(values)
    starts = _starts(bits, size, len(values), xp, block)
    if starts is None:
        return None
    out = xp.empty((size, *values.shape[1:]), values.dtype)
    launch(_spread, len(bits) if width else 0, block, xp, bits, starts, unsigned, width, as_bits(out)[0])
    return out


def _starts(bits: Any, extent: int, count: int, xp: Any, block: int) -> Any:
    """Return the number of set bits before each byte; None unless ``count`` are set in total, and none beyond ``extent``."""
    counts = xp.empty(len(bits), np.int64)
    launch(_count_bits, len(bits), block, xp, bits, counts)
    starts, total = exclusive(counts, xp)
    beyond = bits[-1:] >> np.uint8(extent % 8) if extent % 8 else xp.zeros(1, np.uint8)
    found, rest = xp.concatenate([total, beyond.astype(np.int64)]).tolist()
    return starts if found == count and not rest else None


def _check_indices(indices: Any) -> None:
    if indices.ndim != 1 or indices.dtype not in (np.uint32, np.uint64) or not indices.flags.c_contiguous:
        raise StreamError(f"indices are a contiguous vector of uint32 or uint64, not {indices.dtype} of shape {indices.shape}")


def _check_bytes(bits: Any, extent: int) -> None:
    if bits.ndim != 1 or bits.dtype != np.uint8 or len(bits) != -(-extent // 8) or not bits.flags.c_contiguous:
        raise StreamError(f"{bits.dtype} of shape {bits.shape} is no bitmap of {extent} places, of {-(-extent // 8)} bytes in a row")


@kernel
def _write_bits(indices: Any, lo: Any, out: Any) -> None:
    thread = cuda.grid(1)
    start = thread * WORD
    if start < out.shape[0]:
        count, first = indices.shape[0], lo + (U(start) << U(3))
        i, word = lower_bound(indices, 0, count, first), U(0)
        while i < count and U(indices[i]) - first < U(8 * WORD):
            word |= U(1) << (U(indices[i]) - first)
            i += 1
        for at in range(start, smaller(start + WORD, out.shape[0])):
            out[at] = (word >> U(8 * (at - start))) & U(255)


@kernel
def _count_bits(bits: Any, counts: Any) -> None:
    at = cuda.grid(1)
    if at < bits.shape[0]:
        counts[at] = cuda.popc(np.int32(bits[at]))


@kernel
def _read_places(bits: Any, lo: Any, starts: Any, out: Any) -> None:
    at = cuda.grid(1)
    if at < bits.shape[0]:
        octet, to = np.int64(bits[at]), starts[at]
        for bit in range(8):
            if (octet >> bit) & 1 and to < out.shape[0]:
                out[to] = lo + U(8 * at + bit)
                to += 1


@kernel
def _mark_nonzero(dense: Any, width: Any, size: Any, bits: Any, counts: Any) -> None:
    at = cuda.grid(1)
    if at < bits.shape[0]:
        octet, count = 0, 0
        for row in range(8 * at, smaller(8 * at + 8, size)):
            present = False
            for k in range(row * width, (row + 1) * width):
                present = present or dense[k] != U(0)
            if present:
                octet |= 1 << (row - 8 * at)
                count += 1
        bits[at] = octet
        counts[at] = count


@kernel
def _copy_marked(dense: Any, width: Any, bits: Any, starts: Any, values: Any) -> None:
    at = cuda.grid(1)
    if at < bits.shape[0]:
        octet, to = np.int64(bits[at]), starts[at] * width
        for bit in range(8):
            if (octet >> bit) & 1 and to < values.shape[0]:
                for k in range(width):
                    values[to + k] = dense[(8 * at + bit) * width + k]
                to += width


@kernel
def _spread(bits: Any, starts: Any, values: Any, width: Any, out: Any) -> None:
    at = cuda.grid(1)
    if at < bits.shape[0]:
        octet, source = np.int64(bits[at]), starts[at] * width
        for bit in range(smaller(8, out.shape[0] // width - 8 * at)):
            taken = (octet >> bit) & 1 and source < values.shape[0]
            for k in range(width):
                out[(8 * at + bit) * width + k] = values[source + k] if taken else U(0)
            if taken:
                source += width
