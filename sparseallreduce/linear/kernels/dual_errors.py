"""Loops of dual coordinate ascent for the epsilon-insensitive losses of regression, linear or squared.

They follow LIBLINEAR's dual solver for regression (Ho and Lin, *Large-scale linear support vector regression*, JMLR 2012, algorithm 4): a
sample has one dual variable of either sign, and the weights are the sum of the rows times these. See :mod:`.dual` for the rows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels.dual import add, add_scaled, fetch_row, product, scale_at, shuffle
from sparseallreduce.streams.kernels.compilation import inlined, kernel

__all__ = ["EPSILON_INSENSITIVE", "SQUARED_EPSILON_INSENSITIVE", "ascend_errors", "certify_errors", "conjugates_of_errors"]

Array = NDArray[Any]

EPSILON_INSENSITIVE, SQUARED_EPSILON_INSENSITIVE = 4, 5  # distinct from the numbers of other losses

_AHEAD = 4  # number of visits by which a row is prefetched ahead
_TINY = 1e-12  # below which a violation counts as zero


@inlined
def _loss(squared: bool, epsilon: float, error: float) -> float:
    excess = max(0.0, abs(error) - epsilon)
    return excess * excess if squared else excess


@inlined
def _conjugate(squared: bool, epsilon: float, label: float, dual: float, bound: float) -> float:
    """Return the term that a sample adds to the dual objective (to be minimised), besides the squared length of the weights."""
    value = epsilon * abs(dual) - label * dual
    if squared and bound > 0:
        value += dual * dual / (4.0 * bound)
    return value


@inlined
def _violation(dual: float, top: float, above: float, below: float) -> float:
    """Return the violation of the optimality condition of a dual variable; ``above`` and ``below`` are its upper and lower derivative."""
    if dual == 0.0:
        return max(-above, below, 0.0)
    if dual >= top:
        return max(above, 0.0)
    if dual <= -top:
        return max(-below, 0.0)
    return abs(above) if dual > 0.0 else abs(below)


@kernel
def ascend_errors(
    squared: bool,
    epsilon: float,
    indptr: Array,
    indices: Array,
    values: Array,
    frame: Array,
    labels: Array,
    bounds: Array,
    norms: Array,
    dual: Array,
    weights: Array,
    intercept: int,
    scales: Array,
    active: Array,
    count: int,
    limits: Array,
    state: Array,
) -> tuple[int, float]:
    """Make one pass over the first ``count`` of the ``active`` rows, like :func:`.dual.ascend`.

    ``limits`` are the largest violation of the last pass and its negative: samples whose variable is zero or at a bound, and whose gradient
    is further than that from moving it, are removed.
    """
    shuffle(active, count, state)
    limit, largest = limits[0], 0.0
    kept, gap = 0, 0.0
    for i in range(count):
        if i + _AHEAD < count:
            fetch_row(indptr, indices, values, active[i + _AHEAD])
        row = active[i]
        bound, before, label = bounds[row], dual[row], labels[row]
        begin, end = np.uint64(indptr[row]), np.uint64(indptr[row + 1])
        score = product(indices, values, frame, begin, end, weights)
        if intercept >= 0:
            score += weights[intercept]
        gap += bound * _loss(squared, epsilon, score - label) + _conjugate(squared, epsilon, label, before, bound) + before * score
        slope, curvature, top = score - label, norms[row], bound
        if squared:
            slope += before / (2.0 * bound)
            curvature += 1.0 / (2.0 * bound)
            top = math.inf
        above, below = slope + epsilon, slope - epsilon  # derivatives for a variable above zero, and below
        if (before == 0.0 and above > limit and below < -limit) or (before >= top and above < -limit) or (before <= -top and below > limit):
            continue
        active[kept] = row
        kept += 1
        violation = _violation(before, top, above, below)
        largest = max(largest, violation)
        after = before
        if violation > _TINY and curvature > 0:
            if above < curvature * before:
                after = before - above / curvature
            elif below > curvature * before:
                after = before - below / curvature
            else:
                after = 0.0
            after = min(max(after, -top), top)
        elif violation > _TINY and not squared:
            after = top if above < 0.0 else -top if below > 0.0 else 0.0  # a sample without values
        if after != before:
            dual[row] = after
            factor = after - before
            if scales.size:
                add_scaled(indices, values, frame, begin, end, factor, scales, weights)
            else:
                add(indices, values, frame, begin, end, factor, weights)
            if intercept >= 0:
                weights[intercept] += factor * scale_at(scales, np.uint64(intercept)) if scales.size else factor
    limits[0] = largest if largest > 0 else math.inf
    limits[1] = -limits[0]
    return kept, gap


@kernel
def certify_errors(
    squared: bool,
    epsilon: float,
    scores: Array,
    labels: Array,
    bounds: Array,
    dual: Array,
    limits: Array,
    active: Array,
    out: Array,
) -> int:
    """Compute the same as :func:`.dual.certify`, given the scores."""
    kept, losses, conjugates = 0, 0.0, 0.0
    for row in range(dual.size):
        bound, own, error = bounds[row], dual[row], scores[row] - labels[row]
        if bound <= 0.0:
            continue
        losses += bound * _loss(squared, epsilon, error)
        conjugates += _conjugate(squared, epsilon, labels[row], own, bound)
        above, below = error + epsilon, error - epsilon
        settled = own == 0.0 and above > limits[0] and below < limits[1]
        if not squared:
            settled |= (own >= bound and above < limits[1]) or (own <= -bound and below > limits[0])
        if not settled:
            active[kept] = row
            kept += 1
    out[0], out[1] = losses, conjugates
    return kept


@kernel
def conjugates_of_errors(squared: bool, epsilon: float, labels: Array, bounds: Array, dual: Array) -> float:
    """Return the sum of the terms that the samples add to the dual objective (to be minimised)."""
    total = 0.0
    for row in range(dual.size):
        total += _conjugate(squared, epsilon, labels[row], dual[row], bounds[row])
    return total
