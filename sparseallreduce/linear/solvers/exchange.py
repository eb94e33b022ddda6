"""The sum over ranks of the changes of the weights of features that several ranks have (CoCoA+, algorithm 1)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.linear.kernels import weight_changes
from sparseallreduce.linear.solvers.frames import Frame
from sparseallreduce.linear.solvers.local import LocalProblem
from sparseallreduce.linear.solvers.sharing import SharedFeatures
from sparseallreduce.runtime.objects import gather
from sparseallreduce.runtime.plan import Plan
from sparseallreduce.runtime.planning import allreduce_init
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["Exchange"]

Array = NDArray[Any]

# Fraction of the other ranks with a feature that a rank assumes to make the same change, on two ranks and on more. Gaps of 20,000 samples
# like URL's, logistic, after 4 rounds: 2 ranks 1.8e-3, 1.1e-3, 1.3e-3 with 0, 1/4, 1/2; 8 ranks .45, .016, .026 with 1/4, 1/2, 3/4.
_COUNTED = (0.25, 0.5)
# A feature is frequent if it occurs this many times per rank in the samples that are counted, a quarter of all.
_FREQUENT = 10
_EXTRA = 5  # numbers summed with a change: gap, slope of the objective along the change, two squared lengths, number of failed ranks


class Exchange:
    """The weights of features that several ranks have, equal on all ranks, and their effect on the rank's own problem.

    Each rank solves its part as if a fraction of the other ranks with a feature changed its weight in the same way. If all of them were
    assumed to, the sum of all changes would be certain to raise the dual objective (a separable bound of the square of the sum, feature by
    feature: Fercoq and Richtarik 2015; with the number of all ranks for every feature it is CoCoA+, Ma et al. 2015). Equal changes need
    that assumption, orthogonal ones do not. The sum yields its own length and the slope of the objective along it, so only the fraction of
    the change that raises the objective most is applied (a line search with a bound that is exact except for the curvature of the losses'
    conjugates).

    The features that several ranks have are the same in every sum, so only their values are sent. A pass ends with a sum of all of them.
    Frequent features are summed several times before, because every part of a pass changes them on all ranks; the line search at the end
    is along the whole change.

    Parameters
    ----------
    local : LocalProblem
    features : int
        Number of features, N.
    comm : communicator
    dtype : dtype
        Data type in which changes are summed.
    """

    _early: Array  # sums of the changes of frequent features since the last sum of all, those of the intercept last

    def __init__(self, local: LocalProblem, features: int, comm: Any, dtype: DTypeLike) -> None:
        self._local, self._comm, self._counted = local, comm, _COUNTED[comm.size > 2]
        self._shared, width = SharedFeatures(local.numbering, features, comm), local.width
        slots = local.numbering.slots
        self.weights: Array = np.zeros((len(self._shared) + (local.numbering.intercept >= 0)) * width if comm.size > 1 else 0)
        if comm.size == 1:
            return
        size, holding = len(self.weights), max(1, sum(gather(comm, local.rows > 0)))
        # One slot per weight; with several scores, a feature has several weights.
        kind = index_dtype(size + _EXTRA)
        self._slots = slots.astype(kind)
        if width > 1:
            self._slots = (self._slots[:, np.newaxis] * kind.type(width) + np.arange(width, dtype=kind)).reshape(-1)
        self._others = np.broadcast_to(holding - 1.0, slots.shape)  # of two ranks both have each of these features
        if comm.size > 2:
            self._others = np.append(self._shared.holders, holding)[slots] - 1.0
        self._given, self._whole = np.zeros(len(self._slots) + _EXTRA, dtype), np.zeros(size, dtype)
        self._sum = self._plan(self._slots, self._given, size)
        frequent, constant = self._shared.frequent(_FREQUENT * holding) * width, width * (local.numbering.intercept >= 0)
        early = np.append(self._slots[: np.searchsorted(self._slots, frequent)], frequent + np.arange(constant, dtype=kind))
        self._early_slots, self._constant = early, constant
        self._given_early = np.zeros(len(early) + 1, dtype)
        self._sum_early = self._plan(early, self._given_early, frequent + constant)
        self._early = np.zeros(frequent + constant, dtype)

    def _plan(self, slots: Array, values: Array, size: int) -> Plan:
        """Return a plan for sums of the values at some of ``size`` slots, followed by numbers that all ranks have."""
        size_of_all = size + len(values) - len(slots)
        indices = np.append(slots, np.arange(size, size_of_all, dtype=slots.dtype))
        return allreduce_init(SparseStream(indices, values, size_of_all), self._comm, fixed_indices=True)

    def begin(self, frame: Frame | None) -> None:
        """Complete the rank's problem, for changes by other ranks and with values shifted and scaled by ``frame``. Not collective.

        Raises
        ------
        DatasetError
            As for :meth:`~sparseallreduce.linear.solvers.local.LocalProblem.take`.
        """
        if self._comm.size == 1:
            self._local.take(frame)
            return
        self._local.take(frame, self._counted * self._others)
        self._note()

    def _note(self) -> None:
        """Save the rank's weights and dual variables, to be restored on failure or shortened by the line search."""
        local, own = self._local, len(self._slots)
        self._before, self._alone, self._dual_before = local.weights[:own].copy(), local.weights[own:].copy(), local.dual.copy()
        self._conjugates = local.conjugates()
        self._forget_early()

    def _forget_early(self) -> None:
        self._early[:], self._counted_early, self._is_open = 0.0, 0.0, False

    def open(self) -> None:
        """Begin a pass; undo what an earlier one changed, if it was interrupted before its last sum. Not collective."""
        if self._is_open:
            self._undo()
        self._is_open = True

    def _undo(self) -> None:
        """Restore the weights and dual variables after the last sum of all features."""
        local, own = self._local, len(self._slots)
        local.weights[:own] = self._before[:] = self.weights[self._slots]
        local.weights[own:], local.dual[:] = self._alone, self._dual_before
        self._forget_early()

    @property
    def sigma(self) -> float:
        """The factor by which a rank's change of a weight that all ranks have counts in its problem."""
        return 1.0 + self._counted * (int(self._comm.size) - 1)

    @property
    def shared_features(self) -> int:
        """The number of features that several ranks have."""
        return len(self._shared)

    @property
    def frequent_features(self) -> int:
        """The number of features that are summed several times in a pass."""
        return (len(self._early) - self._constant) // self._local.width

    def own_early_change(self) -> Array:
        """Return the change of the weights of frequent features since the last sum. Not collective."""
        local, given, constant = self._local, self._given_early, self._constant
        own, last = len(self._early_slots) - constant, len(self._slots) - constant
        counted = weight_changes.change(local.weights, self._before, local.scales, local.width, given[:own])
        given[own:-1] = (local.weights[last : last + constant] - self._before[last:]) / local.scales[-1]
        given[-1] = 0.0
        self._counted_early += counted + float(local.scales[-1] * np.square(given[own:-1], dtype=np.float64).sum())
        return given

    def add_early(self, change: Array) -> bool:
        """Sum the changes of frequent features; return False if a rank failed and all changes are undone. Collective."""
        local, constant = self._local, self._constant
        own, last = len(self._early_slots) - constant, len(self._slots) - constant
        self._sum_early.start(change)
        total = all_values(self._sum_early.wait())
        if total[-1]:
            self._undo()
            return False
        self._early += total[:-1]
        weight_changes.move(total, self._early_slots[:own], self._before, local.weights)
        self._before[last:] += total[len(self._early) - constant : -1]
        local.weights[last : last + constant] = self._before[last:]
        return True

    def own_change(self, gap: float) -> Array:
        """Return the change of the shared weights since the last sum, followed by numbers to sum with it. Not collective.

        Parameters
        ----------
        gap : float
            Sum of the gaps of the samples that made the changes since the last sum of all features.
        """
        local, given, own = self._local, self._given, len(self._slots)
        counted = self._counted_early + weight_changes.change(local.weights, self._before, local.scales, local.width, given[:own])
        slope, square = weight_changes.along(self._alone, local.weights[own:])
        given[own:] = gap, slope + local.conjugates() - self._conjugates, square, counted, 0.0
        return given

    def failure(self, early: bool) -> Array:
        """Return what a rank that failed contributes to a sum of all features, or of frequent ones."""
        given = self._given_early if early else self._given
        given[:] = 0.0
        given[-1] = 1.0
        return given

    def add(self, change: Array) -> float | None:
        """Sum the changes of all ranks; return the sum of gaps, or None if a rank failed and all changes are undone. Collective."""
        local, size, own, whole = self._local, len(self.weights), len(self._slots), self._whole
        self._sum.start(change)
        total = all_values(self._sum.wait())
        gap, slope, square, counted, failed = total[size:].astype(np.float64).tolist()
        if failed:
            self._undo()
            return None
        frequent = len(self._early) - self._constant
        whole[:] = total[:size]
        whole[:frequent] += self._early[:frequent]
        whole[size - self._constant :] += self._early[frequent:]
        of_shared, length = weight_changes.slope_and_square(self.weights, whole)
        share, rise = 1.0, -(slope + of_shared)
        if length + square > 0:  # a rise that is not positive is a rounding error
            share = min(1.0, (rise if rise > 0 else counted + square) / (length + square))
        if share < 1:
            weight_changes.step_back(local.dual.reshape(-1), self._dual_before.reshape(-1), share)
            weight_changes.step_back(local.weights[own:], self._alone, share)
        weight_changes.settle(whole, share, self._slots, self.weights, local.weights, self._before)
        self._alone[:], self._dual_before[:] = local.weights[own:], local.dual
        self._conjugates = local.conjugates()
        self._forget_early()
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
