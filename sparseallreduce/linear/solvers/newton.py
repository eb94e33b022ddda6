"""Newton's method for few features: the ranks sum the second derivatives over all samples, and take the same step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import DivergenceError
from sparseallreduce.linear.data.checks import checked_samples
from sparseallreduce.linear.data.dataset import Dataset, read_only
from sparseallreduce.linear.kernels import newton as kernels
from sparseallreduce.linear.models import Huber, LinearModel, Logistic, Poisson, Squared, SquaredEpsilonInsensitive, SquaredHinge
from sparseallreduce.linear.multiclass import Multinomial
from sparseallreduce.linear.solvers.barrier import Barrier, has_kink
from sparseallreduce.linear.solvers.cocoa import PHASES, Round
from sparseallreduce.linear.solvers.curvature import DENSE, add_curvature
from sparseallreduce.linear.solvers.frames import frame_of_few
from sparseallreduce.linear.solvers.softmax_steps import SoftmaxSteps
from sparseallreduce.linear.strategies.clock import Clock
from sparseallreduce.runtime.api import allreduce
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.objects import agreed, broadcast_arrays, gather_results, together
from sparseallreduce.runtime.stalls import collective
from sparseallreduce.runtime.trace import trace
from sparseallreduce.streams.stream import SparseStream

__all__ = ["Newton", "has_curvature", "has_few_weights"]

Array = NDArray[Any]

# Largest number of weights (of all scores, or per score of a softmax) for which second derivatives are worth their memory and time. The
# limit is higher for dense rows, for which dual ascent takes hundreds of passes and products of dense blocks are fast.
_MOST_WEIGHTS, _MOST_OF_DENSE = 400, 1200
_MOST_OF_KINKS = 100  # of a loss with a kink, which takes some 30 iterations

_KNOWN = (Logistic, SquaredHinge, Squared, Huber, Poisson, Multinomial, SquaredEpsilonInsensitive)
_HALVINGS = 40  # largest number of halvings of a step that does not reduce the objective enough
_ENOUGH = 1e-4  # required reduction, as a fraction of that predicted by the slope
_RIDGE = 1e-12  # fraction of the mean curvature added to it, for weights that no sample determines
# Factors of the tolerance: the last exact step leaves about the square of the error before it, one by conjugate gradients a fraction of it.
_FINER, _FINER_BY_PRODUCTS = 1e-4, 0.1


def has_curvature(model: LinearModel) -> bool:
    """Return True if Newton's method knows the second derivative of the model's loss."""
    return type(model) in _KNOWN or has_kink(model)


def has_few_weights(model: LinearModel, features: int, density: float, requested: bool = False) -> bool:
    """Return True if a model has few enough weights for :class:`Newton`.

    For a softmax, the weights of one class count: for many classes, its second derivatives are not stored.

    Parameters
    ----------
    model : LinearModel
    features : int
    density : float
        Fraction of the values that are not zero.
    requested : bool
        Whether the user asks for Newton's method: then a loss with a kink may have as many weights as others, however long it takes.
    """
    most = _MOST_OF_KINKS if has_kink(model) and not requested else _MOST_OF_DENSE if density >= DENSE else _MOST_WEIGHTS
    return features + 1 <= most // (1 if isinstance(model, Multinomial) else model.columns or 1)


class Newton:
    """Finds the weights of a linear model with few features by Newton's method.

    It minimises ``l2 / 2 * |w|^2 + mean loss``, where sample weights multiply the losses; the intercept is not penalised. An
    iteration solves for the step that minimises the second-order expansion of the objective, and halves it until the objective decreases.
    A loss with a kink is smoothed by a barrier that is lowered on the way (:mod:`~sparseallreduce.linear.solvers.barrier`).
    The number of iterations, 5 to 10, does not depend on the number of ranks, which exchange sums of first and second derivatives.
    The interface is that of :class:`~sparseallreduce.linear.solvers.CoCoA`, also for all scores of a :class:`Multinomial` model together.
    Creating a solver is collective.

    Parameters
    ----------
    dataset : Dataset
        This rank's samples.
    model : LinearModel
        A model for which :func:`has_curvature` is True.
    l2 : float
        At least 0.
    comm : communicator
    tolerance : float
        Accepted distance of the objective from its minimum, as a fraction of the objective. Iterations end when half the square of Newton's
        decrement, which estimates the distance before the last step, is 1e-4 of that.
    enough : float
        As for :class:`~sparseallreduce.linear.solvers.CoCoA`.
    rounds : int
        Largest number of iterations.
    intercept : bool
    scale_features : bool or None
        As for :class:`~sparseallreduce.linear.solvers.CoCoA`.

    Attributes
    ----------
    history : list of Round
    converged : bool
    best_state : ndarray or None
        Weights of the shifted and scaled values after the last iteration.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> samples = Dataset.from_scipy([[0.0, 2.0], [1.0, 0.0], [2.0, 2.0]], [1, 2, 5])
    >>> Newton(samples, Squared(), l2=0.0, comm=sar.SERIAL).fit().round(3) + 0.0
    array([2. , 0.5, 0. ])
    """

    model: LinearModel
    l2: float
    tolerance: float
    enough: float
    rounds: int
    intercept: bool
    scale_features: bool | None
    dataset: Dataset

    def __init__(
        self,
        dataset: Dataset,
        model: LinearModel,
        *,
        l2: float,
        comm: Any = None,
        tolerance: float = 1e-3,
        enough: float = 0.0,
        rounds: int = 100,
        intercept: bool = True,
        scale_features: bool | None = None,
    ) -> None:
        self.comm: Any = resolve(comm)
        self.model, self.l2, self.tolerance, self.enough, self.rounds = model, l2, tolerance, enough, rounds
        self.intercept, self.scale_features = intercept, scale_features
        self.history: list[Round] = []
        self.converged: bool = False
        self.best_state: Array | None = None
        together(self.comm, lambda: self._make(dataset))

    def _make(self, dataset: Dataset) -> None:
        """Check the arguments, and choose how to shift and scale the values. Collective."""
        names = ("l2", "tolerance", "enough", "rounds", "intercept", "scale_features")
        settings = {"model": self.model.title} | {name: getattr(self, name) for name in names}
        self.dataset = dataset = checked_samples(dataset, self.comm, self.model, f"solver {type(self).__name__}", settings)
        self._columns = self.model.columns or 1
        self._frame, pairs = frame_of_few(dataset, self.comm, self.intercept, self.scale_features)
        begin, end = int(dataset.indptr[0]), int(dataset.indptr[-1])
        indptr = read_only(dataset.indptr - begin)
        self._rows = indptr, read_only(dataset.indices[begin:end]), read_only(dataset.values[begin:end]), pairs
        self._place = dataset.features if self.intercept else -1
        self._size = dataset.features + self.intercept
        self._shares = (np.ones(dataset.rows) if dataset.weights is None else dataset.weights) / dataset.total_samples
        self._softmax: SoftmaxSteps | None = None
        if isinstance(self.model, Multinomial) and self._size * self._columns > _MOST_WEIGHTS:
            self._softmax = SoftmaxSteps(self._rows, self._place, self._shares, self._size, self.l2, self.comm)
        self._weights = np.zeros((self._size, self._columns))
        self._scores = np.zeros((dataset.rows, self._columns))
        self._begin()

    def _begin(self) -> None:
        """Smooth a loss with a kink at the present weights; collective."""
        self._barrier: Barrier | None = None
        self._loss: _Smooth | Barrier = _Smooth(self.model)
        if has_kink(self.model):
            shares = sum(gather_results(self.comm, lambda: float(self._shares.sum())))
            self._loss = self._barrier = Barrier(self.model, self._true_loss(), shares)

    def penalise(self, l2: float) -> None:
        """Change the penalty, and continue from the present weights."""
        self.l2, self.history, self.converged, self.best_state = l2, [], False, None
        if self._softmax is not None:
            self._softmax.penalise(l2)
        self._begin()

    @collective("fit")
    def fit(self) -> Array:
        """Iterate until the objective is close enough to its minimum, or the number of iterations is reached. Collective.

        Returns
        -------
        ndarray
            Weights in the form of :meth:`weights_of`.

        Raises
        ------
        DivergenceError
            On all ranks, if the objective is not finite.
        """

        def iterations() -> Array:
            limit = len(self.history) + self.rounds
            while not self.converged and len(self.history) < limit:
                self.advance()
            return self.weights_of(self.best_state)

        return together(self.comm, iterations)

    def advance(self, certify: bool = False) -> Round:
        """Make one iteration, and compute the objective whatever ``certify`` is. Collective.

        Raises
        ------
        DivergenceError
            As in :meth:`fit`.
        """
        clock = Clock()
        with trace() as traffic:
            found = agreed(self.comm, self._own)
            clock.lap("compute")
            sums = self._summed(found)
            clock.lap("communicate")
            primal, gap = self._step(_Sums.of(sums, self._size, self._columns))
            clock.lap("compute")
        seconds = {phase: clock.seconds.get(phase, 0.0) for phase in PHASES}
        number = len(self.history) + 1
        self.history.append(Round(number, primal - gap, primal, gap, self.dataset.total_samples, 1.0, seconds, traffic.bytes_sent))
        return self.history[-1]

    def scores(self) -> Array:
        """Return the scores of this rank's samples, float64 of shape (samples,) or, for several scores, (samples, K)."""
        return self._scores[:, 0] if self.model.columns is None else self._scores

    def state(self) -> Array:
        """Return a copy of the state from which :meth:`weights_of` computes weights."""
        return self._weights.copy()

    def weights_of(self, state: Array | None = None) -> Array:
        """Return the weights of a state, by default the present one, with K columns for several scores.

        The intercept is last: a single score has the shape (features + 1,).
        """
        whole = (self._weights if state is None else state).copy()
        if self._frame is not None:
            for column in range(self._columns):
                self._frame.undo(whole[:, column], self.intercept)
        return whole[:, 0] if self.model.columns is None else whole

    def _own(self) -> Array:
        """Return this rank's part of the sums that a step needs, as one vector."""
        labels, size, columns = self.dataset.labels, self._size, self._columns
        if self._softmax is not None:
            slope = self._softmax.slopes(self.model.derivative(self._scores, labels), (size, columns))
            return np.concatenate(([self._loss_of(self._scores)], slope.T.reshape(-1)))
        slopes, curvatures = self._loss.derivatives(self._squeezed(self._scores), labels)
        slopes = slopes.reshape(len(labels), columns) * self._shares[:, np.newaxis]
        sums = np.zeros(1 + size * columns + size * size * (columns * (columns + 1) // 2))
        sums[0] = self._loss_of(self._scores)
        parts = _Sums.of(sums, size, columns)
        block = 0
        for a in range(columns):
            kernels.add_slopes(*self._rows, np.ascontiguousarray(slopes[:, a]), self._place, parts.slope[a])
            for b in range(a + 1):
                add_curvature(self._rows, curvatures(a, b) * self._shares, self._place, parts.blocks[block])
                block += 1
        return sums

    def _summed(self, own: Array) -> Array:
        if self.comm.size == 1:
            return own
        return np.array(allreduce(SparseStream.from_dense(own), self.comm).to_dense())

    def _step(self, sums: _Sums) -> tuple[float, float]:
        """Take a step; return the objective before it, and an estimate of its distance from the minimum."""
        weights, features = self._weights, self.dataset.features
        penalty = self.l2 / 2 * float(np.square(weights[:features]).sum())
        primal = float(sums.loss[0]) + penalty
        if not math.isfinite(primal):
            raise DivergenceError("the objective is no longer a finite number: scale the values down, or raise l2")
        slope = sums.slope.copy()
        slope[:, :features] += self.l2 * weights[:features].T
        step = self._solved(slope, sums) if self._softmax is None else self._solved_by_products(slope)
        decrement = max(0.0, -float((slope * step).sum()))
        gap = decrement / 2
        if self._barrier is not None:
            return self._step_in_barrier(self._barrier, step.T, primal, decrement, self._true_loss() + penalty)
        finer = _FINER if self._softmax is None else _FINER_BY_PRODUCTS
        self.converged = gap <= max(self.tolerance * primal, self.enough) * finer
        falls = self._searched(step.T, primal, decrement)
        self.best_state, self.converged = self._weights.copy(), self.converged or not falls
        return primal, gap

    def _step_in_barrier(self, barrier: Barrier, step: Array, value: float, decrement: float, primal: float) -> tuple[float, float]:
        """Take a step, and lower the barrier where that is near enough to what it allows; as :meth:`_step`."""
        gap = decrement / 2 + barrier.excess
        self.converged = gap <= max(self.tolerance * primal, self.enough) or barrier.is_spent
        falls = self._searched(step, value, decrement)
        self.best_state = self._weights.copy()
        barrier.lower(decrement / 2 if falls else 0.0)
        return primal, gap

    def _true_loss(self) -> float:
        """Return the mean loss of all ranks' samples; collective."""

        def own() -> float:
            return _Smooth(self.model).total(self._squeezed(self._scores), self.dataset.labels, self._shares)

        return sum(gather_results(self.comm, own))

    def _solved_by_products(self, slope: Array) -> Array:
        assert self._softmax is not None
        assert isinstance(self.model, Multinomial)
        probabilities = agreed(self.comm, partial(self.model.probabilities, self._scores))
        return self._sum_free(self._softmax.solved(np.ascontiguousarray(slope.T), probabilities).T)

    def _solved(self, slope: Array, sums: _Sums) -> Array:
        """Return the step of all weights, the same on every rank."""
        features, size, curvature = self.dataset.features, self._size, sums.curvature(self._size, self._columns)

        def own() -> dict[str, Array]:
            penalties = np.tile(np.r_[np.full(features, self.l2), np.zeros(size - features)], self._columns)
            whole = curvature + np.diag(penalties)
            ridge = _RIDGE * (np.trace(whole) / len(whole) or 1.0)
            while math.isfinite(ridge):
                try:
                    step = -np.linalg.solve(whole + ridge * np.eye(len(whole)), slope.reshape(-1))
                    if np.isfinite(step).all() and np.dot(step, slope.reshape(-1)) <= 0:
                        return {"step": self._sum_free(step.reshape(slope.shape))}
                except np.linalg.LinAlgError:
                    pass
                ridge = max(1e3 * ridge, 1e-300)
            raise DivergenceError("a derivative is no longer a finite number: scale the values down, or raise l2")

        found = agreed(self.comm, lambda: own() if self.comm.rank == 0 else {})
        step: Array = (broadcast_arrays(self.comm, found) if self.comm.size > 1 else found)["step"]
        return step

    def _sum_free(self, step: Array) -> Array:
        """Remove the common part of all intercepts of a softmax from a step: it has no effect but rounding errors."""
        if self.intercept and isinstance(self.model, Multinomial):
            step[:, -1] -= step[:, -1].mean()
        return step

    def _searched(self, step: Array, value: float, decrement: float) -> bool:
        """Shorten a step until the objective decreases enough, and apply it; return False if no length does."""
        along = agreed(self.comm, lambda: self._products(step))
        weights, scores, features, length = self._weights, self._scores, self.dataset.features, 1.0
        for _ in range(_HALVINGS):
            trial, trial_scores = weights + length * step, scores + length * along
            losses = sum(gather_results(self.comm, partial(self._loss_of, trial_scores)))
            new = losses + self.l2 / 2 * float(np.square(trial[:features]).sum())
            if new <= value - _ENOUGH * length * decrement:
                self._weights, self._scores = trial, trial_scores
                return True
            length /= 2
        return False

    def _loss_of(self, scores: Array) -> float:
        """Return this rank's part of the mean loss."""
        return self._loss.total(self._squeezed(scores), self.dataset.labels, self._shares)

    def _products(self, weights: Array) -> Array:
        if self._softmax is not None:
            return self._softmax.products(weights)
        out = np.empty((self.dataset.rows, self._columns))
        for column in range(self._columns):
            scores = np.empty(self.dataset.rows)
            kernels.products(*self._rows, np.ascontiguousarray(weights[:, column]), self._place, scores)
            out[:, column] = scores
        return out

    def _squeezed(self, scores: Array) -> Array:
        return scores[:, 0] if self.model.columns is None else scores


@dataclass
class _Sums:
    """Views of the vector that the ranks sum."""

    loss: Array  # (1,)
    slope: Array  # (K, size)
    blocks: Array  # (K * (K + 1) / 2, size, size): lower triangles of the blocks of scores a and b <= a

    @classmethod
    def of(cls, sums: Array, size: int, columns: int) -> _Sums:
        end = 1 + size * columns
        return cls(sums[:1], sums[1:end].reshape(columns, size), sums[end:].reshape(-1, size, size))

    def curvature(self, size: int, columns: int) -> Array:
        """Return the second derivatives with respect to all weights, score by score."""
        whole, block = np.empty((columns, size, columns, size)), 0
        for a in range(columns):
            for b in range(a + 1):
                lower = np.tril(self.blocks[block])
                symmetric = lower + np.tril(lower, -1).T
                whole[a, :, b, :] = symmetric
                whole[b, :, a, :] = symmetric
                block += 1
        return whole.reshape(columns * size, columns * size)


class _Smooth:
    """A loss with a second derivative almost everywhere."""

    def __init__(self, model: LinearModel) -> None:
        self._model = model

    def total(self, scores: Array, labels: Array, shares: Array) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.dot(shares, self._model.loss(scores, labels)))

    def derivatives(self, scores: Array, labels: Array) -> tuple[Array, Any]:
        """Return the slopes, and a function that returns the second derivatives with respect to two scores."""
        model = self._model
        slopes = model.derivative(scores, labels)
        if isinstance(model, Multinomial):
            shares = model.probabilities(scores)
            return slopes, lambda a, b: shares[:, a] * ((a == b) - shares[:, b])
        curvatures = _curvatures(model, scores, labels, slopes)
        return slopes, lambda a, b: curvatures


def _curvatures(model: LinearModel, scores: Array, labels: Array, slopes: Array) -> Array:
    if isinstance(model, Logistic):
        return np.asarray(np.abs(slopes) * (1 - np.abs(slopes)))
    if isinstance(model, SquaredHinge | SquaredEpsilonInsensitive):
        return np.where(slopes != 0, 2.0, 0.0)
    if isinstance(model, Huber):
        return np.asarray(np.minimum(1.0, model.epsilon / np.maximum(np.abs(scores - labels), model.epsilon)))  # of a majorising parabola
    return model.prediction(scores) if isinstance(model, Poisson) else np.ones(len(labels))
