"""What local steps leave of communication: steps of AdamW alone, by DistributedDataParallel over gloo and by local steps, on two hosts."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
import torch
from torch import nn

from sparseallreduce.torch import DiLoCo, SparseLoCo

from .data import Samples
from .local import LocalSetting
from .models import count, make
from .overlap import ALONE, GLOO, gloo
from .training import loss_of

__all__ = ["measure_local", "print_local_table"]

STEPS = 30  # of a way in a round: whole numbers of all H
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def measure_local(width: int, pieces: int, rounds: int, out: Path) -> None:
    """Time rounds of every way in turn; collective. Rank 0 writes the seconds of the slower rank, and what it has sent on the wire."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    data = LocalSetting("dense").data
    rows = np.arange(STEPS * pieces).reshape(STEPS, pieces) + comm.rank * STEPS * pieces
    times: dict[str, list[float]] = {}
    sent: dict[str, list[int]] = {}
    with gloo(comm):
        ways = ways_of(width, data.classes, comm)
        for _ in range(rounds + 1):
            for name, (model, optimizer) in ways.items():
                comm.Barrier()
                start, before = perf_counter(), sent_bytes()
                for own in rows:
                    optimizer.zero_grad()
                    loss_of(model, Samples(data.train.x[own], data.train.y[own])).backward()
                    optimizer.step()
                times.setdefault(name, []).append(comm.allreduce(perf_counter() - start, MPI.MAX) / STEPS)
                sent.setdefault(name, []).append((sent_bytes() - before) // STEPS)
    if comm.rank == 0:
        size = count(make("transformer", data.classes, 0, width))
        of_rounds = {name: [each[1:], sent[name][1:]] for name, each in times.items()}  # the first prepares
        out.write_text(json.dumps({"parameters": size, "tokens": pieces * data.train.x.shape[1], "ways": of_rounds}))


def ways_of(width: int, classes: int, comm: Any) -> dict[str, tuple[nn.Module, Any]]:
    """Each way's name, its model and its optimiser."""

    def new() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make("transformer", classes, 0, width)
        return model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    ways: dict[str, tuple[nn.Module, Any]] = {ALONE: new()}
    model = nn.parallel.DistributedDataParallel(make("transformer", classes, 0, width))
    ways[GLOO] = model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    for H, density in ((15, 0.05), (30, 0.02)):
        for name in ("DiLoCo", f"SparseLoCo {density:.0%}"):
            model, inner = new()
            local = DiLoCo(inner, H, comm=comm) if name == "DiLoCo" else SparseLoCo(inner, H, density, comm=comm)
            ways[f"{name}, H = {H}"] = model, local
    return ways


def sent_bytes() -> int:
    """Return how many bytes this host has sent; 0 if it is none of its own."""
    return int(SENT.read_text()) if SENT.exists() else 0


def print_local_table(found: dict[str, Any]) -> None:
    """Print a line a way: medians of a step, bytes a token, and the share of the step that is not computing."""
    alone, tokens = float(np.median(found["ways"][ALONE][0])), found["tokens"]
    click.echo(f"{found['parameters']:,} parameters, {tokens} tokens a rank and step")
    click.echo("| way | ms a step | us a token | communication | bytes a token | of DDP |")
    click.echo("| --- | --- | --- | --- | --- | --- |")
    of_ddp = float(np.median(found["ways"][GLOO][1]))
    for name, (seconds, sent) in found["ways"].items():
        step, wire = float(np.median(seconds)), float(np.median(sent))
        part = f"1/{of_ddp / wire:,.0f}" if wire else ""
        share = max(0.0, 1 - alone / step)
        click.echo(f"| {name} | {1e3 * step:.1f} | {1e6 * step / tokens:,.0f} | {share:.1%} | {wire / tokens:,.1f} | {part} |")
