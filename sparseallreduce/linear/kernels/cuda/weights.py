"""Reading and updating weights on a GPU.

The indices of a gradient are unique, so each weight is updated by one thread. Threads that find a value that is not finite set a flag, all
to the same value.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda

from sparseallreduce.streams.kernels.cuda.launching import BLOCK, device, kernel, launch

__all__ = ["adaptive_weight", "descend", "descend_adaptively", "plain_weight", "read_adaptive"]


@device
def plain_weight(weights: Any, norms: Any, place: Any, read: Any) -> Any:
    """Return a weight that is stored as it is."""
    return weights[place]


@device
def _drawn(free: Any, norm: Any, l1: Any, l2: Any) -> Any:
    """Return a weight after the penalties, whose accumulated amounts are ``l1`` and ``l2``. NaN stays NaN."""
    found = free
    if norm != 0.0 and (l1 != 0.0 or l2 != 0.0):
        held = free * norm
        if held > l1:
            found = (held - l1) / (norm + l2)
        elif held < -l1:
            found = (held + l1) / (norm + l2)
        elif free == free:
            found = 0.0
    return found


@device
def adaptive_weight(weights: Any, norms: Any, place: Any, read: Any) -> Any:
    """Return a weight of FTRL-Proximal. ``read`` holds its beta and the two penalties times the sum of all rates."""
    norm = np.float64(norms[place])
    if norm > 0.0:
        norm = norm + read[0]
    return _drawn(np.float64(weights[place]), norm, read[1], read[2])


@kernel
def _descend(
    weights: Any, indices: Any, sparse: Any, values: Any, width: Any, step: Any, rate: Any, intercepts: Any, flag: Any
) -> None:  # fmt: skip
    i = cuda.grid(1)
    if i < values.shape[0]:
        place = np.int64(i)
        if sparse:
            place = np.int64(indices[i // width]) * width + i % width
        if place < weights.shape[0]:
            found = weights[place] - step * values[i]
            weights[place] = found
            if found - found != 0.0:  # infinite or NaN
                flag[0] = 1.0
        elif place - weights.shape[0] < intercepts.shape[0]:
            shift = intercepts[place - weights.shape[0]] - rate * np.float64(values[i])
            intercepts[place - weights.shape[0]] = shift
            if shift - shift != 0.0:
                flag[0] = 1.0


def descend(weights: Any, indices: Any, values: Any, width: int, step: Any, rate: float, intercepts: Any, flag: Any, xp: Any) -> None:
    """Subtract ``step * values`` from the weights at ``places``, and ``rate * values`` from the intercepts, which follow the weights.

    Parameters
    ----------
    weights : device array, shape (features * K,)
    indices : device array, shape (n,), or None
        Indices of entries of ``width`` values each: value c of entry i has the position ``indices[i] * width + c``. None for all positions.
    values : device array, shape (n * width,)
    step, rate : float
    intercepts : device array of float64, shape (K,)
    flag : device array of float64, shape (1,)
        Set to 1 if a weight or intercept is no longer finite.
    """
    given = weights if indices is None else indices
    launch(_descend, len(values), BLOCK, xp, weights, given, indices is not None, values, width, step, rate, intercepts, flag)


@kernel
def _descend_adaptively(
    weights: Any, norms: Any, indices: Any, sparse: Any, values: Any, width: Any, rate: Any, beta: Any, l1: Any, l2: Any, unit: Any,
    intercepts: Any, intercept_norms: Any, flag: Any,
) -> None:  # fmt: skip
    i = cuda.grid(1)
    if i < values.shape[0] and values[i] != 0:
        place = np.int64(i)
        if sparse:
            place = np.int64(indices[i // width]) * width + i % width
        slope = np.float64(values[i])
        if place < weights.shape[0]:
            before = np.float64(norms[place])
            after = _norm(before, slope)
            held = before
            if before > 0.0:
                held = before + beta
            free = np.float64(weights[place])
            drawn = _drawn(free, held, l1, l2)
            weights[place] = drawn + (held * (free - drawn) - rate * slope) / (after + beta)
            norms[place] = after
            if weights[place] - weights[place] != 0.0 or after - after != 0.0:
                flag[0] = 1.0
        elif place - weights.shape[0] < intercepts.shape[0]:
            own = place - weights.shape[0]
            after = _norm(intercept_norms[own], unit * slope)
            shift = intercepts[own] - rate * unit * (unit * slope) / (after + beta)
            intercept_norms[own], intercepts[own] = after, shift
            if shift - shift != 0.0:
                flag[0] = 1.0


@device
def _norm(before: Any, slope: Any) -> Any:
    """Return the norm of the gradients including ``slope``, also if the squares underflow to zero. NaN stays NaN."""
    found = math.sqrt(before * before + slope * slope)
    size = slope
    if slope < 0.0:
        size = -slope
    if found < size:
        found = size
    return found


def descend_adaptively(
    weights: Any, norms: Any, indices: Any, values: Any, width: int, rate: float, beta: float, penalties: tuple[float, float], unit: float,
    intercepts: Any, intercept_norms: Any, flag: Any, xp: Any,
) -> None:  # fmt: skip
    """Take a step of FTRL-Proximal, as described in :class:`~sparseallreduce.linear.weights.AdaptiveWeights`.

    Parameters
    ----------
    weights, norms : device arrays, shape (features * K,)
        Weights before penalties, and the norms of their gradients so far.
    indices, values, width, intercepts, flag
        As in :func:`descend`.
    rate, beta : float
    penalties : (float, float)
        L1 and L2, times the sum of all rates before this step.
    unit : float
        Value of the constant feature; the intercept is this value times that feature's weight.
    intercept_norms : device array of float64, shape (K,)
    """
    given = weights, norms, weights if indices is None else indices, indices is not None, values, width
    launch(_descend_adaptively, len(values), BLOCK, xp, *given, rate, beta, *penalties, unit, intercepts, intercept_norms, flag)


@kernel
def _read_adaptive(weights: Any, norms: Any, read: Any, out: Any) -> None:
    i = cuda.grid(1)
    if i < out.shape[0]:
        norm = np.float64(norms[i])
        if norm > 0.0:
            norm = norm + read[0]
        out[i] = _drawn(np.float64(weights[i]), norm, read[1], read[2])


def read_adaptive(weights: Any, norms: Any, read: Any, xp: Any) -> Any:
    """Return all weights after the penalties; ``read`` as in :func:`adaptive_weight`."""
    out = xp.empty(len(weights), weights.dtype)
    launch(_read_adaptive, len(out), BLOCK, xp, weights, norms, read, out)
    return out
