"""Compiled loops over weights with one precision each: diagonal AROW.

Each weight is stored as ``v``, its value before penalties, and its precision, the inverse of its variance; a stored precision of 0, before
the first gradient, stands for 1. Penalties are applied when a weight is read, as in :mod:`~sparseallreduce.linear.kernels.adaptive`, with
precisions instead of norms.
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
_PORTION = np.uint64(1024)  # entries of a sum that one of several threads or ranks processes in one piece


@kernel
def arow_spread(precisions: Array, indices: Array, gradient: Array) -> float:
    """Return the sum of the squares of a sparse gradient, each times the variance of its weight, added in the order of the entries."""
    total, size = 0.0, np.uint64(indices.size)
    for entry in range(size):
        if entry + _FAR < size:
            prefetch_to_write(precisions, np.uint64(indices[entry + _FAR]))
        slope = np.float64(gradient[entry])
        total += slope * slope / _known(np.float64(precisions[np.uint64(indices[entry])]))
    return total


@kernel
def arow_spread_dense(precisions: Array, gradient: Array) -> float:
    """Return the same as :func:`arow_spread`, bitwise identical, for a dense gradient."""
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
    """Take one step for one of several parts of the weights that a sparse gradient touches; return True if they are finite.

    Each weight decreases by ``step`` times its entry and its variance, and its precision grows by ``gain`` times the entry's square.
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
    """Take one step for all given weights with a dense gradient, as :func:`arow_descend` does with a sparse one."""
    finite = True
    for index in range(v.size):
        finite &= _move(v, precisions, np.uint64(index), np.float64(gradient[index]), step, gain, l1, l2)
    return finite


@inlined
def _move(v: Array, precisions: Array, index: int, slope: float, step: float, gain: float, l1: float, l2: float) -> bool:
    """Update one weight. A gradient of zero changes nothing, so a dense gradient has the effect of its non-zeros."""
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
