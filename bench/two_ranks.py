"""Compare two ranks with one: seconds of training until the test accuracy is within a margin of the best.

    python bench/two_ranks.py TRAIN TEST [--options "" --options "--solver sgd"] [--rounds 5] [--margin 0.001] [--json F]

Three runs of `train` take turns: one rank, two ranks, and one rank while another run of one rank is at work. The last says what the
machine allows: where two runs that have nothing to do with each other slow each other down, two ranks cannot take half the time of one.
A fourth run, of two ranks, averages dense weights by MPI once a pass (`bench/dense_sums.py`).
Seconds are those of the epochs, and of picking a rate, without evaluation, reading and compiling. The aim is the best accuracy that any of
the runs comes to, less the margin. Printed are medians over the rounds, and the ratios of two ranks to one: alone, and beside another run.
Passes after the first, which do not depend on where the aim happens to lie, are compared too.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import click
from demo import ROOT, mpiexec

DENSE = "dense"
RUNS = {"one": (1, 1), "two": (2, 1), "beside": (1, 2), DENSE: (2, 1)}  # ranks, and how many such runs at once


class Curve(NamedTuple):
    """Of one run: seconds and test accuracy after every epoch."""

    seconds: list[float]
    accuracies: list[float]

    def reaches(self, aim: float) -> float | None:
        """Seconds until the accuracy is first as high."""
        pairs = zip(self.seconds, self.accuracies, strict=True)
        return next((seconds for seconds, accuracy in pairs if accuracy >= aim), None)

    def a_pass(self) -> float:
        """Seconds of a pass after the first."""
        return (self.seconds[-1] - self.seconds[0]) / max(1, len(self.seconds) - 1)


@click.command()
@click.argument("training", metavar="TRAIN", type=click.Path(exists=True, path_type=Path))
@click.argument("test", type=click.Path(exists=True, path_type=Path))
@click.option("--options", multiple=True, default=("", "--solver sgd"), help="Options of `train`; a table for each.  ['', '--solver sgd']")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--margin", type=click.FloatRange(0), default=0.001, show_default=True, help="What the aim is below the best accuracy.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
def two_ranks(training: Path, test: Path, options: tuple[str, ...], rounds: int, margin: float, json_path: Path | None) -> None:
    """Print the seconds of one and of two ranks."""
    found = {}
    for each in options:
        for ranks in (1, 2):  # compiles
            trained(program("one", each), training, test, ranks, 1)
        curves: dict[str, list[Curve]] = {name: [] for name in RUNS}
        for _ in range(rounds):
            for name, (ranks, at_once) in RUNS.items():
                curves[name] += trained(program(name, each), training, test, ranks, at_once)
        aim = max(accuracy for name in RUNS if name != DENSE for curve in curves[name] for accuracy in curve.accuracies) - margin
        found[each] = shown(f"{training.name}, train {each}".rstrip(), curves, aim)
    if json_path is not None:
        json_path.write_text(json.dumps({"schema": 1, "command": "two_ranks", "results": found}, indent=1) + "\n")


def shown(title: str, curves: dict[str, list[Curve]], aim: float) -> dict[str, object]:
    """Print one table, and return its figures."""
    print(f"{title}: seconds to {aim:.4f}, seconds of a pass after the first, accuracies by epoch", flush=True)
    reached, passes = {}, {}
    for name, of_run in curves.items():
        times = [seconds for curve in of_run if (seconds := curve.reaches(aim)) is not None]
        reached[name] = statistics.median(times) if len(times) == len(of_run) else None
        passes[name] = statistics.median(curve.a_pass() for curve in of_run)
        accuracies = " ".join(f"{accuracy:.4f}" for accuracy in of_run[0].accuracies[:10])
        print(f"  {name:7} {'never' if reached[name] is None else f'{reached[name]:.4f}':>8} {passes[name]:8.4f}   {accuracies}")
    for name in ("one", "beside"):
        ratios = [of["two"] / of[name] if of["two"] and of[name] else None for of in (reached, passes)]
        print(f"  two / {name}: " + ", ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios), flush=True)
    return {"aim": aim, "seconds": reached, "pass": passes, "curves": {name: list(map(list, of)) for name, of in curves.items()}}


def program(name: str, options: str) -> tuple[list[str], list[str]]:
    """What Python runs for a kind of run, and the options of it."""
    if name == DENSE:
        return [str(Path(__file__).parent / "dense_sums.py")], []
    return ["-m", "sparseallreduce", "train"], options.split()


def trained(program: tuple[list[str], list[str]], training: Path, test: Path, ranks: int, at_once: int) -> list[Curve]:
    """Train on so many ranks, several times at once."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"{number}.json" for number in range(at_once)]
        launcher = [mpiexec(), "-n", str(ranks)] if ranks > 1 else []
        (module, options), of_train = program, "-m" in program[0]
        command = [*launcher, sys.executable, *module, str(training), *(["--test"] if of_train else []), str(test), *options]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "env": environment}
        running = [subprocess.Popen([*command, "--json", str(report)], cwd=ROOT, **quiet) for report in reports]
        codes = [run.wait() for run in running]
        if any(codes):
            raise click.ClickException(f"{' '.join(command)} failed")
        return [curve_of(json.loads(report.read_text())) for report in reports]


def curve_of(report: dict[str, Any]) -> Curve:
    """The curve of a report."""
    seconds, total, epochs = [], (report["results"]["picked"] or {"seconds": 0.0})["seconds"], report["epochs"]
    for epoch in epochs:
        total += epoch["seconds"]["total"] - epoch["seconds"]["evaluate"]
        seconds.append(total)
    return Curve(seconds, [epoch["test_accuracy"] for epoch in epochs])


if __name__ == "__main__":
    two_ranks()
