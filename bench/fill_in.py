"""Measure the fill-in of the sum of the ranks' top k, on real gradients in the simulator (Ok-Topk section 5.2).

    python bench/fill_in.py [--ranks 4,16,64] [--density 0.01,0.001] [--data FOLDER] [--json FILE]

Where the top k of P ranks lie apart, their sum has up to k P entries: the paper's authors saw 1 % of the gradient grow to 13.2 % on 16
ranks (VGG-16), and 2 % to 34.5 % on 32 (LSTM). Here P replicas train with error feedback on TopkDSA, a perceptron on scikit-learn's
digits and logistic regression on `phishing_url` and `reviews_trigram` in FOLDER, or else on generated data like the URL set. Printed are
means over the steps behind the first tenth: entries that a rank sends and entries of the sum as shares of N, their quotient, and the
words that a rank sends as a share of those at the ends of TopkDSA's interval, 4 k (P - 1)/P and (2 k + N)(P - 1)/P. Beside them stands
what random positions would come to, N (1 - (1 - k/N)**P).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from lossy_tasks import Array, Digits, Logistic, Task, batches

import sparseallreduce as sar
from sparseallreduce.cli.report import environment
from sparseallreduce.linear import generate

FEATURES = {"phishing_url": 3_231_961, "reviews_trigram": 16_777_216}
GENERATED = "url_like"
SAMPLES = 16  # of a rank and step
WORD = 4  # bytes


class Row(NamedTuple):
    """Means over the steps of a training."""

    data: str
    size: int  # N
    ranks: int
    density: float  # k / N
    sent: float  # entries that a rank selects, as a share of N
    result: float  # entries of the sum, as a share of N
    random: float  # the same for random positions
    words: float  # that a rank sends
    least: float  # 4 k (P - 1)/P
    most: float  # (2 k + N)(P - 1)/P

    @property
    def fill_in(self) -> float:
        """Entries of the sum for each that a rank selects."""
        return self.result / self.sent


def trainings(folder: Path | None, samples: int, scratch: Path) -> Iterator[tuple[str, Task]]:
    """The tasks, with a step's samples of all ranks."""
    yield "perceptron, digits", Digits(batch=samples)
    found = {name: features for name, features in FEATURES.items() if folder is not None and (folder / f"{name}.svm.bz2").exists()}
    for name, features in found.items():
        assert folder is not None
        yield f"logistic, {name}", Logistic(folder, features, name, batch=samples)
    if not found:
        for ending, seed in (("svm.bz2", 0), ("t.svm.bz2", 1)):
            if not (scratch / f"{GENERATED}.{ending}").exists():
                generate("url-like", scratch / f"{GENERATED}.{ending}", samples=20_000, features=3_231_961, seed=seed)
        yield "logistic, url-like", Logistic(scratch, 3_231_961, GENERATED, batch=samples)


def shares(task: Task, ranks: int) -> Iterator[list[Array]]:
    """The samples of all ranks, step after step, epoch after epoch."""
    for epoch in count():
        yield from map(list, zip(*(batches(len(task.y), task.batch, epoch, rank, ranks) for rank in range(ranks))))


def measure(name: str, task: Task, ranks: int, density: float, steps: int) -> Row:
    """Train for some steps."""
    parameters = task.parameters()
    size = sum(array.size for array in parameters)
    k = max(1, int(size * density))
    feedbacks = [sar.ErrorFeedback(sar.TopkDSA(size, k)) for _ in range(ranks)]
    counts = []
    for rows in islice(shares(task, ranks), steps):
        gradients = [flat(task.gradients(parameters, own)) for own in rows]
        out = sar.simulate(gradients, feedbacks)
        descend(parameters, task.learning_rate * out.outputs[0].to_dense())
        sent = np.mean([len(feedback.contributed) for feedback in feedbacks])
        counts.append((sent, out.outputs[0].nnz, (out.bytes_sent - out.header_bytes).mean() / WORD))
    sent, result, words = np.mean(counts[steps // 10 :], axis=0)
    share = (ranks - 1) / ranks
    random = 1 - (1 - sent / size) ** ranks
    return Row(name, size, ranks, density, sent / size, result / size, random, words, 4 * sent * share, (2 * sent + size) * share)


def flat(arrays: list[Array]) -> Array:
    return np.concatenate([np.ravel(array) for array in arrays]).astype(np.float32, copy=False)


def descend(parameters: list[Array], step: Array) -> None:
    at = 0
    for array in parameters:
        array -= step[at : at + array.size].reshape(array.shape)
        at += array.size


def print_row(row: Row) -> None:
    print(
        f"{row.data:<26} {row.size:>10} {row.ranks:>4} {row.density:>7.2%} {row.sent:>7.2%} {row.result:>7.2%} {row.fill_in:>7.1f} "
        f"{row.random:>8.2%} {row.words:>12,.0f} {row.words / row.least:>7.2f} {row.words / row.most:>6.2f}",
        flush=True,
    )


@click.command(help=__doc__)
@click.option("--ranks", default="4,16,64", show_default=True)
@click.option("--density", "densities", default="0.01,0.001", show_default=True, help="k / N.")
@click.option("--steps", type=click.IntRange(min=10), default=60, show_default=True, help="Of a training.")
@click.option("--data", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of the data sets.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the table.")
def fill_in(ranks: str, densities: str, steps: int, folder: Path | None, json_path: Path | None) -> None:
    rows = []
    print(
        f"{'data':<26} {'N':>10} {'P':>4} {'k / N':>7} {'sent':>7} {'sum':>7} {'fill-in':>7} {'random':>8} {'words sent':>12} "
        f"{'/ least':>7} {'/ most':>6}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        for number in map(int, ranks.split(",")):
            for name, task in trainings(folder, SAMPLES * number, Path(scratch)):
                for density in map(float, densities.split(",")):
                    rows.append(measure(name, task, number, density, steps))
                    print_row(rows[-1])
    if json_path is not None:
        results: list[dict[str, Any]] = [row._asdict() | {"fill_in": row.fill_in} for row in rows]
        json_path.write_text(json.dumps({"schema": 1, "environment": environment(sar.SERIAL), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    fill_in()
