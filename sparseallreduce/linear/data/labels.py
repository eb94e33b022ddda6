"""Labels: two classes as the trainer takes them, and samples that count by their class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.runtime.objects import agreed, collective, gather

__all__ = ["BALANCED", "classes_of", "numbered_classes", "of_mean_one", "two_classes", "weighted_by_class"]

BALANCED = "balanced"


@collective
def two_classes(dataset: Dataset, comm: Any, classes: tuple[float, float] | None = None) -> tuple[Dataset, tuple[float, float]]:
    """The data set with its lower label replaced by -1 and its higher one by +1, and these labels; collective over ``comm``.

    With ``classes`` (of the training set) given, labels must be among them.

    Raises
    ------
    DatasetError
        On every rank alike, if the labels of all ranks are not two classes.
    """
    mine = np.unique(dataset.labels)[:10].tolist()
    found = sorted(set().union(*gather(comm, mine)))
    if classes is None:
        if len(found) != 2:
            listed = ", ".join(f"{label:g}" for label in found[:5]) + (", ..." if len(found) > 5 else "")
            raise DatasetError(f"{dataset.source}: a classifier needs two classes, but the labels are {listed}")
        classes = found[0], found[1]
    strange = [label for label in found if label not in classes]
    if strange:
        raise DatasetError(f"{dataset.source}: label {strange[0]:g} is none of the training set's, {classes[0]:g} and {classes[1]:g}")
    return replace(dataset, labels=np.where(dataset.labels == classes[1], 1.0, -1.0)), classes


@collective
def classes_of(dataset: Dataset, comm: Any) -> tuple[float, ...]:
    """All labels of all ranks, sorted; collective over ``comm``.

    Raises
    ------
    DatasetError
        On every rank alike, if a label is no finite number.
    """

    def own() -> list[float]:
        strange = np.flatnonzero(~np.isfinite(dataset.labels))
        if len(strange):
            where = f"the label of sample {dataset.first_sample + strange[0]} is {dataset.labels[strange[0]]}"
            raise DatasetError(f"{dataset.source}: {where}, which is no class")
        labels: list[float] = np.unique(dataset.labels).tolist()
        return labels

    return tuple(sorted(set().union(*gather(comm, agreed(comm, own)))))


@collective
def numbered_classes(dataset: Dataset, comm: Any, classes: tuple[float, ...] | None = None) -> tuple[Dataset, tuple[float, ...]]:
    """The data set with its K labels replaced by 0 to K - 1, in their order, and these labels; collective over ``comm``.

    With ``classes`` (of the training set) given, sorted, labels must be among them.

    Raises
    ------
    DatasetError
        On every rank alike, if the labels of all ranks are fewer than two classes, or one is not among those given.

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
            listed = ", ".join(f"{label:g}" for label in found)
            raise DatasetError(f"{dataset.source}: a classifier needs two classes, but the labels are {listed}")
    strange = sorted(set(found).difference(classes))
    if strange:
        raise DatasetError(f"{dataset.source}: label {strange[0]:g} is none of the training set's {len(classes)} classes")
    return replace(dataset, labels=np.searchsorted(np.array(classes), dataset.labels).astype(np.float64)), classes


@collective
def weighted_by_class(dataset: Dataset, weights: Mapping[float, float] | str, comm: Any) -> Dataset:
    """The data set with each sample counting, in loss and gradient, what its label does; collective.

    Parameters
    ----------
    dataset : Dataset
    weights : mapping or "balanced"
        From labels to what the weights of their samples are multiplied by, 1 for labels that are left out; or such that all classes
        count alike, and a sample 1 on average.

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
        counts[dataset.labels == label] *= weight
    return replace(dataset, weights=counts)


@collective
def of_mean_one(dataset: Dataset, comm: Any) -> Dataset:
    """The data set with weights of samples that are 1 on average over all ranks; collective.

    So the loss of the set is the mean by weights, whatever their scale: a sample of weight 2 counts as if it were there twice, and
    weights change neither the learning rate nor what a penalty weighs beside the loss. The estimators' ``fit`` does the same.

    Raises
    ------
    DatasetError
        On all ranks alike, if no sample counts.

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
        raise DatasetError(f"{dataset.source}: there is no sample whose weight is not zero on any rank")
    return replace(dataset, weights=counts * (samples / overall))


def _balancing(dataset: Dataset, comm: Any) -> dict[float, float]:
    labels, counts = np.unique(dataset.labels, return_counts=True)
    totals: dict[float, int] = {}
    for own in gather(comm, dict(zip(labels.tolist(), counts.tolist()))):
        for label, count in own.items():
            totals[label] = totals.get(label, 0) + count
    samples = sum(totals.values())  # which are P times those that there are, where each rank holds all
    return {label: samples / (len(totals) * count) for label, count in totals.items()}
