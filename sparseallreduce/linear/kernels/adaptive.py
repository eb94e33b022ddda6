"""Compiled loops over weights of which each has a learning rate of its own: FTRL-Proximal, without penalties AdaGrad.

Of every weight are kept ``v``, what it would be without penalties, and ``norm``, the square root of the sum of the squares of its
gradients: with ``beta`` more it is how strongly the steps so far hold the weight. The penalties since the first step, ``l1`` and
``l2`` times the sum of all rates, draw against that when the weight is read, and cost nothing where it is not. A norm overflows and
underflows where its gradients do, and not where their squares would.

A sum whose terms cancel leaves a rounding error, of which a first step would go as far as of any gradient. So a weight that has had none
waits for one that is above the noise: more than :data:`NOISE` times the gradient's largest entry, which no order of summation changes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels.rows import FAR, fetch, lines_of
from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.intrinsics import prefetch_to_write

__all__ = ["NOISE", "adaptive_descend", "adaptive_descend_dense", "adaptive_descend_rows", "adaptive_values", "read_weight"]

Array = NDArray[Any]

#: Rounding errors, of the largest entry of a gradient, that a sum of some hundred terms may come to.
NOISE = 64

_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_LINES = np.uint64(8)  # of a row that are fetched
_ROWS_AHEAD = 4  # before its turn
_FAR = np.uint64(FAR)
_PORTION = np.uint64(1024)  # entries of a sum that one of several threads or ranks takes from the weights at a time


@kernel
def adaptive_values(v: Array, norms: Array, beta: float, l1: float, l2: float, out: Array) -> None:
    """Write the weights, with penalties of these factors times the sum of all rates."""
    for index in range(out.size):
        out[index] = read_weight(np.float64(v[index]), _hold(np.float64(norms[index]), beta), l1, l2)


@kernel
def adaptive_descend(
    v: Array,
    norms: Array,
    indices: Array,
    gradient: Array,
    rate: float,
    beta: float,
    l1: float,
    l2: float,
    least: float,
    part: int,
    parts: int,
) -> bool:
    """One step for the weights that a sparse gradient touches, one of several parts of them; returns whether they are finite numbers.

    ``least`` is what a weight's first gradient has to be above.
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
            finite &= _step(v, norms, np.uint64(indices[entry]), np.float64(gradient[entry]), rate, beta, l1, l2, least)
    return finite


@kernel
def adaptive_descend_dense(
    v: Array, norms: Array, gradient: Array, rate: float, beta: float, l1: float, l2: float, least: float
) -> bool:
    """As :func:`adaptive_descend`, for all of these weights."""
    finite = True
    for index in range(v.size):
        finite &= _step(v, norms, np.uint64(index), np.float64(gradient[index]), rate, beta, l1, l2, least)
    return finite


@kernel
def adaptive_descend_rows(
    indptr: Array,
    indices: Array,
    values: Array,
    rows: Array,
    coefficients: Array,
    sums: Array,
    v: Array,
    norms: Array,
    rate: float,
    beta: float,
    noise: float,
) -> Any:
    """One step, without penalties, by the sum of ``coefficients[i]`` times row ``rows[i]``: to the bit as by its sparse stream.

    Parameters
    ----------
    sums : ndarray
        Zeros for all features, before and afterwards.
    noise : float
        What of the largest entry of the sum a weight's first gradient has to be above.

    Returns
    -------
    int
        The entries of the gradient that are not zero.
    bool
        Whether the weights are finite numbers.
    float
        The largest magnitude of an entry.
    """
    total = 0
    for i in range(rows.size):
        total += indptr[rows[i] + 1] - indptr[rows[i]]
    places, slopes = np.empty(total, indices.dtype), np.empty(total, sums.dtype)
    count = _ZERO
    for i in range(rows.size):
        if i + _ROWS_AHEAD < rows.size:
            begin, end = np.uint64(indptr[rows[i + _ROWS_AHEAD]]), np.uint64(indptr[rows[i + _ROWS_AHEAD] + 1])
            fetch(indices, begin, min(_LINES, lines_of(indices, end - begin)))
            fetch(values, begin, min(_LINES, lines_of(values, end - begin)))
        factor = coefficients[i]
        if factor == 0:
            continue
        for entry in range(np.uint64(indptr[rows[i]]), np.uint64(indptr[rows[i] + 1])):
            places[count] = indices[entry]
            slopes[count] = factor * values[entry]
            count += _ONE
    for entry in range(count):
        if entry + _FAR < count:
            prefetch_to_write(sums, np.uint64(places[entry + _FAR]))
        sums[np.uint64(places[entry])] += slopes[entry]
    entries, finite, largest = 0, True, 0.0
    for entry in range(count):
        largest = max(largest, np.float64(abs(sums[np.uint64(places[entry])])))
    least = noise * largest if largest < np.inf else 0.0
    for entry in range(count):
        if entry + _FAR < count:
            prefetch_to_write(v, np.uint64(places[entry + _FAR]))
            prefetch_to_write(norms, np.uint64(places[entry + _FAR]))
        index = np.uint64(places[entry])
        if sums[index] != 0:
            entries += 1
            finite &= _step(v, norms, index, np.float64(sums[index]), rate, beta, 0.0, 0.0, least)
            sums[index] = 0
    return entries, finite, largest


@inlined
def _step(
    v: Array, norms: Array, index: int, slope: float, rate: float, beta: float, l1: float, l2: float, least: float
) -> bool:
    """Change one weight; a gradient of zero changes nothing, so that a dense gradient does what its non-zeros do."""
    if slope == 0.0:
        return True
    free, before = np.float64(v[index]), np.float64(norms[index])
    if before == 0.0 and abs(slope) <= least:
        return True
    after = max(math.sqrt(before * before + slope * slope), abs(slope))  # whose squares may be zero
    held = _hold(before, beta)
    weight = read_weight(free, held, l1, l2)
    v[index] = weight + (held * (free - weight) - rate * slope) / (after + beta)
    norms[index] = after
    return bool(np.isfinite(v[index]) and np.isfinite(norms[index]))


@inlined
def _hold(norm: float, beta: float) -> float:
    """What steps and penalties are divided by; 0 where there has been no step."""
    return norm + beta if norm > 0.0 else norm


@inlined
def read_weight(v: float, norm: float, l1: float, l2: float) -> float:
    """The weight, whose penalties begin with its first gradient; what is no number stays so, for the run to end by."""
    if norm == 0.0 or (l1 == 0.0 and l2 == 0.0):
        return v
    held = v * norm
    if held > l1:
        return (held - l1) / (norm + l2)
    if held < -l1:
        return (held + l1) / (norm + l2)
    return v if np.isnan(v) else 0.0
