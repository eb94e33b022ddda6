"""Measure how long a linear classifier takes to reach an accuracy: ours, scikit-learn's, LIBLINEAR and Vowpal Wabbit, in one run.

    pip install liblinear-official vowpalwabbit          (a contestant whose package is missing is left out, which is said)
    python bench/time_to_accuracy.py TRAIN.svm TEST.svm --features 3231961 --model svm [--ranks 1,2,4] [--json F] [--plot F.png]
    python bench/time_to_accuracy.py TRAIN.svm TEST.svm --folds 5 --margin 0.01          where a test set is small

All samples are in memory before a clock starts, and no clock runs while a model is tested; Vowpal Wabbit alone reads its own text file, so
its time includes parsing. A round is a training of every contestant in turn, with another seed where it has one. With ``--folds`` training
and test set are put together and cut anew, a round a fold. Each contestant gives a curve: seconds and test accuracy after every pass, of
which the medians and means over the rounds are taken. The aim is the best accuracy of any point of any curve less ``--margin``; printed is
when each curve first is there, and what it comes to in the end.

Ours are trainings by the command `train`, with its default settings but for what a row's name says: seconds of its epochs without
evaluation. Others are at their default settings too, LIBLINEAR with C by ``--c``; its curve has a point for each of several tolerances.
More ranks than cores is no measurement of speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
from demo import ROOT, mpiexec
from mpi4py import MPI
from numpy.typing import NDArray
from scipy.sparse import csr_array, csr_matrix, vstack
from sklearn.datasets import dump_svmlight_file
from sklearn.linear_model import SGDClassifier

from sparseallreduce.linear import Dataset, load, two_classes

Array = NDArray[Any]

PASSES = (1, 2, 3, 5, 10)
TOLERANCES = (1.0, 0.3, 0.1, 0.03, 0.01)  # LIBLINEAR's -e, whose default for dual solvers is 0.1
SKLEARN_LOSSES = {"logistic": "log_loss", "svm": "hinge"}
VW_LOSSES = {"logistic": "logistic", "svm": "hinge"}
LIBLINEAR_SOLVERS = {"logistic": {"dual": 7}, "svm": {"hinge": 3, "squared hinge": 1}}


@dataclass(frozen=True)
class Samples:
    """A matrix of samples, their labels of -1 and 1, and the files with the same."""

    rows: csr_array
    labels: Array
    svmlight: Path
    vw: Path

    def accuracy(self, weights: Array, intercept: float = 0.0) -> float:
        return self.share_right(self.rows @ weights + intercept)

    def share_right(self, scores: Array) -> float:
        return float(np.mean((scores > 0) == (self.labels > 0)))


@dataclass
class Curve:
    """Of one contestant: for each round, the seconds and the accuracy at every point."""

    seconds: list[list[float]] = field(default_factory=list)
    accuracy: list[list[float]] = field(default_factory=list)

    def add(self, points: Iterator[tuple[float, float]]) -> None:
        seconds, accuracy = zip(*points, strict=True)
        self.seconds.append(list(seconds))
        self.accuracy.append(list(accuracy))

    def points(self) -> list[tuple[float, float]]:
        """Median seconds and mean accuracy of the points that all rounds have."""
        length = min(len(each) for each in self.seconds)
        seconds = np.median([each[:length] for each in self.seconds], axis=0)
        accuracy = np.mean([each[:length] for each in self.accuracy], axis=0)
        return [(float(at), float(share)) for at, share in zip(seconds, accuracy, strict=True)]

    def reaches(self, accuracy: float) -> float | None:
        """Seconds until the mean accuracy is first as high."""
        return min((seconds for seconds, share in self.points() if share >= accuracy), default=None)


Contestant = Callable[[Samples, Samples, int], Iterator[tuple[float, float]]]


@click.command()
@click.argument("train", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("test", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", type=click.Choice(list(SKLEARN_LOSSES)), default="logistic", show_default=True)
@click.option("--features", type=click.IntRange(1), help="Dimension N; by default the highest index in the training set.")
@click.option("--ranks", default="1,2,4", show_default=True, help="Of ours.")
@click.option("--ours", multiple=True, default=("", "--solver cocoa"), show_default=True, help="Options of `train`; a row for each.")
@click.option("--c", type=click.FloatRange(0, min_open=True), multiple=True, default=(1.0,), show_default=True, help="LIBLINEAR's C.")
@click.option("--folds", type=click.IntRange(2), help="Cut training and test set anew into so many parts, each the test set once.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Without --folds.")
@click.option("--margin", type=click.FloatRange(0), default=0.001, show_default=True, help="What the aim is below the best accuracy.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
@click.option("--plot", "picture", type=click.Path(dir_okay=False, path_type=Path), help="Where to draw the curves.")
def time_to_accuracy(
    train: Path,
    test: Path,
    model: str,
    features: int | None,
    ranks: str,
    ours: Sequence[str],
    c: Sequence[float],
    folds: int | None,
    rounds: int,
    margin: float,
    json_path: Path | None,
    picture: Path | None,
) -> None:
    """Print the seconds of every contestant to the best accuracy of all less a margin."""
    warnings.simplefilter("ignore")
    numbers = [int(number) for number in ranks.split(",")]
    curves: dict[str, Curve] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (training, testing) in enumerate(splits(train, test, features, folds, rounds, Path(folder))):
            for name, contestant in contestants(model, numbers, ours, c).items():
                curves.setdefault(name, Curve()).add(contestant(training, testing, number))
                click.echo(f"round {number}: {name}: " + ", ".join(f"{s:.3f} s {a:.4f}" for s, a in last(curves[name])), err=True)
    results = {name: curve.points() for name, curve in curves.items()}
    aim = max(share for points in results.values() for _, share in points) - margin
    print(f"{train.name}, {model}: seconds to {aim:.4f}, and the best that a contestant comes to; {folds or rounds} rounds")
    for name, curve in curves.items():
        reached = curve.reaches(aim)
        best = max(curve.points(), key=lambda point: point[1])
        print(f"{name:40} {'not' if reached is None else f'{reached:.3f}':>8}    {best[1]:.4f} at {best[0]:.3f} s")
    if json_path is not None:
        times = {name: curve.reaches(aim) for name, curve in curves.items()}
        json_path.write_text(json.dumps({"model": model, "aim": aim, "seconds": times, "curves": results}, indent=1) + "\n")
    if picture is not None:
        draw(results, aim, f"{train.name}, {model}", picture)


def last(curve: Curve) -> list[tuple[float, float]]:
    return list(zip(curve.seconds[-1], curve.accuracy[-1], strict=True))


def splits(
    train: Path, test: Path, features: int | None, folds: int | None, rounds: int, folder: Path
) -> Iterator[tuple[Samples, Samples]]:
    """Training and test samples of every round, with files of their own."""
    alone = MPI.COMM_SELF
    read, tested = load(train, test, comm=alone, n_features=features)
    training, classes = two_classes(read, alone)
    testing, _ = two_classes(tested, alone, classes)
    matrices = [matrix_of(each) for each in (training, testing)]
    if folds is None:
        first = written(matrices[0], training.labels, folder, "train")
        second = written(matrices[1], testing.labels, folder, "test")
        for _ in range(rounds):
            yield first, second
        return
    rows, labels = csr_array(vstack(matrices)), np.concatenate([training.labels, testing.labels])
    part = np.random.default_rng(0).permutation(len(labels)) % folds
    for fold in range(folds):
        yield (
            written(csr_array(rows[part != fold]), labels[part != fold], folder, "train"),
            written(csr_array(rows[part == fold]), labels[part == fold], folder, "test"),
        )


def matrix_of(dataset: Dataset) -> csr_array:
    structure = dataset.indices.astype(np.int32), dataset.indptr.astype(np.int32)
    return csr_array((dataset.values, *structure), shape=(dataset.rows, dataset.features))


def written(rows: csr_array, labels: Array, folder: Path, name: str) -> Samples:
    """The samples, in files too."""
    svmlight, vw = folder / f"{name}.svm", folder / f"{name}.vw"
    dump_svmlight_file(rows, labels, str(svmlight), zero_based=False)
    with vw.open("w") as out, svmlight.open() as lines:
        for line in lines:
            label, _, entries = line.partition(" ")
            out.write(f"{float(label):g} | {entries}")
    vw.with_suffix(".vw.cache").unlink(missing_ok=True)
    return Samples(rows, labels, svmlight, vw)


def contestants(model: str, ranks: Sequence[int], ours: Sequence[str], cs: Sequence[float]) -> dict[str, Contestant]:
    """By the name of its row."""
    found: dict[str, Contestant] = {}
    for options in ours:
        for number in ranks:
            found[f"train {options} P={number}".replace("  ", " ")] = partial(by_train, model, number, options.split())
    found["SGDClassifier"] = partial(by_sgd_classifier, model)
    if find_spec("liblinear"):
        for name, solver in LIBLINEAR_SOLVERS[model].items():
            for c in cs:
                found[f"LIBLINEAR -s {solver} -c {c:g} ({name})"] = partial(by_liblinear, solver, c)
    if find_spec("vowpalwabbit"):
        found["Vowpal Wabbit, with parsing"] = partial(by_vowpal_wabbit, model)
    for package, name in (("liblinear", "liblinear-official"), ("vowpalwabbit", "vowpalwabbit")):
        if not find_spec(package):
            click.echo(f"{name} is not installed: left out", err=True)
    return found


def by_train(
    model: str, ranks: int, options: Sequence[str], training: Samples, testing: Samples, number: int
) -> Iterator[tuple[float, float]]:
    """The epochs of a training by our command, on so many ranks."""
    report = training.svmlight.with_name("report.json")
    command = [mpiexec(), "-n", str(ranks)] if ranks > 1 else []
    command += [sys.executable, "-m", "sparseallreduce", "train", str(training.svmlight), "--test", str(testing.svmlight), "--model", model]
    command += ["--features", str(training.rows.shape[1]), "--seed", str(number), "--json", str(report), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise click.ClickException(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1]}")
    seconds = 0.0
    for epoch in json.loads(report.read_text())["epochs"]:
        seconds += epoch["seconds"]["total"] - epoch["seconds"]["evaluate"]
        if epoch["test_accuracy"] is not None:
            yield seconds, epoch["test_accuracy"]


def by_sgd_classifier(model: str, training: Samples, testing: Samples, number: int) -> Iterator[tuple[float, float]]:
    """The passes of scikit-learn's."""
    learner = SGDClassifier(loss=SKLEARN_LOSSES[model], random_state=number)
    seconds = 0.0
    for _ in range(max(PASSES)):
        begin = time.perf_counter()
        learner.partial_fit(training.rows, training.labels, classes=np.array([-1.0, 1.0]))
        seconds += time.perf_counter() - begin
        yield seconds, testing.accuracy(learner.coef_[0], float(learner.intercept_[0]))


def by_liblinear(solver: int, c: float, training: Samples, testing: Samples, number: int) -> Iterator[tuple[float, float]]:
    """A training for each tolerance, by the library's C++ alone: what makes its structures of a matrix is not timed."""
    from liblinear import liblinear

    problem = liblinear.problem(training.labels, csr_matrix(training.rows, dtype=np.float64), bias=1)
    for tolerance in TOLERANCES:
        parameter = liblinear.parameter(f"-s {solver} -c {c:g} -e {tolerance:g} -q -B 1")
        problem.set_bias(parameter.bias)
        liblinear.liblinear.set_print_string_function(parameter.print_func)
        begin = time.perf_counter()
        found = liblinear.liblinear.train(problem, parameter)
        seconds = time.perf_counter() - begin
        model = liblinear.toPyModel(found)
        weights = np.ctypeslib.as_array(model.w, (model.nr_feature + 1,)).copy() * (1.0 if model.label[0] == 1 else -1.0)
        full = np.zeros(training.rows.shape[1])
        full[: model.nr_feature] = weights[: model.nr_feature]
        yield seconds, testing.accuracy(full, float(weights[model.nr_feature]))


def by_vowpal_wabbit(model: str, training: Samples, testing: Samples, number: int) -> Iterator[tuple[float, float]]:
    """A run of its driver for each number of passes, in a process of its own, which tells the seconds of the run."""
    bits = max(18, int(np.ceil(np.log2(training.rows.shape[1] + 1))))
    for passes in PASSES:
        options = f"-d {training.vw} -b {bits} --loss_function {VW_LOSSES[model]} --quiet --random_seed {number}"
        if passes > 1:
            options += f" --passes {passes} -c -k"
        begin, made = time.perf_counter(), training.vw.with_name("model.vw")
        run_vowpal_wabbit(f"{options} -f {made}")
        seconds = time.perf_counter() - begin
        scores = training.vw.with_name("scores.txt")
        run_vowpal_wabbit(f"-t -i {made} -d {testing.vw} -p {scores} --quiet")
        yield seconds, testing.share_right(np.loadtxt(scores))


def run_vowpal_wabbit(options: str) -> None:
    from vowpalwabbit import Workspace

    workspace = Workspace(options)
    workspace.run_parser()
    workspace.finish()


def draw(results: dict[str, list[tuple[float, float]]], aim: float, title: str, picture: Path) -> None:
    """Accuracy by seconds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    for name, points in results.items():
        line = "-" if name.startswith("train") else "--"
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name, linestyle=line)
    axes.axhline(aim, color="gray", linewidth=0.8)
    axes.set(xscale="log", xlabel="seconds", ylabel="test accuracy", title=title)
    axes.set_ylim(bottom=max(0.5, 2 * aim - 1.02))
    axes.legend(fontsize="small")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    time_to_accuracy()
