"""Which options of `sparseallreduce train` do not go together, and what to change."""

from __future__ import annotations

import math
from typing import Any

import click

from sparseallreduce.cli.train_options import DECAY, of_sgd_alone, strengths
from sparseallreduce.linear.defaults import COCOA, DUAL, in_rounds
from sparseallreduce.linear.models import LOSSES, MODELS, OF_EPSILON, Hinge
from sparseallreduce.linear.strategies import LOSSY, STRATEGIES, LocalStepsStrategy, LossyStrategy, ParameterServer, SparseStrategy

__all__ = ["check"]


def check(chosen: dict[str, Any], tested: bool) -> None:
    """Raise an error for options that do not fit together.

    Raises
    ------
    click.UsageError
        Says what to change.
    """
    parts = (_penalties, _updates, _strategies, _schedules, _stopping, _searches, _classes, _losses, _unsupported, _infinite)
    for part in parts:
        for message, holds in part(chosen).items():
            if holds:
                raise click.UsageError(message)
    if not tested and (chosen["early_stopping"] or "").startswith("test"):
        raise click.UsageError("--early-stopping watches the test set: give --test too")


def _penalties(chosen: dict[str, Any]) -> dict[str, bool]:
    """Return the conflicts of --C, --l1, --l2 and --solver: messages, and whether each applies. So do the functions below."""
    name, values = strengths(chosen)
    factors, solver = [factor for factor in values if name == "l2"], chosen["solver"]
    dual = solver in (DUAL, COCOA) and chosen["solver_given"]
    largest = max(factors, default=0.0)
    return {
        "--C and --l2 both set the penalty: leave one of them out": chosen["C"] is not None and bool(factors),
        "--C and --l1 both set the penalty: leave one of them out": chosen["C"] is not None and chosen["l1"] > 0,
        f"--solver {solver} has no loss of --model {chosen['model']}: use --solver sgd": dual and not MODELS[chosen["model"]].classifies,
        f"--solver {solver} needs a penalty: give a --l2 above 0, or leave it out": dual and not all(factor > 0 for factor in factors),
        "the product of --learning-rate and --l2 must be below 1 minus --momentum: lower one of them": chosen["update"] == "sgd"
        and 1 - chosen["momentum"] <= chosen["learning_rate"] * largest,
        "--l2 must be a finite number": not all(map(math.isfinite, factors)),
        "--C must be a finite number": name == "C" and not all(math.isfinite(value or 0.0) for value in values),
    }


def _updates(chosen: dict[str, Any]) -> dict[str, bool]:
    update, strategy = chosen["update"], STRATEGIES[chosen["strategy"]]
    wrong = {
        "--beta is for --update ftrl: leave it out, or use it": bool(chosen["beta"]) and update != "ftrl",
        "--strategy local is for --update ftrl: leave it out, or use it": strategy is LocalStepsStrategy and update != "ftrl",
        "--nesterov needs momentum: give --momentum too": chosen["nesterov"] and not chosen["momentum"],
        f"--average starts after the last of {chosen['epochs']} epochs: lower it, or raise --epochs": (chosen["average"] or 0)
        > max(1, chosen["epochs"]),
    }
    if update not in (None, "sgd") and (given := of_sgd_alone(chosen)):
        wrong[f"{given[0]} is for --update sgd: leave it out, or use it"] = True
    if update == "arow":
        of_svm = f"--update arow is for --model svm: leave --model {chosen['model']} out, or use --update ftrl"
        without = f"--strategy {chosen['strategy']} does not support --update arow: use ftrl, or --strategy sparse or dense"
        wrong |= {of_svm: chosen["model"] != Hinge.name, without: not strategy.sums_batches}
    return wrong


def _strategies(chosen: dict[str, Any]) -> dict[str, bool]:
    strategy = STRATEGIES[chosen["strategy"]]
    return {
        "--algorithm is for the strategies sparse and overlapped: leave it out, or use one of them": chosen["algorithm"] != "auto"
        and not issubclass(strategy, SparseStrategy),
        f"--density is for the strategies {', '.join(LOSSY)}: leave it out, or use one of them": chosen["density"] is not None
        and not issubclass(strategy, LossyStrategy),
        "--servers is for the strategies ps-sync and ps-async: leave it out, or use one of them": chosen["servers"] != 1
        and not issubclass(strategy, ParameterServer),
    }


def _schedules(chosen: dict[str, Any]) -> dict[str, bool]:
    schedule = chosen["schedule"]
    return {
        "--decay is for all schedules but constant: leave it out, or choose one": chosen["decay"] is not None and schedule not in DECAY,
        "--decay-epochs is for --schedule step-decay and plateau: leave it out, or use one of them": chosen["decay_epochs"] is not None
        and schedule not in ("step-decay", "plateau"),
        "--warmup needs a scaled learning rate: give --scale-with-batch too": chosen["warmup"] > 0 and chosen["scale_with_batch"] is None,
    }


def _stopping(chosen: dict[str, Any]) -> dict[str, bool]:
    watch, evaluated = chosen["early_stopping"] or "", bool(chosen["evaluate_every"])
    limits = chosen["patience"], chosen["tolerance"]
    return {
        f"--early-stopping watches {watch}, which is for --solver sgd: watch another metric": in_rounds(chosen["solver"])
        and watch.startswith("progressive"),
        "--patience and --tolerance are for early stopping: give --early-stopping too": not watch and limits != (None, None),
        "--early-stopping watches held-out samples: give --validation too": watch.startswith("validation") and chosen["validation"] is None,
        f"--early-stopping watches {watch}, which --evaluate-every 0 turns off: watch progressive_loss, or evaluate": not evaluated
        and watch.startswith(("train", "test", "validation")),
        "--validation needs evaluations, which --evaluate-every 0 turns off: leave out one of them": chosen["validation"] is not None
        and not evaluated,
    }


def _searches(chosen: dict[str, Any]) -> dict[str, bool]:
    (name, values), folds, held = strengths(chosen), chosen["folds"], chosen["validation"] is not None
    several = len(values) > 1
    of_checkpoints = chosen["resume"], chosen["checkpoint_every_steps"], chosen["checkpoint_minutes"]
    return {
        f"choosing among several --{name} needs held-out samples: give --validation or --folds too": several and not held and folds is None,
        f"--checkpoint stores the state of one run: give one --{name}, and leave out --folds": (several or folds is not None)
        and chosen["checkpoint"] is not None,
        "--folds compares several penalties: give them, as --C 0.01,0.1,1,10, or --C search": folds is not None and values == (None,),
        "--folds and --validation both set the samples to hold out: leave one of them out": folds is not None and held,
        "--folds needs trained models: raise --epochs": folds is not None and chosen["epochs"] == 0,
        "--resume and the options of checkpoints need --checkpoint": chosen["checkpoint"] is None and of_checkpoints != (False, None, None),
    }


def _classes(chosen: dict[str, Any]) -> dict[str, bool]:
    regression = not MODELS[chosen["model"]].classifies
    return {
        "--class-weight is for classes: leave it out, or use --model logistic or svm": chosen["class_weight"] is not None and regression,
        "--multiclass is for classes: leave it out, or use --model logistic or svm": chosen["multiclass"] != "auto" and regression,
        "--multiclass multinomial is a logistic model: use --multiclass ovr, or --model logistic": chosen["multiclass"] == "multinomial"
        and chosen["model"] not in ("logistic", "linear"),
    }


def _losses(chosen: dict[str, Any]) -> dict[str, bool]:
    model, loss = chosen["model"], chosen["loss"]
    return {
        f"--loss of --model {model} is {' or '.join(LOSSES[model])}: use one of them": loss is not None and loss not in LOSSES[model],
        f"--epsilon is for --loss {', '.join(OF_EPSILON)}: leave it out, or use one of them": chosen["epsilon"] is not None
        and loss not in OF_EPSILON,
        "--quantile is for --loss quantile: leave it out, or use it": chosen["quantile"] is not None and loss != "quantile",
    }


def _unsupported(chosen: dict[str, Any]) -> dict[str, bool]:
    if chosen["device"] != "gpu":
        return {}
    return {f"--device gpu does not support {what}": holds for what, holds in _unsupported_on_gpu(chosen).items()}


def _infinite(chosen: dict[str, Any]) -> dict[str, bool]:
    names = ("epsilon", "gap", "beta", "learning_rate", "l1", "decay", "tolerance", "checkpoint_minutes")
    return {f"--{name.replace('_', '-')} must be a finite number": not math.isfinite(chosen[name] or 0.0) for name in names}


def _unsupported_on_gpu(chosen: dict[str, Any]) -> dict[str, bool]:
    """Return what GPUs do not support, with an alternative for each, and whether the options ask for it."""
    kind = STRATEGIES[chosen["strategy"]]
    instead, worked = "leave it out, or leave out --device", f"sparse, dense or one of {', '.join(LOSSY)}"
    return {
        f"--solver {chosen['solver']}: use --solver sgd, or leave out --device": in_rounds(chosen["solver"]),
        f"--strategy {chosen['strategy']}: use {worked}, or leave out --device": "gpu" not in kind.devices,
        "--update arow: use ftrl or sgd, or leave out --device": chosen["update"] == "arow",
        f"--momentum: {instead}": chosen["momentum"] > 0,
        f"--average: {instead}": chosen["average"] is not None,
        "--l1 with --update sgd: use --update ftrl, or leave it out": chosen["l1"] > 0 and chosen["update"] == "sgd",
        f"--threads: {instead}": chosen["threads"] != 1,
    }
