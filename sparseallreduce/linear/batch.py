"""A batch in terms of the features that occur in it: few of the N, so that what is computed with them stays in the cache."""

from __future__ import annotations

from functools import cached_property
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.linear import kernels
from sparseallreduce.linear.dataset import Dataset, Rows
from sparseallreduce.linear.gradient import DenseGradient, ranges_of_like_work
from sparseallreduce.linear.team import Team
from sparseallreduce.linear.weights import Weights
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["CompactBatch"]

Array = NDArray[Any]

_FULL = 2  # non-zeros to a feature, at which random rows touch 0.86 of the features


class CompactBatch:
    """Rows of a data set as a small data set of their own, with only the features that occur in them, in order.

    Its scores need as many weights as it has features, and the sums of its gradient are the values of the sparse stream in order,
    where the indices of its features are the indices.

    Parameters
    ----------
    dataset, size, team
        As for :class:`~sparseallreduce.linear.gradient.DenseGradient`.
    buffers : int, optional
        How many gradients may be in use at once: a stream is valid until the rows of the batch so many gradients later are taken.

    Attributes
    ----------
    samples : Rows
        The rows that were taken last.
    features : ndarray
        Which of the features of the whole data set theirs are, increasing. Both valid until the next are taken.
    """

    samples: Rows
    features: Array

    def __init__(self, dataset: Dataset, size: int, team: Team, buffers: int = 1) -> None:
        self.dataset = dataset
        self.size = size
        self._team = team
        bounds = ranges_of_like_work(dataset, team.threads)
        self._starts = np.array(bounds[:-1], dataset.indices.dtype)
        # One a thread, of which the first gathers the marks of all.
        self._bitmaps = [kernels.bitmap(dataset.features) for _ in range(team.threads)]
        self._words, self._blocks = self._bitmaps[0]
        self._before = np.zeros(len(self._words), dataset.indices.dtype)
        self._entries = _Entries(dataset.indices.dtype, dataset.values.dtype)
        self._streams = cycle([_Entries(index_dtype(size), dataset.values.dtype) for _ in range(buffers)])
        self._stream = next(self._streams)
        self._offsets = np.zeros(1, np.int64)
        self._extent: tuple[Array, int] | None = None  # rows, and how many entries they have
        self._taken: Array | None = None
        self._all_count = True

    def take(self, rows: Array) -> None:
        """Make these rows the batch."""
        dataset, team = self.dataset, self._team
        nnz, offsets = self._measured(rows), self._offsets
        self._entries.reserve(nnz)
        # With room for the intercept, and what the kernel asks for.
        self._stream.reserve(min(nnz, dataset.features) + 3)
        indices, values, found = self._entries.indices[:nnz], self._entries.values[:nnz], self._stream.indices

        cuts = team.cuts(len(rows))

        def copy(part: int) -> None:
            mine = slice(cuts[part], cuts[part + 1])
            bitmap = self._bitmaps[part]
            kernels.take_rows(dataset.indptr, dataset.indices, dataset.values, rows[mine], offsets[mine], *bitmap, indices, values)

        team.each(copy)
        for words, blocks in self._bitmaps[1:]:
            kernels.move_marks(words, blocks, self._words, self._blocks)
        features = int(kernels.marked(self._words, self._blocks, self._before, found))
        team.share(cuts, lambda low, high: kernels.renumber(offsets[low : high + 1], indices, self._words, self._before))
        self.features = found[:features]
        kernels.unmark(self.features, self._words)
        self.samples = Rows.of(offsets, indices, values)
        self._taken = rows

    def scores(self, rows: Array, weights: Weights) -> Array:
        """The scores of these rows, float64 of shape (len(rows),); the same to the bit as ``weights.scores``."""
        self._extent = None  # which may be of the same array with other rows in it
        # Where some rows turn out not to count in the gradient, as with the hinge loss, only the others are taken, afterwards.
        if self._is_full(rows) or (not self._all_count and weights.current):
            return weights.scores(self.dataset, rows)
        self.take(rows)
        return weights.compact_scores(self.samples, self.features)

    def gradient(self, rows: Array, coefficients: Array) -> SparseStream:
        """The sum of ``coefficients[i]`` (of the values' dtype) times row ``rows[i]``: of exactly the entries of rows that count."""
        counted, factors = rows, coefficients
        self._all_count = np.count_nonzero(coefficients) == len(coefficients)
        if not self._all_count:
            counting = coefficients != 0
            counted, factors = rows[counting], coefficients[counting]
        if self._is_full(counted):
            full = SparseStream.from_dense(self._dense(rows, coefficients).copy())
            if full.is_dense:
                self._extent = None
                return full
        if self._taken is not counted:
            self.take(counted)
        stream, samples, touched = self._stream, self.samples, len(self.features)
        sums = stream.values[:touched]

        def add(low: int, high: int) -> None:
            sums[low:high].fill(0)
            kernels.compact_accumulate(*samples, factors, low, sums[low:high])

        self._team.share([*np.searchsorted(self.features, self._starts).tolist(), touched], add)
        if self.size > self.dataset.features and len(rows):
            stream.indices[touched] = self.dataset.features
            stream.values[touched] = coefficients.sum(dtype=np.float64)
            touched += 1
        gradient = SparseStream._sparse_form(stream.indices[:touched], stream.values[:touched], self.size)
        gradient._switch()
        self._stream = next(self._streams)
        self._taken = self._extent = None
        return gradient

    def _is_full(self, rows: Array) -> bool:
        """Whether to work with all features, since the rows are likely to touch most of them."""
        return self._measured(rows) >= _FULL * self.dataset.features

    def _measured(self, rows: Array) -> int:
        """How many entries the rows have; ``_offsets`` says where each begins when they stand one behind the other."""
        if self._extent is None or self._extent[0] is not rows:
            self._offsets = np.empty(len(rows) + 1, np.int64)
            self._extent = rows, int(kernels.extents(self.dataset.indptr, rows, self._offsets))
        return self._extent[1]

    @cached_property
    def _dense(self) -> DenseGradient:
        return DenseGradient(self.dataset, self.size, self._team)


class _Entries:
    """Indices and values, in arrays that are used again and grow."""

    def __init__(self, indices: DTypeLike, values: DTypeLike) -> None:
        self.indices = np.empty(0, indices)
        self.values = np.empty(0, values)

    def reserve(self, entries: int) -> None:
        """Room for so many, with some to spare for the next batch."""
        if entries > len(self.indices):
            room = entries + entries // 4
            self.indices = np.empty(room, self.indices.dtype)
            self.values = np.empty(room, self.values.dtype)
