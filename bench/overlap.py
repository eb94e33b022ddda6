"""Time an epoch with the overlapped and with the blocking strategy, on a network where communication takes a third and more.

Two hosts of `tools/hosts.sh` (which needs root) train with one strategy after the other, one rank each, on data like the URL set of the
thesis. The two share this machine's cores with the kernel's network code, which real hosts would not. The time of an epoch is that of
training, without the evaluation after it. The first epoch of a run is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import numpy as np
from demo import ROOT, data_set, mpiexec

HOSTS = ROOT / "tools" / "hosts.sh"
STRATEGIES = ("sparse", "overlapped")
PHASES = ("compute", "communicate", "wait", "update")


@click.command()
@click.option("--rate", default="1gbit", show_default=True, help="Of each host's link, as tc writes it.")
@click.option("--samples", type=click.IntRange(min=100), default=40_000, show_default=True, help="Of the training set.")
@click.option("--batch-size", type=click.IntRange(min=1), default=500, show_default=True, help="Samples a rank and step.")
@click.option("--epochs", type=click.IntRange(min=2), default=6, show_default=True, help="Of a run.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of either strategy, in turn.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
def overlap(rate: str, samples: int, batch_size: int, epochs: int, repeats: int, json_path: Path | None) -> None:
    """Print the median time of an epoch by phase for both strategies, and their ratio."""
    train, test = data_set(samples)
    options = ["--test", str(test), "--features", "3231961", "--batch-size", str(batch_size), "--epochs", str(epochs)]
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    hosts("up", "2", rate)
    try:
        for _ in range(repeats):
            for strategy in STRATEGIES:
                runs[strategy] += trained(train, [*options, "--learning-rate", "2", "--strategy", strategy])
    finally:
        hosts("down")
    results = {strategy: summary(records) for strategy, records in runs.items()}
    print_table(results, f"2 hosts, {rate}, {samples:,} samples, {batch_size} a rank and step, {repeats} runs of {epochs} epochs")
    if json_path is not None:
        json_path.write_text(json.dumps({"rate": rate, "samples": samples, "batch_size": batch_size, "results": results}, indent=1))


def hosts(*arguments: str) -> None:
    """Call the tool that makes the hosts."""
    if subprocess.run([HOSTS, *arguments], check=False, stdin=subprocess.DEVNULL).returncode != 0:
        raise click.ClickException(f"{HOSTS.relative_to(ROOT)} {' '.join(arguments)} failed")


def trained(train: Path, options: list[str]) -> list[dict[str, Any]]:
    """The records of all epochs but the first."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [HOSTS, "run", "-n", "2", sys.executable, "-m", "sparseallreduce", "train", train, *options, "--json", report]
        environment = os.environ | {"MPIEXEC": mpiexec(), "PYTHONPATH": str(ROOT)}
        run = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, env=environment, capture_output=True, text=True)
        if run.returncode != 0:
            raise click.ClickException(f"the training run failed: {run.stderr[-2000:]}")
        return list(json.loads(report.read_text())["epochs"][1:])


def summary(records: list[dict[str, Any]]) -> dict[str, float]:
    """Median seconds by phase and in all, their range, and the last accuracy."""
    phases = {phase: float(np.median([record["seconds"].get(phase, 0.0) for record in records])) for phase in PHASES}
    totals = [record["seconds"]["total"] - record["seconds"]["evaluate"] for record in records]
    bounds = {"epoch": float(np.median(totals)), "fastest": min(totals), "slowest": max(totals)}
    return {**phases, **bounds, "test_accuracy": records[-1]["test_accuracy"]}


def print_table(results: dict[str, dict[str, float]], title: str) -> None:
    """Both strategies, the share that communication takes in the blocking one, and how far from the best there could be."""
    columns = "".join(f"{phase:>12}" for phase in (*PHASES, "epoch"))
    print(f"\n{title}\n{'seconds an epoch':17}{columns}{'range':>15}{'accuracy':>10}")
    for strategy, row in results.items():
        times = "".join(f"{row[phase]:12.3f}" for phase in (*PHASES, "epoch"))
        print(f"{strategy:17}{times}{row['fastest']:8.3f}-{row['slowest']:.3f} {row['test_accuracy']:9.4f}")
    blocking, overlapped = (results[strategy] for strategy in STRATEGIES)
    ratio = overlapped["epoch"] / blocking["epoch"]
    best = max(blocking["communicate"], blocking["compute"] + blocking["update"]) / blocking["epoch"]
    print(f"communication takes {blocking['communicate'] / blocking['epoch']:.0%} of the blocking epoch")
    print(f"overlapped / blocking: {ratio:.2f}; were the shorter of the two parts hidden whole: {best:.2f}")


if __name__ == "__main__":
    overlap()
