"""Metrics of predicted classes and probabilities, computed from counts and sums over all ranks."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.metrics.ranking import areas_under_curves
from sparseallreduce.linear.model_file import FittedModel
from sparseallreduce.runtime.objects import agreed, gather

__all__ = ["BINS", "TOP", "Tally", "measured"]

Array = NDArray[Any]

#: Number of bins of equal width that the calibration error divides the confidences into.
BINS = 15
#: Pattern of the names of top-k accuracies.
TOP = re.compile(r"top_([1-9][0-9]*)_accuracy")

_SCORES = 1 << 20  # scores converted to probabilities in one call, which limits the memory


class Sums(NamedTuple):
    """Sums over this rank's samples. The element-wise sum over the ranks gives those of all samples."""

    classes: Array  # (4, K), per class: weight of its samples, of samples predicted as it, of both, and number of occurrences as either
    probabilities: Array  # (2,): weighted log loss and Brier score
    bins: Array  # (2, BINS): weighted confidence, and weight of right predictions
    top: Array  # one for each requested k: weight of samples whose class is among the k highest scores
    confusion: Array  # (K, K): weight of samples by class and predicted class; or (0, 0) if it is not requested


class Tally:
    """Accumulates the sums for classification metrics over blocks of samples.

    Parameters
    ----------
    model : FittedModel
        A classifier.
    names : collection of str
        Names of the requested metrics.
    """

    def __init__(self, model: FittedModel, names: Collection[str]) -> None:
        self._model = model
        self._top = [int(found[1]) for name in names if (found := TOP.fullmatch(name))]
        self._ranks = bool({"roc_auc", "average_precision"} & set(names))
        self._probable = model.gives_probabilities and bool({"log_loss", "brier_score", "calibration_error"} & set(names))
        classes = len(model.classes)
        side = classes if "confusion_matrix" in names else 0
        self.sums: Sums = Sums(np.zeros((4, classes)), np.zeros(2), np.zeros((2, BINS)), np.zeros(len(self._top)), np.zeros((side, side)))
        self.samples: list[tuple[Array, Array, Array]] = []  # scores, classes and weights, if an area under a curve is requested

    def add(self, scores: Array, numbers: Array, weights: Array) -> None:
        """Add a block of samples.

        Parameters
        ----------
        scores : ndarray, shape (samples,) or (samples, K)
        numbers : ndarray of int, shape (samples,)
            Class number of each sample.
        weights : ndarray of float64, shape (samples,)
        """
        if self._ranks:
            self.samples.append((scores, numbers, weights))
        rows = max(1, _SCORES // len(self._model.classes))
        for first in range(0, len(numbers), rows):
            some = slice(first, first + rows)
            self._add(scores[some], numbers[some], weights[some])

    def _add(self, scores: Array, numbers: Array, weights: Array) -> None:
        sums, classes = self.sums, len(self._model.classes)
        predicted = scores.argmax(axis=1) if scores.ndim == 2 else (scores > 0).astype(np.intp)
        right = predicted == numbers
        sums.classes[0] += np.bincount(numbers, weights, classes)
        sums.classes[1] += np.bincount(predicted, weights, classes)
        sums.classes[2] += np.bincount(numbers, weights * right, classes)
        sums.classes[3] += np.bincount(numbers, minlength=classes) + np.bincount(predicted, minlength=classes)
        if len(sums.confusion):
            sums.confusion.reshape(-1)[:] += np.bincount(numbers * classes + predicted, weights, classes * classes)
        if self._top:
            own = scores[np.arange(len(numbers)), numbers][:, np.newaxis]
            ahead = (scores > own) | ((scores == own) & (np.arange(classes) > numbers[:, np.newaxis]))  # as scikit-learn breaks ties
            places = ahead.sum(axis=1)
            sums.top[:] += [float(weights[places < k].sum()) for k in self._top]
        if self._probable:
            self._add_probabilities(self._model.probabilities_of(scores), predicted, numbers, weights)

    def _add_probabilities(self, probabilities: Array, predicted: Array, numbers: Array, weights: Array) -> None:
        rows, least = np.arange(len(numbers)), np.finfo(np.float64).eps
        own = probabilities[rows, numbers]
        confidence = probabilities[rows, predicted]
        probabilities[rows, numbers] -= 1
        squares = np.square(probabilities).sum(axis=1) / (2 if probabilities.shape[1] == 2 else 1)
        self.sums.probabilities[:] += np.dot(weights, -np.log(np.clip(own, least, 1 - least))), np.dot(weights, squares)
        bins = np.clip(np.ceil(confidence * BINS).astype(np.intp) - 1, 0, BINS - 1)
        self.sums.bins[0] += np.bincount(bins, weights * confidence, BINS)
        self.sums.bins[1] += np.bincount(bins, weights * (predicted == numbers), BINS)


def measured(tally: Tally, model: FittedModel, names: Collection[str], comm: Any) -> dict[str, Any]:
    """Return the named metrics over the samples of all ranks. Collective; every rank gets the same result.

    Raises
    ------
    ValueError
        On every rank, if all samples have weight zero.
    """
    sums = Sums(*(np.sum(parts, axis=0) for parts in zip(*gather(comm, tuple(tally.sums)), strict=True)))
    weight = float(sums.classes[0].sum())
    if not weight > 0:
        raise ValueError("no rank has a sample with a weight other than zero")
    top = [name for name in names if TOP.fullmatch(name)]
    found = _of_counts(sums.classes, weight) | {name: float(sum_ / weight) for name, sum_ in zip(top, sums.top)}
    loss, brier = (float(sum_ / weight) for sum_ in sums.probabilities)
    found |= {"log_loss": loss, "brier_score": brier, "calibration_error": float(np.abs(sums.bins[1] - sums.bins[0]).sum() / weight)}
    found["confusion_matrix"] = sums.confusion
    if {"roc_auc", "average_precision"} & set(names):
        found |= _of_ranks(tally, model, comm)
    return {name: found[name] for name in names}


def _of_counts(counts: Array, weight: float) -> dict[str, Any]:
    """Return the metrics that follow from the weights per class and predicted class. A division by zero gives 0."""
    true, predicted, right, occurring = counts
    here = occurring > 0
    precision, recall, f1 = _shares(right, predicted), _shares(right, true), _shares(2 * right, true + predicted)
    found: dict[str, Any] = {"accuracy": float(right.sum() / weight), "balanced_accuracy": float(recall[true > 0].mean())}
    for name, shares in (("precision", precision), ("recall", recall), ("f1", f1)):
        found[name] = float(shares[1]) if len(shares) > 1 else None
        found[f"{name}_macro"] = float(shares[here].mean())
        found[f"{name}_weighted"] = float(np.dot(shares, true) / weight)
    return found


def _shares(parts: Array, wholes: Array) -> Array:
    return np.divide(parts, wholes, out=np.zeros_like(parts), where=wholes > 0)


def _of_ranks(tally: Tally, model: FittedModel, comm: Any) -> dict[str, float | None]:
    """Return the areas under curves; for more than two classes, the mean of the one-versus-rest areas."""
    several = len(model.classes) > 2

    def own() -> tuple[Array, Array, Array]:
        none = np.empty((0, len(model.classes)) if several else 0), np.empty(0, np.intp), np.empty(0)
        scores, numbers, weights = (np.concatenate(parts) for parts in zip(none, *tally.samples, strict=True))
        return scores, numbers, weights

    scores, numbers, weights = agreed(comm, own)
    if not several:
        return areas_under_curves(scores, numbers == 1, weights, comm)._asdict()
    areas = [areas_under_curves(column, numbers == number, weights, comm) for number, column in enumerate(scores.T)]
    rocs, precisions = ([value for value in column if value is not None] for column in zip(*areas, strict=True))
    return {
        "roc_auc": float(np.mean(rocs)) if len(rocs) == len(areas) else None,
        "average_precision": float(np.mean(precisions)) if len(precisions) == len(areas) else None,
    }
