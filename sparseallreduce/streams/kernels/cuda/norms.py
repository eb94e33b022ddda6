"""Sums and maxima of magnitudes on a GPU: of each bucket in the CPU's order, and of a whole vector as a tree."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda

from sparseallreduce.streams.kernels import magnitude
from sparseallreduce.streams.kernels.cuda.arrays import larger, product_of, smaller
from sparseallreduce.streams.kernels.cuda.launching import BLOCK, RUN, kernel, launch, threads_for

__all__ = ["LANES", "add_and_sum_buckets", "mean_and_largest", "sum_and_largest"]

LANES = 8  # partial sums of a bucket, as on the CPU
_product = product_of(np.dtype(np.float64))


def add_and_sum_buckets(accumulator: Any, gradient: Any | None, bucket: int, xp: Any, *, block: int = BLOCK) -> tuple[Any, Any]:
    """Add the gradient, if given, and return sum and maximum of the magnitudes of each bucket; non-finite values count as zeros.

    Returns
    -------
    sums, largest : device arrays of float64, shape (buckets,)
        Eight threads sum a bucket, each every eighth value, in the CPU's order and bitwise identical to it.
    """
    buckets = threads_for(len(accumulator), bucket)
    sums, largest = xp.empty((buckets, LANES)), xp.empty((buckets, LANES))
    launch(_sum_strides, buckets * LANES, block, xp, *_added(accumulator, gradient), bucket, LANES, 1.0, sums, largest)
    total = sums[:, 0]
    for lane in range(1, LANES):
        total = total + sums[:, lane]
    return total, largest.max(axis=1) if buckets else largest[:, 0]


def mean_and_largest(accumulator: Any, gradient: Any | None, xp: Any, *, run: int = RUN, block: int = BLOCK) -> tuple[float, float]:
    """Add the gradient, if given, and return mean and maximum of the magnitudes; non-finite values count as zeros.

    The CPU's eight sequential lanes would leave a GPU only eight threads. Here runs are summed, and their sums added as a binary tree, so
    the mean may differ from the CPU's by rounding in float64. It depends only on the values and ``run``.
    """
    size = max(1, len(accumulator))
    total, largest = _sum_runs(accumulator, gradient, 1.0, xp, run, block)
    if total < math.inf:
        return total / size, largest
    exponent = math.frexp(largest)[1]
    scaled, _ = _sum_runs(accumulator, None, math.ldexp(1.0, -exponent), xp, run, block)
    return math.ldexp(scaled / size, exponent), largest


def sum_and_largest(accumulator: Any, gradient: Any | None, xp: Any, *, run: int = RUN, block: int = BLOCK) -> tuple[float, float]:
    """Add the gradient, if given, and return sum and maximum of the magnitudes, computed as in :func:`mean_and_largest`."""
    return _sum_runs(accumulator, gradient, 1.0, xp, run, block)


def _sum_runs(accumulator: Any, gradient: Any | None, unit: float, xp: Any, run: int, block: int) -> tuple[float, float]:
    threads = threads_for(len(accumulator), run)
    if not threads:
        return 0.0, 0.0
    sums, largest = xp.empty((threads, 1)), xp.empty((threads, 1))
    launch(_sum_strides, threads, block, xp, *_added(accumulator, gradient), run, 1, unit, sums, largest)
    level = sums[:, 0]
    while len(level) > 1:
        odd = level[len(level) // 2 * 2 :]
        with np.errstate(over="ignore"):
            level = xp.concatenate([level[: len(level) // 2 * 2 : 2] + level[1::2], odd])
    total, most = xp.concatenate([level, largest.max().reshape(1)]).tolist()
    return total, most


def _added(accumulator: Any, gradient: Any | None) -> tuple[Any, ...]:
    """Return the kernel arguments for an array and the one added to it, with the mask of magnitudes and the bits of infinity."""
    bits = magnitude.bits_of(accumulator)
    limits = np.int64(magnitude.mask(bits.dtype)), np.int64(magnitude.nan(bits.dtype) - 1)
    return accumulator, bits, accumulator if gradient is None else gradient, gradient is not None, *limits


@kernel
def _sum_strides(
    accumulator: Any, bits: Any, gradient: Any, add: Any, mask: Any, infinity: Any,
    bucket: Any, lanes: Any, unit: Any, sums: Any, largest: Any,
) -> None:  # fmt: skip
    """Sum every ``lanes``-th magnitude of a bucket in each thread."""
    thread = cuda.grid(1)
    if thread < sums.shape[0] * lanes:
        row = thread // lanes
        lane = thread - row * lanes
        total, most = 0.0, 0.0
        for i in range(row * bucket + lane, smaller((row + 1) * bucket, accumulator.shape[0]), lanes):
            if add:
                accumulator[i] += gradient[i]
            if (bits[i] & mask) < infinity:
                size = abs(np.float64(accumulator[i]))
                total += _product(size, unit)
                most = larger(size, most)
        sums[row, lane] = total
        largest[row, lane] = most
