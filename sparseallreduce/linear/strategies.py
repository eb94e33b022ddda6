"""Aggregation strategies: how the gradients of all ranks become one sum on every rank (thesis section 4.2.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear import kernels
from sparseallreduce.linear.datasets import Dataset
from sparseallreduce.runtime.mpi import allreduce
from sparseallreduce.runtime.trace import active
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["STRATEGIES", "DenseStrategy", "SparseStrategy", "Strategy"]

Array = NDArray[Any]


class Strategy(ABC):
    """What form this rank's gradient takes, and how it is summed over the ranks of ``comm``."""

    name: str

    def __init__(self, dataset: Dataset, comm: Any) -> None:
        self.dataset = dataset
        self.comm = comm
        self._gradient = np.zeros(dataset.features, np.float32)

    @abstractmethod
    def gradient(self, rows: Array, coefficients: Array) -> SparseStream:
        """The sum of ``coefficients[i]`` (float32) times this rank's row ``rows[i]``; valid until the next call."""

    @abstractmethod
    def total(self, gradient: SparseStream) -> SparseStream:
        """The sum of the gradients of all ranks; valid until the next call."""


class DenseStrategy(Strategy):
    """What one writes with MPI alone: an array of N values that is cleared, added to, and summed by MPI's own ``Allreduce``.

    That call is made on ``comm`` itself, as a user would make it. The bytes that it sends, which nobody sees, are traced as those of
    Rabenseifner's algorithm.
    """

    name = "dense"

    def __init__(self, dataset: Dataset, comm: Any) -> None:
        super().__init__(dataset, comm)
        self._total = np.empty_like(self._gradient) if comm.size > 1 else self._gradient

    def gradient(self, rows: Array, coefficients: Array) -> SparseStream:
        self._gradient.fill(0)
        dataset = self.dataset
        kernels.accumulate(dataset.indptr, dataset.indices, dataset.values, rows, coefficients, self._gradient)
        return SparseStream._dense_form(self._gradient, dataset.features)

    def total(self, gradient: SparseStream) -> SparseStream:
        ranks = self.comm.size
        if ranks > 1:
            self.comm.Allreduce(self._gradient, self._total)
        for counts in active:
            counts.bytes_sent += 2 * self._total.nbytes * (ranks - 1) // ranks
        return SparseStream._dense_form(self._total, gradient.size)


class SparseStrategy(Strategy):
    """The entries that a batch touches, as a sorted sparse stream, summed by a sparse allreduce (thesis section 3.3).

    Parameters
    ----------
    algorithm : str, optional
        Any name of :func:`sparseallreduce.algorithms`.
    """

    name = "sparse"

    def __init__(self, dataset: Dataset, comm: Any, algorithm: str = "auto") -> None:
        super().__init__(dataset, comm)
        self.algorithm = algorithm
        self._words, self._summary = kernels.bitmap(dataset.features)
        self._indices = np.empty(0, index_dtype(dataset.features))
        self._values = np.empty(0, np.float32)

    def gradient(self, rows: Array, coefficients: Array) -> SparseStream:
        dataset = self.dataset
        self._reserve(int((dataset.indptr[rows + 1] - dataset.indptr[rows]).sum()))
        kernels.accumulate_marked(
            dataset.indptr, dataset.indices, dataset.values, rows, coefficients, self._gradient, self._words, self._summary
        )
        touched = kernels.collect(self._gradient, self._words, self._summary, self._indices, self._values)
        return SparseStream(self._indices[:touched], self._values[:touched], dataset.features)

    def total(self, gradient: SparseStream) -> SparseStream:
        return allreduce(gradient, self.comm, algorithm=self.algorithm)

    def _reserve(self, nnz: int) -> None:
        """Room for as many entries as a batch of ``nnz`` non-zeros can touch, with some to spare for the next batch."""
        most = min(nnz, self.dataset.features)
        if most > len(self._indices):
            room = min(most + most // 4, self.dataset.features)
            self._indices = np.empty(room, self._indices.dtype)
            self._values = np.empty(room, np.float32)


STRATEGIES: dict[str, type[Strategy]] = {strategy.name: strategy for strategy in (DenseStrategy, SparseStrategy)}
