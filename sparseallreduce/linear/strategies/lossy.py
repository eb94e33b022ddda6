"""Lossy sums: each step sends the largest entries of the residual, and keeps the rest for later steps (Ok-Topk algorithm 2)."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.gradients.columns import flattened
from sparseallreduce.linear.strategies.base import Strategy
from sparseallreduce.linear.strategies.residuals import gathered, own_share
from sparseallreduce.linear.weights import Descent
from sparseallreduce.reducers import Auto, ErrorFeedback, GaussianK, GTopk, HiTopK, OkTopk, Reducer, TopkA, TopkDSA
from sparseallreduce.reducers.arrays import nothing
from sparseallreduce.reducers.base import contributions
from sparseallreduce.reducers.cost import CANDIDATES
from sparseallreduce.runtime.objects import gather
from sparseallreduce.streams.kernels.backend import array_module, as_host
from sparseallreduce.streams.selection import NonZeroTopK
from sparseallreduce.streams.stream import SparseStream

__all__ = [
    "DENSITY",
    "AutoStrategy",
    "GTopkStrategy",
    "GaussianKStrategy",
    "HiTopKStrategy",
    "LossyStrategy",
    "OkTopkStrategy",
    "TopkAStrategy",
    "TopkDSAStrategy",
]

Array = NDArray[Any]

DENSITY = 0.01  # default density


class LossyStrategy(Strategy):
    """Error feedback around a reducer: in each step, about ``density * N`` entries of residual and gradient update the weights.

    A step has three parts. The gradient of the batch, times the learning rate, is added to this rank's residual, in time proportional to
    the entries that the batch touches. The reducer selects among the N values of the residual and sums the ranks' selections. The sum,
    which all ranks hold, updates the weights, and is removed from the residuals.

    This is Ok-Topk algorithm 2, whatever the reducer: a residual accumulates learning rates times gradients (its line 4), in units of the
    weights. So a gradient counts with the learning rate of the step in which it was computed, as with the other strategies, however long it
    stays in the residual. Thesis algorithm 2 (lines 8 and 13) and gTop-k algorithm 4 (lines 4 and 11) accumulate gradients, and multiply
    what is sent by the rate of the step that sends it: the same for a constant rate, but with a decreasing one, delayed gradients count
    less. Gradients are those of the mean loss of the batch over all ranks, so the sum is not divided by P again. Both penalties and the
    momentum act on the weights in every step, and are not sent. The residuals that remain when training ends are not in the weights. If the
    weights have K columns, the entries are all N * K of them: a reducer selects single weights, not features.

    Parameters
    ----------
    dataset, comm, descent, threads
        As for :class:`~sparseallreduce.linear.strategies.base.Strategy`.
    density : float, optional
        Fraction of the N entries, including the intercept, that the reducer sums: above 0, at most 1. At least one entry is summed.
    device : {"cpu", "gpu"}
        As for :class:`~sparseallreduce.linear.strategies.base.Strategy`.

    Attributes
    ----------
    entries : int
        Number of weights in all columns.
    residual : ndarray, shape (entries,)
        This rank's learning rates times gradients that have not updated the weights yet.
    """

    devices: tuple[str, ...] = ("cpu", "gpu")

    def __init__(
        self,
        dataset: Dataset,
        comm: Any,
        descent: Descent | None = None,
        *,
        threads: int = 1,
        density: float = DENSITY,
        device: str = "cpu",
    ) -> None:
        self.density = density
        super().__init__(dataset, comm, descent, threads=threads, device=device)

    def _check_arguments(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, not {self.density!r}")

    def _prepare(self) -> None:
        super()._prepare()
        self.entries: int = self.size * self.descent.width
        self.k: int = min(self.entries, max(1, round(self.density * self.entries)))
        self._batch = self._new_batch()
        self._feedback = self._new_feedback()

    @staticmethod
    @abstractmethod
    def new_reducer(size: int, k: int) -> Reducer:
        """Return a reducer for residuals of this size."""

    def warm_up(self) -> None:
        super().warm_up()
        one = np.ones(1, self.dataset.values.dtype)
        ErrorFeedback(self.new_reducer(1, 1), one.dtype).step(SparseStream([0], one, 1), self.comm)

    @property
    def residual(self) -> Array:
        return self._feedback.residual

    def scores(self, rows: Array) -> Array:
        return self._batch.scores(rows, self.weights)

    def gradient(self, rows: Array, coefficients: Array) -> SparseStream:
        gradient = flattened(self._batch.gradient(rows, coefficients), self.columns)
        self.clock.lap("compute")
        return gradient

    def update(self, gradient: SparseStream, rate: float) -> None:
        # A rate of zero, or one whose inverse is infinite, changes no weight: the residuals are kept.
        moves = rate > self.comm.size / float(np.finfo(gradient.dtype).max)
        total = self._exchanged(gradient, rate) if moves else nothing(self.entries, gradient._stored)
        self.summed_densities.append(1.0 if total.is_dense else total.density)
        self._descend(total, rate)

    def _exchanged(self, gradient: SparseStream, rate: float) -> SparseStream:
        """Return the ranks' sum of residuals and gradient, in units of the gradient at this rate."""
        feedback = self._feedback
        mean = feedback.step(_scaled(gradient, rate), self.comm)
        self.clock.part("select", feedback.reducer.select_seconds)
        self.clock.lap("communicate")
        self.given_densities.append(contributions(feedback.contributed, self.entries) / self.entries if self.entries else 0.0)
        return _scaled(mean, self.comm.size / rate)

    def state(self) -> dict[str, Any]:
        """Return the state of the strategy, with the residuals of all ranks on the first worker, which writes checkpoints."""
        state = super().state() | gathered(as_host(self.residual), self.comm)
        return state | {"reducers": tuple(gather(self.comm, self._feedback.reducer.state()))}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._feedback = self._new_feedback()
        own_share(state, self.residual, self.comm)
        if len(state["reducers"]) == self.comm.size:  # otherwise thresholds and regions are computed again
            self._feedback.reducer.restore(state["reducers"][self.comm.rank])

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"density": self.density}

    def measures(self) -> dict[str, Any]:
        """Return ``residual_norm``, the Euclidean norm of all ranks' residuals together, in units of the weights."""
        square = float(array_module(self.residual).dot(self.residual, self.residual))
        return {"residual_norm": math.sqrt(sum(gather(self.comm, square)))}

    def _new_feedback(self) -> ErrorFeedback:
        return ErrorFeedback(self.new_reducer(self.entries, self.k), self.dataset.values.dtype)


class OkTopkStrategy(LossyStrategy):
    """Sums approximately the k largest entries of the sum of the ranks' top k, with less than 6 k words per rank."""

    name: str = OkTopk.name

    @staticmethod
    def new_reducer(size: int, k: int) -> Reducer:
        return OkTopk(size, k)


class GTopkStrategy(LossyStrategy):
    """Sums the k largest entries of the sum of the ranks' top k, along a tree."""

    name: str = GTopk.name

    @staticmethod
    def new_reducer(size: int, k: int) -> Reducer:
        return GTopk(size, k, selector=NonZeroTopK)


class TopkAStrategy(LossyStrategy):
    """Sums the ranks' top k by an allgather."""

    name: str = TopkA.name

    @staticmethod
    def new_reducer(size: int, k: int) -> Reducer:
        return TopkA(size, k, selector=NonZeroTopK)


class TopkDSAStrategy(LossyStrategy):
    """Sums the ranks' top k by the dynamic sparse allreduce."""

    name: str = TopkDSA.name

    @staticmethod
    def new_reducer(size: int, k: int) -> Reducer:
        return TopkDSA(size, k, selector=NonZeroTopK)


class GaussianKStrategy(LossyStrategy):
    """Sums each rank's entries in the tails of a fitted normal distribution by an allgather."""

    name: str = GaussianK.name

    @staticmethod
    def new_reducer(size: int, k: int) -> Reducer:
        return GaussianK(size, k)


class HiTopKStrategy(LossyStrategy):
    """Sums the hosts' top k, each selected from the dense sum of its ranks: every step moves all N entries inside a host."""

    name: str = HiTopK.name

    @staticmethod
    def new_reducer(size: int, k: int) -> Reducer:
        return HiTopK(size, k)


class AutoStrategy(LossyStrategy):
    """Sums by the reducer with the shortest predicted time, except Gaussian-k: see :class:`~sparseallreduce.Auto`."""

    name: str = Auto.name

    @staticmethod
    def new_reducer(size: int, k: int) -> Reducer:
        return Auto(size, k, candidates=[name for name in CANDIDATES if name != "dense"], selector=NonZeroTopK)


def _scaled(stream: SparseStream, factor: float) -> SparseStream:
    """Return the stream times a number; the indices are shared."""
    values = stream._stored * stream.dtype.type(factor)
    if stream.is_dense:
        return SparseStream._dense_form(values, stream.size)
    return SparseStream._sparse_form(stream.indices, values, stream.size)
