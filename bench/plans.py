"""Time plans beside calls: one stream by density, many small ones at once, and what memory a sum of a plan takes anew.

    mpiexec -n 2 python bench/plans.py [--json F]
    tools/hosts.sh up 2 1gbit && tools/hosts.sh run -n 2 python bench/plans.py

N = 2**24, float32, uniform positions, other ones on each rank. A sample is 20 sums back to back, the ways in turn; printed are medians over
the samples, of the slowest rank. "values / wire" is the time of the values alone at --rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import click
import numpy as np
from mpi4py import MPI
from ways import bytes_per_second, write_json

import sparseallreduce as sar
from sparseallreduce.streams import memory

SIZE, SUMS = 2**24, 20
SMALL, ENTRIES, MANY = 10_000, 100, 100  # a small stream's size and entries, and how many there are


@click.command()
@click.option("--density", "densities", type=click.FloatRange(0, 1, min_open=True), multiple=True, default=(0.001, 0.01, 0.0625))
@click.option("--samples", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--rate", default="1gbit", show_default=True, help="Of the wire, as tc writes it.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
def plans(densities: tuple[float, ...], samples: int, rate: str, json_path: Path | None) -> None:
    """Print a table of each."""
    comm = MPI.COMM_WORLD
    rows = [of_density(comm, density, samples, bytes_per_second(rate)) for density in densities]
    many = of_many(comm, samples)
    if comm.rank == 0:
        print(f"{comm.size} ranks, N = {SIZE:,}; milliseconds a sum")
        print(f"{'density':>8} {'call':>9} {'plan':>9} {'fixed':>9} {'values / wire':>14} {'made in':>9}   by, new blocks a sum")
        for row in rows:
            shown = " ".join(f"{1e3 * row[name]:{width}.3f}" for name, width in (("call", 9), ("plan", 9), ("fixed", 9), ("wire", 14)))
            print(f"{row['density']:8.2%} {shown} {1e3 * row['made']:9.1f}   {row['algorithm']}, {row['arrays']:.1f}")
        print(f"{MANY} streams of {ENTRIES} entries: " + ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in many.items()))
    write_json(json_path, comm, "plans", {"samples": samples, "rate": rate}, {"densities": rows, "many": many})


def of_density(comm: MPI.Intracomm, density: float, samples: int, rate: float) -> dict[str, Any]:
    """One stream a rank."""
    stream = uniform(comm, SIZE, int(density * SIZE), 0)
    comm.Barrier()
    start = perf_counter()
    fixed = sar.allreduce_init(stream, comm, fixed_indices=True)
    made = perf_counter() - start
    plan, values = sar.allreduce_init(stream, comm), np.array(stream.values)

    def start_and_wait(which: sar.Plan, given: Any) -> Any:
        which.start(given)
        return which.wait()

    ways = {
        "call": lambda: sar.allreduce(stream, comm),
        "plan": lambda: start_and_wait(plan, stream),
        "fixed": lambda: start_and_wait(fixed, values),
    }
    wire = (comm.size - 1) * values.nbytes / rate
    arrays = taken_anew(ways["fixed"])
    return {"density": density, "made": made, "wire": wire, "algorithm": fixed.algorithm, "arrays": arrays, **timed(comm, ways, samples)}


def of_many(comm: MPI.Intracomm, samples: int) -> dict[str, float]:
    """Many small streams: calls, one call of a list, and a plan of the list."""
    streams = [uniform(comm, SMALL, ENTRIES, number) for number in range(MANY)]
    plan, values = sar.allreduce_init(streams, comm, fixed_indices=True), [np.array(stream.values) for stream in streams]

    def planned() -> Any:
        plan.start(values)
        return plan.wait()

    ways = {
        "calls": lambda: [sar.allreduce(stream, comm) for stream in streams],
        "a call of the list": lambda: sar.allreduce(streams, comm),
        "a plan of the list": planned,
    }
    return timed(comm, ways, samples)


def uniform(comm: MPI.Intracomm, size: int, count: int, seed: int) -> sar.SparseStream:
    rng = np.random.default_rng([seed, comm.rank])
    indices = np.unique(rng.integers(0, size, count, dtype=np.uint32))
    return sar.SparseStream(indices, rng.random(len(indices), np.float32), size)


def timed(comm: MPI.Intracomm, ways: dict[str, Callable[[], Any]], samples: int) -> dict[str, float]:
    """Seconds a sum of each way, of the slowest rank."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(samples):
        for name, way in ways.items():
            comm.Barrier()
            start = perf_counter()
            for _ in range(SUMS):
                way()
            seconds[name].append(comm.allreduce(perf_counter() - start, MPI.MAX) / SUMS)
    return {name: statistics.median(each) for name, each in seconds.items()}


def taken_anew(way: Callable[[], Any]) -> float:
    """Blocks of memory of 128 kB or more that come from the system, a sum; those that are used again do not count."""
    for _ in range(3):
        way()
    blocks, take = 0, memory._pool.take

    def counted(size: int) -> Any:
        nonlocal blocks
        blocks += not memory._pool.idle.get(size)
        return take(size)

    with mock.patch.object(memory._pool, "take", counted):
        for _ in range(SUMS):
            way()
    return blocks / SUMS


if __name__ == "__main__":
    plans()
