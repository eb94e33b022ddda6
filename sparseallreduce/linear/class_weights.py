"""Samples that count by their class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sparseallreduce.linear.collective import gather
from sparseallreduce.linear.dataset import Dataset

__all__ = ["BALANCED", "weighted_by_class"]

BALANCED = "balanced"


def weighted_by_class(dataset: Dataset, weights: Mapping[float, float] | str, comm: Any) -> Dataset:
    """The data set with each sample counting, in loss and gradient, what its label does; collective.

    Parameters
    ----------
    dataset : Dataset
    weights : mapping or "balanced"
        From labels to numbers, 1 for labels that are left out; or such that all classes count alike, and a sample 1 on average.

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


def _balancing(dataset: Dataset, comm: Any) -> dict[float, float]:
    labels, counts = np.unique(dataset.labels, return_counts=True)
    totals: dict[float, int] = {}
    for own in gather(comm, dict(zip(labels.tolist(), counts.tolist()))):
        for label, count in own.items():
            totals[label] = totals.get(label, 0) + count
    return {label: dataset.total / (len(totals) * count) for label, count in totals.items()}
