"""The features that several ranks have, and the whole weight vector assembled from the ranks' parts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.dataset import read_only
from sparseallreduce.linear.kernels import feature_numbers
from sparseallreduce.linear.solvers.numbering import Numbering
from sparseallreduce.runtime.api import allreduce
from sparseallreduce.streams.stream import SparseStream

__all__ = ["SharedFeatures"]

Array = NDArray[Any]


class SharedFeatures:
    """The features that several ranks have, in slots with the same numbers on all ranks, the most frequent first.

    Creating an instance is collective, and arranges the rank's numbering.

    Parameters
    ----------
    numbering : Numbering
        Numbering of this rank's features.
    features : int
        Number of features, N.
    comm : communicator

    Attributes
    ----------
    features : ndarray
        The shared features in ascending order.
    slots : ndarray
        Slot of each of them.
    holders : ndarray
        Number of ranks that have the feature of each slot.
    """

    features: Array

    def __init__(self, numbering: Numbering, features: int, comm: Any) -> None:
        self._numbering, self._size, self._comm = numbering, features, comm
        self.features, holders, counts = numbering.features[:0], np.zeros(0, np.int32), numbering.counts[:0]
        if comm.size > 1:
            self.features, holders, counts = self._held_by_several()
        self.slots: Array = np.empty(len(counts), numbering.places.dtype)
        feature_numbers.order_by_count(counts, self.slots[:0], 0, self.slots)
        self.holders: Array = np.empty(len(counts), np.int32)
        self.holders[self.slots] = holders
        self._counts = counts
        self._counts = counts
        numbering.arrange(self.features, self.slots, comm.size == 1)

    def _held_by_several(self) -> tuple[Array, Array, Array]:
        """Return the features that several ranks have, and their numbers of ranks and occurrences. Collective."""
        numbering, ranks = self._numbering, int(self._comm.size)
        bits = 31 - ranks.bit_length()  # of the sum of occurrences; those above hold the number of ranks
        own = np.minimum(numbering.counts, ((1 << bits) - 1) // ranks, dtype=np.int32, casting="unsafe")
        own += np.int32(1 << bits)
        total = allreduce(SparseStream(numbering.features, own, self._size), self._comm)
        indices = np.empty(0, numbering.features.dtype) if total.is_dense else total.indices
        found = read_only(indices), read_only(_stored(total)), bits
        none = numbering.features[:0], np.empty(0, np.int32), numbering.counts[:0]
        count = feature_numbers.held_by_several(*found, *none)
        features, holders, counts = (np.empty(count, array.dtype) for array in none)
        feature_numbers.held_by_several(*found, features, holders, counts)
        return features, holders, counts

    def __len__(self) -> int:
        return len(self.features)

    def frequent(self, occurrences: float) -> int:
        """Return the number of the first slots whose features occur at least so many times, rounded up to a power of two.

        Occurrences are those in the samples that are counted, of all ranks; slots are ordered by the power of two below them.
        """
        return int(np.count_nonzero(self._counts >= 2 ** math.ceil(math.log2(max(1.0, occurrences)))))

    def assembled(self, shared: Array, own: Array, width: int = 1) -> Array:
        """Return the weights of all features, the same on every rank, of shape (features, width). Collective.

        Those of the intercept, if there is one, are an additional last row.

        Parameters
        ----------
        shared : ndarray
            Weights of all slots, followed by those of the intercept.
        own : ndarray
            Weights of this rank's positions.
        width : int
            Number of weights per feature, which are adjacent.
        """
        numbering = self._numbering
        shared, own = shared.reshape(-1, width), own.reshape(-1, width)
        whole = np.zeros((self._size + (numbering.intercept >= 0), width))
        if self._comm.size == 1:
            whole[numbering.features] = own[numbering.places]
            if numbering.intercept >= 0:
                whole[-1] = own[numbering.intercept]
            return whole
        private = numbering.places >= len(numbering.slots)
        values = own[numbering.places[private]]
        given = SparseStream(numbering.features[private], values[:, 0] if width == 1 else values, self._size)
        alone = allreduce(given, self._comm)
        if alone.is_dense:
            whole[: self._size] = alone.to_dense().reshape(-1, width)
        else:
            whole[alone.indices] = alone.values.reshape(-1, width)
        whole[self.features] = shared[self.slots]
        whole[self._size :] = shared[len(self.features) :]
        return whole


def _stored(total: SparseStream) -> Array:
    """Return the values of a sum at all of its positions if it is dense, otherwise those of its entries."""
    return total._stored if not total.is_dense or len(total._stored) == total.size else total.to_dense()
