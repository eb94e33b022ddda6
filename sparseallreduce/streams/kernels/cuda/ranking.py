"""The exact k-th magnitude on a GPU, by histograms of its key's digits, and the positions of the largest magnitudes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import DTypeLike

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels import magnitude
from sparseallreduce.streams.kernels.cuda.arrays import larger, smaller
from sparseallreduce.streams.kernels.cuda.launching import BLOCK, RUN, exclusive, kernel, launch, threads_for
from sparseallreduce.streams.kernels.cuda.selection import check_selected

__all__ = ["count_around", "count_interval", "kth", "largest", "places_of", "top"]

DIGIT = 11  # bits of a key counted in one pass over memory: three passes for float32, and 8 KiB of shared memory per block
DIGITS = 2**DIGIT
STRIDES = 64  # elements per thread in counting passes, so that few blocks add up their counts


def kth(array: Any, k: int, xp: Any, *, block: int = BLOCK) -> tuple[int, int]:
    """Return the key of the k-th largest magnitude, and how many of the k largest equal it.

    Parameters
    ----------
    array : device array of float32 or float64, shape (N,)
    k : int
        From 1 to N.
    xp : module
        NumPy or CuPy.

    Returns
    -------
    key, ties : int
        Two numbers, copied to the host at the end.

    Raises
    ------
    StreamError
        If k is out of range, or the array is not a contiguous vector of these dtypes.

    Notes
    -----
    Every pass counts the values of one digit among the keys whose higher digits match the wanted key, each block in its shared memory.
    The digit of that key is found on the device.
    """
    key, ties = xp.concatenate(_found(array, k, xp, block)).tolist()
    return key, ties


def largest(array: Any, k: int, index_dtype: DTypeLike, xp: Any, *, run: int = RUN, block: int = BLOCK) -> Any:
    """Return the positions of the k largest magnitudes (the first among equals), in increasing order: :func:`top` of :func:`kth`.

    Nothing is copied to the host. Parameters and exceptions are those of :func:`kth`.
    """
    prefix, rank = _found(array, k, xp, block)
    limits, part = xp.concatenate([prefix, prefix]), xp.concatenate([xp.zeros(1, np.int64), rank])
    counted = _counted(array, limits, xp, run, block)
    return _placed(array, limits, part, counted, k, index_dtype, xp, run, block)


def _found(array: Any, k: int, xp: Any, block: int) -> tuple[Any, Any]:
    """Return the result of :func:`kth` as device arrays of one number each."""
    check_selected(array)
    if not 1 <= k <= len(array):
        raise StreamError(f"there is no magnitude of rank {k} among {len(array)}: k is out of range")
    bits = magnitude.bits_of(array)
    limits = _keys(bits)
    prefix, rank = xp.zeros(1, np.int64), xp.full(1, k, np.int64)
    above = magnitude.mask(bits.dtype).bit_length()
    while above:
        shift = max(0, above - DIGIT)
        counts = xp.zeros(DIGITS, np.int64)
        launch(_count_digits, threads_for(len(bits), STRIDES), block, xp, bits, *limits, prefix, above, shift, counts)
        from_above = xp.cumsum(counts[::-1])
        at = xp.searchsorted(from_above, rank)
        rank = rank - (from_above[at] - counts[::-1][at])
        prefix = (prefix << (above - shift)) + (DIGITS - 1 - at)
        above = shift
    return prefix, rank


def count_interval(array: Any, low: int, shift: int, counts: Any, xp: Any, *, block: int = BLOCK) -> None:
    """Count non-zero magnitudes by key: ``counts[i]`` is increased by the number of keys in ``low + (i << shift)`` to the next such bound.

    Parameters
    ----------
    array : device array of float32 or float64, shape (N,)
    counts : device array of int64, shape (n,)
        Added to.
    """
    check_selected(array)
    bits = magnitude.bits_of(array)
    launch(_count_interval, threads_for(len(bits), STRIDES), block, xp, bits, *_keys(bits), np.int64(low), np.int64(shift), counts)


def top(array: Any, key: int, ties: int, k: int, index_dtype: DTypeLike, xp: Any, *, run: int = RUN, block: int = BLOCK) -> Any:
    """Return the positions of magnitudes above a key, and the first ``ties`` equal to it: together k, in increasing order.

    Parameters
    ----------
    array : device array of float32 or float64, shape (N,)
    key, ties : int
        As :func:`kth` returns them for k.
    """
    counted = count_around(array, key, key, xp, run=run, block=block)
    return places_of(array, key, key, (0, ties), counted, k, index_dtype, xp, run=run, block=block)


def count_around(array: Any, lower: int, over: int, xp: Any, *, run: int = RUN, block: int = BLOCK) -> tuple[Any, Any, Any, Any]:
    """Count keys above ``over``, and keys from ``lower`` to ``over``.

    Returns
    -------
    above, all_above, inside, all_inside : device arrays of int64
        For either kind, the number before the run of each thread, and the total.
    """
    return _counted(array, xp.asarray(np.array([lower, over], np.int64)), xp, run, block)


def _counted(array: Any, limits: Any, xp: Any, run: int, block: int) -> tuple[Any, Any, Any, Any]:
    """Count as :func:`count_around`, with the two limits on the device."""
    check_selected(array)
    bits = magnitude.bits_of(array)
    threads = threads_for(len(bits), run)
    above, inside = xp.empty(threads, np.int64), xp.empty(threads, np.int64)
    launch(_count_around, threads, block, xp, bits, *_keys(bits), limits, run, above, inside)
    return (*exclusive(above, xp), *exclusive(inside, xp))


def places_of(
    array: Any,
    lower: int,
    over: int,
    part: tuple[int, int],
    counted: tuple[Any, Any, Any, Any],
    k: int,
    index_dtype: DTypeLike,
    xp: Any,
    *,
    run: int = RUN,
    block: int = BLOCK,
) -> Any:
    """Return the positions of keys above ``over``, and of a run of those from ``lower`` to ``over``, together k, in increasing order.

    Parameters
    ----------
    part : (int, int)
        How many of the keys between the two are skipped, and how many are then taken.
    counted : tuple
        The result of :func:`count_around` for the same keys and ``run``.
    """
    limits, taken = (xp.asarray(np.array(pair, np.int64)) for pair in ((lower, over), part))
    return _placed(array, limits, taken, counted, k, index_dtype, xp, run, block)


def _placed(array: Any, limits: Any, part: Any, counted: Any, k: int, index_dtype: DTypeLike, xp: Any, run: int, block: int) -> Any:
    """Place as :func:`places_of`, with limits and part on the device."""
    bits = magnitude.bits_of(array)
    above, _, inside, _ = counted
    places = xp.empty(k, index_dtype)
    launch(_place_around, len(above), block, xp, bits, *_keys(bits), limits, part, run, above, inside, places)
    return places


def _keys(bits: Any) -> tuple[Any, Any]:
    """Return the constants that turn bits into keys: the mask, and the key of NaN."""
    return np.int64(magnitude.mask(bits.dtype)), np.int64(magnitude.nan(bits.dtype))


@kernel
def _count_digits(bits: Any, mask: Any, largest: Any, prefix: Any, above: Any, shift: Any, counts: Any) -> None:
    held = cuda.shared.array(DIGITS, np.int32)
    for digit in range(cuda.threadIdx.x, DIGITS, cuda.blockDim.x):
        held[digit] = 0
    cuda.syncthreads()
    last, higher = (1 << (above - shift)) - 1, prefix[0]
    for i in range(cuda.grid(1), bits.shape[0], cuda.gridsize(1)):
        key = smaller(bits[i] & mask, largest)
        if key >> above == higher:
            cuda.atomic.add(held, (key >> shift) & last, 1)
    cuda.syncthreads()
    for digit in range(cuda.threadIdx.x, DIGITS, cuda.blockDim.x):
        if held[digit] != 0:
            cuda.atomic.add(counts, digit, np.int64(held[digit]))


@kernel
def _count_interval(bits: Any, mask: Any, largest: Any, low: Any, shift: Any, counts: Any) -> None:
    for i in range(cuda.grid(1), bits.shape[0], cuda.gridsize(1)):
        key = smaller(bits[i] & mask, largest)
        if key > 0 and key >= low:
            at = (key - low) >> shift
            if at < counts.shape[0]:
                cuda.atomic.add(counts, at, 1)


@kernel
def _count_around(bits: Any, mask: Any, largest: Any, limits: Any, run: Any, above: Any, inside: Any) -> None:
    thread = cuda.grid(1)
    if thread < above.shape[0]:
        beyond, between = 0, 0
        lower, over = limits[0], limits[1]
        for i in range(thread * run, smaller((thread + 1) * run, bits.shape[0])):
            key = smaller(bits[i] & mask, largest)
            if key > over:
                beyond += 1
            elif key >= lower:
                between += 1
        above[thread] = beyond
        inside[thread] = between


@kernel
def _place_around(bits: Any, mask: Any, largest: Any, limits: Any, part: Any, run: Any, above: Any, inside: Any, places: Any) -> None:
    thread = cuda.grid(1)
    if thread < above.shape[0]:
        lower, over, first, wanted = limits[0], limits[1], part[0], part[1]
        rank = inside[thread]
        at = above[thread] + smaller(larger(rank - first, 0), wanted)
        for i in range(thread * run, smaller((thread + 1) * run, bits.shape[0])):
            key = smaller(bits[i] & mask, largest)
            taken = key > over
            if not taken and key >= lower:
                taken = first <= rank and rank < first + wanted
                rank += 1
            if taken and at < places.shape[0]:
                places[at] = i
                at += 1
