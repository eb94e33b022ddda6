"""`sparseallreduce train`: a linear model on many samples of many features, by the ranks of mpiexec or alone."""

from __future__ import annotations

import math
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import click
import numpy as np
from tqdm import tqdm

from sparseallreduce.algorithms import algorithms
from sparseallreduce.cli import train_options
from sparseallreduce.cli.inputs import INPUT_FILE, both_standard_input, format_options, zero_based_option
from sparseallreduce.cli.report import OUTPUT_FILE, check_output, environment, write_report
from sparseallreduce.cli.train_table import COMPARISON, compared, header, line, record
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.feature_scaling import adaptive_rate_unit, sample_moments
from sparseallreduce.linear.data.labels import classes_of, numbered_classes, of_mean_one, two_classes, weighted_by_class
from sparseallreduce.linear.data.load import load
from sparseallreduce.linear.model_file import FittedModel, ModelFileError, fitted, load_model, save_model, scores_for
from sparseallreduce.linear.models import LOSSES, MODELS, LinearModel, Logistic
from sparseallreduce.linear.multiclass import CHOICES, model_of_classes
from sparseallreduce.linear.strategies import LOSSY, STRATEGIES, ParameterServer, read_on_workers
from sparseallreduce.linear.strategies.lossy import DENSITY
from sparseallreduce.linear.training.batches import held_out
from sparseallreduce.linear.training.early_stopping import WATCHED
from sparseallreduce.linear.training.schedules import SCHEDULES
from sparseallreduce.linear.training.trainer import Epoch, Options, Trainer
from sparseallreduce.linear.weights import UPDATES
from sparseallreduce.runtime.communicators import world
from sparseallreduce.runtime.objects import agreed, broadcast_arrays, gather

_ABOVE_ZERO = click.FloatRange(min=0, min_open=True)
_COUNT = click.IntRange(min=1)
_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.argument("data", type=INPUT_FILE)
@click.option("--test", type=INPUT_FILE, help="Samples to measure the model on after each epoch.")
@click.option("--model", type=click.Choice(list(MODELS)), default="logistic", show_default=True)
@click.option(
    "--multiclass",
    type=click.Choice(CHOICES),
    default="auto",
    show_default=True,
    help="How more than two classes are told apart, all in one pass: by a softmax of their scores, or each against the rest (ovr). auto: "
    "multinomial for logistic, ovr for svm, and one score for two classes.",
)
@click.option(
    "--loss",
    type=click.Choice([loss for losses in LOSSES.values() for loss in losses]),
    help="svm: hinge or squared_hinge. linear: squared, huber, quantile, or poisson, which predicts the exponential of the score; "
    "the first by default.",
)
@click.option("--epsilon", type=_ABOVE_ZERO, help="huber: errors from here on count linearly, in units of the labels  [1.35].")
@click.option("--quantile", type=click.FloatRange(0, 1, min_open=True, max_open=True), help="quantile: the share of labels below  [0.5].")
@click.option("--intercept", is_flag=True, help="Add a number to every score; it is not penalised.")
@click.option("--class-weight", type=train_options.ClassWeights(), help="Weight of each class: 'balanced', or LABEL=WEIGHT,LABEL=WEIGHT.")
@click.option("--epochs", type=click.IntRange(min=0), default=10, show_default=True, help="Passes over DATA.")
@click.option(
    "--update",
    type=click.Choice(UPDATES),
    help="How a step changes weights: ftrl, each by a rate of its own, without tuning; sgd, all by one  [ftrl; sgd with --learning-rate, "
    "--initial-model, a lossy strategy, or an option that ftrl is without].",
)
@click.option("--batch-size", type=_COUNT, default=100, show_default=True, help="Samples that a rank takes in a step.")
@click.option(
    "--learning-rate",
    type=click.FloatRange(min=0),
    help="sgd: factor of the mean gradient over the samples of all ranks. ftrl: how far the first step moves each weight of a sample, in "
    f"units of 1 / the samples' length. 0 for a dry run.  [{train_options.RATE:g}]",
)
@click.option(
    "--schedule", type=click.Choice(list(SCHEDULES)), default="constant", show_default=True, help="How the learning rate changes."
)
@click.option(
    "--decay",
    type=_ABOVE_ZERO,
    help="inverse-scaling: the power. inverse-time: epochs until the rate has halved [1 / (rate * l2) steps]. step-decay, plateau: the "
    "factor. bold-driver: the factor when the loss rises.",
)
@click.option(
    "--decay-epochs", type=_COUNT, help="step-decay: epochs between two decays [1]. plateau: epochs without progress before one [5]."
)
@click.option(
    "--scale-with-batch",
    type=_COUNT,
    metavar="SAMPLES",
    help="Scale the learning rate with the batch: --learning-rate is meant for this many samples a step, of all ranks together.",
)
@click.option(
    "--warmup", type=click.IntRange(min=0), default=0, show_default=True, help="Epochs in which the rate climbs to the scaled one."
)
@click.option(
    "--l2",
    type=train_options.Penalties(),
    default=0.0,
    show_default=True,
    metavar="FLOAT[,FLOAT...]",
    help="Factor of the penalty L2 / 2 * |w|^2 beside the mean loss: 1 / (M * C), where others have C and M samples. Of several, each is a "
    "run of its own, and --model-out the best one on --validation.",
)
@click.option("--l1", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Factor of the penalty L1 * |w|_1.")
@click.option(
    "--momentum",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Share of the velocity that a step keeps.",
)
@click.option("--nesterov", is_flag=True, help="Nesterov's momentum, which looks a step ahead.")
@click.option("--average", type=_COUNT, metavar="EPOCH", help="The model is the mean of the weights after all steps from this epoch on.")
@click.option(
    "--strategy",
    type=click.Choice(list(STRATEGIES)),
    default="sparse",
    show_default=True,
    help="How the gradients of the ranks come together.",
)
@click.option(
    "--algorithm",
    type=click.Choice(algorithms()),
    default="auto",
    show_default=True,
    help="Algorithm of the strategies sparse and overlapped.",
)
@click.option(
    "--density",
    type=click.FloatRange(0, 1, min_open=True),
    help=f"Strategies {', '.join(LOSSY)}: share of the N entries that a step sums [{DENSITY:g}]. The rest waits in residuals.",
)
@click.option(
    "--servers", type=_COUNT, default=1, show_default=True, help="Number of ranks that are parameter servers (ps-sync, ps-async)."
)
@click.option("--threads", type=_COUNT, default=1, show_default=True, help="Threads of each rank. Their number changes no result.")
@click.option(
    "--evaluate-every",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    metavar="EPOCHS",
    help="Evaluate the model after every so many epochs and the last; 0 for never. Else the loss is the progressive one: of samples before "
    "their step. With 1 excepted, a schedule or early stopping that watches the loss watches that.",
)
@click.option(
    "--validation",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="SHARE",
    help="Hold out a share of the samples. The model is that after the epoch that did best on them.",
)
@click.option("--initial-model", type=click.Path(path_type=Path), metavar="MODEL", help="Start from the weights of a model file.")
@click.option("--early-stopping", type=click.Choice(list(WATCHED)), help="Stop when this figure gets no better.")
@click.option("--patience", type=_COUNT, help="Early stopping: epochs that know the figure, without progress, before the end [5].")
@click.option("--tolerance", type=click.FloatRange(min=0), help="Early stopping: the least change that is progress [0].")
@click.option("--checkpoint", type=_FOLDER, metavar="FOLDER", help="Write checkpoints into FOLDER, after each epoch by default.")
@click.option("--checkpoint-every-steps", type=_COUNT, metavar="STEPS", help="Write a checkpoint every so many steps.")
@click.option("--checkpoint-minutes", type=_ABOVE_ZERO, metavar="MINUTES", help="Write a checkpoint every so many minutes.")
@click.option("--resume", is_flag=True, help="Continue from the newest checkpoint, if there is one.")
@format_options
@zero_based_option("no", "no; the test set follows DATA")
@click.option("--features", type=_COUNT, help="Dimension N; by default the highest index in the data.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the order of samples.")
@click.option("--densities", is_flag=True, help="Record the density of gradient and sum at every step, for --json.")
@click.option("--device", type=click.Choice(["cpu"]), default="cpu", show_default=True)
@click.option("--json", "json_path", type=OUTPUT_FILE, help="File for the results.")
@click.option("--model-out", type=OUTPUT_FILE, help="File for the model (.npz).")
def train(
    data: Path, test: Path | None, initial_model: Path | None, json_path: Path | None, model_out: Path | None, **chosen: Any
) -> None:
    """Train a linear model on DATA.

    DATA is svmlight text, plain or compressed (.gz, .bz2, .xz), or the binary format of `convert`; or by its name Vowpal Wabbit's text
    (.vw), compressed rows of SciPy (.npz), Parquet (.parquet), or labels with plain text behind a tab (.tsv); or `-`, text on standard
    input. Under mpiexec the ranks share its
    samples. A step averages the gradients of --batch-size samples of every rank.

    On SIGINT or SIGTERM, at any rank, all ranks write a checkpoint, if --checkpoint is given, and end with status 1.
    """
    chosen = train_options.completed(chosen, initial_model is not None)
    train_options.check(chosen, test is not None)
    if both_standard_input(data, test):
        raise click.UsageError("standard input, -, can be read once: give DATA or --test another file")
    comm = world()
    say: Callable[[str], None] = tqdm.write if comm.rank == 0 else lambda line: None
    agreed(comm, lambda: check_output(json_path, model_out) if comm.rank == 0 else None)
    samples = _read(data, test, train_options.model(chosen), chosen, comm)
    say(samples.described(data, comm))
    start = _initial_weights(initial_model, samples, chosen["intercept"], comm)
    runs = [_run(samples, chosen | {"l2": l2}, start, comm, say) for l2 in train_options.penalties(chosen)]
    best = min(runs, key=lambda run: run.cost)
    if len(runs) > 1:
        say(COMPARISON)
        for run in runs:
            say(compared(run.l2, run.history, run.best_epoch, run is best))

    results = {
        "samples": samples.training.total_samples,
        "test_samples": None if samples.testing is None else samples.testing.total_samples,
        "features": samples.training.features,
        "classes": len(samples.classes) if samples.classes else None,
        "nonzeros": samples.nonzeros,
        "nonzeros_per_second": best.speed,
        "peak_memory": gather(comm, _peak_memory()),
        "seconds": {"read": samples.seconds, "train": sum(epoch.seconds["total"] for run in runs for epoch in run.history)},
        "l2": best.l2,
        "best_epoch": best.best_epoch,
    }
    machine = environment(comm)

    def write() -> None:
        if model_out is not None:
            save_model(model_out, best.fitted)
        if json_path is not None:
            known = samples.testing is not None, chosen["validation"] is not None, chosen["densities"]
            records = {id(run): [record(epoch, *known) for epoch in run.history] for run in runs}
            further = {"epochs": records[id(best)]}
            if len(runs) > 1:
                further["models"] = [{"l2": run.l2, "best_epoch": run.best_epoch, "epochs": records[id(run)]} for run in runs]
            write_report(json_path, "train", click.get_current_context().params | chosen, machine, results, **further)

    agreed(comm, write if comm.rank == 0 else lambda: None)


@dataclass(frozen=True)
class _Samples:
    """What has been read."""

    training: Dataset
    testing: Dataset | None
    classes: tuple[float, ...] | None
    model: LinearModel  # of so many classes
    nonzeros: int  # of the training set, on all ranks
    seconds: float

    def described(self, path: Path, comm: Any) -> str:
        training = self.training
        several = f"{len(self.classes)} classes, " if self.classes and self.model.columns else ""
        return (
            f"{path}: {training.total_samples:,} samples, {several}{training.features:,} features, "
            f"{self.nonzeros / training.total_samples:.1f} non-zeros a sample; "
            f"read by {comm.size} rank{'s' if comm.size > 1 else ''} in {self.seconds:.1f} s"
        )


def _read(data: Path, test: Path | None, model: LinearModel, chosen: dict[str, Any], comm: Any) -> _Samples:
    """This rank's samples, labels and weights ready for the model; collective."""
    start = time.perf_counter()
    with _bar(comm, desc="reading", unit="B", unit_scale=True) as bar:

        def read(workers: Any) -> tuple[Dataset, Dataset | None]:
            how = {name: chosen[name] for name in ("format", "zero_based", "hash_bits")}
            return load(data, test, comm=workers, n_features=chosen["features"], progress=bar.update, **how)

        serving = issubclass(STRATEGIES[chosen["strategy"]], ParameterServer)
        training, testing = read_on_workers(comm, chosen["servers"], read) if serving else read(comm)
    classes = None
    if model.classifies:
        found = classes_of(training, comm)
        if len(found) > 1:
            model = model_of_classes(model, len(found), chosen["multiclass"])
        coded: Any = two_classes if model.columns is None else numbered_classes
        training, classes = coded(training, comm)
        testing = None if testing is None else coded(testing, comm, classes)[0]
        training = _class_weighted(training, chosen["class_weight"], classes, model.columns, comm)
    training, testing = _importances_of_mean_one(training, comm), testing and _importances_of_mean_one(testing, comm)
    return _Samples(training, testing, classes, model, sum(gather(comm, training.nnz)), time.perf_counter() - start)


def _importances_of_mean_one(samples: Dataset, comm: Any) -> Dataset:
    """The samples, of which those of Vowpal Wabbit's format may have weights of any scale."""
    weighted = any(gather(comm, samples.weights is not None))
    return of_mean_one(samples, comm) if weighted else samples


def _class_weighted(training: Dataset, weights: Any, classes: tuple[float, ...], columns: int | None, comm: Any) -> Dataset:
    if weights is None:
        return training
    if isinstance(weights, str):
        return weighted_by_class(training, weights, comm)
    strange = next((label for label in weights if label not in classes), None)
    if strange is not None:
        most = 10  # that a line has room for
        listed = ", ".join(f"{label:g}" for label in classes[:-1][:most]) + (f" and {classes[-1]:g}" if len(classes) <= most else ", ...")
        raise click.UsageError(f"--class-weight names the label {strange:g}, and the labels are {listed}")
    codes = (-1.0, 1.0) if columns is None else tuple(map(float, range(columns)))
    chosen = {codes[classes.index(label)]: weight for label, weight in weights.items()}
    return of_mean_one(weighted_by_class(training, chosen, comm), comm)


def _initial_weights(path: Path | None, samples: _Samples, intercept: bool, comm: Any) -> np.ndarray | None:
    """The weights of a model file, read on rank 0, as those of a run on these samples; collective."""
    if path is None:
        return None

    def read() -> np.ndarray:
        found = load_model(path)
        fault = _unfit(found, samples, intercept)
        if fault is not None:
            raise ModelFileError(f"{path} is no model to start from: {fault}")
        weights, shifts = scores_for(samples.model, found)
        start = np.zeros((samples.training.features + intercept, *weights.shape[1:]), samples.training.values.dtype)
        start[: found.n_features] = weights
        start[samples.training.features :] = shifts
        return start

    start = agreed(comm, lambda: read() if comm.rank == 0 else None)
    return broadcast_arrays(comm, None if start is None else {"start": start})["start"]


def _unfit(found: FittedModel, samples: _Samples, intercept: bool) -> str | None:
    """Why a run on these samples cannot start from a model, None if it can."""
    features, model, scores = samples.training.features, samples.model, np.atleast_2d(found.weights).shape[0]
    two = model.columns == 2  # whose scores a file keeps as one
    if found.model != (Logistic.name if two else model.name) or scores != (1 if two else model.columns or 1):
        wanted = "one" if two or model.columns is None else f"{model.columns}, one a class"
        return f"it is of kind {found.model!r} with {scores} score{'s' * (scores > 1)}; --model is {model.name}, with {wanted}"
    if found.loss != model.variant:
        return f"its loss is {found.loss or 'the first'}, and that of --loss {model.loss_name}"
    if found.n_features > features:
        return f"it has {found.n_features} features, and the samples {features}: give --features {found.n_features}"
    if samples.classes is not None and found.classes.tolist() != list(samples.classes):
        theirs, ours = (" and ".join(map(str, classes)) for classes in (found.classes.tolist(), samples.classes))
        return f"its classes are {theirs}, and those of the samples {ours}"
    if np.any(found.intercept) and not intercept:
        return "it has an intercept: give --intercept too"
    return None


def _trainer(
    model: LinearModel, training: Dataset, chosen: dict[str, Any], start: np.ndarray | None, comm: Any, say: Callable[[str], None]
) -> Trainer:
    """The trainer, at its beginning or where a checkpoint has it go on; collective."""
    checkpoints = train_options.checkpoints(chosen)
    found, remarks = (None, []) if checkpoints is None else checkpoints.prepare(comm, chosen["resume"])
    for remark in remarks:
        say(remark)
    kind = STRATEGIES[chosen["strategy"]]
    workers = comm.size - chosen["servers"] if issubclass(kind, ParameterServer) and comm.size > 1 else comm.size
    batch = chosen["batch_size"] * workers
    if found is not None and found.progress["batch_size"] == chosen["batch_size"] and found.identity["batch of all ranks"] != batch:
        batch = found.identity["batch of all ranks"]
        say(f"a step takes {batch:,} samples, as before, now of {workers} rank{'s' if workers > 1 else ''}")
    share = chosen["validation"] or 0.0
    steps = -(-(training.total_samples - held_out(training.total_samples, share)) // batch)
    descent = replace(train_options.descent(chosen, steps), columns=model.columns)
    strategy = kind(training, comm, descent, **train_options.strategy_options(chosen))
    if start is not None:
        strategy.assign(start)
    unit = 1.0
    if descent.adaptive:
        unit = adaptive_rate_unit(sample_moments(training, comm), descent.intercept, model.in_units_of_labels)
    trainer = Trainer(
        model,
        strategy,
        train_options.schedule(chosen, steps, batch),
        Options(
            chosen["epochs"],
            chosen["batch_size"],
            chosen["seed"],
            batch,
            chosen["densities"],
            evaluate_every=chosen["evaluate_every"],
            validation=share,
        ),
        stopping=train_options.stopping(chosen),
        checkpoints=checkpoints,
        rate_unit=unit,
    )
    if found is not None:
        trainer.resume(found)
        say(f"resumed after step {trainer.step:,}, in epoch {len(trainer.history) + 1}")
    return trainer


@dataclass(frozen=True)
class _Run:
    """A model that was trained."""

    l2: float
    history: list[Epoch]
    fitted: FittedModel
    speed: float | None
    best_epoch: int | None  # after which this is the model, where samples were held out
    cost: float  # on these


def _run(samples: _Samples, chosen: dict[str, Any], start: np.ndarray | None, comm: Any, say: Callable[[str], None]) -> _Run:
    """Train, and print a line an epoch; collective."""
    trainer = _trainer(samples.model, samples.training, chosen, start, comm, say)
    shown, held = 0, chosen["validation"] is not None
    description = f"training, l2 {chosen['l2']:g}" if chosen["l2"] else "training"
    total = trainer.steps * trainer.options.epochs
    # The time left is by the mean of all steps so far, evaluations between them included.
    with _bar(comm, desc=description, unit="step", total=total, initial=trainer.step, smoothing=0) as bar, _stopping_on_signals(trainer):
        for epoch in trainer.run(samples.testing, bar.update):
            if shown == 0:
                say(header(held))
            shown += 1
            say(line(epoch, held))
    began = trainer.strategy.descent.average_from
    if began is not None and trainer.history and trainer.step <= began:
        say("training ended before the epoch that --average begins with: the model is the weights after the last step, no mean")
    if trainer.best is not None:
        say(f"the model is that after epoch {trainer.best.epoch}, which did best on the samples held out")
    nonzeros = samples.nonzeros * trainer.division.total / samples.training.total_samples
    return _Run(
        chosen["l2"],
        trainer.history,
        _fitted(trainer, samples.classes),
        _speed(trainer, nonzeros),
        None if trainer.best is None else trainer.best.epoch,
        math.inf if trainer.best is None else trainer.best.cost,
    )


@contextmanager
def _stopping_on_signals(trainer: Trainer) -> Iterator[None]:
    """Let SIGINT and SIGTERM stop the training after a step; the second such signal ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        trainer.request_stop(signal.Signals(number).name)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _bar(comm: Any, **options: Any) -> Any:
    return tqdm(disable=None if comm.rank == 0 else True, leave=False, dynamic_ncols=True, **options)


def _fitted(trainer: Trainer, classes: tuple[float, ...] | None) -> FittedModel:
    weights = trainer.weights.to_array()
    features = trainer.dataset.features
    intercept = weights[features:].sum(axis=0, dtype=np.float64)  # of one row, or of none
    model = fitted(trainer.model, weights[:features], intercept, np.array(classes or (), np.float64))
    return replace(model, zero_based=trainer.dataset.zero_based)


def _speed(trainer: Trainer, nonzeros: float) -> float | None:
    """Non-zeros a second and rank through gradient and update, median over the epochs."""
    seconds = [epoch.seconds["compute"] + epoch.seconds["update"] for epoch in trainer.history]
    return nonzeros / trainer.strategy.workers / float(np.median(seconds)) if seconds else None


def _peak_memory() -> int:
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
