"""Batches restricted to the few of the N features that occur in them, so that the arrays of a step fit the cache.

If a batch of long rows touches a large fraction of the features, its rows are instead read in place, in bands of features.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate, cycle
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.linear import kernels
from sparseallreduce.linear.data.dataset import Dataset, Rows, read_only
from sparseallreduce.linear.gradients.dense import DenseGradient, ranges_of_like_work
from sparseallreduce.linear.weights import Weights
from sparseallreduce.runtime.threads import Threads
from sparseallreduce.streams.stream import SparseStream, index_dtype, switch_point

__all__ = ["CompactBatch", "Room"]

Array = NDArray[Any]

_LONG = 1024  # mean number of entries per row from which values are not copied
_FULL = 2  # non-zeros per feature, at which random rows touch 0.86 of the features


class CompactBatch:
    """Rows of a data set, renumbered to the features that occur in them.

    Scores need one weight per feature that occurs, and the sums of the gradient are the values of the sparse stream, in the order of the
    features. Rows that are as fast to read in place are not copied.

    Parameters
    ----------
    dataset, size, threads
        As for :class:`~sparseallreduce.linear.gradients.dense.DenseGradient`.
    buffers : int, optional
        Number of gradients in use at the same time: a stream stays valid until the rows of the batch that many gradients later are copied.

    Attributes
    ----------
    samples : Rows
        The rows copied last.
    features : ndarray
        Their features in the data set, ascending. Both attributes are valid until the next rows are copied.
    """

    samples: Rows
    features: Array

    def __init__(self, dataset: Dataset, size: int, threads: Threads, buffers: int = 1, columns: int | None = None) -> None:
        self.dataset: Dataset = dataset
        self.size = size
        self._columns = columns
        self._threads = threads
        self._bounds = ranges_of_like_work(dataset, threads.count)
        self._starts = np.array(self._bounds[:-1], dataset.indices.dtype)
        # One per thread; the first collects the marks of all threads.
        self._bitmaps = [kernels.bitmap(dataset.features) for _ in range(threads.count)]
        self._words, self._blocks = self._bitmaps[0]
        self._before = np.zeros(len(self._words), dataset.indices.dtype)
        self._indices, self._values = Room(dataset.indices.dtype), Room(dataset.values.dtype)
        self._streams = cycle(self._stream_rooms(buffers))
        self._stream = next(self._streams)
        self._parts = self._stream_rooms(threads.count if threads.count > 1 else 0)  # each thread's part of a stream
        # The start of each row in the data set, and in the batch.
        self._places, self._offsets = Room(np.int64), Room(np.int64)
        self._extent: tuple[Array, int] | None = None  # rows, and their number of entries
        self._taken: Array | None = None
        self._all_count = True
        self._limit = switch_point(size, dataset.values.dtype, size)

    def renew(self, dataset: Dataset) -> None:
        """Continue with other samples that have the same number of features and dtype. Earlier streams become invalid."""
        self.dataset = dataset
        self._bounds = ranges_of_like_work(dataset, self._threads.count)
        self._starts = np.array(self._bounds[:-1], dataset.indices.dtype)
        self._extent = self._taken = None
        self._all_count = True
        self.__dict__.pop("_dense", None)

    def take(self, rows: Array) -> None:
        """Copy these rows into the batch."""
        nnz, count, (found, sums) = self._measured(rows), len(rows), self._stream
        copied = 0 if nnz >= _LONG * count else nnz
        self._indices.reserve(nnz)
        self._values.reserve(copied)
        for room in (found, sums):
            room.reserve(min(nnz, self.dataset.features) + kernels.ROOM)  # includes the intercept
        given = self.dataset.indices, self.dataset.values, self._places.array[:count], self._offsets.array[: count + 1]
        entries = self._indices.array[:nnz], self._values.array[:copied]
        if self._threads.count == 1:
            touched = int(kernels.compact(*given, self._words, self._blocks, self._before, *entries, found.array))
        else:
            touched = self._compact_together(*given, *entries, found.array)
        self.features = found.array[:touched]
        offsets, indices = self._offsets.read[: count + 1], self._indices.read[:nnz]
        if copied:
            self.samples = Rows(offsets, indices, self._values.read[:copied], offsets[:count])
        else:
            self.samples = Rows(offsets, indices, self.dataset.values, self._places.read[:count])
        self._taken = rows

    def _compact_together(
        self, dataset_indices: Array, dataset_values: Array, places: Array, offsets: Array, indices: Array, values: Array, found: Array
    ) -> int:
        """Compute the same as :func:`kernels.compact` with several threads."""
        threads, cuts = self._threads, self._threads.cuts(len(places))

        def copy(part: int) -> None:
            low, high = cuts[part], cuts[part + 1]
            mine = places[low:high], offsets[low : high + 1]
            kernels.take_rows(dataset_indices, dataset_values, *mine, *self._bitmaps[part], indices, values)

        threads.each(copy)
        for words, blocks in self._bitmaps[1:]:
            kernels.move_marks(words, blocks, self._words, self._blocks)
        count = int(kernels.marked(self._words, self._blocks, self._before, found))
        threads.share(cuts, lambda low, high: kernels.renumber(offsets[low : high + 1], indices, self._words, self._before))
        kernels.unmark(found[:count], self._words)
        return count

    def scores(self, rows: Array, weights: Weights) -> Array:
        """Return the scores of these rows, float64 of shape (len(rows),), bitwise identical to ``weights.scores``."""
        self._extent = None  # the caller may have changed the array of rows in place
        if self._is_full(rows):
            return weights.scores(self.dataset, rows)
        # If some rows are expected to have zero coefficients, as with the hinge loss, `gradient` copies only the others.
        if weights.current and (self._width(rows) or not self._all_count):
            return weights.scores(self.dataset, rows)
        self.take(rows)
        return weights.compact_scores(self.samples, self.features)

    def gradient(self, rows: Array, coefficients: Array) -> SparseStream:
        """Return the sum of ``coefficients[i]`` times row ``rows[i]``, with the entries of all rows whose coefficient is not 0.

        Coefficients have the dtype of the values.
        """
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
        if self._taken is not counted and (width := self._width(counted)):
            touched = self._collected(counted, factors, width)
        else:
            touched = self._accumulated(counted, factors)
        indices, values = self._stream
        if self.size > self.dataset.features and len(rows):
            indices.array[touched] = self.dataset.features
            values.array[touched] = coefficients.sum(dtype=np.float64)
            touched += 1
        gradient = SparseStream._sparse_form(indices.array[:touched], values.array[:touched], self.size)
        if touched > self._limit:
            gradient._switch()
        self._stream = next(self._streams)
        self._taken = self._extent = None
        return gradient

    def _accumulated(self, rows: Array, factors: Array) -> int:
        """Copy these rows if needed, write features and sums to the stream, and return their number."""
        if self._taken is not rows:
            self.take(rows)
        samples, touched = self.samples, len(self.features)
        sums = self._stream[1].array[:touched]

        def add(low: int, high: int) -> None:
            sums[low:high].fill(0)
            kernels.compact_accumulate(*samples, factors, low, sums[low:high])

        starts = [0] if self._threads.count == 1 else np.searchsorted(self.features, self._starts).tolist()
        self._threads.share([*starts, touched], add)
        return touched

    def _collected(self, rows: Array, factors: Array, width: int) -> int:
        """Compute the same as :meth:`_accumulated` on the rows in place, in bands of ``width`` features."""
        nnz, dataset, stream, bounds = self._measured(rows), self.dataset, self._stream, self._bounds
        given = dataset.indices, dataset.values, self._places.array[: len(rows)], self._offsets.array[: len(rows) + 1], factors
        rooms = self._parts or [stream]

        def collect(part: int) -> int:
            low, high = bounds[part], bounds[part + 1]
            indices, values = rooms[part]
            for room in (indices, values):
                room.reserve(min(nnz, high - low) + kernels.ROOM)  # includes the intercept
            return int(kernels.collect(*given, low, high, width, indices.array, values.array))

        ends = [0, *accumulate(self._threads.each(collect))]
        if self._parts:
            for room in stream:
                room.reserve(ends[-1] + 1)

            def join(part: int) -> None:
                for room, mine in zip(stream, rooms[part], strict=True):
                    room.array[ends[part] : ends[part + 1]] = mine.array[: ends[part + 1] - ends[part]]

            self._threads.each(join)
        return ends[-1]

    def _width(self, rows: Array) -> int:
        """Return the number of features per band for reading the rows in place, or 0 if copying them is faster."""
        return kernels.width_in_place(self._measured(rows), len(rows), self.dataset.features, self.dataset.values.itemsize)

    def _stream_rooms(self, count: int) -> list[tuple[Room, Room]]:
        """Return buffers for the indices and values of ``count`` streams."""
        return [(Room(index_dtype(self.size)), Room(self.dataset.values.dtype)) for _ in range(count)]

    def _is_full(self, rows: Array) -> bool:
        """Return True if the rows are likely to touch most features, so that dense arrays are faster."""
        return self._measured(rows) >= _FULL * self.dataset.features

    def _measured(self, rows: Array) -> int:
        """Return the number of entries of the rows. Set ``_places`` and ``_offsets`` to the start of each."""
        if self._extent is None or self._extent[0] is not rows:
            for room in (self._places, self._offsets):
                room.reserve(len(rows) + 1)
            self._extent = rows, int(kernels.extents(self.dataset.indptr, rows, self._places.array, self._offsets.array))
        return self._extent[1]

    @cached_property
    def _dense(self) -> DenseGradient:
        return DenseGradient(self.dataset, self.size, self._threads, columns=self._columns)


class Room:
    """A reusable array that grows on demand, with a read-only view of it, as creating views takes time."""

    def __init__(self, dtype: DTypeLike) -> None:
        self._allocate(0, dtype)

    def _allocate(self, entries: int, dtype: DTypeLike) -> None:
        self.array: Array = np.empty(entries, dtype)
        self.read: Array = read_only(self.array)

    def reserve(self, entries: int) -> None:
        """Grow the array to hold at least this many entries, with some to spare for the next batch."""
        if entries > len(self.array):
            self._allocate(entries + entries // 4, self.array.dtype)
