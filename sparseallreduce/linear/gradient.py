"""The gradient of a batch as a sorted sparse stream, in buffers that are used again."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.linear import kernels
from sparseallreduce.linear.datasets import Dataset
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["SparseGradient"]

Array = NDArray[Any]


class SparseGradient:
    """Sums rows of a data set, each times a coefficient, into a stream of exactly the entries that they touch.

    Parameters
    ----------
    dataset : Dataset
    size : int
        Entries of the weights: the features of the data set, or one more, the intercept, whose gradient is the sum of coefficients.
    buffers : int, optional
        How many streams may be in use at once: the one that a call returns is valid until so many calls later.
    """

    def __init__(self, dataset: Dataset, size: int, buffers: int = 1) -> None:
        self.dataset = dataset
        self.size = size
        self._sum = np.zeros(dataset.features, dataset.values.dtype)
        self._words, self._summary = kernels.bitmap(dataset.features)
        self._buffers = cycle([_Buffer(size, dataset.values.dtype) for _ in range(buffers)])

    def __call__(self, rows: Array, coefficients: Array) -> SparseStream:
        """The sum of ``coefficients[i]`` (of the values' dtype) times row ``rows[i]``."""
        dataset, buffer = self.dataset, next(self._buffers)
        nnz = int((dataset.indptr[rows + 1] - dataset.indptr[rows]).sum())
        buffer.reserve(min(nnz, dataset.features) + 1, self.size)
        kernels.accumulate_marked(
            dataset.indptr, dataset.indices, dataset.values, rows, coefficients, self._sum, self._words, self._summary
        )
        touched = kernels.collect(self._sum, self._words, self._summary, buffer.indices, buffer.values)
        if self.size > dataset.features and len(rows):
            buffer.indices[touched] = dataset.features
            buffer.values[touched] = coefficients.sum(dtype=np.float64)
            touched += 1
        return SparseStream(buffer.indices[:touched], buffer.values[:touched], self.size)


class _Buffer:
    """The arrays of one stream."""

    def __init__(self, size: int, dtype: DTypeLike) -> None:
        self.indices = np.empty(0, index_dtype(size))
        self.values = np.empty(0, dtype)

    def reserve(self, entries: int, most: int) -> None:
        """Room for so many entries, with some to spare for the next batch."""
        if entries > len(self.indices):
            room = min(entries + entries // 4, most)
            self.indices = np.empty(room, self.indices.dtype)
            self.values = np.empty(room, self.values.dtype)
