"""Measure seconds and bytes until the objective is near its least: ours, by steps and in rounds, beside LIBLINEAR, in one run.

    pip install liblinear-official
    python bench/suboptimality.py TRAIN.svm --features 3231961 [--losses log,hinge,squared_hinge] [--ranks 1,2,4] [--c 1] [--json F]

The objective is LIBLINEAR's without intercept, as ``l2 / 2 * |w|^2 + mean loss`` with ``l2 = 1 / (M c)``. Its least value is the dual
objective of CoCoA+ at a gap of 1e-7, which is below it by no more. A relative suboptimality of 1e-2 is an objective above that by a
hundredth. Newton's method is left out for the hinge, which has no second derivative.

Ours are trainings by the command `train`: seconds of its epochs or rounds without evaluation, and bytes that all ranks send, until the
objective after one is first as low. LIBLINEAR has no such curve: it is run with one tolerance after the other, and printed is the
shortest run that ends as low, without what makes its structures of a matrix. All samples are in memory before a clock starts. Medians
over the rounds, in each of which every contestant has its turn. More ranks than cores is no measurement of speed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from demo import ROOT, mpiexec
from mpi4py import MPI
from scipy.sparse import csr_matrix

from sparseallreduce.linear import Dataset, Hinge, LinearModel, Logistic, SquaredHinge, load, two_classes
from sparseallreduce.linear.solvers import CoCoA

MODELS: dict[str, LinearModel] = {"log": Logistic(), "hinge": Hinge(), "squared_hinge": SquaredHinge()}
OPTIONS = {"log": "--model logistic", "hinge": "--model svm", "squared_hinge": "--model svm --loss squared_hinge"}
SOLVERS = {"log": 7, "hinge": 3, "squared_hinge": 1}
SHARES = (1e-2, 1e-4, 1e-6)
TOLERANCES = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4, 1e-4)
WAYS = {
    "dual": "--solver cocoa --gap 5e-7 --epochs {rounds}",
    "newton": "--solver newton --no-intercept --gap 5e-7 --epochs {rounds}",
    "ftrl": "--update ftrl --epochs {epochs}",
}


class Point(NamedTuple):
    """How far a contestant has come."""

    objective: float
    seconds: float
    sent: float  # bytes


@click.command()
@click.argument("train", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--features", type=click.IntRange(1), help="Dimension N; by default the highest index.")
@click.option("--losses", default=",".join(MODELS), show_default=True)
@click.option("--ranks", default="1,2,4", show_default=True, help="Of ours.")
@click.option("--ways", default="dual,newton", show_default=True, help=f"Of ours: {', '.join(WAYS)}.")
@click.option("--c", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True, help="LIBLINEAR's C.")
@click.option("--epochs", type=click.IntRange(1), default=20, show_default=True, help="Passes by steps, at most.")
@click.option("--rounds", type=click.IntRange(1), default=1000, show_default=True, help="Rounds of cocoa, at most.")
@click.option("--turns", type=click.IntRange(1), default=5, show_default=True, help="Of every contestant.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
def suboptimality(
    train: Path,
    features: int | None,
    losses: str,
    ranks: str,
    ways: str,
    c: float,
    epochs: int,
    rounds: int,
    turns: int,
    json_path: Path | None,
) -> None:
    """Print seconds and bytes to relative suboptimalities of 1e-2, 1e-4 and 1e-6."""
    dataset, _ = two_classes(load(train, comm=MPI.COMM_SELF, n_features=features)[0], MPI.COMM_SELF)
    l2 = 1 / (dataset.total_samples * c)
    results = {}
    for loss in losses.split(","):
        least = least_objective(dataset, MODELS[loss], l2)
        print(f"{train.name}, {loss}, C = {c:g}: least objective {least:.8g}")
        print(f"{'':24}" + "".join(f"{f'to {share:g}':>12}{'':12}" for share in SHARES))
        curves: dict[str, list[list[Point]]] = defaultdict(list)
        for _ in range(turns):
            curves["LIBLINEAR"].append(list(by_liblinear(dataset, loss, c, least)))
            for way in ways.split(","):
                if (way, loss) == ("newton", "hinge"):
                    continue
                for number in map(int, ranks.split(",")):
                    options = f"{OPTIONS[loss]} {WAYS[way].format(epochs=epochs, rounds=rounds)}".split()
                    curves[f"{way}, P={number}"].append(list(by_train(train, number, features, l2, options)))
        results[loss] = {"least": least, "reached": {name: reached(runs, least) for name, runs in curves.items()}}
        for name, found in results[loss]["reached"].items():
            print(f"{name:24}" + "".join(map(shown, found)), flush=True)
    if json_path is not None:
        json_path.write_text(json.dumps({"train": train.name, "c": c, "shares": SHARES, "losses": results}, indent=1) + "\n")


def least_objective(dataset: Dataset, model: LinearModel, l2: float) -> float:
    solver = CoCoA(dataset, model, l2=l2, comm=MPI.COMM_SELF, tolerance=1e-7, rounds=10_000, intercept=False)
    solver.fit()
    if not solver.converged:
        raise click.ClickException("the least objective has not been found in 10,000 rounds")
    return solver.history[-1].dual


def reached(runs: Sequence[Sequence[Point]], least: float) -> list[tuple[float, float] | None]:
    """For each share, the median of the seconds and that of the megabytes of all runs; None if one of them has not come there."""
    found: list[tuple[float, float] | None] = []
    for share in SHARES:
        firsts = [first(points, least * (1 + share)) for points in runs]
        known = [point for point in firsts if point is not None]
        if len(known) < len(firsts):
            found.append(None)
            continue
        found.append((statistics.median(point.seconds for point in known), statistics.median(point.sent for point in known) / 1e6))
    return found


def first(points: Sequence[Point], objective: float) -> Point | None:
    """That of the fewest seconds with such an objective."""
    return min((point for point in points if point.objective <= objective), key=lambda point: point.seconds, default=None)


def shown(found: tuple[float, float] | None) -> str:
    return f"{'not':>12}{'':12}" if found is None else f"{found[0]:10.3f} s{found[1]:9.2f} MB"


def by_train(train: Path, ranks: int, features: int | None, l2: float, options: Sequence[str]) -> Iterator[Point]:
    """The epochs or rounds of a training."""
    command = [mpiexec(), "-n", str(ranks)] if ranks > 1 else []
    command += [sys.executable, "-m", "sparseallreduce", "train", str(train), "--l2", repr(l2), *options]
    command += [] if features is None else ["--features", str(features)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command += ["--json", str(report)]
        run_to_end(command)
        epochs = json.loads(report.read_text())["epochs"]
    seconds, sent = 0.0, 0
    for epoch in epochs:
        seconds += epoch["seconds"]["total"] - epoch["seconds"]["evaluate"]
        sent += epoch["bytes_sent"]
        yield Point(math.inf if epoch["loss"] is None else epoch["loss"], seconds, sent)


def run_to_end(command: list[str]) -> None:
    """Run a command, whose processes end with this one if SIGTERM ends it."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **pipes) as running:
        try:
            _, said = running.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGTERM)
            raise
    if running.returncode != 0:
        raise click.ClickException(f"{' '.join(command)}: {said.strip().splitlines()[-1]}")


def by_liblinear(dataset: Dataset, loss: str, c: float, least: float) -> Iterator[Point]:
    """A training for each tolerance until the objective is nearest to the least, by the library's C++ alone."""
    from liblinear import liblinear

    structure = dataset.indices.astype(np.int32), dataset.indptr
    rows = csr_matrix((dataset.values.astype(np.float64), *structure), shape=(dataset.rows, dataset.features))
    problem, model = liblinear.problem(dataset.labels, rows, bias=-1), MODELS[loss]
    for tolerance in TOLERANCES:
        parameter = liblinear.parameter(f"-s {SOLVERS[loss]} -c {c!r} -e {tolerance:g} -q")
        liblinear.liblinear.set_print_string_function(parameter.print_func)
        begin = time.perf_counter()
        found = liblinear.liblinear.train(problem, parameter)
        seconds = time.perf_counter() - begin
        kept = liblinear.toPyModel(found)
        weights = np.ctypeslib.as_array(kept.w, (kept.nr_feature,)).copy() * (1.0 if kept.label[0] == 1 else -1.0)
        losses = model.loss(rows[:, : kept.nr_feature] @ weights, dataset.labels)
        objective = float(weights @ weights) / (2 * c * dataset.rows) + float(losses.mean())
        yield Point(objective, seconds, 0)
        if objective <= least * (1 + SHARES[-1]):
            return


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no training is left running
    suboptimality()
