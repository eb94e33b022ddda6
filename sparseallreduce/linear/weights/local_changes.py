"""The changes of adaptive weights by a rank's local steps, for features that other ranks change too."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels import local_changes as kernels
from sparseallreduce.linear.weights.adaptive import AdaptiveWeights
from sparseallreduce.linear.weights.plain import flat_indices

__all__ = ["LocalChanges"]

Array = NDArray[Any]


class LocalChanges:
    """The changes of some features' weights and norms, and of the intercept, since all ranks had the same values.

    A step of adaptive weights adds ``rate`` times the gradient to h times v, where v is the weight before penalties and h is ``beta`` plus
    the norm of its gradients. So ranks sum what their steps have added to h times v, and the squares of their gradients, and compute v from
    both sums, as if one rank had taken all steps.

    Each rank takes its steps as if all ranks with a feature made the same change: with their number times the rate. The additions to h
    times v then count as their mean. So a rare feature changes as much as by the steps of all ranks together, and one for which each rank
    alone reaches the minimum of its loss goes there once, not once per rank. That is how CoCoA+ adds changes (Ma et al., 2015), with a
    factor per coordinate, as in block-separable overapproximation (Fercoq and Richtarik, 2015).

    Parameters
    ----------
    weights : AdaptiveWeights
    features : ndarray
        Features that several ranks have, ascending; the same on all ranks.
    own : ndarray
        Numbers, among them, of those that this rank has.
    holders : ndarray
        Number of ranks that have each feature.
    ranks : int
        Number of ranks that have samples, and so change the intercept.
    """

    def __init__(self, weights: AdaptiveWeights, features: Array, own: Array, holders: Array, ranks: int) -> None:
        self._weights = weights
        width, columns = weights.descent.width, weights.columns
        self._intercepts = width if weights.descent.intercept else 0
        flat = len(features) * width
        self.size: int = flat + self._intercepts
        self._places = features if columns is None else flat_indices(features, width, weights.size)
        self._own = own if columns is None else flat_indices(own, width, len(features))
        self._holders, self._ranks = np.repeat(holders, width), ranks
        self.slots: Array = np.concatenate((self._own, np.arange(flat, self.size).astype(self._own.dtype)))
        dtype = weights.unscaled.dtype
        self._free, self._kept = np.empty(flat, dtype), np.empty(flat, dtype)
        self._moves = np.empty((len(self.slots), 2), dtype)
        self._among: tuple[LocalChanges | None, Array] = None, np.empty(0, np.int64)
        weights.set_rate_factors(self._places, self._holders, float(ranks))
        self.begin()

    def begin(self, of: LocalChanges | None = None) -> None:
        """Save the weights, which are the same on all ranks: all of them, or those in ``of``, and the intercept."""
        weights = self._weights
        if of is None:
            kernels.keep(weights.unscaled, weights._norms, self._places, self._free, self._kept)
        else:
            at = self._found(of)
            self._free[at], self._kept[at] = of._free, of._kept
        self._note()

    def _found(self, others: LocalChanges) -> Array:
        """Return the positions of the other features among these."""
        if self._among[0] is not others:
            self._among = others, np.searchsorted(self._places, others._places)
        return self._among[1]

    def _note(self) -> None:
        weights = self._weights
        self._penalties = weights._penalties
        self._before = np.reshape(weights.intercept, -1).copy(), np.reshape(weights._intercept_norm, -1).copy()

    def largest(self) -> float:
        """Return the largest norm."""
        norms = float(kernels.largest(self._weights._norms, self._places))
        return max(norms, float(np.max(self._weights._intercept_norm))) if norms < math.inf else norms

    def moves(self, unit: float) -> Array:
        """Return the values to sum over all ranks, divided by ``unit``, a power of two. Valid until the next call.

        They have the shape (len(slots), 2).
        """
        weights, own = self._weights, len(self._own)
        given = weights.unscaled, weights._norms, self._places, self._own, self._free, self._kept, weights.descent.beta
        kernels.moves(*given, *self._penalties, unit, self._moves[:own])
        if self._intercepts:
            before, had = self._before
            now, norm = np.reshape(weights.intercept, -1), np.reshape(weights._intercept_norm, -1)
            self._moves[own:, 0] = (norm + weights.descent.beta) * (now - before) / unit
            self._moves[own:, 1] = (norm - had) / unit * ((norm + had) / unit)
        return self._moves

    def take(self, total: Array, unit: float) -> bool:
        """Set the weights to the saved ones changed by the sums over all ranks; return True if they are finite.

        Parameters
        ----------
        total : ndarray, shape (size, 2)
        unit : float
        """
        weights, beta = self._weights, self._weights.descent.beta
        weights.note(self._places)
        given = weights.unscaled, weights._norms, self._places, total, self._free, self._kept
        finite = bool(kernels.combine(*given, self._holders, beta, *self._penalties, unit))
        if self._intercepts:
            before, had = self._before
            move, square = total[len(total) - self._intercepts :].astype(np.float64).T
            norm = unit * np.sqrt((had / unit) ** 2 + square)
            step = np.divide(move * unit / self._ranks, norm + beta, out=np.zeros_like(norm), where=norm > 0)
            weights.intercept = weights._intercept_of(before + step)
            weights._intercept_norm = weights._intercept_of(norm)
            finite &= bool(np.isfinite(before + step).all() and np.isfinite(norm).all())
        self._note()
        return finite
