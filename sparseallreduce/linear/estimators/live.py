"""Weights that calls of ``partial_fit`` update in place, so that a call costs what its samples cost."""

from __future__ import annotations

import os
import zlib
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.feature_scaling import feature_scales, raised, scaled_by_entry
from sparseallreduce.linear.estimators.feature_numbers import resized
from sparseallreduce.linear.estimators.packing import packed_all, unpacked_all
from sparseallreduce.linear.estimators.progress import Progress
from sparseallreduce.linear.model_file import FittedModel, fitted, is_sparse
from sparseallreduce.linear.models import LinearModel
from sparseallreduce.linear.strategies import SparseStrategy
from sparseallreduce.linear.weights import Descent, Weights, new_weights
from sparseallreduce.runtime.objects import agreed, gather

__all__ = ["Live", "checksum", "new_token"]

Array = NDArray[Any]


class Live:
    """The state that calls of ``partial_fit`` change, except the magnitudes of features, which the estimator keeps.

    A call records its changes in a journal, and keeps or undoes them. Pickles and copies hold the exact state, without strategy and
    communicator.

    Parameters
    ----------
    weights : Weights
        Weights of the scaled features.
    model : LinearModel
        Model that the weights belong to.
    scaled : bool
        Whether features are divided by the powers of two at or above their magnitudes.

    Attributes
    ----------
    strategy : SparseStrategy or None
        Strategy that updates the weights; it has no samples between two calls.
    token : bytes
        Unique identifier of the state after the last call, the same on all ranks that made the call together.
    passes, schedule, rates
        As in :class:`~sparseallreduce.linear.estimators.progress.Progress`.
    intercept : ndarray
        Intercept as users have read it.
    seen : int or None
        Checksum of the weights as users have read them; None if they have not.
    """

    def __init__(self, weights: Weights, model: LinearModel, scaled: bool, strategy: SparseStrategy | None = None) -> None:
        self.weights: Weights = weights
        self.model = model
        self.scaled = scaled
        self.strategy = strategy
        self.token: bytes = b""
        self.passes = 0
        self.schedule: dict[str, float] = {}
        self.rates = ""
        self.intercept: Array = np.zeros(0)
        self.seen: int | None = None
        self.failed: bool = False  # whether changes of a call that failed may still have to be undone
        self._raised: list[tuple[Array, Array]] = []  # features whose magnitudes the call has changed, and the old magnitudes

    def fits(self, descent: Descent, features: int, dtype: DTypeLike, scaled: bool) -> bool:
        """Return True if the weights have this descent, number of features, dtype and scaling."""
        weights = self.weights
        return weights.descent == descent and weights.features == features and weights.unscaled.dtype == dtype and self.scaled == scaled

    def make_room(self, features: int) -> None:
        """Change the number of weights; the first ones are kept, and new ones are zero."""
        weights = self.weights
        if features == weights.features:
            return
        width = weights.descent.width
        state = {
            name: resized(value, features * width) if isinstance(value, np.ndarray) else value for name, value in weights.state().items()
        }
        wider = new_weights(features + weights.descent.intercept, weights.descent, weights.unscaled.dtype)
        wider.restore(state)
        self.weights, self.strategy = wider, None

    def fitted(self, magnitudes: Array | None, classes: Array, features: Array | None = None) -> FittedModel:
        """Return the model, or its part for some features, in any order and with duplicates."""
        weights = self.weights
        if features is None:
            learned = weights.to_array()[: weights.features]
        else:
            learned = weights.learned_at(features)
        if magnitudes is not None and self.scaled:
            learned = (learned.T / feature_scales(magnitudes if features is None else magnitudes[features])).T
        intercept = np.asarray(weights.learned_intercept, weights.unscaled.dtype).astype(np.float64)
        return fitted(self.model, learned, intercept, classes)

    def conditioned(self, dataset: Dataset, magnitudes: Array | None, comm: Any) -> Dataset:
        """Return the samples with scaled features, after adapting magnitudes and weights to them. Collective."""
        if magnitudes is None or not self.scaled:
            return dataset
        features, largest = raised(dataset, magnitudes, comm)

        def stretch() -> Dataset:
            before = magnitudes[features]
            self._raised.append((features, before))
            factors = feature_scales(largest) / feature_scales(before)
            changed = factors != 1
            if changed.any():
                self.weights.stretch(features[changed], factors[changed])
            magnitudes[features] = largest
            return scaled_by_entry(dataset, magnitudes)

        return agreed(comm, stretch)

    def begin(self) -> None:
        """Start to record the changes of a call."""
        self._raised = []
        self.weights.begin_journal()

    def commit(self, token: bytes) -> None:
        """Keep the changes of the call."""
        self.weights.end_journal()
        self._raised = []
        self.token = token
        self.seen = None
        if self.strategy is not None:
            self.strategy.release()

    def put_back(self, magnitudes: Array | None) -> None:
        """Undo the changes of a call, unless they have been kept."""
        self.failed = True
        self.strategy = None  # it may have pending sums
        for features, before in reversed(self._raised):
            if magnitudes is not None:
                magnitudes[features] = before
        self.weights.put_back()
        self._raised = []
        self.failed = False

    def progress(self, scales: Array) -> Progress:
        """Return the progress of the calls, for training that continues without live weights."""
        return Progress.kept(self.passes, self.weights.memory(), self.schedule, self.rates, None, scales, self.weights.features)

    def __getstate__(self) -> dict[str, Any]:
        weights = self.weights
        made = weights.size, weights.descent, weights.unscaled.dtype.str
        state = {name: value for name, value in vars(self).items() if name not in ("weights", "strategy")}
        # Copies are made between calls, when there is no journal, and do not include a call that is running or has failed.
        return state | {"weights": (made, packed_all(weights.state())), "strategy": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        (size, descent, dtype), arrays = state.pop("weights")
        vars(self).update(state)
        self.weights = new_weights(size, descent, np.dtype(dtype))
        self.weights.restore(unpacked_all(arrays))


def new_token(comm: Any) -> bytes:
    """Return a unique identifier, the same on all ranks. Collective."""
    return gather(comm, os.urandom(8))[0]


def checksum(*arrays: Any) -> int:
    """Return a checksum of some arrays."""
    bits = 0
    for array in arrays:
        for part in (array.data, array.indices, array.indptr) if is_sparse(array) else (array,):
            bits = zlib.crc32(np.ascontiguousarray(part).data, bits)
    return bits
