"""A batch in terms of the features that occur in it: few of the N, so that what is computed with them stays in the cache."""

from __future__ import annotations

from functools import cached_property
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.linear import kernels
from sparseallreduce.linear.dataset import Dataset, Rows, read_only
from sparseallreduce.linear.gradient import DenseGradient, ranges_of_like_work
from sparseallreduce.linear.team import Team
from sparseallreduce.linear.weights import Weights
from sparseallreduce.streams.stream import SparseStream, index_dtype, switch_point

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
        self._read_offsets = read_only(self._offsets)
        self._extent: tuple[Array, int] | None = None  # rows, and how many entries they have
        self._taken: Array | None = None
        self._all_count = True
        self._limit = switch_point(size, dataset.values.dtype, size)

    def take(self, rows: Array) -> None:
        """Make these rows the batch."""
        nnz, offsets, entries, found = self._measured(rows), self._offsets, self._entries, self._stream
        entries.reserve(nnz)
        found.reserve(min(nnz, self.dataset.features) + 3)  # with room for the intercept, and what the kernel asks for
        if self._team.threads == 1:
            given = self.dataset.indptr, self.dataset.indices, self.dataset.values, rows, offsets
            marks = self._words, self._blocks, self._before
            count = int(kernels.compact(*given, *marks, entries.indices, entries.values, found.indices))
        else:
            count = self._compact_together(rows, nnz)
        self.features = found.indices[:count]
        self.samples = Rows(self._read_offsets, entries.read_indices[:nnz], entries.read_values[:nnz])
        self._taken = rows

    def _compact_together(self, rows: Array, nnz: int) -> int:
        """As :func:`kernels.compact`, by several threads."""
        dataset, team, offsets, found = self.dataset, self._team, self._offsets, self._stream.indices
        indices, values = self._entries.indices[:nnz], self._entries.values[:nnz]
        cuts = team.cuts(len(rows))

        def copy(part: int) -> None:
            low, high = cuts[part], cuts[part + 1]
            mine, ends = rows[low:high], offsets[low : high + 1]
            kernels.take_rows(dataset.indptr, dataset.indices, dataset.values, mine, ends, *self._bitmaps[part], indices, values)

        team.each(copy)
        for words, blocks in self._bitmaps[1:]:
            kernels.move_marks(words, blocks, self._words, self._blocks)
        count = int(kernels.marked(self._words, self._blocks, self._before, found))
        team.share(cuts, lambda low, high: kernels.renumber(offsets[low : high + 1], indices, self._words, self._before))
        kernels.unmark(found[:count], self._words)
        return count

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
        self._all_count = bool(coefficients.all())
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

        starts = [0] if self._team.threads == 1 else np.searchsorted(self.features, self._starts).tolist()
        self._team.share([*starts, touched], add)
        if self.size > self.dataset.features and len(rows):
            stream.indices[touched] = self.dataset.features
            stream.values[touched] = coefficients.sum(dtype=np.float64)
            touched += 1
        gradient = SparseStream._sparse_form(stream.indices[:touched], stream.values[:touched], self.size)
        if touched > self._limit:
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
            if len(self._offsets) != len(rows) + 1:
                self._offsets = np.empty(len(rows) + 1, np.int64)
                self._read_offsets = read_only(self._offsets)
            self._extent = rows, int(kernels.extents(self.dataset.indptr, rows, self._offsets))
        return self._extent[1]

    @cached_property
    def _dense(self) -> DenseGradient:
        return DenseGradient(self.dataset, self.size, self._team)


class _Entries:
    """Indices and values, in arrays that are used again and grow; and read-only views of both, since making one takes its time."""

    def __init__(self, indices: DTypeLike, values: DTypeLike) -> None:
        self._allocate(0, indices, values)

    def _allocate(self, room: int, indices: DTypeLike, values: DTypeLike) -> None:
        self.indices, self.values = np.empty(room, indices), np.empty(room, values)
        self.read_indices, self.read_values = read_only(self.indices), read_only(self.values)

    def reserve(self, entries: int) -> None:
        """Room for so many, with some to spare for the next batch."""
        if entries > len(self.indices):
            self._allocate(entries + entries // 4, self.indices.dtype, self.values.dtype)
