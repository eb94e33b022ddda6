"""Numbering of a batch's features during a step, for adaptive weights that rows update without a gradient stream."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear import kernels
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.kernels import adaptive as adaptive_kernels

__all__ = ["MOST_ENTRIES", "Numbered"]

Array = NDArray[Any]

#: Largest number of entries of rows that can be numbered.
MOST_ENTRIES = 2**31 - 1


class Numbered:
    """The features of some rows, with numbers stored instead of their norms until :meth:`descend` or :meth:`put_back`.

    After an interrupt at any point ``put_back`` restores the norms, because the kernels record how many numbers there are.

    Parameters
    ----------
    v, norms : ndarray
        Weights and norms of all features.

    Attributes
    ----------
    rows : ndarray or None
        The rows whose features are numbered.
    """

    def __init__(self, v: Array, norms: Array) -> None:
        self._v, self._norms = v, norms
        self._marks = norms.view(f"u{norms.itemsize}")
        self.rows: Array | None = None
        self._count = np.zeros(1, np.int64)
        self._starts, self._extents = np.empty(0, np.int64), np.empty(1, np.int64)
        self._reserve(0, np.dtype(np.uint32))

    def scores(self, dataset: Dataset, rows: Array) -> Array:
        """Assign numbers to the features of some rows; return the scores of the rows, float64, without intercept."""
        scores = np.empty(len(rows))
        given = dataset.indptr, dataset.indices, dataset.values, rows, self._v, self._marks
        adaptive_kernels.score_and_number(*given, *self._room(dataset, rows), scores)
        self.rows = rows
        return scores

    def descend(
        self, dataset: Dataset, coefficients: Array, rate: float, beta: float, noise: float, times: Array
    ) -> tuple[int, bool, float]:
        """Take a step by the sum of the rows, each times a coefficient.

        Returns the number of non-zero entries, whether all is finite, and the largest magnitude.
        """
        given = dataset.indptr, dataset.values, self.rows, coefficients, self._v, self._norms
        numbered = self._places, self._free, self._held, self._numbers, self._count
        entries, finite, largest = adaptive_kernels.adaptive_descend_numbered(*given, *numbered, rate, beta, noise, times)
        self.rows = None
        return int(entries), bool(finite), float(largest)

    def put_back(self) -> None:
        """Restore the norms, if numbers are stored in their place."""
        count = int(self._count[0])
        if count:
            self._marks[self._places[:count]] = self._kept[:count]
            self._count[0] = 0
        self.rows = None

    def warm_up(self, dataset: Dataset) -> None:
        """Compile the loops for such samples."""
        self.scores(dataset, np.empty(0, np.int64))
        self.descend(dataset, np.empty(0, self._v.dtype), 0.0, 0.0, 0.0, np.empty(0))

    def _room(self, dataset: Dataset, rows: Array) -> tuple[Array, ...]:
        """Return buffers for the numbers of these rows."""
        self.put_back()
        if len(rows) >= len(self._extents):
            self._starts, self._extents = np.empty(2 * len(rows), np.int64), np.empty(2 * len(rows) + 1, np.int64)
        entries = int(kernels.extents(dataset.indptr, rows, self._starts, self._extents))
        if entries > len(self._numbers) or self._places.dtype != dataset.indices.dtype:
            self._reserve(entries + entries // 4, dataset.indices.dtype)
        return self._places, self._free, self._kept, self._numbers, self._count

    def _reserve(self, entries: int, indices: np.dtype[Any]) -> None:
        self._places, self._free = np.empty(entries, indices), np.empty(entries, self._v.dtype)
        self._kept, self._numbers = np.empty(entries, self._marks.dtype), np.empty(entries, np.uint32)
        self._held = self._kept.view(self._norms.dtype)
