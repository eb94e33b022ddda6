"""Sums by two trees of this library in turn, in one run: how long the one takes beside the other, and beside itself.

    python bench/in_turn.py OLD NEW [--ranks 2,3,4,8] [--rounds 5] [--points small,large] [--json F]

OLD and NEW are folders, each with a checkout and its .venv. Each round starts OLD, NEW and OLD again for every number of ranks, and a point
is the median of its sums there. Printed are the medians over the rounds of NEW / OLD, and of OLD / OLD as the control.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

# Name, size, entries, whether it blocks, and sums that are timed.
SMALL = [
    (f"k={k} {how}", 1 << 20, k, how == "blocking", 2000 if k < 5000 else 600)
    for k in (10, 1000, 10000)
    for how in ("blocking", "waited")
]
LARGE = [(f"{100 * share:g} % blocking", 1 << 24, int(share * (1 << 24)), True, 25) for share in (0.001, 0.01, 0.0625)]
POINTS = {"small": SMALL, "large": LARGE}
STREAMS = 5  # that are summed in turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--ranks", default="2,3,4,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--points", default="small,large")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ratios: list[float] = []
    controls: list[float] = []
    results = []
    print(f"{'P':>2} {'point':22} {'old us':>10} {'new us':>10} {'new / old':>10} {'old / old':>10}")
    for ranks in map(int, options.ranks.split(",")):
        trees = options.old, options.new, options.old
        rounds = [[timed(tree, ranks, options.points) for tree in trees] for _ in range(options.rounds)]
        for point in rounds[0][0]:
            old, new, again = ([each[place][point] for each in rounds] for place in range(3))
            before = [(first + second) / 2 for first, second in zip(old, again)]
            ratio = statistics.median(now / then for now, then in zip(new, before))
            control = statistics.median(second / first for first, second in zip(old, again))
            ratios.append(ratio)
            controls.append(control)
            medians = {"old": statistics.median(before), "new": statistics.median(new)}
            results.append({"ranks": ranks, "point": point, **medians, "ratio": ratio, "control": control})
            numbers = f"{results[-1]['old']:10.1f} {results[-1]['new']:10.1f} {ratio:10.3f} {control:10.3f}"
            print(f"{ranks:2} {point:22} {numbers}", flush=True)
    print(f"geometric mean of the ratios {mean(ratios):.3f}, of the control {mean(controls):.3f}")
    if options.json:
        options.json.write_text(json.dumps({"schema": 1, "command": "in_turn", "results": results}, indent=1))


def mean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def timed(tree: Path, ranks: int, points: str) -> dict[str, float]:
    """Medians in microseconds, by the names of points."""
    binaries = tree.resolve() / ".venv/bin"
    command = [binaries / "mpiexec", "-n", str(ranks), binaries / "python", Path(__file__).resolve(), "--worker", points]
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, cwd=tree, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def work(points: str) -> None:
    """Time the points on this rank, which prints them if it is the first."""
    import numpy as np
    from mpi4py import MPI

    import sparseallreduce as sar

    comm = MPI.COMM_WORLD
    found: dict[str, float] = {}
    for name, size, entries, blocking, repeats in [point for each in points.split(",") for point in POINTS[each]]:
        rng = np.random.default_rng(comm.rank)
        streams: list[Any] = []
        for _ in range(STREAMS):
            few = entries < 20_000
            indices = rng.choice(size, entries, False) if few else np.flatnonzero(rng.random(size, np.float32) < entries / size)
            indices = np.sort(indices).astype(np.uint32)
            streams.append(sar.SparseStream(indices, rng.standard_normal(len(indices), np.float32), size))
        for stream in streams:
            sar.allreduce(stream, comm)
            sar.iallreduce(stream, comm).wait()
        times = []
        comm.Barrier()
        for number in range(repeats):
            stream = streams[number % STREAMS]
            start = perf_counter()
            if blocking:
                sar.allreduce(stream, comm)
            else:
                sar.iallreduce(stream, comm).wait()
            times.append(perf_counter() - start)
        found[name] = 1e6 * statistics.median(times)
    if comm.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2])
    else:
        main()
