"""Print the test accuracy of every update by learning rate, 10^-3 to 10^3 by half decades, and how far apart those are that serve.

    python bench/learning_rates.py TRAIN.svm TEST.svm [TRAIN.svm TEST.svm ...] [--features 3231961,16777216] [--models svm] [--epochs 5]

Each is a training on one rank, as the command `train` makes it with these options, and the default of --beta for classes; the batch is at
most 100 samples, and for every update so small that a pass has 64 steps. The span of an update is the ratio of
the largest learning rate to the smallest whose accuracy is within 0.003 of the update's best; it is marked with a plus where a rate at
an end of the range is among them, so that it may be more. Rates between the two that do worse are counted as gaps. A training that
diverges has no accuracy.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import sparseallreduce as sar
from sparseallreduce.cli.train_options import BATCH, CLASSES_BETA, STEPS
from sparseallreduce.errors import DivergenceError
from sparseallreduce.linear import MODELS, Constant, Dataset, Descent, LinearModel, Options, SparseStrategy, Trainer, load, two_classes
from sparseallreduce.linear.data.feature_scaling import gradient_unit, rate_unit, sample_moments
from sparseallreduce.linear.weights import UPDATES

RATES = [10 ** (half / 2) for half in range(-6, 7)]
CLOSE = 0.003  # of the best accuracy
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True)
class Row:
    """What the rates came to with an update."""

    accuracies: list[float | None]  # of every rate

    @property
    def best(self) -> float:
        return max((share for share in self.accuracies if share is not None), default=math.nan)

    @property
    def serving(self) -> list[int]:
        """The places of the rates that come close to the best."""
        return [place for place, share in enumerate(self.accuracies) if share is not None and share >= self.best - CLOSE]

    @property
    def span(self) -> float:
        return RATES[self.serving[-1]] / RATES[self.serving[0]] if self.serving else math.nan

    @property
    def gaps(self) -> int:
        """Rates between those that serve and do not."""
        return self.serving[-1] - self.serving[0] + 1 - len(self.serving) if self.serving else 0

    @property
    def open(self) -> bool:
        """Whether rates beyond the range may serve too."""
        return bool({0, len(RATES) - 1}.intersection(self.serving))


@click.command()
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("--features", help="Dimension N of each pair of files, with commas between; by default the highest index.")
@click.option("--models", default="svm", show_default=True, help="Names of --model, with commas between; arow is of svm alone.")
@click.option("--updates", default=",".join(UPDATES), show_default=True)
@click.option("--epochs", type=click.IntRange(1), default=5, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), help="Samples in a step; by default as above.")
@click.option("--beta", type=click.FloatRange(0), default=CLASSES_BETA, show_default=True, help="Of ftrl; 0 for AdaGrad.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
def bench(
    files: tuple[Path, ...],
    features: str | None,
    models: str,
    updates: str,
    epochs: int,
    batch_size: int | None,
    beta: float,
    json_path: Path | None,
) -> None:
    """Train on the first of each pair of FILES, and print the accuracy on the second."""
    pairs = list(zip(files[::2], files[1::2]))
    sizes = [int(size) for size in features.split(",")] if features else [None] * len(pairs)
    if len(files) % 2 or len(sizes) != len(pairs):
        raise click.UsageError("give a file of test samples with each of training samples, and --features for each pair or for none")
    results = []
    for (train, test), size in zip(pairs, sizes, strict=True):
        training, testing = load(train, test, comm=sar.SERIAL, n_features=size)
        training, classes = two_classes(training, sar.SERIAL)
        testing, _ = two_classes(testing, sar.SERIAL, classes)
        batch = batch_size or min(BATCH, max(1, training.rows // STEPS))
        for model in models.split(","):
            print(f"{train.name}, {model}, {epochs} passes, batches of {batch}")
            print(f"{'':6}" + "".join(f"{rate:>8.2g}" for rate in RATES) + f"{'best':>9}{'span':>8}{'gaps':>6}", flush=True)
            for update in updates.split(","):
                if update == "arow" and model != "svm":
                    continue
                given = training, testing, MODELS[model](), update
                found = Row([accuracy(*given, rate, beta if update == "ftrl" else 0.0, epochs, batch) for rate in RATES])
                print(shown(update, found), flush=True)
                described = {"train": train.name, "model": model, "update": update, "batch_size": batch}
                results.append(described | {"test_accuracy": found.accuracies, "span": found.span})
    if json_path is not None:
        options = {"epochs": epochs, "beta": beta, "rates": RATES, "close": CLOSE}
        json_path.write_text(json.dumps(options | {"results": results}, indent=1) + "\n")


def accuracy(
    training: Dataset, testing: Dataset, model: LinearModel, update: str, rate: float, beta: float, epochs: int, batch: int
) -> float | None:
    """On the test samples after the last pass; None if a weight is no finite number by then."""
    moments = sample_moments(training, sar.SERIAL)
    unit = 1.0 if update == "sgd" else rate_unit(update, moments, False, model.in_units_of_labels)
    descent = Descent(update=update, beta=beta * gradient_unit(moments, training.nnz, batch))
    strategy: Any = SparseStrategy(training, sar.SERIAL, descent)
    trainer = Trainer(model, strategy, Constant(rate), Options(epochs, batch, evaluate_every=epochs), rate_unit=unit)
    try:
        return list(trainer.run(testing))[-1].test_accuracy
    except DivergenceError:
        return None


def shown(update: str, row: Row) -> str:
    accuracies = "".join(f"{'-':>8}" if share is None else f"{share:8.4f}" for share in row.accuracies)
    return f"{update:6}{accuracies}{row.best:9.4f}{row.span:7.3g}{'+' if row.open else ' '}{row.gaps:6}"


if __name__ == "__main__":
    bench()
