"""Loops of Newton's method for many features: derivatives of losses, and products with the rows and their transpose."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels.dual import LOGISTIC, SQUARED_HINGE, add, fetch_row, framed, product
from sparseallreduce.streams.kernels.compilation import inlined, kernel

__all__ = ["SQUARED", "derivatives", "dot", "hessian_product", "line_derivatives", "transposed_products"]

Array = NDArray[Any]

SQUARED = 3  # half the squared error; other losses have the numbers in .dual and .dual_errors
_AHEAD = 4  # number of rows by which a row is prefetched ahead
_ONE, _FOUR = np.uint64(1), np.uint64(4)


@inlined
def _derived(loss: int, score: float, label: float, bound: float) -> tuple[float, float, float]:
    """Return a sample's loss and its first and second derivative with respect to the score, all times its bound.

    The squared hinge has no second derivative at a margin of one; the generalised one is zero there (Mangasarian 2002).
    """
    if loss == LOGISTIC:
        margin = label * score
        small = math.exp(-abs(margin))
        share = (small if margin > 0 else 1.0) / (1.0 + small)  # the probability of the other class
        return bound * (math.log1p(small) + max(-margin, 0.0)), -bound * label * share, bound * share * (1.0 - share)
    if loss == SQUARED_HINGE:
        slack = max(0.0, 1.0 - label * score)
        return bound * slack * slack, -2.0 * bound * label * slack, 2.0 * bound if slack > 0 else 0.0
    error = score - label
    return 0.5 * bound * error * error, bound * error, bound


@kernel
def derivatives(loss: int, scores: Array, labels: Array, bounds: Array, first: Array, second: Array) -> float:
    """Write the derivatives of every sample's loss with respect to its score, times its bound; return the sum of the losses."""
    total = 0.0
    for row in range(scores.size):
        lost, first[row], second[row] = _derived(loss, scores[row], labels[row], bounds[row])
        total += lost
    return total


@kernel
def line_derivatives(loss: int, scores: Array, products: Array, labels: Array, bounds: Array, at: float) -> tuple[float, float]:
    """Return the first and second derivative of the sum of losses along a line with the scores ``scores + at * products``."""
    slope, curvature = 0.0, 0.0
    for row in range(scores.size):
        product = products[row]
        _, first, second = _derived(loss, scores[row] + at * product, labels[row], bounds[row])
        slope += first * product
        curvature += second * product * product
    return slope, curvature


@kernel
def transposed_products(
    indptr: Array,
    indices: Array,
    values: Array,
    frame: Array,
    first: Array,
    second: Array,
    intercept: int,
    gradient: Array,
    diagonal: Array,
) -> None:
    """Add each row times its first derivative to the gradient, and its squares times its second to the Hessian's diagonal.

    ``intercept`` is its position, or -1. An empty ``values`` stands for ones, and ``frame`` is as in :mod:`.dual`.
    """
    for row in range(first.size):
        if row + _AHEAD < first.size:
            fetch_row(indptr, indices, values, row + _AHEAD)
        slope, curvature = first[row], second[row]
        if slope == 0.0 and curvature == 0.0:
            continue
        entry, end = np.uint64(indptr[row]), np.uint64(indptr[row + 1])
        while entry < end:
            place, value = np.uint64(indices[entry]), np.float64(values[entry]) if values.size else 1.0
            if frame.size:
                value = framed(value, frame, place)
            gradient[place] += slope * value
            diagonal[place] += curvature * value * value
            entry += _ONE
        if intercept >= 0:
            gradient[intercept] += slope
            diagonal[intercept] += curvature


@kernel
def hessian_product(
    indptr: Array,
    indices: Array,
    values: Array,
    frame: Array,
    second: Array,
    direction: Array,
    intercept: int,
    products: Array,
    out: Array,
) -> float:
    """Multiply the rows with a direction, into ``products``, and add their transpose times ``second`` and these products to ``out``.

    Returns
    -------
    float
        Sum of ``second`` times the squared products: the curvature of the losses along the direction.
    """
    total = 0.0
    for row in range(second.size):
        if row + _AHEAD < second.size:
            fetch_row(indptr, indices, values, row + _AHEAD)
        begin, end = np.uint64(indptr[row]), np.uint64(indptr[row + 1])
        found = product(indices, values, frame, begin, end, direction)
        if intercept >= 0:
            found += direction[intercept]
        products[row] = found
        factor = second[row] * found
        if factor != 0.0:
            total += factor * found
            add(indices, values, frame, begin, end, factor, out)
            if intercept >= 0:
                out[intercept] += factor
    return total


@kernel
def dot(left: Array, right: Array, begin: int, end: int) -> float:
    """Return the inner product of two ranges, bitwise independent of their alignment in memory, which BLAS does not guarantee."""
    first, second, third, fourth = 0.0, 0.0, 0.0, 0.0
    i, last = np.uint64(begin), np.uint64(end)
    while i + _FOUR <= last:
        first += left[i] * right[i]
        second += left[i + _ONE] * right[i + _ONE]
        third += left[i + _ONE + _ONE] * right[i + _ONE + _ONE]
        fourth += left[i + _FOUR - _ONE] * right[i + _FOUR - _ONE]
        i += _FOUR
    while i < last:
        first += left[i] * right[i]
        i += _ONE
    return (first + second) + (third + fourth)
