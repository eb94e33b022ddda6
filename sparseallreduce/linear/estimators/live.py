"""Weights that calls of ``partial_fit`` go on changing where they are, so that a call costs what its samples do."""

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
    """What calls of ``partial_fit`` change, beside the magnitudes of features, which the estimator keeps.

    A call begins a journal of what it changes, and keeps the changes or takes them back. Pickles and copies hold the state to the bit,
    and neither strategy nor communicator.

    Parameters
    ----------
    weights : Weights
        Of scaled features.
    model : LinearModel
        That they are of.
    scaled : bool
        Whether features are divided by the powers of two next to their magnitudes.

    Attributes
    ----------
    strategy : SparseStrategy or None
        That works on the weights, without samples between two calls.
    token : bytes
        Of the state after the last call, the same on all ranks that made it together, and no other's.
    passes, schedule, rates
        As of :class:`~sparseallreduce.linear.estimators.progress.Progress`.
    intercept : ndarray
        What users have been told of it.
    seen : int or None
        The checksum of the weights as users have been given them; None if they have not asked.
    """

    def __init__(self, weights: Weights, model: LinearModel, scaled: bool, strategy: SparseStrategy | None = None) -> None:
        self.weights = weights
        self.model = model
        self.scaled = scaled
        self.strategy = strategy
        self.token = b""
        self.passes = 0
        self.schedule: dict[str, float] = {}
        self.rates = ""
        self.intercept = np.zeros(0)
        self.seen: int | None = None
        self.failed = False  # whether changes of a call that failed may still have to be taken back
        self._raised: list[tuple[Array, Array]] = []  # features whose magnitudes the call has changed, and those before

    def fits(self, descent: Descent, features: int, dtype: DTypeLike, scaled: bool) -> bool:
        """Whether weights of this descent, of so many features and this dtype, are these."""
        weights = self.weights
        return weights.descent == descent and weights.features == features and weights.unscaled.dtype == dtype and self.scaled == scaled

    def make_room(self, features: int) -> None:
        """Have weights for so many features; those of the first stay, and further ones are zero."""
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
        """The model, or its part of some features, which may come in any order and several times."""
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
        """The samples with scaled features, after magnitudes and weights have been fitted to them; collective."""
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
        """A call begins."""
        self._raised = []
        self.weights.begin_journal()

    def commit(self, token: bytes) -> None:
        """Keep what it has changed."""
        self.weights.end_journal()
        self._raised = []
        self.token = token
        self.seen = None
        if self.strategy is not None:
            self.strategy.release()

    def put_back(self, magnitudes: Array | None) -> None:
        """Take back what a call has changed, if it has not been kept."""
        self.failed = True
        self.strategy = None  # which may have sums in flight
        for features, before in reversed(self._raised):
            if magnitudes is not None:
                magnitudes[features] = before
        self.weights.put_back()
        self._raised = []
        self.failed = False

    def progress(self, scales: Array) -> Progress:
        """How far the calls have come, for others to go on from that keep no live weights."""
        return Progress.kept(self.passes, self.weights.memory(), self.schedule, self.rates, None, scales, self.weights.features)

    def __getstate__(self) -> dict[str, Any]:
        weights = self.weights
        made = weights.size, weights.descent, weights.unscaled.dtype.str
        state = {name: value for name, value in vars(self).items() if name not in ("weights", "strategy")}
        # A call that is under way, or has failed, is in no copy: whoever makes one between calls finds no journal.
        return state | {"weights": (made, packed_all(weights.state())), "strategy": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        (size, descent, dtype), arrays = state.pop("weights")
        vars(self).update(state)
        self.weights = new_weights(size, descent, np.dtype(dtype))
        self.weights.restore(unpacked_all(arrays))


def new_token(comm: Any) -> bytes:
    """One that all ranks have alike, and nothing else; collective."""
    return gather(comm, os.urandom(8))[0]


def checksum(*arrays: Any) -> int:
    """A number that other arrays hardly have."""
    bits = 0
    for array in arrays:
        for part in (array.data, array.indices, array.indptr) if is_sparse(array) else (array,):
            bits = zlib.crc32(np.ascontiguousarray(part).data, bits)
    return bits
