"""Models of more than two classes at once: a score for each class, and one pass over the data for all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.models import LinearModel, Logistic

__all__ = ["CHOICES", "Multinomial", "OneVsRest", "model_of_classes"]

Array = NDArray[Any]

#: How more than two classes are told apart.
CHOICES = ("auto", "ovr", "multinomial")


class ClassModel(LinearModel):
    """A model of K scores a sample; labels are the numbers of classes, 0 to K - 1.

    Losses have the shape (samples,), scores and derivatives (samples, K).
    """

    columns: int

    def __init__(self, columns: int) -> None:
        if columns < 2:
            raise ValueError(f"a classifier needs at least two classes, not {columns}")
        self.columns = columns

    def prediction(self, scores: Array) -> Array:
        """The number of the class with the highest score, of several the first."""
        return np.asarray(scores.argmax(axis=1))


class Multinomial(ClassModel):
    """Multinomial logistic regression: the loss is -ln p(y), where the softmax of the scores gives every class its probability p.

    >>> Multinomial(3).derivative(np.zeros((1, 3)), np.array([2.0])).round(3)
    array([[ 0.333,  0.333, -0.667]])
    """

    name = "multinomial"
    # The second derivatives by the scores are those of probabilities p: diag(p) - p p^T, with eigenvalues up to 1/2.
    curvature = 0.5

    def loss(self, scores: Array, labels: Array) -> Array:
        own = scores[np.arange(len(labels)), labels.astype(np.intp)]
        highest = scores.max(axis=1)
        with np.errstate(invalid="ignore"):  # of infinite scores, which end a training, the loss is no number
            return np.asarray(np.log(np.exp(scores - highest[:, np.newaxis]).sum(axis=1)) + (highest - own))

    def derivative(self, scores: Array, labels: Array) -> Array:
        slopes = self.probabilities(scores)
        slopes[np.arange(len(labels)), labels.astype(np.intp)] -= 1
        return slopes

    @staticmethod
    def probabilities(scores: Array) -> Array:
        """The softmax of each row."""
        with np.errstate(invalid="ignore"):
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        return np.asarray(shares)


class OneVsRest(ClassModel):
    """Each class against all others by a model of two classes; the loss of a sample is the sum over the classes.

    Parameters
    ----------
    base : LinearModel
        Of two classes, such as :class:`~sparseallreduce.linear.Hinge`.
    columns : int
        Classes, K.

    Examples
    --------
    >>> OneVsRest(Logistic(), 3).derivative(np.zeros((1, 3)), np.array([2.0]))
    array([[ 0.5,  0.5, -0.5]])
    """

    def __init__(self, base: LinearModel, columns: int) -> None:
        super().__init__(columns)
        if not base.classifies:
            raise ValueError(f"the model {base.name!r} has no classes to tell from each other")
        self.base = base
        self.name, self.loss_name, self.parameter, self.curvature = base.name, base.loss_name, base.parameter, base.curvature

    def loss(self, scores: Array, labels: Array) -> Array:
        losses = self.base.loss(scores.reshape(-1), self._signs(labels).reshape(-1))
        return np.asarray(losses.reshape(scores.shape).sum(axis=1))

    def derivative(self, scores: Array, labels: Array) -> Array:
        return self.base.derivative(scores.reshape(-1), self._signs(labels).reshape(-1)).reshape(scores.shape)

    def _signs(self, labels: Array) -> Array:
        """+1 for the class of each sample, -1 for the others."""
        signs = np.full((len(labels), self.columns), -1.0)
        signs[np.arange(len(labels)), labels.astype(np.intp)] = 1.0
        return signs


def model_of_classes(base: LinearModel, classes: int, choice: str = "auto") -> LinearModel:
    """The model that tells so many classes apart: ``base`` itself if they are two, unless ``choice`` says that each has a score.

    Parameters
    ----------
    base : LinearModel
        Of two classes.
    classes : int
    choice : str
        One of :data:`CHOICES`: "auto" is multinomial for :class:`~sparseallreduce.linear.Logistic`, as scikit-learn's is, and each
        class against the rest for others; two classes are told apart by one score with "auto" and "ovr".

    Raises
    ------
    ValueError
        If the choice is not known, or is multinomial with a loss that is not logistic.
    """
    if choice not in CHOICES:
        raise ValueError(f"multi_class must be one of {', '.join(CHOICES)}, not {choice!r}")
    logistic = base.name == Logistic.name
    if choice == "multinomial" and not logistic:
        raise ValueError(f"multinomial is a logistic model, and this is {base.name!r}: take 'ovr', each class against the rest")
    if classes == 2 and choice != "multinomial":
        return base
    if choice == "multinomial" or (choice == "auto" and logistic):
        return Multinomial(classes)
    return OneVsRest(base, classes)
