"""Loops over dense arrays that choose values by magnitude: those above a threshold, those between two, the largest.

Arrays are one-dimensional and C-contiguous, of float32 or float64. Magnitudes are compared by their keys
(:mod:`~sparseallreduce.streams.kernels.magnitude`): every NaN counts as larger than infinity, and all of them as equal. The loops
are compiled by numba on first use and cached on disk; where numba is told not to compile, the same functions run on
:mod:`~sparseallreduce.streams.kernels.reference.selection`, and give the same bits. Compiled kernels release the GIL.

All functions raise a StreamError for arrays of other dtypes or dimensions or with gaps, for numbers out of range, and for an
accumulator that is to be changed but read-only.
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
# What a guess at the key of a chunk's k-th magnitude is below that of the chunk before: a factor of about 0.9.
_LOWER = {np.dtype(np.int32): 1 << 20, np.dtype(np.int64): 1 << 49}
ROOM = 4096  # entries at least, for which the loops need room at any time


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
    """Add two arrays, and choose among the sums, in one pass over memory.

    Parameters
    ----------
    accumulator : ndarray, shape (N,)
        With ``gradient``, or to be cleared, it has to be writeable.
    gradient : ndarray of the same shape and dtype, or None
        Added to the accumulator first.
    over : int
        Chosen are magnitudes whose key is above this one.
    index_dtype : {uint32, uint64}
    clear : bool
        Whether to leave zeros in the accumulator where values are chosen.
    expected : int
        How many values probably are; more are no error.
    most : int, optional
        Stop soon after more than so many.

    Returns
    -------
    indices, values : ndarray, shape (n,)
        In increasing order.
    reached : int
        Up to which place the array was treated; N unless there were more than ``most``.
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
    """Run a loop, again from where it stopped for want of room; it goes on while there is twice as much as ``least``.

    Where there is no memory for that, what was chosen is put back, and the rest of the gradient added, before the error is raised.
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
    """Undo the clearing of what was chosen, with next to no memory."""
    for begin in range(0, len(indices), ROOM):
        part = slice(begin, begin + ROOM)
        with np.errstate(all="ignore"):
            accumulator[indices[part]] += values[part]  # which may be zeros where nothing was cleared, of a draw that was filled up


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
    """Add two arrays, and draw values of each bucket by chances that grow with their magnitudes (thesis sections 2.4.1, 4.3.3).

    Parameters
    ----------
    accumulator : ndarray, shape (N,)
        With ``gradient``, or to be cleared, it has to be writeable.
    gradient : ndarray of the same shape and dtype, or None
    index_dtype : {uint32, uint64}
    bucket : int
        Values in a bucket, at least 1; the last may be shorter.
    share : float
        Expected number of a bucket.
    at_most : bool
        Whether large magnitudes may make it less than that.
    fixed : int
        If not 0, exactly so many of each bucket: truncated, or filled up with zeros at places that were not drawn.
    seed : int
        From 0 to 2**64 - 1.
    clear : bool
        Whether to leave zeros in the accumulator where values were drawn.

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
        Copied are magnitudes whose key is above ``below`` and not above ``over``.
    room : int
        How many to copy at most.

    Returns
    -------
    above : int
        Number of keys above ``over``.
    inside : int
        Number of keys between the two; may exceed ``room``.
    found : ndarray
        The magnitudes that were copied, in order of place.
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
    """The key of the k-th largest magnitude, and how many that equal it are among the k largest; linear in time.

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
    """As :func:`top` of :func:`kth`, of an array on a device, where the host waits for neither."""
    return _device(array).largest(array, k, index_dtype)  # type: ignore[no-any-return]


def key_counts(array: Array, low: int, shift: int, length: int) -> Array:
    """How many magnitudes other than zero have keys in each of ``length`` intervals of ``2**shift`` from ``low`` on, on the host.

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
    """``count`` values of the array, or of the sum of two, evenly spread, at places that depend on nothing but the seed."""
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
    """Add the gradient, if there is one, and sum up the values and their squares, in float64, what is not finite as zeros."""
    if type(accumulator) is not np.ndarray and (device := _device(accumulator, gradient)) is not None:
        return device.moments(accumulator, gradient)  # type: ignore[no-any-return]
    _check(accumulator, gradient, gradient is not None)
    entry = find("selection.moments" if gradient is None else "selection.moments_of_sum", None, UINT32, accumulator.dtype)
    total, squares = (entry or reference.moments)(accumulator, gradient)
    return total, squares


def norms(accumulator: Array, gradient: Array | None) -> tuple[float, float]:
    """Add the gradient, if there is one, and find the sum of the magnitudes and the largest of them, what is not finite as zeros."""
    if type(accumulator) is not np.ndarray and (device := _device(accumulator, gradient)) is not None:
        return device.norms_of(accumulator, gradient)  # type: ignore[no-any-return]
    _check(accumulator, gradient, gradient is not None)
    entry = find("selection.norms" if gradient is None else "selection.norms_of_sum", None, UINT32, accumulator.dtype)
    total, largest = (entry or reference.norms)(accumulator, gradient)
    return total, largest


def top(array: Array, key: int, ties: int, k: int, index_dtype: DTypeLike) -> Array:
    """The places of magnitudes above a key, and the first ``ties`` places of those that equal it: together k, in increasing order."""
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
    """Add two arrays, and choose the largest magnitudes of each chunk of the sums, among equals the first, in one pass over memory.

    Parameters
    ----------
    accumulator : ndarray, shape (N,)
        With ``gradient`` it has to be writeable.
    gradient : ndarray of the same shape and dtype, or None
    chunk : int
        Values in a chunk, at least 1; the last chunk may be shorter.
    k : int
        How many to choose in all, from 0 to N. The first m chunks together have ``floor(k * (their values) / N)`` of them.
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
    """What works on arrays that are not NumPy's; None for a subclass of NumPy's."""
    return device_kernels(array) if gradient is None else device_kernels(array, gradient)


def _check(accumulator: Array, gradient: Array | None = None, changed: bool = False) -> None:
    """Raise an error for arrays that compiled loops are not made for."""
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
        raise StreamError("the accumulator is read-only, and would have to be changed: pass a copy")


def warm_up(dtype: DTypeLike = np.float32, index_dtype: DTypeLike = np.uint32) -> None:
    """Compile the kernels for one dtype, or load them from disk, so that no later call has to.

    Of several processes that start at once on a machine, one compiles and the others wait for it.
    """
    array = np.ones(1, dtype)
    for gradient in (None, array.copy()):
        sample(array, gradient, 1)
        select(array, gradient, 0, index_dtype)
    collect(array, 0, 1, 1)
    top(array, *kth(array, 1), 1, index_dtype)
