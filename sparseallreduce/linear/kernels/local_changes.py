"""Compiled loops that turn the changes of a rank's local steps into values to sum over ranks, and the sum into common weights.

The weights are adaptive, with ``v`` and ``norm`` as in :mod:`sparseallreduce.linear.kernels.adaptive`. With h = ``beta + norm``, a step
adds the gradient times the rate to h times v. The ranks sum these additions and the growth of the squared norms, and compute v from both,
as if all steps had been taken with the norms of all gradients. The additions of several ranks count as their mean, because each rank has
taken its steps with the full rate.
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
    """Save the weights and norms at some positions."""
    size = np.uint64(places.size)
    for i in range(size):
        if i + _FAR < size:
            prefetch(v, np.uint64(places[i + _FAR]))
            prefetch(norms, np.uint64(places[i + _FAR]))
        place = np.uint64(places[i])
        free[i], kept[i] = v[place], norms[place]


@kernel
def largest(norms: Array, places: Array) -> float:
    """Return the largest norm at some positions; NaN if one is NaN."""
    found, size = as_bits(norms.dtype.type(0)), np.uint64(places.size)
    for i in range(size):  # the bits of positive floats are in their order, and comparing integers is vectorised
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
    """Write the growth of h times v and of the squared norm, at some positions, since :func:`keep` saved them.

    Parameters
    ----------
    slots : ndarray
        Numbers of the positions to write, ascending.
    l1, l2 : float
        Factors of the penalties at the time of :func:`keep`.
    unit : float
        A power of two by which norms are divided, so that their squares do not overflow.
    out : ndarray
        Output of shape (slots, 2).
    """
    inverse, size = 1.0 / unit, np.uint64(slots.size)
    penalised = l1 != 0.0 or l2 != 0.0
    for i in range(size):  # no branches except for penalties, so that the loop is vectorised
        slot = np.uint64(slots[i])
        place = np.uint64(places[slot])
        now, norm, before, had = np.float64(v[place]), np.float64(norms[place]), np.float64(free[slot]), np.float64(kept[slot])
        move = (norm + beta) * (now - before)  # zero for a weight without gradients
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
    """Set weights and norms to those saved by :func:`keep`, changed by the sum of all ranks' :func:`moves`, and save them again.

    Parameters
    ----------
    total : ndarray
        One row per position.
    holders : ndarray
        Number of ranks that have each position.

    Returns
    -------
    bool
        True if all are finite.
    """
    faults, inverse, penalised = 0, 1.0 / unit, l1 != 0.0 or l2 != 0.0
    for i in range(np.uint64(places.size)):  # no branches except for penalties, so that the loop is vectorised
        place, before, had = np.uint64(places[i]), np.float64(free[i]), np.float64(kept[i])
        square, own = np.float64(total[i, 1]), had * inverse
        move = np.divide(np.float64(total[i, 0]) * unit, np.float64(holders[i]))  # np.divide, which does not test for zero
        norm = unit * np.sqrt(own * own + square)  # bitwise unchanged if nothing is added
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
