"""Progressive validation: predictions of samples before the steps that learn from them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.models import LinearModel
from sparseallreduce.linear.training.metrics import Sums
from sparseallreduce.streams.kernels.backend import array_module, as_host, on_device

__all__ = ["Progressive"]

Array = NDArray[Any]


class Progressive:
    """The scores of an epoch's samples on this rank, which steps compute anyway. Losses are computed on demand.

    With several scores per sample, losses are computed immediately and scores are not kept. Scores on a GPU stay there.
    In one pass over the samples no score depends on its own label, so loss and accuracy are those on unseen samples (Blum,
    Kalai and Langford, *Beating the hold-out*, 1999); in later passes the weights have seen each sample in the pass before.

    Parameters
    ----------
    model : LinearModel
    dataset : Dataset

    Attributes
    ----------
    before : Sums
        Sums of all ranks from before the run was resumed in this epoch.
    """

    def __init__(self, model: LinearModel, dataset: Dataset) -> None:
        self._model = model
        self._dataset = dataset
        self._scores = np.empty(0)
        self._sums = Sums()  # sums of scores that are not kept
        self.reset()

    def reset(self) -> None:
        """Discard all scores, at the start of an epoch."""
        self.before: Sums = Sums()
        self._order = np.empty(0, np.int64)
        self._sums = Sums()
        self._begin = self._end = 0
        self._summed = 0, Sums()  # of the kept scores up to a place, for who asks in between

    def begin(self, order: Array, start: int) -> None:
        """Set the order in which this rank's rows are scored, from ``start`` on."""
        self._sums = Sums()
        if self._model.columns is None and len(self._scores) != len(order):
            self._scores = np.empty(len(order))
        self._order = order
        self._begin = self._end = start
        self._summed = start, Sums()

    def note(self, scores: Array) -> None:
        """Record the scores of the next rows."""
        end = self._end + len(scores)
        if self._model.columns is not None:
            self._sums = Sums.total([self._sums, self._of(self._order[self._end : end], as_host(scores), None)])
            self._end = end
            return
        if on_device(scores) and not on_device(self._scores):
            self._scores = array_module(scores).empty(len(self._order))
        self._scores[self._end : end] = scores
        self._end = end

    def sums(self, threshold: float | None) -> Sums:
        """Return the sums of this rank's scores, without ``before``."""
        if self._model.columns is not None:
            return self._sums
        return self._of(self._order[self._begin : self._end], as_host(self._scores[self._begin : self._end]), threshold)

    def so_far(self) -> float | None:
        """Return the mean loss of this rank's scores up to now, ``before`` left out; None if there are none."""
        if self._model.columns is not None:
            return self._sums.means(None)[0]
        place, sums = self._summed
        new = self._of(self._order[place : self._end], as_host(self._scores[place : self._end]), None)
        self._summed = self._end, Sums.total([sums, new])
        return self._summed[1].means(None)[0]

    def _of(self, rows: Array, scores: Array, threshold: float | None) -> Sums:
        labels, weights = self._dataset.labels[rows], self._dataset.weights
        return Sums.of(self._model, scores, labels, None if weights is None else weights[rows], threshold)
