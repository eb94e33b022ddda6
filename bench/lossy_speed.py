"""Time a step of error feedback with each reducer, in multiples of an array copy: mpiexec -n 4 python bench/lossy_speed.py

A step turns a dense gradient of N float32 into an update. It includes the addition to the residual, the selection, the exchange, and
the clearing of what was sent. The unit is the time of a copy of N float32 by one process while the others sleep, measured before and
after every reducer. The goal of this project is at most 11 copies for OkTopk and GTopk at N = 2**24, k = 1 % and
4 ranks on 2 cores; the code of the papers' authors takes about 105 and 97.

Times are those of the slowest rank. "steady" is the median of the steps, "mean" includes those in which OkTopk evaluates its
thresholds.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import sparseallreduce as sar

GOAL = {"oktopk": 11, "gtopk": 11}  # copies
AUTHORS = {"oktopk": 105, "gtopk": 97}
REDUCERS = {reducer.name: reducer for reducer in (sar.OkTopk, sar.GTopk, sar.TopkA, sar.TopkDSA, sar.GaussianK)}
SHIFT = 2**20  # elements by which the gradients of two steps may be shifted: views of one array, nearly independent


def meet(comm: MPI.Intracomm) -> None:
    """A barrier in which waiting ranks leave the cores to others."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def copy_time(comm: MPI.Intracomm, source: NDArray[Any], target: NDArray[Any]) -> float:
    """Of one copy by one process."""
    meet(comm)
    taken = min(seconds(lambda: np.copyto(target, source)) for _ in range(5)) if comm.rank == 0 else 0.0
    meet(comm)
    return float(comm.bcast(taken))


def step_times(comm: MPI.Intracomm, feedback: sar.ErrorFeedback, values: NDArray[Any], steps: int, seed: int) -> list[float]:
    """Of each step, on the slowest rank."""
    times, size = [], len(feedback.residual)
    for start in np.random.default_rng(seed).integers(0, SHIFT, steps).tolist():
        meet(comm)
        taken = seconds(lambda gradient=values[start : start + size]: feedback.step(gradient, comm))
        times.append(comm.allreduce(taken, MPI.MAX))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=2**24, help="N (default: %(default)s)")
    parser.add_argument("--density", type=float, default=0.01, help="k / N (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="steps timed (default: %(default)s)")
    parser.add_argument("--before", type=int, default=48, help="steps before, in which residuals grow (default: %(default)s)")
    parser.add_argument("--reducers", default=",".join(REDUCERS), help="names, separated by commas (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="print where rank 0 spends its time")
    arguments = parser.parse_args()
    comm, size = MPI.COMM_WORLD, arguments.size
    k = max(1, int(size * arguments.density))
    rng = np.random.default_rng(comm.rank)
    values = rng.standard_normal(size + SHIFT, np.float32)
    target = np.empty(size, np.float32)
    if comm.rank == 0:
        print(f"N = {size}, k = {k}, P = {comm.size}; times in copies of N float32")
        print(f"{'reducer':<10} {'copy ms':>8} {'steady':>7} {'mean':>7} {'most':>7} {'goal':>5} {'authors':>8}")
    for name in arguments.reducers.split(","):
        feedback = sar.ErrorFeedback(REDUCERS[name](size, k))
        copies = [copy_time(comm, values[:size], target)]
        step_times(comm, feedback, values, arguments.before, seed=1)
        profile = cProfile.Profile()
        if arguments.profile:
            profile.enable()
        times = step_times(comm, feedback, values, arguments.steps, seed=2)
        profile.disable()
        copies.append(copy_time(comm, values[:size], target))
        if comm.rank == 0:
            copy = statistics.mean(copies)
            steady, mean, most = (function(times) / copy for function in (statistics.median, statistics.mean, max))
            print(
                f"{name:<10} {copy * 1e3:>8.2f} {steady:>7.1f} {mean:>7.1f} {most:>7.1f} {GOAL.get(name, '-'):>5} "
                f"{AUTHORS.get(name, '-'):>8}",
                flush=True,
            )
            if arguments.profile:
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
