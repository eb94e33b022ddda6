"""The features of a batch, numbered while its step is worked out, for adaptive weights that rows change without a stream between."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear import kernels
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.kernels import adaptive as adaptive_kernels

__all__ = ["MOST_ENTRIES", "Numbered"]

Array = NDArray[Any]

#: Entries of rows that can be numbered.
MOST_ENTRIES = 2**31 - 1


class Numbered:
    """The features of some rows, with numbers in place of their norms until :meth:`descend` or :meth:`put_back`.

    An interrupt between two statements leaves a state that ``put_back`` ends: the kernels write down how many numbers there are.

    Parameters
    ----------
    v, norms : ndarray
        Weights and norms of all features.

    Attributes
    ----------
    rows : ndarray or None
        Of which the features are numbered.
    """

    def __init__(self, v: Array, norms: Array) -> None:
        self._v, self._norms = v, norms
        self._marks = norms.view(f"u{norms.itemsize}")
        self.rows: Array | None = None
        self._count = np.zeros(1, np.int64)
        self._starts, self._extents = np.empty(0, np.int64), np.empty(1, np.int64)
        self._reserve(0, np.dtype(np.uint32))

    def scores(self, dataset: Dataset, rows: Array) -> Array:
        """Number the features of some rows; returns the scores of these, float64, without intercept."""
        scores = np.empty(len(rows))
        given = dataset.indptr, dataset.indices, dataset.values, rows, self._v, self._marks
        adaptive_kernels.score_and_number(*given, *self._room(dataset, rows), scores)
        self.rows = rows
        return scores

    def descend(
        self, dataset: Dataset, coefficients: Array, rate: float, beta: float, noise: float, times: Array
    ) -> tuple[int, bool, float]:
        """A step by the sum of the rows, each times a coefficient: the entries that are not zero, whether all is finite, the largest."""
        given = dataset.indptr, dataset.values, self.rows, coefficients, self._v, self._norms
        numbered = self._places, self._free, self._held, self._numbers, self._count
        entries, finite, largest = adaptive_kernels.adaptive_descend_numbered(*given, *numbered, rate, beta, noise, times)
        self.rows = None
        return int(entries), bool(finite), float(largest)

    def put_back(self) -> None:
        """Put the norms in their places, if they are not there."""
        count = int(self._count[0])
        if count:
            self._marks[self._places[:count]] = self._kept[:count]
            self._count[0] = 0
        self.rows = None

    def warm_up(self, dataset: Dataset) -> None:
        """Compile what such samples need."""
        self.scores(dataset, np.empty(0, np.int64))
        self.descend(dataset, np.empty(0, self._v.dtype), 0.0, 0.0, 0.0, np.empty(0))

    def _room(self, dataset: Dataset, rows: Array) -> tuple[Array, ...]:
        """Room for the numbers of these rows."""
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
