"""Compiled loops over weights with one learning rate each: FTRL-Proximal, or AdaGrad without penalties.

Each weight is stored as ``v``, its value before penalties, and ``norm``, the square root of the sum of the squares of its gradients.
``norm + beta`` is the inverse of its learning rate, up to a factor. The penalties accumulated since the first step, ``l1`` and ``l2``
times the sum of all rates, are applied when the weight is read, and cost nothing until then. A norm overflows and underflows only if its
gradients do, even if their squares would.

A sum whose terms cancel leaves a rounding error, and the first step of a weight goes equally far for any gradient. So a weight ignores
gradients until one is above the noise: more than :data:`NOISE` times the largest entry of the gradient, which does not depend on the order
of summation.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels.bands import product, products
from sparseallreduce.linear.kernels.rows import FAR, MANY_LINES, ROW_AHEAD, fetch_first, fetch_row
from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.intrinsics import as_bits, as_float, prefetch_to_write

__all__ = [
    "NOISE",
    "adaptive_descend",
    "adaptive_descend_dense",
    "adaptive_descend_numbered",
    "adaptive_values",
    "hold",
    "read_weight",
    "score_and_number",
]

Array = NDArray[Any]

#: Bound on the error of a sum of some hundred terms, in rounding errors of the largest entry of a gradient.
NOISE = 64

_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_FAR = np.uint64(FAR)
_EVERY = np.uint64(2**64 - 1)  # larger than any index
_PORTION = np.uint64(1024)  # entries of a sum that one of several threads or ranks applies to the weights in one piece


@kernel
def adaptive_values(v: Array, norms: Array, beta: float, l1: float, l2: float, out: Array) -> None:
    """Write the weights after penalties, whose factors times the sum of all rates are ``l1`` and ``l2``."""
    for index in range(out.size):
        out[index] = read_weight(np.float64(v[index]), hold(np.float64(norms[index]), beta), l1, l2)


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
    times: Array,
    part: int,
    parts: int,
) -> bool:
    """Take one step for one of several parts of the weights that a sparse gradient touches; return True if they are finite.

    A weight's first gradient has to exceed ``least``. ``times`` holds factors of the weights' rates, or is empty. The parts consist of
    small portions, as in :func:`~sparseallreduce.linear.kernels.descend`.
    """
    finite, size = True, np.uint64(indices.size)
    free, kept, factors = np.empty(_PORTION, v.dtype), np.empty(_PORTION, norms.dtype), np.ones(_PORTION)
    for begin in range(np.uint64(part) * _PORTION, size, np.uint64(parts) * _PORTION):
        end = min(begin + _PORTION, size)
        fetched = size if parts == 1 else end
        if parts > 1 or begin == _ZERO:
            for entry in range(begin, min(begin + _FAR, end)):
                prefetch_to_write(v, np.uint64(indices[entry]))
                prefetch_to_write(norms, np.uint64(indices[entry]))
        for entry in range(begin, end):
            if entry + _FAR < fetched:
                prefetch_to_write(v, np.uint64(indices[entry + _FAR]))
                prefetch_to_write(norms, np.uint64(indices[entry + _FAR]))
            free[entry - begin] = v[np.uint64(indices[entry])]
            kept[entry - begin] = norms[np.uint64(indices[entry])]
        if times.size > 0:
            for entry in range(begin, end):
                factors[entry - begin] = times[np.uint64(indices[entry])]
        finite &= _steps(free, kept, _ZERO, gradient, begin, end - begin, rate, factors, beta, l1, l2, least)
        for entry in range(begin, end):
            v[np.uint64(indices[entry])] = free[entry - begin]
            norms[np.uint64(indices[entry])] = kept[entry - begin]
    return finite


@kernel
def adaptive_descend_dense(
    v: Array, norms: Array, gradient: Array, rate: float, beta: float, l1: float, l2: float, least: float, times: Array
) -> bool:
    """Take one step for all given weights with a dense gradient, as :func:`adaptive_descend` does with a sparse one."""
    finite, size = True, np.uint64(v.size)
    free, kept, factors = np.empty(_PORTION, v.dtype), np.empty(_PORTION, norms.dtype), np.ones(_PORTION)
    for begin in range(_ZERO, size, _PORTION):
        end = min(begin + _PORTION, size)
        for index in range(begin, end):
            free[index - begin], kept[index - begin] = v[index], norms[index]
        if times.size > 0:
            for index in range(begin, end):
                factors[index - begin] = times[index]
        finite &= _steps(free, kept, _ZERO, gradient, begin, end - begin, rate, factors, beta, l1, l2, least)
        for index in range(begin, end):
            v[index], norms[index] = free[index - begin], kept[index - begin]
    return finite


@kernel
def score_and_number(
    indptr: Array,
    indices: Array,
    values: Array,
    rows: Array,
    v: Array,
    marks: Array,
    places: Array,
    free: Array,
    kept: Array,
    numbers: Array,
    count: Array,
    out: Array,
) -> None:
    """Score rows, and number their features in the order of their entries for :func:`adaptive_descend_numbered`.

    The norm of a feature is saved under its number, and replaced by the number with the sign bit set, which no norm has. So later entries
    find the number in a cache line that they read anyway.

    Parameters
    ----------
    v, marks : ndarray
        Weights, and their norms as unsigned integers. Fast if both of a feature are in one cache line.
    places, free, kept : ndarray
        Outputs with room for all entries, of which there must be fewer than 2**31: the feature of each number, its weight, and its norm as
        in ``marks``.
    numbers : ndarray
        Output, uint32: the number of each entry's feature.
    count : ndarray
        Output of one entry: the number of features.
    out : ndarray
        Output: each row's inner product with the weights, bitwise identical to :func:`~sparseallreduce.linear.kernels.scores`.
    """
    known, entries, zero = _ZERO, _ZERO, v.dtype.type(0)
    for i in range(rows.size):
        fetch_row(indptr, indices, values, rows, i + ROW_AHEAD, MANY_LINES)
        fetch_first(indptr, indices, rows, i + 1, marks)
        begin, end = np.uint64(indptr[rows[i]]), np.uint64(indptr[rows[i] + 1])
        rest, sums = products(indices, values, _ZERO, begin, end, v, _EVERY, (zero, zero, zero, zero), True)
        out[i] = product(indices, values, _ZERO, rest, end, v, sums)
        known = _number(indices, begin, end, entries, v, marks, places, free, kept, numbers, known)
        entries += end - begin
    count[0] = known


@kernel
def adaptive_descend_numbered(
    indptr: Array,
    values: Array,
    rows: Array,
    coefficients: Array,
    v: Array,
    norms: Array,
    places: Array,
    free: Array,
    kept: Array,
    numbers: Array,
    count: Array,
    rate: float,
    beta: float,
    noise: float,
    times: Array,
) -> Any:
    """Take one step without penalties by the sum of ``coefficients[i]`` times row ``rows[i]``.

    The result is bitwise identical to that of :func:`adaptive_descend` with the sum as a sparse stream. The features must have been
    numbered by
    :func:`score_and_number`, and their norms are restored. Sums, weights and norms are adjacent in memory while they are updated.

    Parameters
    ----------
    kept : ndarray
        The norms, as floats.
    noise : float
        Fraction of the largest entry of the sum that a weight's first gradient has to exceed.
    times : ndarray
        Factor of the rate of each weight, or empty.

    Returns
    -------
    int
        Number of non-zero entries of the gradient.
    bool
        True if the weights are finite.
    float
        Largest magnitude of an entry.
    """
    features, place = np.uint64(count[0]), _ZERO
    sums = np.zeros(features, v.dtype)
    for i in range(rows.size):
        begin, end, factor = np.uint64(indptr[rows[i]]), np.uint64(indptr[rows[i] + 1]), coefficients[i]
        if factor != 0:
            for entry in range(begin, end):
                sums[np.uint64(numbers[place + entry - begin])] += factor * values[entry]
        place += end - begin
    entries, finite, highest = 0, True, as_bits(v.dtype.type(0))
    for number in range(features):  # the bits of positive floats are in their order, and comparing integers is vectorised
        highest = max(highest, as_bits(abs(sums[number])))
        entries += sums[number] != 0
    largest = np.float64(as_float(highest))
    least, factors = noise * largest if largest < np.inf else 0.0, np.ones(_PORTION)
    for first in range(_ZERO, features, _PORTION):
        end = min(first + _PORTION, features)
        if times.size > 0:
            for number in range(first, end):
                factors[number - first] = times[np.uint64(places[number])]
        finite &= _steps(free, kept, first, sums, first, end - first, rate, factors, beta, 0.0, 0.0, least)
        for number in range(first, end):
            v[np.uint64(places[number])] = free[number]
            norms[np.uint64(places[number])] = kept[number]
    count[0] = 0
    return entries, finite, largest


@inlined
def _number(
    indices: Array,
    begin: int,
    end: int,
    before: int,
    v: Array,
    marks: Array,
    places: Array,
    free: Array,
    kept: Array,
    numbers: Array,
    count: Any,
) -> Any:
    """Assign numbers from ``count`` on to the new features of a row, and return the count including them.

    A mark that is not below ``count`` is not a number, whatever its sign: a NaN norm may have one.
    """
    sign = np.uint64(1) << np.uint64(8 * marks.itemsize - 1)
    for entry in range(begin, end):
        index = np.uint64(indices[entry])
        mark = np.uint64(marks[index])
        known = (mark >= sign) & ((mark ^ sign) < count)
        number = mark ^ sign if known else count
        places[count], free[count], kept[count] = index, v[index], mark  # overwritten by the next feature if this one is known
        marks[index] = number | sign
        numbers[before + entry - begin] = number
        count += np.uint64(not known)
    return count


@inlined
def _steps(
    v: Array,
    norms: Array,
    first: int,
    slopes: Array,
    begin: int,
    count: int,
    rate: float,
    factors: Array,
    beta: float,
    l1: float,
    l2: float,
    least: float,
) -> bool:
    """Update ``count`` weights and norms from ``first`` on by the slopes from ``begin`` on; return True if all are finite.

    ``factors`` are those of their rates. A slope of zero changes nothing, so a dense gradient has the effect of its non-zeros.
    """
    if l1 != 0.0 or l2 != 0.0:
        finite = True
        for place in range(count):
            finite &= _step(v, norms, first + place, np.float64(slopes[begin + place]), rate * factors[place], beta, l1, l2, least)
        return finite
    faults = 0
    for place in range(count):  # no branches, so that the loop is vectorised
        slope, before, weight = np.float64(slopes[begin + place]), np.float64(norms[first + place]), np.float64(v[first + place])
        after = _norm(before, slope)
        # np.divide does not raise: zero by zero occurs only for a weight that is not updated.
        moved = weight + np.divide(0.0 - rate * factors[place] * slope, after + beta)
        moves = (slope != 0.0) & ((before != 0.0) | (abs(slope) > least) | np.isnan(slope))
        v[first + place] = moved if moves else weight
        norms[first + place] = after if moves else before
        faults += moves & ~(np.isfinite(v[first + place]) & np.isfinite(norms[first + place]))
    return faults == 0


@inlined
def _step(v: Array, norms: Array, index: int, slope: float, rate: float, beta: float, l1: float, l2: float, least: float) -> bool:
    """Update one weight with penalties; return True if it is finite."""
    if slope == 0.0:
        return True
    free, before = np.float64(v[index]), np.float64(norms[index])
    if before == 0.0 and abs(slope) <= least:
        return True
    after, held = _norm(before, slope), hold(before, beta)
    weight = read_weight(free, held, l1, l2)
    v[index] = weight + (held * (free - weight) - rate * slope) / (after + beta)
    norms[index] = after
    return bool(np.isfinite(v[index]) and np.isfinite(norms[index]))


@inlined
def _norm(before: float, slope: float) -> float:
    """Return the norm of the gradients including ``slope``."""
    return max(math.sqrt(before * before + slope * slope), abs(slope))  # the squares may underflow to zero


@inlined
def hold(norm: float, beta: float) -> float:
    """Return ``norm + beta``, by which steps and penalties are divided, or 0 before the first step."""
    return norm + beta if norm > 0.0 else norm


@inlined
def read_weight(v: float, norm: float, l1: float, l2: float) -> float:
    """Return the weight after penalties, which begin with its first gradient. NaN stays NaN, so that the training ends."""
    if norm == 0.0 or (l1 == 0.0 and l2 == 0.0):
        return v
    held = v * norm
    if held > l1:
        return (held - l1) / (norm + l2)
    if held < -l1:
        return (held + l1) / (norm + l2)
    return v if np.isnan(v) else 0.0
