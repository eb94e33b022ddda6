"""Print the test accuracy of every model with every strategy on 1, 2 and 4 ranks, in one table.

A step takes the same number of samples for any number of ranks. So the rows of a model differ only by rounding, and by the stale
gradients of overlapped and ps-async.

    python bench/accuracy.py TRAIN.svm TEST.svm --features 3231961 --json accuracy.json -- --learning-rate 1 --epochs 8
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from demo import ROOT, mpiexec

from sparseallreduce.linear import MODELS, STRATEGIES


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("train", type=click.Path(exists=True, path_type=Path))
@click.argument("test", type=click.Path(exists=True, path_type=Path))
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--strategies", default=",".join(STRATEGIES), show_default=True)
@click.option("--ranks", default="1,2,4", show_default=True)
@click.option("--batch", type=click.IntRange(min=4), default=100, show_default=True, help="Samples a step, of all ranks.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
def bench(
    train: Path, test: Path, options: tuple[str, ...], models: str, strategies: str, ranks: str, batch: int, json_path: Path | None
) -> None:
    """Train, with further OPTIONS of `sparseallreduce train`, and print a table."""
    sizes = [int(size) for size in ranks.split(",")]
    print(f"{'model':10} {'strategy':12}" + "".join(f"  P = {size}" for size in sizes), flush=True)
    found: dict[str, Any] = {}
    for model in models.split(","):
        for strategy in strategies.split(","):
            row = [accuracy(train, test, model, strategy, size, batch, options) for size in sizes]
            found[f"{model} {strategy}"] = dict(zip(sizes, row))
            print(f"{model:10} {strategy:12}" + "".join(f"  {share:.4f}" for share in row), flush=True)
    if json_path is not None:
        json_path.write_text(json.dumps({"options": options, "batch": batch, "test_accuracy": found}, indent=2) + "\n")


def accuracy(train: Path, test: Path, model: str, strategy: str, ranks: int, batch: int, options: tuple[str, ...]) -> float:
    """After the last epoch of a run. A parameter server that is a rank of its own holds no samples."""
    workers = ranks - 1 if strategy.startswith("ps-") and ranks > 1 else ranks
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [mpiexec(), "-n", str(ranks), sys.executable, "-m", "sparseallreduce", "train", str(train), "--test", str(test)]
        command += ["--model", model, "--strategy", strategy, "--batch-size", str(max(1, batch // workers))]
        command += ["--json", str(report), *options]
        done = subprocess.run(command, cwd=ROOT, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            raise click.ClickException(done.stderr.strip().splitlines()[-1])
        return float(json.loads(report.read_text())["epochs"][-1]["test_accuracy"])


if __name__ == "__main__":
    bench()
