"""One rank's part of a dual problem: its samples, their dual variables, and the weights of its features."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.dataset import Dataset, read_only
from sparseallreduce.linear.kernels import dual as kernels
from sparseallreduce.linear.kernels import dual_classes as class_kernels
from sparseallreduce.linear.kernels import dual_errors as error_kernels
from sparseallreduce.linear.kernels import weight_changes
from sparseallreduce.linear.solvers.frames import Frame
from sparseallreduce.linear.solvers.numbering import Numbering

__all__ = ["MULTINOMIAL", "Certificate", "ClassProblem", "ErrorProblem", "LocalProblem", "Passes"]

Array = NDArray[Any]

MULTINOMIAL = -1  # used instead of the number of a binary loss
_ENOUGH = 0.25  # smallest number of visits per round, as a fraction of the rank's samples, however few of them are active
_MOST = 8  # largest number of passes over few active samples, per requested pass


class Certificate(NamedTuple):
    """A rank's part of both objectives at the present weights."""

    losses: float  # sum of its samples' losses, each times its bound
    conjugates: float  # sum of its samples' conjugates
    squares: float  # sum of squares of the weights of features that no other rank has


class Passes(NamedTuple):
    """The results of passes over a rank's active samples."""

    gap: float  # sum of the samples' gaps before their visits in the last pass
    before: float  # the same for the pass before the last; infinite if there was none
    nonzeros: int  # number of non-zeros processed


class LocalProblem:
    """A rank's part of the dual problem, in LIBLINEAR's scale: each sample's loss is multiplied by its bound, the penalty by 1/2.

    Parameters
    ----------
    dataset : Dataset
        Checked samples of this rank.
    loss : int
        A loss number of :mod:`sparseallreduce.linear.kernels.dual`.
    l2 : float
    intercept : bool
    seed : int
        Seed of the order of visits, combined with the number of the rank's first sample.

    Attributes
    ----------
    dual : ndarray
        Dual variable of each sample.
    weights : ndarray
        Weights by position.
    active : int
        Number of samples that the next pass visits.
    limits : ndarray
        Projected gradients above and below which samples at a bound are deactivated.
    has_ones : bool
        Whether all values are 1.
    """

    loss: int
    numbering: Numbering
    scales: Array

    width = 1  # number of weights per feature

    def __init__(self, dataset: Dataset, loss: int, l2: float, intercept: bool, seed: int) -> None:
        self.loss, self._settings, self._dataset = loss, (loss, l2, intercept, seed), dataset
        self.numbering = numbering = Numbering(dataset, intercept)
        begin, end = int(dataset.indptr[0]), int(dataset.indptr[-1])
        self._norms = np.empty(dataset.rows)
        values = self._values = dataset.values[begin:end]
        indptr, frame = read_only(dataset.indptr - begin), np.empty(0)
        self.has_ones: bool = bool((values == 1).all())
        self._rows = indptr, read_only(numbering.indices), values[:0] if self.has_ones else values, frame, dataset.labels
        self.frame: Frame | None = None
        self._counts = np.ones(dataset.rows) if dataset.weights is None else dataset.weights
        self._bounds, self._widening = self._counts / (dataset.total_samples * l2), 1.0
        self.scales: Array = np.empty(0)
        self.dual: Array = np.zeros(dataset.rows)
        self.weights: Array = np.zeros(numbering.size)
        self._active = np.empty(dataset.rows, np.int64)
        counted = np.flatnonzero(self._bounds > 0)
        self.active: int = len(counted)
        self._active[: self.active] = counted
        self.limits: Array = np.array([math.inf, -math.inf])
        seeds = np.random.SeedSequence((seed, dataset.first_sample))
        self._state = seeds.generate_state(1, np.uint64)
        self._order = np.random.default_rng(seeds)
        self.margins: Array = np.empty(dataset.rows)

    def take(self, frame: Frame | None, others: Array | None = None) -> None:
        """Complete the problem. Called before the first pass, when features have positions.

        Parameters
        ----------
        frame : Frame, optional
            How to shift and scale values.
        others : ndarray, optional
            For each of this rank's slots, the number of other ranks that are assumed to make the same change of its weight.

        Raises
        ------
        DatasetError
            If the sum of squares of a sample's values is not finite.
        """
        if frame is not None:
            # Values are given even if all are ones on this rank, because those of other ranks are not.
            indptr, indices, _, _, labels = self._rows
            self.frame, self._rows = frame, (indptr, indices, self._values, frame.by_place(self.numbering), labels)
        if others is not None:
            theirs = others[:1] if (others == others[:1]).all() else others  # of two ranks all are equal, and need no look-up
            self.scales = np.append(float(len(others)), 1.0 + theirs)
        kernels.squared_norms(*self._rows[:4], self.scales, self.numbering.intercept, self._norms)
        strange = np.flatnonzero(~np.isfinite(self._norms))
        if len(strange):
            where = f"{self._dataset.source}: the squares of sample {self._dataset.first_sample + strange[0]}'s values"
            raise DatasetError(f"{where} overflow: scale them")

    def penalise(self, l2: float) -> None:
        """Change the penalty. :meth:`scale` has to be called before a pass, with a factor of at most the growth of the bounds."""
        loss, before, intercept, seed = self._settings
        self._settings, self._widening = (loss, l2, intercept, seed), before / l2
        self._bounds = self._counts / (self._dataset.total_samples * l2)
        self._activate_all()

    def scaled(self, factor: float) -> Array:
        """Return the dual variables of the weights times a factor, for the new bounds."""
        return factor * self.dual

    def scale(self, factor: float, centre: Array) -> None:
        """Multiply the weights by a factor, and the intercepts' distances from ``centre``, and update the dual variables."""
        first = self.numbering.intercept * self.width
        self.dual[:] = self.scaled(factor)
        self.weights *= factor
        if first >= 0:
            self.weights[first : first + self.width] += (1 - factor) * centre

    @property
    def intercept(self) -> Array:
        """A copy of the intercepts, one per weight of a feature; empty without intercept."""
        first = self.numbering.intercept * self.width
        return self.weights[first : first + self.width].copy() if first >= 0 else np.empty(0)

    def move_intercept(self, change: Array) -> None:
        """Add a change to the intercepts without a change of dual variables, and activate all samples."""
        first = self.numbering.intercept * self.width
        self.weights[first : first + self.width] += change
        self._activate_all()

    def _activate_all(self) -> None:
        self.activate(np.flatnonzero(self._bounds > 0))
        self.limits[:] = math.inf, -math.inf

    @property
    def rows(self) -> int:
        """The number of samples of this rank."""
        return len(self.dual)

    @property
    def entries(self) -> int:
        """The number of non-zeros of this rank."""
        return len(self.numbering.indices)

    @property
    def active_rows(self) -> Array:
        """The samples that the next pass visits."""
        return self._active[: self.active].copy()

    @property
    def feature_weights(self) -> Array:
        """The weights of ``numbering.features``."""
        return self.weights[self.numbering.places]

    def entries_of(self, rows: Array) -> int:
        """Return the number of non-zeros of some samples."""
        indptr = self._rows[0]
        return int((indptr[rows + 1] - indptr[rows]).sum())

    def weights_of(self, rows: Array) -> tuple[Array, Array]:
        """Return the features of some samples in ascending order, and their weights."""
        occurs = np.zeros(self.numbering.size, bool)
        weight_changes.occurring(self._rows[0], self._rows[1], rows, occurs)
        chosen = occurs[self.numbering.places]
        return self.numbering.features[chosen], self.weights[self.numbering.places[chosen]]

    def assign(self, features: Array, weights: Array) -> None:
        """Set the weights of the given features, which must be sorted, if they occur on this rank."""
        weight_changes.assign(self.numbering.features, self.numbering.places, features, weights, self.weights)

    def activate(self, rows: Array) -> None:
        """Set the samples that the next pass visits."""
        self.active = len(rows)
        self._active[: self.active] = rows

    def _of(self, dataset: Dataset) -> LocalProblem:
        return LocalProblem(dataset, *self._settings)

    def like(self, dataset: Dataset) -> LocalProblem:
        """Return a problem for other samples with the same shifts and factors, whose rank shares no feature with others."""
        problem = self._of(dataset)
        nothing = problem.numbering.features[:0]
        problem.numbering.arrange(nothing, problem.numbering.places[:0], alone=True)
        problem.take(self.frame)
        return problem

    def deal(self, parts: int) -> None:
        """Divide the active samples, in random order, into the parts of a pass."""
        self._order.shuffle(self._active[: self.active])
        self._cuts = [self.active * part // parts for part in range(parts + 1)]
        self._kept, self._reached = 0, np.array([-math.inf, math.inf])

    def ascend_part(self, part: int) -> float:
        """Process one part of a pass, in order; return the sum of its samples' gaps before their visits."""
        low, high = self._cuts[part], self._cuts[part + 1]
        rows, limits = self._active[low:high], self.limits.copy()
        kept, gap = self._pass(rows, high - low, limits)
        self._active[self._kept : self._kept + kept] = rows[:kept]
        self._kept += kept
        highest, lowest = limits
        self._reached[0] = max(self._reached[0], highest if highest < math.inf else -math.inf)
        self._reached[1] = min(self._reached[1], lowest if lowest > -math.inf else math.inf)
        if part + 2 == len(self._cuts):
            self.active = self._kept
            highest, lowest = self._reached
            self.limits[:] = highest if highest > 0 else math.inf, lowest if lowest < 0 else -math.inf
        return gap

    def ascend(self, passes: int) -> float:
        """Process the active samples; return the sum of their gaps before their visits in the last pass.

        If few samples are active, more passes are made.
        """
        left, done, gap = passes * _ENOUGH * self.rows, 0, 0.0
        while done < passes or (len(self.scales) and left > 0 and self.active > 0 and done < _MOST * passes):
            left -= self.active
            done += 1
            self.active, gap = self._pass(self._active, self.active, self.limits)
        return gap

    def ascend_until(self, passes: int, visits: int, enough: float) -> Passes:
        """Process the active samples again and again until their gaps are expected to be small enough.

        Parameters
        ----------
        passes : int
            Smallest number of passes.
        visits : int
            Number of visits of samples after which no further pass begins.
        enough : float
            Sum of gaps that is small enough.
        """
        gap, before, expected, nonzeros = math.inf, math.inf, math.inf, 0
        while passes > 0 or (visits > 0 and expected > enough):
            passes, visits = passes - 1, visits - max(1, self.active)
            nonzeros += self.entries_of(self.active_rows)
            self.active, found = self._pass(self._active, self.active, self.limits)
            before, gap = gap, found
            expected = gap * min(1.0, gap / before) if 0 < before < math.inf else gap
        return Passes(gap, before, nonzeros)

    def _pass(self, rows: Array, count: int, limits: Array) -> tuple[int, float]:
        """Visit the first ``count`` of these rows once; move those that stay active to the front, and return their number and the gap."""
        kept, gap = kernels.ascend(self.loss, *self._problem, rows, count, limits, self._state)
        return int(kept), float(gap)

    @property
    def _problem(self) -> tuple[Any, ...]:
        """The arguments that all kernels of passes begin with."""
        return *self._rows, self._bounds, self._norms, self.dual, self.weights, self.numbering.intercept, self.scales

    def conjugates(self, dual: Array | None = None) -> float:
        """Return the sum of the samples' terms of the dual objective (to be minimised), at the given dual variables or the present ones."""
        return float(kernels.conjugates(self.loss, self._bounds, self.dual if dual is None else dual))

    def squares(self) -> float:
        """Return the sum of squares of the weights that no other rank has."""
        return float(weight_changes.squared_length(self.weights[len(self.numbering.slots) * self.width :]))

    @property
    def scores(self) -> Array:
        """The scores of the rank's samples when :meth:`certify` was last called."""
        return np.asarray(self._dataset.labels * self.margins)

    def certify(self) -> Certificate:
        """Return this rank's part of both objectives, and reactivate samples that were deactivated too early."""
        kernels.margins(*self._rows, self.weights, self.numbering.intercept, self.margins)
        sums = np.empty(2)
        self.active = kernels.certify(self.loss, self.margins, self._bounds, self.dual, self.limits, self._active, sums)
        return Certificate(float(sums[0]), float(sums[1]), self.squares())


class ClassProblem(LocalProblem):
    """The :class:`LocalProblem` of multinomial logistic regression: labels are class numbers, ``dual`` holds fractions of the bounds.

    The weights of a feature, one per class, are adjacent. Samples are never deactivated.

    Parameters
    ----------
    classes : int
    """

    def __init__(self, dataset: Dataset, classes: int, l2: float, intercept: bool, seed: int) -> None:
        super().__init__(dataset, MULTINOMIAL, l2, intercept, seed)
        self.width = classes
        self.dual: Array = np.zeros((dataset.rows, classes))
        self.dual[np.arange(dataset.rows), dataset.labels.astype(np.intp)] = 1.0
        self.weights: Array = np.zeros(self.numbering.size * classes)
        self.margins: Array = np.empty((dataset.rows, classes))

    @property
    def scores(self) -> Array:
        return self.margins

    def scaled(self, factor: float) -> Array:
        moved = self.dual * (factor / self._widening)
        moved[np.arange(self.rows), self._dataset.labels.astype(np.intp)] += 1 - factor / self._widening
        return moved

    def conjugates(self, dual: Array | None = None) -> float:
        return float(class_kernels.entropies(self._bounds, self.dual if dual is None else dual))

    def certify(self) -> Certificate:
        given = *self._rows, self._bounds, self.weights, self.numbering.intercept
        losses = class_kernels.certify_classes(*given, self.margins)
        return Certificate(float(losses), self.conjugates(), self.squares())

    def _pass(self, rows: Array, count: int, limits: Array) -> tuple[int, float]:
        return count, float(class_kernels.ascend_classes(*self._problem, rows, count, self._state))


class ErrorProblem(LocalProblem):
    """The :class:`LocalProblem` of the epsilon-insensitive losses: labels are numbers, and dual variables have either sign.

    Parameters
    ----------
    epsilon : float
        In units of the labels.
    """

    def __init__(self, dataset: Dataset, loss: int, epsilon: float, l2: float, intercept: bool, seed: int) -> None:
        super().__init__(dataset, loss, l2, intercept, seed)
        self._errors = loss == error_kernels.SQUARED_EPSILON_INSENSITIVE, epsilon

    def _of(self, dataset: Dataset) -> LocalProblem:
        loss, l2, intercept, seed = self._settings
        return ErrorProblem(dataset, loss, self._errors[1], l2, intercept, seed)

    @property
    def scores(self) -> Array:
        return self.margins

    def conjugates(self, dual: Array | None = None) -> float:
        dual = self.dual if dual is None else dual
        return float(error_kernels.conjugates_of_errors(*self._errors, self._dataset.labels, self._bounds, dual))

    def certify(self) -> Certificate:
        indptr, indices, values, frame, labels = self._rows
        ones = np.ones(self.rows)
        kernels.margins(indptr, indices, values, frame, ones, self.weights, self.numbering.intercept, self.margins)
        sums, given = np.empty(2), (labels, self._bounds, self.dual, self.limits, self._active)
        self.active: Any = error_kernels.certify_errors(*self._errors, self.margins, *given, sums)
        return Certificate(float(sums[0]), float(sums[1]), self.squares())

    def _pass(self, rows: Array, count: int, limits: Array) -> tuple[int, float]:
        kept, gap = error_kernels.ascend_errors(*self._errors, *self._problem, rows, count, limits, self._state)
        return int(kept), float(gap)
