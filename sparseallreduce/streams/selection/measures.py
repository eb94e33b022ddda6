"""Means and standard deviations of vectors of any finite magnitude, even if sums or squares leave the range of float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from sparseallreduce.streams.kernels import selection as loops
from sparseallreduce.streams.kernels.backend import array_module, cuda_kernels, on_device
from sparseallreduce.streams.selection.base import Array

__all__ = ["mean_and_deviation", "mean_and_largest"]

TINY = 1e-280  # smaller sums of squares have lost precision by underflow; float32 values never give one, unless all are zero
BLOCK = 2**15  # values that are scaled in the cache


def mean_and_deviation(accumulator: Array, gradient: Array | None) -> tuple[float, float]:
    """Add the gradient, if given, and return mean and standard deviation; non-finite values count as zeros.

    Parameters
    ----------
    accumulator : ndarray of float32 or float64, shape (N,)
        N is at least 1.
    gradient : ndarray, shape (N,), or None

    Examples
    --------
    >>> mean_and_deviation(np.array([1e300, -1e300, np.inf, 0.0]), None)[0]
    0.0
    """
    size = len(accumulator)
    total, squares = loops.moments(accumulator, gradient)
    if accumulator.dtype == np.float32 or TINY <= squares < math.inf:
        return _of_sums(size, total, squares)
    _, largest = loops.norms(accumulator, None)
    exponent = math.frexp(largest)[1]
    total = squares = 0.0
    for block in _scaled(accumulator, exponent):
        total += float(block.sum())
        squares += float(array_module(block).dot(block, block))
    mean, deviation = _of_sums(size, total, squares)
    return math.ldexp(mean, exponent), math.ldexp(deviation, exponent)


def mean_and_largest(accumulator: Array, gradient: Array | None) -> tuple[float, float]:
    """Add the gradient, if given, and return mean and maximum of the magnitudes; non-finite values count as zeros."""
    if on_device(accumulator):
        found: tuple[float, float] = cuda_kernels().mean_and_largest(accumulator, gradient)
        return found
    total, largest = loops.norms(accumulator, gradient)
    size = max(1, len(accumulator))
    if total < math.inf:
        return total / size, largest
    exponent = math.frexp(largest)[1]
    scaled = sum(float(np.abs(block).sum()) for block in _scaled(accumulator, exponent))
    return math.ldexp(scaled / size, exponent), largest


def _of_sums(size: int, total: float, squares: float) -> tuple[float, float]:
    mean = total / size
    return mean, math.sqrt(max(0.0, squares / size - mean * mean))


def _scaled(array: Array, exponent: int) -> Iterator[Array]:
    """Yield blocks of the vector divided by a power of two, with zeros for non-finite values."""
    for begin in range(0, len(array), BLOCK):
        block = array[begin : begin + BLOCK]
        yield np.ldexp(array_module(block).where(np.isfinite(block), block, block.dtype.type(0)), -exponent)
