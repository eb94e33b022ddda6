"""Loops of Newton's method over one rank's samples, for few features: scores, slopes and second derivatives, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels.dual import value_at
from sparseallreduce.streams.kernels.compilation import inlined, kernel

__all__ = ["add_class_curvature", "add_class_slopes", "add_curvature", "add_slopes", "class_products", "fill_rows", "products"]

Array = NDArray[Any]


@kernel
def products(indptr: Array, indices: Array, values: Array, frame: Array, weights: Array, intercept: int, out: Array) -> None:
    """Write the score of every row. ``intercept`` is its position among the weights, or -1; ``frame`` is as in :mod:`.dual`."""
    for row in range(out.size):
        score = weights[intercept] if intercept >= 0 else 0.0
        for entry in range(indptr[row], indptr[row + 1]):
            place = np.uint64(indices[entry])
            value = value_at(values, frame, entry, place)
            score += weights[place] * value
        out[row] = score


@kernel
def add_slopes(indptr: Array, indices: Array, values: Array, frame: Array, slopes: Array, intercept: int, out: Array) -> None:
    """Add each row times its slope to ``out``."""
    for row in range(slopes.size):
        slope = slopes[row]
        if slope != 0.0:
            if intercept >= 0:
                out[intercept] += slope
            for entry in range(indptr[row], indptr[row + 1]):
                place = np.uint64(indices[entry])
                value = value_at(values, frame, entry, place)
                out[place] += slope * value


@kernel
def add_curvature(indptr: Array, indices: Array, values: Array, frame: Array, curvatures: Array, intercept: int, out: Array) -> None:
    """Add the outer product of each row with itself, times its curvature, to the lower triangle of ``out``.

    Rows that have all columns are added without looking up positions.
    """
    row_values, places = np.empty(out.shape[0]), np.empty(out.shape[0], np.int64)
    features = out.shape[0] - (intercept >= 0)
    for row in range(curvatures.size):
        curvature = curvatures[row]
        if curvature == 0.0:
            continue
        count = 0
        for entry in range(indptr[row], indptr[row + 1]):
            place = np.uint64(indices[entry])
            value = value_at(values, frame, entry, place)
            places[count], row_values[count] = place, value
            count += 1
        full = count == features
        if intercept >= 0:
            places[count], row_values[count] = intercept, 1.0
            count += 1
        for i in range(count):
            factor = curvature * row_values[i]
            if full:
                for j in range(i + 1):
                    out[i, j] += factor * row_values[j]
            else:
                target = places[i]
                for j in range(i + 1):
                    out[target, places[j]] += factor * row_values[j]


@inlined
def _add_scores(indices: Array, values: Array, frame: Array, begin: Any, end: Any, weights: Array, scores: Array) -> None:
    for entry in range(begin, end):
        place = np.uint64(indices[entry])
        value = value_at(values, frame, entry, place)
        own = weights[place]
        for column in range(scores.size):
            scores[column] += own[column] * value


@inlined
def _add_to_columns(indices: Array, values: Array, frame: Array, begin: Any, end: Any, slopes: Array, out: Array) -> None:
    for entry in range(begin, end):
        place = np.uint64(indices[entry])
        value = value_at(values, frame, entry, place)
        target = out[place]
        for column in range(slopes.size):
            target[column] += slopes[column] * value


@kernel
def class_products(indptr: Array, indices: Array, values: Array, frame: Array, weights: Array, intercept: int, out: Array) -> None:
    """Write the scores of every row, for weights with one column per class."""
    for row in range(out.shape[0]):
        scores = out[row]
        if intercept >= 0:
            scores[:] = weights[intercept]
        else:
            scores[:] = 0.0
        _add_scores(indices, values, frame, indptr[row], indptr[row + 1], weights, scores)


@kernel
def add_class_slopes(indptr: Array, indices: Array, values: Array, frame: Array, slopes: Array, intercept: int, out: Array) -> None:
    """Add each row times its slopes, one column per class."""
    for row in range(slopes.shape[0]):
        own = slopes[row]
        if intercept >= 0:
            target = out[intercept]
            for column in range(own.size):
                target[column] += own[column]
        _add_to_columns(indices, values, frame, indptr[row], indptr[row + 1], own, out)


@kernel
def add_class_curvature(
    indptr: Array,
    indices: Array,
    values: Array,
    frame: Array,
    probabilities: Array,
    shares: Array,
    direction: Array,
    intercept: int,
    out: Array,
) -> None:
    """Add the product of the softmax loss's second derivatives with a direction, which has one column per class."""
    changes = np.empty(direction.shape[1])
    for row in range(shares.size):
        if intercept >= 0:
            changes[:] = direction[intercept]
        else:
            changes[:] = 0.0
        _add_scores(indices, values, frame, indptr[row], indptr[row + 1], direction, changes)
        chances, mean = probabilities[row], 0.0
        for column in range(changes.size):
            mean += chances[column] * changes[column]
        for column in range(changes.size):
            changes[column] = shares[row] * chances[column] * (changes[column] - mean)
        if intercept >= 0:
            target = out[intercept]
            for column in range(changes.size):
                target[column] += changes[column]
        _add_to_columns(indices, values, frame, indptr[row], indptr[row + 1], changes, out)


@kernel
def fill_rows(indptr: Array, indices: Array, values: Array, frame: Array, rows: Array, factors: Array, intercept: int, out: Array) -> None:
    """Write some rows as dense ones, each times its factor, into ``out``, which must be zero."""
    for number in range(rows.size):
        row, factor = rows[number], factors[number]
        target = out[number]
        if intercept >= 0:
            target[intercept] = factor
        for entry in range(indptr[row], indptr[row + 1]):
            place = np.uint64(indices[entry])
            value = value_at(values, frame, entry, place)
            target[place] = factor * value
