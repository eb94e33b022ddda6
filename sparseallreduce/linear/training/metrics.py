"""Loss, accuracy and area under the ROC curve of a model, over the samples of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.models import LinearModel
from sparseallreduce.runtime.objects import agreed, gather

__all__ = ["Metrics", "area_under_curve", "class_threshold", "evaluate"]

Array = NDArray[Any]

_CHUNK = 1 << 20  # scores that a rank tells the others at once: bounds the memory for the area under the curve


@dataclass(frozen=True)
class Metrics:
    """How good a model is on a set of samples."""

    loss: float  # mean of a sample, by the weights of samples where they have any; without penalty
    accuracy: float | None  # share of samples on the right side of the threshold; None where labels are no two classes
    auc: float | None  # area under the ROC curve; None where labels are no two classes, or all samples are of one


def evaluate(model: LinearModel, scores: Array, dataset: Dataset, threshold: float | None, comm: Any) -> Metrics:
    """What the scores of this rank's samples, and those of all other ranks, come to; collective, the same on every rank.

    Parameters
    ----------
    model : LinearModel
    scores : ndarray
        Of the samples of ``dataset``, float64.
    dataset : Dataset
    threshold : float or None
        The score, and the label, that parts the classes; see :func:`class_threshold`.
    comm : communicator
    """

    def summed() -> float:
        losses = model.loss(scores, dataset.labels)
        return float(losses.sum() if dataset.weights is None else np.dot(losses, dataset.weights))

    loss = agreed(comm, summed)  # which may be a user's own
    if threshold is None:
        return Metrics(sum(gather(comm, loss)) / dataset.total_samples, None, None)
    positive = dataset.labels > threshold
    right = int(((scores > threshold) == positive).sum())
    shares = gather(comm, (loss, right))
    accuracy = sum(right for _, right in shares) / dataset.total_samples
    return Metrics(sum(loss for loss, _ in shares) / dataset.total_samples, accuracy, area_under_curve(scores, positive, comm))


def class_threshold(model: LinearModel, dataset: Dataset, comm: Any) -> float | None:
    """The score that parts the classes: zero, or for regression the middle of the two labels if there are no more than two."""
    if model.classifies:
        return 0.0
    labels = sorted(set().union(*gather(comm, np.unique(dataset.labels)[:3].tolist())))
    return sum(labels) / 2 if len(labels) == 2 else None


def area_under_curve(scores: Array, positive: Array, comm: Any) -> float | None:
    """The probability that a positive sample has a higher score than a negative one, a tie counting half; exact.

    Collective, in two steps: every rank tells all others its positive scores, sorted, a million at a time; and each counts for
    every one of them how many of its own negative scores are below it. So each rank holds P million scores of others at most, and
    the counts are integers: the result does not depend on how the samples are shared out. Measured for 2.4 million samples on one
    rank, 0.35 s.

    Returns
    -------
    float or None
        None if there are no positive or no negative samples, or if a score is not finite.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> area_under_curve(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]), sar.SERIAL)
    0.75
    """
    above, below = np.sort(scores[positive]), np.sort(scores[~positive])
    totals = gather(comm, (len(above), len(below), bool(np.isfinite(scores).all())))
    positives, negatives = sum(count for count, _, _ in totals), sum(count for _, count, _ in totals)
    if not (positives and negatives and all(finite for _, _, finite in totals)):
        return None
    twice = 0
    for start in range(0, max(count for count, _, _ in totals), _CHUNK):
        for run in gather(comm, above[start : start + _CHUNK]):
            # Scores below, and scores below or equal: each below counts two, each equal one.
            twice += int(np.searchsorted(below, run, "left").sum()) + int(np.searchsorted(below, run, "right").sum())
    return float(sum(gather(comm, twice)) / (2 * positives * negatives))
