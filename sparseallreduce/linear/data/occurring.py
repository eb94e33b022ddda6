"""The features that occur in the samples of all ranks, numbered by the ranks together, so that only these need weights."""

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

_MANY = 1 << 16  # number of features from which numbering pays off
_SMALL = 1 << 20  # weights up to this size in bytes are always dense
_SPARSE = 64  # features per non-zero from which sorting is faster than a bitmap


class Occurring:
    """The features that occur on any rank, and the number of ranks that have each. Creating an instance is collective.

    Parameters
    ----------
    dataset : Dataset
        This rank's samples.
    comm : communicator

    Attributes
    ----------
    own : ndarray
        Features of this rank's samples, ascending.
    features : ndarray
        Features of all ranks' samples, ascending, the same on all ranks.
    ranks : ndarray
        Number of ranks that have each of ``features``.
    """

    features: Array
    ranks: Array

    def __init__(self, dataset: Dataset, comm: Any) -> None:
        self.size: int = dataset.features
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
        """Return samples with only these features, numbered in their order; other entries are removed."""
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
        """Return weights of these features, of shape (features,) or (K, features), as weights of all features.

        They are dense if that is no larger than samples with ``nonzeros`` non-zeros, otherwise a ``csr_array`` with 1 or K rows.
        """
        return spread(weights[..., : len(self)], self.features, self.size, nonzeros)

    def _numbers(self) -> tuple[Array, Array] | None:
        """Return a bitmap of the features, and the number of them before each word; None if searching is faster."""
        if self.size > _SPARSE * max(1, len(self.own)):
            return None
        words = np.zeros(-(-self.size // 64), np.uint64)
        kernels.mark(self.features, 0, len(self), words)
        before = np.empty(len(words), np.int64)
        kernels.marked(words, before, np.empty(len(self), self.features.dtype))
        return words, before


def only_occurring(dataset: Dataset, comm: Any) -> Occurring | None:
    """Return the features that need weights, or None for all of them, for example if half of them occur. Collective.

    Raises
    ------
    DatasetError
        On all ranks, if the rows of any rank are not as :class:`Dataset` requires.
    """
    if dataset.features < _MANY or any(gather(comm, dataset.pages is not None)):
        return None
    agreed(comm, lambda: check_rows(dataset))
    found = Occurring(dataset, comm)
    return found if 2 * len(found) <= dataset.features else None


def spread(weights: Array, features: Array, size: int, nonzeros: int) -> Any:
    """Return weights of some features as weights of all features; the others are zero.

    Parameters
    ----------
    weights : ndarray, shape (k,) or (K, k)
    features : ndarray, shape (k,)
        Distinct features in any order.
    size : int
        Number of all features.
    nonzeros : int
        Number of non-zeros in the training samples.

    Returns
    -------
    ndarray or csr_array
        Dense of shape (size,) or (K, size) if that is no larger than the training samples, otherwise sparse with 1 or K rows.
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
    """Return the features that occur in this rank's samples, ascending."""
    begin, end = int(dataset.indptr[0]), int(dataset.indptr[-1])
    if dataset.features > _SPARSE * (end - begin):
        return np.unique(dataset.indices[begin:end])
    words = np.zeros(-(-dataset.features // 64), np.uint64)
    features = np.empty(kernels.mark(dataset.indices, begin, end, words), dataset.indices.dtype)
    kernels.marked(words, np.empty(len(words), np.int64), features)
    return features
