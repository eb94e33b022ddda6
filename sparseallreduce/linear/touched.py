"""Which features occur in a batch, in order and once each, in a buffer that is used again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear import kernels
from sparseallreduce.linear.dataset import Dataset
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
    """

    def __init__(self, dataset: Dataset, size: int) -> None:
        self._dataset = dataset
        self._size = size
        self._words, self._blocks = kernels.bitmap(dataset.features)
        self._indices = np.empty(0, index_dtype(size))

    def __call__(self, rows: Array) -> Array:
        """The indices for these rows of this rank, increasing; valid until the next call."""
        dataset = self._dataset
        most = min(int((dataset.indptr[rows + 1] - dataset.indptr[rows]).sum()), dataset.features) + 2
        if most > len(self._indices):
            self._indices = np.empty(most + most // 4, self._indices.dtype)
        kernels.mark(dataset.indptr, dataset.indices, rows, self._words, self._blocks)
        touched = kernels.marked(self._words, self._blocks, self._indices)
        if self._size > dataset.features and len(rows):
            self._indices[touched] = dataset.features
            touched += 1
        return self._indices[:touched]
