"""Local steps beside sums in each step: loss, bytes and seconds of SparseLoCo, DiLoCo, local SGD, Ok-Topk and dense AdamW.

A transformer of characters is trained on texts of Python's by every way on the same tokens. The ranks are replicas in one process,
whose sums the simulator makes, to the bit as over MPI. Seconds are those of computing here, one rank a core, and what the simulator says of
the sums between slow hosts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
import torch
from torch import nn

import sparseallreduce as sar
from sparseallreduce.optim import DensityWarmup, simulated_local_step
from sparseallreduce.streams.selection import ChunkTopK
from sparseallreduce.torch import DiLoCo, LocalSGD, SparseLoCo

from .data import TEXTS, Data, Samples, shares
from .models import count, make
from .training import WARMUP, loss_of, records

__all__ = ["NETWORKS", "WAYS", "LocalSetting", "make_local_table"]

#: What is compared: the name of a way, and its steps between two sums.
WAYS = (
    ("dense", 1),
    ("sparseloco", 30),
    ("diloco", 30),
    ("localsgd", 30),
    ("sparseloco", 15),
    ("diloco", 15),
    ("localsgd", 15),
    ("oktopk", 1),
)
NETWORKS = {
    "2 hosts, 1 Gbit/s": (2, sar.Network(latency=5e-5, bandwidth=125e6)),
    "8 hosts, 100 Mbit/s": (8, sar.Network(latency=1e-3, bandwidth=12.5e6)),
}
POINTS = 4  # at which a model is evaluated
LOWEST_RATE, WARM_UP = 0.1, 0.05  # of the schedule: the last rate as a share of the highest, and the share of steps in which it grows
OKTOPK_DENSITY = 0.01


@dataclass(frozen=True)
class LocalSetting:
    """What a training is about; the key of its record."""

    way: str
    H: int = 1
    density: float = 0.02  # of SparseLoCo
    beta: float = 0.95
    outer_lr: float = 0.0  # 0: the way's own
    delay: int = 0
    fragments: int = 1
    warmup: int = 0  # steps with dense sums before the local ones
    steps: int = 960
    pieces: int = 2  # a rank and step
    length: int = 32
    rate: float = 2e-3
    width: int = 56
    text: str = "documentation"
    ranks: int = 4
    seed: int = 0

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def title(self) -> str:
        """What a line of the table is about."""
        if self.way != "sparseloco":
            return self.way
        others = {name: getattr(self, name) for name in ("beta", "outer_lr", "delay", "fragments", "warmup")}
        more = [f"{name} {value:g}" for name, value in others.items() if value != getattr(LocalSetting, name)]
        return ", ".join([f"sparseloco {self.density:g}", *more])

    def share_of_rate(self, step: int) -> float:
        """Return the rate of a step as a share of the highest: it grows, and falls as a cosine."""
        warm_up = WARM_UP * self.steps
        if step < warm_up:
            return (step + 1) / warm_up
        return LOWEST_RATE + (1 - LOWEST_RATE) * (1 + math.cos(math.pi * (step - warm_up) / (self.steps - warm_up))) / 2

    def local(self, inner: torch.optim.Optimizer) -> Any:
        """Return an optimiser of local steps."""
        how = {"delay": self.delay, "fragments": self.fragments, "comm": sar.SERIAL}
        outer = {"outer_lr": self.outer_lr} if self.outer_lr else {}
        if self.way == "sparseloco":
            return SparseLoCo(inner, self.H, self.density, self.beta, **outer, **how)
        return DiLoCo(inner, self.H, **outer, **how) if self.way == "diloco" else LocalSGD(inner, self.H, **how)

    def train(self) -> dict[str, Any]:
        """Return the record of this training."""
        torch.set_num_threads(1)
        run: Any = {"dense": EveryStep, "oktopk": SparseEveryStep}.get(self.way, InTurns)(self)
        curve: list[dict[str, float]] = []
        start = perf_counter()
        for step, rows in enumerate(self._rows()):
            run.step(rows, self.rate * self.share_of_rate(step))
            if (step + 1) % max(1, self.steps // POINTS) == 0:
                curve.append({"step": step + 1, "loss": test_loss(run.model, run.data.test)})
        result = {"parameters": count(run.model), "tokens": self.steps * self.pieces * self.length, "curve": curve}
        return asdict(self) | result | {"seconds": perf_counter() - start}

    @property
    def data(self) -> Data:
        """What is learned, and tested with."""
        return TEXTS[self.text](self.length)

    def _rows(self) -> Iterator[Any]:
        """Yield the samples of every step, a row a rank."""
        samples, batch, step, epoch = len(self.data.train.y), self.pieces * self.ranks, 0, 0
        while True:
            for rows in shares(samples, batch, 1000 * self.seed + epoch, 0, 1):
                if step == self.steps:
                    return
                yield rows.reshape(self.ranks, self.pieces)
                step += 1
            epoch += 1


class EveryStep:
    """AdamW by the mean of the gradients of all ranks: a step of one model by all their samples."""

    def __init__(self, setting: LocalSetting) -> None:
        self.setting, self.data = setting, setting.data
        self.model = make("transformer", self.data.classes, setting.seed, setting.width)
        self.inner = torch.optim.AdamW(self.model.parameters(), setting.rate, fused=True)

    def step(self, rows: Any, rate: float) -> None:
        compute(self.model, self.data.train, rows.reshape(-1))
        self.inner.param_groups[0]["lr"] = rate
        self.inner.step()


class SparseEveryStep(EveryStep):
    """AdamW by Ok-Topk's sum of the gradients; those of biases and normalisation layers are summed whole."""

    def __init__(self, setting: LocalSetting) -> None:
        super().__init__(setting)
        self.density = DensityWarmup(OKTOPK_DENSITY, max(1, setting.steps // 40), WARMUP)
        self.large = [parameter for parameter in self.model.parameters() if parameter.ndim > 1]
        self.small = [parameter for parameter in self.model.parameters() if parameter.ndim <= 1]
        size = sum(parameter.numel() for parameter in self.large)
        self.feedbacks = [sar.ErrorFeedback(sar.OkTopk(size, size)) for _ in range(setting.ranks)]
        self.steps = 0

    def step(self, rows: Any, rate: float) -> None:
        size, ranks = self.feedbacks[0].reducer.size, self.setting.ranks
        k = round(self.density(self.steps) * size)
        gradients, small = [], torch.zeros(sum(parameter.numel() for parameter in self.small))
        for feedback, own in zip(self.feedbacks, rows):
            if feedback.reducer.k != k:
                feedback.reducer = sar.OkTopk(size, k)
            compute(self.model, self.data.train, own)
            gradients.append(torch.cat([each.grad.reshape(-1) for each in self.large]).numpy())  # type: ignore[union-attr]
            small += torch.cat([each.grad.reshape(-1) for each in self.small]) / ranks  # type: ignore[union-attr]
        out = sar.simulate(gradients, self.feedbacks)
        give(self.large, torch.from_numpy(out.outputs[0].to_dense()))
        give(self.small, small)
        self.inner.param_groups[0]["lr"] = rate
        self.inner.step()
        self.steps += 1


class InTurns:
    """Replicas that take steps alone, and whose changes are summed; they begin with what dense sums have made of one in a warm-up."""

    def __init__(self, setting: LocalSetting) -> None:
        self.setting, self.data = setting, setting.data
        self.warmup = EveryStep(setting)
        self.model, self.steps = self.warmup.model, 0
        self.models: list[nn.Module] = []
        self.optimizers: list[Any] = []

    def step(self, rows: Any, rate: float) -> None:
        self.steps += 1
        if self.steps <= self.setting.warmup:
            return self.warmup.step(rows, rate)
        if not self.models:
            self._begin()
        for model, optimizer, own in zip(self.models, self.optimizers, rows):
            compute(model, self.data.train, own)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.inner.step()
        simulated_local_step([optimizer.local for optimizer in self.optimizers])

    def _begin(self) -> None:
        for _ in range(self.setting.ranks):
            model = deepcopy(self.model)
            inner = torch.optim.AdamW(model.parameters(), self.setting.rate, fused=True)
            inner.load_state_dict(deepcopy(self.warmup.inner.state_dict()))
            self.models.append(model)
            self.optimizers.append(self.setting.local(inner))
        self.model = self.models[0]


def compute(model: nn.Module, train: Samples, rows: Any) -> None:
    """Compute the gradients of some samples."""
    model.zero_grad()
    loss_of(model, Samples(train.x[rows], train.y[rows])).backward()


def give(parameters: Sequence[nn.Parameter], gradient: torch.Tensor) -> None:
    """Set the gradients of parameters from one vector."""
    for parameter, part in zip(parameters, gradient.split([parameter.numel() for parameter in parameters])):
        parameter.grad = part.reshape(parameter.shape)


def test_loss(model: nn.Module, test: Samples) -> float:
    """Return the mean cross-entropy of a character in all pieces to test with."""
    with torch.no_grad():
        losses = [float(loss_of(model, Samples(x, y))) * len(x) for x, y in zip(test.x.split(128), test.y.split(128))]
    return sum(losses) / len(test.x)


def sum_costs(setting: LocalSetting, parameters: int, ranks: int, network: sar.Network) -> tuple[float, float]:
    """Return the simulated seconds of one sum of this way, and the bytes that a rank sends for it."""
    rng = np.random.default_rng(0)
    changes = [rng.standard_normal(parameters).astype(np.float32) for _ in range(ranks)]
    if setting.way in ("dense", "diloco", "localsgd"):
        out = sar.simulate([sar.SparseStream.from_dense(each) for each in changes], algorithm="dense", network=network)
        return float(out.time), float(out.bytes_sent.mean())
    if setting.way == "oktopk":
        reducers: list[Any] = [sar.OkTopk(parameters, max(1, round(OKTOPK_DENSITY * parameters))) for _ in range(ranks)]
    else:
        k = max(1, round(setting.density * parameters))
        reducers = [sar.TopkA(parameters, k, selector=partial(ChunkTopK, chunk=4096), value_codec="qsgd2") for _ in range(ranks)]
    feedbacks = [sar.ErrorFeedback(reducer) for reducer in reducers]
    for _ in range(3):  # behind the first, which finds thresholds
        out = sar.simulate(changes, algorithm=feedbacks, network=network)
    return float(out.time), float(out.bytes_sent.mean())


def step_seconds(setting: LocalSetting) -> float:
    """Return the seconds in which a rank computes a step and applies it: the tenth part of 40 steps that are quickest."""
    run = EveryStep(setting)
    times = []
    for _ in range(40):
        start = perf_counter()
        run.step(np.arange(setting.pieces), setting.rate)
        times.append(perf_counter() - start)
    return float(np.percentile(times, 10))


def make_local_table(wanted: Sequence[LocalSetting], path: Path, seconds: float) -> None:
    """Train what is missing, for so many seconds, and print what there is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    end = perf_counter() + seconds
    for setting in wanted:
        if setting.key in records(path, LocalSetting) or perf_counter() > end:
            continue
        record = setting.train()
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        loss, took = record["curve"][-1]["loss"], record["seconds"]
        click.echo(f"{setting.title}, H = {setting.H}, seed {setting.seed}: loss {loss:.4f}, {took:.0f} s", err=True)
    found = records(path, LocalSetting)
    cells: dict[tuple[str, int], list[LocalSetting]] = {}
    for setting in wanted:
        if setting.key in found:
            cells.setdefault((setting.title, setting.H), []).append(setting)
    if len(found) < len(wanted):
        click.echo(f"{sum(map(len, cells.values()))} of {len(wanted)} trainings are there; call again for the others", err=True)
    if cells:
        print_table(cells, found)


def print_table(cells: dict[tuple[str, int], list[LocalSetting]], found: dict[str, dict[str, Any]]) -> None:
    """Print a line a way: its loss, its bytes, and its time between slow hosts."""
    first = next(iter(cells.values()))[0]
    dense = {each.seed: found[each.key] for (way, _), cell in cells.items() if way == "dense" for each in cell}
    parameters, computing = found[first.key]["parameters"], step_seconds(first)
    size = f"{parameters:,} parameters, {found[first.key]['tokens']:,} tokens a rank, P = {first.ranks}"
    click.echo(f"{size}; a step takes {1e3 * computing:.1f} ms of computing")
    networks = " | ".join(f"us a token, {name} (sums)" for name in NETWORKS)
    click.echo(f"| way | H | seeds | loss | beside dense | bytes a token | a part of dense | {networks} |")
    click.echo("| --- | --- | --- | --- | --- | --- | --- |" + " --- |" * len(NETWORKS))
    slow = NETWORKS["2 hosts, 1 Gbit/s"][1]
    base = sum_costs(LocalSetting("dense"), parameters, first.ranks, slow)[1]
    for (title, H), cell in cells.items():
        rows = [found[each.key] for each in cell]
        losses = [row["curve"][-1]["loss"] for row in rows]
        gaps = [100 * (row["curve"][-1]["loss"] / dense[row["seed"]]["curve"][-1]["loss"] - 1) for row in rows if row["seed"] in dense]
        sent = sum_costs(cell[0], parameters, first.ranks, slow)[1] / H
        token = f"{sent / (first.pieces * first.length):,.1f} | 1/{base / sent:,.0f}"
        times = []
        for ranks, network in NETWORKS.values():
            sums = sum_costs(cell[0], parameters, ranks, network)[0] / H
            times.append(f"{1e6 * (computing + sums) / (first.pieces * first.length):,.0f} ({sums / (computing + sums):.1%})")
        spread = f"{np.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})"
        beside = f"{np.mean(gaps):+.2f} %" if gaps else ""
        click.echo(f"| {title} | {H} | {len(rows)} | {spread} | {beside} | {token} | {' | '.join(times)} |")
