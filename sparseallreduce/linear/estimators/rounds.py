"""Training of an estimator in rounds, instead of SGD steps."""

from __future__ import annotations

import inspect
import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.defaults import AUTO, COCOA, DUAL, NEWTON
from sparseallreduce.linear.estimators.parameters import Parameterised, is_auto
from sparseallreduce.linear.estimators.remarks import warn
from sparseallreduce.linear.models import LinearModel
from sparseallreduce.linear.solvers import Figures, RoundOptions, RoundTrainer
from sparseallreduce.linear.training.early_stopping import EarlyStopping

__all__ = ["Rounds", "asks_for_steps", "check_rounds", "train_in_rounds"]

Array = NDArray[Any]

_GAP = 1e-3  # default gap if a solver is given
_ROUNDS_WITHOUT_CHANGE = 5  # default number of rounds for early stopping
_LEAST_GAP = sys.float_info.min  # requested gap if all rounds should be made
# Parameters of SGD steps and of the sum of their gradients.
_OF_SGD = (
    "l1",
    "update",
    "learning_rate",
    "schedule",
    "momentum",
    "average",
    "batch_size",
    "strategy",
    "algorithm",
    "density",
    "warm_start",
)


class Rounds(NamedTuple):
    """The result of a training in rounds."""

    learned: Array  # weights, intercept last; with several classes one column per score
    figures: list[Figures]


def asks_for_steps(estimator: Parameterised) -> str | None:
    """Return the name of a parameter that applies only to SGD steps and differs from its default, or None."""
    defaults = inspect.signature(type(estimator)).parameters
    for name in _OF_SGD:
        value, default = getattr(estimator, name), defaults[name].default
        if value is not default and not (isinstance(value, str | int | float) and value == default):
            return name
    return None


def check_rounds(estimator: Parameterised) -> None:
    """Raise an error for parameters that only SGD steps have, and for penalties without a dual problem.

    Raises
    ------
    ValueError
    """
    solver, name = estimator.solver, asks_for_steps(estimator)
    if name is not None or estimator.threads != 1:
        name = name or "threads"
        value = getattr(estimator, name)
        raise ValueError(f"{name}={value!r} is for solver='sgd', and has no meaning for solver={solver!r}: leave it out, or use 'sgd'")
    factors = estimator._penalty.factors(1.0)
    if factors.l1 or not factors.l2:
        name = "l1_ratio" if factors.l1 else "l2" if estimator.l2 is not None else "C" if estimator.penalty is not None else "penalty"
        value = getattr(estimator, name)
        raise ValueError(f"solver={solver!r} needs an L2 penalty, but {name} is {value!r}: change it, or use solver='sgd'")
    if not is_auto(estimator.tol) and estimator.tol is not None and not 0 < estimator.tol < np.inf:  # type: ignore[operator]
        raise ValueError(f"tol must be above 0 and finite for solver={solver!r}, 'auto' or None, not {estimator.tol!r}")


def train_in_rounds(estimator: Parameterised, model: LinearModel, dataset: Dataset, seed: int, comm: Any) -> Rounds:
    """Make rounds until the duality gap is small enough, or held-out samples are predicted no better. Collective.

    Parameters
    ----------
    estimator : Parameterised
        Estimator whose parameters have passed :func:`check_rounds`.
    model : Hinge, SquaredHinge, Logistic, or OneVsRest of one of them
    dataset : Dataset
        This rank's samples.
    seed : int
        Seed of the order of visits, and of the samples held out.
    comm : communicator
    """
    asked: Any = _GAP if is_auto(estimator.tol) and estimator.solver != AUTO else estimator.tol
    options, stopping = _options(estimator, asked, seed), None
    if estimator.early_stopping and asked is not None:
        patience: Any = _ROUNDS_WITHOUT_CHANGE if is_auto(estimator.n_iter_no_change) else estimator.n_iter_no_change
        stopping = EarlyStopping("validation_loss", patience)
    trainer = RoundTrainer(model, dataset, comm, estimator._factors.l2, options, stopping)
    for figures in trainer.run():
        if estimator.verbose and comm.rank == 0:
            print(_line(figures))
    if asked is not None and not trainer.converged and not (stopping is not None and stopping.reached) and comm.rank == 0:
        share = "a thousandth" if is_auto(asked) else f"{asked:g}"
        gap = f"the duality gap is above {share} of the loss after max_iter = {estimator.max_iter} rounds"
        faster = {None: "", NEWTON: ", or use solver='newton'"}.get(trainer.faster, f", or use loss='{trainer.faster}'")
        warn(f"{gap}: raise max_iter or tol{faster}", ConvergenceWarning)
    return Rounds(trainer.weights().astype(dataset.values.dtype, copy=False), trainer.history)


def _options(estimator: Parameterised, gap: Any, seed: int) -> RoundOptions:
    early = estimator.early_stopping
    return RoundOptions(
        rounds=estimator.max_iter,
        gap=None if is_auto(gap) else _LEAST_GAP if gap is None else gap,
        seed=seed,
        intercept=estimator.fit_intercept,
        solver=NEWTON if estimator.solver_ == NEWTON else DUAL,
        free_intercept=estimator.solver_ != COCOA,
        scale_features=None if is_auto(estimator.scale_features) else bool(estimator.scale_features),
        # An evaluation takes longer than a round, and the solver computes the loss when it tests for convergence.
        evaluate_every=1 if early else 0,
        validation=estimator.validation_fraction if early else 0.0,
    )


def _line(figures: Figures) -> str:
    known = "" if figures.loss is None or figures.gap is None else f"loss {figures.loss:.6g}, gap {figures.gap:.3g}, "
    return f"round {figures.epoch}: {known}dual {figures.dual:.6g}, {figures.seconds['total']:.3f} s"
