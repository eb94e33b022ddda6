"""Compiled loops over weights of which each has a learning rate of its own: FTRL-Proximal, without penalties AdaGrad.

Of every weight are kept ``v``, what it would be without penalties, and ``norm``, the square root of the sum of the squares of its
gradients: it is how strongly the steps so far hold the weight. The penalties since the first step, ``l1`` and ``l2`` times the sum of
all rates, draw against that when the weight is read, and cost nothing where it is not. A norm overflows and underflows where its
gradients do, and not where their squares would.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels.rows import FAR
from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.intrinsics import prefetch_to_write

__all__ = ["adaptive_descend", "adaptive_descend_dense", "adaptive_values"]

Array = NDArray[Any]

_ONE = np.uint64(1)
_FAR = np.uint64(FAR)
_PORTION = np.uint64(1024)  # entries of a sum that one of several threads or ranks takes from the weights at a time


@kernel
def adaptive_values(v: Array, norms: Array, l1: float, l2: float, out: Array) -> None:
    """Write the weights, with penalties of these factors times the sum of all rates."""
    for index in range(out.size):
        out[index] = _read(np.float64(v[index]), np.float64(norms[index]), l1, l2)


@kernel
def adaptive_descend(
    v: Array, norms: Array, indices: Array, gradient: Array, rate: float, l1: float, l2: float, part: int, parts: int
) -> bool:
    """One step for the weights that a sparse gradient touches, one of several parts of them; returns whether they are finite numbers.

    The parts are dealt by small portions, as those of :func:`~sparseallreduce.linear.kernels.descend`.
    """
    finite, size = True, np.uint64(indices.size)
    portion = max(_ONE, size) if parts == 1 else _PORTION
    for begin in range(np.uint64(part) * portion, size, np.uint64(parts) * portion):
        end = min(begin + portion, size)
        for entry in range(begin, min(begin + _FAR, end)):
            prefetch_to_write(v, np.uint64(indices[entry]))
            prefetch_to_write(norms, np.uint64(indices[entry]))
        for entry in range(begin, end):
            if entry + _FAR < end:
                prefetch_to_write(v, np.uint64(indices[entry + _FAR]))
                prefetch_to_write(norms, np.uint64(indices[entry + _FAR]))
            finite &= _step(v, norms, np.uint64(indices[entry]), np.float64(gradient[entry]), rate, l1, l2)
    return finite


@kernel
def adaptive_descend_dense(v: Array, norms: Array, gradient: Array, rate: float, l1: float, l2: float) -> bool:
    """As :func:`adaptive_descend`, for all of these weights."""
    finite = True
    for index in range(v.size):
        finite &= _step(v, norms, np.uint64(index), np.float64(gradient[index]), rate, l1, l2)
    return finite


@inlined
def _step(v: Array, norms: Array, index: int, slope: float, rate: float, l1: float, l2: float) -> bool:
    """Change one weight; a gradient of zero changes nothing, so that a dense gradient does what its non-zeros do."""
    if slope == 0.0:
        return True
    free, before = np.float64(v[index]), np.float64(norms[index])
    after = max(math.sqrt(before * before + slope * slope), abs(slope))  # whose squares may be zero
    weight = _read(free, before, l1, l2)
    v[index] = weight + (before * (free - weight) - rate * slope) / after
    norms[index] = after
    return bool(np.isfinite(v[index]) and np.isfinite(norms[index]))


@inlined
def _read(v: float, norm: float, l1: float, l2: float) -> float:
    """The weight, whose penalties begin with its first gradient; what is no number stays so, for the run to end by."""
    if norm == 0.0 or (l1 == 0.0 and l2 == 0.0):
        return v
    tau = l1 / norm
    if v > tau:
        v -= tau
    elif v < -tau:
        v += tau
    elif not np.isnan(v):
        return 0.0
    return v / (1.0 + l2 / norm)
