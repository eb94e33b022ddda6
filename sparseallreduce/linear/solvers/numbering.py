"""Which features occur at a rank, which of them at others too, and their places among the rank's weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.kernels import dual as kernels
from sparseallreduce.streams.stream import index_dtype

__all__ = ["Numbering"]

Array = NDArray[Any]


class Numbering:
    """The features that occur in a rank's samples, in places by how often they do, the most frequent first.

    A feature that no sample of the rank has cannot change by them, nor matter to them: so a rank's weights are those of its own
    features alone. Of the 3.2 million of a set of 40,000 web addresses, 0.4 million occur; of the 16.8 million trigrams of 1,600
    texts, 14,000.

    Parameters
    ----------
    dataset : Dataset
    intercept : bool
        Whether there is one more feature, of value one in every sample; it has the last place.

    Attributes
    ----------
    features : ndarray
        Those that occur, in increasing order.
    places : ndarray
        Of each of them.
    indices : ndarray
        Of all non-zeros, the place of their feature.
    size : int
        Places, that of the intercept included.
    intercept : int
        The place of the intercept, or -1.
    slots, shared : ndarray
        After :meth:`share`: which of the features that several ranks have are here, by their number among those, and their places.
    private : ndarray
        The places of the others.
    """

    def __init__(self, dataset: Dataset, intercept: bool) -> None:
        begin, end = int(dataset.indptr[0]), int(dataset.indptr[-1])
        self._words = np.zeros(-(-dataset.features // 64), np.uint64)
        self._before = np.empty(len(self._words), np.int64)
        kernels.mark(dataset.indices, begin, end, self._words)
        occurring = kernels.count_marked(self._words)
        self.features = np.empty(occurring, dataset.indices.dtype)
        kernels.marked(self._words, self._before, self.features)
        numbers = index_dtype(occurring)
        self.indices, self.places = np.empty(end - begin, numbers), np.empty(occurring, numbers)
        counts = np.zeros(occurring, np.int64)
        kernels.count_and_renumber(dataset.indices, begin, end, self._words, self._before, self.indices, counts)
        kernels.order_by_count(counts, self.places)
        kernels.renumber(self.indices, self.places)
        self.intercept = occurring if intercept else -1
        self.size = occurring + intercept
        self.share(self.features[:0], False)

    def share(self, shared: Array, with_intercept: bool = True) -> None:
        """Tell which features, in increasing order, occur at several ranks; those and the intercept are numbered in this order."""
        slots, places = np.empty(len(shared) + 1, np.int64), np.empty(len(shared) + 1, np.int64)
        count = kernels.common(shared, self._words, self._before, self.places, slots, places)
        if with_intercept and self.intercept >= 0:
            slots[count], places[count] = len(shared), self.intercept
            count += 1
        self.slots, self.shared = slots[:count].copy(), places[:count].copy()
        private = np.ones(self.size, bool)
        private[self.shared] = False
        self.private = np.flatnonzero(private)

    def forget(self) -> None:
        """Free what only :meth:`share` needs."""
        del self._words, self._before
