"""How much of a step's communication back-propagation hides: ways to sum gradients in turn, between two hosts, a rank each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
import torch
from torch import nn
from ways import address_of, free_port, on_own_hosts

from sparseallreduce.torch import DenseSGD, GTopkSGD, OkTopkSGD, TopKSGD

from .data import Samples, data_of, shares
from .models import count, make
from .training import loss_of

__all__ = ["measure", "print_table"]

ALONE, GLOO = "computing alone", "DDP over gloo"
SETTINGS: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "check_every": 0}
KINDS = {"Ok-Topk": OkTopkSGD, "top k": TopKSGD, "gTop-k": GTopkSGD, "dense": DenseSGD}
#: Of these each kind has one bucket for all, one for every layer, or several that are summed while others are computed.
FORMS = {
    "packed": {"bucket_bytes": 2**30},
    "by layer": {"bucket_bytes": 1},
    "hooked": {"bucket_bytes": 4 * 2**20, "overlap": True},
}

Take = Callable[[Samples], None]


def measure(model: str, width: int, density: float, samples: int, steps: int, wanted: list[str], out: Path) -> None:
    """Time so many steps of every way, in turn; collective. Rank 0 writes the seconds of the slower rank, and bytes a step."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    data = data_of(model)
    rows = np.resize(shares(len(data.train.y), samples * comm.size, 0, comm.rank, comm.size), (steps + 3, samples))
    with gloo(comm):
        ways = dict(ways_of(lambda: make(model, data.classes, 0, width), density, comm))
        ways = {name: take for name, take in ways.items() if not wanted or name in (ALONE, GLOO) or name in wanted}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for own in rows:
            chosen = Samples(data.train.x[own], data.train.y[own])
            for name, take in ways.items():
                comm.Barrier()
                start = perf_counter()
                take(chosen)
                times[name].append(comm.allreduce(perf_counter() - start, MPI.MAX))
    if comm.rank == 0:
        size = count(make(model, data.classes, 0, width))
        out.write_text(json.dumps({"parameters": size, "times": {name: each[3:] for name, each in times.items()}}))


def ways_of(new: Callable[[], nn.Module], density: float, comm: Any) -> Iterator[tuple[str, Take]]:
    """Each way's name, and what makes a step; each has a model of its own."""

    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Take:
        def take(samples: Samples) -> None:
            optimizer.zero_grad()
            loss_of(model, samples).backward()
            optimizer.step()

        return take

    model = new()
    yield ALONE, step_of(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    if torch.distributed.is_initialized():
        model = nn.parallel.DistributedDataParallel(new())
        yield GLOO, step_of(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    for kind, optimizer in KINDS.items():
        for form, options in FORMS.items():
            model = new()
            yield f"{kind}, {form}", step_of(model, optimizer(model.parameters(), density=density, comm=comm, **SETTINGS, **options))


@contextmanager
def gloo(comm: Any) -> Iterator[None]:
    """A process group of these ranks over their own network."""
    device = "eth0" if on_own_hosts(comm) else "lo"
    os.environ["GLOO_SOCKET_IFNAME"] = device
    address = comm.bcast(f"tcp://{address_of(device)}:{free_port()}")
    torch.distributed.init_process_group("gloo", init_method=address, rank=comm.rank, world_size=comm.size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def print_table(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Medians of a step, and what of it is not computing; of hooked ways also what share of the packed one's communication they hide."""
    medians = {name: float(np.median(times)) for name, times in found["times"].items()}
    alone = medians[ALONE]
    table = {}
    click.echo(f"{found['parameters']:,} parameters; computing alone takes {1e3 * alone:.1f} ms a step")
    click.echo(f"{'way':22}{'step':>10}{'(least)':>10}{'not hidden':>12}{'of DDP':>9}{'hidden':>9}")
    for name, median in medians.items():
        packed = medians.get(name.replace("hooked", "packed"), median)
        row = {"step": median, "least": min(found["times"][name]), "not_hidden": median - alone}
        row["of_ddp"] = row["not_hidden"] / (medians[GLOO] - alone) if GLOO in medians else float("nan")
        row["hidden"] = 1 - row["not_hidden"] / (packed - alone) if packed > alone else float("nan")
        table[name] = row
        hidden = f"{row['hidden']:9.0%}" if "hooked" in name else ""
        times = f"{1e3 * median:10.1f}{1e3 * row['least']:10.1f}{1e3 * row['not_hidden']:12.1f}"
        click.echo(f"{name:22}{times}{row['of_ddp']:9.2f}{hidden}")
    return table
