"""Linear models: a loss of the score, its derivative and a prediction (thesis section 2.2), and the weights that they learn."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear import kernels
from sparseallreduce.linear.datasets import Dataset
from sparseallreduce.streams.stream import SparseStream

__all__ = ["MODELS", "Hinge", "LinearModel", "Logistic", "Squared", "Weights", "save_model"]

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


class Weights:
    """The weight vector w of N float32, kept as ``scale * direction``.

    The L2 term shrinks all weights at every step. Here that is one product of two numbers, so that a step costs as much as the
    gradient has entries and not N. When the scale gets small it is multiplied into the direction, which is the only pass over N.

    Examples
    --------
    >>> w = Weights(3)
    >>> w.descend(SparseStream([1], np.float32([2]), 3), rate=0.5)
    >>> w.descend(SparseStream([2], np.float32([4]), 3), rate=0.5, l2=0.2)
    >>> w.to_array()
    array([ 0. , -0.9, -2. ], dtype=float32)
    """

    # A scale this small is still far from where float32 loses precision (1e-38), and reached seldom: after 140,000 steps at
    # rate * l2 = 1e-4.
    _SMALLEST_SCALE = 1e-6

    def __init__(self, size: int) -> None:
        self.scale = 1.0
        self.direction = np.zeros(size, np.float32)

    @property
    def size(self) -> int:
        """Dimension N."""
        return len(self.direction)

    def to_array(self) -> Array:
        """A copy of the weights, float32 of shape (size,)."""
        return self.direction * np.float32(self.scale)

    def squared_norm(self) -> float:
        """The square of the Euclidean norm; one pass over N."""
        return self.scale**2 * float(np.dot(self.direction, self.direction))

    def scores(self, dataset: Dataset, rows: Array) -> Array:
        """``w.x`` of the given rows of this rank's samples, float64 of shape (len(rows),)."""
        scores = np.empty(len(rows))
        kernels.scores(dataset.indptr, dataset.indices, dataset.values, rows, self.direction, scores)
        scores *= self.scale
        return scores

    def descend(self, gradient: SparseStream, rate: float, l2: float = 0.0) -> None:
        """One step of gradient descent in place: ``w = (1 - rate * l2) * w - rate * gradient``.

        Parameters
        ----------
        gradient : SparseStream
            Of float32 and this size, in either form.
        rate : float
            Learning rate; ``rate * l2`` must be below 1.
        l2 : float, optional
            Factor of the penalty ``l2 / 2 * |w|^2``.
        """
        self.scale *= 1.0 - rate * l2
        if self.scale < self._SMALLEST_SCALE:
            self.direction *= np.float32(self.scale)
            self.scale = 1.0
        step = np.float32(rate / self.scale)
        if gradient.is_dense:
            kernels.descend_dense(self.direction, gradient._stored, step)
        else:
            kernels.descend(self.direction, gradient.indices, gradient.values, step)


def save_model(path: str | os.PathLike[str], weights: Weights, model: LinearModel, classes: tuple[float, float] | None) -> None:
    """Write a model file: a NumPy ``.npz`` that ``numpy.load`` reads; it appears under its name when it is complete.

    It holds ``weights`` (float32, shape (n_features,)), ``n_features``, ``model`` (its name), and ``classes``: the labels that scores
    below and above zero stand for, as in the training data; empty if the model's scores are the labels.
    """
    path = Path(path)
    part = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        with part.open("wb") as file:  # given a name, savez would append a suffix of its own
            labels = np.array(classes or (), np.float64)
            np.savez(file, weights=weights.to_array(), n_features=weights.size, model=model.name, classes=labels)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _sigmoid(scores: Array) -> Array:
    # Through the tangent, which no score overflows.
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * scores)))
