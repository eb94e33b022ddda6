"""Loss and accuracy of a model with a score for each class, over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.models import LinearModel
from sparseallreduce.linear.training.metrics import Metrics, Sums
from sparseallreduce.linear.weights import Weights
from sparseallreduce.runtime.objects import agreed, gather

__all__ = ["evaluate_classes"]

Array = NDArray[Any]

_SCORES = 1 << 20  # at once, which bounds the memory


def evaluate_classes(model: LinearModel, weights: Weights, dataset: Dataset, comm: Any, rows: Array | None = None) -> Metrics:
    """What the scores of this rank's samples, and those of all other ranks, come to; collective, the same on every rank.

    The accuracy is the share of samples whose own class has the highest score. There is no area under a curve, which is of two classes.

    Parameters
    ----------
    model : LinearModel
        With columns.
    weights : Weights
        That give scores of as many columns.
    dataset : Dataset
        With samples on some rank.
    comm : communicator
    rows : ndarray, optional
        Which of this rank's samples count; all if not given.
    """
    counted = np.arange(dataset.rows) if rows is None else rows
    together = max(1, _SCORES // (model.columns or 1))

    def sums(some: Array) -> Sums:
        counts = None if dataset.weights is None else dataset.weights[some]
        return Sums.of(model, weights.scores(dataset, some), dataset.labels[some], counts, 0.0)

    def own() -> Sums:  # the loss may be a user's own
        return Sums.total([Sums(), *(sums(counted[first : first + together]) for first in range(0, len(counted), together))])

    loss, accuracy = Sums.total(gather(comm, agreed(comm, own))).means(0.0)
    assert loss is not None
    return Metrics(loss, accuracy, None)
