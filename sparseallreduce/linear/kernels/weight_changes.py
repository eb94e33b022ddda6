"""Loops for the data that ranks exchange between two rounds of dual ascent: changes of weights, and rows of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels.dual import scale_at
from sparseallreduce.streams.kernels.compilation import inlined, kernel

__all__ = ["along", "assign", "change", "move", "occurring", "settle", "slope_and_square", "squared_length", "step_back", "take_rows"]

Array = NDArray[Any]


@kernel
def change(weights: Array, before: Array, scales: Array, width: int, out: Array) -> float:
    """Write the changes of the shared weights, divided by their scales; return the sum of their squares, each times its scale."""
    counted = 0.0
    for place in range(out.size // width):
        scale = scale_at(scales, np.uint64(place))
        inverse = 1.0 / scale
        for i in range(place * width, place * width + width):
            step = inverse * (weights[i] - before[i])
            out[i] = step
            counted += scale * step * step
    return counted


@kernel
def along(before: Array, now: Array) -> tuple[float, float]:
    """Return the inner product of some weights with their change, and the squared length of the change."""
    sums = 0.0, 0.0, 0.0, 0.0
    whole = now.size - now.size % 2
    for i in range(0, whole, 2):
        sums = _pair(sums, before[i], now[i] - before[i], before[i + 1], now[i + 1] - before[i + 1])
    if whole < now.size:
        sums = _pair(sums, before[whole], now[whole] - before[whole], 0.0, 0.0)
    return sums[0] + sums[1], sums[2] + sums[3]


@kernel
def slope_and_square(weights: Array, change: Array) -> tuple[float, float]:
    """Return the inner product of weights with a change, and the squared length of the change, in float64."""
    sums = 0.0, 0.0, 0.0, 0.0
    whole = change.size - change.size % 2
    for i in range(0, whole, 2):
        sums = _pair(sums, weights[i], np.float64(change[i]), weights[i + 1], np.float64(change[i + 1]))
    if whole < change.size:
        sums = _pair(sums, weights[whole], np.float64(change[whole]), 0.0, 0.0)
    return sums[0] + sums[1], sums[2] + sums[3]


@inlined
def _pair(sums: Any, weight: float, step: float, next_weight: float, next_step: float) -> Any:
    """Add two products of a weight and its change, and two squares of a change, to two sums of each."""
    slope, next_slope, square, next_square = sums
    return slope + weight * step, next_slope + next_weight * next_step, square + step * step, next_square + next_step * next_step


@kernel
def settle(total: Array, share: float, slots: Array, shared: Array, weights: Array, before: Array) -> None:
    """Add a fraction of the sum of all changes to the shared weights; copy those at ``slots`` to the first weights and to ``before``."""
    for i in range(shared.size):
        shared[i] += share * np.float64(total[i])
    for i in range(slots.size):
        weights[i] = before[i] = shared[np.uint64(slots[i])]


@kernel
def move(total: Array, slots: Array, before: Array, weights: Array) -> None:
    """Add the sums at ``slots`` to the first numbers of ``before``, and copy these to ``weights``."""
    for i in range(slots.size):
        before[i] += np.float64(total[np.uint64(slots[i])])
        weights[i] = before[i]


@kernel
def assign(features: Array, places: Array, given: Array, values: Array, weights: Array) -> None:
    """Set the weights of the given features that are among ``features``; both are sorted."""
    own = 0
    for i in range(given.size):
        while own < features.size and features[own] < given[i]:
            own += 1
        if own == features.size:
            break
        if features[own] == given[i]:
            weights[np.uint64(places[own])] = values[i]


@kernel
def occurring(indptr: Array, indices: Array, rows: Array, occurs: Array) -> None:
    """Set ``occurs`` for all indices of some rows."""
    for i in range(rows.size):
        for entry in range(indptr[rows[i]], indptr[rows[i] + 1]):
            occurs[np.uint64(indices[entry])] = True


@kernel
def take_rows(indptr: Array, indices: Array, values: Array, rows: Array, out_indices: Array, out_values: Array) -> None:
    """Write the non-zeros of some rows, one row after another. The outputs must have room for all."""
    count = 0
    for i in range(rows.size):
        for entry in range(indptr[rows[i]], indptr[rows[i] + 1]):
            out_indices[count], out_values[count] = indices[entry], values[entry]
            count += 1


@kernel
def squared_length(values: Array) -> float:
    """Return the sum of squares in float64."""
    even, odd = 0.0, 0.0  # an addition waits for the one before it
    whole = values.size - values.size % 2
    for i in range(0, whole, 2):
        even += np.float64(values[i]) * np.float64(values[i])
        odd += np.float64(values[i + 1]) * np.float64(values[i + 1])
    if whole < values.size:
        even += np.float64(values[whole]) * np.float64(values[whole])
    return even + odd


@kernel
def step_back(now: Array, before: Array, share: float) -> None:
    """Move ``now`` to only a fraction of the way from ``before``."""
    for i in range(now.size):
        now[i] = before[i] + share * (now[i] - before[i])
