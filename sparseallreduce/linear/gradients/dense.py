"""The gradient of a batch as a dense array, summed by one or several threads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear import kernels
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.runtime.threads import Threads

__all__ = ["DenseGradient", "ranges_of_like_work"]

Array = NDArray[Any]

_SAMPLE = 100_000  # non-zeros that are sampled to estimate how often features occur
_ALIGNED = 64  # the ranges of threads start at multiples of this many features: whole cache lines


class DenseGradient:
    """Sums rows of a data set, each times a coefficient, into an array of the size of the weights.

    Parameters
    ----------
    dataset : Dataset
    size : int
        Number of weights: the features of the data set, or one more for the intercept, whose gradient is the sum of the coefficients.
    threads : Threads
        Each thread sums a range of the features in the order of the rows, so the result does not depend on the number of threads.
    array : ndarray, optional
        Output array with this size and the dtype of the values; allocated by default.
    columns : int, optional
        Number of columns K: the array has the shape (size, K), and each row has K coefficients.
    """

    def __init__(self, dataset: Dataset, size: int, threads: Threads, array: Array | None = None, *, columns: int | None = None) -> None:
        self.dataset = dataset
        self.columns = columns
        shape = size if columns is None else (size, columns)
        self.array: Array = np.zeros(shape, dataset.values.dtype) if array is None else array
        self._threads = threads
        self._bounds = ranges_of_like_work(dataset, threads.count)

    def __call__(self, rows: Array, coefficients: Array) -> Array:
        """Return the sum of ``coefficients[i]`` (in the values' dtype) times row ``rows[i]``, as ``array``, valid until the next call."""
        dataset = self.dataset

        def add(part: int) -> None:
            low, high = self._bounds[part], self._bounds[part + 1]
            total = self.array[low:high]
            total.fill(0)
            given = dataset.indptr, dataset.indices, dataset.values, rows, coefficients
            if self.columns is None:
                kernels.accumulate(*given, dataset.features, low, total)
            else:
                kernels.accumulate_columns(*given, low, high, total.reshape(-1))

        self._threads.each(add)
        self.array[dataset.features :] = coefficients.sum(axis=0, dtype=np.float64)
        return self.array


def ranges_of_like_work(dataset: Dataset, parts: int) -> list[int]:
    """Return the bounds of feature ranges that hold about equally many of the data set's non-zeros."""
    if parts == 1:
        return [0, dataset.features]
    sample = np.sort(dataset.indices[:: max(1, dataset.nnz // _SAMPLE)])
    inner = sample[len(sample) * np.arange(1, parts) // parts] if len(sample) else np.zeros(parts - 1, np.int64)
    return [0, *(int(bound) // _ALIGNED * _ALIGNED for bound in inner), dataset.features]
