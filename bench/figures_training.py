"""Repeat figures 5.8 to 5.12 of the sparse allreduce thesis (section 5.3), as far as one machine allows.

    python bench/figures_training.py --figure 5.8            logistic regression on URL: seconds an epoch by algorithm
    python bench/figures_training.py --figure 5.9            the same on Webspam
    python bench/figures_training.py --figure 5.10           the same on two networks: shared memory, and what --mpiexec names
    python bench/figures_training.py --figure 5.11           an SVM on Webspam
    python bench/figures_training.py --figure 5.12           how often an index occurs in the gradients of an epoch's iterations

The data sets are generated. They are like the thesis's in dimension, non-zeros and frequencies (`sparseallreduce generate`), and have
fewer samples unless --full is given. A batch has 1000 samples a rank, as in the thesis. The thesis has 8 to 128 nodes; here all ranks
are on one machine. If there are more ranks than cores, they share them, and the picture names their number. Pictures and JSON go to
`bench/results`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce.cli.report import environment
from sparseallreduce.linear import Dataset, batches, generate, load
from sparseallreduce.runtime.hosts import usable_cores

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
PHASES = {"compute": "tab:gray", "communicate": "tab:red", "update": "tab:blue"}
#: Strategy and algorithm of every bar; the first is what the others are compared with.
BARS = (
    ("dense", "auto"),
    ("sparse", "ssar_recursive_doubling"),
    ("sparse", "ssar_split_allgather"),
    ("sparse", "dsar_split_allgather"),
    ("sparse", "auto"),
)


@dataclass(frozen=True)
class Set:
    """A data set: its kind, samples of the reduced and of the full one, and its dimension."""

    kind: str
    reduced: int
    full: int
    features: int


URL = Set("url-like", 60_000, 2_396_130, 3_231_961)
WEBSPAM = Set("webspam-like", 20_000, 350_000, 16_609_143)
#: Model and data set of every figure of epoch times.
FIGURES = {"5.8": ("logistic", URL), "5.9": ("logistic", WEBSPAM), "5.10": ("logistic", URL), "5.11": ("svm", WEBSPAM)}


@click.command()
@click.option("--figure", "name", type=click.Choice([*FIGURES, "5.12"]), required=True)
@click.option("--ranks", default="2,4", show_default=True, help="Numbers of ranks, separated by commas.")
@click.option("--epochs", type=click.IntRange(min=1), default=3, show_default=True, help="Of which the median is taken.")
@click.option("--batch-size", type=click.IntRange(min=1), default=1000, show_default=True, help="Samples a rank and step.")
@click.option("--samples", type=click.IntRange(min=1), help="By default 60,000 of URL and 20,000 of Webspam.")
@click.option("--full", is_flag=True, help="As many samples as the thesis has.")
@click.option("--mpiexec", "launchers", multiple=True, help="How to start ranks, once a network for 5.10; by default the mpiexec here.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=ROOT / "bench" / "results", help="Folder.")
def figures(
    name: str, ranks: str, epochs: int, batch_size: int, samples: int | None, full: bool, launchers: tuple[str, ...], out: Path
) -> None:
    """Measure and draw one figure."""
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"figure-{name}"
    numbers = [int(number) for number in ranks.split(",")]
    if name == "5.12":
        counts = {chosen.kind: occurrences(chosen, samples_of(chosen, samples, full), numbers, batch_size) for chosen in (URL, WEBSPAM)}
        figure = draw_occurrences(counts, batch_size)
        results: Any = {kind: {number: summary(each) for number, each in by_ranks.items()} for kind, by_ranks in counts.items()}
    else:
        model, chosen = FIGURES[name]
        count = samples_of(chosen, samples, full)
        data = data_file(chosen, count)
        starts = [launcher.split() for launcher in launchers] or [[default_mpiexec()]]
        results = [
            epoch_times(model, chosen, data, start, number, epochs, batch_size) for start in starts for number in numbers
        ]
        figure = draw_times(results, f"{model} on {chosen.kind}, {count:,} samples, N = {chosen.features:,}, batch {batch_size:,} x P")
    FigureCanvasAgg(figure)
    figure.savefig(f"{target}.png", dpi=150)
    report = {"figure": name, "environment": environment(sar.SERIAL), "epochs": epochs, "batch_size": batch_size, "results": results}
    Path(f"{target}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"{target}.png, {target}.json")


def samples_of(chosen: Set, samples: int | None, full: bool) -> int:
    return samples or (chosen.full if full else chosen.reduced)


def data_file(chosen: Set, samples: int) -> Path:
    """The data set in `data/`: generated unless it is there from before."""
    path = DATA / f"{chosen.kind}-{samples}.csr"
    if not path.exists():
        print(f"generating {path.name}", flush=True)
        path.parent.mkdir(exist_ok=True)
        generate(chosen.kind, path, samples=samples, features=chosen.features)
    return path


def default_mpiexec() -> str:
    found = shutil.which("mpiexec", path=Path(sys.executable).parent) or shutil.which("mpiexec")
    if found is None:
        raise click.ClickException("there is no mpiexec: `make setup` installs one")
    return found


def epoch_times(
    model: str, chosen: Set, data: Path, start: Sequence[str], ranks: int, epochs: int, batch_size: int
) -> dict[str, Any]:
    """Seconds of an epoch by phase for every bar, median over the epochs, and bytes sent by all ranks."""
    rows = []
    for strategy, algorithm in BARS:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            command = [*start, "-n", str(ranks), sys.executable, "-m", "sparseallreduce", "train", str(data), "--model", model]
            command += ["--strategy", strategy, "--algorithm", algorithm, "--epochs", str(epochs)]
            command += ["--batch-size", str(batch_size), "--learning-rate", "0.1", "--json", str(report)]
            run = subprocess.run(command, cwd=ROOT, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if run.returncode != 0:
                raise click.ClickException(f"a training run failed: {' '.join(command)}: {run.stderr.strip()[-500:]}")
            passes = json.loads(report.read_text())["epochs"]
        seconds = {phase: float(np.median([each["seconds"][phase] for each in passes])) for phase in PHASES}
        rows.append({"strategy": strategy, "algorithm": algorithm, "seconds": seconds, "bytes_sent": passes[-1]["bytes_sent"]})
        times = ", ".join(f"{phase} {each:.3f}" for phase, each in seconds.items())
        gain = sum(rows[0]["seconds"].values()) / sum(seconds.values())
        print(f"P = {ranks}, {label(rows[-1])}: {times} s; {gain:.1f} times as fast as dense", flush=True)
    return {"launcher": " ".join(start), "ranks": ranks, "cores": usable_cores(), "densities": passes[-1]["total_density"], "bars": rows}


def label(bar: dict[str, Any]) -> str:
    return bar["strategy"] if bar["strategy"] == "dense" else bar["algorithm"]


def draw_times(results: list[dict[str, Any]], title: str) -> Figure:
    """A panel for every number of ranks and network, stacked bars as in figures 5.8 to 5.11."""
    figure = Figure(figsize=(max(8, 5 * len(results)), 5), layout="constrained")
    figure.suptitle(title)
    for axes, result in zip(np.ravel(figure.subplots(1, len(results))), results):
        bars = result["bars"]
        bottom = np.zeros(len(bars))
        for phase, colour in PHASES.items():
            heights = np.array([bar["seconds"][phase] for bar in bars])
            axes.bar(range(len(bars)), heights, bottom=bottom, color=colour, label=phase)
            bottom += heights
        for place, height in enumerate(bottom):
            axes.annotate(f"{bottom[0] / height:.1f}x", (place, height), (0, 2), textcoords="offset points", ha="center")
        crowded = f", {result['cores']} cores shared" if result["ranks"] > result["cores"] else ""
        axes.set(ylabel="seconds an epoch, median", title=f"{result['ranks']} ranks{crowded}; {Path(result['launcher'].split()[0]).name}")
        axes.set_xticks(range(len(bars)), [label(bar) for bar in bars], rotation=25, ha="right")
        axes.legend()
    return figure


def occurrences(chosen: Set, samples: int, numbers: Sequence[int], batch_size: int) -> dict[int, NDArray[np.int64]]:
    """For every number of ranks, in how many of an epoch's iterations each index has a non-zero in the sum, sorted downwards."""
    data, _ = load(data_file(chosen, samples), comm=sar.SERIAL)
    return {number: sorted_counts(data, batch_size * number) for number in numbers}


def sorted_counts(data: Dataset, batch: int) -> NDArray[np.int64]:
    counts = np.zeros(data.features, np.int64)
    for rows, _ in batches(data, batch, (0, 1)):
        parts = [data.indices[data.indptr[row] : data.indptr[row + 1]] for row in rows]
        counts[np.unique(np.concatenate(parts))] += 1
    return np.sort(counts[counts > 0])[::-1]


def draw_occurrences(counts: dict[str, dict[int, NDArray[np.int64]]], batch_size: int) -> Figure:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, (kind, by_ranks) in zip(figure.subplots(1, 2), counts.items()):
        for number, each in by_ranks.items():
            axes.plot(np.arange(1, len(each) + 1), each, label=f"{number} ranks x {batch_size:,} samples, {each[0]} iterations at most")
        axes.set(xscale="log", yscale="log", xlabel="indices, by frequency", ylabel="iterations that an index occurs in", title=kind)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right")
    return figure


def summary(counts: NDArray[np.int64]) -> dict[str, Any]:
    """What a curve comes to: indices that occur at all, in every iteration, in a tenth of them; and a hundred points of it."""
    most = int(counts[0])
    places = np.unique(np.geomspace(1, len(counts), 100).astype(np.int64)) - 1
    return {
        "indices": len(counts),
        "in_every_iteration": int((counts == most).sum()),
        "in_a_tenth": int((counts >= most / 10).sum()),
        "in_one": int((counts == 1).sum()),
        "points": [[int(place) + 1, int(counts[place])] for place in places],
    }


if __name__ == "__main__":
    figures()
