"""Compiled loops over weights that are known with a precision each: diagonal AROW.

Of every weight are kept ``v``, what it would be without penalties, and its precision, the inverse of its variance: 0 until the first
gradient has touched it, which stands for 1. Penalties act where a weight is read, as those of
:mod:`~sparseallreduce.linear.kernels.adaptive`, with precisions for norms.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels.adaptive import read_weight
from sparseallreduce.linear.kernels.rows import FAR
from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.intrinsics import prefetch_to_write

__all__ = ["arow_descend", "arow_descend_dense", "arow_spread", "arow_spread_dense"]

Array = NDArray[Any]

_ONE = np.uint64(1)
_FAR = np.uint64(FAR)
_PORTION = np.uint64(1024)  # entries of a sum that one of several threads or ranks takes at a time


@kernel
def arow_spread(precisions: Array, indices: Array, gradient: Array) -> float:
    """The sum of the squares of a sparse gradient, each by the variance of its weight; entry after entry, whoever shares the work."""
    total, size = 0.0, np.uint64(indices.size)
    for entry in range(size):
        if entry + _FAR < size:
            prefetch_to_write(precisions, np.uint64(indices[entry + _FAR]))
        slope = np.float64(gradient[entry])
        total += slope * slope / _known(np.float64(precisions[np.uint64(indices[entry])]))
    return total


@kernel
def arow_spread_dense(precisions: Array, gradient: Array) -> float:
    """As :func:`arow_spread`, to the same bits, for all weights."""
    total = 0.0
    for index in range(precisions.size):
        slope = np.float64(gradient[index])
        if slope != 0.0:
            total += slope * slope / _known(np.float64(precisions[index]))
    return total


@kernel
def arow_descend(
    v: Array, precisions: Array, indices: Array, gradient: Array, step: float, gain: float, l1: float, l2: float, part: int, parts: int
) -> bool:
    """One step for the weights that a sparse gradient touches, one of several parts of them; returns whether they are finite numbers.

    Each moves by ``step`` times its entry and its variance, against it, and its precision rises by ``gain`` times the entry's square.
    """
    finite, size = True, np.uint64(indices.size)
    portion = max(_ONE, size) if parts == 1 else _PORTION
    for begin in range(np.uint64(part) * portion, size, np.uint64(parts) * portion):
        end = min(begin + portion, size)
        for entry in range(begin, end):
            if entry + _FAR < end:
                prefetch_to_write(v, np.uint64(indices[entry + _FAR]))
                prefetch_to_write(precisions, np.uint64(indices[entry + _FAR]))
            finite &= _move(v, precisions, np.uint64(indices[entry]), np.float64(gradient[entry]), step, gain, l1, l2)
    return finite


@kernel
def arow_descend_dense(v: Array, precisions: Array, gradient: Array, step: float, gain: float, l1: float, l2: float) -> bool:
    """As :func:`arow_descend`, for all of these weights."""
    finite = True
    for index in range(v.size):
        finite &= _move(v, precisions, np.uint64(index), np.float64(gradient[index]), step, gain, l1, l2)
    return finite


@inlined
def _move(v: Array, precisions: Array, index: int, slope: float, step: float, gain: float, l1: float, l2: float) -> bool:
    """Change one weight; a gradient of zero changes nothing, so that a dense gradient does what its non-zeros do."""
    if slope == 0.0:
        return True
    free, kept = np.float64(v[index]), np.float64(precisions[index])
    before = _known(kept)
    after = before + gain * slope * slope
    weight = read_weight(free, kept, l1, l2)
    v[index] = weight - step * slope / before + before * (free - weight) / after
    precisions[index] = after
    return bool(np.isfinite(v[index]) and np.isfinite(precisions[index]))


@inlined
def _known(precision: float) -> float:
    return 1.0 if precision == 0.0 else precision
