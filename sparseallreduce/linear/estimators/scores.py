"""Scores of predictions on the samples of all ranks together, as in scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import UndefinedMetricWarning
from sklearn.metrics import accuracy_score
from sklearn.utils import check_array, check_consistent_length, column_or_1d

from sparseallreduce.linear.estimators.remarks import warn
from sparseallreduce.linear.metrics import regression

__all__ = ["Predicted", "accuracy", "determination", "right_of", "target_of"]

Array = NDArray[Any]


def right_of(y: Any, predicted: Array, counts: Array) -> tuple[float, float]:
    """Return the weight of this rank's correctly classified samples, and that of all its samples.

    Raises
    ------
    ValueError
        As in :func:`sklearn.metrics.accuracy_score`, if labels and predictions differ in number or type.
    """
    check_consistent_length(y, predicted)
    if not len(predicted):
        return 0.0, 0.0
    if not counts.any():  # an error in scikit-learn, but other ranks may have weights other than zero
        accuracy_score(y, predicted)
        return 0.0, 0.0
    right = float(accuracy_score(y, predicted, normalize=False, sample_weight=counts))
    return right, float(counts.sum())


def target_of(y: Any, classes: Array, samples: int) -> Array:
    """Return labels in the form that :func:`~sparseallreduce.linear.metrics.evaluate_scores` takes.

    Parameters
    ----------
    y : array-like, shape (samples,)
    classes : ndarray
        Sorted classes, whose numbers are returned; if there are none, ``y`` is returned as float64.
    samples : int

    Raises
    ------
    ValueError
        If the number of labels differs, or one is not a class, or not finite if there are no classes.
    """
    if not len(classes):
        labels = column_or_1d(check_array(y, ensure_2d=False, ensure_min_samples=0, dtype=np.float64, input_name="y"))
        check_consistent_length(labels, np.empty(samples))
        return np.asarray(labels)
    labels = column_or_1d(y)
    check_consistent_length(labels, np.empty(samples))
    if not samples:
        return np.empty(0, np.intp)
    unlike = (labels.dtype.kind in "biuf") != (classes.dtype.kind in "biuf")
    strange = labels[:1] if unlike else labels[~np.isin(labels, classes)]
    if len(strange):
        raise ValueError(f"the label {strange[0]!s} is not among the classes {', '.join(map(str, classes[:5]))}")
    numbers: Array = np.searchsorted(classes, labels)
    return numbers


def accuracy(shares: Sequence[tuple[float, float]]) -> float:
    """Return the accuracy over all ranks' samples, given the results of :func:`right_of` on each rank.

    Raises
    ------
    ValueError
        If all samples have weight zero.
    """
    right, weight = (sum(column) for column in zip(*shares))
    if not weight > 0:
        raise _no_sample()
    return float(right / weight)


class Predicted(NamedTuple):
    """Labels, predictions and weights of this rank's samples, each float64 of shape (samples,)."""

    labels: Array
    predictions: Array
    counts: Array

    @classmethod
    def of(cls, y: Any, predicted: Array, counts: Array) -> Predicted:
        """Return checked labels, predictions and weights."""
        check_consistent_length(y, predicted)
        labels = column_or_1d(check_array(y, ensure_2d=False, ensure_min_samples=0, dtype=np.float64, input_name="y"))
        return cls(labels, np.asarray(predicted, np.float64), counts)


def determination(own: Predicted, comm: Any) -> float:
    """Return the coefficient of determination R^2 over all ranks' samples, the same on every rank. Collective.

    It is undefined for fewer than two samples: as in scikit-learn, that is a warning, and the result is NaN.

    Raises
    ------
    ValueError
        If all samples have weight zero.
    """
    found = regression.determination(own.labels, own.predictions, own.counts, comm)
    if found is None:
        warn("R^2 score is not well-defined with less than two samples.", UndefinedMetricWarning)
        return float("nan")
    return found


def _no_sample() -> ValueError:
    return ValueError("no rank has a sample with a weight other than zero")
