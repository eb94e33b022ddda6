"""`sparseallreduce train`: a linear model on svmlight data, by the ranks of mpiexec or alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
from tqdm import tqdm

from sparseallreduce.algorithms import algorithms
from sparseallreduce.cli.report import OUTPUT_FILE, check_output, environment, write_report
from sparseallreduce.linear.datasets import Dataset, agreed, gather, load, two_classes
from sparseallreduce.linear.modelfile import FittedModel, save_model
from sparseallreduce.linear.models import MODELS
from sparseallreduce.linear.schedules import SCHEDULES
from sparseallreduce.linear.strategies import STRATEGIES, ParameterServer, SparseStrategy, Strategy, read_on_workers
from sparseallreduce.linear.trainer import Epoch, Options, Trainer
from sparseallreduce.linear.weights import Descent
from sparseallreduce.runtime.mpi import world

_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--test", type=click.Path(path_type=Path), help="Samples to measure the accuracy on after each epoch.")
@click.option("--model", type=click.Choice(list(MODELS)), default="logistic", show_default=True)
@click.option("--epochs", type=click.IntRange(min=0), default=10, show_default=True, help="Passes over DATA.")
@click.option("--batch-size", type=click.IntRange(min=1), default=100, show_default=True, help="Samples a rank and step.")
@click.option("--learning-rate", type=_POSITIVE, default=0.5, show_default=True, help="Of the mean gradient of all ranks' samples.")
@click.option("--schedule", type=click.Choice(list(SCHEDULES)), default="constant", show_default=True, help="Of the learning rate.")
@click.option("--l2", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Factor of the penalty L2 / 2 * |w|^2.")
@click.option("--strategy", type=click.Choice(list(STRATEGIES)), default="sparse", show_default=True, help="How gradients are summed.")
@click.option("--algorithm", type=click.Choice(algorithms()), default="auto", show_default=True, help="Of the sparse strategy.")
@click.option("--servers", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks that are parameter servers.")
@click.option("--features", type=click.IntRange(min=1), help="Dimension N; by default the highest index in the data.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the order of samples.")
@click.option("--json", "json_path", type=OUTPUT_FILE, help="Where to write the results.")
@click.option("--model-out", type=OUTPUT_FILE, help="Where to write the weights (.npz).")
def train(data: Path, test: Path | None, json_path: Path | None, model_out: Path | None, **chosen: Any) -> None:
    """Train a linear model on DATA: svmlight text, plain or .gz, .bz2, .xz.

    Under mpiexec the ranks share the samples of DATA; a step averages the gradients of --batch-size samples of every rank.
    """
    strategy_class = STRATEGIES[chosen["strategy"]]
    if chosen["algorithm"] != "auto" and not issubclass(strategy_class, SparseStrategy):
        raise click.UsageError("--algorithm is of the strategies sparse and overlapped: leave it out, or take one of them")
    if chosen["servers"] != 1 and not issubclass(strategy_class, ParameterServer):
        raise click.UsageError("--servers is of the strategies ps-sync and ps-async: leave it out, or take one of them")
    if chosen["learning_rate"] * chosen["l2"] >= 1:
        raise click.UsageError("the product of --learning-rate and --l2 must be below 1: lower one of them")
    comm = world()
    shown = comm.rank == 0
    say: Callable[[str], None] = tqdm.write if shown else lambda line: None
    agreed(comm, lambda: check_output(json_path, model_out) if shown else None)
    model = MODELS[chosen["model"]]()

    start = time.perf_counter()
    with _bar(shown, desc="reading", unit="B", unit_scale=True) as bar:

        def read(workers: Any) -> tuple[Dataset, Dataset | None]:
            return load(data, test, comm=workers, n_features=chosen["features"], progress=bar.update)

        serving = issubclass(strategy_class, ParameterServer)
        training, testing = read_on_workers(comm, chosen["servers"], read) if serving else read(comm)
    classes: tuple[float, float] | None = None
    if model.classifies:
        training, classes = two_classes(training, comm)
        testing = None if testing is None else two_classes(testing, comm, classes)[0]
    nonzeros = sum(gather(comm, training.nnz))
    read_seconds = time.perf_counter() - start
    say(
        f"{data}: {training.total:,} samples, {training.features:,} features, {nonzeros / training.total:.1f} non-zeros a sample; "
        f"read by {comm.size} rank{'s' if comm.size > 1 else ''} in {read_seconds:.1f} s"
    )

    options = Options(chosen["epochs"], chosen["batch_size"], chosen["seed"])
    trainer = Trainer(model, _strategy(chosen, training, comm), SCHEDULES[chosen["schedule"]](chosen["learning_rate"]), options)
    epochs: list[Epoch] = []
    with _bar(shown, desc="training", unit="step", total=trainer.steps * options.epochs) as bar:
        for epoch in trainer.run(testing, bar.update):
            if not epochs:
                say(_HEADER)
            epochs.append(epoch)
            say(_line(epoch))

    results = {
        "samples": training.total,
        "test_samples": None if testing is None else testing.total,
        "features": training.features,
        "nonzeros": nonzeros,
        "seconds": {"read": read_seconds, "train": sum(epoch.seconds["total"] for epoch in epochs)},
    }
    machine = environment(comm)

    def write() -> None:
        if model_out is not None:
            weights = trainer.weights
            fitted = FittedModel(model.name, weights.to_array()[: training.features], weights.intercept, np.array(classes or ()))
            save_model(model_out, fitted)
        if json_path is not None:
            records = [_record(epoch, testing is not None) for epoch in epochs]
            write_report(json_path, "train", click.get_current_context().params, machine, results, epochs=records)

    agreed(comm, write if shown else lambda: None)


def _strategy(chosen: dict[str, Any], training: Dataset, comm: Any) -> Strategy:
    kind, descent = STRATEGIES[chosen["strategy"]], Descent(chosen["l2"])
    if issubclass(kind, SparseStrategy):
        return kind(training, comm, descent, algorithm=chosen["algorithm"])
    if issubclass(kind, ParameterServer):
        return kind(training, comm, descent, servers=chosen["servers"])
    return kind(training, comm, descent)


def _bar(shown: bool, **options: Any) -> Any:
    return tqdm(disable=None if shown else True, leave=False, dynamic_ncols=True, **options)


_HEADER = (
    f"{'epoch':>5} {'loss':>10} {'train acc':>9} {'test acc':>9}   {'compute':>8} {'communicate':>11} {'update':>8} "
    f"{'evaluate':>8} {'total s':>8}   {'sent MB':>9} {'gradient':>9} {'sum':>9}"
)


def _line(epoch: Epoch) -> str:
    train_accuracy, test_accuracy = (
        "-" if share is None else f"{share:.4f}" for share in (epoch.train_accuracy, epoch.test_accuracy)
    )
    seconds = epoch.seconds
    return (
        f"{epoch.epoch:5} {epoch.loss:10.6g} {train_accuracy:>9} {test_accuracy:>9}   {seconds['compute']:8.3f} "
        f"{seconds['communicate']:11.3f} {seconds['update']:8.3f} {seconds['evaluate']:8.3f} {seconds['total']:8.3f}   "
        f"{epoch.bytes_sent / 1e6:9.2f} {epoch.gradient_density:9.3%} {epoch.total_density:9.3%}"
    )


def _record(epoch: Epoch, tested: bool) -> dict[str, Any]:
    record = asdict(epoch)
    if not tested:
        del record["test_accuracy"]
    return record
