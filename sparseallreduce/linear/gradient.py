"""The gradient of a batch, as a dense array or as a sorted sparse stream, summed by one or several threads."""

from __future__ import annotations

from itertools import cycle, pairwise
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.linear import kernels
from sparseallreduce.linear.dataset import Dataset
from sparseallreduce.linear.team import Team
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["DenseGradient", "SparseGradient", "ranges_of_like_work"]

Array = NDArray[Any]

_SAMPLE = 100_000  # non-zeros that tell how often features occur
_ALIGNED = 64  # features to which the parts of threads are rounded: whole words of a bitmap and whole cache lines


class DenseGradient:
    """Sums rows of a data set, each times a coefficient, into an array of all weights.

    Parameters
    ----------
    dataset : Dataset
    size : int
        Entries of the weights: the features of the data set, or one more, the intercept, whose gradient is the sum of coefficients.
    team : Team
        Each of its threads sums a range of the features, in the order of the rows: so the number of threads changes no bit.
    """

    def __init__(self, dataset: Dataset, size: int, team: Team) -> None:
        self.dataset = dataset
        self.array = np.zeros(size, dataset.values.dtype)
        self._team = team
        self._bounds = ranges_of_like_work(dataset, team.threads)

    def __call__(self, rows: Array, coefficients: Array) -> Array:
        """The sum of ``coefficients[i]`` (of the values' dtype) times row ``rows[i]``; ``array``, until the next call."""
        dataset = self.dataset

        def add(part: int) -> None:
            low, high = self._bounds[part], self._bounds[part + 1]
            self.array[low:high].fill(0)
            kernels.accumulate(dataset.indptr, dataset.indices, dataset.values, rows, coefficients, low, self.array[low:high])

        self._team.each(add)
        self.array[dataset.features :] = coefficients.sum(dtype=np.float64)
        return self.array


class SparseGradient:
    """Sums rows of a data set, each times a coefficient, into a stream of exactly the entries that they touch.

    Parameters
    ----------
    dataset, size, team
        As for :class:`DenseGradient`.
    buffers : int, optional
        How many streams may be in use at once: the one that a call returns is valid until so many calls later.
    """

    def __init__(self, dataset: Dataset, size: int, team: Team, buffers: int = 1) -> None:
        self.dataset = dataset
        self.size = size
        self._team = team
        bounds = ranges_of_like_work(dataset, team.threads)
        self._parts = [_Part(dataset, low, high) for low, high in pairwise(bounds)]
        self._buffers = cycle([_Buffer(size, dataset.values.dtype) for _ in range(buffers)])

    def __call__(self, rows: Array, coefficients: Array) -> SparseStream:
        """The sum of ``coefficients[i]`` (of the values' dtype) times row ``rows[i]``."""
        dataset, buffer = self.dataset, next(self._buffers)
        nnz = int((dataset.indptr[rows + 1] - dataset.indptr[rows]).sum())
        if self._team.threads == 1:
            buffer.reserve(nnz)
            touched = self._parts[0].sum(rows, coefficients, buffer)
        else:
            touched = buffer.join(self._team.each(lambda part: self._parts[part].summed(rows, coefficients, nnz)))
        if self.size > dataset.features and len(rows):
            buffer.indices[touched] = dataset.features
            buffer.values[touched] = coefficients.sum(dtype=np.float64)
            touched += 1
        stream = SparseStream._sparse_form(buffer.indices[:touched], buffer.values[:touched], self.size)
        stream._switch()
        return stream


class _Part:
    """A range of features, and the sum over it."""

    def __init__(self, dataset: Dataset, low: int, high: int) -> None:
        self._dataset = dataset
        self._low = low
        self._sum = np.zeros(high - low, dataset.values.dtype)
        self._words, self._blocks = kernels.bitmap(high - low)
        self._own = _Buffer(dataset.features, dataset.values.dtype)

    def sum(self, rows: Array, coefficients: Array, out: _Buffer) -> int:
        """Write the touched entries of the range to ``out``; returns their number."""
        dataset, total, words, blocks = self._dataset, self._sum, self._words, self._blocks
        kernels.accumulate_marked(dataset.indptr, dataset.indices, dataset.values, rows, coefficients, self._low, total, words, blocks)
        return int(kernels.collect(self._low, total, words, blocks, out.indices, out.values))

    def summed(self, rows: Array, coefficients: Array, nnz: int) -> tuple[Array, Array]:
        """The indices and values of the touched entries of the range, where rows have ``nnz`` non-zeros in all."""
        self._own.reserve(min(nnz, len(self._sum)))
        touched = self.sum(rows, coefficients, self._own)
        return self._own.indices[:touched], self._own.values[:touched]


class _Buffer:
    """The arrays of one stream."""

    def __init__(self, size: int, dtype: DTypeLike) -> None:
        self._most = size
        self.indices = np.empty(0, index_dtype(size))
        self.values = np.empty(0, dtype)

    def reserve(self, entries: int) -> None:
        """Room for so many entries or all that there can be, with some to spare for the next batch and for the kernel."""
        entries = min(entries, self._most) + 2
        if entries > len(self.indices):
            room = entries + entries // 4
            self.indices = np.empty(room, self.indices.dtype)
            self.values = np.empty(room, self.values.dtype)

    def join(self, parts: list[tuple[Array, Array]]) -> int:
        """Take over the entries of parts, one behind the other; returns how many there are."""
        count = sum(len(indices) for indices, _ in parts)
        self.reserve(count)
        np.concatenate([indices for indices, _ in parts], out=self.indices[:count])
        np.concatenate([values for _, values in parts], out=self.values[:count])
        return count


def ranges_of_like_work(dataset: Dataset, parts: int) -> list[int]:
    """Bounds of ranges of features that hold about as many of the data set's non-zeros each."""
    if parts == 1:
        return [0, dataset.features]
    sample = np.sort(dataset.indices[:: max(1, dataset.nnz // _SAMPLE)])
    inner = sample[len(sample) * np.arange(1, parts) // parts] if len(sample) else np.zeros(parts - 1, np.int64)
    return [0, *(int(bound) // _ALIGNED * _ALIGNED for bound in inner), dataset.features]
