"""Losses whose dual the solvers know."""

from __future__ import annotations

from sparseallreduce.errors import AlgorithmError
from sparseallreduce.linear.kernels.dual import HINGE, LOGISTIC, SQUARED_HINGE
from sparseallreduce.linear.kernels.dual_errors import EPSILON_INSENSITIVE, SQUARED_EPSILON_INSENSITIVE
from sparseallreduce.linear.models import EpsilonInsensitive, Hinge, LinearModel, Logistic, SquaredEpsilonInsensitive, SquaredHinge
from sparseallreduce.linear.multiclass import Multinomial

__all__ = ["dual_loss", "has_dual"]


# Looked up by exact type, because a subclass may have another loss.
_KNOWN: dict[type[LinearModel], int] = {
    Hinge: HINGE,
    SquaredHinge: SQUARED_HINGE,
    Logistic: LOGISTIC,
    EpsilonInsensitive: EPSILON_INSENSITIVE,
    SquaredEpsilonInsensitive: SQUARED_EPSILON_INSENSITIVE,
}


def dual_loss(model: LinearModel) -> int:
    """Return the kernels' number of a model's loss.

    Raises
    ------
    AlgorithmError
        If the kernels do not implement the loss.
    """
    loss = _KNOWN.get(type(model))
    if loss is None:
        known = ", ".join(kind.__name__ for kind in _KNOWN)
        raise AlgorithmError(f"dual coordinate ascent knows the losses {known}, not that of {type(model).__name__}: train it by SGD")
    return loss


def has_dual(model: LinearModel) -> bool:
    """Return True if dual coordinate ascent implements the loss of a model with one score, or of a multinomial model."""
    return type(model) in _KNOWN or type(model) is Multinomial
