"""The selection kernels in plain NumPy: the second opinion on the compiled ones, and what runs where numba must not compile.

Names, arguments and results, bit for bit, are those that :mod:`sparseallreduce.streams.kernels.selection` documents.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels import magnitude

__all__ = ["collect", "kth", "sample", "select", "top"]

Array = NDArray[Any]
CHUNK = 4096


def select(
    accumulator: Array, gradient: Array | None, over: int, clear: bool, start: int, indices: Array, values: Array
) -> tuple[int, int]:
    """Go on from place ``start`` in chunks while there is room for a whole one."""
    n = 0
    while start < len(accumulator) and n + CHUNK <= len(indices):
        chunk = accumulator[start : start + CHUNK]
        if gradient is not None:
            with np.errstate(all="ignore"):
                chunk += gradient[start : start + CHUNK]
        chosen = np.flatnonzero(magnitude.keys(chunk) > over)
        end = n + len(chosen)
        indices[n:end], values[n:end] = chosen + start, chunk[chosen]
        if clear:
            chunk[chosen] = 0
        start, n = start + len(chunk), end
    return start, n


def collect(array: Array, below: int, over: int, found: Array) -> tuple[int, int]:
    """Count magnitudes above a key, and write those between two as far as there is room."""
    bits = magnitude.bits_of(array)
    keys = bits & bits.dtype.type(magnitude.mask(bits.dtype))
    inside = keys[(keys > below) & (keys <= over)]
    found[: len(inside)] = inside[: len(found)]
    return int(np.count_nonzero(keys > over)), len(inside)


def kth(array: Array, k: int) -> tuple[int, int]:
    """The k-th largest key, and how many of its equals are among the k largest."""
    keys = magnitude.keys(array)
    key = np.partition(keys, len(keys) - k)[len(keys) - k]
    return int(key), k - int(np.count_nonzero(keys > key))


def sample(accumulator: Array, gradient: Array | None, count: int) -> Array:
    """One value of each stride, at a hashed place (SplitMix64)."""
    stride = np.uint64(len(accumulator) // count)
    numbers = np.arange(count, dtype=np.uint64)
    hashed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    places = numbers * stride + (hashed ^ (hashed >> np.uint64(31))) % stride
    sampled: Array = accumulator[places]
    if gradient is not None:
        with np.errstate(all="ignore"):
            sampled += gradient[places]
    return sampled


def top(array: Array, key: int, ties: int, positions: Array) -> int:
    """The places above the key, and the first ones of those that equal it."""
    keys = magnitude.keys(array)
    chosen = keys > key
    chosen[np.flatnonzero(keys == key)[:ties]] = True
    places = np.flatnonzero(chosen)
    positions[: len(places)] = places
    return len(places)
