"""Reading and updating the weights of some features."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels.rows import FAR
from sparseallreduce.streams.kernels.compilation import kernel
from sparseallreduce.streams.kernels.intrinsics import prefetch, prefetch_to_write

__all__ = ["descend", "descend_dense", "gather"]

Array = NDArray[Any]

_ONE = np.uint64(1)
_FAR = np.uint64(FAR)
_PORTION = np.uint64(1024)  # entries of a sum that one of several threads or ranks applies to the weights in one piece


@kernel
def gather(array: Array, indices: Array, out: Array) -> None:
    """Write ``array[indices]`` to ``out``."""
    size = np.uint64(indices.size)
    for entry in range(size):
        if entry + _FAR < size:
            prefetch(array, np.uint64(indices[entry + _FAR]))
        out[entry] = array[np.uint64(indices[entry])]


@kernel
def descend(weights: Array, indices: Array, values: Array, rate: float, part: int, parts: int) -> bool:
    """Subtract ``rate * values`` from ``weights[indices]`` for one of several parts of the indices; return True if they are finite.

    The parts consist of small portions, because the weights of low indices are often in the cache, and those of high indices are not.
    """
    finite, size = True, np.uint64(indices.size)
    portion = max(_ONE, size) if parts == 1 else _PORTION
    for begin in range(np.uint64(part) * portion, size, np.uint64(parts) * portion):
        end = min(begin + portion, size)
        for entry in range(begin, min(begin + _FAR, end)):
            prefetch_to_write(weights, np.uint64(indices[entry]))
        for entry in range(begin, end):
            if entry + _FAR < end:
                prefetch_to_write(weights, np.uint64(indices[entry + _FAR]))
            index = np.uint64(indices[entry])
            weight = weights[index] - rate * values[entry]
            weights[index] = weight
            finite &= np.isfinite(weight)
    return finite


@kernel
def descend_dense(weights: Array, gradient: Array, rate: float) -> bool:
    """Subtract ``rate * gradient`` from the weights without a temporary array; return True if they are finite."""
    finite = True
    for entry in range(weights.size):
        weights[entry] -= rate * gradient[entry]
        finite &= np.isfinite(weights[entry])
    return finite
