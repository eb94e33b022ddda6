"""Loops of dual coordinate ascent over one rank's samples.

Each visit of a sample reads its row twice: for the margin, and for the weights if its dual variable changes. The rows are stored one after
the other, and are visited in random order, so a later row is prefetched while one is processed. Features are numbered by the number of
samples they occur in, in descending order: the most used weights are close together and stay in the cache.

Values can be shifted and scaled without a copy: ``frame`` holds two numbers per feature, one to subtract from its values, and one to
multiply the difference by. With an empty frame, values are used as they are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.intrinsics import prefetch

__all__ = [
    "HINGE",
    "LOGISTIC",
    "SQUARED_HINGE",
    "add",
    "add_scaled",
    "ascend",
    "certify",
    "conjugates",
    "fetch_row",
    "framed",
    "margins",
    "product",
    "scale_at",
    "shuffle",
    "squared_norms",
]

Array = NDArray[Any]

HINGE, SQUARED_HINGE, LOGISTIC = 0, 1, 2

_AHEAD = 4  # number of visits by which a row is prefetched ahead
_LINES = 8  # cache lines prefetched of it
_LINE = 64  # bytes per cache line
_TINY = 1e-12  # below which a projected gradient counts as zero, as in LIBLINEAR
_ROOT_STEPS = 30
_EDGE = 1e-15  # distance of a logistic dual variable from both ends of its range, as a fraction, so that its logarithms are finite
_ONE, _THREE, _FOUR = np.uint64(1), np.uint64(3), np.uint64(4)
_WEYL, _MIX, _MIX_AGAIN = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_THIRTY, _TWENTY_SEVEN, _THIRTY_ONE = np.uint64(30), np.uint64(27), np.uint64(31)


@kernel
def squared_norms(indptr: Array, indices: Array, values: Array, frame: Array, scales: Array, intercept: int, out: Array) -> None:
    """Write the squared length of every row, including the intercept, with each square times the scale of its feature.

    An empty ``values`` means that all values are 1; for ``scales`` and ``intercept`` see :func:`ascend`.
    """
    constant = 0.0 if intercept < 0 else scale_at(scales, np.uint64(intercept)) if scales.size else 1.0
    shared, scale = np.uint64(0), 1.0
    if scales.size == 2:
        shared, scale = np.uint64(scales[0]), scales[1]
    for row in range(out.size):
        begin, end, total, after = indptr[row], indptr[row + 1], constant, 0.0
        if scales.size == 0 and values.size == 0:
            total += np.float64(end - begin)
        elif scales.size <= 2:  # two sums, because an addition waits for the one before it
            for entry in range(begin, end - 1, 2):
                place, following = np.uint64(indices[entry]), np.uint64(indices[entry + 1])
                value, next_value = value_at(values, frame, entry, place), value_at(values, frame, entry + 1, following)
                total += (scale if place < shared else 1.0) * (value * value)
                after += (scale if following < shared else 1.0) * (next_value * next_value)
            if (end - begin) % 2:
                place = np.uint64(indices[end - 1])
                value = value_at(values, frame, end - 1, place)
                total += (scale if place < shared else 1.0) * (value * value)
        else:
            for entry in range(begin, end):
                place = np.uint64(indices[entry])
                value = value_at(values, frame, entry, place)
                total += scale_at(scales, place) * (value * value)
        out[row] = total + after


@inlined
def framed(value: float, frame: Array, place: Any) -> float:
    """Return the shifted and scaled value of a feature."""
    return float((value - frame[place + place]) * frame[place + place + _ONE])


@inlined
def value_at(values: Array, frame: Array, entry: Any, place: Any) -> float:
    """Return the shifted and scaled value of an entry; an empty ``values`` means that all values are 1."""
    value = 1.0
    if values.size:
        value = np.float64(values[entry])
        if frame.size:
            value = framed(value, frame, place)
    return float(value)


@inlined
def product(indices: Array, values: Array, frame: Array, begin: Any, end: Any, weights: Array) -> float:
    """Return the inner product of a row with the weights; an empty ``values`` means that all values are 1."""
    entry = begin
    first, second, third, fourth = 0.0, 0.0, 0.0, 0.0
    if values.size == 0:
        while entry + _THREE < end:
            first += weights[np.uint64(indices[entry])]
            second += weights[np.uint64(indices[entry + _ONE])]
            third += weights[np.uint64(indices[entry + _ONE + _ONE])]
            fourth += weights[np.uint64(indices[entry + _THREE])]
            entry += _FOUR
        while entry < end:
            first += weights[np.uint64(indices[entry])]
            entry += _ONE
    elif frame.size:
        while entry < end:
            place = np.uint64(indices[entry])
            first += weights[place] * framed(np.float64(values[entry]), frame, place)
            entry += _ONE
    else:
        while entry + _THREE < end:
            first += weights[np.uint64(indices[entry])] * values[entry]
            second += weights[np.uint64(indices[entry + _ONE])] * values[entry + _ONE]
            third += weights[np.uint64(indices[entry + _ONE + _ONE])] * values[entry + _ONE + _ONE]
            fourth += weights[np.uint64(indices[entry + _THREE])] * values[entry + _THREE]
            entry += _FOUR
        while entry < end:
            first += weights[np.uint64(indices[entry])] * values[entry]
            entry += _ONE
    return (first + second) + (third + fourth)


@inlined
def add(indices: Array, values: Array, frame: Array, begin: Any, end: Any, factor: float, weights: Array) -> None:
    """Add a row times a factor to the weights; an empty ``values`` means that all values are 1."""
    entry = begin
    if values.size == 0:
        while entry < end:
            weights[np.uint64(indices[entry])] += factor
            entry += _ONE
    elif frame.size:
        while entry < end:
            place = np.uint64(indices[entry])
            weights[place] += factor * framed(np.float64(values[entry]), frame, place)
            entry += _ONE
    else:
        while entry < end:
            weights[np.uint64(indices[entry])] += factor * values[entry]
            entry += _ONE


@inlined
def scale_at(scales: Array, place: Any) -> float:
    """Return the scale of a feature, see :func:`ascend`."""
    if place >= np.uint64(scales[0]):
        return 1.0
    return float(scales[min(place + _ONE, np.uint64(scales.size) - _ONE)])


@inlined
def add_scaled(indices: Array, values: Array, frame: Array, begin: Any, end: Any, factor: float, scales: Array, weights: Array) -> None:
    """Compute the same as :func:`add` with each entry times the scale of its feature."""
    entry = begin
    if scales.size == 2:
        shared, scaled = np.uint64(scales[0]), factor * scales[1]
        while entry < end:
            place = np.uint64(indices[entry])
            weights[place] += (scaled if place < shared else factor) * value_at(values, frame, entry, place)
            entry += _ONE
    else:
        while entry < end:
            place = np.uint64(indices[entry])
            weights[place] += factor * scale_at(scales, place) * value_at(values, frame, entry, place)
            entry += _ONE


@inlined
def fetch_row(indptr: Array, indices: Array, values: Array, row: int) -> None:
    """Prefetch the start of a row."""
    begin, end = np.uint64(indptr[row]), np.uint64(indptr[row + 1])
    step = np.uint64(_LINE // indices.itemsize)
    end = min(end, begin + np.uint64(_LINES) * step)
    entry = begin
    while entry < end:
        prefetch(indices, entry)
        if values.size:
            prefetch(values, entry)
        entry += step


@kernel
def margins(indptr: Array, indices: Array, values: Array, frame: Array, labels: Array, weights: Array, intercept: int, out: Array) -> None:
    """Write label times score of every row; ``intercept`` is the position of the intercept among the weights, or -1."""
    for row in range(out.size):
        score = product(indices, values, frame, np.uint64(indptr[row]), np.uint64(indptr[row + 1]), weights)
        if intercept >= 0:
            score += weights[intercept]
        out[row] = labels[row] * score


@inlined
def _next(state: Array) -> Any:
    # splitmix64 (Steele, Lea, Flood 2014)
    state[0] += _WEYL
    word = state[0]
    word = (word ^ (word >> _THIRTY)) * _MIX
    word = (word ^ (word >> _TWENTY_SEVEN)) * _MIX_AGAIN
    return word ^ (word >> _THIRTY_ONE)


@inlined
def shuffle(rows: Array, count: int, state: Array) -> None:
    """Shuffle the first ``count`` rows."""
    for i in range(count - 1, 0, -1):
        j = np.int64(_next(state) % np.uint64(i + 1))
        rows[i], rows[j] = rows[j], rows[i]


@inlined
def _entropy(dual: float, bound: float) -> float:
    """Return the entropy term of a logistic dual variable: zero at both ends of its range, negative between them."""
    if dual <= 0.0 or dual >= bound:
        return 0.0
    return dual * math.log(dual / bound) + (bound - dual) * math.log1p(-dual / bound)


@inlined
def _loss(loss: int, margin: float) -> float:
    if loss == LOGISTIC:
        return math.log1p(math.exp(-margin)) if margin > 0 else math.log1p(math.exp(margin)) - margin
    slack = max(0.0, 1.0 - margin)
    return slack * slack if loss == SQUARED_HINGE else slack


@inlined
def _conjugate(loss: int, dual: float, bound: float) -> float:
    """Return the term that a sample adds to the dual objective (to be minimised), besides the squared length of the weights."""
    if loss == LOGISTIC:
        return float(_entropy(dual, bound))
    if loss == SQUARED_HINGE:
        return dual * dual / (4.0 * bound) - dual if bound > 0 else 0.0
    return -dual


@inlined
def _logistic_root(dual: float, bound: float, curvature: float, margin: float, guess: float) -> float:
    """Return the t for which ``t + curvature * (bound * sigmoid(t) - dual) + margin`` is zero, by Newton's method from a guess.

    The new dual variable is ``bound * sigmoid(t)``. The function grows, and is convex below zero and concave above. So steps from zero stay
    on one side of the root and reach it; a step that would pass zero ends there.
    """
    t = guess
    for _ in range(_ROOT_STEPS):
        share = _sigmoid(t)
        value = t + curvature * (bound * share - dual) + margin
        if abs(value) <= 1e-9:
            break
        after = t - value / (1.0 + curvature * bound * share * (1.0 - share))
        t = 0.0 if after * t < 0.0 else after
    return t


@inlined
def _sigmoid(t: float) -> float:
    return 1.0 / (1.0 + math.exp(-t)) if t > -700.0 else 0.0


@kernel
def ascend(
    loss: int,
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
    """Make one pass of dual coordinate ascent over the first ``count`` of the ``active`` rows, in random order.

    Parameters
    ----------
    loss : int
    indptr, indices, values, frame, labels : ndarray
        The samples; an empty ``values`` means that all values are 1.
    bounds : ndarray
        Factor of each sample's loss, C.
    norms : ndarray
        Squared lengths of the samples, with each square times the scale of its feature.
    dual, weights : ndarray
        Changed in place. ``weights`` change by the samples times the change of ``dual``, times the scales of the features.
    intercept : int
        Position of the intercept among the weights, or -1.
    scales : ndarray
        How many of the first features have a scale, followed by their scales, or by one if all are equal; other features have the scale 1.
        If empty, all scales are 1.
    active : ndarray
        Changed in place: samples at a bound that would stay there are removed.
    limits : ndarray
        Projected gradients above and below which samples at a bound are removed; replaced by those of this pass.
    state : ndarray
        State of the random number generator, one uint64.

    Returns
    -------
    (int, float)
        Number of samples left active, and the sum of the samples' duality gaps before their visits.
    """
    shuffle(active, count, state)
    above, below = limits[0], limits[1]
    highest, lowest = -math.inf, math.inf
    kept, gap, root = 0, 0.0, 0.0  # the first visit of a sample begins at the root of the previous one
    for i in range(count):
        if i + _AHEAD < count:
            fetch_row(indptr, indices, values, active[i + _AHEAD])
        row = active[i]
        bound, before = bounds[row], dual[row]
        begin, end = np.uint64(indptr[row]), np.uint64(indptr[row + 1])
        margin = product(indices, values, frame, begin, end, weights)
        if intercept >= 0:
            margin += weights[intercept]
        margin *= labels[row]
        curvature = norms[row]
        gap += bound * _loss(loss, margin) + _conjugate(loss, before, bound) + before * margin
        after = before
        if loss == LOGISTIC:
            active[kept] = row
            kept += 1
            root = _logistic_root(before, bound, curvature, margin, math.log(before / (bound - before)) if before > 0.0 else root)
            after = bound * min(max(_sigmoid(root), _EDGE), 1.0 - _EDGE)
        else:
            slope, top = margin - 1.0, bound
            if loss == SQUARED_HINGE:
                slope += before / (2.0 * bound)
                curvature += 1.0 / (2.0 * bound)
                top = math.inf
            projected = slope
            if before <= 0.0:
                if slope > above:
                    continue
                projected = min(slope, 0.0)
            elif before >= top:
                if slope < below:
                    continue
                projected = max(slope, 0.0)
            active[kept] = row
            kept += 1
            highest, lowest = max(highest, projected), min(lowest, projected)
            if abs(projected) > _TINY:
                after = min(max(before - slope / curvature, 0.0), top) if curvature > 0 else (top if slope < 0 else 0.0)
        if after != before:
            dual[row] = after
            factor = (after - before) * labels[row]
            if scales.size:
                add_scaled(indices, values, frame, begin, end, factor, scales, weights)
            else:
                add(indices, values, frame, begin, end, factor, weights)
            if intercept >= 0:
                weights[intercept] += factor * scale_at(scales, np.uint64(intercept)) if scales.size else factor
    limits[0] = highest if highest > 0 else math.inf
    limits[1] = lowest if lowest < 0 else -math.inf
    return kept, gap


@kernel
def certify(loss: int, margins: Array, bounds: Array, dual: Array, limits: Array, active: Array, out: Array) -> int:
    """Write the sums of losses and of conjugates to ``out``, and the samples that can still change to ``active``; return their number."""
    kept, losses, conjugates = 0, 0.0, 0.0
    for row in range(dual.size):
        bound, own, margin = bounds[row], dual[row], margins[row]
        if bound <= 0.0:
            continue
        losses += bound * _loss(loss, margin)
        conjugates += _conjugate(loss, own, bound)
        slope = margin - 1.0
        if loss == HINGE and own >= bound:
            settled = slope < limits[1]
        else:
            settled = loss != LOGISTIC and own <= 0.0 and slope > limits[0]
        if not settled:
            active[kept] = row
            kept += 1
    out[0], out[1] = losses, conjugates
    return kept


@kernel
def conjugates(loss: int, bounds: Array, dual: Array) -> float:
    """Return the sum of the terms that the samples add to the dual objective (to be minimised)."""
    total = 0.0
    for row in range(dual.size):
        total += _conjugate(loss, dual[row], bounds[row])
    return total
