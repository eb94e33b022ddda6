"""Conversion of labels to those of the trainer, and sample weights by class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.runtime.objects import agreed, collective, gather, gather_results

__all__ = [
    "BALANCED",
    "Label",
    "classes_of",
    "huber_epsilon",
    "numbered_classes",
    "of_mean_one",
    "shown",
    "two_classes",
    "weighted_by_class",
]

Array = NDArray[Any]

_QUANTILES = 4096  # number of quantiles of a rank's labels

BALANCED = "balanced"


#: A class label: a number or a name.
Label = float | str


@collective
def two_classes(dataset: Dataset, comm: Any, classes: tuple[Label, Label] | None = None) -> tuple[Dataset, tuple[Label, Label]]:
    """Return the data set with its lower label replaced by -1 and its higher one by +1, and these labels. Collective over ``comm``.

    Labels that are names are in alphabetical order.

    Parameters
    ----------
    dataset : Dataset
        This rank's samples.
    comm : communicator
        The ranks that share the samples.
    classes : tuple of two labels, optional
        The labels of the training set, among which the labels must be. By default those of all ranks' samples.

    Returns
    -------
    numbered : Dataset
        The same samples with labels -1 and +1.
    classes : tuple of two labels
        The lower and the higher label.

    Raises
    ------
    DatasetError
        On every rank, if the labels of all ranks are not two classes.
    """
    mine = np.unique(dataset.labels)[:10]
    found = sorted(set().union(*gather(comm, _labels_of(mine, dataset.names))))
    if classes is None:
        if len(found) != 2:
            listed = ", ".join(map(shown, found[:5])) + (", ..." if len(found) > 5 else "")
            raise DatasetError(f"{dataset.source}: a classifier needs two classes, but the labels are {listed}")
        classes = found[0], found[1]
    strange = [label for label in found if label not in classes]
    if strange:
        both = f"{shown(classes[0])} and {shown(classes[1])}"
        raise DatasetError(f"{dataset.source}: label {shown(strange[0])} is not one of the training set's, {both}")
    return replace(dataset, labels=np.where(_equal(dataset, classes[1]), 1.0, -1.0), names=None), classes


@collective
def classes_of(dataset: Dataset, comm: Any) -> tuple[Label, ...]:
    """Return the sorted labels of all ranks. Collective over ``comm``.

    Raises
    ------
    DatasetError
        On every rank, if a label is not finite.
    """

    def own() -> list[Label]:
        strange = np.flatnonzero(~np.isfinite(dataset.labels))
        if len(strange):
            where = f"the label of sample {dataset.first_sample + strange[0]} is {dataset.labels[strange[0]]}"
            raise DatasetError(f"{dataset.source}: {where}, which is not a class")
        return _labels_of(np.unique(dataset.labels), dataset.names)

    return tuple(sorted(set().union(*gather(comm, agreed(comm, own)))))


def shown(label: Label) -> str:
    """Return a label as text.

    >>> shown(3.0), shown("spam")
    ('3', 'spam')
    """
    return label if isinstance(label, str) else f"{label:g}"


def _labels_of(numbers: Array, names: tuple[str, ...] | None) -> list[Any]:
    """Return the labels for these numbers: the numbers, or names."""
    return numbers.tolist() if names is None else [names[int(number)] for number in numbers]


def _equal(dataset: Dataset, label: Label) -> Array:
    """Return a mask of the samples with this label."""
    if dataset.names is None:
        return np.asarray(dataset.labels == label)
    return np.asarray(dataset.labels == (dataset.names.index(label) if label in dataset.names else -1))


@collective
def numbered_classes(dataset: Dataset, comm: Any, classes: tuple[Label, ...] | None = None) -> tuple[Dataset, tuple[Label, ...]]:
    """Return the data set with its K labels replaced by 0 to K - 1, in their order, and these labels. Collective over ``comm``.

    Parameters
    ----------
    dataset : Dataset
        This rank's samples.
    comm : communicator
        The ranks that share the samples.
    classes : tuple, optional
        The sorted labels of the training set, among which the labels must be. By default those of all ranks' samples.

    Returns
    -------
    numbered : Dataset
        The same samples with class numbers as labels.
    classes : tuple of float or str
        The labels by number.

    Raises
    ------
    DatasetError
        On every rank, if the labels of all ranks are fewer than two classes, or one is not among those given.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> from scipy.sparse import csr_array
    >>> numbered, classes = numbered_classes(Dataset.from_scipy(csr_array(np.ones((4, 1))), [7, 3, 5, 3]), sar.SERIAL)
    >>> numbered.labels, classes
    (array([2., 0., 1., 0.]), (3.0, 5.0, 7.0))
    """
    found = classes_of(dataset, comm)
    if classes is None:
        classes = found
        if len(found) < 2:
            listed = ", ".join(map(shown, found))
            raise DatasetError(f"{dataset.source}: a classifier needs two classes, but the labels are {listed}")
    strange = [label for label in found if label not in set(classes)]
    if strange:
        raise DatasetError(f"{dataset.source}: label {shown(strange[0])} is not one of the training set's {len(classes)} classes")
    numbers = np.searchsorted(np.array(classes), dataset.named_labels if dataset.rows else []).astype(np.float64)
    return replace(dataset, labels=numbers, names=None), classes


@collective
def weighted_by_class(dataset: Dataset, weights: Mapping[Label, float] | str, comm: Any) -> Dataset:
    """Return the data set with each sample's weight multiplied by that of its class. Collective.

    Parameters
    ----------
    dataset : Dataset
    weights : mapping or "balanced"
        Factor of the sample weights for each label, 1 for labels left out; "balanced" gives all classes the same total weight, with a mean
        sample weight of 1.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> from scipy.sparse import csr_array
    >>> samples = Dataset.from_scipy(csr_array(np.ones((4, 1))), [-1, 1, 1, 1])
    >>> weighted_by_class(samples, "balanced", sar.SERIAL).weights.round(3)
    array([2.   , 0.667, 0.667, 0.667])
    """
    chosen = _balancing(dataset, comm) if isinstance(weights, str) else weights
    counts = np.ones(dataset.rows) if dataset.weights is None else dataset.weights.astype(np.float64)
    for label, weight in chosen.items():
        counts[_equal(dataset, label)] *= weight
    return replace(dataset, weights=counts)


@collective
def huber_epsilon(labels: Array, counts: Array | None, comm: Any) -> float:
    """Return an epsilon of Huber's loss that suits labels in any unit: 1.35 times their typical distance from the median. Collective.

    The typical distance is 1.4826 times the median distance, which is the standard deviation for normally distributed labels, and robust to
    outliers; if half of the labels are equal, 1.2533 times the mean distance; and 1 if all are equal. With 1.35 the loss is 95 % as
    efficient as least squares for normal errors (Huber, *Robust statistics*, 1981). For ranks with more than 4,096 labels, that many
    quantiles are used.

    Parameters
    ----------
    labels : ndarray
        Labels of this rank's samples.
    counts : ndarray or None
        Weight of each sample; None for 1.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> round(huber_epsilon(np.array([1.0, 2.0, 3.0, 4.0, 1e9]), None, sar.SERIAL), 4)
    2.0015
    """

    def own() -> tuple[Array, Array]:
        # Labels that are not finite are reported later, with their samples.
        order = np.argsort(labels, kind="stable")[: int(np.isfinite(labels).sum())]
        values, weights = labels[order], np.ones(len(order)) if counts is None else counts[order]
        if len(values) <= _QUANTILES:
            return values, weights
        sums = np.cumsum(weights)
        places = np.searchsorted(sums, sums[-1] * (np.arange(_QUANTILES) + 0.5) / _QUANTILES)
        return values[np.minimum(places, len(values) - 1)], np.full(_QUANTILES, sums[-1] / _QUANTILES)

    values, weights = (np.concatenate(column) for column in zip(*gather_results(comm, own), strict=True))
    if not weights.sum() > 0:
        return 1.35
    distances = np.abs(values - _median(values, weights))
    typical = 1.4826 * _median(distances, weights)
    return 1.35 * float(typical or 1.2533 * np.average(distances, weights=weights) or 1.0)


def _median(values: Array, weights: Array) -> float:
    """Return the weighted median."""
    order = np.argsort(values, kind="stable")
    sums = np.cumsum(weights[order])
    half = sums[-1] / 2
    low, high = np.searchsorted(sums, half), np.searchsorted(sums, half, side="right")
    return float(values[order[low]] + values[order[min(high, len(order) - 1)]]) / 2


def of_mean_one(dataset: Dataset, comm: Any) -> Dataset:
    """Return the data set with sample weights divided by their mean over all ranks. Collective.

    So the loss of the set is the weighted mean, whatever the scale of the weights: a sample of weight 2 has the effect of two samples, and
    weights change neither the learning rate nor the balance of penalty and loss. The estimators' ``fit`` does the same.

    Raises
    ------
    DatasetError
        On all ranks, if all samples have weight zero.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> from scipy.sparse import csr_array
    >>> samples = Dataset.from_scipy(csr_array(np.ones((4, 1))), [-1, 1, 1, 1])
    >>> of_mean_one(weighted_by_class(samples, {-1: 6, 1: 2}, sar.SERIAL), sar.SERIAL).weights.round(3)
    array([2.   , 0.667, 0.667, 0.667])
    """
    counts = np.ones(dataset.rows) if dataset.weights is None else dataset.weights
    samples, overall = (sum(column) for column in zip(*gather(comm, (dataset.rows, float(counts.sum())))))
    if not np.isfinite(overall):
        raise DatasetError(f"{dataset.source}: the sum of all weights of samples is {overall:g}: divide them by a number")
    if not overall > 0:
        raise DatasetError(f"{dataset.source}: no rank has a sample with a weight other than zero")
    return replace(dataset, weights=counts * (samples / overall))


def _balancing(dataset: Dataset, comm: Any) -> dict[Label, float]:
    labels, counts = np.unique(dataset.labels, return_counts=True)
    totals: dict[Label, int] = {}
    for own in gather(comm, dict(zip(_labels_of(labels, dataset.names), counts.tolist()))):
        for label, count in own.items():
            totals[label] = totals.get(label, 0) + count
    samples = sum(totals.values())  # P times the number of samples, if each rank holds all
    return {label: samples / (len(totals) * count) for label, count in totals.items()}
