"""Loss, accuracy and area under the ROC curve of a model, over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.metrics.ranking import area_under_curve
from sparseallreduce.linear.models import LinearModel
from sparseallreduce.runtime.objects import agreed, gather

__all__ = ["Metrics", "Sums", "class_threshold", "evaluate"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Metrics:
    """Metrics of a model on a set of samples."""

    loss: float  # mean loss of the samples, each times its weight, without penalty
    accuracy: float | None  # fraction of samples on the correct side of the threshold, or whose class scores highest; None for regression
    auc: float | None  # area under the ROC curve; None unless there are two classes and samples of both


class Sums(NamedTuple):
    """Sums over some samples, from which loss and accuracy follow."""

    loss: float = 0.0
    right: int = 0  # samples on the correct side of the threshold, or whose class scores highest
    samples: int = 0

    @classmethod
    def of(cls, model: LinearModel, scores: Array, labels: Array, weights: Array | None, threshold: float | None) -> Sums:
        """Return the sums of samples with these scores."""
        losses = model.loss(scores, labels)
        loss = float(losses.sum() if weights is None else np.dot(losses, weights))
        if model.columns is not None:
            return cls(loss, int((model.prediction(scores) == labels).sum()), len(scores))
        if threshold is None:
            return cls(loss, 0, len(scores))
        numbers = scores if model.classifies else model.prediction(scores)
        return cls(loss, int(((numbers > threshold) == (labels > threshold)).sum()), len(scores))

    @classmethod
    def total(cls, parts: Iterable[Sums]) -> Sums:
        """Return the sums of all parts together."""
        return cls(*map(sum, zip(*parts, strict=True)))

    def means(self, threshold: float | None) -> tuple[float | None, float | None]:
        """Return loss and accuracy, None if they are undefined."""
        if not self.samples:
            return None, None
        return self.loss / self.samples, None if threshold is None else self.right / self.samples


def evaluate(model: LinearModel, scores: Array, dataset: Dataset, threshold: float | None, comm: Any, rows: Array | None = None) -> Metrics:
    """Return the metrics of the scores of all ranks' samples. Collective; the same on every rank.

    Parameters
    ----------
    model : LinearModel
    scores : ndarray
        Scores of the samples of ``dataset``, float64; shape (samples,), or (samples, K) if the model has K columns.
    dataset : Dataset
        This rank's samples; at least one rank must have some.
    threshold : float or None
        Score, and label, that separates the classes; see :func:`class_threshold`.
    comm : communicator
    rows : ndarray, optional
        Rows of this rank to evaluate; all by default.
    """
    labels, weights = dataset.labels, dataset.weights
    if rows is not None:
        scores, labels, weights = scores[rows], labels[rows], None if weights is None else weights[rows]
    own = agreed(comm, lambda: Sums.of(model, scores, labels, weights, threshold))  # the loss may be user code
    loss, accuracy = Sums.total(gather(comm, own)).means(threshold)
    assert loss is not None
    two = threshold is not None and model.columns is None
    return Metrics(loss, accuracy, area_under_curve(scores, labels > threshold, comm) if two else None)


def class_threshold(model: LinearModel, dataset: Dataset, comm: Any) -> float | None:
    """Return the score that separates the classes: zero, or for regression the mean of the two labels if there are only two."""
    if model.classifies:
        return 0.0
    labels = sorted(set().union(*gather(comm, np.unique(dataset.labels)[:3].tolist())))
    return sum(labels) / 2 if len(labels) == 2 else None
