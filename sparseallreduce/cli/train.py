"""`sparseallreduce train`: a linear model on many samples of many features, by the ranks of mpiexec or alone."""

from __future__ import annotations

import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.labels import of_mean_one, two_classes, weighted_by_class
from sparseallreduce.linear.data.load import load
from sparseallreduce.linear.model_file import FittedModel, save_model
from sparseallreduce.linear.models import MODELS, LinearModel
from sparseallreduce.linear.strategies import LOSSY, STRATEGIES, ParameterServer, read_on_workers
from sparseallreduce.linear.strategies.lossy import DENSITY
from sparseallreduce.linear.training.early_stopping import WATCHED
from sparseallreduce.linear.training.schedules import SCHEDULES
from sparseallreduce.linear.training.trainer import Epoch, Options, Trainer
from sparseallreduce.runtime.communicators import world
from sparseallreduce.runtime.objects import agreed, gather

_ABOVE_ZERO = click.FloatRange(min=0, min_open=True)
_COUNT = click.IntRange(min=1)
_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.argument("data", type=INPUT_FILE)
@click.option("--test", type=INPUT_FILE, help="Samples to measure the model on after each epoch.")
@click.option("--model", type=click.Choice(list(MODELS)), default="logistic", show_default=True)
@click.option("--intercept", is_flag=True, help="Add a number to every score; it is not penalised.")
@click.option("--class-weight", type=train_options.ClassWeights(), help="Weight of each class: 'balanced', or LABEL=WEIGHT,LABEL=WEIGHT.")
@click.option("--epochs", type=click.IntRange(min=0), default=10, show_default=True, help="Passes over DATA.")
@click.option("--batch-size", type=_COUNT, default=100, show_default=True, help="Samples that a rank takes in a step.")
@click.option(
    "--learning-rate",
    type=click.FloatRange(min=0),
    default=0.5,
    show_default=True,
    help="Factor of the mean gradient over the samples of all ranks; 0 for a dry run.",
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
@click.option("--l2", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Factor of the penalty L2 / 2 * |w|^2.")
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
@click.option("--early-stopping", type=click.Choice(list(WATCHED)), help="Stop when this figure gets no better.")
@click.option("--patience", type=_COUNT, help="Early stopping: epochs without progress before the end [5].")
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
def train(data: Path, test: Path | None, json_path: Path | None, model_out: Path | None, **chosen: Any) -> None:
    """Train a linear model on DATA.

    DATA is svmlight text, plain or compressed (.gz, .bz2, .xz), or the binary format of `convert`; or by its name Vowpal Wabbit's text
    (.vw), compressed rows of SciPy (.npz), Parquet (.parquet), or labels with plain text behind a tab (.tsv); or `-`, text on standard
    input. Under mpiexec the ranks share its
    samples. A step averages the gradients of --batch-size samples of every rank.

    On SIGINT or SIGTERM, at any rank, all ranks write a checkpoint, if --checkpoint is given, and end with status 1.
    """
    train_options.check(chosen, test is not None)
    if both_standard_input(data, test):
        raise click.UsageError("standard input, -, can be read once: give DATA or --test another file")
    comm = world()
    say: Callable[[str], None] = tqdm.write if comm.rank == 0 else lambda line: None
    agreed(comm, lambda: check_output(json_path, model_out) if comm.rank == 0 else None)
    model = MODELS[chosen["model"]]()
    samples = _read(data, test, model, chosen, comm)
    say(samples.described(data, comm))
    trainer = _trainer(model, samples.training, chosen, comm, say)
    _run(trainer, samples.testing, comm, say)

    results = {
        "samples": samples.training.total_samples,
        "test_samples": None if samples.testing is None else samples.testing.total_samples,
        "features": samples.training.features,
        "nonzeros": samples.nonzeros,
        "nonzeros_per_second": _speed(trainer, samples.nonzeros),
        "peak_memory": gather(comm, _peak_memory()),
        "seconds": {"read": samples.seconds, "train": sum(epoch.seconds["total"] for epoch in trainer.history)},
    }
    machine = environment(comm)

    def write() -> None:
        if model_out is not None:
            save_model(model_out, _fitted(trainer, samples.classes))
        if json_path is not None:
            records = [_record(epoch, samples.testing is not None, chosen["densities"]) for epoch in trainer.history]
            write_report(json_path, "train", click.get_current_context().params, machine, results, epochs=records)

    agreed(comm, write if comm.rank == 0 else lambda: None)


@dataclass(frozen=True)
class _Samples:
    """What has been read."""

    training: Dataset
    testing: Dataset | None
    classes: tuple[float, float] | None
    nonzeros: int  # of the training set, on all ranks
    seconds: float

    def described(self, path: Path, comm: Any) -> str:
        training = self.training
        return (
            f"{path}: {training.total_samples:,} samples, {training.features:,} features, "
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
        training, classes = two_classes(training, comm)
        testing = None if testing is None else two_classes(testing, comm, classes)[0]
        training = _class_weighted(training, chosen["class_weight"], classes, comm)
    training, testing = _importances_of_mean_one(training, comm), testing and _importances_of_mean_one(testing, comm)
    return _Samples(training, testing, classes, sum(gather(comm, training.nnz)), time.perf_counter() - start)


def _importances_of_mean_one(samples: Dataset, comm: Any) -> Dataset:
    """The samples, of which those of Vowpal Wabbit's format may have weights of any scale."""
    weighted = any(gather(comm, samples.weights is not None))
    return of_mean_one(samples, comm) if weighted else samples


def _class_weighted(training: Dataset, weights: Any, classes: tuple[float, float], comm: Any) -> Dataset:
    if weights is None:
        return training
    if isinstance(weights, str):
        return weighted_by_class(training, weights, comm)
    strange = next((label for label in weights if label not in classes), None)
    if strange is not None:
        raise click.UsageError(f"--class-weight names the label {strange:g}, and the labels are {classes[0]:g} and {classes[1]:g}")
    chosen = {1.0 if label == classes[1] else -1.0: weight for label, weight in weights.items()}
    return of_mean_one(weighted_by_class(training, chosen, comm), comm)


def _trainer(model: LinearModel, training: Dataset, chosen: dict[str, Any], comm: Any, say: Callable[[str], None]) -> Trainer:
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
    steps = -(-training.total_samples // batch)
    strategy = kind(training, comm, train_options.descent(chosen, steps), **train_options.strategy_options(chosen))
    trainer = Trainer(
        model,
        strategy,
        train_options.schedule(chosen, steps, batch),
        Options(chosen["epochs"], chosen["batch_size"], chosen["seed"], batch, chosen["densities"]),
        stopping=train_options.stopping(chosen),
        checkpoints=checkpoints,
    )
    if found is not None:
        trainer.resume(found)
        say(f"resumed after step {trainer.step:,}, in epoch {len(trainer.history) + 1}")
    return trainer


def _run(trainer: Trainer, testing: Dataset | None, comm: Any, say: Callable[[str], None]) -> None:
    """Train, and print a line an epoch."""
    shown = 0
    total = trainer.steps * trainer.options.epochs
    with _bar(comm, desc="training", unit="step", total=total, initial=trainer.step) as bar, _stopping_on_signals(trainer):
        for epoch in trainer.run(testing, bar.update):
            if shown == 0:
                say(_HEADER)
            shown += 1
            say(_line(epoch))


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


def _fitted(trainer: Trainer, classes: tuple[float, float] | None) -> FittedModel:
    weights = trainer.weights.to_array()
    features = trainer.dataset.features
    intercept = float(weights[features]) if trainer.strategy.descent.intercept else 0.0
    labels = np.array(classes or (), np.float64)
    return FittedModel(trainer.model.name, weights[:features], intercept, labels, zero_based=trainer.dataset.zero_based)


def _speed(trainer: Trainer, nonzeros: int) -> float | None:
    """Non-zeros a second and rank through gradient and update, median over the epochs."""
    seconds = [epoch.seconds["compute"] + epoch.seconds["update"] for epoch in trainer.history]
    return nonzeros / trainer.strategy.workers / float(np.median(seconds)) if seconds else None


def _peak_memory() -> int:
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


_HEADER = (
    f"{'epoch':>5} {'loss':>10} {'train acc':>9} {'auc':>7} {'test acc':>9} {'auc':>7}   {'compute':>8} {'select':>8} "
    f"{'communicate':>11} {'wait':>8} {'update':>8} {'evaluate':>8} {'total s':>8}   {'sent MB':>9} {'gradient':>9} {'sum':>9}"
)


def _line(epoch: Epoch) -> str:
    figures = epoch.train_accuracy, epoch.train_auc, epoch.test_accuracy, epoch.test_auc
    train_accuracy, train_auc, test_accuracy, test_auc = ("-" if share is None else f"{share:.4f}" for share in figures)
    seconds = epoch.seconds
    return (
        f"{epoch.epoch:5} {epoch.loss:10.6g} {train_accuracy:>9} {train_auc:>7} {test_accuracy:>9} {test_auc:>7}   "
        f"{seconds['compute']:8.3f} {seconds['select']:8.3f} {seconds['communicate']:11.3f} {seconds['wait']:8.3f} "
        f"{seconds['update']:8.3f} {seconds['evaluate']:8.3f} {seconds['total']:8.3f}   "
        f"{epoch.bytes_sent / 1e6:9.2f} {epoch.gradient_density:9.3%} {epoch.total_density:9.3%}"
    )


def _record(epoch: Epoch, tested: bool, densities: bool) -> dict[str, Any]:
    record = asdict(epoch)
    if not tested:
        del record["test_loss"], record["test_accuracy"], record["test_auc"]
    if not densities:
        del record["gradient_densities"], record["total_densities"]
    measures: dict[str, Any] = record.pop("measures")
    return record | measures
