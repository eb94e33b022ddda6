"""The features that occur in the samples of all ranks, numbered once by the ranks together, so that weights live on these alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from sparseallreduce.linear.data.checks import check_rows
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.kernels import feature_numbers as kernels
from sparseallreduce.runtime.api import allreduce
from sparseallreduce.runtime.objects import agreed, gather
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["Occurring", "occurring_in", "only_occurring", "spread"]

Array = NDArray[Any]

_MANY = 1 << 16  # features from which on weights are worth numbering
_SMALL = 1 << 20  # bytes of weights that are dense whatever the samples
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
        features, dimension = max(1, len(self)), dataset.dimension or dataset.features
        return replace(dataset, indptr=indptr, indices=indices, values=values, features=features, dimension=dimension)

    def restored(self, weights: Array, nonzeros: int) -> Any:
        """Return weights of these features, of shape (features,) or (K, features), as those of all.

        They are dense where that is no larger than samples of so many non-zeros; else a ``csr_array`` of one row, or K.
        """
        return spread(weights[..., : len(self)], self.features, self.size, nonzeros)

    def _numbers(self) -> tuple[Array, Array] | None:
        """A bitmap of the features, and how many of them are before each word; None where the features are looked up instead."""
        if self.size > _SPARSE * max(1, len(self.own)):
            return None
        words = np.zeros(-(-self.size // 64), np.uint64)
        kernels.mark(self.features, 0, len(self), words)
        before = np.empty(len(words), np.int64)
        kernels.marked(words, before, np.empty(len(self), self.features.dtype))
        return words, before


def only_occurring(dataset: Dataset, comm: Any) -> Occurring | None:
    """Return the features that weights are to live on; None for all of them, as where half of them occur. Collective.

    Raises
    ------
    DatasetError
        On all ranks alike, if the rows of any rank are not what :class:`Dataset` says.
    """
    if dataset.features < _MANY or any(gather(comm, dataset.pages is not None)):
        return None
    agreed(comm, lambda: check_rows(dataset))
    found = Occurring(dataset, comm)
    return found if 2 * len(found) <= dataset.features else None


def spread(weights: Array, features: Array, size: int, nonzeros: int) -> Any:
    """Return the weights of some features as those of all; the others are zero.

    Parameters
    ----------
    weights : ndarray, shape (k,) or (K, k)
    features : ndarray, shape (k,)
        In any order, each once.
    size : int
        All features.
    nonzeros : int
        Of the samples that the weights were learned from.

    Returns
    -------
    ndarray or csr_array
        Dense of shape (size,) or (K, size) where that is no larger than such samples; else sparse, of one row or K.
    """
    shape = (*weights.shape[:-1], size)
    if math.prod(shape) * weights.itemsize > max(_SMALL, nonzeros * (weights.itemsize + features.itemsize)):
        order = np.argsort(features, kind="stable")
        rows = np.atleast_2d(weights)[:, order]
        indices, bounds = np.tile(features[order].astype(np.int64), len(rows)), np.arange(len(rows) + 1) * len(order)
        sparse = csr_array((rows.reshape(-1), indices, bounds), shape=(len(rows), size))
        sparse.eliminate_zeros()
        return sparse
    whole = np.zeros(shape, weights.dtype)
    whole[..., features] = weights
    return whole


def occurring_in(dataset: Dataset) -> Array:
    """The features that occur in this rank's samples, increasing."""
    begin, end = int(dataset.indptr[0]), int(dataset.indptr[-1])
    if dataset.features > _SPARSE * (end - begin):
        return np.unique(dataset.indices[begin:end])
    words = np.zeros(-(-dataset.features // 64), np.uint64)
    features = np.empty(kernels.mark(dataset.indices, begin, end, words), dataset.indices.dtype)
    kernels.marked(words, np.empty(len(words), np.int64), features)
    return features
