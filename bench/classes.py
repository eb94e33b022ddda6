"""Time an epoch of K classes at once beside one of two classes, and beside K trainings, each class against the rest, on the same samples.

    [mpiexec -n 2] python bench/classes.py [--classes 10] [--features 1000000] [--samples 20000] [--batch-size 250] [--rounds 5]

Each rank makes its own samples: features of a row are drawn with a density that falls with their number, as those of text do, and a tenth
of them belongs to its class. All trainings take an epoch in turn, round by round; the first round is left out. The time of an epoch is that
of training, without the evaluation after it. Printed are medians, by phase, and their ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from sparseallreduce.linear import (
    STRATEGIES,
    Constant,
    Dataset,
    Descent,
    Epoch,
    LinearModel,
    Logistic,
    Multinomial,
    OneVsRest,
    Options,
    Trainer,
)
from sparseallreduce.runtime.communicators import world

PHASES = ("compute", "communicate", "update", "wait", "epoch")
LENGTH = 110  # non-zeros of a row, about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--features", type=int, default=1_000_000)
    parser.add_argument("--samples", type=int, default=20_000, help="of every rank")
    parser.add_argument("--batch-size", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strategy", choices=list(STRATEGIES), default="sparse")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    comm = world()
    samples = made(options.samples, options.features, options.classes, comm)
    runs = {
        "two classes": [epochs(Logistic(), against(samples, 0), options, comm)],
        "multinomial": [epochs(Multinomial(options.classes), samples, options, comm)],
        "ovr": [epochs(OneVsRest(Logistic(), options.classes), samples, options, comm)],
        "one by one": [epochs(Logistic(), against(samples, number), options, comm) for number in range(options.classes)],
    }
    records: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _ in range(options.rounds + 1):
        for name, trainings in runs.items():
            records[name].append(added(next(training) for training in trainings))
    if comm.rank == 0:
        report({name: rounds[1:] for name, rounds in records.items()}, options, comm.size)


def made(rows: int, features: int, classes: int, comm: Any) -> Dataset:
    """The samples of this rank among those of all."""
    rng = np.random.default_rng(comm.rank)
    labels = rng.integers(0, classes, rows)
    common = (features * rng.random((rows, LENGTH - LENGTH // 10)) ** 4).astype(np.int64)
    own = classes * rng.integers(0, features // classes, (rows, LENGTH // 10)) // 50 + labels[:, np.newaxis]
    columns = np.minimum(np.concatenate([common, own], axis=1), features - 1)
    matrix = csr_array((np.ones(columns.size, np.float32), columns.reshape(-1), np.arange(rows + 1) * LENGTH), shape=(rows, features))
    matrix.sum_duplicates()
    matrix.data[:] = 1
    return Dataset.of_ranks(matrix, labels, comm)


def against(samples: Dataset, number: int) -> Dataset:
    """The samples with one class against the rest."""
    return replace(samples, labels=np.where(samples.labels == number, 1.0, -1.0))


def epochs(model: LinearModel, samples: Dataset, options: argparse.Namespace, comm: Any) -> Iterator[Epoch]:
    """The epochs of a training, each when it is asked for."""
    strategy = STRATEGIES[options.strategy](samples, comm, Descent(1e-6, True, columns=model.columns))
    return Trainer(model, strategy, Constant(0.2), Options(options.rounds + 1, options.batch_size)).run()


def added(made: Iterator[Epoch]) -> dict[str, float]:
    """The seconds of some epochs together, by phase."""
    seconds = [epoch.seconds for epoch in made]
    sums = {phase: sum(each.get(phase, 0.0) for each in seconds) for phase in PHASES}
    return sums | {"epoch": sum(each["total"] - each["evaluate"] for each in seconds)}


def report(records: dict[str, list[dict[str, float]]], options: argparse.Namespace, ranks: int) -> None:
    """Print medians, and what they are beside those of two classes and of one training after the other."""
    shape = f"{options.classes} classes, {options.features:,} features, {options.samples:,} samples a rank, {options.batch_size} a step"
    print(f"{ranks} rank{'s' if ranks > 1 else ''}, strategy {options.strategy}, {shape}; median of {options.rounds} epochs in turn")
    print(f"{'seconds an epoch':18}" + "".join(f"{phase:>12}" for phase in PHASES) + f"{'/ two':>10}{'/ one by one':>14}")
    medians = {name: {phase: statistics.median(each[phase] for each in rounds) for phase in PHASES} for name, rounds in records.items()}
    for name, rounds in records.items():
        ratios = [
            statistics.median(own["epoch"] / other["epoch"] for own, other in zip(rounds, records[base]))
            for base in ("two classes", "one by one")
        ]
        print(f"{name:18}" + "".join(f"{medians[name][phase]:12.4f}" for phase in PHASES) + f"{ratios[0]:10.2f}{ratios[1]:14.3f}")
        medians[name] |= {"to_two_classes": ratios[0], "to_one_by_one": ratios[1]}
    if options.json is not None:
        chosen = vars(options) | {"json": str(options.json), "ranks": ranks}
        options.json.write_text(json.dumps({"arguments": chosen, "results": medians}, indent=1))


if __name__ == "__main__":
    main()
