"""Train a classifier on two ranks, once with dense and once with sparse allreduce, and compare the times.

The data set is like the URL set of the thesis (table 5.1): 3,231,961 features, of which a sample has about 115, with power-law
frequencies. It is generated into `data/` the first time. The picture goes to `bench/results/demo.png`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import click
import matplotlib
import numpy as np
from tqdm import tqdm

from sparseallreduce.linear import generate, load_model

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "bench" / "results" / "demo.png"
SAMPLES, TEST_SAMPLES = 100_000, 10_000
RANKS = 2
TRAINING = ["--epochs", "4", "--batch-size", "200", "--learning-rate", "2"]
STRATEGIES = ("dense", "sparse")
PHASES = {"compute": "tab:gray", "communicate": "tab:red", "update": "tab:blue"}


@click.command()
@click.option("--samples", type=click.IntRange(min=2), default=SAMPLES, show_default=True, help="Of the training set.")
def demo(samples: int) -> None:
    """Train with dense and with sparse allreduce on two ranks, print both times, and draw them."""
    start = time.perf_counter()
    train, test = data_set(samples)
    with tempfile.TemporaryDirectory() as folder:
        runs = {strategy: trained(strategy, train, test, Path(folder)) for strategy in STRATEGIES}
        weights = [load_model(Path(folder) / f"{strategy}.npz").weights for strategy in STRATEGIES]
    seconds = {strategy: per_epoch(run) for strategy, run in runs.items()}
    print_comparison(runs, seconds, float(np.abs(weights[0] - weights[1]).max() / np.abs(weights[0]).max()))
    draw(runs, seconds)
    print(f"picture: {PICTURE.relative_to(ROOT)}; {time.perf_counter() - start:.0f} s in all")


def data_set(samples: int) -> tuple[Path, Path]:
    """Training and test file, from one true model: generated unless they are there from before."""
    train, test = ROOT / "data" / f"url-like-{samples}.svm", ROOT / "data" / f"url-like-{samples}.t.svm"
    if train.exists() and test.exists():
        print(f"reusing {train.relative_to(ROOT)}")
        return train, test
    train.parent.mkdir(exist_ok=True)
    both = train.with_name(f"part-{os.getpid()}.svm")
    try:
        with tqdm(desc="generating", unit="sample", total=samples + TEST_SAMPLES, disable=None) as bar:
            generate("url-like", both, samples=samples + TEST_SAMPLES, progress=bar.update)
        with both.open("rb") as lines:
            for path, count in ((train, samples), (test, TEST_SAMPLES)):
                part = path.with_name(f"part-{os.getpid()}-{path.name}")
                with part.open("wb") as out:
                    out.writelines(islice(lines, count))
                part.replace(path)
    finally:
        both.unlink(missing_ok=True)
    return train, test


def trained(strategy: str, train: Path, test: Path, folder: Path) -> dict[str, Any]:
    """The report of one training run."""
    print(f"\n{strategy} allreduce:", flush=True)
    report = folder / f"{strategy}.json"
    command = [mpiexec(), "-n", str(RANKS), sys.executable, "-m", "sparseallreduce", "train", str(train.relative_to(ROOT))]
    command += ["--test", str(test.relative_to(ROOT)), "--model", "logistic", "--strategy", strategy, *TRAINING]
    command += ["--features", "3231961", "--json", str(report), "--model-out", str(folder / f"{strategy}.npz")]
    if subprocess.run(command, cwd=ROOT, check=False, stdin=subprocess.DEVNULL).returncode != 0:
        raise click.ClickException(f"the training run failed: {' '.join(command)}")
    return dict(json.loads(report.read_text()))


def mpiexec() -> str:
    """The launcher that is installed beside this interpreter, or that of the system."""
    found = shutil.which("mpiexec", path=Path(sys.executable).parent) or shutil.which("mpiexec")
    if found is None:
        raise click.ClickException("there is no mpiexec: `make setup` installs one")
    return found


def per_epoch(run: dict[str, Any]) -> dict[str, float]:
    """Seconds of each phase of training, median over the epochs."""
    return {phase: float(np.median([epoch["seconds"][phase] for epoch in run["epochs"]])) for phase in PHASES}


def print_comparison(runs: dict[str, dict[str, Any]], seconds: dict[str, dict[str, float]], difference: float) -> None:
    """What each strategy took, and their ratios, as a table."""
    print(f"\n{'':9} {'test accuracy':>13} {'compute':>9} {'communicate':>11} {'update':>9} {'epoch':>9} {'sent MB':>9}")
    for strategy, run in runs.items():
        last = run["epochs"][-1]
        phases = " ".join(f"{seconds[strategy][phase]:{max(9, len(phase))}.3f}" for phase in PHASES)
        print(f"{strategy:9} {last['test_accuracy']:13.4f} {phases} {sum(seconds[strategy].values()):9.3f} {last['bytes_sent'] / 1e6:9.1f}")
    dense, sparse = (seconds[strategy] for strategy in STRATEGIES)
    ratios = " ".join(f"{dense[phase] / sparse[phase]:{max(8, len(phase) - 1)}.1f}x" for phase in PHASES)
    sent = runs["dense"]["epochs"][-1]["bytes_sent"] / runs["sparse"]["epochs"][-1]["bytes_sent"]
    print(f"{'speed-up':9} {'':13} {ratios} {sum(dense.values()) / sum(sparse.values()):8.1f}x {sent:8.1f}x")
    print(f"seconds an epoch; the weights of the two runs differ by {difference:.1e} of the largest weight")


def draw(runs: dict[str, dict[str, Any]], seconds: dict[str, dict[str, float]]) -> None:
    """Time per epoch by phase, and test accuracy against training time."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (bars, curves) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    bottom = np.zeros(len(STRATEGIES))
    for phase, colour in PHASES.items():
        heights = np.array([seconds[strategy][phase] for strategy in STRATEGIES])
        bars.bar(STRATEGIES, heights, bottom=bottom, color=colour, label=phase, width=0.5)
        bottom += heights
    for place, height in enumerate(bottom):
        bars.annotate(f"{height:.2f} s", (place, height), (0, 3), textcoords="offset points", ha="center")
    bars.set(ylabel="seconds an epoch", title=f"{bottom[0] / bottom[1]:.1f} times faster with sparse allreduce")
    bars.legend()
    for strategy, run in runs.items():
        times = np.cumsum([sum(epoch["seconds"][phase] for phase in PHASES) for epoch in run["epochs"]])
        curves.plot(times, [epoch["test_accuracy"] for epoch in run["epochs"]], marker="o", label=strategy)
    curves.set(xlabel="seconds of training", ylabel="test accuracy", xlim=(0, None), title=f"{RANKS} ranks, N = 3,231,961")
    curves.grid(alpha=0.3)
    curves.legend()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    demo()
