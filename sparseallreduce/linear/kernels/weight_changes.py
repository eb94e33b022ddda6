"""The loops of what ranks tell each other between two rounds of dual ascent: changes of weights, and rows of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.compilation import kernel

__all__ = ["add_scaled", "assign", "change", "occurring", "settle", "squared_length", "step_back", "take_rows"]

Array = NDArray[Any]


@kernel
def change(weights: Array, before: Array, sigma: float, slots: Array, out_slots: Array, out: Array) -> tuple[int, float, float]:
    """Divide the change of the weights by ``sigma``, and write that of the first ones, which have slots, as far as they have changed.

    Returns
    -------
    (int, float, float)
        How many are written, the squared length of the change, and that of the part that is written. There is room for one more
        than have slots.
    """
    part, rest, count, share = 0.0, 0.0, 0, 1.0 / sigma
    for i in range(slots.size):  # without a branch that would be guessed wrong every other time
        step = share * (weights[i] - before[i])
        out_slots[count], out[count] = slots[i], step
        count += step != 0.0
        part += step * step
    for i in range(slots.size, weights.size):
        step = share * (weights[i] - before[i])
        weights[i] = before[i] + step
        rest += step * step
    return count, part + rest, part


@kernel
def settle(shared: Array, slots: Array, share: float, weights: Array, before: Array) -> None:
    """Take the first weights, which have slots, from ``shared``; go a share of the way of the others; and note where all are then."""
    for i in range(slots.size):
        weights[i] = before[i] = shared[slots[i]]
    if share < 1.0:
        for i in range(slots.size, weights.size):
            weights[i] = before[i] + share * (weights[i] - before[i])
    for i in range(slots.size, weights.size):
        before[i] = weights[i]


@kernel
def assign(features: Array, places: Array, given: Array, values: Array, weights: Array) -> None:
    """Set the weights of the given features, as far as they are among ``features``; both do not decrease."""
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
    """Set ``occurs`` of all indices of some rows."""
    for i in range(rows.size):
        for entry in range(indptr[rows[i]], indptr[rows[i] + 1]):
            occurs[np.uint64(indices[entry])] = True


@kernel
def take_rows(indptr: Array, indices: Array, values: Array, rows: Array, out_indices: Array, out_values: Array) -> None:
    """Write the non-zeros of some rows, one row after the other; there is room for them all."""
    count = 0
    for i in range(rows.size):
        for entry in range(indptr[rows[i]], indptr[rows[i] + 1]):
            out_indices[count], out_values[count] = indices[entry], values[entry]
            count += 1


@kernel
def squared_length(values: Array) -> float:
    """The sum of squares, in float64."""
    total = 0.0
    for i in range(values.size):
        total += np.float64(values[i]) * np.float64(values[i])
    return total


@kernel
def add_scaled(slots: Array, values: Array, share: float, shared: Array) -> None:
    """Add a share of a sum to the shared weights."""
    for i in range(slots.size):
        shared[np.uint64(slots[i])] += share * np.float64(values[i])


@kernel
def step_back(now: Array, before: Array, share: float) -> None:
    """Go only a share of the way from ``before`` to ``now``."""
    for i in range(now.size):
        now[i] = before[i] + share * (now[i] - before[i])
