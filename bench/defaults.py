"""Compare what users get without options: the estimators and `train`, scikit-learn's linear models and Vowpal Wabbit, on many sets.

    pip install vowpalwabbit            (left out where the package is missing)
    python bench/defaults.py [--sets iris,wine] [--json F] [--add --seconds 60] [--before F]

Every set is split once; everyone trains on the same samples at the defaults, but for scikit-learn's `max_iter` warnings, which are not
shown. Printed for each set and contestant are test accuracy (R^2 of regressions), area under the ROC curve of two classes, log loss where
there are probabilities, and the median seconds of a fit; `train` counts its epochs without reading, Vowpal Wabbit its own text file with
parsing. Then, for the sets together: where ours is more than .01 below the best of the others, the mean of each, and the geometric mean of
our seconds over those of the quickest of the others that is no more than .005 less accurate than ours.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from defaults_sets import SETS, Split, made
from demo import ROOT
from numpy.typing import NDArray
from scipy.special import expit
from sklearn.datasets import dump_svmlight_file
from sklearn.linear_model import LinearRegression as SklearnLinearRegression
from sklearn.linear_model import LogisticRegression as SklearnLogisticRegression
from sklearn.linear_model import Ridge, SGDClassifier, SGDRegressor
from sklearn.metrics import accuracy_score, log_loss, r2_score, roc_auc_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.svm import LinearSVC

from sparseallreduce.linear import LinearRegression, LinearSVM, LogisticRegression, load_model

Array = NDArray[Any]

OURS = ("LogisticRegression", "LinearSVM", "LinearRegression", "train", "train svm", "train linear")
_LONG = 1.0  # seconds of a fit from which on it is timed once


class Figures(NamedTuple):
    """What a contestant came to on a set."""

    accuracy: float  # R^2 of a regression
    auc: float | None
    loss: float | None
    seconds: float


Contestant = Callable[[Split], Figures]


def fitted(make: Callable[[], Any]) -> Contestant:
    """Time a fit of an estimator, and measure it."""

    def run(samples: Split) -> Figures:
        taken: list[float] = []
        while len(taken) < 3 and sum(taken) < _LONG:
            model = make()
            begin = time.perf_counter()
            model.fit(samples.rows, samples.labels)
            taken.append(time.perf_counter() - begin)
        return measured(model, samples, float(np.median(taken)))

    return run


def measured(model: Any, samples: Split, seconds: float) -> Figures:
    """What a model says of the test set."""
    rows, labels = samples.test_rows, samples.test_labels
    predicted = model.predict(rows)
    if not samples.classifies:
        return Figures(float(r2_score(labels, predicted)), None, None, seconds)
    classes = np.unique(samples.labels)
    auc = float(roc_auc_score(labels, model.decision_function(rows))) if len(classes) == 2 else None
    gives = hasattr(model, "predict_proba") and getattr(model, "gives_probabilities", True)
    loss = float(log_loss(labels, model.predict_proba(rows), labels=classes)) if gives else None
    return Figures(float(accuracy_score(labels, predicted)), auc, loss, seconds)


def by_command(*options: str) -> Contestant:
    """Train by the command, in a process of its own."""

    def run(samples: Split) -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            data, model, report = (Path(folder) / name for name in ("train.svm", "model.npz", "report.json"))
            dump_svmlight_file(samples.rows, samples.labels, str(data), zero_based=False)
            command = [sys.executable, "-m", "sparseallreduce", "train", str(data), "--features", str(samples.rows.shape[1])]
            command += ["--json", str(report), "--model-out", str(model), *options]
            done = subprocess.run(command, cwd=ROOT, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if done.returncode != 0:
                raise click.ClickException(done.stderr.strip().splitlines()[-1])
            epochs = json.loads(report.read_text())["epochs"]
            seconds = sum(epoch["seconds"]["total"] - epoch["seconds"]["evaluate"] for epoch in epochs)
            return measured(load_model(model), samples, seconds)

    return run


def by_vowpal_wabbit(loss: str) -> Contestant:
    """Train by Vowpal Wabbit, which reads its text, in a process of its own."""

    def run(samples: Split) -> Figures:
        classes = np.unique(samples.labels)
        labels = np.searchsorted(classes, samples.labels) + 1 if samples.classifies else samples.labels
        several = samples.classifies and len(classes) > 2
        if samples.classifies and not several:
            labels = np.where(labels == 2, 1, -1)
        with tempfile.TemporaryDirectory() as folder:
            data, test, model, scores = (Path(folder) / name for name in ("train.vw", "test.vw", "model", "scores"))
            _write_vw(data, samples.rows, labels)
            _write_vw(test, samples.test_rows, np.ones(samples.test_rows.shape[0]))
            bits = max(18, math.ceil(math.log2(samples.rows.shape[1] + 1)))
            how = f"-d {data} -b {bits} -f {model} --quiet" + (f" --oaa {len(classes)}" if several else "")
            how += f" --loss_function {loss}" if samples.classifies else ""
            seconds = float(_of_vw(how))
            _of_vw(f"-t -i {model} -d {test} -p {scores} --quiet")
            found = np.loadtxt(scores)
        if not samples.classifies:
            return Figures(float(r2_score(samples.test_labels, found)), None, None, seconds)
        if several:
            return Figures(float(accuracy_score(samples.test_labels, classes[found.astype(int) - 1])), None, None, seconds)
        predicted, auc = classes[(found > 0).astype(int)], float(roc_auc_score(samples.test_labels, found))
        shares = expit(found)
        chances = float(log_loss(samples.test_labels, np.stack([1 - shares, shares], axis=1))) if loss == "logistic" else None
        return Figures(float(accuracy_score(samples.test_labels, predicted)), auc, chances, seconds)

    return run


_VW = """import sys, time
from vowpalwabbit import Workspace
begin = time.perf_counter()
workspace = Workspace(sys.argv[1])
workspace.run_parser()
workspace.finish()
print(time.perf_counter() - begin)"""


def _of_vw(options: str) -> str:
    done = subprocess.run([sys.executable, "-c", _VW, options], check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1]


def _write_vw(path: Path, rows: Any, labels: Array) -> None:
    with tempfile.NamedTemporaryFile("r", suffix=".svm") as text, path.open("w") as out:
        dump_svmlight_file(rows, labels, text.name, zero_based=False)
        for line in text:
            label, _, features = line.strip().partition(" ")
            out.write(f"{label} | {features}\n")


def contestants(samples: Split) -> dict[str, Contestant]:
    """Who trains on a set."""
    if not samples.classifies:
        found = {
            "LinearRegression": fitted(LinearRegression),
            "train linear": by_command("--model", "linear"),
            "SGDRegressor": fitted(SGDRegressor),
            "Ridge": fitted(Ridge),
            "OLS": fitted(SklearnLinearRegression),
        }
    else:
        several = len(np.unique(samples.labels)) > 2

        def liblinear() -> Any:
            model = SklearnLogisticRegression(solver="liblinear")
            return OneVsRestClassifier(model) if several else model

        found = {
            "LogisticRegression": fitted(LogisticRegression),
            "LinearSVM": fitted(LinearSVM),
            "train": by_command(),
            "train svm": by_command("--model", "svm"),
            "SGD log": fitted(lambda: SGDClassifier(loss="log_loss", random_state=0)),
            "SGD hinge": fitted(lambda: SGDClassifier(random_state=0)),
            "liblinear": fitted(liblinear),
            "lbfgs": fitted(SklearnLogisticRegression),
            "LinearSVC": fitted(lambda: LinearSVC(random_state=0)),
        }
    if find_spec("vowpalwabbit"):
        found["vw"] = by_vowpal_wabbit("logistic")
    return found


Table = dict[str, dict[str, Figures]]


def show(name: str, samples: Split | None, rows: dict[str, Figures], before: Table) -> None:
    """Print the lines of a set."""
    size = "" if samples is None else f" ({samples.rows.shape[0]:,} x {samples.rows.shape[1]:,})"
    print(f"\n{name}{size}", flush=True)
    best = max(figures.accuracy for who, figures in rows.items() if who not in OURS)
    for who, (accuracy, auc, loss, seconds) in rows.items():
        mark = "  <-- below the best of the others" if who in OURS and accuracy < best - 0.01 else ""
        old = before.get(name, {}).get(who) if who in OURS else None
        was = "" if old is None else f"   was {old.accuracy:.4f}, {old.seconds:.4f} s"
        print(f"  {who:20} {accuracy:8.4f} {_shown(auc):>8} {_shown(loss):>8} {seconds:10.4f} s{was}{mark}", flush=True)


def _shown(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.4f}"


def summary(found: Table, small: int = 600) -> None:
    """Print what the sets come to together."""
    classes = {name: rows for name, rows in found.items() if "SGD log" in rows}
    print("\nmean accuracy over the sets of classes, and how often, and by how much at most, below the best of the others")
    for who in next(iter(classes.values()), {}):
        shares = [rows[who].accuracy for rows in classes.values()]
        behind = [
            max(each.accuracy for other, each in rows.items() if other not in OURS) - rows[who].accuracy for rows in classes.values()
        ]
        more = sum(gap > 0.01 for gap in behind)
        print(f"  {who:20} {np.mean(shares):.4f}   {more:2} sets by more than .01, at most {max(behind):.4f}")
    for who in ("LogisticRegression", "LinearSVM", "LinearRegression", "train", "train svm"):
        quotients = []
        for rows in found.values():
            if who not in rows:
                continue
            good = [each.seconds for other, each in rows.items() if other not in OURS and each.accuracy >= rows[who].accuracy - 0.005]
            if good and min(good) >= 0.05:
                quotients.append(rows[who].seconds / min(good))
        if quotients:
            mean = math.exp(float(np.mean(np.log(quotients))))
            print(f"  {who}: seconds over the quickest as accurate, where that takes .05 s or more: {mean:.2f} ({len(quotients)} sets)")


@click.command()
@click.option("--sets", default=",".join(SETS), help="Names, with commas.")
@click.option("--only", help="Names of contestants, with commas.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
@click.option("--before", type=click.Path(exists=True, path_type=Path), help="Results to compare with, of --json of an earlier run.")
@click.option("--add", is_flag=True, help="Keep the results in --json, and go on with sets that have none there.")
@click.option("--seconds", type=click.FloatRange(0), default=math.inf, help="Begin no set after so many seconds; --add goes on there.")
def bench(sets: str, only: str | None, json_path: Path | None, before: Path | None, add: bool, seconds: float) -> None:
    """Print a table."""
    warnings.simplefilter("ignore")
    if add and json_path is None:
        raise click.UsageError("--add needs --json")
    old: Table = {} if before is None else _read(before)
    found: Table = _read(json_path) if add and json_path is not None and json_path.exists() else {}
    begin = time.monotonic()
    for name in SETS if sets == ",".join(SETS) else sets.split(","):
        if name in found:
            continue
        if time.monotonic() - begin > seconds:
            print(f"\nstopped before {name}")
            break
        samples = made(name)
        if samples is None:
            print(f"\n{name}: not there")
            continue
        chosen = contestants(samples)
        if only is not None:
            kept = {who: each for who, each in old.get(name, {}).items() if who not in OURS}
            rows = kept | {who: run(samples) for who, run in chosen.items() if who in only.split(",")}
        else:
            rows = {who: run(samples) for who, run in chosen.items()}
        found[name] = rows
        show(name, samples, rows, old)
        if json_path is not None:
            json_path.write_text(json.dumps({set_: {who: each._asdict() for who, each in rows.items()} for set_, rows in found.items()}))
    summary(found)


def _read(path: Path) -> Table:
    return {name: {who: Figures(**each) for who, each in rows.items()} for name, rows in json.loads(path.read_text()).items()}


if __name__ == "__main__":
    bench()
