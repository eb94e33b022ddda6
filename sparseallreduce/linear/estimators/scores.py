"""How good predictions are, as scikit-learn's metrics say of the samples of all ranks together."""

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
    """Return what the samples of this rank count that are classified rightly, and what all of them count.

    Raises
    ------
    ValueError
        As :func:`sklearn.metrics.accuracy_score`, if the labels are not as many as the predictions, or not of their kind.
    """
    check_consistent_length(y, predicted)
    if not len(predicted):
        return 0.0, 0.0
    if not counts.any():  # which scikit-learn refuses: on other ranks some may count
        accuracy_score(y, predicted)
        return 0.0, 0.0
    right = float(accuracy_score(y, predicted, normalize=False, sample_weight=counts))
    return right, float(counts.sum())


def target_of(y: Any, classes: Array, samples: int) -> Array:
    """Return the labels of so many samples as :func:`~sparseallreduce.linear.metrics.evaluate_scores` takes them.

    Parameters
    ----------
    y : array-like, shape (samples,)
    classes : ndarray
        Sorted, of which the numbers are returned; if there are none, ``y`` as float64.
    samples : int

    Raises
    ------
    ValueError
        If the labels are not as many, or one is none of the classes, or no finite number where there are no classes.
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
    """Return the share of all ranks' samples that are classified rightly, from what :func:`right_of` says on each rank.

    Raises
    ------
    ValueError
        If no sample counts.
    """
    right, weight = (sum(column) for column in zip(*shares))
    if not weight > 0:
        raise _no_sample()
    return float(right / weight)


class Predicted(NamedTuple):
    """The numbers of this rank's samples and what was predicted of them, each of shape (samples,), float64."""

    labels: Array
    predictions: Array
    counts: Array

    @classmethod
    def of(cls, y: Any, predicted: Array, counts: Array) -> Predicted:
        """Return them checked.

        Raises
        ------
        ValueError
            As :func:`sklearn.metrics.r2_score`, if the labels are not as many as the predictions, or no finite numbers.
        """
        check_consistent_length(y, predicted)
        labels = column_or_1d(check_array(y, ensure_2d=False, ensure_min_samples=0, dtype=np.float64, input_name="y"))
        return cls(labels, np.asarray(predicted, np.float64), counts)


def determination(own: Predicted, comm: Any) -> float:
    """Return the coefficient of determination R^2 over all ranks' samples, the same on every rank; collective.

    It is not defined for fewer than two samples, of which scikit-learn warns; so does this, and returns NaN.

    Raises
    ------
    ValueError
        If no sample counts.
    """
    found = regression.determination(own.labels, own.predictions, own.counts, comm)
    if found is None:
        warn("R^2 score is not well-defined with less than two samples.", UndefinedMetricWarning)
        return float("nan")
    return found


def _no_sample() -> ValueError:
    return ValueError("no rank has a sample with a weight other than zero")
