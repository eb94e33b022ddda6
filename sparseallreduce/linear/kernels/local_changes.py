"""Compiled loops that turn what a rank's own steps have changed into what ranks sum, and the sum into weights that all have.

Weights are adaptive ones, ``v`` and ``norm`` as in :mod:`sparseallreduce.linear.kernels.adaptive`, with h = ``beta + norm``: a step
adds to h times v the gradient times the rate, and moves v so. What steps add to it is summed, and so are the squares by which norms
grow, and v follows from both: as if all ranks' steps had been taken by the norms of all gradients. What ranks have added to h times v
counts as their mean, since each has taken its steps by the rates of all.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels.adaptive import hold, read_weight
from sparseallreduce.linear.kernels.rows import FAR
from sparseallreduce.streams.kernels.compilation import kernel
from sparseallreduce.streams.kernels.intrinsics import prefetch, prefetch_to_write

__all__ = ["combine", "keep", "largest", "moves"]

Array = NDArray[Any]

_FAR = np.uint64(FAR)


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
    found, size = 0.0, np.uint64(places.size)
    for i in range(size):
        if i + _FAR < size:
            prefetch(norms, np.uint64(places[i + _FAR]))
        norm = np.float64(norms[np.uint64(places[i])])
        found = norm if not norm <= found else found
    return found


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
    for i in range(size):
        if i + _FAR < size:
            prefetch(v, np.uint64(places[np.uint64(slots[i + _FAR])]))
            prefetch(norms, np.uint64(places[np.uint64(slots[i + _FAR])]))
        slot = np.uint64(slots[i])
        place = np.uint64(places[slot])
        now, norm, before, had = np.float64(v[place]), np.float64(norms[place]), np.float64(free[slot]), np.float64(kept[slot])
        if now == before and norm == had:
            out[i, 0] = out[i, 1] = 0.0
            continue
        weight = read_weight(before, hold(had, beta), l1, l2)
        out[i, 0] = (hold(norm, beta) * (now - weight) - hold(had, beta) * (before - weight)) * inverse
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
    finite, size = True, np.uint64(places.size)
    for i in range(size):
        if i + _FAR < size:
            prefetch_to_write(v, np.uint64(places[i + _FAR]))
            prefetch_to_write(norms, np.uint64(places[i + _FAR]))
        move, square = np.float64(total[i, 0]), np.float64(total[i, 1])
        if move == 0.0 and square == 0.0:  # no rank has changed it
            continue
        place, before, had = np.uint64(places[i]), np.float64(free[i]), np.float64(kept[i])
        held, own = hold(had, beta), had / unit
        kept[i] = unit * math.sqrt(own * own + square)
        after = hold(np.float64(kept[i]), beta)
        if after != 0.0:
            weight = read_weight(before, held, l1, l2)
            free[i] = weight + (held * (before - weight) + move * unit / holders[i]) / after
        finite &= np.isfinite(free[i]) & np.isfinite(kept[i])
        v[place], norms[place] = free[i], kept[i]
    return bool(finite)
