"""One training by the ranks of a communicator; the records of many, as JSON lines, of which those that are there are not repeated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import torch
from demo import mpiexec
from torch import nn

import sparseallreduce as sar
from sparseallreduce.optim import DensityWarmup
from sparseallreduce.torch import distributed

from . import ROOT
from .data import Samples, data_of, shares
from .models import count, make

__all__ = ["OPTIMISERS", "Setting", "recommended", "recorded", "records", "train"]

OPTIMISERS = {
    "dense": "DenseSGD",
    "oktopk": "OkTopkSGD",
    "gtopk": "GTopkSGD",
    "topk": "TopKSGD",
    "approximate-topk": "ApproximateTopKSGD",
    "mstopk": "MSTopKSGD",
    "hitopk": "HiTopKSGD",
}
#: Rate and momentum of each model, with which dense SGD does well.
RATES = {"vgg": (0.02, 0.9), "resnet": (0.05, 0.9), "perceptron": (0.05, 0.9), "lstm": (1.0, 0.9), "transformer": (0.3, 0.9)}
#: The same for ApproximateTopKSGD: less momentum, as a value waits for its turn besides, and what the model bears with that.
APPROXIMATE = {"vgg": (0.2, 0.0), "resnet": (0.5, 0.0), "perceptron": (0.5, 0.0), "lstm": (10.0, 0.0), "transformer": (1.2, 0.5)}
TEXT = ("lstm", "transformer")
EPOCHS = {"vgg": 10, "resnet": 10, "perceptron": 20, "lstm": 20, "transformer": 64}  # after which dense SGD has learned what it can
PIECES = 512  # of a text, of which it is learned
WARMUP = (0.25, 0.0725, 0.015, 0.004)  # densities of gTop-k section IV-B
POINTS = 8  # at which a model is evaluated


@dataclass(frozen=True)
class Setting:
    """What a training is about; the key of its record."""

    model: str
    optimiser: str
    density: float = 0.01
    ranks: int = 4
    batch: int = 0  # samples a step, of all ranks; 0: 64 images, or 16 pieces of a text
    epochs: int = 0  # 0: as many as the model has by default
    most_samples: int = 0  # of the training set; 0: all, and of a text PIECES
    warm_up: bool = False  # whether the density goes down to its value in the first tenth of the steps
    correction: bool = False  # whether momentum is that of a rank's own gradients, before values are selected
    adam: bool = False  # Adam instead of SGD
    width: int = 32
    seed: int = 0

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def train_samples(self) -> int:
        present = len(data_of(self.model).train.y)
        return min(present, self.most_samples or (PIECES if self.model in TEXT else present))

    @property
    def step_samples(self) -> int:
        """Samples of a step, of all ranks."""
        return self.batch or (16 if self.model in TEXT else 64)

    @property
    def steps(self) -> int:
        return (self.epochs or EPOCHS[self.model]) * (self.train_samples // self.step_samples)


def recommended(optimiser: str, adam: bool = False) -> dict[str, Any]:
    """What docs/lossy.md says to take with an optimiser that chooses values: a warm-up, and momentum before values are selected."""
    if optimiser == "dense":
        return {}
    return {"warm_up": True, "correction": not adam and optimiser != "approximate-topk"}


def optimizer_of(setting: Setting, model: nn.Module, comm: Any) -> torch.optim.Optimizer:
    """The optimiser, with the settings of dense SGD; but for those of the approximate one (docs/lossy.md)."""
    rate, momentum = RATES[setting.model]
    density: Any = setting.density
    if setting.warm_up:
        density = DensityWarmup(density, max(1, setting.steps // 40), tuple(max(density, share) for share in WARMUP))
    if setting.adam:
        return distributed(torch.optim.Adam, setting.optimiser)(model.parameters(), lr=2e-3, density=density, comm=comm)
    options: dict[str, Any] = {}
    if setting.optimiser == "approximate-topk":
        rate, momentum = APPROXIMATE[setting.model]
        options = {"seed": setting.seed, "bucket": None}
    elif setting.correction:
        options = {"momentum_correction": True, "momentum_masking": False}
    kind = distributed(torch.optim.SGD, setting.optimiser)
    return kind(model.parameters(), lr=rate, momentum=momentum, density=density, comm=comm, **options)


def train(setting: Setting, comm: Any) -> dict[str, Any]:
    """Train, and return what became of it on all ranks; collective."""
    torch.set_num_threads(1)
    data = data_of(setting.model)
    model = make(setting.model, data.classes, setting.seed, setting.width)
    optimizer = optimizer_of(setting, model, comm)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], max(2, setting.steps), pct_start=0.1, cycle_momentum=False
    )
    curve: list[dict[str, float]] = []
    compute = communicate = 0.0
    losses: list[float] = []
    every = max(1, setting.steps // POINTS)
    step = 0
    with sar.trace() as traffic:
        for epoch in range(setting.epochs or EPOCHS[setting.model]):
            seed = 1000 * setting.seed + epoch
            for rows in shares(setting.train_samples, setting.step_samples, seed, comm.rank, comm.size):
                start = perf_counter()
                optimizer.zero_grad()
                loss = loss_of(model, Samples(data.train.x[rows], data.train.y[rows]))
                loss.backward()
                middle = perf_counter()
                optimizer.step()
                scheduler.step()
                end = perf_counter()
                compute, communicate = compute + middle - start, communicate + end - middle
                losses.append(loss.item())
                step += 1
                if step % every == 0 or step == setting.steps:
                    point = {"step": step, "seconds": compute + communicate, "bytes": traffic.bytes_sent}
                    curve.append(point | evaluated(model, data.test, losses, comm))
                    losses = []
    optimizer.check_replicas()
    everyone = (compute, communicate, traffic.bytes_sent)
    of_ranks = [everyone] if comm.size == 1 else comm.allgather(everyone)
    computes, communicates, sent = (sum(each) / len(of_ranks) for each in zip(*of_ranks))
    return {
        **asdict(setting),
        "parameters": count(model),
        "steps": step,
        "compute": computes,
        "communicate": communicates,
        "bytes_sent": sent,  # a rank
        "curve": curve,
    }


def loss_of(model: nn.Module, samples: Samples) -> torch.Tensor:
    """The mean cross-entropy of an image or a character."""
    scores = model(samples.x)
    return nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), samples.y.reshape(-1))


def evaluated(model: nn.Module, test: Samples, losses: Sequence[float], comm: Any) -> dict[str, float]:
    """The mean of the training losses of all ranks since the last time, and loss and accuracy of the test samples, by rank 0."""
    own = sum(losses) / len(losses)
    mean = own if comm.size == 1 else comm.allreduce(own) / comm.size
    found = {"train_loss": mean}
    if comm.rank == 0:
        model.eval()
        with torch.no_grad():
            scores = torch.cat([model(x) for x in test.x.split(128)]).flatten(0, -2)
            labels = test.y.reshape(-1)
            found["loss"] = float(nn.functional.cross_entropy(scores, labels))
            found["accuracy"] = float((scores.argmax(1) == labels).float().mean())
        model.train()
    if comm.size > 1:
        found = comm.bcast(found)
    return found


def records(path: Path, kind: Any = Setting) -> dict[str, dict[str, Any]]:
    """Return the records that are there, by the keys of their settings; a last line that was cut is left out."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            setting = kind(**{name: record[name] for name in kind.__dataclass_fields__})
        except (ValueError, KeyError):
            continue
        if record["steps"] == setting.steps:  # with the model's number of epochs as it is now
            found[setting.key] = record
    return found


def recorded(settings: Iterable[Setting], path: Path, seconds: float = float("inf")) -> list[dict[str, Any]]:
    """The records of these settings, trained under mpiexec as far as they are not there.

    Raises
    ------
    ClickException
        If a training failed, or time is over: those which are done are kept, and the same call goes on.
    """
    wanted = list(dict.fromkeys(settings))
    end = perf_counter() + seconds
    for ranks in sorted({setting.ranks for setting in wanted}):
        found = records(path)
        missing = [setting for setting in wanted if setting.ranks == ranks and setting.key not in found]
        if missing and perf_counter() < end:
            launch(missing, path, end - perf_counter())
    found = records(path)
    left = [setting for setting in wanted if setting.key not in found]
    if left:
        raise click.ClickException(f"{len(wanted) - len(left)} of {len(wanted)} trainings are there; call again for the others")
    return [found[setting.key] for setting in wanted]


def launch(settings: Sequence[Setting], path: Path, seconds: float) -> None:
    """Train one after the other in one launch; none begins after so many seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("a") as file:  # behind a line that was cut
            file.write("\n")
    with tempfile.TemporaryDirectory() as folder:
        order = Path(folder) / "settings.json"
        order.write_text(json.dumps({"settings": [asdict(setting) for setting in settings], "path": str(path), "seconds": seconds}))
        command = [mpiexec(), "-n", str(settings[0].ranks), sys.executable, "-m", "bench.neural", "ranks", str(order)]
        run = subprocess.run(command, cwd=ROOT, check=False, stdin=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)})
    if run.returncode != 0:
        raise click.ClickException("a training failed")


def of_ranks(order: Path) -> None:
    """What each rank of such a launch does."""
    from mpi4py import MPI

    comm, start, given = MPI.COMM_WORLD, perf_counter(), json.loads(order.read_text())
    limit = float(given["seconds"])
    for each in given["settings"]:
        if comm.bcast(perf_counter() - start > limit):
            return
        setting = Setting(**each)
        record = train(setting, comm)
        if comm.rank == 0:
            with Path(given["path"]).open("a") as file:
                file.write(json.dumps(record) + "\n")
            last = record["curve"][-1]
            what = f"{setting.model}, {setting.optimiser}, density {setting.density:g}, P = {comm.size}, seed {setting.seed}"
            took = f"{record['compute']:.1f} + {record['communicate']:.1f} s, {record['bytes_sent'] / 1e6:.1f} MB"
            print(f"{what}: loss {last['loss']:.4f}, accuracy {last['accuracy']:.4f}; {took}", flush=True)
