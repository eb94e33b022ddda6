"""How the ranks' changes of the weights come together: their sum, of the features that several ranks have (CoCoA+, algorithm 1)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.linear.data.dataset import read_only
from sparseallreduce.linear.kernels import dual as kernels
from sparseallreduce.linear.solvers.local import LocalProblem
from sparseallreduce.runtime.api import allreduce
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["Exchange"]

Array = NDArray[Any]

_MARGIN = 1.1  # by which sigma is above what the last round needed
_SLOWEST = 0.5  # of its value, that sigma falls to at once at most
_TOLD = 4  # numbers that are summed with a change: a gap, two squared lengths, and how many ranks have failed


class Exchange:
    """The weights that several ranks change, the same on all of them, and the rank's own problem that follows them.

    Each rank solves its part as if the changes of all others were like its own: the square of the change counts ``sigma`` times. With
    ``sigma`` the number of ranks P the sum of all changes never lowers the dual objective. What is needed for that is the quotient of
    the sum's squared length and the sum of the changes' squared lengths, which is P only if all changes are equal, and 1 if they are
    orthogonal. It is known after the sum: so ``sigma`` follows it, and where it was too low, only so large a share of the change is
    made as surely raises the objective, ``sigma`` divided by the quotient.

    Parameters
    ----------
    local : LocalProblem
    features : int
        Dimension N.
    comm : communicator
    dtype : dtype
        In which changes are added up.
    """

    def __init__(self, local: LocalProblem, features: int, comm: Any, dtype: DTypeLike) -> None:
        self._local, self._features, self._comm = local, features, comm
        self.sigma = float(comm.size)
        self._own = local.numbering.features
        shared = self._own[:0]
        if comm.size > 1:
            ones = np.ones(len(self._own), np.float32)
            occurring = allreduce(SparseStream(self._own, ones, features), comm)
            shared = np.ascontiguousarray(occurring.indices[occurring.values > 1], self._own.dtype)
        local.numbering.share(shared, comm.size > 1)
        local.numbering.forget()
        self._shared = shared
        size = len(shared) + (local.numbering.intercept >= 0)
        self.weights = np.zeros(size)
        numbering = local.numbering
        self._slots = np.empty(len(numbering.slots) + _TOLD, index_dtype(size + _TOLD))
        self._change = np.empty(len(numbering.slots) + _TOLD, dtype)
        self._before, self._dual_before = np.zeros(numbering.size), np.zeros(local.rows)

    @property
    def shared_features(self) -> int:
        """Features that several ranks have."""
        return len(self._shared)

    def own_change(self, gap: float) -> SparseStream:
        """The change of the rank's weights since the last sum, as far as others have them too; and numbers to be summed with it.

        Not collective.

        Parameters
        ----------
        gap : float
            Of the samples that made the change.
        """
        local, numbering = self._local, self._local.numbering
        count, whole, part = kernels.change(
            local.weights, self._before, self.sigma, numbering.shared, numbering.slots, self._slots, self._change
        )
        return self._told(count, gap, whole, whole - part, 0.0)

    def failure(self) -> SparseStream:
        """What a rank gives in the place of its change if it has none."""
        return self._told(0, 0.0, 0.0, 0.0, 1.0)

    def add(self, change: SparseStream) -> float | None:
        """Add up the changes of all ranks; the sum of the gaps, or None if a rank has failed, and nothing has changed. Collective."""
        local, numbering, size = self._local, self._local.numbering, len(self.weights)
        total = allreduce(change, self._comm)
        slots, values = read_only(total.indices), read_only(total.values)
        end = int(np.searchsorted(slots, size))
        told = np.zeros(_TOLD)
        told[slots[end:].astype(np.int64) - size] = values[end:]
        gap, alone, rest, failed = told.tolist()
        if failed:
            return None
        slots, values = slots[:end], values[:end]
        together = rest + kernels.squared_length(values)
        needed = together / alone if alone > 0 else 1.0
        share = min(1.0, self.sigma / needed)
        kernels.add_scaled(slots, values, share, self.weights)
        if share < 1:
            kernels.step_back(local.weights, self._before, share)
            kernels.step_back(local.dual, self._dual_before, share)
        kernels.take(self.weights, numbering.slots, numbering.shared, local.weights)
        self._before[:] = local.weights
        self._dual_before[:] = local.dual
        self.sigma = min(float(self._comm.size), max(_MARGIN * needed, _SLOWEST * self.sigma, 1.0))
        return float(gap)

    def _told(self, count: int, *numbers: float) -> SparseStream:
        size = len(self.weights)
        self._slots[count : count + _TOLD] = np.arange(size, size + _TOLD)
        self._change[count : count + _TOLD] = numbers
        return SparseStream(self._slots[: count + _TOLD], self._change[: count + _TOLD], size + _TOLD)

    def squares(self) -> float:
        """The sum of squares of the weights that several ranks change."""
        return float(kernels.squared_length(self.weights))

    def state(self) -> tuple[Array, Array]:
        """A copy of the weights, of which :meth:`assembled` makes the whole vector."""
        return self.weights.copy(), self._local.weights.copy()

    def assembled(self, state: tuple[Array, Array] | None) -> Array:
        """The whole vector of a state, or the present one, the same on every rank; the intercept last if there is one. Collective."""
        shared, own = state or (self.weights, self._local.weights)
        numbering = self._local.numbering
        whole = np.zeros(self._features + (numbering.intercept >= 0))
        if self._comm.size == 1:
            whole[self._own] = own[numbering.places]
            whole[self._features :] = own[len(self._own) :]
            return whole
        private = np.zeros(len(own), bool)
        private[numbering.private] = True
        chosen = private[numbering.places]
        alone = allreduce(SparseStream(self._own[chosen], own[numbering.places[chosen]], self._features), self._comm)
        whole[alone.indices] = alone.values
        whole[self._shared] = shared[: len(self._shared)]
        whole[self._features :] = shared[len(self._shared) :]
        return whole
