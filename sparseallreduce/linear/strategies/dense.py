"""The dense allreduce, as a program with MPI alone would do it."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.linear.gradients.dense import DenseGradient
from sparseallreduce.linear.strategies.base import Strategy
from sparseallreduce.runtime.communicators import over_mpi
from sparseallreduce.runtime.launching import agree
from sparseallreduce.runtime.trace import active
from sparseallreduce.streams.kernels.backend import as_host
from sparseallreduce.streams.stream import SparseStream

__all__ = ["DenseStrategy"]

Array = NDArray[Any]

_SUM = Intent((("operation", "MPI's sum of dense gradients"),), 0)


class DenseStrategy(Strategy):
    """Gradients as dense arrays of N values, summed by MPI's own ``Allreduce``.

    The call is made on ``comm`` itself, as a user would, after all ranks have agreed to enter it, so that no rank waits
    for one that has failed. Its bytes, which cannot be observed, are traced as those of Rabenseifner's algorithm. On a GPU, the array is
    copied to the host for the sum, and back.
    """

    name = "dense"
    devices: tuple[str, ...] = ("cpu", "gpu")
    sums_batches = True

    def _prepare(self) -> None:
        super()._prepare()
        entries = self.size * self.descent.width
        self._given = np.zeros(entries + self.weights.sums, self.dataset.values.dtype)
        array = self._given[:entries].reshape(self._shape(self.size))
        self._array = array
        if self.on_gpu:
            self._batch = self._new_batch()
        else:
            self._gradient = DenseGradient(self.dataset, self.size, self.threads, array, columns=self.columns)
        self._total = np.zeros_like(self._given) if self.comm.size > 1 else self._given

    def warm_up(self) -> None:
        super().warm_up()
        if self.comm.size > 1:
            self._sum()

    def gradient(self, rows: Array, coefficients: Array) -> SparseStream:
        if self.on_gpu:
            gradient = SparseStream._dense_form(self._batch.gradient(rows, coefficients).to_dense(), self.size)
            self.clock.lap("compute")
            return gradient
        array = self._gradient(rows, coefficients)
        if self.descent.second_order:
            self._given[self.size :] = self._sums(rows, coefficients)
            array = self._given
        self.clock.lap("compute")
        return SparseStream._dense_form(array, len(array))

    def update(self, gradient: SparseStream, rate: float) -> None:
        ranks = self.comm.size
        if ranks > 1:
            if self.on_gpu:
                self._array[...] = as_host(gradient._stored)
            self._sum()
        for counts in active:
            counts.bytes_sent += 2 * self._total.nbytes * (ranks - 1) // ranks
        self.clock.lap("communicate")
        size = self.size + self.weights.sums
        total = gradient
        if ranks > 1 or not self.on_gpu:
            total = SparseStream._dense_form(self._total.reshape(self._shape(size)), size)
        if self.on_gpu:
            total = total.to_device(self.xp)
        self._note(gradient, total)
        self._descend(total, rate)

    def _sum(self) -> None:
        """Sum the arrays of all ranks by MPI, with the same NaNs on all ranks.

        A rank that is interrupted after the agreement completes the call before it raises.
        """
        agree(self.comm, _SUM, blocking=True)
        done: list[None] = []
        try:
            done.extend(map(methodcaller("Allreduce", self._given, self._total), (self.comm,)))
        except BaseException:
            if not done:
                self.comm.Allreduce(self._given, self._total)
            raise
        over_mpi().operation.unify_nans(None, self._total, self.comm.size)
