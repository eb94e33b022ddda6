"""`sparseallreduce train`: train a linear model on sparse samples, under mpiexec or alone."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from click.core import ParameterSource

from sparseallreduce.algorithms import algorithms
from sparseallreduce.cli import train_conflicts, train_options, train_runs
from sparseallreduce.cli.device import array_module_of, device_option
from sparseallreduce.cli.inputs import (
    INPUT_FILE,
    SamplesCommand,
    both_standard_input,
    cache_options,
    format_options,
    samples_argument,
    table_options,
    zero_based_option,
)
from sparseallreduce.cli.interpretation_options import names_option, write_dictionary
from sparseallreduce.cli.metrics_options import asked_metrics, metrics_lines, metrics_option, metrics_record
from sparseallreduce.cli.numbers import Whole
from sparseallreduce.cli.progress import progress_option, write_line
from sparseallreduce.cli.report import OUTPUT_FILE, check_output, environment, write_report
from sparseallreduce.cli.train_prepared import Prepared, prepare
from sparseallreduce.cli.train_samples import Samples, read_samples
from sparseallreduce.cli.train_search import Search, search
from sparseallreduce.cli.train_table import compared, comparison, record
from sparseallreduce.linear.data.parts import Data
from sparseallreduce.linear.defaults import AUTO, DUAL, SGD, SOLVERS, Penalty, chosen_solver, in_rounds, svm_loss
from sparseallreduce.linear.metrics import evaluate_scores, scores_of
from sparseallreduce.linear.model_file import FittedModel, load_model, save_model
from sparseallreduce.linear.models import LOSSES, MODELS, Hinge
from sparseallreduce.linear.multiclass import CHOICES
from sparseallreduce.linear.strategies import LOSSY, STRATEGIES
from sparseallreduce.linear.strategies.lossy import DENSITY
from sparseallreduce.linear.training.early_stopping import WATCHED
from sparseallreduce.linear.training.schedules import SCHEDULES
from sparseallreduce.linear.weights import UPDATES
from sparseallreduce.runtime.communicators import world
from sparseallreduce.runtime.objects import agreed, gather

_ABOVE_ZERO = click.FloatRange(min=0, min_open=True)
_COUNT = Whole(min=1)
_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(cls=SamplesCommand)
@samples_argument("data", "DATA")
@click.option("--test", type=INPUT_FILE, help="Samples to evaluate the model on after each epoch: a file, a folder, or a quoted pattern.")
@click.option("--model", type=click.Choice(list(MODELS)), default="logistic", show_default="logistic; --update arow: svm")
@click.option(
    "--multiclass",
    type=click.Choice(CHOICES),
    default="auto",
    show_default=True,
    help="How more than two classes are trained together: by a softmax of their scores (multinomial), or each against the rest (ovr). "
    "auto: multinomial for logistic, ovr for svm, and a single score for two classes.",
)
@click.option(
    "--loss",
    type=click.Choice([loss for losses in LOSSES.values() for loss in losses]),
    metavar="LOSS",
    help="logistic: log. svm: hinge or squared_hinge. linear: squared, huber, quantile, poisson, which predicts the exponential of the "
    "score, or for support vector regression epsilon_insensitive or squared_epsilon_insensitive. "
    "Default: the first, but squared_hinge for svm unless SGD is requested.",
)
@click.option(
    "--epsilon",
    type=_ABOVE_ZERO,
    help="In units of the labels. huber: larger errors count linearly  [1.35 times the spread of the labels]. "
    "epsilon_insensitive and squared_epsilon_insensitive: smaller errors cost nothing  [0].",
)
@click.option("--quantile", type=click.FloatRange(0, 1, min_open=True, max_open=True), help="quantile: the quantile to predict  [0.5].")
@click.option(
    "--intercept/--no-intercept",
    default=None,
    help="Add a constant to every score, unpenalised except with --solver cocoa.  [yes; --update sgd: if --initial-model has one; "
    "--solver cocoa: no]",
)
@click.option("--class-weight", type=train_options.ClassWeights(), help="Weight of each class: 'balanced', or LABEL=WEIGHT,LABEL=WEIGHT.")
@click.option(
    "--solver",
    type=click.Choice(SOLVERS),
    default=AUTO,
    show_default=True,
    help="auto: Newton's method for few features and least squares; otherwise dual, if the samples are in memory and the loss is hinge, "
    "squared_hinge or log; "
    "otherwise sgd, which options for sgd select too. dual: rounds of dual coordinate ascent on every rank (CoCoA+), until the loss is "
    "within --gap of its minimum. cocoa: the same, without an intercept unless --intercept is given, which is penalised as by LIBLINEAR. "
    "sgd: steps along gradients of batches, for any loss.",
)
@click.option("--epochs", type=Whole(min=0), help="Passes over DATA  [10]; --solver dual, cocoa: maximum number of rounds  [1000].")
@click.option("--gap", type=_ABOVE_ZERO, help="All solvers but sgd: stop when the duality gap is this fraction of the loss  [0.001].")
@click.option(
    "--update",
    type=click.Choice(UPDATES),
    help="How a step changes weights: ftrl, with a learning rate per weight, without tuning; arow, with a variance per weight, only for "
    "--model svm, two classes and the strategies sparse and dense; sgd, with one learning rate. Momentum, averages, schedules and "
    "--scale-with-batch are for sgd  [ftrl; sgd with --learning-rate, --initial-model, a lossy strategy, or an option for sgd].",
)
@click.option(
    "--batch-size",
    type=_COUNT,
    help=f"Samples per rank and step  [{train_options.BATCH}; ftrl and arow: fewer, if an epoch would have fewer than "
    f"{train_options.STEPS} steps].",
)
@click.option(
    "--learning-rate",
    type=click.FloatRange(min=0),
    help="sgd: factor of the mean gradient over the samples of all ranks. ftrl: how far the first step moves each weight of a sample, in "
    "units of 1 / the samples' length, if --beta is 0. arow: 1 / r, in units of 1 / the mean square of that length. 0 for a dry run.  "
    f"[ftrl for classes: picked with --beta by trials on the first samples, and decaying; {train_options.CLASSES_RATE:g} with a --beta "
    f"above 0; {train_options.RATES['ftrl']:g} with --beta 0, --model linear and sgd; arow: {train_options.RATES['arow']:g}]",
)
@click.option(
    "--beta",
    type=click.FloatRange(min=0),
    help="ftrl: a weight uses a common learning rate until its gradients exceed those of so many samples in one step, and then a rate of "
    "its own, so that rare features do not outweigh frequent ones; 0 for AdaGrad  "
    f"[picked; {train_options.CLASSES_BETA:g} with --learning-rate; --model linear: 0].",
)
@click.option(
    "--schedule",
    type=click.Choice(list(SCHEDULES)),
    metavar="SCHEDULE",
    default="constant",
    show_default=True,
    help=f"How the learning rate changes: {', '.join(SCHEDULES)}.",
)
@click.option(
    "--decay",
    type=_ABOVE_ZERO,
    help="inverse-scaling: the power. inverse-time: epochs until the rate has halved [1 / (rate * l2) steps]. step-decay, plateau: the "
    "factor. bold-driver: the factor when the loss rises.",
)
@click.option(
    "--decay-epochs", type=_COUNT, help="step-decay: epochs between two decays [1]. plateau: epochs without progress before a decay [5]."
)
@click.option(
    "--scale-with-batch",
    type=_COUNT,
    metavar="SAMPLES",
    help="Scale the learning rate with the batch: --learning-rate is meant for this many samples per step, on all ranks together.",
)
@click.option("--warmup", type=Whole(min=0), default=0, show_default=True, help="Epochs in which the rate rises to the scaled one.")
@click.option(
    "--C",
    "C",
    type=train_options.Numbers(_ABOVE_ZERO, train_options.SEARCH),
    metavar="FLOAT[,FLOAT...]|search",
    help="Weight of the sum of losses relative to half the squared norm of the weights, as in scikit-learn and LIBLINEAR. Of several, "
    "the best is chosen by --folds or --validation; search tries eleven from 0.001 to 100, with 5 folds if neither is given.  "
    "[1; --model linear: --l2 1e-4; --solver sgd: no penalty]",
)
@click.option(
    "--l2",
    type=train_options.Numbers(click.FloatRange(min=0)),
    metavar="FLOAT[,FLOAT...]",
    help="Instead of --C: the factor of half the squared norm of the weights, which is added to the mean loss; 1 / (M * C) for M samples. "
    "Or several.",
)
@click.option(
    "--l1", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Factor of the sum of the magnitudes of the weights."
)
@click.option(
    "--momentum",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Fraction of the velocity that a step keeps.",
)
@click.option("--nesterov", is_flag=True, help="Use Nesterov's momentum.")
@click.option("--average", type=_COUNT, metavar="EPOCH", help="Use the mean of the weights over all steps from this epoch on as the model.")
@click.option(
    "--strategy",
    type=click.Choice(list(STRATEGIES)),
    metavar="STRATEGY",
    help="How ranks combine their work: local, each rank takes steps of its own, and changes are summed a few times per epoch; "
    f"{', '.join(name for name in STRATEGIES if name != 'local')} sum gradients in every step  "
    "[local with --update ftrl on the host; else sparse].",
)
@click.option(
    "--algorithm",
    type=click.Choice(algorithms()),
    metavar="ALGORITHM",
    default="auto",
    show_default=True,
    help="Allreduce algorithm of the strategies sparse, overlapped and local; giving one makes sparse the default strategy: "
    f"{', '.join(algorithms())}.",
)
@click.option(
    "--density",
    type=click.FloatRange(0, 1, min_open=True),
    help=f"Strategies {', '.join(LOSSY)}: fraction of the N entries that a step sums [{DENSITY:g}]. The rest stays in residuals.",
)
@click.option(
    "--servers", type=_COUNT, default=1, show_default=True, help="Number of ranks that are parameter servers (ps-sync, ps-async)."
)
@click.option("--threads", type=_COUNT, default=1, show_default=True, help="Threads per rank. Results do not depend on it.")
@click.option(
    "--evaluate-every",
    type=Whole(min=0),
    default=1,
    show_default=True,
    metavar="EPOCHS",
    help="Evaluate the model after every EPOCHS epochs or rounds and after the last; 0: never. Other epochs report the progressive loss, "
    "of samples before their step. Unless it is 1, schedules and early stopping that watch the loss watch the progressive one.",
)
@click.option(
    "--validation",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="FRACTION",
    help="Hold out a fraction of the samples. The model is that after the epoch or round with the best result on them; of several --C or "
    "--l2, all are trained, and the best model is kept.",
)
@click.option(
    "--folds",
    type=Whole(min=2),
    metavar="K",
    help="Cross-validate every --C or --l2, with K equal parts of the samples and of each class. The one with the highest mean accuracy, "
    "or the lowest loss if labels are numbers, is then trained on all samples.",
)
@click.option("--initial-model", type=click.Path(path_type=Path), metavar="MODEL", help="Start from the weights of a model file.")
@click.option(
    "--early-stopping",
    type=click.Choice(list(WATCHED)),
    metavar="METRIC",
    help=f"Stop when this metric stops improving: {', '.join(WATCHED)}.",
)
@click.option("--patience", type=_COUNT, help="Early stopping: evaluated epochs without progress before the end [5].")
@click.option("--tolerance", type=click.FloatRange(min=0), help="Early stopping: the smallest change that counts as progress [0].")
@click.option("--checkpoint", type=_FOLDER, metavar="FOLDER", help="Write checkpoints into FOLDER, after each epoch by default.")
@click.option("--checkpoint-every-steps", type=_COUNT, metavar="STEPS", help="Write a checkpoint every STEPS steps.")
@click.option("--checkpoint-minutes", type=_ABOVE_ZERO, metavar="MINUTES", help="Write a checkpoint every MINUTES minutes.")
@click.option("--resume", is_flag=True, help="Continue from the newest checkpoint, if there is one.")
@progress_option()
@format_options
@zero_based_option("no", "no; the test set follows DATA")
@cache_options
@table_options
@click.option("--seed", type=Whole(min=0), default=0, show_default=True, help="Seed of the order of samples.")
@metrics_option("the model on --test, or on DATA without it")
@click.option("--densities", is_flag=True, help="Record the density of gradient and sum at every step, for --json.")
@device_option(
    "Where samples, weights and gradients are. gpu needs CuPy, and pays off for batches of many non-zeros. It supports --solver sgd with "
    "--update ftrl, or sgd without momentum, L1 and averages, and the strategies sparse, dense and the lossy ones."
)
@click.option("--json", "json_path", type=OUTPUT_FILE, help="File for the results.")
@names_option
@click.option("--model-out", type=OUTPUT_FILE, help="File for the model (.npz).")
def train(data: Data, test: Path | None, initial_model: Path | None, json_path: Path | None, model_out: Path | None, **chosen: Any) -> None:
    """Train a linear model on DATA.

    DATA is svmlight text, plain or compressed (.gz, .bz2, .xz, .zst), or the binary format of `convert`. Other formats are recognised by
    the file name: tables (.csv, .parquet, .arrow, .feather; .tsv with --target), in which --target names the column of labels, Vowpal
    Wabbit's text (.vw), compressed rows of SciPy (.npz), and lines of a label, a tab and plain text (.tsv). DATA may be several files of
    one format, a folder of them, or a quoted pattern; a pipe, as from the shell's <(...); or `-`, text on standard input. Labels are
    numbers, or in text formats names of classes.

    Under mpiexec the ranks share the samples. A step averages the gradients of --batch-size samples on every rank.

    On SIGINT or SIGTERM, at any rank, all ranks write a checkpoint, if --checkpoint is given, and end with status 1.
    """
    asked, given = _asked(chosen), _given()
    chosen = train_options.completed(asked, initial_model is not None, given)
    train_conflicts.check(chosen, test is not None)
    array_module_of(chosen["device"])
    if both_standard_input(data, test):
        raise click.UsageError("standard input, -, can be read only once: give another file for DATA or --test")
    comm = world()
    say: Callable[[str], None] = write_line if comm.rank == 0 else lambda text: None
    agreed(comm, lambda: check_output(json_path, model_out, chosen["names"]) if comm.rank == 0 else None)
    encoding = None if initial_model is None else agreed(comm, lambda: load_model(initial_model).encoding)
    samples = read_samples(data, test, train_options.model(chosen), chosen, comm, encoding)
    say(samples.described(data, comm))
    if chosen["names"] is not None:
        say(write_dictionary(chosen["names"], data, comm, samples.training.features, chosen))
    metrics = _asked_metrics(samples, chosen["metrics"])
    for remark in samples.remarks(chosen):
        say(remark)
    chosen = _with_solver(asked, chosen, samples, given, test is not None, comm.size)
    if not chosen["solver_given"]:
        say(f"solver {chosen['solver']}, {_penalty(chosen)}")
    prepared, chosen = prepare(samples, initial_model, chosen, comm)
    outcome = _trained(prepared, chosen, comm, say)
    best, numbered = outcome.best, prepared.samples
    measured = _measured(best.fitted, numbered, metrics, comm) if chosen["metrics"] or (json_path and samples.testing) else {}
    if chosen["metrics"]:
        for of, figures in measured.items():
            say(f"{of} set:\n{metrics_lines(figures, best.fitted)}")
    results = {
        **_results(samples, outcome, chosen, gather(comm, _peak_memory())),
        "metrics": {of: metrics_record(figures, best.fitted) for of, figures in measured.items()},
    }
    machine = environment(comm)

    def write() -> None:
        if model_out is not None:
            save_model(model_out, replace(prepared.restored(best.fitted), encoding=samples.training.encoding))
        if json_path is not None:
            further = outcome.record(samples.testing is not None, chosen["validation"] is not None, chosen["densities"])
            write_report(json_path, "train", click.get_current_context().params | chosen, machine, results, **further)

    agreed(comm, write if comm.rank == 0 else lambda: None)


class _Outcome(NamedTuple):
    """The trained models, one for each strength of the penalty, and the search for the best strength if there was one."""

    name: str  # of the option that sets the strength
    values: tuple[Any, ...]
    runs: list[train_runs.Run]
    found: Search | None

    @property
    def best(self) -> train_runs.Run:
        return min(self.runs, key=lambda run: run.cost)

    def record(self, *known: bool) -> dict[str, Any]:
        """Return the epochs of the best run, of all runs, and the search, as JSON has them."""
        records = {id(run): [record(epoch, *known) for epoch in run.history] for run in self.runs}
        further: dict[str, Any] = {"epochs": records[id(self.best)]}
        if len(self.runs) > 1:
            further["models"] = [
                {self.name: value, "l2": run.l2, "best_epoch": run.best_epoch, "epochs": records[id(run)]}
                for value, run in zip(self.values, self.runs, strict=True)
            ]
        if self.found is not None:
            further["search"] = self.found.record()
        return further


def _asked(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the solver that they ask for, and its loss of a support vector machine."""
    asked = train_options.searched(chosen)
    solver = asked["solver"]
    if solver == AUTO:
        solver = SGD if train_options.asks_for_steps(asked, _given()) else DUAL
    asked = asked | {"solver": solver, "solver_given": solver == SGD or asked["solver"] != AUTO}
    if asked["model"] == Hinge.name and asked["loss"] is None:
        asked = asked | {"loss": svm_loss(solver, False)}
    return asked


def _trained(prepared: Prepared, chosen: dict[str, Any], comm: Any, say: Callable[[str], None]) -> _Outcome:
    """Train a model for each strength of the penalty, or search for the best one first; collective."""
    numbered, (name, values) = prepared.samples, train_options.strengths(chosen)
    found = None if chosen["folds"] is None else search(numbered, chosen, prepared.start, comm)
    if found is not None:
        for line in found.lines():
            say(line)
        values = (found.best,)
    each = [train_runs.penalised(numbered, chosen | {name: value}) for value in values]
    rounds = in_rounds(chosen["solver"])
    runs = [
        train_runs.in_rounds(numbered, one, comm, say) if rounds else train_runs.by_steps(numbered, one, prepared.start, comm, say)
        for one in each
    ]
    outcome = _Outcome(name, values, runs, found)
    if len(runs) > 1:
        say(comparison(name))
        for value, run in zip(values, runs, strict=True):
            say(compared(value, run.history, run.best_epoch, run is outcome.best))
    return outcome


def _results(samples: Samples, outcome: _Outcome, chosen: dict[str, Any], peak_memory: list[int]) -> dict[str, Any]:
    """Return the results as JSON has them, without metrics."""
    best = outcome.best
    return {
        "samples": samples.training.total_samples,
        "test_samples": None if samples.testing is None else samples.testing.total_samples,
        "features": samples.training.features,
        "classes": len(samples.classes) if samples.classes else None,
        "nonzeros": samples.nonzeros,
        "nonzeros_per_second": best.speed,
        "peak_memory": peak_memory,
        "seconds": {"read": samples.seconds, "train": sum(epoch.seconds["total"] for run in outcome.runs for epoch in run.history)},
        "solver": chosen["solver"],
        "C": outcome.values[outcome.runs.index(best)] if outcome.name == "C" else None,
        "l2": best.l2,
        "best_epoch": best.best_epoch,
        "batch_size": best.batch_size,
        "picked": best.picked,
    }


def _asked_metrics(samples: Samples, asked: tuple[str, ...] | None) -> list[str]:
    """Return the names of the metrics to measure; raise UsageError if the model trained on these samples does not have one of them."""
    classes = np.array(samples.classes) if samples.classes else np.empty(0)
    return asked_metrics(FittedModel(samples.model.name, np.zeros(1), 0.0, classes), asked)


def _measured(model: FittedModel, samples: Samples, names: list[str], comm: Any) -> dict[str, dict[str, Any]]:
    """Return the metrics of the test set (or of the training set without one) by the name of the set; collective."""
    of, measured = ("train", samples.training) if samples.testing is None else ("test", samples.testing)
    scores, labels = agreed(comm, lambda: scores_of(model, measured)), measured.labels
    if samples.classes:
        labels = (labels > 0).astype(np.intp) if samples.model.columns is None else labels.astype(np.intp)
    return {of: evaluate_scores(model, scores, labels, measured.weights, comm, names)}


def _with_solver(
    asked: dict[str, Any], chosen: dict[str, Any], samples: Samples, given: set[str], tested: bool, ranks: int
) -> dict[str, Any]:
    """Return the options with the solver that suits these samples, if none was requested."""
    if asked["solver_given"]:
        return chosen
    name, values = train_options.strengths(chosen)
    factors = [train_options.factors(chosen | {name: value}, samples.counted) for value in values]
    least = min(factors, key=lambda each: each.l2)
    held = chosen["validation"] is not None or chosen["early_stopping"] is not None
    training = samples.training
    density = samples.nonzeros / (training.total_samples * training.features)
    large = training.pages is not None
    solver = chosen_solver(AUTO, samples.model, training.features, density, least, large, held, ranks, chosen["gap"])
    if solver != chosen["solver"]:
        chosen = train_options.completed(asked | {"solver": solver}, False, given)
        train_conflicts.check(chosen, tested)
    return chosen


def _penalty(chosen: dict[str, Any]) -> str:
    """Return the penalty as the line that announces the solver shows it, such as "C 1" or "no penalty"."""
    name, values = train_options.strengths(chosen)
    if len(values) > 1:
        return f"{name} {', '.join(f'{value:g}' for value in values)}"
    given = [f"{name} {chosen[name]}" for name in ("l2", "l1") if chosen[name]]
    if given:
        return ", ".join(given)
    steps = chosen["solver"] == SGD and chosen["solver_given"] and chosen["C"] is None
    strength = train_options.default_c(chosen) if chosen["C"] is None else chosen["C"]
    if steps or chosen["l2"] == 0:
        return "no penalty"
    return f"l2 {Penalty(None).factors(None).l2:g}" if strength is None else f"C {strength:g}"


def _given() -> set[str]:
    """Return the names of the options given on the command line."""
    context = click.get_current_context()
    return {name for name in context.params if context.get_parameter_source(name) != ParameterSource.DEFAULT}


def _peak_memory() -> int:
    """Return this process's peak memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
