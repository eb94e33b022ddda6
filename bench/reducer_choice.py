"""What "auto" takes among reducers, beside what each takes: layers of many sizes and densities, predicted and measured.

    mpiexec -n 2 python bench/reducer_choice.py [--sizes 1e3,1e5] [--densities 0.01] [--json F]
    tools/hosts.sh up 2 1gbit && tools/hosts.sh run -n 2 python bench/reducer_choice.py

A step is one of error feedback with a dense gradient of N float32, with residuals as after many steps. In every round each reducer takes
some steps, in another order; a time is that of the slowest rank, and the median over all steps, or with --quantile 0.1 what a tenth of them
stay below: where other programs have the cores most of the time, that is a step which had them. "topkdsa" is by the algorithm that is
expected to be the fastest. Of each cell stands what "auto" takes, what that is expected to take and takes, and how much longer that is than
the fastest reducer of that cell.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from mpi4py import MPI
from ways import write_json

import sparseallreduce as sar
from sparseallreduce.reducers.cost import CANDIDATES
from sparseallreduce.reducers.dense import Dense

MAKE = {"topka": sar.TopkA, "gtopk": sar.GTopk, "oktopk": sar.OkTopk, "hitopk": sar.HiTopK}
GOOD = 1.15  # times the fastest
SHIFT, TURNS = 613, 101  # the gradient of a step lies so far beside that of the step before


def numbers(_context: click.Context, _option: click.Parameter, text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


@click.command()
@click.option("--sizes", default="1e3,1e4,1e5,1e6,1e7", callback=numbers, show_default=True, help="N.")
@click.option("--densities", default="0.001,0.01,0.1", callback=numbers, show_default=True, help="k / N.")
@click.option("--seconds", default=3.0, show_default=True, help="For a cell, at least.")
@click.option("--quantile", type=click.FloatRange(0, 1), default=0.5, show_default=True, help="Of the times of all steps.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
@click.pass_context
def compare(
    context: click.Context, sizes: list[float], densities: list[float], seconds: float, quantile: float, json_path: Path | None
) -> None:
    """Measure every cell, and print a table."""
    comm = MPI.COMM_WORLD
    rows = []
    if comm.rank == 0:
        columns = "".join(f" {name + ' ms':>11}" for name in CANDIDATES)
        print(f"{'N':>9} {'density':>8} {'choice':>8} {'expected':>9} {'takes':>8} {'/ best':>7} {'best':>8} |{columns}", flush=True)
    for size in map(int, sizes):
        for density in densities:
            row = cell(comm, size, density, seconds, quantile)
            rows.append(row)
            if comm.rank == 0:
                print(line(row), flush=True)
    if comm.rank == 0:
        good = sum(row["ratio"] <= GOOD for row in rows)
        worst = max(row["ratio"] for row in rows)
        print(f"at most {GOOD} times the fastest in {good} of {len(rows)} cells; at most {worst:.2f} times in all")
    write_json(json_path, comm, "reducer choice", context.params, {"rows": rows})


def cell(comm: MPI.Intracomm, size: int, density: float, seconds: float, quantile: float) -> dict[str, Any]:
    """One size and density."""
    k = max(1, round(density * size))
    explanation = sar.explain_reducer(size, k, comm)
    noise = np.random.default_rng(comm.rank).standard_normal(size + SHIFT * TURNS, np.float32)
    feedbacks = {name: feedback(name, size, k, explanation.predicted["topkdsa"].algorithm, comm.rank) for name in CANDIDATES}
    taken: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    steps, rounds, end = max(1, min(10, 10**6 // size)), 0, time.monotonic() + seconds
    while comm.bcast(rounds < 7 or (time.monotonic() < end and rounds < 200)):
        for name in np.random.default_rng((rounds, size)).permutation(CANDIDATES).tolist():
            for step in range(steps):
                start = SHIFT * ((rounds * steps + step) % TURNS)
                comm.Barrier()
                before = time.perf_counter()
                feedbacks[name].step(noise[start : start + size], comm)
                taken[name].append(time.perf_counter() - before)
        rounds += 1
    skipped = steps * 2  # the first compile, and find thresholds
    slowest = {name: np.max(comm.allgather(times[skipped:]), axis=0) for name, times in taken.items()}
    found = {name: float(np.quantile(times, quantile)) for name, times in slowest.items()}
    best = min(found, key=lambda name: found[name])
    return {
        "size": size,
        "density": density,
        "choice": explanation.choice,
        "best": best,
        "ratio": found[explanation.choice] / found[best],
        "predicted": {name: parts.seconds for name, parts in explanation.predicted.items()},
        "measured": found,
        "steps": len(slowest["dense"]),
    }


def feedback(name: str, size: int, k: int, algorithm: str, rank: int) -> sar.ErrorFeedback:
    """A reducer with a residual as after very many steps: each value a random walk that starts anew when it is chosen."""
    if name == "dense":
        return sar.ErrorFeedback(Dense(size, size))
    made = sar.ErrorFeedback(sar.TopkDSA(size, k, algorithm=algorithm) if name == "topkdsa" else MAKE[name](size, k))
    rng = np.random.default_rng((1, rank))
    made.residual[:] = (rng.random(size, np.float32) - rng.random(size, np.float32)) * np.float32((size / k) ** 0.5)
    return made


def line(row: dict[str, Any]) -> str:
    own, each = row["choice"], "".join(f" {1e3 * row['measured'][name]:11.3f}" for name in CANDIDATES)
    expected, takes = 1e3 * row["predicted"][own], 1e3 * row["measured"][own]
    shown = f"{row['size']:>9,} {row['density']:>8.1%} {own:>8} {expected:>9.3f} {takes:>8.3f} {row['ratio']:>7.2f} {row['best']:>8} |"
    return shown + each


if __name__ == "__main__":
    compare()
