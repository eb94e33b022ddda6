"""The sum over ranks of the changes of the weights of features that several ranks have (CoCoA+, algorithm 1)."""

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

# Fraction of the other ranks with a feature that a rank assumes to make the same change, on two ranks and on more. Gaps of 20,000 samples
# like URL's, logistic, after 4 rounds: 2 ranks 1.8e-3, 1.1e-3, 1.3e-3 with 0, 1/4, 1/2; 8 ranks .45, .016, .026 with 1/4, 1/2, 3/4.
_COUNTED = (0.25, 0.5)
_EXTRA = 5  # numbers summed with a change: gap, slope of the objective along the change, two squared lengths, number of failed ranks


class Exchange:
    """The weights of features that several ranks have, equal on all ranks, and their effect on the rank's own problem.

    Each rank solves its part as if a fraction of the other ranks with a feature changed its weight in the same way. If all of them were
    assumed to, the sum of all changes would be certain to raise the dual objective (a separable bound of the square of the sum, feature by
    feature: Fercoq and Richtarik 2015; with the number of all ranks for every feature it is CoCoA+, Ma et al. 2015). Equal changes need
    that assumption, orthogonal ones do not. The sum yields its own length and the slope of the objective along it, so only the fraction of
    the change that raises the objective most is applied (a line search with a bound that is exact except for the curvature of the losses'
    conjugates).

    The features that several ranks have are the same in every sum, so only their values are sent.

    Parameters
    ----------
    local : LocalProblem
    features : int
        Number of features, N.
    comm : communicator
    dtype : dtype
        Data type in which changes are summed.
    """

    def __init__(self, local: LocalProblem, features: int, comm: Any, dtype: DTypeLike) -> None:
        self._local, self._comm, self._counted = local, comm, _COUNTED[comm.size > 2]
        self._shared, width = SharedFeatures(local.numbering, features, comm), local.width
        slots = local.numbering.slots
        self.weights: Array = np.zeros((len(self._shared) + (local.numbering.intercept >= 0)) * width if comm.size > 1 else 0)
        if comm.size == 1:
            return
        size, visits = len(self.weights), sum(gather(comm, local.rows > 0))
        # One slot per weight; with several scores, a feature has several weights.
        kind = index_dtype(size + _EXTRA)
        self._slots = (slots[:, np.newaxis] * width + np.arange(width)).reshape(-1).astype(kind)
        self._others = np.append(self._shared.holders, max(1, visits))[slots] - 1.0
        self._given = np.zeros(len(self._slots) + _EXTRA, dtype)
        stream = SparseStream(np.append(self._slots, np.arange(size, size + _EXTRA, dtype=kind)), self._given, size + _EXTRA)
        self._sum = allreduce_init(stream, comm, fixed_indices=True)

    def begin(self) -> None:
        """Prepare the rank's problem, whose values are known now, for changes by other ranks."""
        if self._comm.size > 1:
            self._local.count_others(self._counted * self._others)
            self._note()

    def _note(self) -> None:
        """Save the rank's weights and dual variables, to be restored on failure or shortened by the line search."""
        local, own = self._local, len(self._slots)
        self._before, self._alone, self._dual_before = local.weights[:own].copy(), local.weights[own:].copy(), local.dual.copy()
        self._conjugates = local.conjugates()

    @property
    def sigma(self) -> float:
        """The factor by which a rank's change of a weight that all ranks have counts in its problem."""
        return 1.0 + self._counted * (int(self._comm.size) - 1)

    @property
    def shared_features(self) -> int:
        """The number of features that several ranks have."""
        return len(self._shared)

    def own_change(self, gap: float) -> Array:
        """Return the change of the shared weights since the last sum, followed by numbers to sum with it. Not collective.

        Parameters
        ----------
        gap : float
            Sum of the gaps of the samples that made the change.
        """
        local, given, own = self._local, self._given, len(self._slots)
        counted = weight_changes.change(local.weights, self._before, local.scales, local.width, given[:own])
        slope, square = weight_changes.along(self._alone, local.weights[own:])
        given[own:] = gap, slope + local.conjugates() - self._conjugates, square, counted, 0.0
        return given

    def failure(self) -> Array:
        """Return what a rank that failed contributes to the sum."""
        self._given[:] = 0.0
        self._given[-1] = 1.0
        return self._given

    def add(self, change: Array) -> float | None:
        """Sum the changes of all ranks; return the sum of gaps, or None if a rank failed and all changes are undone. Collective."""
        local, size, own = self._local, len(self.weights), len(self._slots)
        self._sum.start(change)
        total = all_values(self._sum.wait())
        gap, slope, square, counted, failed = total[size:].astype(np.float64).tolist()
        if failed:
            local.weights[:own], local.weights[own:], local.dual[:] = self._before, self._alone, self._dual_before
            return None
        of_shared, length = weight_changes.slope_and_square(self.weights, total[:size])
        share, rise = 1.0, -(slope + of_shared)
        if length + square > 0:  # a rise that is not positive is a rounding error
            share = min(1.0, (rise if rise > 0 else counted + square) / (length + square))
        if share < 1:
            weight_changes.step_back(local.dual.reshape(-1), self._dual_before.reshape(-1), share)
            weight_changes.step_back(local.weights[own:], self._alone, share)
        weight_changes.settle(total[:size], share, self._slots, self.weights, local.weights, self._before)
        self._alone[:], self._dual_before[:] = local.weights[own:], local.dual
        self._conjugates = local.conjugates()
        return float(gap)

    def assign(self, features: Array, weights: Array, intercept: float) -> None:
        """Set the weights of features, in ascending order, and the intercept if there is one; all ranks set the same.

        The matching dual variables have to be set before.
        """
        local = self._local
        weight_changes.assign(self._shared.features, self._shared.slots, features, weights, self.weights)
        local.assign(features, weights)
        if local.numbering.intercept >= 0:
            self.weights[-1] = local.weights[local.numbering.intercept] = intercept
        self._note()

    def move_intercept(self, change: Array) -> None:
        """Add a change, the same on all ranks, to the intercepts, without a change of dual variables."""
        self._local.move_intercept(change)
        if self._comm.size > 1:
            self.weights[-self._local.width :] += change
            self._note()

    def scale(self, factor: float, centre: Array) -> None:
        """Multiply all weights by a factor, and the intercepts' distances from ``centre``; dual variables follow."""
        local = self._local
        local.scale(factor, centre)
        self.weights *= factor
        if self._comm.size > 1:
            if local.numbering.intercept >= 0:
                self.weights[-local.width :] += (1 - factor) * centre
            self._note()

    def squares(self) -> float:
        """Return the sum of squares of the shared weights."""
        return float(weight_changes.squared_length(self.weights))

    def state(self) -> tuple[Array, Array]:
        """Return a copy of the weights, from which :meth:`assembled` builds the whole vector."""
        return self.weights.copy(), self._local.weights.copy()

    def assembled(self, state: tuple[Array, Array] | None) -> Array:
        """Return the weights of all features for a state, by default the present one, the same on every rank. Collective.

        The intercept is last, if there is one.
        """
        shared, own = state or (self.weights, self._local.weights)
        whole = self._shared.assembled(shared, own, self._local.width)
        if self._local.frame is not None:
            for column in whole.T:
                self._local.frame.undo(column, self._local.numbering.intercept >= 0)
        return whole[:, 0] if self._local.width == 1 else whole


def all_values(total: SparseStream) -> Array:
    """Return the values of a sum at all of its positions."""
    return total._stored if len(total._stored) == total.size else total.to_dense()
