"""Conversion of models to fitted scikit-learn estimators."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.models import Hinge, Logistic, Poisson
from sparseallreduce.linear.multiclass import Multinomial

__all__ = ["sklearn_estimator"]

Array = NDArray[Any]


def sklearn_estimator(kind: str, loss: str, weights: Any, intercept: Array, classes: Array) -> Any:
    """Return a fitted scikit-learn estimator with the same predictions and probabilities as a model.

    Parameters
    ----------
    kind, loss : str
        Names of the model and of its loss, as in :class:`~sparseallreduce.linear.FittedModel`.
    weights : ndarray or scipy.sparse array, shape (n_features,) or (rows, n_features)
        Only classifiers may have sparse weights.
    intercept : ndarray, shape () or (rows,)
    classes : ndarray
        Labels; empty for regression models.

    Returns
    -------
    sklearn.linear_model.LogisticRegression
        For logistic models of two classes, and for multinomial models.
    sklearn.multiclass.OneVsRestClassifier
        With ``LogisticRegression`` as its estimator, for one-versus-rest logistic models of more than two classes.
    sklearn.svm.LinearSVC
        For other classifiers.
    sklearn.linear_model.Ridge or PoissonRegressor
        For regression models; ``PoissonRegressor`` for the loss "poisson".
    """
    if not len(classes):
        return _regression(loss, np.asarray(weights), float(intercept))
    coefficients: Any = weights if weights.ndim == 2 else weights[np.newaxis]
    intercepts = np.atleast_1d(intercept).astype(weights.dtype)
    if kind == Logistic.name and len(classes) > 2:
        return _one_vs_rest(classes, coefficients, intercepts)
    if kind in (Logistic.name, Multinomial.name):
        from sklearn.linear_model import LogisticRegression

        return _filled(LogisticRegression(), coefficients, intercepts, classes_=classes, n_iter_=np.ones(1, np.int32))
    from sklearn.svm import LinearSVC

    of_hinge = kind == Hinge.name and loss in ("", Hinge.loss_name)
    return _filled(LinearSVC(loss="hinge" if of_hinge else "squared_hinge"), coefficients, intercepts, classes_=classes, n_iter_=1)


def _filled(estimator: Any, coefficients: Any, intercepts: Any, **attributes: Any) -> Any:
    """Set the attributes that fitting would set, and return the estimator."""
    estimator.coef_, estimator.intercept_, estimator.n_features_in_ = coefficients, intercepts, coefficients.shape[-1]
    for name, value in attributes.items():
        setattr(estimator, name, value)
    return estimator


def _one_vs_rest(classes: Array, coefficients: Any, intercepts: Array) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.preprocessing import LabelBinarizer

    several = OneVsRestClassifier(LogisticRegression())
    several.label_binarizer_ = LabelBinarizer(sparse_output=True).fit(classes)
    several.classes_, several.n_features_in_ = classes, coefficients.shape[1]
    several.estimators_ = [
        _filled(LogisticRegression(), coefficients[[row]], intercepts[[row]], classes_=np.array([0, 1]), n_iter_=np.ones(1, np.int32))
        for row in range(len(classes))
    ]
    return several


def _regression(loss: str, weights: Array, intercept: float) -> Any:
    from sklearn.linear_model import PoissonRegressor, Ridge

    if loss != Poisson.loss_name:
        return _filled(Ridge(), weights, intercept, n_iter_=None, solver_="auto")
    # Only fitting sets the link function, which no public attribute does: any samples will do.
    return _filled(PoissonRegressor().fit(np.array([[0.0], [1.0]]), np.array([1.0, 2.0])), weights, intercept, n_iter_=1)
