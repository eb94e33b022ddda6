"""The dense allreduce: what one writes with MPI alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.dataset import Dataset
from sparseallreduce.linear.gradient import DenseGradient
from sparseallreduce.linear.strategies.base import Strategy
from sparseallreduce.linear.weights import Descent
from sparseallreduce.runtime.trace import active
from sparseallreduce.streams.stream import SparseStream

__all__ = ["DenseStrategy"]

Array = NDArray[Any]


class DenseStrategy(Strategy):
    """An array of N values that is cleared, added to, and summed by MPI's own ``Allreduce``.

    That call is made on ``comm`` itself, as a user would make it. The bytes that it sends, which nobody sees, are traced as those of
    Rabenseifner's algorithm.
    """

    name = "dense"

    def __init__(self, dataset: Dataset, comm: Any, descent: Descent | None = None, *, threads: int = 1) -> None:
        super().__init__(dataset, comm, descent, threads=threads)
        self._gradient = DenseGradient(self.dataset, self.size, self.team)
        self._total = np.empty_like(self._gradient.array) if comm.size > 1 else self._gradient.array

    def warm_up(self) -> None:
        super().warm_up()
        if self.comm.size > 1:
            self.comm.Allreduce(self._gradient.array, self._total)

    def gradient(self, rows: Array, coefficients: Array) -> SparseStream:
        array = self._gradient(rows, coefficients)
        self.clock.lap("compute")
        return SparseStream._dense_form(array, self.size)

    def update(self, gradient: SparseStream, rate: float) -> None:
        ranks = self.comm.size
        if ranks > 1:
            self.comm.Allreduce(self._gradient.array, self._total)
        for counts in active:
            counts.bytes_sent += 2 * self._total.nbytes * (ranks - 1) // ranks
        self.clock.lap("communicate")
        total = SparseStream._dense_form(self._total, self.size)
        self._note(gradient, total)
        self._descend(total, rate)
