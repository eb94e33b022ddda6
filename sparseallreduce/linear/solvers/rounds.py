"""Training in rounds, with metrics of the model after each round, like those of SGD training after each epoch."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import AlgorithmError, TrainingStopped
from sparseallreduce.linear.data.checks import check_labels, check_parts, check_same, own_samples, own_test_samples
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.kernels.dual_warming import warm_up_truncated_newton
from sparseallreduce.linear.models import LinearModel
from sparseallreduce.linear.multiclass import Multinomial, OneVsRest
from sparseallreduce.linear.solvers.barrier import has_kink
from sparseallreduce.linear.solvers.cocoa import PHASES as SOLVER_PHASES
from sparseallreduce.linear.solvers.cocoa import CoCoA, Round, load_loops
from sparseallreduce.linear.solvers.curvature import density
from sparseallreduce.linear.solvers.losses import dual_loss
from sparseallreduce.linear.solvers.newton import Newton, has_curvature, has_few_weights
from sparseallreduce.linear.solvers.truncated_newton import TruncatedNewton, newton_loss
from sparseallreduce.linear.strategies.clock import Clock
from sparseallreduce.linear.training.batches import Division, Fold, check_held_out, divided
from sparseallreduce.linear.training.class_metrics import evaluate_classes
from sparseallreduce.linear.training.early_stopping import WATCHED, EarlyStopping
from sparseallreduce.linear.training.metrics import Metrics, class_threshold, evaluate
from sparseallreduce.linear.weights import Descent, Weights
from sparseallreduce.linear.weights.plain import zeros
from sparseallreduce.runtime.communicators import warm_up
from sparseallreduce.runtime.objects import agreed, gather, steps_together, together
from sparseallreduce.streams.stream import index_dtype

__all__ = ["DUAL", "NEWTON", "PHASES", "Figures", "RoundOptions", "RoundTrainer"]

DUAL, NEWTON = "dual", "newton"
_GAP = 1e-3
# For separable samples the objective is nearly zero, and a gap of a fraction of it would take hundreds of rounds.
_SHARE_OF_NOTHING = 3e-4

Array = NDArray[Any]

#: Phases of a round that are timed; the preparation counts for the first round.
PHASES = ("prepare", *SOLVER_PHASES)


@dataclass(frozen=True)
class RoundOptions:
    """Options of a training in rounds, besides model, samples and penalty."""

    rounds: int = 1000  # largest number of rounds
    # Duality gap at which training ends, as a fraction of the objective; None: 1e-3 of it, or 3e-4 of its value for weights of zero.
    gap: float | None = None
    seed: int = 0  # seed of the order of visits, and of the choice of samples to hold out
    intercept: bool = False  # whether the model has an intercept, which is penalised
    solver: str = DUAL  # or NEWTON, whose rounds are iterations
    free_intercept: bool = False  # whether the intercept is not penalised
    scale_features: bool | None = False  # whether to scale features; None: if their units differ
    evaluate_every: int = 1  # rounds between evaluations; the last round is always evaluated, except with 0, which never evaluates
    validation: float | Fold = 0.0  # fraction or fold of samples to hold out; the result is the model that is best on them

    def __post_init__(self) -> None:
        for name, lowest in {"rounds": 0, "seed": 0, "evaluate_every": 0}.items():
            if not getattr(self, name) >= lowest:
                raise ValueError(f"{name} must be at least {lowest}, not {getattr(self, name)}")
        check_held_out(self.validation, self.evaluate_every > 0)


@dataclass(frozen=True)
class Figures:
    """The metrics of one round, over all ranks and scores. Metrics that were not computed after it are None."""

    epoch: int  # number of the round, from 1
    loss: float | None  # primal objective: mean loss of the training samples plus the penalty; also if only computed to test convergence
    train_accuracy: float | None
    train_auc: float | None  # area under the ROC curve; None for more than two classes
    test_loss: float | None  # mean loss of the test samples, without penalty
    test_accuracy: float | None
    test_auc: float | None
    validation_loss: float | None  # mean loss of the samples held out, without penalty
    validation_accuracy: float | None
    validation_auc: float | None
    dual: float  # dual objective, a lower bound of the loss
    gap: float | None  # lowest loss so far minus the dual objective, if both are known
    active: int  # number of samples that the next round visits
    seconds: dict[str, float]  # mean over the ranks for each of PHASES, and their total
    bytes_sent: int  # by the solvers of all ranks together
    evaluated: bool  # whether the model was evaluated after the round


class Best(NamedTuple):
    """The model that is best on the samples held out."""

    cost: float  # lower is better
    epoch: int
    states: list[Any]  # one per solver


class RoundTrainer:
    """Trains a model on the samples of all ranks with one solver in rounds per score. Creating a trainer is collective.

    Parameters
    ----------
    model : Hinge, SquaredHinge, Logistic, or OneVsRest of one of them
    dataset : Dataset
        As for :class:`~sparseallreduce.linear.solvers.cocoa.CoCoA`; for several classes, labels are class numbers.
    comm : communicator
    l2 : float
        Factor of the penalty, above 0; None means 1 / M for M training samples, which is a C of 1.
    options : RoundOptions
    stopping : EarlyStopping, optional

    Attributes
    ----------
    history : list of Figures
    division : Division
        Division of the samples into those for training and those held out for validation.
    converged : bool
        True if the gap is as small as the options require.

    Raises
    ------
    ValueError
        On all ranks, if early stopping watches a metric that is not computed.
    AlgorithmError, DatasetError, MismatchError
        As for :class:`~sparseallreduce.linear.solvers.cocoa.CoCoA`; and if there are too few samples to hold some out.
    """

    model: LinearModel
    comm: Any
    l2: float

    def __init__(
        self,
        model: LinearModel,
        dataset: Dataset,
        comm: Any,
        l2: float | None = None,
        options: RoundOptions | None = None,
        stopping: EarlyStopping | None = None,
    ) -> None:
        self._clock, self._sent = Clock(), 0
        self.model, self.comm, self.stopping = model, comm, stopping
        self.options: RoundOptions = RoundOptions() if options is None else options
        self.history: list[Figures] = []
        self.best: Best | None = None
        self._stop: str | None = None
        together(comm, lambda: self._make(dataset, l2))

    def _make(self, dataset: Dataset, l2: float | None) -> None:
        """Check the arguments and create the solvers. Collective."""
        comm, model = self.comm, self.model
        self._features, self._density = dataset.features, density(dataset, comm)
        agreed(comm, self._checked)
        self._load_loops(dataset)
        self._clock = Clock()
        check_same(comm, {"model": model.title, "options": self.options, "early stopping": self.stopping})
        self.dataset: Dataset = own_samples(dataset, comm, comm.size, "training in rounds")
        agreed(comm, lambda: check_labels(self.dataset, model))
        check_parts(self.dataset, comm, comm.size)
        # The result has one weight per feature and score: fail now if there is no memory for it.
        agreed(comm, lambda: zeros(self.dataset.features, Descent(columns=model.columns), self.dataset.values.dtype).size)
        self.division: Division = divided(self.dataset, self.options.validation, self.options.seed, comm, model.codes)
        self._threshold = class_threshold(model, self.dataset, comm)
        self.l2 = 1 / self.division.total if l2 is None else l2
        self.solvers: list[CoCoA | Newton | TruncatedNewton] = [self._solver(signs) for signs in self._signs()]

    def _load_loops(self, dataset: Dataset) -> None:
        """Compile what training needs, or load it from the cache on disk, so that its time is not that of training. Collective."""
        if self.options.solver == DUAL:
            agreed(self.comm, lambda: load_loops(dataset, self._bases()[0], self.comm, self._tolerance[0]))
        elif not self._has_few_weights(self._bases()[0]):
            agreed(self.comm, lambda: warm_up_truncated_newton(dataset.indices.dtype, dataset.values.dtype, index_dtype(0)))
        warm_up(self.comm, dataset.features, np.dtype(np.int64))

    @property
    def _tolerance(self) -> tuple[float, float]:
        """The gaps at which training ends, as a fraction of the objective and in units of the mean loss."""
        if self.options.gap is not None:
            return self.options.gap, 0.0
        return _GAP, _SHARE_OF_NOTHING * _without_weights(self._bases()[0])

    @property
    def _is_joint(self) -> bool:
        """True if one solver handles all scores of a sample."""
        return isinstance(self.model, Multinomial)

    def _checked(self) -> None:
        for base in self._bases():
            if self.options.solver == DUAL:
                _ = self._is_joint or dual_loss(base)
            elif not self._has_few_weights(base):
                newton_loss(base)
            elif not has_curvature(base):
                raise AlgorithmError(f"Newton's method does not know the second derivative of {type(base).__name__}: train it by SGD")
        watch = "" if self.stopping is None else self.stopping.watch
        if watch.startswith("progressive"):
            raise ValueError(f"early stopping watches {watch}, which only SGD training has: watch the loss, or samples held out")
        if watch.startswith("validation") and not self.options.validation:
            raise ValueError(f"early stopping watches {watch}: hold out samples")
        if watch and not self.options.evaluate_every:
            raise ValueError(f"early stopping watches {watch}, which needs evaluations: evaluate_every must be above 0")

    def _bases(self) -> list[LinearModel]:
        """Return the binary model of each score."""
        if self.model.columns is None or self._is_joint:
            return [self.model]
        if not isinstance(self.model, OneVsRest):
            raise AlgorithmError(f"dual coordinate ascent does not know the {self.model.name} model: use one-versus-rest")
        return [self.model.base] * self.model.columns

    def _signs(self) -> Iterator[Array]:
        """Yield the labels of this rank's samples for each score."""
        if self.model.columns is None or self._is_joint:
            yield self.dataset.labels
            return
        for column in range(self.model.columns):
            yield np.where(self.dataset.labels == column, 1.0, -1.0)

    def _has_few_weights(self, base: LinearModel) -> bool:
        """Return True if a solver has few enough weights to store all second derivatives."""
        return has_few_weights(base, self._features, self._density, requested=True)

    def _solver(self, signs: Array) -> CoCoA | Newton | TruncatedNewton:
        # Samples held out have weight zero, and the others are weighted up to keep the total.
        counts, out = self.dataset.weights, self.division.held_out
        if out is not None:
            counts = np.ones(self.dataset.rows) if counts is None else counts.copy()
            counts *= self.dataset.total_samples / self.division.total
            counts[out] = 0.0
        options, labelled, base = self.options, replace(self.dataset, labels=signs, weights=counts), self._bases()[0]
        tolerance, enough = self._tolerance
        settings: dict[str, Any] = {
            "l2": self.l2,
            "comm": self.comm,
            "tolerance": tolerance,
            "enough": enough,
            "intercept": options.intercept,
            "scale_features": options.scale_features,
        }
        if options.solver == NEWTON and self._has_few_weights(base):
            return Newton(labelled, base, **settings)
        settings |= {"rounds": max(1, options.rounds), "free_intercept": options.free_intercept}
        if options.solver == NEWTON:
            return TruncatedNewton(labelled, base, **settings)
        return CoCoA(labelled, base, seed=options.seed, **settings)

    @property
    def faster(self) -> str | None:
        """The setting to recommend if dual ascent is slow for a loss with a kink: the solver "newton", a squared loss, or None."""
        base = self._bases()[0]
        if self.options.solver == NEWTON or not has_kink(base):
            return None
        return NEWTON if self._has_few_weights(base) else f"squared_{base.loss_name}"

    @property
    def converged(self) -> bool:
        """True if all solvers have converged."""
        return all(solver.converged for solver in self.solvers)

    def penalise(self, l2: float, stopping: EarlyStopping | None = None) -> None:
        """Start a run with another penalty from the last weights, reusing the prepared samples. Collective.

        Parameters
        ----------
        l2 : float
            The new penalty.
        stopping : EarlyStopping, optional
            Early stopping for the new run.
        """
        check_same(self.comm, {"l2": l2, "early stopping": stopping})
        self.l2, self.stopping, self.history, self.best = l2, stopping, [], None
        self._clock, self._sent = Clock(), 0
        for solver in self.solvers:
            solver.penalise(l2)

    def request_stop(self, reason: str) -> None:
        """End the run on all ranks after the current round. May be called on any rank at any time."""
        self._stop = reason

    def run(self, test: Dataset | None = None) -> Iterator[Figures]:
        """Make rounds until the gap is small enough, or the number of rounds is reached. Collective.

        Parameters
        ----------
        test : Dataset, optional
            Additional samples to evaluate the model on.

        Yields
        ------
        Figures
            After each round, the same on every rank.

        Raises
        ------
        DivergenceError
            On all ranks, if an objective is not finite.
        TrainingStopped
            On all ranks, after :meth:`request_stop` on one of them.
        """
        return steps_together(self.comm, self._rounds(test))

    def _rounds(self, test: Dataset | None) -> Generator[Figures, None, None]:
        """Yield the rounds of :meth:`run`."""
        test = own_test_samples(test, self.dataset, self.model, self.comm, self.comm.size)
        self._clock.lap("prepare")
        stop, every = False, self.options.evaluate_every
        while not (stop or self.converged) and len(self.history) < self.options.rounds:
            number = len(self.history) + 1
            last = number == self.options.rounds
            evaluates = every > 0 and (number % every == 0 or last)
            for solver in self.solvers:
                if not solver.converged:
                    self._note(solver.advance(certify=evaluates or last))
            figures = self._evaluated(test) if evaluates or (every > 0 and self.converged) else {}
            self._conclude(number, figures)
            if figures and self.stopping is not None:
                stop = self.stopping.after_epoch(getattr(self.history[-1], self.stopping.watch))
            yield self.history[-1]
            if not stop:
                self._stop_if_asked()

    def weights(self) -> Array:
        """Return the learned weights, float64 and the same on every rank. Collective.

        If samples are held out, these are the weights after the round that was best on them, otherwise those of the lowest loss computed.

        Returns
        -------
        ndarray, shape (features,) or (features, K)
            With an intercept there is an additional last row.
        """
        states = [solver.best_state for solver in self.solvers] if self.best is None else self.best.states
        pairs = zip(self.solvers, states, strict=True)
        return self._together(together(self.comm, lambda: [solver.weights_of(state) for solver, state in pairs]))

    @property
    def best_epoch(self) -> int | None:
        """The round whose weights are the result; None before the first round."""
        if self.best is not None:
            return self.best.epoch
        known = [(figures.loss, figures.epoch) for figures in self.history if figures.loss is not None]
        return min(known)[1] if known else None

    def _note(self, made: Round) -> None:
        """Add the times and bytes of a solver's round."""
        for phase, seconds in made.seconds.items():
            self._clock.part(phase, seconds)
        self._sent += made.bytes_sent

    def _evaluated(self, test: Dataset | None) -> dict[str, Any]:
        """Return metrics of the weights after the last round, in which every solver has computed its objective. Collective."""
        own = self._together([solver.scores() for solver in self.solvers])
        training = self._measured(own, self.division.rows)
        figures: dict[str, Any] = {"train_accuracy": training.accuracy, "train_auc": training.auc}
        if self.division.held_out is not None:
            figures |= _named("validation", self._measured(own, self.division.held_out))
        if test is not None:
            figures |= _named("test", self._on(test))
        return figures

    def _together(self, parts: list[Array]) -> Array:
        """Combine the solvers' scores or weights, one column per solver."""
        return parts[0] if self.model.columns is None or self._is_joint else np.stack(parts, axis=1)

    def _measured(self, scores: Array, rows: Array | None) -> Metrics:
        """Return the metrics of the scores of all ranks' samples."""
        return evaluate(self.model, scores, self.dataset, self._threshold, self.comm, rows)

    def _on(self, test: Dataset) -> Metrics:
        """Return the metrics of the weights after the last round on other samples."""
        found = self._together([solver.weights_of() for solver in self.solvers])
        weights = Weights(len(found), Descent(intercept=self.options.intercept, columns=self.model.columns), test.values.dtype)
        weights.assign(found)
        if self.model.columns is not None:
            return evaluate_classes(self.model, weights, test, self.comm)
        return evaluate(self.model, weights.final_scores(test), test, self._threshold, self.comm)

    def _conclude(self, number: int, figures: dict[str, Any]) -> None:
        """Append the metrics of a round to the history. Collective."""
        ends = [solver.history[-1] for solver in self.solvers]
        self._clock.lap("evaluate")
        seconds = [dict(rank) for rank in gather(self.comm, dict(self._clock.seconds))]
        means = {phase: sum(rank.get(phase, 0.0) for rank in seconds) / len(seconds) for phase in PHASES}
        known = all(end.primal is not None for end in ends)
        losses, gaps = ([getattr(end, name) or 0.0 for end in ends] for name in ("primal", "gap"))
        none = dict.fromkeys(f"{of}_{figure}" for of in ("train", "test", "validation") for figure in ("loss", "accuracy", "auc"))
        del none["train_loss"]
        self.history.append(
            Figures(
                epoch=number,
                loss=sum(losses) if known else None,
                **none | figures,
                dual=sum(end.dual for end in ends),
                gap=sum(gaps) if known else None,
                active=sum(end.active for end in ends),
                seconds=means | {"total": sum(means.values())},
                bytes_sent=self._sent,
                evaluated=bool(figures),
            )
        )
        self._keep_if_best(self.history[-1])
        self._clock, self._sent = Clock(), 0

    def _keep_if_best(self, figures: Figures) -> None:
        """Save the weights after a round if they are the best so far on the samples held out."""
        if figures.validation_loss is None:
            return
        watch = "" if self.stopping is None else self.stopping.watch
        watch = watch if watch.startswith("validation") else "validation_loss"
        figure = getattr(figures, watch)
        cost = math.inf if figure is None else -figure if WATCHED[watch] else figure
        if self.best is None or cost < self.best.cost:
            self.best = Best(cost, figures.epoch, [solver.state() for solver in self.solvers])

    def _stop_if_asked(self) -> None:
        reason = next(filter(None, gather(self.comm, self._stop)), None)
        if reason is not None:
            where = f"stopped by {reason} after round {len(self.history)}"
            raise TrainingStopped(f"{where}; training in rounds writes no checkpoints: it has to start again")


def _named(of: str, metrics: Metrics) -> dict[str, float | None]:
    return {f"{of}_loss": metrics.loss, f"{of}_accuracy": metrics.accuracy, f"{of}_auc": metrics.auc}


def _without_weights(model: LinearModel) -> float:
    """Return the loss of a sample with scores of zero; 0 for regression, whose units are unknown."""
    if not model.classifies:
        return 0.0
    return float(model.loss(np.zeros((1, model.columns) if model.columns else 1), np.ones(1))[0])
