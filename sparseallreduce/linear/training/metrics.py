"""Loss, accuracy and area under the ROC curve of a model, over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.models import LinearModel
from sparseallreduce.runtime.objects import agreed, exchange, gather

__all__ = ["Metrics", "Sums", "area_under_curve", "class_threshold", "evaluate"]

Array = NDArray[Any]

_SAMPLES = 256  # scores that each rank gives for finding out how to share all scores, about
_COUNTED = np.dtype([("score", np.float64), ("count", np.int64)])


@dataclass(frozen=True)
class Metrics:
    """How good a model is on a set of samples."""

    loss: float  # mean of a sample, by the weights of samples where they have any; without penalty
    accuracy: float | None  # share of samples on the right side of the threshold, or whose class scores highest; None without classes
    auc: float | None  # area under the ROC curve; None where labels are no two classes, or all samples are of one


class Sums(NamedTuple):
    """What the loss and the accuracy of some samples are the means of."""

    loss: float = 0.0
    right: int = 0  # on the right side of the threshold, or whose own class of several has the highest score
    samples: int = 0

    @classmethod
    def of(cls, model: LinearModel, scores: Array, labels: Array, weights: Array | None, threshold: float | None) -> Sums:
        """Those of samples with these scores."""
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
        """Those of all parts together."""
        return cls(*map(sum, zip(*parts, strict=True)))

    def means(self, threshold: float | None) -> tuple[float | None, float | None]:
        """Loss and accuracy; None where there is none."""
        if not self.samples:
            return None, None
        return self.loss / self.samples, None if threshold is None else self.right / self.samples


def evaluate(model: LinearModel, scores: Array, dataset: Dataset, threshold: float | None, comm: Any, rows: Array | None = None) -> Metrics:
    """What the scores of this rank's samples, and those of all other ranks, come to; collective, the same on every rank.

    Parameters
    ----------
    model : LinearModel
    scores : ndarray
        Of the samples of ``dataset``, float64; shape (samples,), or (samples, K) if the model has K columns.
    dataset : Dataset
        With samples on some rank.
    threshold : float or None
        The score, and the label, that parts the classes; see :func:`class_threshold`.
    comm : communicator
    rows : ndarray, optional
        Which of this rank's samples count; all if not given.
    """
    labels, weights = dataset.labels, dataset.weights
    if rows is not None:
        scores, labels, weights = scores[rows], labels[rows], None if weights is None else weights[rows]
    own = agreed(comm, lambda: Sums.of(model, scores, labels, weights, threshold))  # the loss may be a user's own
    loss, accuracy = Sums.total(gather(comm, own)).means(threshold)
    assert loss is not None
    two = threshold is not None and model.columns is None
    return Metrics(loss, accuracy, area_under_curve(scores, labels > threshold, comm) if two else None)


def class_threshold(model: LinearModel, dataset: Dataset, comm: Any) -> float | None:
    """The score that parts the classes: zero, or for regression the middle of the two labels if there are no more than two."""
    if model.classifies:
        return 0.0
    labels = sorted(set().union(*gather(comm, np.unique(dataset.labels)[:3].tolist())))
    return sum(labels) / 2 if len(labels) == 2 else None


def area_under_curve(scores: Array, positive: Array, comm: Any) -> float | None:
    """The probability that a positive sample has a higher score than a negative one, a tie counting half; exact.

    Collective. Every rank counts how often each of its scores occurs, and the ranks share the range of scores: each gets the scores in
    its part of it from all, about as many as it has samples, and counts for each positive one how many negative ones are below it. The
    counts are integers: the result does not depend on how the samples are shared out. Measured for 2.4 million samples on one rank, 0.35 s.

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
    above, below = _counted(scores[positive]), _counted(scores[~positive])
    positives = int(above["count"].sum())
    different = len(above) + len(below)
    totals = gather(comm, (positives, len(scores) - positives, different, bool(np.isfinite(scores).all())))
    positives, negatives, different = (sum(column) for column in list(zip(*totals, strict=True))[:3])
    if not (positives and negatives and all(finite for *_, finite in totals)):
        return None
    if comm.size > 1:
        cuts = _cuts(above, below, different, comm)
        above, below = (_sorted(exchange(comm, _parts(counted, cuts))) for counted in (above, below))
    reached = np.concatenate([[0], np.cumsum(below["count"])]).astype(np.uint64)  # the products below are then exact up to 2**64
    own = int(reached[-1]), int(above["count"].sum())
    lower = sum(count for count, _ in gather(comm, own)[: comm.rank])  # negative scores that are below all of this rank's part
    twice = 2 * lower * own[1]
    for side in ("left", "right"):  # scores below, and scores below or equal: each below counts two, each equal one
        twice += int(np.dot(above["count"].astype(np.uint64), reached[np.searchsorted(below["score"], above["score"], side)]))
    return float(sum(gather(comm, twice)) / (2 * positives * negatives))


def _counted(scores: Array) -> Array:
    """The different scores, increasing, and how often each occurs."""
    found, counts = np.unique(scores, return_counts=True)
    counted = np.empty(len(found), _COUNTED)
    counted["score"], counted["count"] = found, counts
    return counted


def _cuts(above: Array, below: Array, different: int, comm: Any) -> Array:
    """Where to cut the range of scores, of which all ranks have so many different ones, for each rank to get as many; collective."""
    every = max(1, different // (_SAMPLES * comm.size))
    sample = np.sort(np.concatenate(gather(comm, np.concatenate([above["score"][::every], below["score"][::every]]))))
    cuts: Array = sample[len(sample) * np.arange(1, comm.size) // comm.size]
    return cuts


def _parts(counted: Array, cuts: Array) -> list[Array]:
    """What each rank is to have of this one's scores."""
    return np.split(counted, np.searchsorted(counted["score"], cuts))


def _sorted(parts: list[Array]) -> Array:
    """The scores of all parts, increasing; some may be there several times."""
    joined = np.concatenate(parts)
    return joined[np.argsort(joined["score"], kind="stable")]
