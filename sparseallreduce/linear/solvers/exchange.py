"""How the ranks' changes of the weights come together: their sum, of the features that several ranks have (CoCoA+, algorithm 1)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.linear.data.dataset import read_only
from sparseallreduce.linear.kernels import weight_changes
from sparseallreduce.linear.solvers.local import LocalProblem
from sparseallreduce.linear.solvers.sharing import SharedFeatures
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
        self._local, self._comm = local, comm
        self.sigma = float(comm.size)
        self._shared = SharedFeatures(local.numbering, features, comm)
        intercept = local.numbering.intercept >= 0
        self.weights = np.zeros((len(self._shared) + intercept) * local.width if comm.size > 1 else 0)
        # A slot a weight, of which a feature has several where there are several scores.
        self._own_slots = (local.numbering.slots[:, np.newaxis] * local.width + np.arange(local.width)).reshape(-1)
        size = len(self.weights)
        self._slots = np.empty(len(self._own_slots) + _TOLD, index_dtype(size + _TOLD))
        self._change = np.empty(len(self._own_slots) + _TOLD, dtype)
        self._before, self._dual_before = np.zeros(len(local.weights)), local.dual.copy()

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
        given = self._local.weights, self._before, self.sigma, self._own_slots
        count, whole, part = weight_changes.change(*given, self._slots, self._change)
        return self._told(count, gap, whole, whole - part, 0.0)

    def failure(self) -> SparseStream:
        """What a rank gives in the place of its change if it has none."""
        return self._told(0, 0.0, 0.0, 0.0, 1.0)

    def add(self, change: SparseStream) -> float | None:
        """Add up the changes of all ranks; the sum of the gaps, or None if a rank has failed, and nothing has changed. Collective."""
        local, size = self._local, len(self.weights)
        total = allreduce(change, self._comm)
        told = np.zeros(_TOLD)
        if total.is_dense:
            whole = total.to_dense()
            slots, values, told[:] = None, whole[:size], whole[size:]
        else:
            slots, values = read_only(total.indices), read_only(total.values)
            end = len(slots) - _TOLD
            end += int(np.searchsorted(slots[end:], slots.dtype.type(size)))
            told[slots[end:].astype(np.int64) - size] = values[end:]
            slots, values = slots[:end], values[:end]
        gap, alone, rest, failed = told.tolist()
        if failed:
            local.weights[:], local.dual[:] = self._before, self._dual_before
            return None
        together = rest + weight_changes.squared_length(values)
        needed = together / alone if alone > 0 else 1.0
        share = min(1.0, self.sigma / needed)
        if slots is None:
            self.weights += np.multiply(values, share, dtype=np.float64)
        else:
            weight_changes.add_scaled(slots, values, share, self.weights)
        if share < 1:
            weight_changes.step_back(local.dual.reshape(-1), self._dual_before.reshape(-1), share)
        weight_changes.settle(self.weights, self._own_slots, share, local.weights, self._before)
        self._dual_before[:] = local.dual
        self.sigma = min(float(self._comm.size), max(_MARGIN * needed, _SLOWEST * self.sigma, 1.0))
        return float(gap)

    def assign(self, features: Array, weights: Array, intercept: float) -> None:
        """Set the weights of features, in increasing order, and the intercept, where there is one; all ranks set the same.

        Dual variables that go with them are set before.
        """
        local = self._local
        weight_changes.assign(self._shared.features, self._shared.slots, features, weights, self.weights)
        local.assign(features, weights)
        if local.numbering.intercept >= 0:
            self.weights[-1] = local.weights[local.numbering.intercept] = intercept
        self._before[:] = local.weights
        self._dual_before[:] = local.dual

    def move_intercept(self, change: Array) -> None:
        """Add to the intercepts, on all ranks alike, what belongs to no dual variable."""
        self._local.move_intercept(change)
        if self._comm.size > 1:
            self.weights[-self._local.width :] += change
            self._before[:] = self._local.weights

    def scale(self, factor: float, centre: Array) -> None:
        """Multiply all weights by a factor, the intercepts by their distance from ``centre``; dual variables follow."""
        local = self._local
        local.scale(factor, centre)
        self.weights *= factor
        if self._comm.size > 1 and local.numbering.intercept >= 0:
            self.weights[-local.width :] += (1 - factor) * centre
        self._before[:], self._dual_before[:] = local.weights, local.dual
        self.sigma = float(self._comm.size)

    def _told(self, count: int, *numbers: float) -> SparseStream:
        size = len(self.weights)
        self._slots[count : count + _TOLD] = np.arange(size, size + _TOLD)
        self._change[count : count + _TOLD] = numbers
        return SparseStream(self._slots[: count + _TOLD], self._change[: count + _TOLD], size + _TOLD)

    def squares(self) -> float:
        """The sum of squares of the weights that several ranks change."""
        return float(weight_changes.squared_length(self.weights))

    def state(self) -> tuple[Array, Array]:
        """A copy of the weights, of which :meth:`assembled` makes the whole vector."""
        return self.weights.copy(), self._local.weights.copy()

    def assembled(self, state: tuple[Array, Array] | None) -> Array:
        """The whole vector of a state, or the present one, the same on every rank; the intercept last if there is one. Collective."""
        shared, own = state or (self.weights, self._local.weights)
        whole = self._shared.assembled(shared, own, self._local.width)
        if self._local.frame is not None:
            for column in whole.T:
                self._local.frame.undo(column, self._local.numbering.intercept >= 0)
        return whole[:, 0] if self._local.width == 1 else whole
