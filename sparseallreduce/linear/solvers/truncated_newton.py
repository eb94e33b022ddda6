"""Newton's method for many features: few iterations, each with some products with the Hessian (LIBLINEAR's -s 0 and -s 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import AlgorithmError, DatasetError, DivergenceError
from sparseallreduce.linear.data.checks import checked_samples
from sparseallreduce.linear.data.dataset import Dataset, read_only
from sparseallreduce.linear.kernels import truncated_newton as kernels
from sparseallreduce.linear.kernels.dual import LOGISTIC, SQUARED_HINGE
from sparseallreduce.linear.kernels.dual_warming import warm_up_truncated_newton
from sparseallreduce.linear.models import LinearModel, Logistic, Squared, SquaredHinge
from sparseallreduce.linear.solvers.cocoa import Round, State
from sparseallreduce.linear.solvers.frames import frame_of
from sparseallreduce.linear.solvers.numbering import Numbering
from sparseallreduce.linear.solvers.sharing import SharedFeatures
from sparseallreduce.linear.strategies.clock import Clock
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.objects import agreed, gather, together
from sparseallreduce.runtime.planning import allreduce_init
from sparseallreduce.runtime.stalls import collective
from sparseallreduce.runtime.trace import trace
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["TruncatedNewton", "has_second_derivatives", "newton_loss"]

Array = NDArray[Any]

# Looked up by exact type, because a subclass may have another loss.
_KNOWN: dict[type[LinearModel], int] = {Logistic: LOGISTIC, SquaredHinge: SQUARED_HINGE, Squared: kernels.SQUARED}
_EXTRA = 6  # room for numbers that are summed with vectors
# Norm to which the residual of a step is reduced, as a fraction: at first; at last; and the factor after a step of little progress.
_INNER, _INNERMOST, _FINER = 0.1, 1e-7, 0.1
_LITTLE = 0.5  # a step that leaves more than this fraction of the gap makes little progress
_STILL = 0.01  # a step that reduces the objective by less than this fraction leaves it as it is
_DIAGONAL = 0.01  # fraction of the Hessian's diagonal in the preconditioner; the rest is the identity (Hsia et al. 2018)
_ENOUGH, _GOOD = 0.5, 0.1  # fraction of the slope that a full step may leave, and to which the line search reduces it otherwise
_SEARCHES = 50  # largest number of points of the line search
_FREE = 1e-6  # penalty of a free intercept, as a fraction of that of other weights
_ROUNDING = 1e-12  # smallest reduction, as a fraction of the objective, that exceeds rounding errors


def newton_loss(model: LinearModel) -> int:
    """Return the kernels' number of a model's loss.

    Raises
    ------
    AlgorithmError
        If the kernels do not implement its second derivative.
    """
    loss = _KNOWN.get(type(model))
    if loss is None:
        known = ", ".join(kind.__name__ for kind in _KNOWN)
        raise AlgorithmError(f"Newton's method knows the losses {known}, not that of {type(model).__name__}")
    return loss


def has_second_derivatives(model: LinearModel) -> bool:
    """Return True if :class:`TruncatedNewton` knows the loss of a model with one score."""
    return type(model) in _KNOWN


class _Step(NamedTuple):
    """A step found by conjugate gradients, and the products of the rows with it."""

    direction: Array
    products: Array


class _Trial(NamedTuple):
    """A point on the line of a step."""

    weights: Array
    scores: Array
    gradient: Array
    diagonal: Array
    objective: float
    steepness: float  # squared norm of the gradient, each square divided by its penalty
    slope: float  # along the step
    first_slope: float  # at the beginning of the step
    derivatives: tuple[Array, Array]


class TruncatedNewton:
    """Finds the weights of a linear model by Newton steps, each solved for by conjugate gradients.

    It minimises ``l2 / 2 * |w|^2 + mean loss``, like :class:`~sparseallreduce.linear.solvers.cocoa.CoCoA`. Every rank multiplies its own
    samples by a direction; the products are summed over the ranks at positions that never change, by an allreduce plan with
    fixed indices. The sum covers the features that several ranks have, and the scalars of the conjugate gradients, so that an inner
    iteration takes one sum. The number of iterations does not depend on the number of ranks. Creating a solver is collective.

    The preconditioner is a mixture of the Hessian's diagonal and the identity (Hsia, Chiang and Lin 2018), and a step that overshoots is
    shortened by a nearly exact line search, with which the squared hinge reaches its optimum in finitely many steps (Keerthi and DeCoste
    2005). LIBLINEAR has replaced its trust region by a line search, too (Galli and Lin 2021). If squares of values are some 1e12 times
    ``l2``, rounding errors of the gradient may keep the gap open.

    Parameters
    ----------
    dataset : Dataset
        This rank's samples; or all samples, the same on every rank, of which each rank takes its share. Labels are -1 and +1, or
        numbers for the squared loss.
    model : Logistic, SquaredHinge or Squared
    l2 : float
        Factor of the penalty, above 0.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.
    tolerance : float
        Training ends when the duality gap is at most this fraction of the objective. The gap follows from the gradient, because the penalty
        is strongly convex: for half the squared weights, it is half the squared gradient.
    rounds : int
        Largest number of Newton steps.
    enough : float
        A gap, in units of the mean loss, at which training ends whatever the objective is.
    intercept : bool
        Whether samples have one more feature of value one, whose weight is penalised like the others.
    free_intercept : bool
        Whether the intercept's penalty is only a millionth of that.
    scale_features : bool or None
        As for :class:`~sparseallreduce.linear.solvers.cocoa.CoCoA`.

    Attributes
    ----------
    history : list of Round
    converged : bool
        True if the gap is below the tolerance, or no step reduces the objective by more than rounding errors.
    weights : ndarray
        Set by :meth:`fit`: float64, bitwise identical on every rank, of shape (features,) or (features + 1,), the intercept last.
    best_state : tuple of ndarray or None
        State from which :meth:`weights_of` computes those weights; None before the first.
    products : int
        Number of products with the Hessian so far, each of which takes one sum over the ranks.

    Raises
    ------
    AlgorithmError
        On all ranks, if an argument of any rank is out of range, or the loss has no second derivative.
    DatasetError, MismatchError
        On all ranks, if there are no samples, or arrays, labels or settings do not match.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> from sparseallreduce.linear import Squared
    >>> samples = Dataset.from_scipy([[0.0, 2.0], [3.0, 0.0]], [1.0, -1.0])
    >>> solver = TruncatedNewton(samples, Squared(), l2=0.1, comm=sar.SERIAL, intercept=False)
    >>> solver.fit().round(3), solver.converged
    (array([-0.326,  0.476]), True)
    """

    model: LinearModel
    l2: float
    tolerance: float
    enough: float
    rounds: int
    intercept: bool
    free_intercept: bool
    scale_features: bool | None

    def __init__(
        self,
        dataset: Dataset,
        model: LinearModel,
        *,
        l2: float,
        comm: Any = None,
        tolerance: float = 1e-3,
        enough: float = 0.0,
        rounds: int = 1000,
        intercept: bool = True,
        free_intercept: bool = False,
        scale_features: bool | None = False,
    ) -> None:
        self.comm: Any = resolve(comm)
        self.model, self.l2, self.tolerance, self.enough, self.rounds = model, l2, tolerance, enough, rounds
        self.intercept, self.free_intercept, self.scale_features = intercept, intercept and free_intercept, scale_features
        self.history: list[Round] = []
        self.converged: bool = False
        self.products: int = 0
        self.weights: Array = np.zeros(0)
        together(self.comm, lambda: self._make(dataset))

    def _make(self, dataset: Dataset) -> None:
        """Check the arguments and number the features. Collective."""
        comm, model = self.comm, self.model
        self._loss = agreed(comm, self._checked)
        names = ("l2", "tolerance", "enough", "rounds", "intercept", "free_intercept", "scale_features")
        settings = {"model": type(model).__name__, **{name: getattr(self, name) for name in names}}
        self.dataset: Dataset = checked_samples(dataset, comm, model, f"solver {type(self).__name__}", settings)
        numbering = agreed(comm, self._numbered)
        self._shared = SharedFeatures(numbering, self.dataset.features, comm)
        # A rank's vectors start with the features that several ranks have and the intercept, equal on all ranks. Its own features follow.
        self._common = 0 if comm.size == 1 else len(self._shared) + self.intercept
        own = numbering.size - len(numbering.slots)
        self._places = np.concatenate([numbering.slots, self._common + np.arange(own)])
        self._size = self._common + own
        self._intercept = numbering.intercept if comm.size == 1 or not self.intercept else len(self._shared)
        self._rows: tuple[Array, ...]
        agreed(comm, lambda: self._arrange(numbering))
        ones = len(self._rows[2]) == 0
        self._frame = frame_of(self.dataset, numbering, comm, self.free_intercept, self.scale_features, ones)
        if self._frame is not None:
            pairs = np.zeros((self._size, 2))
            pairs[self._places] = self._frame.by_place(numbering).reshape(-1, 2)
            begin, end = int(self.dataset.indptr[0]), int(self.dataset.indptr[-1])
            self._rows = *self._rows[:2], self.dataset.values[begin:end], pairs.reshape(-1)
        self._penalties = np.ones(self._size)
        if self.free_intercept:
            self._penalties[self._intercept] = _FREE
        self._weights, self._scores = np.zeros(self._size), np.zeros(self.dataset.rows)
        self._second = np.zeros(self.dataset.rows)
        self._gradient, self._diagonal = np.zeros(self._size), np.ones(self._size)
        self._objective, self._dual, self._inner = math.inf, -math.inf, _INNER
        self.best_state: State | None = None

    def _checked(self) -> int:
        """Return the number of the loss after checking all arguments."""
        if not 0 < self.l2 < math.inf:
            raise AlgorithmError(f"l2 must be above 0 and finite for Newton's method, not {self.l2:g}: without it, train by SGD")
        if not 0 < self.tolerance < math.inf:
            raise AlgorithmError(f"the tolerance must be above 0 and finite, not {self.tolerance:g}")
        if not self.rounds >= 1:
            raise AlgorithmError(f"rounds must be at least 1, not {self.rounds}")
        return newton_loss(self.model)

    def _numbered(self) -> Numbering:
        dataset = self.dataset
        warm_up_truncated_newton(dataset.indices.dtype, dataset.values.dtype, index_dtype(0))
        return Numbering(dataset, self.intercept)

    def _arrange(self, numbering: Numbering) -> None:
        """Prepare the rows for the kernels, and the plans of the sums."""
        dataset = self.dataset
        begin, end = int(dataset.indptr[0]), int(dataset.indptr[-1])
        values = dataset.values[begin:end]
        if not np.isfinite(values).all():
            raise DatasetError(f"{dataset.source}: a value is not finite")
        places = self._places.astype(index_dtype(self._size))
        indices = read_only(numbering.indices if self.comm.size == 1 else places[numbering.indices])
        values = values[:0] if (values == 1).all() else values
        self._rows = read_only(dataset.indptr - begin), indices, values, np.empty(0)
        self._weigh_losses()
        self._slots = numbering.slots
        self._gradients: list[Any] = []  # plans for sums of gradients, of products, and of scalars only
        self._products: list[Any] = []
        self._numbers: list[Any] = []

    def _weigh_losses(self) -> None:
        """Set the factors of the samples' losses relative to half the squared weights."""
        dataset = self.dataset
        counts = np.ones(dataset.rows) if dataset.weights is None else dataset.weights
        self._bounds = counts / (dataset.total_samples * self.l2)

    def penalise(self, l2: float) -> None:
        """Change the penalty, and continue from the present weights."""
        self.l2, self.history, self.converged, self.best_state = l2, [], False, None
        self._objective, self._dual, self._inner = math.inf, -math.inf, _INNER
        self._weigh_losses()

    @collective("fit")
    def fit(self) -> Array:
        """Make Newton steps until the gap is small enough, or the number of rounds is reached. Collective.

        A second call continues where the first one ended.

        Returns
        -------
        ndarray
            ``weights``.

        Raises
        ------
        DivergenceError
            On all ranks, if an objective is not finite, because values or ``1 / l2`` are too large.
        """

        def steps() -> Array:
            limit = len(self.history) + self.rounds
            while not self.converged and len(self.history) < limit:
                self.advance()
            return self.weights_of(self.best_state)

        self.weights = together(self.comm, steps)
        return self.weights

    def advance(self, certify: bool = False) -> Round:
        """Make one Newton step. Collective.

        Parameters
        ----------
        certify : bool
            Ignored, as both objectives are known after every step.

        Raises
        ------
        DivergenceError
            As in :meth:`fit`.
        """
        clock = Clock()
        with trace() as traffic:
            if self.best_state is None:
                self._accept(self._tried(None, 0.0, clock))
            if not self._is_done():
                before = self._objective - self._dual
                value, share = self._objective, self._move(self._solved(clock), clock)
                # Where the line search cuts a step, or the objective still falls, it is no use to solve for steps better.
                is_settled = share >= _LITTLE and value - self._objective <= _STILL * value
                if is_settled and self._objective - self._dual > _LITTLE * before:
                    self._inner = max(_INNERMOST, _FINER * self._inner)
        self.best_state = self.state()
        self.converged = self.converged or self._is_done()
        sent = sum(gather(self.comm, traffic.bytes_sent))
        clock.lap("evaluate")
        self.history.append(
            Round(
                round=len(self.history) + 1,
                dual=self.l2 * self._dual,
                primal=self.l2 * self._objective,
                gap=self.l2 * (self._objective - self._dual),
                active=self.dataset.total_samples,
                sigma=1.0,
                seconds={phase: clock.seconds[phase] for phase in ("compute", "communicate", "evaluate")},
                bytes_sent=sent,
            )
        )
        return self.history[-1]

    def scores(self) -> Array:
        """Return the scores of this rank's samples, float64."""
        return self._scores.copy()

    def state(self) -> State:
        """Return a copy of the state from which :meth:`weights_of` computes weights."""
        return self._weights[: self._common].copy(), self._weights[self._places]

    def weights_of(self, state: State | None = None) -> Array:
        """Return the weights of a state, by default the present one, in the form of ``weights``. Collective."""
        whole = self._shared.assembled(*(self.state() if state is None else state))[:, 0]
        if self._frame is not None:
            self._frame.undo(whole, self.intercept)
        return whole

    def _is_done(self) -> bool:
        return self._objective - self._dual <= max(self.tolerance * self._objective, self.enough / self.l2)

    def _solved(self, clock: Clock) -> _Step:
        """Solve for the Newton step by conjugate gradients."""
        step, residual = np.zeros(self._size), -self._gradient
        scaled = residual / self._diagonal
        direction, products = scaled.copy(), np.zeros(self.dataset.rows)
        along, image, scaled_image = np.empty(self.dataset.rows), np.empty(self._size), np.empty(self._size)
        aim = math.inf
        for _ in range(self.dataset.features + 5):
            image[:] = 0.0
            curvature = kernels.hessian_product(*self._rows, self._second, direction, self._intercept, along, image)
            penalised = self._penalties * direction
            image[self._common :] += penalised[self._common :]
            scaled_image[self._common :] = image[self._common :] / self._diagonal[self._common :]
            clock.lap("compute")
            pairs = (penalised, direction), (residual, direction), (residual, scaled), (scaled, image), (image, scaled_image)
            curvature, *dots = self._summed(self._products, [image], [curvature, *(self._own_dot(*pair) for pair in pairs)])
            clock.lap("communicate")
            self.products += 1
            image[: self._common] += penalised[: self._common]
            scaled_image[: self._common] = image[: self._common] / self._diagonal[: self._common]
            length, falls, left, crossed, imaged = (dot + self._common_dot(*pair) for dot, pair in zip(dots, pairs, strict=True))
            if aim == math.inf:
                aim = self._inner**2 * left
            if not (curvature + length > 0 and falls > 0):
                break
            # The least along the direction, which no error that an earlier iteration made can miss.
            stride = falls / (curvature + length)
            step += stride * direction
            products += stride * along
            residual -= stride * image
            scaled -= stride * scaled_image
            # The new residual.scaled follows from the old one, so one sum per iteration is enough.
            after = max(0.0, left - stride * (2 * crossed - stride * imaged))
            if after <= aim:
                break
            direction *= after / left
            direction += scaled
        return _Step(step, products)

    def _move(self, step: _Step, clock: Clock) -> float:
        """Apply the step, or the part of it that the line search finds, if the objective decreases; return that part."""
        share = 1.0
        trial = self._tried(step, share, clock)
        rounding = _ROUNDING * abs(self._objective)
        if not -trial.first_slope > rounding:  # twice the expected reduction
            self.converged = True
            return share
        if not (abs(trial.slope) <= _ENOUGH * -trial.first_slope and trial.objective <= self._objective):
            share = self._searched(step, trial)
            trial = self._tried(step, share, clock)
        if trial.objective <= self._objective:
            self._accept(trial)
        else:
            self.converged = self._objective - trial.objective >= -rounding
            if not self.converged:
                raise DivergenceError("an objective is no longer a finite number: scale the values down, or raise l2")
        return share

    def _searched(self, step: _Step, trial: _Trial) -> float:
        """Return the length at which the slope along the step is nearly zero. Collective."""
        model = self._loss, self._scores, step.products, self.dataset.labels, self._bounds
        penalised = self._penalties * step.direction
        pairs = (self._weights, penalised), (step.direction, penalised)
        numbers = [self._own_dot(*pair) for pair in pairs]
        mixed, length = (dot + self._common_dot(*pair) for dot, pair in zip(self._added(numbers), pairs, strict=True))
        low, high = (1.0, math.inf) if trial.slope < 0 else (0.0, 1.0)
        at = 2.0 if trial.slope < 0 else 0.5
        for _ in range(_SEARCHES):
            first, second = self._added(kernels.line_derivatives(*model, at))
            slope = first + mixed + at * length
            if abs(slope) <= _GOOD * -trial.first_slope:
                break
            low, high = (at, high) if slope < 0 else (low, at)
            at -= slope / (second + length)
            if not low < at < high:
                at = 2 * low if high == math.inf else (low + high) / 2
        return at

    def _tried(self, step: _Step | None, share: float, clock: Clock) -> _Trial:
        """Return the objective and its derivatives after a fraction of a step, or at zero weights if that is None. Collective."""
        weights, scores, gradient, diagonal = self._weights, self._scores, np.zeros(self._size), np.zeros(self._size)
        if step is not None:
            weights, scores = weights + share * step.direction, scores + share * step.products
        first, second = np.empty(self.dataset.rows), np.empty(self.dataset.rows)
        losses = kernels.derivatives(self._loss, scores, self.dataset.labels, self._bounds, first, second)
        kernels.transposed_products(*self._rows, first, second, self._intercept, gradient, diagonal)
        penalised = self._penalties * weights
        gradient[self._common :] += penalised[self._common :]
        clock.lap("compute")
        direction = np.zeros(self._size) if step is None else step.direction
        scaled = gradient / self._penalties  # the part common to all ranks is completed below
        pairs = (weights, penalised), (gradient, scaled), (gradient, direction), (self._gradient, direction)
        losses, *dots = self._summed(self._gradients, [gradient, diagonal], [losses, *(self._own_dot(*pair) for pair in pairs)])
        gradient[: self._common] += penalised[: self._common]
        scaled[: self._common] = gradient[: self._common] / self._penalties[: self._common]
        squares, steepness, slope, first_slope = (dot + self._common_dot(*pair) for dot, pair in zip(dots, pairs, strict=True))
        clock.lap("communicate")
        diagonal = self._penalties + _DIAGONAL * diagonal
        return _Trial(weights, scores, gradient, diagonal, losses + squares / 2, steepness, slope, first_slope, (first, second))

    def _accept(self, trial: _Trial) -> None:
        """Make a point the present one; raise DivergenceError if its objective is not finite."""
        if not (math.isfinite(trial.objective) and math.isfinite(trial.steepness)):
            raise DivergenceError("an objective is no longer a finite number: scale the values down, or raise l2")
        self._weights, self._scores, self._gradient, self._diagonal = trial.weights, trial.scores, trial.gradient, trial.diagonal
        self._objective, self._second = trial.objective, trial.derivatives[1]
        self._dual = max(self._dual, trial.objective - trial.steepness / 2)

    def _own_dot(self, left: Array, right: Array) -> float:
        """Return the inner product over this rank's own features."""
        return float(kernels.dot(left, right, self._common, self._size))

    def _common_dot(self, left: Array, right: Array) -> float:
        """Return the inner product over the features that all ranks have."""
        return float(kernels.dot(left, right, 0, self._common))

    def _summed(self, plan: list[Any], vectors: Sequence[Array], numbers: Sequence[float]) -> list[float]:
        """Sum the common parts of vectors over the ranks in place, and return the sums of some numbers. Collective.

        Parameters
        ----------
        plan : list
            Empty, or the plan for sums of this many vectors; the first call creates it.
        """
        if self.comm.size == 1:
            return list(numbers)
        count, common = len(self._slots), self._common
        values = np.zeros(len(vectors) * count + _EXTRA)
        for number, vector in enumerate(vectors):
            values[number * count : (number + 1) * count] = vector[self._slots]
        values[len(vectors) * count :][: len(numbers)] = numbers
        size = len(vectors) * common + _EXTRA
        if not plan:
            positions = [self._slots + number * common for number in range(len(vectors))]
            positions.append(np.arange(size - _EXTRA, size))
            stream = SparseStream(np.concatenate(positions).astype(index_dtype(size)), values, size)
            plan.append(allreduce_init(stream, self.comm, fixed_indices=True))
        plan[0].start(values)
        total = plan[0].wait().to_dense()
        for number, vector in enumerate(vectors):
            vector[:common] = total[number * common : (number + 1) * common]
        return [float(each) for each in total[size - _EXTRA : size - _EXTRA + len(numbers)]]

    def _added(self, numbers: Sequence[float]) -> list[float]:
        """Sum some numbers over the ranks. Collective."""
        return self._summed(self._numbers, [], numbers)
