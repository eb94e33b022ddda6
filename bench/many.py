"""Compare a sum of many streams at once with as many sums of one, blocking both.

mpiexec -n 2 python bench/many.py [--streams 100] [--entries 100] [--size 65536] [--width W] [--turns 200] [--json F]
tools/hosts.sh run -n 4 python bench/many.py

Values are float32, at random positions, different ones on each rank. The two ways alternate behind a barrier; a time is that of the
slowest rank. The results are compared before anything is timed. The same list fused by hand to one stream is the third line: what the
reduction itself takes, without putting the list together and cutting the result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from mpi4py import MPI

import sparseallreduce as sar

WARM = 5  # turns that do not count


@click.command()
@click.option("--streams", type=click.IntRange(1), default=100, show_default=True, help="How many.")
@click.option("--entries", type=click.IntRange(0), default=100, show_default=True, help="Of each.")
@click.option("--size", type=click.IntRange(1), default=1 << 16, show_default=True, help="Dimension of each.")
@click.option("--width", type=click.IntRange(1), help="Values in a row; none for plain vectors.")
@click.option("--turns", type=click.IntRange(1), default=200, show_default=True, help="That count.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
def many(streams: int, entries: int, size: int, width: int | None, turns: int, json_path: Path | None) -> None:
    """Print the medians of both ways, and how many times less the list takes."""
    comm = MPI.COMM_WORLD
    generator = np.random.default_rng(comm.rank)
    given = [made(generator, size, min(entries, size), width) for _ in range(streams)]
    joined = np.concatenate([stream.indices.astype(np.uint64) + np.uint64(place * size) for place, stream in enumerate(given)])
    fused = sar.SparseStream(joined, np.concatenate([stream.values for stream in given]), streams * size)
    ways: dict[str, Callable[[], Any]] = {
        f"one list of {streams}": lambda: sar.allreduce(given, comm),
        f"{streams} calls": lambda: [sar.allreduce(stream, comm) for stream in given],
        "fused by hand": lambda: sar.allreduce(fused, comm),
    }
    at_once, one_by_one, _ = (way() for way in ways.values())
    for one, other in zip(at_once, one_by_one, strict=True):
        np.testing.assert_allclose(one.to_dense(), other.to_dense(), rtol=1e-5, atol=1e-6)
    times = {name: 1e6 * seconds for name, seconds in measured(comm, ways, turns).items()}
    if comm.rank == 0:
        first, second, _ = times.values()
        print(f"{comm.size} ranks, {streams} streams of {entries} entries of {size}" + (f", rows of {width}" if width else ""))
        for name, microseconds in times.items():
            print(f"{name:20} {microseconds:10.1f} us {microseconds / streams:8.2f} us a stream")
        print(f"calls / list {second / first:.2f}")
        if json_path is not None:
            given_as = {"streams": streams, "entries": entries, "size": size, "width": width}
            results = {"schema": 1, "command": "many", "ranks": comm.size, **given_as, "microseconds": times, "ratio": second / first}
            json_path.write_text(json.dumps(results, indent=1))


def made(generator: np.random.Generator, size: int, entries: int, width: int | None) -> sar.SparseStream:
    indices = np.sort(generator.choice(size, entries, replace=False)).astype(np.uint32)
    shape = entries if width is None else (entries, width)
    return sar.SparseStream(indices, generator.standard_normal(shape, np.float32), size)


def measured(comm: MPI.Intracomm, ways: dict[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """The median of each, in seconds."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARM + turns):
        for name, way in ways.items():
            comm.Barrier()
            start = time.perf_counter()
            way()
            seconds = time.perf_counter() - start
            if turn >= WARM:
                times[name].append(seconds)
    slowest = np.max(comm.allgather(list(times.values())), axis=0)
    return {name: float(np.median(each)) for name, each in zip(times, slowest, strict=True)}


if __name__ == "__main__":
    many()
