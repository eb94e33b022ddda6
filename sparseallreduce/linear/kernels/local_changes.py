"""Compiled loops that turn what a rank's own steps have changed into what ranks sum, and the sum into weights that all have.

Weights are adaptive ones, ``v`` and ``norm`` as in :mod:`sparseallreduce.linear.kernels.adaptive`, with h = ``beta + norm``: a step
adds to h times v the gradient times the rate, and moves v so. What steps add to it is summed, and so are the squares by which norms
grow, and v follows from both: as if all ranks' steps had been taken by the norms of all gradients. What ranks have added to h times v
counts as their mean, since each has taken its steps by the rates of all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels.adaptive import hold, read_weight
from sparseallreduce.linear.kernels.rows import FAR
from sparseallreduce.streams.kernels.compilation import kernel
from sparseallreduce.streams.kernels.intrinsics import as_bits, as_float, prefetch

__all__ = ["combine", "keep", "largest", "moves"]

Array = NDArray[Any]

_FAR = np.uint64(FAR)
_TINY = np.finfo(np.float64).tiny


@kernel
def keep(v: Array, norms: Array, places: Array, free: Array, kept: Array) -> None:
    """Note the weights and norms at some places."""
    size = np.uint64(places.size)
    for i in range(size):
        if i + _FAR < size:
            prefetch(v, np.uint64(places[i + _FAR]))
            prefetch(norms, np.uint64(places[i + _FAR]))
        place = np.uint64(places[i])
        free[i], kept[i] = v[place], norms[place]


@kernel
def largest(norms: Array, places: Array) -> float:
    """Return the largest norm at some places; no number if one is none."""
    found, size = as_bits(norms.dtype.type(0)), np.uint64(places.size)
    for i in range(size):  # bits of numbers without a sign are in order, and their comparison is vectorised
        found = max(found, as_bits(abs(norms[np.uint64(places[i])])))
    return np.float64(as_float(found))


@kernel
def moves(
    v: Array,
    norms: Array,
    places: Array,
    slots: Array,
    free: Array,
    kept: Array,
    beta: float,
    l1: float,
    l2: float,
    unit: float,
    out: Array,
) -> None:
    """Write what the steps since :func:`keep` have added to h times v, and to the square of the norm, at some of the places.

    Parameters
    ----------
    slots : ndarray
        Which of the places, increasing.
    l1, l2 : float
        Factors of the penalties as they were then.
    unit : float
        A power of two, in which norms are expressed: so their squares are numbers.
    out : ndarray
        Of shape (slots, 2).
    """
    inverse, size = 1.0 / unit, np.uint64(slots.size)
    penalised = l1 != 0.0 or l2 != 0.0
    for i in range(size):  # without a branch but for penalties
        slot = np.uint64(slots[i])
        place = np.uint64(places[slot])
        now, norm, before, had = np.float64(v[place]), np.float64(norms[place]), np.float64(free[slot]), np.float64(kept[slot])
        move = (norm + beta) * (now - before)  # of a weight that has had no gradient, zero
        if penalised:
            weight = read_weight(before, hold(had, beta), l1, l2)
            move = hold(norm, beta) * (now - weight) - hold(had, beta) * (before - weight)
        out[i, 0] = move * inverse
        out[i, 1] = (norm - had) * inverse * ((norm + had) * inverse)


@kernel
def combine(
    v: Array,
    norms: Array,
    places: Array,
    total: Array,
    free: Array,
    kept: Array,
    holders: Array,
    beta: float,
    l1: float,
    l2: float,
    unit: float,
) -> bool:
    """Have weights and norms be those of :func:`keep`, changed by the sum of all ranks' :func:`moves`, and note them as it does.

    Parameters
    ----------
    total : ndarray
        With a row for every place.
    holders : ndarray
        Of each place, how many ranks have it.

    Returns
    -------
    bool
        Whether all are finite.
    """
    faults, inverse, penalised = 0, 1.0 / unit, l1 != 0.0 or l2 != 0.0
    for i in range(np.uint64(places.size)):  # without a branch but for penalties
        place, before, had = np.uint64(places[i]), np.float64(free[i]), np.float64(kept[i])
        square, own = np.float64(total[i, 1]), had * inverse
        move = np.divide(np.float64(total[i, 0]) * unit, np.float64(holders[i]))  # plain division of IEEE 754, without a test for zero
        norm = unit * np.sqrt(own * own + square)  # where nothing is added, what it was to the bit
        kept[i] = norm
        after = max(np.float64(kept[i]) + beta, _TINY)  # zero divided by that is zero
        moved = before + np.divide(move, after)
        if penalised and (move != 0.0 or square != 0.0) and norm > 0.0:
            weight = read_weight(before, hold(had, beta), l1, l2)
            moved = weight + (hold(had, beta) * (before - weight) + move) / after
        free[i] = moved
        v[place], norms[place] = free[i], kept[i]
        faults += not (np.isfinite(free[i]) & np.isfinite(kept[i]))
    return faults == 0
