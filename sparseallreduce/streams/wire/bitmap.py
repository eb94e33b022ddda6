"""Positions as bitmaps: of the indices of a sparse stream, or of the non-zeros of a dense one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels.backend import array_module
from sparseallreduce.streams.wire.header import Bytes

__all__ = ["Bitmap", "nonzero_share", "read_nonzero", "write_nonzero"]

_SAMPLE = 4096  # elements of a dense stream that are sampled


class Bitmap:
    """An index codec with a bit for each index from the end of the previous piece to the last index of this one."""

    number = 1
    name = "bitmap"
    seconds: float = 2e-9  # at a density of at least 6 %; longer where it takes more bytes than the gaps

    def bytes_each(self, density: float, index_bytes: int) -> float:
        return 1 / (8 * max(density, 1e-9))

    def bound(self, indices: NDArray[Any], lo: int) -> int:
        return (int(indices[-1]) - lo + 8) // 8 if len(indices) else 0

    def write(self, indices: NDArray[Any], lo: int, out: Bytes) -> int:
        length = self.bound(indices, lo)
        if length:
            kernels.encode_bitmap(array_module(indices).ascontiguousarray(indices), lo, int(indices[-1]) - lo + 1, out[:length])
        return length

    def read(self, payload: Bytes, lo: int, hi: int, out: NDArray[Any]) -> bool:
        extent = min(8 * len(payload), hi - lo)
        return -(-extent // 8) == len(payload) and kernels.decode_bitmap(payload, lo, extent, out)


def nonzero_share(values: NDArray[Any]) -> float:
    """Return an estimate of the fraction of elements or rows of a dense array that have any bit set."""
    if not values.size:
        return 0.0
    sample = np.ascontiguousarray(values[:: max(len(values) // _SAMPLE, 1)])
    words = sample.view(f"u{min(sample.itemsize, 8)}").reshape(len(sample), -1)
    return np.count_nonzero(words.any(axis=1)) / len(sample)


def write_nonzero(values: NDArray[Any], out: Bytes) -> int:
    """Write the non-zero elements or rows of an array, followed by their bitmap; return the total size in bytes."""
    bits = np.empty((len(values) + 7) // 8, np.uint8)
    present = out[: values.nbytes].view(values.dtype).reshape(values.shape)
    nbytes = kernels.encode_nonzero(np.ascontiguousarray(values), bits, present) * (values.nbytes // max(len(values), 1))
    out[nbytes : nbytes + len(bits)] = bits
    return nbytes + len(bits)


def read_nonzero(payload: Bytes, out: NDArray[Any]) -> bool:
    """Decode into ``out``; return True if the payload matches its number of elements or rows."""
    each, length = out.nbytes // max(len(out), 1), (len(out) + 7) // 8
    nbytes = len(payload) - length
    if nbytes < 0 or (nbytes % each if each else nbytes):
        return False
    values = np.empty((nbytes // max(each, 1), *out.shape[1:]), out.dtype)
    values.reshape(-1).view(np.uint8)[:] = payload[:nbytes]
    return kernels.decode_nonzero(payload[nbytes:], values, out)
