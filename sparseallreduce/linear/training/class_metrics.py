"""Loss and accuracy of a model with one score per class, over the samples of all ranks."""

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

_SCORES = 1 << 20  # scores computed in one call, which limits the memory


def evaluate_classes(model: LinearModel, weights: Weights, dataset: Dataset, comm: Any, rows: Array | None = None) -> Metrics:
    """Return the metrics of a model over the samples of all ranks. Collective; the same on every rank.

    The accuracy is the fraction of samples whose true class has the highest score. There is no area under a curve, which is for two
    classes.

    Parameters
    ----------
    model : LinearModel
        A model with columns.
    weights : Weights
        Weights with as many columns.
    dataset : Dataset
        This rank's samples; at least one rank must have some.
    comm : communicator
    rows : ndarray, optional
        Rows of this rank to evaluate; all by default.
    """
    counted = np.arange(dataset.rows) if rows is None else rows
    together = max(1, _SCORES // (model.columns or 1))

    def sums(some: Array) -> Sums:
        counts = None if dataset.weights is None else dataset.weights[some]
        return Sums.of(model, weights.scores(dataset, some), dataset.labels[some], counts, 0.0)

    def own() -> Sums:  # run under `agreed`, because the loss may be user code
        return Sums.total([Sums(), *(sums(counted[first : first + together]) for first in range(0, len(counted), together))])

    loss, accuracy = Sums.total(gather(comm, agreed(comm, own))).means(0.0)
    assert loss is not None
    return Metrics(loss, accuracy, None)
