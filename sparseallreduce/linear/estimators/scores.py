"""How good predictions are, as scikit-learn's metrics say of the samples of all ranks together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import UndefinedMetricWarning
from sklearn.metrics import accuracy_score
from sklearn.utils import check_array, check_consistent_length, column_or_1d

from sparseallreduce.linear.estimators.remarks import warn
from sparseallreduce.runtime.objects import told

__all__ = ["Predicted", "accuracy", "determination", "right_of"]

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

    It is not defined for fewer than two samples, of which scikit-learn warns; so does this, and returns NaN. For labels that are all the
    same it is 1 if all are predicted exactly, and else 0. Numbers are scaled by a power of two, so that no square overflows.

    Raises
    ------
    ValueError
        If no sample counts.
    """

    def sums() -> tuple[int, float, float]:
        numbers = (own.labels, own.predictions)
        return len(own.labels), float(own.counts.sum()), max(float(np.abs(each).max(initial=0.0)) for each in numbers)

    samples, weights, largest = zip(*told(comm, sums))
    weight, exponent = float(sum(weights)), -math.frexp(max(largest))[1] if math.isfinite(max(largest)) else 0
    if sum(samples) < 2:
        warn("R^2 score is not well-defined with less than two samples.", UndefinedMetricWarning)
        return float("nan")
    if not weight > 0:
        raise _no_sample()
    labels, predictions, counts = np.ldexp(own.labels, exponent), np.ldexp(own.predictions, exponent), own.counts
    mean = sum(told(comm, lambda: float(np.dot(counts, labels)))) / weight
    shares = told(comm, lambda: (float(np.dot(counts, (labels - predictions) ** 2)), float(np.dot(counts, (labels - mean) ** 2))))
    unexplained, variance = (float(sum(column)) for column in zip(*shares))
    return 1 - unexplained / variance if variance > 0 else float(unexplained == 0)


def _no_sample() -> ValueError:
    return ValueError("there is no sample whose weight is not zero on any rank")
