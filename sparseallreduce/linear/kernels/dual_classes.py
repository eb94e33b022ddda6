"""Loops of dual coordinate ascent for multinomial logistic regression: a visit updates the dual variables of all classes of a sample.

The dual variables of a sample are class probabilities times its bound; the weights are the sum over the samples of the bound for the true
class minus the dual variables. A visit finds the probabilities that maximise the dual objective, by Newton's method on their logarithms and
the multiplier that makes them sum to one (the subproblem of Yu, Huang and Lin 2011, section 5, solved as a whole). The weights of a
feature, one per class, are adjacent.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels.dual import fetch_row, scale_at, shuffle, value_at
from sparseallreduce.streams.kernels.compilation import inlined, kernel

__all__ = ["ascend_classes", "certify_classes", "entropies"]

Array = NDArray[Any]

_AHEAD = 4  # number of visits by which a row is prefetched ahead
_STEPS = 40  # largest number of Newton steps
# Tolerance of the probabilities' sum and of their equations, in units of the square root of the sample's gap over its curvature.
_NEAR = 0.1
_NEAREST = 1e-9
_ONE = np.uint64(1)


@inlined
def _add_scores(indices: Array, values: Array, frame: Array, begin: Any, end: Any, weights: Array, classes: int, scores: Array) -> None:
    entry = begin
    while entry < end:
        place = np.uint64(indices[entry])
        value = value_at(values, frame, entry, place)
        first = np.int64(place) * classes
        for c in range(classes):
            scores[c] += value * weights[first + c]
        entry += _ONE


@inlined
def _add_changes(
    indices: Array, values: Array, frame: Array, begin: Any, end: Any, changes: Array, classes: int, scales: Array, weights: Array
) -> None:
    entry = begin
    while entry < end:
        place = np.uint64(indices[entry])
        value = value_at(values, frame, entry, place)
        if scales.size:
            value *= scale_at(scales, place)
        first = np.int64(place) * classes
        for c in range(classes):
            weights[first + c] += value * changes[c]
        entry += _ONE


@inlined
def _log_sum(scores: Array, classes: int) -> float:
    highest = scores[0]
    for c in range(1, classes):
        highest = max(highest, scores[c])
    total = 0.0
    for c in range(classes):
        total += math.exp(scores[c] - highest)
    return float(highest + math.log(total))


@inlined
def _best_shares(
    before: Array, scores: Array, curvature: float, log_sum: float, near: float, logs: Array, after: Array, classes: int
) -> bool:
    """Find probabilities p with equal ``log p_c + curvature * (p_c - before_c) - scores_c`` for all c; return False if that fails."""
    multiplier = -log_sum
    for c in range(classes):
        start = before[c] if curvature > 1.0 else math.exp(scores[c] - log_sum)
        logs[c] = math.log(max(start, 1e-300))
    for _ in range(_STEPS):
        total, inverse, residual, worst = 0.0, 0.0, 0.0, 0.0
        for c in range(classes):
            share = math.exp(logs[c])
            after[c] = share
            error = logs[c] + curvature * (share - before[c]) - scores[c] - multiplier
            slope = 1.0 + curvature * share
            total += share
            inverse += share / slope
            residual += share * error / slope
            worst = max(worst, share * abs(error))
        if abs(total - 1.0) <= near and worst <= near:
            break
        step = (1.0 - total + residual) / inverse if inverse > 0.0 else 0.0
        for c in range(classes):
            error = logs[c] + curvature * (after[c] - before[c]) - scores[c] - multiplier
            logs[c] = min(0.0, max(-690.0, logs[c] + (step - error) / (1.0 + curvature * after[c])))
        multiplier += step
    total = 0.0
    for c in range(classes):
        total += after[c]
    if not (0.5 < total < 2.0):
        return False
    for c in range(classes):
        after[c] /= total
    return True


@inlined
def _entropy(shares: Array, classes: int) -> float:
    """Return the sum of p log p."""
    total = 0.0
    for c in range(classes):
        if shares[c] > 0.0:
            total += shares[c] * math.log(shares[c])
    return total


@kernel
def ascend_classes(
    indptr: Array,
    indices: Array,
    values: Array,
    frame: Array,
    labels: Array,
    bounds: Array,
    norms: Array,
    shares: Array,
    weights: Array,
    intercept: int,
    scales: Array,
    active: Array,
    count: int,
    state: Array,
) -> float:
    """Visit the first ``count`` of the ``active`` rows once in random order; return the sum of their gaps before each visit.

    Parameters
    ----------
    labels : ndarray
        Class numbers.
    shares : ndarray, shape (rows, classes)
        Dual variables divided by the bounds; changed in place, and the ``weights`` accordingly, times their scales.

    The other parameters are those of :func:`~sparseallreduce.linear.kernels.dual.ascend`. The intercept's position is that of a feature.
    """
    shuffle(active, count, state)
    classes, gap = shares.shape[1], 0.0
    scores, logs, after, changes = np.empty(classes), np.empty(classes), np.empty(classes), np.empty(classes)
    for i in range(count):
        if i + _AHEAD < count:
            fetch_row(indptr, indices, values, active[i + _AHEAD])
        row = active[i]
        bound, before = bounds[row], shares[row]
        begin, end = np.uint64(indptr[row]), np.uint64(indptr[row + 1])
        for c in range(classes):
            scores[c] = weights[intercept * classes + c] if intercept >= 0 else 0.0
        _add_scores(indices, values, frame, begin, end, weights, classes, scores)
        log_sum = _log_sum(scores, classes)
        own = log_sum + _entropy(before, classes)
        for c in range(classes):
            own -= before[c] * scores[c]
        gap += bound * own
        curvature = norms[row] * bound
        near = max(_NEAREST, _NEAR * min(1.0, math.sqrt(max(own, 0.0))) / (1.0 + curvature))
        if not _best_shares(before, scores, curvature, log_sum, near, logs, after, classes):
            continue
        rise = -_entropy(after, classes) + _entropy(before, classes)
        for c in range(classes):
            change = after[c] - before[c]
            rise += change * (scores[c] - 0.5 * curvature * change)
            changes[c] = -bound * change
        if rise <= 0.0:
            continue
        for c in range(classes):
            before[c] = after[c]
            if intercept >= 0:
                weights[intercept * classes + c] += changes[c] * scale_at(scales, np.uint64(intercept)) if scales.size else changes[c]
        _add_changes(indices, values, frame, begin, end, changes, classes, scales, weights)
    return gap


@kernel
def certify_classes(
    indptr: Array,
    indices: Array,
    values: Array,
    frame: Array,
    labels: Array,
    bounds: Array,
    weights: Array,
    intercept: int,
    out: Array,
) -> float:
    """Write the scores of all rows; return the sum of their losses, each times its bound."""
    classes, losses = out.shape[1], 0.0
    for row in range(out.shape[0]):
        scores = out[row]
        for c in range(classes):
            scores[c] = weights[intercept * classes + c] if intercept >= 0 else 0.0
        _add_scores(indices, values, frame, np.uint64(indptr[row]), np.uint64(indptr[row + 1]), weights, classes, scores)
        losses += bounds[row] * (_log_sum(scores, classes) - scores[np.int64(labels[row])])
    return losses


@kernel
def entropies(bounds: Array, shares: Array) -> float:
    """Return the sum of the terms that the samples add to the dual objective (to be minimised)."""
    total = 0.0
    for row in range(shares.shape[0]):
        total += bounds[row] * _entropy(shares[row], shares.shape[1])
    return total
