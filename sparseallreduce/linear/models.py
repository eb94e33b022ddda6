"""Linear models: the loss of a score, its derivative, and the prediction (thesis section 2.2)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, xlogy

__all__ = [
    "LOSSES",
    "MODELS",
    "EpsilonInsensitive",
    "Hinge",
    "Huber",
    "LinearModel",
    "Logistic",
    "Poisson",
    "Quantile",
    "Squared",
    "SquaredEpsilonInsensitive",
    "SquaredHinge",
    "OF_EPSILON",
    "model_of",
]

Array = NDArray[Any]

_HIGHEST = 80.0  # largest score that is exponentiated: float32 overflows above 88
_LEAST_MEAN = 1e-3  # lower bound on the mean count, whose logarithm is the initial score


class LinearModel(ABC):
    """Base class of models, which define the loss of a score ``w.x`` and a label ``y``.

    All methods take and return arrays with one value per sample. To add a model, write a subclass with a name and the two abstract methods;
    the loops over the non-zeros work with any model.

    Examples
    --------
    >>> class LogCosh(LinearModel):
    ...     name = "log-cosh"
    ...     classifies = False
    ...     def loss(self, scores, labels):
    ...         return np.logaddexp(scores - labels, labels - scores) - np.log(2)
    ...     def derivative(self, scores, labels):
    ...         return np.tanh(scores - labels)
    >>> LogCosh().derivative(np.array([0.0, 5.0]), np.array([0.5, 1.0])).round(4)
    array([-0.4621,  0.9993])
    """

    name: str
    #: Name of the loss, as models of one name may have several.
    loss_name: str = ""
    #: The loss's parameter; None if it has none.
    parameter: float | None = None
    #: Upper bound of the second derivative of the loss with respect to the score, if it is the same for all labels.
    curvature: float = 1.0
    #: Whether the model is a classifier, with labels -1 and +1; otherwise it is a regression, and labels are the numbers to predict.
    classifies: bool = True
    #: Number of scores per sample, each with its own weights, if there are several; labels are then class numbers from 0.
    columns: int | None = None

    @abstractmethod
    def loss(self, scores: Array, labels: Array) -> Array:
        """Return the loss f(w) of each sample."""

    @abstractmethod
    def derivative(self, scores: Array, labels: Array) -> Array:
        """Return the derivative of each sample's loss with respect to its score. The sample's gradient is this times its features."""

    def prediction(self, scores: Array) -> Array:
        """Return the prediction for each score: a class, a probability or a number. By default it is the sign of the score."""
        return np.where(scores > 0, 1.0, -1.0)

    def constant_score(self, mean: float) -> float:
        """Return the initial score of a regression, given the mean label."""
        return mean

    def label_fault(self, labels: Array) -> Array:
        """Return a mask of the labels for which the loss of a regression is undefined."""
        return np.zeros(len(labels), bool)

    def curvature_at(self, spread: float, highest: float) -> float:
        """Return a curvature of the loss from which to choose a learning rate.

        Parameters
        ----------
        spread : float
            Mean distance of a label from the mean label.
        highest : float
            The highest label.

        Returns
        -------
        float
            A second derivative of the loss by the score.
        """
        return self.curvature

    @property
    def in_units_of_labels(self) -> bool:
        """True if scores have the units of the labels."""
        return not self.classifies

    @property
    def codes(self) -> Array | None:
        """The labels that stand for the classes: -1 and 1 for two, numbers from 0 for more; None for regression."""
        if not self.classifies:
            return None
        return np.array([-1.0, 1.0]) if self.columns is None else np.arange(float(self.columns))

    @property
    def variant(self) -> str:
        """The name of the loss if it is not the default one of the model, otherwise the empty string."""
        return self.loss_name if self.loss_name in list(LOSSES.get(self.name, ()))[1:] else ""

    @property
    def title(self) -> str:
        """The name, loss and parameter as text, to compare models between ranks or runs."""
        parameter = "" if self.parameter is None else f" of {self.parameter!r}"
        return f"{self.name}, {self.variant}{parameter}" if self.variant else self.name


class Logistic(LinearModel):
    """Logistic regression with the loss ln(1 + exp(-y w.x)). It predicts the probability of class +1 (thesis section 2.2.1).

    >>> Logistic().prediction(np.array([0.0]))
    array([0.5])
    """

    name = "logistic"
    loss_name = "log"
    curvature: float = 0.25

    def loss(self, scores: Array, labels: Array) -> Array:
        return np.asarray(np.logaddexp(0.0, -labels * scores))

    def derivative(self, scores: Array, labels: Array) -> Array:
        return np.asarray(-labels * expit(-labels * scores))

    def prediction(self, scores: Array) -> Array:
        return np.asarray(expit(scores))


class Hinge(LinearModel):
    """A linear support vector machine with the loss max(0, 1 - y w.x) (thesis section 2.2.2)."""

    name = "svm"
    loss_name = "hinge"

    def loss(self, scores: Array, labels: Array) -> Array:
        return np.asarray(np.maximum(0.0, 1.0 - labels * scores))

    def derivative(self, scores: Array, labels: Array) -> Array:
        return np.where(labels * scores < 1.0, -labels, 0.0)

    def violation(self, scores: Array, labels: Array) -> Array:
        """Return the derivative of ``max(0, 1 - y w.x)**2 / 2``, also in subclasses with another loss. AROW uses it."""
        return np.asarray(-labels * np.maximum(0.0, 1.0 - labels * scores))


class SquaredHinge(Hinge):
    """A linear support vector machine with the loss max(0, 1 - y w.x)^2, which is differentiable everywhere."""

    loss_name = "squared_hinge"
    curvature: float = 2.0

    def loss(self, scores: Array, labels: Array) -> Array:
        return np.square(super().loss(scores, labels))

    def derivative(self, scores: Array, labels: Array) -> Array:
        return np.asarray(-2.0 * labels * super().loss(scores, labels))


class Squared(LinearModel):
    """Linear regression with the loss (w.x - y)^2 / 2. It predicts the score."""

    name = "linear"
    loss_name = "squared"
    classifies = False

    def loss(self, scores: Array, labels: Array) -> Array:
        return np.asarray(np.square(scores - labels) / 2)

    def derivative(self, scores: Array, labels: Array) -> Array:
        return scores - labels

    def prediction(self, scores: Array) -> Array:
        return scores


#: Losses with the parameter epsilon.
OF_EPSILON = ("huber", "epsilon_insensitive", "squared_epsilon_insensitive")


class Huber(Squared):
    """Linear regression that is robust to outliers: errors up to ``epsilon`` are squared, larger ones count linearly.

    This is the "huber" loss of scikit-learn's ``SGDRegressor``, and the loss of its ``HuberRegressor`` if ``epsilon`` is multiplied by the
    scale that it estimates.

    Parameters
    ----------
    epsilon : float
        In units of the labels.

    Examples
    --------
    >>> Huber(1.0).derivative(np.array([0.0, 5.0]), np.array([0.5, 1.0]))
    array([-0.5,  1. ])
    """

    epsilon: float
    parameter: float

    loss_name = "huber"

    def __init__(self, epsilon: float = 1.35) -> None:
        if not 0 < epsilon < np.inf:
            raise ValueError(f"epsilon must be above 0 and finite, not {epsilon!r}")
        self.epsilon = self.parameter = float(epsilon)

    def loss(self, scores: Array, labels: Array) -> Array:
        errors = np.abs(scores - labels)
        inside = np.minimum(errors, self.epsilon)
        return np.asarray(inside * (errors - inside / 2))

    def derivative(self, scores: Array, labels: Array) -> Array:
        return np.asarray(np.clip(scores - labels, -self.epsilon, self.epsilon))


class Quantile(Squared):
    """Quantile regression: a fraction ``quantile`` of the labels is to lie below the score; 0.5 gives the median.

    The loss is ``quantile * (y - w.x)`` if the label is above the score, and ``(1 - quantile) * (w.x - y)`` if it is below, as in
    scikit-learn's ``QuantileRegressor``.

    Parameters
    ----------
    quantile : float
        Between 0 and 1.

    Examples
    --------
    >>> Quantile(0.9).derivative(np.array([0.0, 2.0]), np.array([1.0, 1.0]))
    array([-0.9,  0.1])
    """

    quantile: float
    parameter: float

    loss_name = "quantile"

    def __init__(self, quantile: float = 0.5) -> None:
        if not 0 < quantile < 1:
            raise ValueError(f"quantile must be between 0 and 1, not {quantile!r}")
        self.quantile = self.parameter = float(quantile)

    def loss(self, scores: Array, labels: Array) -> Array:
        errors = labels - scores
        return np.asarray(np.maximum(self.quantile * errors, (self.quantile - 1) * errors))

    def derivative(self, scores: Array, labels: Array) -> Array:
        return np.where(scores < labels, -self.quantile, np.where(scores > labels, 1 - self.quantile, 0.0))

    def curvature_at(self, spread: float, highest: float) -> float:
        # The curvature is zero, and gradients do not grow with the labels: the steps have to.
        return 1.0 / spread if spread > 0 else 1.0


class Poisson(Squared):
    """Poisson regression of counts. It predicts their mean, ``exp(w.x)``.

    The loss is half the deviance, ``exp(w.x) - y + y (ln y - w.x)``, which is 0 if the mean equals the label, as in scikit-learn's
    ``PoissonRegressor``. For scores above 80 the exponential is continued as a straight line of the same slope, and the prediction stays
    5.5e34, so that no score overflows.

    Examples
    --------
    >>> Poisson().loss(np.log([3.0, 1.0]), np.array([3.0, 0.0]))
    array([0., 1.])
    """

    loss_name = "poisson"

    def loss(self, scores: Array, labels: Array) -> Array:
        inside = np.minimum(scores, _HIGHEST)
        means = np.exp(inside) * (1.0 + (scores - inside))
        return np.asarray(means - labels + xlogy(labels, labels) - labels * scores)

    def derivative(self, scores: Array, labels: Array) -> Array:
        return self.prediction(scores) - labels

    def prediction(self, scores: Array) -> Array:
        return np.asarray(np.exp(np.minimum(scores, _HIGHEST)))

    @property
    def in_units_of_labels(self) -> bool:
        return False

    def constant_score(self, mean: float) -> float:
        return math.log(max(mean, _LEAST_MEAN))

    def label_fault(self, labels: Array) -> Array:
        return labels < 0

    def curvature_at(self, spread: float, highest: float) -> float:
        return highest if highest > 0 else 1.0


class EpsilonInsensitive(Squared):
    """Support vector regression: errors up to ``epsilon`` are ignored, larger ones count by their excess over it.

    This is LIBLINEAR's ``-s 13``, and the loss of the same name in scikit-learn's ``LinearSVR`` and ``SGDRegressor``.

    Parameters
    ----------
    epsilon : float
        In units of the labels; with 0 the loss is the absolute error.

    Examples
    --------
    >>> EpsilonInsensitive(0.5).loss(np.array([0.0, 3.0]), np.array([0.5, 1.0]))
    array([0. , 1.5])
    """

    epsilon: float
    parameter: float

    loss_name = "epsilon_insensitive"

    def __init__(self, epsilon: float = 0.0) -> None:
        if not 0 <= epsilon < np.inf:
            raise ValueError(f"epsilon must be at least 0 and finite, not {epsilon!r}")
        self.epsilon = self.parameter = float(epsilon)

    def loss(self, scores: Array, labels: Array) -> Array:
        return np.asarray(np.maximum(0.0, np.abs(scores - labels) - self.epsilon))

    def derivative(self, scores: Array, labels: Array) -> Array:
        errors = scores - labels
        return np.where(np.abs(errors) > self.epsilon, np.sign(errors), 0.0)

    def curvature_at(self, spread: float, highest: float) -> float:
        # The curvature is zero, and gradients do not grow with the labels: the steps have to.
        return 1.0 / spread if spread > 0 else 1.0


class SquaredEpsilonInsensitive(EpsilonInsensitive):
    """Support vector regression with the squared excess of errors over ``epsilon``: LIBLINEAR's ``-s 11`` and ``-s 12``.

    Examples
    --------
    >>> SquaredEpsilonInsensitive(0.5).loss(np.array([0.0, 3.0]), np.array([0.5, 1.0]))
    array([0.  , 2.25])
    """

    loss_name = "squared_epsilon_insensitive"
    curvature: float = 2.0

    def loss(self, scores: Array, labels: Array) -> Array:
        return np.square(super().loss(scores, labels))

    def derivative(self, scores: Array, labels: Array) -> Array:
        return np.asarray(2.0 * np.sign(scores - labels) * super().loss(scores, labels))

    def curvature_at(self, spread: float, highest: float) -> float:
        return self.curvature


MODELS: dict[str, type[LinearModel]] = {model.name: model for model in (Logistic, Hinge, Squared)}
#: The losses of each model, by the names in ``train --loss`` and the estimators' ``loss``; the first is the default.
LOSSES: dict[str, dict[str, type[LinearModel]]] = {
    Logistic.name: {Logistic.loss_name: Logistic},
    Hinge.name: {kind.loss_name: kind for kind in (Hinge, SquaredHinge)},
    Squared.name: {kind.loss_name: kind for kind in (Squared, Huber, Quantile, Poisson, EpsilonInsensitive, SquaredEpsilonInsensitive)},
}


def model_of(name: str, loss: str | None = None, parameter: float | None = None) -> LinearModel:
    """Return the model with this name, loss (by default the model's first) and parameter.

    Parameters
    ----------
    name : str
        A key of :data:`MODELS`.
    loss : str, optional
        A key of ``LOSSES[name]``.
    parameter : float, optional
        The ``epsilon`` of Huber's and the epsilon-insensitive losses, or the ``quantile``.

    Returns
    -------
    LinearModel
        An instance of the class for this loss.

    Raises
    ------
    ValueError
        If the model has no such loss, or the parameter is invalid or not expected.

    Examples
    --------
    >>> model_of("linear", "quantile", 0.9).prediction(np.array([3.0]))
    array([3.])
    """
    losses = LOSSES[name]
    kind = losses.get(loss or next(iter(losses)))
    if kind is None:
        raise ValueError(f"the loss must be one of {', '.join(losses)}, not {loss!r}")
    if parameter is None:
        return kind()
    if not issubclass(kind, Huber | Quantile | EpsilonInsensitive):
        raise ValueError(f"the loss {kind.loss_name} takes no parameter")
    return kind(parameter)
