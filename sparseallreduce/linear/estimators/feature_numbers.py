"""Numbering of the features that an estimator has weights for; features of later calls get the next numbers."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.occurring import occurring_in, spread
from sparseallreduce.linear.kernels import feature_table as kernels
from sparseallreduce.linear.model_file import FittedModel, is_sparse
from sparseallreduce.runtime.api import allreduce
from sparseallreduce.runtime.objects import agreed, gather
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["FeatureNumbers", "resized", "room_for", "spread_of", "weighed"]

Array = NDArray[Any]

_LEAST_ROOM = 1 << 10


class FeatureNumbers:
    """A list of features, in which the position of a feature is its number.

    A call extends it by its new features, and settles it after success; additions of a call that failed are removed.

    Parameters
    ----------
    features : ndarray
        Distinct features.
    size : int
        Number of all features, N, including those without a number.

    Examples
    --------
    >>> numbers = FeatureNumbers(np.uint32([7, 90]), 100)
    >>> numbers.extend(np.uint32([3]))
    >>> numbers.of(np.uint32([90, 3, 4])), numbers.features
    (array([1, 2, 3]), array([ 7, 90,  3], dtype=uint32))
    """

    def __init__(self, features: Array, size: int) -> None:
        self.size = size
        self._list = features
        self._count = self._settled = len(features)
        self._checksum = _checksum(features, 0)
        self._table: Array | None = None  # hash table, created when it is first needed
        self._shift = 0

    def __len__(self) -> int:
        return self._count

    @property
    def features(self) -> Array:
        """The features by number."""
        return self._list[: self._count]

    def of(self, indices: Array) -> Array:
        """Return the number of each feature, int64, or the length of this list for a feature without a number."""
        numbers = np.empty(len(indices), np.int64)
        kernels.look_up(np.ascontiguousarray(indices), self._list, self._whole_table(), self._shift, self._count, numbers)
        return numbers

    def extend(self, features: Array) -> None:
        """Append distinct features that have no number yet."""
        first, end = self._count, self._count + len(features)
        if end > len(self._list):
            grown = np.empty(room_for(end), self._list.dtype)
            grown[:first] = self._list[:first]
            self._list = grown
        self._list[first:end] = features
        self._count = end
        if self._table is not None and 2 * end <= len(self._table):
            kernels.enter(self._list, first, end, self._table, self._shift)
        else:
            self._table = None

    def settle(self) -> None:
        """Keep the additions."""
        self._checksum = _checksum(self._list[self._settled : self._count], self._checksum)
        self._settled = self._count

    def forget(self) -> None:
        """Remove the additions since the list was last settled."""
        if self._count != self._settled:
            self._table = None
            self._count = self._settled

    def add_missing(self, dataset: Dataset, weighed: Array, comm: Any) -> None:
        """Append the features without a number of all ranks' samples, and of this rank's ``weighed`` ones. Collective."""
        own = agreed(comm, lambda: self._unknown(dataset, weighed))
        if comm.size > 1:
            if not any(gather(comm, len(own))):
                return
            total = allreduce(SparseStream(own, np.ones(len(own), np.int32), self.size), comm)
            own = np.flatnonzero(total.to_dense()) if total.is_dense else total.indices
        self.extend(own)

    def _unknown(self, dataset: Dataset, weighed: Array) -> Array:
        """Return the features without a number that occur in samples or are ``weighed``, ascending."""
        found = occurring_in(dataset)
        if len(weighed):
            found = np.union1d(found, weighed.astype(found.dtype))
        return np.asarray(found[self.of(found) == self._count])

    def renumbered(self, dataset: Dataset, room: int) -> Dataset:
        """Return samples with numbers instead of their features, which must all have one, and ``room`` as the number of features."""
        begin, end = int(dataset.indptr[0]), int(dataset.indptr[-1])
        numbers = self.of(dataset.indices[begin:end])
        rows = csr_array((dataset.values[begin:end].copy(), numbers, dataset.indptr - begin), shape=(dataset.rows, room))
        rows.sort_indices()
        indptr, indices = rows.indptr.astype(np.int64, copy=False), rows.indices.astype(index_dtype(room))
        return replace(dataset, indptr=indptr, indices=indices, values=rows.data, features=room, dimension=self.size)

    def checksum(self) -> int:
        """Return a checksum of the settled list."""
        return self._checksum

    def _whole_table(self) -> Array:
        """Return the hash table of all features."""
        if self._table is None:
            bits = max(4, (4 * max(1, self._count) - 1).bit_length())
            table, self._shift = np.full(1 << bits, -1, np.int64), 64 - bits
            kernels.enter(self._list, 0, self._count, table, self._shift)
            self._table = table
        return self._table

    def __getstate__(self) -> dict[str, Any]:
        # Copies do not include additions of a call that is running or has failed.
        return {"size": self.size, "features": self._list[: self._settled].copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["features"], state["size"])  # type: ignore[misc]


def spread_of(model: FittedModel, numbers: FeatureNumbers | None, nonzeros: int) -> FittedModel:
    """Return a model with weights by feature numbers as one with the weights of all features, sparse if that saves memory."""
    if numbers is None:
        return model
    count = min(len(numbers), model.n_features)  # weights may have spare entries, and a call may have added features since
    return replace(model, weights=spread(model.weights[..., :count], numbers.features[:count], numbers.size, nonzeros))


def weighed(weights: Any) -> Array:
    """Return the features, ascending, with a non-zero weight in an array of shape (n_features,) or (K, n_features)."""
    if is_sparse(weights):
        return np.unique(weights.indices[weights.data != 0])
    return np.flatnonzero((np.atleast_2d(weights) != 0).any(axis=0))


def _checksum(features: Array, before: int) -> int:
    return zlib.crc32(np.ascontiguousarray(features).data, before)


def room_for(count: int) -> int:
    """Return the number of weights to allocate for ``count`` features, with room for more: a power of two."""
    return max(_LEAST_ROOM, 1 << max(0, count - 1).bit_length())


def resized(array: Array, length: int) -> Array:
    """Return an array cut, or extended by zeros, to a length; the array itself if it has that length.

    >>> resized(np.array([1, 2]), 3)
    array([1, 2, 0])
    """
    if len(array) == length:
        return array
    new = np.zeros(length, array.dtype)
    new[: min(len(array), length)] = array[:length]
    return new
