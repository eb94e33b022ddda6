"""The features that occur in the samples of all ranks, numbered once by the ranks together, so that weights live on these alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.dataset import Dataset, read_only
from sparseallreduce.linear.kernels import feature_numbers as kernels
from sparseallreduce.runtime.api import allreduce
from sparseallreduce.runtime.objects import agreed
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["Occurring", "occurring_in"]

Array = NDArray[Any]

_SPARSE = 64  # features to a non-zero from which on sorting takes less than a bitmap


class Occurring:
    """The features that occur on any rank, and on how many; making it is collective.

    Parameters
    ----------
    dataset : Dataset
        This rank's samples.
    comm : communicator

    Attributes
    ----------
    own : ndarray
        Features of this rank's samples, increasing.
    features : ndarray
        Those of all ranks', increasing, the same on all of them.
    ranks : ndarray
        How many ranks have each of ``features``.
    """

    def __init__(self, dataset: Dataset, comm: Any) -> None:
        self.size = dataset.features
        self.own: Array = agreed(comm, lambda: occurring_in(dataset))
        if comm.size == 1:
            self.features, self.ranks = self.own, np.ones(len(self.own), np.int32)
            return
        total = allreduce(SparseStream(self.own, np.ones(len(self.own), np.int32), self.size), comm)
        if total.is_dense:
            ranks = total.to_dense()
            self.features = np.flatnonzero(ranks).astype(self.own.dtype)
            self.ranks = ranks[self.features]
        else:
            self.features, self.ranks = total.indices, total.values

    def __len__(self) -> int:
        return len(self.features)

    def renumbered(self, dataset: Dataset) -> Dataset:
        """Return samples of these features alone, numbered in their order: what others have is left out."""
        begin, end = int(dataset.indptr[0]), int(dataset.indptr[-1])
        indices = np.empty(end - begin, index_dtype(len(self) + 1))
        marked = self._numbers()
        if marked is None:
            missing = kernels.number_sorted(dataset.indices, begin, end, self.features, indices)
        else:
            missing = kernels.number_marked(dataset.indices, begin, end, *marked, len(self), indices)
        values, indptr = dataset.values[begin:end], dataset.indptr - begin
        if missing:
            values, indptr = values.copy(), indptr.copy()
            kernels.drop(indptr, indices, values, len(self))
            indices, values = indices[: indptr[-1]], values[: indptr[-1]]
        return replace(dataset, indptr=read_only(indptr), indices=read_only(indices), values=read_only(values), features=max(1, len(self)))

    def _numbers(self) -> tuple[Array, Array] | None:
        """A bitmap of the features, and how many of them are before each word; None where the features are looked up instead."""
        if self.size > _SPARSE * max(1, len(self.own)):
            return None
        words = np.zeros(-(-self.size // 64), np.uint64)
        kernels.mark(self.features, 0, len(self), words)
        before = np.empty(len(words), np.int64)
        kernels.marked(words, before, np.empty(len(self), self.features.dtype))
        return words, before


def occurring_in(dataset: Dataset) -> Array:
    """The features that occur in this rank's samples, increasing."""
    begin, end = int(dataset.indptr[0]), int(dataset.indptr[-1])
    if dataset.features > _SPARSE * (end - begin):
        return np.unique(dataset.indices[begin:end])
    words = np.zeros(-(-dataset.features // 64), np.uint64)
    features = np.empty(kernels.mark(dataset.indices, begin, end, words), dataset.indices.dtype)
    kernels.marked(words, np.empty(len(words), np.int64), features)
    return features
