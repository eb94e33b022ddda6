"""Compare "auto" with making the same stream dense and calling ``Allreduce`` on it, at many sizes and densities.

mpiexec -n 2 python bench/never_slower.py [--power 20 --power 22 ...] [--density 0.01 ...] [--seconds 0.3] [--json F]

Values are float32, at uniformly random positions, different ones on each rank. The two ways alternate behind a barrier, in every order.
A time is that of the slowest rank. A point holds if the median of "auto" is at most 1.05 of the dense way's, where that takes over a
millisecond, and at most 50 microseconds more below. An exclamation mark stands behind what does not hold. On a machine that others use
too, lower quartiles are more reliable: the points that hold by them are counted as well.

The dense way runs a second time in each round, as a control. The points at which it does not hold against itself are the misses that the
machine alone accounts for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import cycle, permutations
from pathlib import Path

import click
import numpy as np
from mpi4py import MPI

import sparseallreduce as sar

POWERS = (10, 12, 14, 16, 18, 20, 22, 24)
DENSITIES = (0.001, 0.01, 0.1, 0.3, 0.5, 1.0)
LEAST, MOST = 9, 300  # turns of a point
WARM = 6  # turns that do not count


@click.command()
@click.option("--power", "powers", type=click.IntRange(0, 31), multiple=True, default=POWERS, show_default=True, help="Of two, for N.")
@click.option(
    "--density", "densities", type=click.FloatRange(0, 1), multiple=True, default=DENSITIES, show_default=True, help="Share of N."
)
@click.option("--seconds", type=click.FloatRange(0), default=0.3, show_default=True, help="About, for each point.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
def never_slower(powers: tuple[int, ...], densities: tuple[float, ...], seconds: float, json_path: Path | None) -> None:
    """Print medians and lower quartiles of both ways for each N and density, the control beside them, and how many points hold."""
    comm, results = MPI.COMM_WORLD, []
    for power in powers:
        for density in densities:
            result = {"size": 2**power, "density": density, **measured(comm, 2**power, density, seconds)}
            results.append(result)
            if comm.rank == 0:
                print_row(result, header=len(results) == 1)
    if comm.rank == 0:
        library = " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split())
        print(f"{comm.size} ranks, {library}: of {len(results)} points {held(results, 'auto')}; of the control {held(results, 'control')}")
        if json_path is not None:
            json_path.write_text(json.dumps({"ranks": comm.size, "library": library, "points": results}, indent=1))


def measured(comm: MPI.Intracomm, size: int, density: float, seconds: float) -> dict[str, float]:
    """Median and lower quartile of both ways and the control, in seconds."""
    generator = np.random.default_rng([comm.rank, size])
    positions = np.sort(generator.permutation(size)[: max(1, round(density * size))])
    stream = sar.SparseStream(positions, generator.standard_normal(len(positions), np.float32), size)
    total = np.empty(size, np.float32)

    def dense() -> None:
        comm.Allreduce(stream.to_dense(), total)

    ways = {"auto": lambda: sar.allreduce(stream, comm), "dense": dense, "control": dense}
    orders = cycle(permutations(ways))  # since what was done before matters: memory that it gave back, for one

    def turn() -> list[float]:
        times = {name: timed(comm, ways[name]) for name in next(orders)}
        return [times[name] for name in ways]

    warm = [turn() for _ in range(WARM)]
    repeats = comm.bcast(int(np.clip(seconds / sum(warm[-1]), LEAST, MOST)))
    turns = [turn() for _ in range(repeats)]
    slowest = np.empty((repeats, len(ways)))
    comm.Allreduce(np.array(turns), slowest, MPI.MAX)
    median, quartile = np.median(slowest, axis=0), np.quantile(slowest, 0.25, axis=0)
    return {
        f"{name}_{figure}": float(values[number])
        for figure, values in (("median", median), ("quartile", quartile))
        for number, name in enumerate(ways)
    }


def timed(comm: MPI.Intracomm, way: Callable[[], object]) -> float:
    """Seconds of this rank."""
    comm.Barrier()
    begin = time.perf_counter()
    way()
    return time.perf_counter() - begin


def holds(auto: float, dense: float) -> bool:
    """Whether the first time is as near to the second as is promised."""
    return auto <= 1.05 * dense if dense > 1e-3 else auto <= dense + 50e-6


def held(results: list[dict[str, float]], way: str) -> str:
    """How many points hold of a way."""
    counts = {name: sum(holds(result[f"{way}_{name}"], result[f"dense_{name}"]) for result in results) for name in ("median", "quartile")}
    return f"{counts['median']} hold by medians, {counts['quartile']} by quartiles"


def print_row(result: dict[str, float], header: bool) -> None:
    """A line of the table, in microseconds, that says where the point does not hold."""
    if header:
        print(f"{'N':>9}{'density':>10}{'auto':>12}{'dense':>12}{'ratio':>8}{'quartiles':>20}{'ratio':>8}{'control':>12}{'quartiles':>12}")
    line = f"{result['size']:9}{result['density']:10.2%}"
    for figure, width in (("median", 12), ("quartile", 10)):
        auto, dense = result[f"auto_{figure}"], result[f"dense_{figure}"]
        line += f"{auto * 1e6:{width}.0f}{dense * 1e6:{width}.0f}{auto / dense:8.3f}{' ' if holds(auto, dense) else '!'}"
    for figure in ("median", "quartile"):
        control, dense = result[f"control_{figure}"], result[f"dense_{figure}"]
        line += f"{control / dense:11.3f}{' ' if holds(control, dense) else '!'}"
    print(line, flush=True)


if __name__ == "__main__":
    never_slower()
