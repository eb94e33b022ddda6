"""From a CSV of a million rows to a model: seconds of our commands beside pandas and scikit-learn's pipeline, in one run.

    python bench/tables.py --rows 1000000 --ranks 1,2 --repeats 3

The table is generated: 30 columns, of which 20 are numbers (three with gaps), 8 strings of 10 to 80 categories (some with commas and
quotes, one with gaps), one a boolean, and the label, a name. Each repeat runs all in turn, as processes of their own: our `train` with 1
rank and with more, and `pandas.read_csv`, `ColumnTransformer` of `OneHotEncoder` and `SimpleImputer` (with `StandardScaler`, or without),
and `LogisticRegression` at its defaults. Printed are medians, ratios to scikit-learn's, accuracies on a tenth of the rows that is held
out, and the largest weights by name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from sparseallreduce.linear import load_model

NUMBERS, TEXTS = 20, 8

SKLEARN = """
import sys, time
import numpy as np, pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

train, test = (pd.read_csv(path) for path in sys.argv[1:3])
y = train.pop("y")
numbers = list(train.select_dtypes("number").columns)
texts = [name for name in train.columns if name not in numbers]
steps = [SimpleImputer(strategy="constant", fill_value=0, add_indicator=True)] + ([StandardScaler()] if sys.argv[3] == "scaled" else [])
encoder = ColumnTransformer([("n", make_pipeline(*steps), numbers), ("t", OneHotEncoder(handle_unknown="ignore"), texts)])
model = make_pipeline(encoder, LogisticRegression(max_iter=1000)).fit(train, y)
print(model.score(test.drop(columns="y"), test["y"]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the table is kept; a temporary folder by default")
    parser.add_argument("--only", choices=["ours", "scaled", "plain"], action="append", help="leave the others out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        train, test = tables(folder, arguments.rows)
        report(folder, train, test, arguments)


def tables(folder: Path, rows: int) -> tuple[Path, Path]:
    """A training set and a tenth as many rows for a test, unless they are there."""
    paths = folder / f"train-{rows}.csv", folder / f"test-{rows}.csv"
    for seed, (path, count) in enumerate(zip(paths, (rows, rows // 10))):
        if not path.exists():
            write(path, count, np.random.default_rng(seed))
    return paths


def write(path: Path, rows: int, rng: np.random.Generator) -> None:
    """Write a table whose label is a noisy linear function of some columns."""
    import pandas as pd

    columns = {f"n{place}": np.round(rng.standard_normal(rows) * 10.0 ** (place % 3), 4) for place in range(NUMBERS)}
    codes = [rng.integers(0, 10 * (place + 1), rows) for place in range(TEXTS)]
    paid = rng.random(rows) < 0.5
    scores = columns["n0"] - columns["n1"] / 20 + 2 * (codes[0] == 3) - 1.5 * (codes[3] % 7 == 0) + 0.5 * paid
    labels = np.where(scores + rng.logistic(size=rows) > 0, "yes", "no")
    for place in (2, 7, 11):
        columns[f"n{place}"] = np.where(rng.random(rows) < 0.1, np.nan, columns[f"n{place}"])
    frame = pd.DataFrame(columns)
    for place, own in enumerate(codes):
        words = np.array([f'value {word}, "{place}"' if word % 5 == 0 else f"value {word}" for word in range(10 * (place + 1))], object)
        frame[f"s{place}"] = words[own]
    frame.loc[rng.random(rows) < 0.05, "s1"] = None
    frame["paid"], frame["y"] = paid, labels
    frame.to_csv(path, index=False)


def report(folder: Path, train: Path, test: Path, arguments: argparse.Namespace) -> None:
    ranks = [int(count) for count in arguments.ranks.split(",")]
    model, results = folder / "model.npz", folder / "results.json"
    ours = [sys.executable, "-m", "sparseallreduce"]
    command = [*ours, "train", str(train), "--target", "y", "--test", str(test), "--model-out", str(model), "--json", str(results)]
    launcher = str(Path(sys.executable).with_name("mpiexec"))
    ways: dict[str, list[str]] = {f"ours, P = {count}": [launcher, "-n", str(count), *command] for count in ranks}
    ways |= {f"scikit-learn, {how}": [sys.executable, "-c", SKLEARN, str(train), str(test), how] for how in ("scaled", "plain")}
    ways = {name: way for name, way in ways.items() if not arguments.only or any(part in name for part in arguments.only)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    accuracies, reading = {}, {}
    for _ in range(arguments.repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            done = subprocess.run(way, check=True, capture_output=True, text=True)
            seconds[name].append(time.perf_counter() - start)
            if name.startswith("ours"):
                found = json.loads(results.read_text())
                accuracies[name], reading[name] = found["epochs"][-1]["test_accuracy"], found["results"]["seconds"]
            else:
                accuracies[name] = float(done.stdout)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    fastest = min((medians[name] for name in medians if name.startswith("scikit")), default=float("nan"))
    print(f"{arguments.rows:,} rows, {train.stat().st_size / 1e6:.0f} MB; median of {arguments.repeats}")
    for name, median in medians.items():
        parts = "".join(f", {part} {value:.2f}" for part, value in reading.get(name, {}).items())
        print(f"{name:22} {median:7.2f} s  {median / fastest:5.2f} of the faster scikit-learn  accuracy {accuracies[name]:.4f}{parts}")
    if model.exists():
        largest(model)


def largest(path: Path) -> None:
    """Print the ten largest weights by name."""
    model = load_model(path)
    weights = np.asarray(model.weights)
    for index in np.argsort(-np.abs(weights))[:10].tolist():
        print(f"{model.name_of(index):30} {weights[index]:10.5f}")


if __name__ == "__main__":
    main()
