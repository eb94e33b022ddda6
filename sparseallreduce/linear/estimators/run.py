"""Training of an estimator with SGD steps: learning rates, initial weights, and the run."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning

from sparseallreduce.linear.data.checks import described
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.feature_scaling import (
    feature_magnitudes,
    feature_scales,
    gradient_unit,
    largest_eigenvalue,
    rate_unit,
    sample_moments,
    scaled,
    units_differ_in,
)
from sparseallreduce.linear.defaults import Factors
from sparseallreduce.linear.estimators.feature_numbers import FeatureNumbers, resized
from sparseallreduce.linear.estimators.parameters import PLATEAU, REPLICATED, Parameterised, is_auto
from sparseallreduce.linear.estimators.progress import Progress
from sparseallreduce.linear.estimators.remarks import warn
from sparseallreduce.linear.estimators.samples import mean_of
from sparseallreduce.linear.model_file import FittedModel, scores_for
from sparseallreduce.linear.models import LinearModel
from sparseallreduce.linear.strategies import LocalStepsStrategy, LossyStrategy, SparseStrategy, Strategy
from sparseallreduce.linear.training.batches import divided
from sparseallreduce.linear.training.early_stopping import EarlyStopping
from sparseallreduce.linear.training.picking import Pick, picked
from sparseallreduce.linear.training.schedules import SCHEDULES, LargeBatch, Onward, Plateau, Reactive, Schedule
from sparseallreduce.linear.training.trainer import Epoch, Options, Trainer
from sparseallreduce.linear.weights import AdaptiveWeights, Descent
from sparseallreduce.runtime.objects import agreed, gather

__all__ = ["Call", "TrainedEstimator"]

Array = NDArray[Any]

_ADAPTIVE_RATES = {"ftrl": 0.5, "arow": 1.0}
_CUT = 0.25  # factor of the learning rate at a plateau
_PLATEAUS = 4  # number of plateaus after which training ends
_SWING = 3  # length of an oscillation by momentum, in units of 1 / (1 - momentum) steps


class Call(NamedTuple):
    """A call of ``fit`` or ``partial_fit``."""

    passes: int  # largest number of passes over the samples
    seed: int  # seed of the order of samples
    steps: int  # number of steps of the earlier calls that this one continues
    partial: bool  # whether the call continues the count of steps
    numbers: FeatureNumbers | None  # numbers of the features with weights; None if all features have one


class TrainedEstimator(Parameterised):
    """Trains a model on samples that have been checked."""

    _model: ClassVar[type[LinearModel]]
    _magnitudes: Array | None = None  # magnitudes of the features, if they are scaled
    _is_scaled: bool | None = None  # whether steps scale features; None before the first step
    _factors = Factors(0.0, 0.0)  # factors of the penalties in the present call
    _pick: tuple[Pick, int] | None = None  # what the last fit picked for adaptive steps, if it did, and the steps of its passes

    @abstractmethod
    def _fitted(self, weights: Array | None = None) -> FittedModel:
        """Return the model of the fitted attributes, or with other weights, in the form of ``coef_``."""

    def _loss_model(self) -> LinearModel:
        """Return the model with the loss selected by this estimator's parameters."""
        return self._model()

    def _conditioned(self, dataset: Dataset, comm: Any, onward: bool) -> tuple[Dataset, Array]:
        """Return the data set with scaled features, and the scales."""
        self._decide_on_scales(dataset, comm, onward)
        if not self._is_scaled:
            return dataset, np.ones(1, dataset.values.dtype)
        before = resized(self._magnitudes, dataset.features) if onward and self._magnitudes is not None else None
        self._magnitudes = feature_magnitudes(dataset, comm, before)
        scales = feature_scales(self._magnitudes)
        return scaled(dataset, scales), scales

    def _decide_on_scales(self, dataset: Dataset, comm: Any, onward: bool) -> None:
        """Decide whether steps scale features, if that is "auto"; continued training keeps the decision. Collective."""
        if not is_auto(self.scale_features):
            self._is_scaled = bool(self.scale_features)
        elif not (onward and self._is_scaled is not None):
            self._is_scaled = units_differ_in(dataset, comm)

    def _largest_curvature(self, model: LinearModel, labels: Array, comm: Any) -> float:
        """Return the second derivative of the loss that the learning rate is chosen by. Collective."""
        return model.curvature

    def _initial_rate(self, model: LinearModel, dataset: Dataset, comm: Any, partial: bool, onward: bool) -> float:
        given = float(self.learning_rate) if isinstance(self.learning_rate, int | float) else None
        if self._choices().update != "sgd":
            if given is not None:
                return given
            return _ADAPTIVE_RATES[self._choices().update] if self._choice is None else self._choice.rate
        if given is not None:
            return given
        eigenvalue = largest_eigenvalue(dataset, self.fit_intercept, comm)
        if partial:
            # Sample weights do not have mean one, and a step must be stable on the samples of any call.
            eigenvalue *= mean_of(np.ones(dataset.rows), dataset, comm)
            eigenvalue = max(eigenvalue, getattr(self, "_eigenvalue", 0.0) if onward else 0.0)
        self._eigenvalue = eigenvalue
        shrinking = self._factors.l2 / (1 - self._choices().momentum)  # a step with rate * shrinking = 1 would set weights to zero
        curvature = self._largest_curvature(model, dataset.labels, comm)
        return 1 / (curvature * eigenvalue + shrinking) if eigenvalue > 0 else 1 / (1 + shrinking)

    def _pick_rate(self, model: LinearModel, dataset: Dataset, call: Call, unit: float, comm: Any) -> None:
        """Pick rate and beta of adaptive steps by the progressive loss of the first samples, if neither is given. Collective.

        Continued calls keep what the last fit picked.
        """
        self._pick = None
        if not self._leaves_rate_open or not model.classifies:
            return
        share, batch = self.validation_fraction if self.early_stopping else 0.0, self._choices().batch_size
        division = divided(dataset, share, call.seed, comm)
        nonzeros, moments = sum(gather(comm, dataset.nnz)), self._moments

        def descent(beta: float, samples: int) -> Descent:
            return replace(self._descent(model), beta=beta * gradient_unit(moments, nonzeros, samples))

        choice = picked(model, dataset, comm, division, descent, batch * comm.size, batch, call.seed, unit)
        steps = -(-division.total // (batch * comm.size))
        self._pick = choice._replace(beta=descent(choice.beta, batch * comm.size).beta), steps

    @property
    def _leaves_rate_open(self) -> bool:
        """True if adaptive steps are taken, and none of the parameters that bear on their rate is given."""
        return self._choices().update == "ftrl" and all(map(is_auto, (self.update, self.learning_rate, self.schedule)))

    @property
    def _choice(self) -> Pick | None:
        """The rate, beta and decay that the last fit picked; None if the parameters no longer leave them open."""
        return self._pick[0] if self._pick is not None and self._leaves_rate_open else None

    def _rate_unit(self, model: LinearModel, dataset: Dataset, comm: Any, further: bool) -> float:
        """Return the factor of rates, from these samples and, if they are ``further`` ones, those of earlier calls. Collective."""
        if self._choices().update == "sgd":
            return 1.0
        moments = sample_moments(dataset, comm) + (getattr(self, "_moments", 0.0) if further else 0.0)
        self._moments = moments
        return rate_unit(self._choices().update, moments, self.fit_intercept, model.in_units_of_labels)

    def _patience(self, dataset: Dataset, strategy: Strategy) -> int:
        """Return the number of passes without a lower loss that count as a plateau; with momentum the loss oscillates for longer."""
        chosen = self._choices()
        steps = -(-dataset.total_samples // (chosen.batch_size * strategy.workers))
        return max(chosen.n_iter_no_change, math.ceil(_SWING / (1 - chosen.momentum) / steps) if chosen.momentum else 1)

    def _schedule(self, rate: float, steps: int, patience: int, tolerance: float) -> Schedule:
        """Return the schedule, continued after ``steps`` steps of earlier calls."""
        kind = self._choices().schedule
        if self._pick is not None and self._choice is not None:
            return Onward(self._pick[0].schedule(self._pick[1]), steps)
        if kind == PLATEAU:
            return Plateau(rate, _CUT, patience, tolerance)
        return Onward((kind if callable(kind) else SCHEDULES[kind])(rate), steps)

    def _start(self, model: LinearModel, dataset: Dataset, found: FittedModel | None, scales: Array, comm: Any) -> Array:
        """Return the initial weights, intercept last: those of a model, or the best ones that do not use features."""
        size = dataset.features + self.fit_intercept
        start = np.zeros(size if model.columns is None else (size, model.columns), dataset.values.dtype)
        if found is not None:
            weights, intercept = scores_for(model, found)
            start[: dataset.features] = (weights.T * scales).T
            start[dataset.features :] = intercept
        elif self.fit_intercept:
            start[-1] = self._constant(dataset, comm)
        return start

    def _constant(self, dataset: Dataset, comm: Any) -> float:
        """Return the best score without features: for a regression that of the mean label."""
        if self._model.classifies or not self.fit_intercept:
            return 0.0
        mean = mean_of(dataset.labels, dataset, comm) / mean_of(np.ones(dataset.rows), dataset, comm)
        return self._loss_model().constant_score(mean)

    def _run(
        self,
        model: LinearModel,
        strategy: Strategy,
        call: Call,
        rate: float,
        unit: float,
        comm: Any,
        earlier: tuple[int, dict[str, float], str] | None,
    ) -> tuple[list[Epoch], dict[str, float]]:
        """Train the weights of a strategy, after ``earlier``: passes, the state of their schedule, and its parameters. Collective.

        Returns
        -------
        list of Epoch
        dict
            State of the schedule.
        """
        chosen, dataset = self._choices(), strategy.dataset
        if isinstance(strategy.weights, AdaptiveWeights):
            # If scaling is "auto", features that are left unscaled have similar scales.
            strategy.weights.features_scaled = bool(self._is_scaled) or is_auto(self.scale_features)
        shape = (dataset.rows,) if model.columns is None else (dataset.rows, model.columns)
        constant = np.full(shape, self._constant(dataset, comm))
        with np.errstate(over="ignore"):  # training refuses labels whose loss is infinite
            tolerance = (chosen.tol or 0.0) * mean_of(model.loss(constant, dataset.labels), dataset, comm)
        patience = self._patience(dataset, strategy)
        stopping = self._stopping(call.passes, patience, tolerance)
        schedule = agreed(comm, lambda: self._schedule(rate, call.steps, patience, tolerance))  # a schedule may be user code
        passed, state, rates = earlier or (0, {}, "")
        if isinstance(schedule, Reactive) and chosen.schedule != PLATEAU and state and rates == self._rates():
            schedule.restore(state)
        share = self.validation_fraction if self.early_stopping else 0.0
        evaluate_every = int(self._evaluates(schedule, call.partial))
        options = Options(call.passes, chosen.batch_size, call.seed, before=passed, validation=share, evaluate_every=evaluate_every)
        trainer = Trainer(model, strategy, schedule, options, stopping=stopping, rate_unit=unit)
        for epoch in trainer.run():
            if self.verbose and comm.rank == 0:
                print(f"pass {epoch.epoch}: loss {epoch.loss:.6g}, {epoch.seconds['total']:.3f} s")
        if stopping is not None and stopping.waited < stopping.patience and comm.rank == 0:
            still = f"the loss still falls after max_iter = {call.passes} passes: raise max_iter or tol"
            warn(still, ConvergenceWarning)
        return trainer.history, schedule.state() if isinstance(schedule, Reactive) else {}

    def _stopping(self, passes: int, patience: int, tolerance: float) -> EarlyStopping | None:
        """Return when to stop before all passes are made, None for never."""
        chosen = self._choices()
        if chosen.tol is None or (passes == 1 and not self.early_stopping):
            return None
        if self.early_stopping:
            return EarlyStopping("validation_loss", patience, tolerance)
        return EarlyStopping("loss", patience * (_PLATEAUS if chosen.schedule == PLATEAU else 1), tolerance)

    def _evaluates(self, schedule: Any, partial: bool) -> bool:
        """Return True if the samples are evaluated after each pass.

        An evaluation after a call needs all weights, and only reactive schedules use it. It costs nearly as much as a pass of adaptive
        steps, of which there are few.
        """
        chosen = self._choices()
        if partial and (chosen.schedule == PLATEAU or not _goes_by_losses(schedule)):
            return False
        return chosen.update == "sgd" or bool(self.early_stopping)

    def _take_up(self, before: Progress, strategy: Strategy, scales: Array, partial: bool) -> None:
        """Continue with the state of earlier weights."""
        width = strategy.descent.width
        before = before.of_features(strategy.dataset.features, width)
        stretch = scales / before.scales
        strategy.weights.remember(before.memory, stretch)
        if partial and isinstance(strategy, LossyStrategy) and before.residual is not None:
            features = strategy.dataset.features * width
            strategy.residual[:features] = before.residual[:features] * np.repeat(stretch, width if len(stretch) > 1 else 1)
            if len(strategy.residual) == len(before.residual):  # otherwise only one of the two has an intercept
                strategy.residual[features:] = before.residual[features:]

    def _rates(self) -> str:
        """Return the parameters that learning rates depend on; a change of one of them restarts the schedule."""
        chosen = self._choices()
        return described((chosen.update, chosen.schedule, self.learning_rate, self._factors.l2, chosen.momentum))

    def _strategy(self, model: LinearModel, dataset: Dataset, comm: Any, partial: bool = False) -> Strategy:
        kind: type[Strategy] = SparseStrategy if self.strategy is None else REPLICATED[self.strategy]
        local = comm.size > 1 and self._choices().update == "ftrl" and self.algorithm == "auto"
        if self.strategy is None and local and not partial:
            kind = LocalStepsStrategy
        options: dict[str, Any] = {"algorithm": self.algorithm} if issubclass(kind, SparseStrategy) else {}
        if issubclass(kind, LossyStrategy) and self.density is not None:
            options["density"] = self.density
        return kind(dataset, comm, self._descent(model), threads=self._thread_count, **options)

    def _descent(self, model: LinearModel) -> Descent:
        chosen = self._choices()
        return Descent(
            l2=self._factors.l2,
            l1=self._factors.l1,
            intercept=self.fit_intercept,
            momentum=chosen.momentum,
            update=chosen.update,
            average_from=None if self.average is False else int(self.average) * (self.average is not True),
            columns=model.columns,
            beta=0.0 if self._choice is None else self._choice.beta,
        )


def _goes_by_losses(schedule: Schedule) -> bool:
    """Return True if a schedule, or the one that it wraps, reacts to losses."""
    while isinstance(schedule, Onward | LargeBatch):
        schedule = schedule.schedule
    return isinstance(schedule, Reactive)
