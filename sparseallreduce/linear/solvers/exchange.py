"""How the ranks' changes of the weights come together: their sum, of the features that several ranks have (CoCoA+, algorithm 1)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.linear.kernels import weight_changes
from sparseallreduce.linear.solvers.local import LocalProblem
from sparseallreduce.linear.solvers.sharing import SharedFeatures
from sparseallreduce.runtime.objects import gather
from sparseallreduce.runtime.planning import allreduce_init
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["Exchange"]

Array = NDArray[Any]

# Of the other ranks that have a feature, those that a rank's own change counts for, on two ranks and on more. Gaps of 20,000 samples like
# URL's, logistic, after 4 rounds: 2 ranks 1.8e-3, 1.1e-3, 1.3e-3 with none, a quarter, a half; 8 ranks .45, .016, .026 with a quarter, a
# half, three quarters.
_COUNTED = (0.25, 0.5)
_TOLD = 5  # numbers that are summed with a change: a gap, how steeply the objective falls, two lengths, how many ranks have failed


class Exchange:
    """The weights that several ranks change, the same on all of them, and the rank's own problem that follows them.

    Each rank solves its part as if some of the other ranks that have a feature changed its weight as this one does. If it were all of
    them, the sum of all changes would surely raise the dual objective (a separable bound of the square of the sum, feature by feature:
    Fercoq and Richtarik 2015; with the number of all ranks for every feature it is CoCoA+, Ma et al. 2015). Equal changes need that,
    orthogonal ones none. After the sum it is known how long it is, and how steeply the objective rises along it: so only so large a
    share of the change is made as raises the objective most (a line search, by a bound that is exact but for the curvature of the
    losses' conjugates).

    The features that several ranks have are the same in every sum: their values alone travel.

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
        self._local, self._comm, self._counted = local, comm, _COUNTED[comm.size > 2]
        self._shared, width = SharedFeatures(local.numbering, features, comm), local.width
        slots = local.numbering.slots
        self.weights = np.zeros((len(self._shared) + (local.numbering.intercept >= 0)) * width if comm.size > 1 else 0)
        if comm.size == 1:
            return
        size, visits = len(self.weights), sum(gather(comm, local.rows > 0))
        # A slot a weight, of which a feature has several where there are several scores.
        kind = index_dtype(size + _TOLD)
        self._slots = (slots[:, np.newaxis] * width + np.arange(width)).reshape(-1).astype(kind)
        self._others = np.append(self._shared.holders, max(1, visits))[slots] - 1.0
        self._given = np.zeros(len(self._slots) + _TOLD, dtype)
        stream = SparseStream(np.append(self._slots, np.arange(size, size + _TOLD, dtype=kind)), self._given, size + _TOLD)
        self._sum = allreduce_init(stream, comm, fixed_indices=True)

    def begin(self) -> None:
        """Have the rank's problem, whose values are known, count its changes so."""
        if self._comm.size > 1:
            self._local.count_others(self._counted * self._others)
            self._note()

    def _note(self) -> None:
        """Remember the rank's weights and dual variables, to go back to."""
        local, own = self._local, len(self._slots)
        self._before, self._alone, self._dual_before = local.weights[:own].copy(), local.weights[own:].copy(), local.dual.copy()
        self._conjugates = local.conjugates()

    @property
    def sigma(self) -> float:
        """How often a rank's change of a weight that all ranks have counts in its problem."""
        return 1.0 + self._counted * (int(self._comm.size) - 1)

    @property
    def shared_features(self) -> int:
        """Features that several ranks have."""
        return len(self._shared)

    def own_change(self, gap: float) -> Array:
        """The change of the rank's weights since the last sum, as far as others have them too; and numbers to be summed with it.

        Not collective.

        Parameters
        ----------
        gap : float
            Of the samples that made the change.
        """
        local, given, own = self._local, self._given, len(self._slots)
        counted = weight_changes.change(local.weights, self._before, local.scales, local.width, given[:own])
        slope, square = weight_changes.along(self._alone, local.weights[own:])
        given[own:] = gap, slope + local.conjugates() - self._conjugates, square, counted, 0.0
        return given

    def failure(self) -> Array:
        """What a rank gives in the place of its change if it has none."""
        self._given[:] = 0.0
        self._given[-1] = 1.0
        return self._given

    def add(self, change: Array) -> float | None:
        """Add up the changes of all ranks; the sum of the gaps, or None if a rank has failed, and nothing has changed. Collective."""
        local, size, own = self._local, len(self.weights), len(self._slots)
        self._sum.start(change)
        total = all_values(self._sum.wait())
        gap, slope, square, counted, failed = total[size:].astype(np.float64).tolist()
        if failed:
            local.weights[:own], local.weights[own:], local.dual[:] = self._before, self._alone, self._dual_before
            return None
        of_shared, length = weight_changes.slope_and_square(self.weights, total[:size])
        share, rise = 1.0, -(slope + of_shared)
        if length + square > 0:  # a rise that is none is of rounding
            share = min(1.0, (rise if rise > 0 else counted + square) / (length + square))
        if share < 1:
            weight_changes.step_back(local.dual.reshape(-1), self._dual_before.reshape(-1), share)
            weight_changes.step_back(local.weights[own:], self._alone, share)
        weight_changes.settle(total[:size], share, self._slots, self.weights, local.weights, self._before)
        self._alone[:], self._dual_before[:] = local.weights[own:], local.dual
        self._conjugates = local.conjugates()
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
        self._note()

    def move_intercept(self, change: Array) -> None:
        """Add to the intercepts, on all ranks alike, what belongs to no dual variable."""
        self._local.move_intercept(change)
        if self._comm.size > 1:
            self.weights[-self._local.width :] += change
            self._note()

    def scale(self, factor: float, centre: Array) -> None:
        """Multiply all weights by a factor, the intercepts by their distance from ``centre``; dual variables follow."""
        local = self._local
        local.scale(factor, centre)
        self.weights *= factor
        if self._comm.size > 1:
            if local.numbering.intercept >= 0:
                self.weights[-local.width :] += (1 - factor) * centre
            self._note()

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


def all_values(total: SparseStream) -> Array:
    """The values of a sum at all of its positions."""
    return total._stored if len(total._stored) == total.size else total.to_dense()
