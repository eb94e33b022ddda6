"""The selection kernels in plain NumPy, used if numba's compilation is disabled, and as a reference for tests of the compiled ones.

Names, arguments and results, bitwise, are those that :mod:`sparseallreduce.streams.kernels.selection` documents.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparseallreduce.streams.kernels import magnitude
from sparseallreduce.streams.kernels.contract import Array, Positions
from sparseallreduce.streams.kernels.reference.arrays import split_mix

__all__ = ["collect", "draw", "kth", "moments", "norms", "sample", "select", "top", "top_of_chunks"]

CHUNK = 4096
GROUP, LANES = 64, 8
RANGE, LIFT = (2.0**-60, 2.0**60), 2.0**100
MIX = (np.uint32(0x7FEB352D), np.uint32(0x846CA68B))


def select(
    accumulator: Array, gradient: Array | None, over: int, clear: bool, start: int, indices: Array, values: Array
) -> tuple[int, int]:
    """Process chunks from position ``start`` on, while there is room for a whole one."""
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
    """Count magnitudes above a key, and write those between two keys as far as there is room."""
    bits = magnitude.bits_of(array)
    keys = bits & bits.dtype.type(magnitude.mask(bits.dtype))
    inside = keys[(keys > below) & (keys <= over)]
    found[: len(inside)] = inside[: len(found)]
    return int(np.count_nonzero(keys > over)), len(inside)


def kth(array: Array, k: int) -> tuple[int, int]:
    """Return the k-th largest key, and how many of the k largest equal it."""
    keys = magnitude.keys(array)
    key = np.partition(keys, len(keys) - k)[len(keys) - k]
    return int(key), k - int(np.count_nonzero(keys > key))


def top_of_chunks(array: Array, chunk: int, k: int, indices: Array, values: Array) -> None:
    """Select in one chunk after another."""
    n, size = 0, len(array)
    for begin in range(0, size, chunk):
        part = array[begin : begin + chunk]
        end = k * (begin + len(part)) // size
        chosen = np.sort(np.argsort(-magnitude.keys(part), kind="stable")[: end - n])
        indices[n:end], values[n:end] = chosen + begin, part[chosen]
        n = end


def sample_places(size: int, count: int, seed: int) -> Positions:
    """Return a position in each stride, given by a hash."""
    stride = np.uint64(size // count)
    numbers = np.arange(count, dtype=np.uint64)
    return numbers * stride + split_mix(np.uint64(seed) + numbers) % stride


def sample(accumulator: Array, gradient: Array | None, count: int, seed: int) -> Array:
    """Return one value of each stride, at a hashed position."""
    places = sample_places(len(accumulator), count, seed)
    sampled: Array = accumulator[places]
    if gradient is not None:
        with np.errstate(all="ignore"):
            sampled += gradient[places]
    return sampled


def moments(accumulator: Array, gradient: Array | None) -> tuple[float, float]:
    """Return the sums of the values and of their squares; non-finite values count as zeros."""
    lanes = _in_lanes(accumulator, gradient)
    with np.errstate(all="ignore"):
        return _added(lanes.sum(axis=0)), _added((lanes * lanes).sum(axis=0))


def norms(accumulator: Array, gradient: Array | None) -> tuple[float, float]:
    """Return sum and maximum of the magnitudes; non-finite values count as zeros."""
    lanes = np.abs(_in_lanes(accumulator, gradient))
    with np.errstate(all="ignore"):
        return _added(lanes.sum(axis=0)), float(lanes.max(initial=0.0))


def _added(lanes: Array) -> float:
    """Return the sum of numbers in sequence. From Python 3.12 on, ``sum`` of floats compensates rounding errors."""
    return float(np.add.accumulate(lanes)[-1])


def _in_lanes(accumulator: Array, gradient: Array | None) -> Array:
    if gradient is not None:
        with np.errstate(all="ignore"):
            accumulator += gradient
    padded = np.zeros(-(-len(accumulator) // LANES) * LANES)
    padded[: len(accumulator)] = np.where(np.isfinite(accumulator), accumulator, 0)
    return padded.reshape(-1, LANES)


def draw(
    accumulator: Array, gradient: Array | None, options: tuple[int, float, bool, int, int, bool], start: int, indices: Array, values: Array
) -> tuple[int, int]:
    """Draw from one bucket after another while there is room for a whole one."""
    bucket, share, at_most, fixed, seed, clear = options
    n = 0
    while start < len(accumulator) and n + bucket + GROUP <= len(indices):
        part = accumulator[start : start + bucket]
        norm, largest = norms(part, None if gradient is None else gradient[start : start + bucket])
        unit = _unit(largest)
        norm = norm * unit if norm < np.inf else _lifted(part, unit)
        shift, scale = _chances(norm, largest * unit, len(part), share * len(part) / bucket, at_most)
        with np.errstate(all="ignore"):
            chances = (np.abs(part) * part.dtype.type(unit) + part.dtype.type(shift)) * part.dtype.type(scale)
        chosen = np.flatnonzero(~(_uniform(start, len(part), seed, part.dtype) >= chances))
        wanted = min(fixed, len(part))
        chosen = chosen[:wanted] if fixed else chosen
        filled = np.setdiff1d(np.arange(len(part)), chosen)[: max(0, wanted - len(chosen))]
        places = np.sort(np.concatenate([chosen, filled]))
        end = n + len(places)
        indices[n:end], values[n:end] = places + start, np.where(np.isin(places, filled), 0, part[places])
        if clear:
            part[chosen] = 0
        start, n = start + len(part), end
    return start, n


def _unit(largest: float) -> float:
    if largest > RANGE[1]:
        return 1 / LIFT
    return LIFT if largest < RANGE[0] else 1.0


def _lifted(array: Array, unit: float) -> float:
    sizes = np.abs(array.astype(np.float64)) * unit
    return _added(np.append(0.0, sizes[sizes < np.inf]))


def _chances(norm: float, largest: float, size: int, share: float, at_most: bool) -> tuple[float, float]:
    if share >= size:
        return 1.0, np.inf
    if not at_most and share * largest > norm:
        shift = (share * largest - norm) / (size - share)
        return shift, share / (norm + size * shift)
    return 0.0, share / norm if norm > 0 else 0.0


def _uniform(start: int, count: int, seed: int, dtype: np.dtype[Any]) -> Array:
    """Return a number in [0, 1) for each position, from a hash of its group of 64 and its position there."""
    places = np.arange(count, dtype=np.uint64)
    within = places % np.uint64(GROUP)
    hashed = split_mix(places - within + np.uint64((seed + start) % 2**64))
    number = within.astype(np.uint32) + hashed.astype(np.uint32)
    number = (number ^ (number >> np.uint32(16))) * MIX[0]
    number = (number ^ (number >> np.uint32(15))) + (hashed >> np.uint64(32)).astype(np.uint32)
    number *= MIX[1]
    number ^= number >> np.uint32(16)
    drawn: Array = (number >> np.uint32(8)).astype(dtype) * dtype.type(2.0**-24)
    return drawn


def top(array: Array, key: int, ties: int, positions: Array) -> int:
    """Return the positions above the key, and the first of those that equal it."""
    keys = magnitude.keys(array)
    chosen = keys > key
    chosen[np.flatnonzero(keys == key)[:ties]] = True
    places = np.flatnonzero(chosen)[: len(positions) - 1]
    positions[: len(places)] = places
    return len(places)
