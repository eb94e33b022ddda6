"""Measure parameter servers with four workers, one of them slow: throughput, staleness of the gradients, and accuracy.

Four workers and a server may be more than there are cores. So every worker pauses for --pace seconds in each batch, in place of the
computing that it would do on a core of its own; the slow one pauses for --slow. Throughput is a worker's samples a second, until it has
done its share of an epoch.

    python bench/parameter_server.py                         # data like the URL set of the thesis, generated
    python bench/parameter_server.py TRAIN.svm --test TEST.svm
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from demo import ROOT, data_set, mpiexec
from numpy.typing import NDArray

from sparseallreduce.linear import STRATEGIES, Constant, Dataset, Descent, Logistic, Options, Trainer, load, read_on_workers, two_classes
from sparseallreduce.runtime.communicators import world

Array = NDArray[Any]

WORKERS, SLOWED = 4, 3
ASYNCHRONOUS, SYNCHRONOUS = "ps-async", "ps-sync"


class Paced(Logistic):
    """Logistic regression that takes so many seconds longer for each batch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def derivative(self, scores: Array, labels: Array) -> Array:
        time.sleep(self.seconds)
        return super().derivative(scores, labels)


@click.command()
@click.argument("train", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--test", type=click.Path(exists=True, path_type=Path), help="Samples to measure the accuracy on.")
@click.option("--samples", type=click.IntRange(min=100), default=40_000, show_default=True, help="Of the generated training set.")
@click.option("--servers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--epochs", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--batch-size", type=click.IntRange(min=1), default=100, show_default=True, help="Samples a worker and step.")
@click.option("--learning-rate", type=float, default=2.0, show_default=True)
@click.option("--pace", type=float, default=0.005, show_default=True, help="Seconds that every worker pauses in a batch.")
@click.option("--slow", type=float, default=0.025, show_default=True, help="Seconds that the slowed worker pauses in a batch.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
@click.option("--as-rank", is_flag=True, hidden=True)
def bench(train: Path | None, test: Path | None, samples: int, json_path: Path | None, as_rank: bool, **chosen: Any) -> None:
    """Train with both kinds of server, with and without a slowed worker, and compare."""
    if train is None:
        train, test = data_set(samples)
    if as_rank:
        run_as_rank(train, test, json_path, **chosen)
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
        command = [mpiexec(), "-n", str(WORKERS + chosen["servers"]), sys.executable, __file__, str(train), "--as-rank", *options]
        command += ["--json", str(report)] + (["--test", str(test)] if test else [])
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        if subprocess.run(command, check=False, stdin=subprocess.DEVNULL, env=environment).returncode != 0:
            raise click.ClickException(f"the run failed: {' '.join(command)}")
        results = json.loads(report.read_text())
    servers = f"{chosen['servers']} server{'s' * (chosen['servers'] > 1)}"
    print_results(results, f"{train.name}: {WORKERS} workers, {servers}, one worker {chosen['slow'] / chosen['pace']:g} times the pause")
    if json_path is not None:
        json_path.write_text(json.dumps({"train": str(train), **chosen, "results": results}, indent=1))


def run_as_rank(train: Path, test: Path | None, report: Path | None, servers: int, pace: float, slow: float, **chosen: Any) -> None:
    """All runs, as one rank of them; rank 0 writes the results."""
    comm = world()
    sets = read_on_workers(comm, servers, lambda workers: load(train, test, comm=workers))
    training, classes = two_classes(sets[0], comm)
    testing = two_classes(sets[1], comm, classes)[0] if sets[1] else None
    results = []
    for name in (ASYNCHRONOUS, SYNCHRONOUS):
        for slowed in (False, True):
            seconds = slow if slowed and comm.rank == SLOWED else pace
            results.append({"strategy": name, "slowed": slowed} | trained(name, training, testing, comm, servers, seconds, **chosen))
    if comm.rank == 0 and report is not None:
        report.write_text(json.dumps(results))


def trained(
    name: str,
    training: Dataset,
    testing: Dataset | None,
    comm: Any,
    servers: int,
    pause: float,
    epochs: int,
    batch_size: int,
    learning_rate: float,
) -> dict[str, Any]:
    """What a run came to: accuracy and loss at its end, and the medians over its epochs of each worker's figures."""
    strategy = STRATEGIES[name](training, comm, Descent(), servers=servers)  # type: ignore[call-arg]
    trainer = Trainer(Paced(pause), strategy, Constant(learning_rate), Options(epochs, batch_size))
    records = list(trainer.run(testing))
    workers = [[record.measures["workers"][rank] for record in records] for rank in range(WORKERS)]
    return {
        "loss": records[-1].loss,
        "train_accuracy": records[-1].train_accuracy,
        "test_accuracy": records[-1].test_accuracy,
        "epoch_seconds": float(np.median([max(worker[epoch]["seconds"] for worker in workers) for epoch in range(epochs)])),
        "samples_per_second": [float(np.median([one["samples_per_second"] for one in worker])) for worker in workers],
        "staleness": [staleness_of(worker) for worker in workers],
    }


def staleness_of(records: list[dict[str, Any]]) -> dict[str, float]:
    """Mean over all gradients, median of the medians, and the greatest."""
    counts = np.array([sum(record["staleness"]["histogram"].values()) for record in records])
    means = np.array([record["staleness"]["mean"] for record in records])
    return {
        "mean": float((means * counts).sum() / counts.sum()),
        "median": float(np.median([record["staleness"]["median"] for record in records])),
        "max": max(record["staleness"]["max"] for record in records),
    }


def print_results(results: list[dict[str, Any]], title: str) -> None:
    """Throughputs of the workers that are never slowed, relative to the run in which none is; staleness; accuracy."""
    print(f"\n{title}")
    print(f"{'':21}{'samples a second of':31}{'':5}{'staleness (mean, most) of':34}{'accuracy'}")
    print(f"{'':21}{'others':>8}{'relative':>10}{'slowed':>8}{'epoch s':>10}{'others':>15}{'slowed':>15}{'train':>9}{'test':>8}")
    for result in results:
        others, slow = result["samples_per_second"][:SLOWED], result["samples_per_second"][SLOWED]
        even = next(each for each in results if each["strategy"] == result["strategy"] and not each["slowed"])
        relative = np.mean(others) / np.mean(even["samples_per_second"][:SLOWED])
        label = f"{result['strategy']}, {'one slowed' if result['slowed'] else 'all even'}"
        stale = "".join(f"{shown(part):>15}" for part in (result["staleness"][:SLOWED], result["staleness"][SLOWED:]))
        print(f"{label:21}{np.mean(others):8,.0f}{relative:10.2f}{slow:8,.0f}{result['epoch_seconds']:10.2f}{stale}", end="")
        print(f"{result['train_accuracy']:9.4f}{result['test_accuracy'] or float('nan'):8.4f}")


def shown(staleness: list[dict[str, float]]) -> str:
    """Mean and greatest staleness over some workers."""
    return f"{np.mean([each['mean'] for each in staleness]):.2f}, {max(each['max'] for each in staleness)}"


if __name__ == "__main__":
    bench()
