"""Which features occur in a batch, in order and once each, in buffers that are used again."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear import kernels
from sparseallreduce.linear.dataset import Dataset
from sparseallreduce.linear.gradient import ranges_of_like_work
from sparseallreduce.linear.team import Team
from sparseallreduce.streams.stream import index_dtype

__all__ = ["TouchedIndices"]

Array = NDArray[Any]


class TouchedIndices:
    """Lists the entries of the weights that scores of given rows depend on.

    Parameters
    ----------
    dataset : Dataset
    size : int
        Entries of the weights: the features of the data set, or one more, the intercept, on which every score depends.
    team : Team
        Each of its threads looks for the features of a range.
    """

    def __init__(self, dataset: Dataset, size: int, team: Team) -> None:
        self._dataset = dataset
        self._intercept = np.arange(dataset.features, size, dtype=index_dtype(size))
        self._team = team
        bounds = ranges_of_like_work(dataset, team.threads)
        self._parts = [_Part(dataset, low, high, size) for low, high in pairwise(bounds)]

    def __call__(self, rows: Array) -> Array:
        """The indices for these rows of this rank, increasing."""
        nnz = int((self._dataset.indptr[rows + 1] - self._dataset.indptr[rows]).sum())
        parts = self._team.each(lambda part: self._parts[part].indices(rows, nnz))
        return np.concatenate([*parts, self._intercept[: len(rows)]])


class _Part:
    """A range of features."""

    def __init__(self, dataset: Dataset, low: int, high: int, size: int) -> None:
        self._dataset = dataset
        self._low, self._extent = low, high - low
        self._words, self._blocks = kernels.bitmap(high - low)
        self._found = np.empty(0, index_dtype(size))

    def indices(self, rows: Array, nnz: int) -> Array:
        """Those that occur in the rows, which have ``nnz`` non-zeros in all; valid until the next call."""
        most = min(nnz, self._extent) + 2
        if most > len(self._found):
            self._found = np.empty(most + most // 4, self._found.dtype)
        dataset = self._dataset
        kernels.mark(dataset.indptr, dataset.indices, rows, self._low, self._extent, self._words, self._blocks)
        found = self._found[: kernels.marked(self._words, self._blocks, self._found)]
        found += found.dtype.type(self._low)
        return found
