"""Approximate top-k by buckets on a GPU, with the probabilities and random bits of the CPU (thesis sections 2.4.1 and 4.3.3)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numpy.typing import DTypeLike

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels import magnitude
from sparseallreduce.streams.kernels.cuda.arrays import U, larger, product_of, smaller, split_mix
from sparseallreduce.streams.kernels.cuda.launching import BLOCK, RUN, device, kernel, launch, threads_for
from sparseallreduce.streams.kernels.cuda.norms import add_and_sum_buckets
from sparseallreduce.streams.kernels.cuda.selection import check_selected
from sparseallreduce.streams.kernels.reference.selection import LIFT, MIX, RANGE

__all__ = ["draw"]

_LOW, _FIRST, _SECOND = U(0xFFFFFFFF), U(MIX[0]), U(MIX[1])
_product = product_of(np.dtype(np.float64))


class _Chances(NamedTuple):
    """Parameters of each bucket that turn magnitudes into probabilities: ``(magnitude * unit + shift) * scale``."""

    unit: Any
    shift: Any
    scale: Any


def draw(
    accumulator: Any,
    gradient: Any | None,
    index_dtype: DTypeLike,
    xp: Any,
    *,
    bucket: int,
    share: float,
    at_most: bool,
    fixed: int,
    seed: int,
    clear: bool,
    run: int = RUN,
    block: int = BLOCK,
) -> tuple[Any, Any]:
    """Add two arrays, and draw values of each bucket with probabilities that grow with their magnitudes.

    Parameters
    ----------
    accumulator : device array of float32 or float64, shape (N,)
        The gradient is added to it; with ``clear``, drawn values are set to zero.
    gradient : device array of the same shape and dtype, or None
    index_dtype : {uint32, uint64}
    xp : module
        NumPy or CuPy.
    bucket : int
        Values in a bucket, at least 1; the last may be shorter. Eight threads sum a bucket, so a bucket of a whole vector is slow.
    share, at_most, fixed, seed, clear
        As for ``streams.kernels.selection.draw``.

    Returns
    -------
    indices, values : device arrays, shape (n,)
        In increasing order. Their number is copied to the host.

    Raises
    ------
    StreamError
        For arrays of other dtypes or dimensions or that are not contiguous, and for an empty bucket.
    """
    check_selected(accumulator, gradient)
    if bucket < 1:
        raise StreamError(f"a bucket holds at least one value, not {bucket}")
    size = len(accumulator)
    buckets, runs = threads_for(size, bucket), threads_for(bucket, run)
    chances = _chances(accumulator, gradient, bucket, share, at_most, xp, block)
    kernels, bits = _drawing(accumulator.dtype), magnitude.bits_of(accumulator)
    counts = xp.empty((buckets, runs), np.int64)
    arguments = accumulator, *chances, U(seed), bucket, run
    launch(kernels[0], buckets * runs, block, xp, *arguments, counts)
    drawn = xp.cumsum(counts, axis=1, dtype=np.int64)
    all_drawn = drawn[:, -1]
    wanted = all_drawn
    if fixed:
        wanted = xp.minimum(xp.int64(fixed), _lengths(size, bucket, xp))
    ends = xp.cumsum(wanted, dtype=np.int64)
    found = int(ends[-1]) if buckets else 0
    indices, values = xp.empty(found, index_dtype), xp.empty(found, accumulator.dtype)
    outputs = indices, magnitude.bits_of(values)
    launch(kernels[1], buckets * runs, block, xp, *arguments, bits, drawn - counts, all_drawn, wanted, ends - wanted, clear, *outputs)
    return indices, values


def _lengths(size: int, bucket: int, xp: Any) -> Any:
    starts = xp.arange(0, size, bucket, dtype=np.int64)
    return xp.minimum(xp.int64(bucket), size - starts)


def _chances(accumulator: Any, gradient: Any | None, bucket: int, share: float, at_most: bool, xp: Any, block: int) -> _Chances:
    """Compute the parameters by separate operations on whole arrays, since the CUDA compiler would fuse products and sums."""
    norm, largest = add_and_sum_buckets(accumulator, gradient, bucket, xp, block=block)
    lengths = _lengths(len(accumulator), bucket, xp).astype(np.float64)
    with np.errstate(all="ignore"):
        unit = xp.where(largest > RANGE[1], 1 / LIFT, xp.where(largest < RANGE[0], LIFT, 1.0))
        norm = xp.where(norm < np.inf, norm * unit, norm)
        launch(_sum_lifted, len(norm), block, xp, accumulator, bucket, unit, norm)
        largest = largest * unit
        share_of = share * lengths / bucket
        stands_out = (share_of * largest > norm) & (not at_most)
        shift = xp.where(stands_out, (share_of * largest - norm) / (lengths - share_of), 0.0)
        total = xp.where(stands_out, norm + lengths * shift, norm)
        scale = xp.where(stands_out | (total > 0), share_of / total, 0.0)
        every = share_of >= lengths
        shift, scale = xp.where(every, 1.0, shift), xp.where(every, np.inf, scale)
        return _Chances(*(each.astype(accumulator.dtype) for each in (unit, shift, scale)))


@kernel
def _sum_lifted(array: Any, bucket: Any, units: Any, norms: Any) -> None:
    """Sum the scaled magnitudes of buckets whose plain sum overflows."""
    row = cuda.grid(1)
    if row < norms.shape[0] and not norms[row] < np.inf:
        total = 0.0
        for i in range(row * bucket, smaller((row + 1) * bucket, array.shape[0])):
            size = _product(abs(np.float64(array[i])), units[row])
            if size < np.inf:
                total += size
        norms[row] = total


@device
def _hash_of_group(seed: Any, start: Any, within: Any) -> Any:
    """Return the hash shared by a group of 64 values of a bucket."""
    return split_mix(seed + U(start + (within & ~63)))


@device
def _drawn_number(hashed: Any, within: Any) -> Any:
    """Return 24 random bits for a value, from the hash of its group and its position there, computed in 32-bit arithmetic."""
    number = (U(within & 63) + (hashed & _LOW)) & _LOW
    number = ((number ^ (number >> U(16))) * _FIRST) & _LOW
    number = ((number ^ (number >> U(15))) + (hashed >> U(32))) & _LOW
    number = (number * _SECOND) & _LOW
    return (number ^ (number >> U(16))) >> U(8)


@functools.cache
def _drawing(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the kernels that count and place drawn values of a dtype."""
    real, product = dtype.type, product_of(dtype)
    step = real(2.0**-24)

    @device
    def is_drawn(value: Any, unit: Any, shift: Any, scale: Any, number: Any) -> Any:
        """Return whether a value is drawn; NaN is."""
        return not (real(number) * step >= (product(abs(value), unit) + shift) * scale)

    @kernel
    def count(array: Any, units: Any, shifts: Any, scales: Any, seed: Any, bucket: Any, run: Any, counts: Any) -> None:
        thread = cuda.grid(1)
        runs = counts.shape[1]
        if thread < counts.shape[0] * runs:
            row = thread // runs
            start, first = row * bucket, (thread - row * runs) * run
            found = 0
            for within in range(first, smaller(smaller(first + run, bucket), array.shape[0] - start)):
                number = _drawn_number(_hash_of_group(seed, start, within), within)
                if is_drawn(array[start + within], units[row], shifts[row], scales[row], number):
                    found += 1
            counts[row, thread - row * runs] = found

    @kernel
    def place(
        array: Any, units: Any, shifts: Any, scales: Any, seed: Any, bucket: Any, run: Any,
        bits: Any, before: Any, all_drawn: Any, wanted: Any, starts: Any, clear: Any, indices: Any, values: Any,
    ) -> None:  # fmt: skip
        thread = cuda.grid(1)
        runs = before.shape[1]
        if thread < before.shape[0] * runs:
            row = thread // runs
            start, first = row * bucket, (thread - row * runs) * run
            drawn = before[row, thread - row * runs]
            others, kept = first - drawn, wanted[row]
            filled = larger(kept - all_drawn[row], 0)  # zeros at the first undrawn positions
            at = starts[row] + smaller(drawn, kept) + smaller(others, filled)
            for within in range(first, smaller(smaller(first + run, bucket), array.shape[0] - start)):
                i = start + within
                number = _drawn_number(_hash_of_group(seed, start, within), within)
                chosen = is_drawn(array[i], units[row], shifts[row], scales[row], number)
                taken = drawn < kept if chosen else others < filled
                if chosen:
                    drawn += 1
                else:
                    others += 1
                if taken and at < indices.shape[0]:
                    indices[at] = i
                    values[at] = bits[i] if chosen else 0
                    at += 1
                    if clear and chosen:
                        bits[i] = 0

    return count, place
