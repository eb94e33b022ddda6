"""The exact k-th magnitude by histograms of its key's digits, and the places of the largest magnitudes."""

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

__all__ = ["count_around", "kth", "places_of", "top"]

DIGIT = 11  # bits of a key that one pass over memory counts by: three passes for float32, and 8 KiB of shared memory a block
DIGITS = 2**DIGIT
STRIDES = 64  # elements of a thread that counts digits, so that few blocks add their counts up


def kth(array: Any, k: int, xp: Any, *, block: int = BLOCK) -> tuple[int, int]:
    """The key of the k-th largest magnitude, and how many that equal it are among the k largest.

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
        Two numbers travel to the host, at the end.

    Raises
    ------
    StreamError
        If k is out of range, or the array is no contiguous vector of these dtypes.

    Notes
    -----
    Every pass counts the values of one digit among the keys whose higher digits are those of the wanted one, each block in its shared
    memory. Which digit that key has is found on the device.
    """
    check_selected(array)
    if not 1 <= k <= len(array):
        raise StreamError(f"there is no magnitude of rank {k} among {len(array)}: k is out of range")
    bits = magnitude.bits_of(array)
    limits = np.int64(magnitude.mask(bits.dtype)), np.int64(magnitude.nan(bits.dtype))
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
    key, ties = xp.concatenate([prefix, rank]).tolist()
    return key, ties


def top(array: Any, key: int, ties: int, k: int, index_dtype: DTypeLike, xp: Any, *, run: int = RUN, block: int = BLOCK) -> Any:
    """The places of magnitudes above a key, and the first ``ties`` places of those that equal it: together k, in increasing order.

    Parameters
    ----------
    array : device array of float32 or float64, shape (N,)
    key, ties : int
        As :func:`kth` returns them for k.
    """
    counted = count_around(array, key, key, xp, run=run, block=block)
    return places_of(array, key, key, (0, ties), counted, k, index_dtype, xp, run=run, block=block)


def count_around(array: Any, lower: int, over: int, xp: Any, *, run: int = RUN, block: int = BLOCK) -> tuple[Any, Any, Any, Any]:
    """Count keys above ``over``, and keys from ``lower`` to that.

    Returns
    -------
    above, all_above, inside, all_inside : device arrays of int64
        Of either, how many lie before the run of each thread, and how many there are.
    """
    check_selected(array)
    bits = magnitude.bits_of(array)
    threads = threads_for(len(bits), run)
    above, inside = xp.empty(threads, np.int64), xp.empty(threads, np.int64)
    launch(_count_around, threads, block, xp, bits, *_limits(bits, lower, over), run, above, inside)
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
    """The places of keys above ``over``, and of a run of those from ``lower`` to that, together k, in increasing order.

    Parameters
    ----------
    part : (int, int)
        How many of the keys between the two are left out first, and how many are then taken.
    counted : tuple
        What :func:`count_around` returned for the same keys and the same ``run``.
    """
    bits = magnitude.bits_of(array)
    above, _, inside, _ = counted
    places = xp.empty(k, index_dtype)
    limits = _limits(bits, lower, over)
    launch(_place_around, len(above), block, xp, bits, *limits, *part, run, above, inside, places)
    return places


def _limits(bits: Any, lower: int, over: int) -> tuple[Any, Any, Any, Any]:
    return np.int64(magnitude.mask(bits.dtype)), np.int64(magnitude.nan(bits.dtype)), np.int64(lower), np.int64(over)


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
def _count_around(bits: Any, mask: Any, largest: Any, lower: Any, over: Any, run: Any, above: Any, inside: Any) -> None:
    thread = cuda.grid(1)
    if thread < above.shape[0]:
        beyond, between = 0, 0
        for i in range(thread * run, smaller((thread + 1) * run, bits.shape[0])):
            key = smaller(bits[i] & mask, largest)
            if key > over:
                beyond += 1
            elif key >= lower:
                between += 1
        above[thread] = beyond
        inside[thread] = between


@kernel
def _place_around(
    bits: Any, mask: Any, largest: Any, lower: Any, over: Any, first: Any, wanted: Any, run: Any, above: Any, inside: Any, places: Any
) -> None:
    thread = cuda.grid(1)
    if thread < above.shape[0]:
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
