"""The sparse allreduce: only the entries that a batch touches are sent (thesis section 3.3)."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.dataset import Dataset, features_of
from sparseallreduce.linear.strategies.base import Strategy
from sparseallreduce.linear.strategies.clock import Clock
from sparseallreduce.linear.weights import AdaptiveWeights, Descent, Weights, with_sums
from sparseallreduce.linear.weights.numbered import MOST_ENTRIES
from sparseallreduce.runtime.api import allreduce
from sparseallreduce.runtime.communicators import warm_up
from sparseallreduce.streams.stream import SparseStream

__all__ = ["SparseStrategy"]

Array = NDArray[Any]


class SparseStrategy(Strategy):
    """Gradients as sorted sparse streams of the entries that a batch touches, summed by a sparse allreduce.

    Parameters
    ----------
    dataset, comm, descent, threads
        As for :class:`~sparseallreduce.linear.strategies.base.Strategy`.
    algorithm : str, optional
        Any name of :func:`sparseallreduce.algorithms`.
    device : {"cpu", "gpu"}
        As for :class:`~sparseallreduce.linear.strategies.base.Strategy`.
    """

    given_densities: list[float]
    summed_densities: list[float]

    name = "sparse"
    devices: tuple[str, ...] = ("cpu", "gpu")
    sums_batches = True
    buffers = 1  # number of gradients in use at the same time

    def __init__(
        self,
        dataset: Dataset,
        comm: Any,
        descent: Descent | None = None,
        *,
        threads: int = 1,
        algorithm: str = "auto",
        device: str = "cpu",
    ) -> None:
        self.algorithm = algorithm
        super().__init__(dataset, comm, descent, threads=threads, device=device)

    def _prepare(self) -> None:
        super()._prepare()
        self._batch = self._new_batch(self.buffers)

    def renew(self, dataset: Dataset) -> None:
        """Continue with other samples that have the same features and dtype. Collective; called between two passes.

        Raises
        ------
        DatasetError, MismatchError
            As for a new strategy; the strategy then has no samples.
        """
        self.release()
        self.dataset = self._own(dataset)
        self._batch.renew(self.dataset)
        self.clock: Clock = Clock()

    def release(self) -> None:
        """Release the samples."""
        indices, values = np.empty(0, self.dataset.indices.dtype), np.empty(0, self.dataset.values.dtype)
        self.dataset: Dataset = Dataset(np.zeros(1, np.int64), indices, values, np.empty(0), self.dataset.features)
        self._batch.renew(self.dataset)
        self.given_densities, self.summed_densities = [], []

    def adopt(self, weights: Weights) -> None:
        """Continue with the weights of another strategy of the same size and descent."""
        self.weights = weights
        weights.shared_by(self.threads)
        self.__dict__.pop("_own_weights", None)

    def warm_up(self) -> None:
        super().warm_up()
        if self._own_weights is not None:
            self._own_weights.warm_up_rows(self.dataset)
        dtype, size = self.dataset.values.dtype, self.size + self.weights.sums
        nothing = SparseStream([], np.empty(self._shape(0), dtype), size)
        allreduce(nothing.to_device(self.xp) if self.on_gpu else nothing, self.comm, algorithm=self.algorithm)
        warm_up(self.comm, size, dtype)

    @property
    def alone(self) -> bool:
        """True if this rank updates the weights by its own gradient only, before the next step."""
        return type(self) is SparseStrategy and self.comm.size == 1

    @cached_property
    def _own_weights(self) -> AdaptiveWeights | None:
        """The weights, if rows can update them without a gradient stream: there is one rank with one thread, and no penalty or columns."""
        alone = self.alone and self.threads.count == 1
        penalised = self.descent.l1 or self.descent.l2  # applying penalties each time a row reads a weight is too slow
        plain = not penalised and self.columns is None and not self.descent.second_order and self.dataset.nnz <= MOST_ENTRIES
        return self.weights if alone and plain and isinstance(self.weights, AdaptiveWeights) else None

    def step(self, rows: Array, coefficients: Array, rate: float) -> None:
        if self._own_weights is None:
            super().step(rows, coefficients, rate)
            return
        self.clock.lap("compute")
        if self._own_weights.noting:
            self._own_weights.note(features_of(self.dataset, rows))
        entries = self._own_weights.descend_rows(self.dataset, rows, coefficients, rate)
        density = entries / self.size if self.size else 0.0
        self.given_densities.append(density)
        self.summed_densities.append(density)
        self.clock.lap("update")

    def scores(self, rows: Array) -> Array:
        if self._own_weights is not None:
            return self._own_weights.row_scores(self.dataset, rows)
        return self._batch.scores(rows, self.weights)

    def gradient(self, rows: Array, coefficients: Array) -> SparseStream:
        gradient = self._batch.gradient(rows, coefficients)
        if self.descent.second_order:
            gradient = with_sums(gradient, self._sums(rows, coefficients))
        self.clock.lap("compute")
        return gradient

    def update(self, gradient: SparseStream, rate: float) -> None:
        # On one rank the sum is the gradient, which stays valid until the weights have changed.
        total = gradient if self.alone or self.comm.size == 1 else allreduce(gradient, self.comm, algorithm=self.algorithm)
        self.clock.lap("communicate")
        self._note(gradient, total)
        self._descend(total, rate)

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"algorithm": self.algorithm}
