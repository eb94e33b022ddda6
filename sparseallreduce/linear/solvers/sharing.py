"""Which features several ranks have, and the whole vector of weights that the ranks' parts make up."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels import feature_numbers
from sparseallreduce.linear.solvers.numbering import Numbering
from sparseallreduce.runtime.api import allreduce
from sparseallreduce.streams.stream import SparseStream

__all__ = ["SharedFeatures"]

Array = NDArray[Any]

_ONE_RANK = 1 << 40  # added to how often a rank has a feature: the sum tells how many ranks have it, and how often


class SharedFeatures:
    """The features that occur at several ranks, in slots that have the same numbers on all of them, the most frequent first.

    Making it is collective, and arranges the rank's numbering.

    Parameters
    ----------
    numbering : Numbering
        Of this rank's features.
    features : int
        Dimension N.
    comm : communicator

    Attributes
    ----------
    features : ndarray
        In increasing order.
    slots : ndarray
        Of each of them.
    """

    def __init__(self, numbering: Numbering, features: int, comm: Any) -> None:
        self._numbering, self._size, self._comm = numbering, features, comm
        self.features, counts = numbering.features[:0], np.zeros(0, np.int64)
        if comm.size > 1:
            occurring = allreduce(SparseStream(numbering.features, numbering.counts + _ONE_RANK, features), comm)
            several = np.flatnonzero(occurring.values >= 2 * _ONE_RANK)
            self.features = np.ascontiguousarray(occurring.indices[several], numbering.features.dtype)
            counts = occurring.values[several] % _ONE_RANK
        self.slots = np.empty(len(counts), numbering.places.dtype)
        feature_numbers.order_by_count(counts, self.slots[:0], 0, self.slots)
        numbering.arrange(self.features, self.slots.astype(np.int64), comm.size == 1)

    def __len__(self) -> int:
        return len(self.features)

    def assembled(self, shared: Array, own: Array) -> Array:
        """Return the whole vector of weights, the same on every rank; the intercept last if there is one. Collective.

        Parameters
        ----------
        shared : ndarray
            The weights of all slots, and behind them that of the intercept.
        own : ndarray
            The weights of this rank's places.
        """
        numbering = self._numbering
        whole = np.zeros(self._size + (numbering.intercept >= 0))
        if self._comm.size == 1:
            whole[numbering.features] = own[numbering.places]
            if numbering.intercept >= 0:
                whole[-1] = own[numbering.intercept]
            return whole
        private = numbering.places >= len(numbering.slots)
        alone = allreduce(SparseStream(numbering.features[private], own[numbering.places[private]], self._size), self._comm)
        whole[alone.indices] = alone.values
        whole[self.features] = shared[self.slots]
        whole[self._size :] = shared[len(self.features) :]
        return whole
