"""Models of more than two classes, with one score per class, all trained in one pass over the data."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.models import LinearModel, Logistic

__all__ = ["CHOICES", "Multinomial", "OneVsRest", "model_of_classes"]

Array = NDArray[Any]

#: Methods for more than two classes.
CHOICES = ("auto", "ovr", "multinomial")


class ClassModel(LinearModel):
    """Base class of models with K scores per sample. Labels are class numbers, 0 to K - 1.

    Losses have the shape (samples,), scores and derivatives (samples, K).
    """

    columns: int

    def __init__(self, columns: int) -> None:
        if columns < 2:
            raise ValueError(f"a classifier needs at least two classes, not {columns}")
        self.columns = columns

    def prediction(self, scores: Array) -> Array:
        """Return the number of the class with the highest score, the first of several."""
        return np.asarray(scores.argmax(axis=1))


class Multinomial(ClassModel):
    """Multinomial logistic regression with the loss -ln p(y), where p is the softmax of the scores.

    >>> Multinomial(3).derivative(np.zeros((1, 3)), np.array([2.0])).round(3)
    array([[ 0.333,  0.333, -0.667]])
    """

    name = "multinomial"
    # The second derivatives with respect to the scores are diag(p) - p p^T, with eigenvalues up to 1/2.
    curvature: float = 0.5

    def loss(self, scores: Array, labels: Array) -> Array:
        own = scores[np.arange(len(labels)), labels.astype(np.intp)]
        highest = scores.max(axis=1)
        with np.errstate(invalid="ignore"):  # infinite scores, which end a training, give a loss of NaN
            return np.asarray(np.log(np.exp(scores - highest[:, np.newaxis]).sum(axis=1)) + (highest - own))

    def derivative(self, scores: Array, labels: Array) -> Array:
        slopes = self.probabilities(scores)
        slopes[np.arange(len(labels)), labels.astype(np.intp)] -= 1
        return slopes

    @staticmethod
    def probabilities(scores: Array) -> Array:
        """Return the softmax of each row."""
        with np.errstate(invalid="ignore"):
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        return np.asarray(shares)


class OneVsRest(ClassModel):
    """One binary model per class, which separates it from all others. The loss of a sample is the sum over the classes.

    Parameters
    ----------
    base : LinearModel
        A binary model, such as :class:`~sparseallreduce.linear.Hinge`.
    columns : int
        Number of classes, K.

    Examples
    --------
    >>> OneVsRest(Logistic(), 3).derivative(np.zeros((1, 3)), np.array([2.0]))
    array([[ 0.5,  0.5, -0.5]])
    """

    name: str
    loss_name: str
    parameter: float | None
    curvature: float

    def __init__(self, base: LinearModel, columns: int) -> None:
        super().__init__(columns)
        if not base.classifies:
            raise ValueError(f"the model {base.name!r} is not a classifier")
        self.base = base
        self.name, self.loss_name, self.parameter, self.curvature = base.name, base.loss_name, base.parameter, base.curvature

    def loss(self, scores: Array, labels: Array) -> Array:
        losses = self.base.loss(scores.reshape(-1), self._signs(labels).reshape(-1))
        return np.asarray(losses.reshape(scores.shape).sum(axis=1))

    def derivative(self, scores: Array, labels: Array) -> Array:
        return self.base.derivative(scores.reshape(-1), self._signs(labels).reshape(-1)).reshape(scores.shape)

    def _signs(self, labels: Array) -> Array:
        """Return labels of shape (samples, K): +1 for the class of each sample, -1 for the others."""
        signs = np.full((len(labels), self.columns), -1.0)
        signs[np.arange(len(labels)), labels.astype(np.intp)] = 1.0
        return signs


def model_of_classes(base: LinearModel, classes: int, choice: str = "auto") -> LinearModel:
    """Return a model for this many classes: ``base`` itself for two, unless ``choice`` is "multinomial".

    Parameters
    ----------
    base : LinearModel
        A binary model.
    classes : int
    choice : str
        One of :data:`CHOICES`: "auto" means multinomial for :class:`~sparseallreduce.linear.Logistic`, as in scikit-learn, and
        one-versus-rest for others. With "auto" and "ovr", two classes have one score.

    Returns
    -------
    LinearModel
        It has as many scores as the choice and the number of classes need.

    Raises
    ------
    ValueError
        If the choice is unknown, or is multinomial with a loss that is not logistic.
    """
    if choice not in CHOICES:
        raise ValueError(f"multi_class must be one of {', '.join(CHOICES)}, not {choice!r}")
    logistic = base.name == Logistic.name
    if choice == "multinomial" and not logistic:
        raise ValueError(f"multinomial is a logistic model, but this model is {base.name!r}: use 'ovr' (one-versus-rest)")
    if classes == 2 and choice != "multinomial":
        return base
    if choice == "multinomial" or (choice == "auto" and logistic):
        return Multinomial(classes)
    return OneVsRest(base, classes)
