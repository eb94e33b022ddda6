"""The options of `sparseallreduce train`: their defaults, and the parts of a trainer that they describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from sparseallreduce.cli.parameter import Parameter
from sparseallreduce.linear.data.label_words import is_name
from sparseallreduce.linear.data.labels import BALANCED
from sparseallreduce.linear.defaults import COCOA, DUAL, SGD, Factors, Penalty, in_rounds
from sparseallreduce.linear.models import MODELS, OF_EPSILON, Hinge, LinearModel, model_of
from sparseallreduce.linear.strategies import (
    LOSSY,
    STRATEGIES,
    AsynchronousParameterServer,
    LocalStepsStrategy,
    LossyStrategy,
    ParameterServer,
    SparseStrategy,
)
from sparseallreduce.linear.training.checkpoint import Checkpoints
from sparseallreduce.linear.training.early_stopping import EarlyStopping
from sparseallreduce.linear.training.schedules import SCHEDULES, LargeBatch, Schedule
from sparseallreduce.linear.weights import Descent

__all__ = [
    "BATCH",
    "CLASSES_BETA",
    "CLASSES_RATE",
    "DECAY",
    "RATES",
    "STEPS",
    "ClassWeights",
    "Numbers",
    "asks_for_steps",
    "batch_size",
    "checkpoints",
    "completed",
    "default_c",
    "descent",
    "factors",
    "model",
    "of_sgd_alone",
    "schedule",
    "searched",
    "stopping",
    "strategy_options",
    "strengths",
]

RATES = {"sgd": 0.5, "ftrl": 0.5, "arow": 1.0}  # default learning rates
# Defaults of ftrl for classes. Without a beta rare features outweigh frequent ones: after ten passes over samples like those of URL the
# test accuracy is 0.82 instead of 0.91, which LIBLINEAR also reaches.
CLASSES_RATE, CLASSES_BETA = 5.0, 20.0
# The values that --C search stands for, and its default number of folds, which is also LIBLINEAR's.
SEARCH, GRID, FOLDS = "search", (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0), 5
BATCH, STEPS = 100, 64  # defaults: most samples per rank and step, and fewest steps per epoch
# Options that apply only to solvers in rounds, and only to SGD. --epochs counts passes of SGD, or rounds if the solver is given.
_OF_ROUNDS = ("gap",)
_OF_SGD = (
    *("update", "batch_size", "learning_rate", "beta", "schedule", "decay", "decay_epochs", "scale_with_batch", "warmup", "l1", "momentum"),
    *("nesterov", "average", "strategy", "algorithm", "density", "servers", "threads", "initial_model", "checkpoint"),
    *("checkpoint_every_steps", "checkpoint_minutes", "resume", "densities"),
)

# The parameter of each schedule that --decay sets.
DECAY = {"inverse-scaling": "power", "inverse-time": "halving", "step-decay": "factor", "bold-driver": "cut", "plateau": "factor"}


class ClassWeights(Parameter):
    """`balanced`, or pairs like `-1=0.5,1=2` or `ham=0.5,spam=2`."""

    name = "weights"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == BALANCED or isinstance(value, dict):
            return value
        try:
            weights = {_label(label): float(weight) for label, weight in (pair.rsplit("=", 1) for pair in value.split(","))}
        except ValueError:
            self.fail(f"{value!r} is neither 'balanced' nor of the form LABEL=WEIGHT,LABEL=WEIGHT", param, ctx)
        if not all(0 <= weight < float("inf") for weight in weights.values()):
            self.fail("the weight of a class must be at least 0", param, ctx)
        return weights


def _label(word: str) -> float | str:
    """Return a label from its text: a name, or a number."""
    return word if is_name(word.encode()) else float(word)


class Numbers(Parameter):
    """A number in a range, or several separated by commas, as a tuple; or the word ``also``, if given."""

    name = "float,..."

    def __init__(self, allowed: click.FloatRange, also: str | None = None) -> None:
        self._allowed, self._also = allowed, also

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str) or value == self._also:
            return value
        convert: Callable[..., float] = self._allowed.convert  # also accepts text
        numbers = tuple(convert(each, param, ctx) for each in value.split(","))
        if len(set(numbers)) < len(numbers):
            self.fail(f"{value!r} contains a number twice", param, ctx)
        return numbers if len(numbers) > 1 else numbers[0]


def searched(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the options with `--C search` replaced by numbers, and with folds unless samples are held out anyway."""
    if chosen["C"] != SEARCH:
        return chosen
    holds_out = chosen["folds"] is not None or chosen["validation"] is not None
    return chosen | {"C": GRID, "folds": chosen["folds"] if holds_out else FOLDS}


def strengths(chosen: dict[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """Return the option that sets the strength of the penalty (C or l2) and its values, one per model; None if it is not given."""
    name = "C" if chosen["l2"] is None else "l2"
    return name, chosen[name] if isinstance(chosen[name], tuple) else (chosen[name],)


def asks_for_steps(chosen: dict[str, Any], given: set[str]) -> bool:
    """Return True if any option on the command line needs SGD, which rules out the other solvers."""
    watch = chosen["early_stopping"] or ""
    return watch.startswith("progressive") or chosen["device"] != "cpu" or "epochs" in given or any(name in given for name in _OF_SGD)


def factors(chosen: dict[str, Any], counted: float) -> Factors:
    """Return the factors of the penalties, where C and l2 are a number or None; ``counted`` is the total weight of the samples.

    If SGD is requested without a penalty, there is none.
    """
    l2 = chosen["l2"]
    if l2 is None and chosen["C"] is None and chosen["solver_given"] and chosen["solver"] == SGD:
        return Factors(0.0, chosen["l1"])
    return Penalty(_default(chosen["C"], default_c(chosen)), l2=l2, l1=chosen["l1"]).factors(counted)


def default_c(chosen: dict[str, Any]) -> float | None:
    """Return the default C; None for regression, as in the estimators: their default penalty does not depend on the samples."""
    return 1.0 if MODELS[chosen["model"]].classifies else None


def completed(chosen: dict[str, Any], started: bool, given: set[str]) -> dict[str, Any]:
    """Return all options, with the update and the learning rate chosen by the other options if they were not given.

    Raises
    ------
    click.UsageError
        If one of the ``given`` options does not apply to the solver, which is not "auto" here.

    Notes
    -----
    With arow the model is svm, the only one that arow supports. A given learning rate selects sgd, since scripts older than the other
    updates are tuned to it. So do lossy strategies, which are published with sgd, and an initial model, because the first steps of ftrl
    move every weight far. An intercept costs adaptive steps next to nothing, and data with a rare class needs one; whether an initial model
    has one is not known here.
    """
    rounds = in_rounds(chosen["solver"])
    unsuitable = next((name for name in (_OF_SGD if rounds else _OF_ROUNDS) if name in given), None)
    if unsuitable is not None:
        theirs = SGD if rounds else DUAL
        raise click.UsageError(f"--{unsuitable.replace('_', '-')} is for --solver {theirs}: leave it out, or use it")
    return _completed_rounds(chosen) if rounds else _completed_steps(chosen, started, given)


def _completed_rounds(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return all options of a solver that works in rounds."""
    cocoa = chosen["solver"] == COCOA
    return chosen | {
        "strategy": SparseStrategy.name,
        "epochs": _default(chosen["epochs"], 1000),
        "gap": 1e-3 if chosen["gap"] is None and chosen["solver_given"] else chosen["gap"],
        "multiclass": "ovr" if chosen["multiclass"] == "auto" and cocoa else chosen["multiclass"],
        "intercept": bool(_default(chosen["intercept"], not cocoa)),
    }


def _completed_steps(chosen: dict[str, Any], started: bool, given: set[str]) -> dict[str, Any]:
    """Return all options of training by steps."""
    chosen = chosen | {"epochs": _default(chosen["epochs"], 10)}
    update = chosen["update"] or _update(chosen, started)
    if update == "arow" and "model" not in given:
        chosen = chosen | {"model": Hinge.name}
    damped = update == "ftrl" and MODELS[chosen["model"]].classifies
    beta = _default(chosen["beta"], CLASSES_BETA if damped else 0.0)
    rate = _default(chosen["learning_rate"], CLASSES_RATE if damped and beta else RATES[update])
    if chosen["intercept"] is None and not started:
        chosen = chosen | {"intercept": update != "sgd"}
    if chosen["strategy"] is None:
        local = update == "ftrl" and chosen["device"] == "cpu" and chosen["algorithm"] == "auto"
        chosen = chosen | {"strategy": (LocalStepsStrategy if local else SparseStrategy).name}
    picks = damped and chosen["learning_rate"] is None and chosen["beta"] is None and not started
    return chosen | {"update": update, "learning_rate": rate, "beta": beta, "picks": picks}


def _update(chosen: dict[str, Any], started: bool) -> str:
    """Return the update for the other options; ``started`` tells whether an initial model is given."""
    of_sgd = chosen["learning_rate"] is not None or chosen["strategy"] in LOSSY or started or of_sgd_alone(chosen)
    return "sgd" if of_sgd and chosen["strategy"] != LocalStepsStrategy.name else "ftrl"


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def of_sgd_alone(chosen: dict[str, Any]) -> list[str]:
    """Return the given options that do not apply to adaptive weights, or are not designed for them."""
    given = [f"--{name.replace('_', '-')}" for name in ("momentum", "nesterov", "average", "scale_with_batch") if chosen[name]]
    if chosen["schedule"] != "constant":
        given.append(f"--schedule {chosen['schedule']}")
    if chosen["strategy"] == AsynchronousParameterServer.name:
        given.append(f"--strategy {chosen['strategy']}")
    return given


def model(chosen: dict[str, Any]) -> LinearModel:
    """Return the model, with its loss."""
    loss = chosen["loss"]
    return model_of(chosen["model"], loss, chosen["epsilon"] if loss in OF_EPSILON else chosen["quantile"] if loss == "quantile" else None)


def descent(chosen: dict[str, Any], steps: int) -> Descent:
    """Return the settings of the weight updates; ``steps`` is the number of steps per epoch."""
    return Descent(
        l2=chosen["l2"],
        intercept=chosen["intercept"],
        l1=chosen["l1"],
        momentum=chosen["momentum"],
        update=chosen["update"],
        nesterov=chosen["nesterov"],
        average_from=None if chosen["average"] is None else (chosen["average"] - 1) * steps,
    )


def schedule(chosen: dict[str, Any], steps: int, batch: int) -> Schedule:
    """Return the schedule of the learning rate, for epochs of ``steps`` steps with ``batch`` samples each.

    Raises
    ------
    click.UsageError
        If --decay does not suit the schedule, or the scaled rate is too large for --l2.
    """
    name, rate, decay, epochs = chosen["schedule"], chosen["learning_rate"], chosen["decay"], chosen["decay_epochs"]
    options: dict[str, Any] = {}
    if name == "inverse-time" and chosen["l2"] and rate:
        options["halving"] = 1.0 / (rate * chosen["l2"])
    if name == "step-decay":
        options["every"] = (epochs or 1) * steps
    if name == "plateau" and epochs:
        options["patience"] = epochs
    if decay is not None:
        options[DECAY[name]] = decay * steps if name == "inverse-time" else decay
    try:
        base: Schedule = SCHEDULES[name](rate, **options)
    except ValueError as error:
        raise click.UsageError(f"--decay {decay:g} does not suit --schedule {name}: {error}") from None
    if chosen["scale_with_batch"] is None:
        return base
    factor = batch / chosen["scale_with_batch"]
    if rate * factor * chosen["l2"] >= 1 - chosen["momentum"]:
        scaled = f"--learning-rate, which is scaled by {factor:g} with the batch,"
        raise click.UsageError(f"the product of {scaled} and --l2 must be below 1 minus --momentum: lower one of them")
    return LargeBatch(base, factor, chosen["warmup"] * steps)


def stopping(chosen: dict[str, Any]) -> EarlyStopping | None:
    """Return the rule for early stopping, None if there is none."""
    if chosen["early_stopping"] is None:
        return None
    return EarlyStopping(chosen["early_stopping"], chosen["patience"] or 5, chosen["tolerance"] or 0.0)


def batch_size(chosen: dict[str, Any], samples: int, workers: int) -> int:
    """Return the samples per worker and step, by default small enough for ``STEPS`` steps per pass over all ``samples``."""
    if chosen["batch_size"] is not None:
        return int(chosen["batch_size"])
    return BATCH if chosen["update"] == "sgd" else min(BATCH, max(1, samples // (STEPS * workers)))


def checkpoints(chosen: dict[str, Any]) -> Checkpoints | None:
    """Return where and how often to write checkpoints, None for never."""
    if chosen["checkpoint"] is None:
        return None
    return Checkpoints(chosen["checkpoint"], chosen["checkpoint_every_steps"], chosen["checkpoint_minutes"])


def strategy_options(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the chosen strategy, besides the data set, the communicator and the descent."""
    kind = STRATEGIES[chosen["strategy"]]
    options = {"threads": chosen["threads"]}
    if chosen["device"] != "cpu":
        options["device"] = chosen["device"]
    if issubclass(kind, LossyStrategy) and chosen["density"] is not None:
        options["density"] = chosen["density"]
    if issubclass(kind, SparseStrategy):
        options["algorithm"] = chosen["algorithm"]
    if issubclass(kind, ParameterServer):
        options["servers"] = chosen["servers"]
    return options
