"""Time calls of partial_fit and of predict on small chunks, at several numbers of features, beside a copy of the weights.

    [mpiexec -n 2] python bench/partial_fit.py [--features 1048576 16777216] [--samples 100] [--nonzeros 50] [--rounds 40]

Every rank makes its own chunks, of features at random. The kinds of models take their calls in turn, round by round; the first rounds,
in which features are new and loops compiled, are left out. What copying all weights takes is measured between them, and on one process
scikit-learn's SGDClassifier on the same chunks. Printed are medians in microseconds, and their ratios to the copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from sklearn.linear_model import SGDClassifier

from sparseallreduce.linear import LogisticRegression
from sparseallreduce.runtime.communicators import world

MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "sgd, no l2": ({"update": "sgd", "l2": 0.0}, 2),
    "sgd": ({"update": "sgd"}, 2),
    "sgd, a rate given": ({"update": "sgd", "learning_rate": 0.1}, 2),
    "ftrl, no l2": ({"update": "ftrl", "l2": 0.0}, 2),
    "ftrl": ({"update": "ftrl"}, 2),
    "sgd, 10 classes": ({"update": "sgd"}, 10),
    "ftrl, 10 classes": ({"update": "ftrl"}, 10),
}
SCIKIT = "SGDClassifier"
WARM = 5  # rounds that are left out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, nargs="+", default=[1 << 20, 1 << 24])
    parser.add_argument("--samples", type=int, default=100, help="of every rank in a call")
    parser.add_argument("--nonzeros", type=int, default=50, help="of a sample")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    comm = world()
    results = {}
    for features in options.features:
        results[features] = measured(features, options, comm)
        if comm.rank == 0:
            report(features, results[features], options, comm.size)
    if comm.rank == 0 and options.json is not None:
        chosen = vars(options) | {"json": str(options.json), "ranks": comm.size}
        options.json.write_text(json.dumps({"arguments": chosen, "results": results}, indent=1))


def chunk(rng: np.random.Generator, samples: int, nonzeros: int, features: int) -> csr_array:
    """Samples of features at random."""
    columns = rng.integers(0, features, (samples, nonzeros)).astype(np.int32)
    starts = np.arange(samples + 1, dtype=np.int32) * nonzeros
    rows = csr_array((np.ones(columns.size, np.float32), columns.reshape(-1), starts), (samples, features))
    rows.sum_duplicates()
    return rows


def measured(features: int, options: argparse.Namespace, comm: Any) -> dict[str, dict[str, float]]:
    """Median seconds of a call, by model and kind of call, and of a copy of the weights."""
    rng = np.random.default_rng(comm.rank)
    models: dict[str, tuple[Any, int]] = {
        name: (LogisticRegression(**MODELS[name][0], comm=comm), MODELS[name][1]) for name in options.models
    }
    if comm.size == 1:
        models[SCIKIT] = SGDClassifier(loss="log_loss"), 2
    seconds: dict[str, dict[str, list[float]]] = {name: {"partial_fit": [], "predict": []} for name in models}
    weights, copies = np.ones(features, np.float32), np.empty(features, np.float32)
    copying = []
    for _ in range(options.rounds + WARM):
        samples = chunk(rng, options.samples, options.nonzeros, features)
        for name, (model, classes) in models.items():
            labels = rng.integers(0, classes, options.samples)
            seconds[name]["partial_fit"].append(timed(comm, model.partial_fit, samples, labels, np.arange(classes)))
            seconds[name]["predict"].append(timed(comm, model.predict, samples))
        copying.append(timed(comm, np.copyto, copies, weights))
    medians = {name: {call: statistics.median(each[WARM:]) for call, each in calls.items()} for name, calls in seconds.items()}
    return medians | {"copy": {"copy": statistics.median(copying[WARM:])}}


def timed(comm: Any, action: Callable[..., object], *arguments: Any) -> float:
    """Seconds that an action takes, which the ranks begin together."""
    comm.allgather(None)
    begin = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - begin


def report(features: int, medians: dict[str, dict[str, float]], options: argparse.Namespace, ranks: int) -> None:
    copy = medians["copy"]["copy"]
    shape = f"{options.samples} samples of {options.nonzeros} non-zeros a rank and call"
    print(f"{ranks} rank{'s' if ranks > 1 else ''}, {features:,} features, {shape}; median of {options.rounds} calls in turn")
    print(f"{'microseconds':20}{'partial_fit':>13}{'/ copy':>9}{'predict':>11}{'/ copy':>9}")
    for name, calls in medians.items():
        if name != "copy":
            fit, predict = calls["partial_fit"], calls["predict"]
            print(f"{name:20}{1e6 * fit:13.0f}{fit / copy:9.3f}{1e6 * predict:11.0f}{predict / copy:9.3f}")
    print(f"{'a copy of N float32':20}{1e6 * copy:13.0f}\n")


if __name__ == "__main__":
    main()
