"""Losses with a kink as Newton's method takes them: smoothed by a logarithmic barrier, which is lowered until it no longer matters.

The excess ``xi`` of a sample over its margin is at least ``z`` and at least 0; in place of these bounds, ``mu`` times the logarithms of
``xi - z`` and ``xi`` are subtracted from it (Boyd and Vandenberghe, *Convex Optimization*, section 11.2). The ``xi`` at which that is least
is known in closed form. At the least objective for a ``mu``, the objective without barrier is at most ``2 * mu`` a bound above its least.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.models import EpsilonInsensitive, Hinge, LinearModel

__all__ = ["Barrier", "has_kink"]

Array = NDArray[Any]

_FIRST = 0.1  # share of the mean loss that the first barrier is
_LOWER = 0.1  # factor from one barrier to the next
_ROUNDING = 1e-14  # share of the first barrier
_NEAR = 0.2  # share of what the barrier allows, that the objective may be above its least, before the barrier is lowered


def has_kink(model: LinearModel) -> bool:
    """Return True if the loss is the hinge, or that of errors beyond epsilon."""
    return type(model) in (Hinge, EpsilonInsensitive)


class Barrier:
    """A loss with a kink and its barrier.

    Parameters
    ----------
    model : Hinge or EpsilonInsensitive
    loss : float
        The sum of all ranks' losses at the weights to begin with, each times its share; the same on every rank.
    shares : float
        The sum of these shares.
    """

    def __init__(self, model: LinearModel, loss: float, shares: float) -> None:
        self._model = model
        unit = model.epsilon if isinstance(model, EpsilonInsensitive) else 1.0
        self._mu = _FIRST * (loss / shares if loss > 0 else unit or 1.0)
        self._bounds = 2 * shares * (1 if isinstance(model, Hinge) else 2)
        self._first = self.excess

    @property
    def excess(self) -> float:
        """The largest amount by which the minimiser with the present barrier can exceed the minimum of the objective."""
        return self._mu * self._bounds

    @property
    def is_spent(self) -> bool:
        """True if lowering the barrier further would change less than rounding errors do."""
        return self.excess <= _ROUNDING * self._first

    def lower(self, gap: float) -> bool:
        """Lower the barrier if the objective is so near to its least; return True if it has been lowered."""
        is_near = gap <= _NEAR * self.excess
        if is_near:
            self._mu *= _LOWER
        return is_near

    def total(self, scores: Array, labels: Array, shares: Array) -> float:
        """Return the sum of the smoothed losses, each times its share."""
        found = 0.0
        for _, excess in self._pieces(scores, labels):
            duals, rest = self._duals(excess)
            above = self._mu / rest  # xi; what it is above z is mu / duals
            found += float(np.dot(shares, above - self._mu * np.log(above) - self._mu * np.log(self._mu / duals)))
        return found

    def derivatives(self, scores: Array, labels: Array) -> tuple[Array, Any]:
        """Return the slopes of the smoothed losses, and a function of two scores that returns the second derivatives."""
        slopes, curvatures = np.zeros(len(labels)), np.zeros(len(labels))
        for sign, excess in self._pieces(scores, labels):
            duals, rest = self._duals(excess)
            slopes += sign * duals
            curvatures += np.square(duals * rest) / (self._mu * (np.square(duals) + np.square(rest)))
        return slopes, lambda a, b: curvatures

    def _pieces(self, scores: Array, labels: Array) -> list[tuple[Any, Array]]:
        """Return the linear pieces that the loss is a sum of: the sign of the score in each, and what it is above zero by."""
        if isinstance(self._model, Hinge):
            return [(-labels, 1.0 - labels * scores)]
        assert isinstance(self._model, EpsilonInsensitive)
        errors, epsilon = scores - labels, self._model.epsilon
        return [(1.0, errors - epsilon), (-1.0, -errors - epsilon)]

    def _duals(self, excess: Array) -> tuple[Array, Array]:
        """Return the derivative of the smoothed piece, between 0 and 1, and what is missing to 1, without cancellation."""
        root = np.hypot(excess, 2 * self._mu) + 2 * self._mu
        smaller = 2 * self._mu / (root + np.abs(excess))
        return np.where(excess > 0, 1 - smaller, smaller), np.where(excess > 0, smaller, 1 - smaller)
