"""Loops over dense arrays that select values by magnitude: above a threshold, between two thresholds, or the largest.

Arrays are one-dimensional and C-contiguous, of float32 or float64. Magnitudes are compared by their keys
(:mod:`~sparseallreduce.streams.kernels.magnitude`): all NaNs are equal and larger than infinity. numba compiles the loops on first use and
caches them on disk; if its compilation is disabled, the functions of :mod:`~sparseallreduce.streams.kernels.reference.selection` give
bitwise identical results. Compiled kernels release the GIL.

All functions raise a StreamError for arrays of other dtypes or dimensions or that are not contiguous, for numbers out of range, and for a
read-only accumulator that would be modified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels import magnitude
from sparseallreduce.streams.kernels.backend import device_kernels
from sparseallreduce.streams.kernels.contract import UINT32, Array
from sparseallreduce.streams.kernels.dispatch import find, known
from sparseallreduce.streams.kernels.reference import selection as reference

__all__ = ["collect", "draw", "kth", "moments", "norms", "put_back", "sample", "select", "top", "top_of_chunks", "warm_up"]

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
# The first guess of a chunk's k-th key is lower than that of the previous chunk by this: a factor of about 0.9.
_LOWER = {np.dtype(np.int32): 1 << 20, np.dtype(np.int64): 1 << 49}
ROOM = 4096  # smallest room for entries that the loops need at any time


def select(
    accumulator: Array,
    gradient: Array | None,
    over: int,
    index_dtype: DTypeLike,
    *,
    clear: bool = False,
    expected: int = 0,
    most: int | None = None,
) -> tuple[Array, Array, int]:
    """Add two arrays and select the sums above a threshold, in one pass over memory.

    Parameters
    ----------
    accumulator : ndarray, shape (N,)
        Must be writeable with ``gradient`` or ``clear``.
    gradient : ndarray of the same shape and dtype, or None
        Added to the accumulator first.
    over : int
        Magnitudes whose key is above this are selected.
    index_dtype : {uint32, uint64}
    clear : bool
        Set selected values to zero in the accumulator.
    expected : int
        Expected number of values, for the size of buffers.
    most : int, optional
        Stop soon after selecting more than this number.

    Returns
    -------
    indices, values : ndarray, shape (n,)
        In increasing order.
    reached : int
        End of the processed part of the array; N unless more than ``most`` were selected.
    """
    if type(accumulator) is not np.ndarray and (device := _device(accumulator, gradient)) is not None:
        return device.select(accumulator, gradient, over, index_dtype, clear)  # type: ignore[no-any-return]
    _check(accumulator, gradient, clear or gradient is not None)
    name = "selection.select" if gradient is None else "selection.select_of_sum"
    bits = magnitude.bits_of(accumulator)
    mask = magnitude.mask(bits.dtype)

    def step(start: int, indices: Array, values: Array) -> tuple[int, int]:
        key = (name, None, indices.dtype, accumulator.dtype, 1)
        entry = known(key) or find(*key)
        if entry is None:
            return reference.select(accumulator, gradient, over, clear, start, indices, values)
        chosen = magnitude.bits_of(values)
        return entry(accumulator, bits, gradient, mask, over, clear, start, indices, chosen)  # type: ignore[no-any-return]

    return _gathered(step, accumulator, gradient, clear, index_dtype, expected, ROOM, most)


def _gathered(
    step: Callable[[int, Array, Array], tuple[int, int]],
    accumulator: Array,
    gradient: Array | None,
    clear: bool,
    index_dtype: DTypeLike,
    expected: int,
    least: int,
    most: int | None = None,
) -> tuple[Array, Array, int]:
    """Run a loop repeatedly, with larger buffers each time it stops for lack of room, until the whole array is processed.

    It continues while there is room for twice ``least`` entries. If memory runs out, selected values are put back and the rest of the
    gradient is added before the error is raised.
    """
    room = min(len(accumulator), expected) + 2 * least
    indices, values = np.empty(0, index_dtype), np.empty(0, accumulator.dtype)
    reached = n = 0
    try:
        indices, values = np.empty(room, index_dtype), np.empty(room, accumulator.dtype)
        while reached < len(accumulator) and (most is None or n <= most):
            if len(indices) - n < 2 * least:
                indices.resize(2 * len(indices), refcheck=False)
                values.resize(2 * len(values), refcheck=False)
            reached, chosen = step(reached, indices[n:], values[n:])
            n += chosen
        indices.resize(n, refcheck=False)
        values.resize(n, refcheck=False)
    except MemoryError:
        if clear:
            put_back(accumulator, indices[:n], values[:n])
        _add(accumulator[reached:], None if gradient is None else gradient[reached:])
        raise
    return indices, values, reached


def put_back(accumulator: Array, indices: Array, values: Array) -> None:
    """Add cleared values to the accumulator again, in pieces that need little memory."""
    for begin in range(0, len(indices), ROOM):
        part = slice(begin, begin + ROOM)
        with np.errstate(all="ignore"):
            accumulator[indices[part]] += values[part]  # zeros for positions that filled up a draw


def draw(
    accumulator: Array,
    gradient: Array | None,
    index_dtype: DTypeLike,
    *,
    bucket: int,
    share: float,
    at_most: bool,
    fixed: int,
    seed: int,
    clear: bool,
) -> tuple[Array, Array]:
    """Add two arrays, and draw values of each bucket with probabilities that grow with their magnitudes (thesis sections 2.4.1, 4.3.3).

    Parameters
    ----------
    accumulator : ndarray, shape (N,)
        Must be writeable with ``gradient`` or ``clear``.
    gradient : ndarray of the same shape and dtype, or None
    index_dtype : {uint32, uint64}
    bucket : int
        Values in a bucket, at least 1; the last may be shorter.
    share : float
        Expected number of values drawn from a bucket.
    at_most : bool
        Whether large magnitudes may reduce the expected number.
    fixed : int
        If not 0, the exact number for each bucket: further values are dropped, missing ones filled with zeros at undrawn positions.
    seed : int
        From 0 to 2**64 - 1.
    clear : bool
        Set drawn values to zero in the accumulator.

    Returns
    -------
    indices, values : ndarray, shape (n,)
        In increasing order.
    """
    if bucket < 1:
        raise StreamError(f"a bucket holds at least one value, not {bucket}")
    if type(accumulator) is not np.ndarray and (device := _device(accumulator, gradient)) is not None:
        drawn = {"bucket": bucket, "share": share, "at_most": at_most, "fixed": fixed, "seed": seed, "clear": clear}
        return device.draw(accumulator, gradient, index_dtype, **drawn)  # type: ignore[no-any-return]
    _check(accumulator, gradient, clear or gradient is not None)
    name = "selection.draw" if gradient is None else "selection.draw_of_sum"
    bits = magnitude.bits_of(accumulator)
    options = bucket, share, at_most, fixed, seed, clear

    def step(start: int, indices: Array, values: Array) -> tuple[int, int]:
        key = (name, None, indices.dtype, accumulator.dtype, 1)
        entry = known(key) or find(*key)
        if entry is None:
            return reference.draw(accumulator, gradient, options, start, indices, values)
        outputs = indices, magnitude.bits_of(values)
        return entry(accumulator, bits, gradient, *options, start, *outputs)  # type: ignore[no-any-return]

    expected = int(1.25 * (share + 1) * (len(accumulator) // bucket + 1))
    indices, values, _ = _gathered(step, accumulator, gradient, clear, index_dtype, expected, bucket + ROOM)
    return indices, values


def collect(array: Array, below: int, over: int, room: int) -> tuple[int, int, Array]:
    """Count the magnitudes above a key, and copy those between two.

    Parameters
    ----------
    array : ndarray, shape (N,)
    below, over : int
        Magnitudes whose key is above ``below`` and not above ``over`` are copied.
    room : int
        Largest number of copies.

    Returns
    -------
    above : int
        Number of keys above ``over``.
    inside : int
        Number of keys between the two; may exceed ``room``.
    found : ndarray
        The copied magnitudes, in order of position.
    """
    _check(array)
    found = np.empty(room + 64, f"i{array.itemsize}")
    entry = find("selection.collect", None, UINT32, array.dtype)
    if entry is None:
        above, inside = reference.collect(array, below, over, found)
    else:
        bits = magnitude.bits_of(array)
        above, inside = entry(bits, magnitude.mask(bits.dtype), below, over, found)
    return above, inside, found[: min(inside, room)].view(array.dtype)


def kth(array: Array, k: int) -> tuple[int, int]:
    """Return the key of the k-th largest magnitude, and how many of the k largest equal it, in linear time.

    Parameters
    ----------
    array : ndarray, shape (N,)
    k : int
        From 1 to N.
    """
    if type(array) is not np.ndarray and (device := _device(array)) is not None:
        return device.kth(array, k)  # type: ignore[no-any-return]
    _check(array)
    if not 1 <= k <= len(array):
        raise StreamError(f"there is no magnitude of rank {k} among {len(array)}: k is out of range, or the array has changed meanwhile")
    entry = find("selection.kth", None, UINT32, array.dtype)
    if entry is None:
        return reference.kth(array, k)
    bits = magnitude.bits_of(array)
    return entry(bits, magnitude.mask(bits.dtype), magnitude.nan(bits.dtype), k, np.empty_like(bits))  # type: ignore[no-any-return]


def largest(array: Array, k: int, index_dtype: DTypeLike) -> Array:
    """Return the positions of the k largest magnitudes, like :func:`top` of :func:`kth`, for a device array, without a wait on the host."""
    return _device(array).largest(array, k, index_dtype)  # type: ignore[no-any-return]


def key_counts(array: Array, low: int, shift: int, length: int) -> Array:
    """Count the non-zero magnitudes in each of ``length`` intervals of keys.

    An interval has ``2**shift`` keys; the first begins at ``low``. The result is on the host.

    Parameters
    ----------
    array : ndarray, or array on a device, shape (N,)
    """
    if type(array) is not np.ndarray and (device := _device(array)) is not None:
        return device.key_counts(array, low, shift, length)  # type: ignore[no-any-return]
    keys = magnitude.keys(array)
    keys = keys[(keys > 0) & (keys >= low)]
    counts: Array = np.bincount((keys - keys.dtype.type(low)) >> shift, minlength=length)[:length]
    return counts


def sample(accumulator: Array, gradient: Array | None, count: int, seed: int = 0) -> Array:
    """Return ``count`` evenly spread values of the array, or of the sum of two, at positions that depend only on the seed."""
    if not 1 <= count <= len(accumulator):
        raise StreamError(f"{count} values cannot be sampled from {len(accumulator)}")
    if type(accumulator) is not np.ndarray and (device := _device(accumulator, gradient)) is not None:
        return device.sample(accumulator, gradient, count, seed)  # type: ignore[no-any-return]
    _check(accumulator, gradient)
    entry = find("selection.sample" if gradient is None else "selection.sample_of_sum", None, UINT32, accumulator.dtype)
    if entry is None:
        return reference.sample(accumulator, gradient, count, seed)
    sampled: Array = np.empty(count, accumulator.dtype)
    entry(accumulator, gradient, len(accumulator) // count, seed, sampled)
    return sampled


def moments(accumulator: Array, gradient: Array | None) -> tuple[float, float]:
    """Add the gradient, if given, and return the sums of the values and of their squares in float64; non-finite values count as zeros."""
    if type(accumulator) is not np.ndarray and (device := _device(accumulator, gradient)) is not None:
        return device.moments(accumulator, gradient)  # type: ignore[no-any-return]
    _check(accumulator, gradient, gradient is not None)
    entry = find("selection.moments" if gradient is None else "selection.moments_of_sum", None, UINT32, accumulator.dtype)
    total, squares = (entry or reference.moments)(accumulator, gradient)
    return total, squares


def norms(accumulator: Array, gradient: Array | None) -> tuple[float, float]:
    """Add the gradient, if given, and return the sum and the maximum of the magnitudes; non-finite values count as zeros."""
    if type(accumulator) is not np.ndarray and (device := _device(accumulator, gradient)) is not None:
        return device.norms_of(accumulator, gradient)  # type: ignore[no-any-return]
    _check(accumulator, gradient, gradient is not None)
    entry = find("selection.norms" if gradient is None else "selection.norms_of_sum", None, UINT32, accumulator.dtype)
    total, largest = (entry or reference.norms)(accumulator, gradient)
    return total, largest


def top(array: Array, key: int, ties: int, k: int, index_dtype: DTypeLike) -> Array:
    """Return the positions of magnitudes above a key, and the first ``ties`` equal to it: together k, in increasing order."""
    if type(array) is not np.ndarray and (device := _device(array)) is not None:
        return device.top(array, key, ties, k, index_dtype)  # type: ignore[no-any-return]
    _check(array)
    places = np.empty(k + 1, index_dtype)
    entry = find("selection.top", None, places.dtype, array.dtype)
    if entry is None:
        return places[: reference.top(array, key, ties, places)]
    bits = magnitude.bits_of(array)
    return places[: entry(bits, magnitude.mask(bits.dtype), magnitude.nan(bits.dtype), key, ties, places)]


def top_of_chunks(accumulator: Array, gradient: Array | None, chunk: int, k: int, index_dtype: DTypeLike) -> tuple[Array, Array]:
    """Add two arrays, and select the largest magnitudes of each chunk of the sums (the first among equals), in one pass over memory.

    Parameters
    ----------
    accumulator : ndarray, shape (N,)
        Must be writeable with ``gradient``.
    gradient : ndarray of the same shape and dtype, or None
    chunk : int
        Values in a chunk, at least 1; the last chunk may be shorter.
    k : int
        Total number to select, from 0 to N. The first m chunks together have ``floor(k * (their values) / N)`` of them.
    index_dtype : {uint32, uint64}

    Returns
    -------
    indices, values : ndarray, shape (k,)
        In increasing order.
    """
    _check(accumulator, gradient, gradient is not None)
    if chunk < 1 or not 0 <= k <= len(accumulator):
        raise StreamError(f"{k} values cannot be chosen from {len(accumulator)} in chunks of {chunk}")
    chunk, bits = min(chunk, max(1, len(accumulator))), magnitude.bits_of(accumulator)
    try:
        indices, values = np.empty(k + 1, index_dtype), np.empty(k + 1, accumulator.dtype)
        places, found = np.empty(chunk + 64, index_dtype), np.empty((2, chunk + 64), bits.dtype)
        name = "selection.top_of_chunks" if gradient is None else "selection.top_of_chunks_of_sum"
        entry = find(name, None, indices.dtype, accumulator.dtype)
        if entry is not None and chunk * k < 2**63:
            keys = magnitude.mask(bits.dtype), magnitude.nan(bits.dtype), _LOWER[bits.dtype]
            entry(accumulator, bits, gradient, *keys, chunk, k, places, *found, indices, magnitude.bits_of(values))
            return indices[:k], values[:k]
    except BaseException:  # the loop itself, which raises nothing, has not begun
        _add(accumulator, gradient)
        raise
    _add(accumulator, gradient)
    reference.top_of_chunks(accumulator, chunk, k, indices, values)
    return indices[:k], values[:k]


def _add(accumulator: Array, gradient: Array | None) -> None:
    if gradient is not None:
        with np.errstate(all="ignore"):
            np.add(accumulator, gradient, out=accumulator)


def _device(array: Array, gradient: Array | None = None) -> Any:
    """Return the kernels for arrays that are not on the host, otherwise None."""
    return device_kernels(array) if gradient is None else device_kernels(array, gradient)


def _check(accumulator: Array, gradient: Array | None = None, changed: bool = False) -> None:
    """Raise an error for arrays that compiled loops do not support."""
    if accumulator.ndim != 1 or accumulator.dtype not in _DTYPES or not accumulator.flags.c_contiguous:
        raise StreamError(
            f"values are selected from a contiguous vector of float32 or float64, not from {accumulator.dtype} of shape "
            f"{accumulator.shape}, strides {accumulator.strides}"
        )
    if gradient is not None and not (
        gradient.dtype == accumulator.dtype and gradient.shape == accumulator.shape and gradient.flags.c_contiguous
    ):
        raise StreamError(f"a gradient of {gradient.dtype} and shape {gradient.shape} does not fit the accumulator, or has gaps")
    if changed and not accumulator.flags.writeable:
        raise StreamError("the accumulator is read-only, but must be modified: pass a copy")


def warm_up(dtype: DTypeLike = np.float32, index_dtype: DTypeLike = np.uint32) -> None:
    """Compile the kernels for one dtype, or load them from disk, so that no later call has to.

    If several processes of a machine start together, one compiles and the others wait for it.
    """
    array = np.ones(1, dtype)
    for gradient in (None, array.copy()):
        sample(array, gradient, 1)
        select(array, gradient, 0, index_dtype)
    collect(array, 0, 1, 1)
    top(array, *kth(array, 1), 1, index_dtype)
