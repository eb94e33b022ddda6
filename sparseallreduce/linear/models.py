"""Linear models: a loss of the score, its derivative and a prediction (thesis section 2.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MODELS", "Hinge", "LinearModel", "Logistic", "Squared"]

Array = NDArray[Any]


class LinearModel(ABC):
    """What a loss says of a score ``w.x`` and a label ``y``; all methods take and return arrays of one value a sample.

    A model of your own is a subclass with a name and two methods; the loops over the non-zeros know none of them.

    Examples
    --------
    >>> class Huber(LinearModel):
    ...     name = "huber"
    ...     classifies = False
    ...     def loss(self, scores, labels):
    ...         error = np.abs(scores - labels)
    ...         return np.where(error < 1, error**2 / 2, error - 0.5)
    ...     def derivative(self, scores, labels):
    ...         return np.clip(scores - labels, -1, 1)
    >>> Huber().derivative(np.array([0.0, 5.0]), np.array([0.5, 1.0]))
    array([-0.5,  1. ])
    """

    name: str
    #: Whether labels are the two classes -1 and +1; otherwise they are the numbers that the scores shall come near.
    classifies: bool = True
    #: Scores of a sample where it has several, each by weights of its own: labels are then the numbers of classes, from 0.
    columns: int | None = None

    @abstractmethod
    def loss(self, scores: Array, labels: Array) -> Array:
        """f(w) of each sample."""

    @abstractmethod
    def derivative(self, scores: Array, labels: Array) -> Array:
        """The derivative of the loss by the score: the gradient of a sample is this times its features."""

    def prediction(self, scores: Array) -> Array:
        """What the model says of a sample: a class, a probability or a number; here the sign of the score."""
        return np.where(scores > 0, 1.0, -1.0)


class Logistic(LinearModel):
    """Logistic regression, ln(1 + exp(-y w.x)); it predicts the probability of class +1 (thesis section 2.2.1).

    >>> Logistic().prediction(np.array([0.0]))
    array([0.5])
    """

    name = "logistic"

    def loss(self, scores: Array, labels: Array) -> Array:
        return np.asarray(np.logaddexp(0.0, -labels * scores))

    def derivative(self, scores: Array, labels: Array) -> Array:
        return -labels * _sigmoid(-labels * scores)

    def prediction(self, scores: Array) -> Array:
        return _sigmoid(scores)


class Hinge(LinearModel):
    """A linear support vector machine, max(0, 1 - y w.x) (thesis section 2.2.2)."""

    name = "svm"

    def loss(self, scores: Array, labels: Array) -> Array:
        return np.asarray(np.maximum(0.0, 1.0 - labels * scores))

    def derivative(self, scores: Array, labels: Array) -> Array:
        return np.where(labels * scores < 1.0, -labels, 0.0)


class Squared(LinearModel):
    """Linear regression, (w.x - y)^2 / 2; it predicts the score."""

    name = "linear"
    classifies = False

    def loss(self, scores: Array, labels: Array) -> Array:
        return np.asarray(np.square(scores - labels) / 2)

    def derivative(self, scores: Array, labels: Array) -> Array:
        return scores - labels

    def prediction(self, scores: Array) -> Array:
        return scores


MODELS: dict[str, type[LinearModel]] = {model.name: model for model in (Logistic, Hinge, Squared)}


def _sigmoid(scores: Array) -> Array:
    # Through the tangent, which no score overflows.
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * scores)))
