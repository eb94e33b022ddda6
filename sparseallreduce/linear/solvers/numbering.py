"""Numbering of the features that occur on a rank: those shared with other ranks, and their positions among the rank's weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.kernels import feature_numbers as kernels
from sparseallreduce.streams.stream import index_dtype

__all__ = ["Numbering"]

Array = NDArray[Any]


class Numbering:
    """The features that occur in a rank's samples, with positions by descending number of occurrences.

    A feature that no sample of the rank has neither changes nor matters on it, so a rank stores only the weights of its own
    features. Of the 3.2 million features of a set of 40,000 web addresses, 0.4 million occur; of the 16.8 million trigrams of 1,600
    texts, 14,000. Features that several ranks have come first, in the order in which all ranks number them, so that the weights to sum are
    contiguous.

    The numbering is complete after :meth:`arrange`.

    Parameters
    ----------
    dataset : Dataset
    intercept : bool
        Whether there is an additional feature, of value one in every sample, which all ranks have.

    Attributes
    ----------
    features : ndarray
        The features that occur, in ascending order.
    counts : ndarray
        Number of non-zeros of each feature in a quarter of the samples, or in all of few samples.
    places : ndarray
        Position of each feature.
    indices : ndarray
        Position of the feature of each non-zero.
    size : int
        Number of positions, including that of the intercept.
    slots : ndarray
        Numbers common to all ranks, ascending, of the first positions: those of features that several ranks have, and of the intercept.
    intercept : int
        Position of the intercept, the last of these; or -1.
    """

    indices: Array
    places: Array
    slots: Array
    intercept: int

    def __init__(self, dataset: Dataset, intercept: bool) -> None:
        begin, end = int(dataset.indptr[0]), int(dataset.indptr[-1])
        self._words = np.zeros(-(-dataset.features // 64), np.uint64)
        self._before = np.empty(len(self._words), np.int64)
        occurring = kernels.mark(dataset.indices, begin, end, self._words)
        self.features: Array = np.empty(occurring, dataset.indices.dtype)
        kernels.marked(self._words, self._before, self.features)
        numbers = index_dtype(occurring)
        self.indices, self.places = np.empty(end - begin, numbers), np.empty(occurring, numbers)
        self.counts: Array = np.zeros(occurring, index_dtype(end - begin + 1))
        kernels.number(dataset.indices, begin, end, self._words, self._before, self.indices)
        kernels.count_some(self.indices, self.counts)
        self._with_intercept = intercept
        self.size: Any = occurring + intercept
        self.slots, self.intercept = np.zeros(0, np.int64), -1

    def arrange(self, shared: Array, slots: Array, alone: bool) -> None:
        """Assign every feature its position. Called once.

        Parameters
        ----------
        shared : ndarray
            Features that several ranks have, in ascending order.
        slots : ndarray
            Number of each of them, common to all ranks. The intercept has the next number.
        alone : bool
            Whether there is only one rank, which shares neither features nor the intercept.
        """
        own, numbers = np.empty(len(shared), self.places.dtype), np.empty(len(shared), self.places.dtype)
        count = 0 if alone else kernels.common(shared, slots, self._words, self._before, own, numbers)
        own, numbers = own[:count], numbers[:count]
        first = count + self._with_intercept
        kernels.order_by_count(self.counts, numbers, first, self.places)
        held = np.zeros(0 if alone else len(shared) + self._with_intercept, bool)
        held[own], held[len(shared) :] = True, True
        self.slots = np.flatnonzero(held)
        self.places[numbers] = own if count == len(shared) else (np.cumsum(held) - 1)[own]
        kernels.renumber(self.indices, self.places)
        self.intercept = count if self._with_intercept else -1
        del self._words, self._before
