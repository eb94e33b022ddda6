"""Batches for weights with K columns, restricted to the features that occur. The gradient is a row-sparse stream of width K."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear import kernels
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.gradients.compact import CompactBatch, Room
from sparseallreduce.linear.weights import Weights, flat_indices
from sparseallreduce.runtime.threads import Threads
from sparseallreduce.streams.stream import SparseStream, switch_point

__all__ = ["ColumnBatch", "flattened", "new_batch"]

Array = NDArray[Any]


class ColumnBatch(CompactBatch):
    """A :class:`CompactBatch` with K scores and K coefficients per row. It always copies the rows, because the weights are wide.

    Parameters
    ----------
    dataset, size, threads, buffers
        As for :class:`CompactBatch`.
    columns : int
        Number of columns, K.
    """

    def __init__(self, dataset: Dataset, size: int, threads: Threads, columns: int, buffers: int = 1) -> None:
        super().__init__(dataset, size, threads, buffers, columns)
        self.columns = columns
        self._limit = switch_point(size, dataset.values.dtype, size, columns)
        self._sums = cycle([Room(dataset.values.dtype) for _ in range(buffers)])

    def scores(self, rows: Array, weights: Weights) -> Array:
        """Return the scores of these rows, float64 of shape (len(rows), K), bitwise identical to ``weights.scores``."""
        self._extent = None
        # If some rows are expected to have zero coefficients, as with the hinge loss, `gradient` copies only the others.
        if self._is_full(rows) or (weights.current and not self._all_count):
            return weights.scores(self.dataset, rows)
        self.take(rows)
        return weights.compact_scores(self.samples, self.features)

    def gradient(self, rows: Array, coefficients: Array) -> SparseStream:
        """Return the sum of ``coefficients[i, k]`` times row ``rows[i]`` in column k, over all rows with a coefficient other than 0."""
        counting = coefficients.any(axis=1)
        self._all_count = bool(counting.all())
        counted, factors = (rows, coefficients) if self._all_count else (rows[counting], coefficients[counting])
        if self._is_full(counted):
            full = SparseStream.from_dense(self._dense(rows, coefficients).copy())
            if full.is_dense:
                self._extent = None
                return full
        if self._taken is not counted:
            self.take(counted)
        gradient = self._summed(rows, coefficients, factors)
        if len(gradient.indices) > self._limit:
            gradient._switch()
        self._stream = next(self._streams)
        self._taken = self._extent = None
        return gradient

    def _summed(self, rows: Array, coefficients: Array, factors: Array) -> SparseStream:
        """Return the gradient of the copied rows."""
        samples, touched, columns = self.samples, len(self.features), self.columns
        room, indices = next(self._sums), self._stream[0].array
        room.reserve((touched + 1) * columns)  # also for the intercept
        sums = room.array

        def add(low: int, high: int) -> None:
            total = sums[low * columns : high * columns]
            total.fill(0)
            kernels.compact_accumulate_columns(*samples, factors, low, high, total)

        starts = [0] if self._threads.count == 1 else np.searchsorted(self.features, self._starts).tolist()
        self._threads.share([*starts, touched], add)
        if self.size > self.dataset.features and len(rows):
            indices[touched] = self.dataset.features
            sums[touched * columns : (touched + 1) * columns] = coefficients.sum(axis=0, dtype=np.float64)
            touched += 1
        return SparseStream._sparse_form(indices[:touched], sums[: touched * columns].reshape(-1, columns), self.size)


def new_batch(dataset: Dataset, size: int, threads: Threads, columns: int | None, buffers: int = 1) -> CompactBatch:
    """Return a batch for weights with this many columns, or for a single vector of weights if None."""
    return CompactBatch(dataset, size, threads, buffers) if columns is None else ColumnBatch(dataset, size, threads, columns, buffers)


def flattened(stream: SparseStream, columns: int | None) -> SparseStream:
    """Return a row-sparse stream as a stream of ``size * columns`` single entries, or the stream itself without columns.

    >>> flattened(SparseStream([1], np.ones((1, 2), np.float32), 3), 2).indices
    array([2, 3], dtype=uint32)
    """
    if columns is None:
        return stream
    size = stream.size * columns
    if stream.is_dense:
        return SparseStream._dense_form(stream._stored.reshape(-1), size)
    flat = SparseStream._sparse_form(flat_indices(stream.indices, columns, stream.size), stream.values.reshape(-1), size)
    flat._switch()
    return flat
