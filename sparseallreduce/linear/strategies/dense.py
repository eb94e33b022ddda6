"""The dense allreduce: what one writes with MPI alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import common_error
from sparseallreduce.linear.gradients.dense import DenseGradient
from sparseallreduce.linear.strategies.base import Strategy
from sparseallreduce.runtime.objects import gather
from sparseallreduce.runtime.stalls import blocked, default_timeout
from sparseallreduce.runtime.trace import active
from sparseallreduce.streams.kernels.backend import as_host
from sparseallreduce.streams.stream import SparseStream

__all__ = ["DenseStrategy"]

Array = NDArray[Any]


class DenseStrategy(Strategy):
    """An array of N values that is cleared, added to, and summed by MPI's own ``Allreduce``.

    That call is made on ``comm`` itself, as a user would make it, with one value more: how many ranks have failed in this step and
    enter it for the others. The bytes that it sends, which nobody sees, are traced as those of Rabenseifner's algorithm. From a GPU the
    array is copied to the host for it, and the sum back.
    """

    name = "dense"
    devices = ("cpu", "gpu")
    sums_batches = True
    _awaited = False  # whether the next thing that the others wait for is this rank's part of a sum

    def _prepare(self) -> None:
        super()._prepare()
        entries = self.size * self.descent.width
        self._given = np.zeros(entries + self.weights.sums + 1, self.dataset.values.dtype)
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
            self._reduce()

    def scores(self, rows: Array) -> Array:
        self._awaited = True
        return super().scores(rows)

    def gradient(self, rows: Array, coefficients: Array) -> SparseStream:
        if self.on_gpu:
            gradient = SparseStream._dense_form(self._batch.gradient(rows, coefficients).to_dense(), self.size)
            self.clock.lap("compute")
            return gradient
        array = self._gradient(rows, coefficients)
        if self.descent.second_order:
            self._given[self.size : -1] = self._sums(rows, coefficients)
            array = self._given[:-1]
        self.clock.lap("compute")
        return SparseStream._dense_form(array, len(array))

    def update(self, gradient: SparseStream, rate: float) -> None:
        ranks = self.comm.size
        self._awaited = False
        if ranks > 1:
            if self.on_gpu:
                self._array[...] = as_host(gradient._stored)
            self._reduce()
        if self._total[-1]:
            raise self._everyones(None)
        for counts in active:
            counts.bytes_sent += 2 * self._total.nbytes * (ranks - 1) // ranks
        self.clock.lap("communicate")
        size = self.size + self.weights.sums
        total = gradient
        if ranks > 1 or not self.on_gpu:
            total = SparseStream._dense_form(self._total[:-1].reshape(self._shape(size)), size)
        if self.on_gpu:
            total = total.to_device(self.xp)
        self._note(gradient, total)
        self._descend(total, rate)

    def give_up(self, error: Exception) -> Exception:
        if not self._awaited or self.comm.size == 1:
            return error
        self._awaited = False
        self._given[-1] = 1
        self._reduce()
        self._given[-1] = 0
        return self._everyones(error)

    def _reduce(self) -> None:
        """Sum what all ranks give, inside MPI, from where no rank comes back when its time is over: with a timeout they meet before."""
        comm = self.comm
        if default_timeout() is not None:
            gather(comm, None)
        with blocked(comm.rank, comm.size, "a dense sum inside MPI, which does not tell which ranks have not come to it"):
            comm.Allreduce(self._given, self._total)

    def _everyones(self, error: Exception | None) -> Exception:
        """The error that all ranks raise, of which each says whether it has one of its own."""
        return common_error(gather(self.comm, {} if error is None else {"error": type(error).__name__, "text": str(error)}))
