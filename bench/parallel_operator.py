"""LARS with and without CommLib's parallel tensor operator: mpiexec -n 2 python bench/parallel_operator.py [--json F]

Parameters have the shapes of ResNet-50's 161 (25.6 million elements), all of which have rates of their own, as in CommLib section 4.2. All
ranks hold the same parameters and gradients. Timed are the norms alone, of each layer's weights and gradient, and a step of LARS with
momentum: by each rank for itself, and shared out among the ranks. Both give the same norms, to the bit, which is checked. Both take
turns; a time is that of the slowest rank, and the median over the rounds, or what --quantile says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from mpi4py import MPI
from ways import write_json

from sparseallreduce.torch import LARS

WAYS = {"each rank all": False, "shared out": True}
BLOCKS = ((64, 3), (128, 4), (256, 6), (512, 3))  # channels inside, and how many blocks, of a stage


def shapes() -> list[tuple[int, ...]]:
    """Of ResNet-50's parameters: convolutions, each with a normalisation, and the last layer.

    >>> sum(map(torch.Size.numel, map(torch.Size, shapes()))), len(shapes())
    (25557032, 161)
    """
    found: list[tuple[int, ...]] = []

    def convolution(out: int, into: int, side: int) -> None:
        found.extend([(out, into, side, side), (out,), (out,)])

    convolution(64, 3, 7)
    before = 64
    for inside, blocks in BLOCKS:
        for block in range(blocks):
            convolution(inside, before, 1)
            convolution(inside, inside, 3)
            convolution(4 * inside, inside, 1)
            if block == 0:
                convolution(4 * inside, before, 1)
            before = 4 * inside
    return [*found, (1000, before), (1000,)]


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True, help="Of norms.")
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Of whole steps, in the first rounds.")
@click.option("--quantile", type=click.FloatRange(0, 1), default=0.5, show_default=True, help="Of the times of all rounds.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
@click.pass_context
def compare(context: click.Context, rounds: int, steps: int, quantile: float, json_path: Path | None) -> None:
    """Time the ways, and print a table."""
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    parameters = layers()
    optimizers = {
        name: LARS(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4, adapt=True, comm=comm, parallel=shared)
        for name, shared in WAYS.items()
    }
    pairs: list[Any] = [(each, each.grad) for each in parameters]
    if len({str(each._norms(pairs)) for each in optimizers.values()}) > 1:
        raise click.ClickException("the ways differ, which is a defect of sparseallreduce; please report it")
    taken: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for name in sorted(WAYS, reverse=bool(number % 2)):
            actions: dict[str, Callable[[], Any]] = {"norms": partial(optimizers[name]._norms, pairs)}
            if number < steps + 1:
                actions["step"] = optimizers[name].step
            for what, action in actions.items():
                seconds = timed(comm, action)
                if number:  # the first makes the momenta
                    taken.setdefault((what, name), []).append(seconds)
    found = {f"{what}, {name}": float(np.quantile(times, quantile)) for (what, name), times in taken.items()}
    if comm.rank == 0:
        print(f"{len(shapes())} layers of {sum(map(np.prod, shapes())):,} elements, {comm.size} ranks, ms")
        for what in ("norms", "step"):
            alone, shared = (1e3 * found[f"{what}, {name}"] for name in WAYS)
            print(f"{what:<6} each rank all {alone:8.2f}   shared out {shared:8.2f}   ratio {shared / alone:.2f}", flush=True)
    write_json(json_path, comm, "parallel operator", context.params, {"seconds": found, "ranks": comm.size})


def layers() -> list[torch.nn.Parameter]:
    """The same on all ranks, with gradients."""
    generator, parameters = torch.Generator().manual_seed(0), []
    for shape in shapes():
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator))
        parameter.grad = torch.randn(shape, generator=generator)
        parameters.append(parameter)
    return parameters


def timed(comm: Any, action: Callable[[], Any]) -> float:
    """On the slowest rank."""
    comm.Barrier()
    start = time.perf_counter()
    action()
    return float(comm.allreduce(time.perf_counter() - start, MPI.MAX))


if __name__ == "__main__":
    compare()
