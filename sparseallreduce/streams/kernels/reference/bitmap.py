"""Index sets and dense arrays as bitmaps, in plain NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.contract import MALFORMED, Indices, Values

__all__ = ["decode_bitmap", "decode_nonzero", "encode_bitmap", "encode_nonzero"]

Bytes = NDArray[np.uint8]


def encode_bitmap(indices: Indices, lo: int, extent: int, out: Bytes) -> int:
    """Set the bit of each index."""
    places = indices.astype(np.uint64) - np.uint64(lo)
    if (places >= extent).any() or (places[1:] <= places[:-1]).any():
        return MALFORMED
    taken = np.zeros(extent, np.bool_)
    taken[places] = True
    out[:] = np.packbits(taken, bitorder="little")
    return 0


def decode_bitmap(bits: Bytes, lo: int, extent: int, out: Indices) -> bool:
    """Write the positions of the set bits."""
    places = _places(bits, extent, len(out))
    if places is None:
        return False
    out[:] = places.astype(np.uint64) + np.uint64(lo)
    return True


def encode_nonzero(dense: Values, bits: Bytes, out: Values) -> int:
    """Set the bits of non-zero elements of ``dense``, unsigned integers; count them, and write them if they fit."""
    present = dense != 0 if dense.ndim == 1 else (dense != 0).any(axis=1)
    bits[:] = np.packbits(present, bitorder="little")
    places = np.flatnonzero(present)
    if len(places) <= len(out):
        out[: len(places)] = dense[places]
    return len(places)


def decode_nonzero(bits: Bytes, values: Values, out: Values) -> bool:
    """Write values to the positions of the set bits, and zeros elsewhere."""
    places = _places(bits, len(out), len(values))
    if places is None:
        return False
    out[:] = 0
    out[places] = values
    return True


def _places(bits: Bytes, extent: int, count: int) -> NDArray[np.intp] | None:
    places = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    return None if len(places) != count or (count and places[-1] >= extent) else places
