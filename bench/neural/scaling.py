"""The time of a step by P ranks: computing and selecting as measured here on one core, communication on a virtual network.

What ranks send are the accumulators of training: gradients and residuals of different samples on every rank. In the alpha-beta model a
vector that is s times as long takes as long as this one on a network of 1 / s of the bandwidth, but for headers and for where values lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from time import process_time
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce.streams.selection import DoubleSampling, ExactTopK, Gaussian, MSTopK, ThresholdReuse

from .data import Samples, data_of
from .models import count, make
from .training import RATES, loss_of

__all__ = ["ARIES", "ETHERNET", "METHODS", "Step", "accumulators", "compute_seconds", "communication_seconds", "select_seconds", "step_of"]

Array = NDArray[Any]

#: Piz Daint's interconnect, of which the papers give no figures: about what is published of it.
ARIES = sar.Network(1.5e-6, 10e9)
#: As gTop-k section IV-C has measured it: 0.436 ms, and 3.6e-5 ms for a value of 4 bytes.
ETHERNET = sar.Network(0.436e-3, 4 / 3.6e-8)

PERIOD = 32  # steps between two evaluations of a threshold (Ok-Topk section 5.2)
#: What makes the reducers of a method, and its selector; those of Ok-Topk section 5.
METHODS: dict[str, tuple[Callable[[int, int], Any] | None, Callable[[int], Any] | None]] = {
    "Dense": (None, None),
    "TopkA": (sar.TopkA, ExactTopK),
    "TopkDSA": (sar.TopkDSA, ExactTopK),
    "gTopk": (sar.GTopk, ExactTopK),
    "Gaussiank": (sar.GaussianK, Gaussian),
    "Ok-Topk": (sar.OkTopk, lambda k: ThresholdReuse(k, period=PERIOD)),
    "MSTopK": (sar.TopkA, MSTopK),
}
SELECTORS: dict[str, Callable[[int], Any]] = {"exact top k": ExactTopK, "double sampling (DGC)": DoubleSampling, "MSTopK": MSTopK}


class Step(NamedTuple):
    """Seconds of a step."""

    sparsification: float
    communication: float
    computation: float

    @property
    def total(self) -> float:
        return sum(self)

    def overlapped(self) -> Step:
        """As if all of the communication that fits were hidden behind back-propagation, which is two thirds of computing."""
        return self._replace(communication=max(0.0, self.communication - 2 / 3 * self.computation))


@cache
def trained(model: str, samples: int, width: int) -> torch.nn.Module:
    """A model after some steps of SGD, on which gradients are neither those of the beginning nor of the end."""
    torch.set_num_threads(1)
    data = data_of(model)
    net = make(model, data.classes, 0, width)
    rate, momentum = RATES[model]
    optimizer = torch.optim.SGD(net.parameters(), lr=rate / 2, momentum=momentum)
    for number in range(20):
        optimizer.zero_grad()
        loss_of(net, batch(model, 32, number)).backward()
        optimizer.step()
    return net


def batch(model: str, samples: int, number: int) -> Samples:
    """Some training samples, others for every number."""
    train = data_of(model).train
    rows = np.random.default_rng((7, number)).choice(len(train.y), samples, replace=False)
    return Samples(train.x[rows], train.y[rows])


def gradient(net: torch.nn.Module, samples: Samples) -> Array:
    net.zero_grad()
    loss_of(net, samples).backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in net.parameters()]).numpy()


@cache
def compute_seconds(model: str, samples: int, width: int = 32) -> float:
    """Of loss and gradients of so many samples, on one core: the median of 15, in time of the processor."""
    net = trained(model, samples, width)
    times = []
    for number in range(15):
        given, start = batch(model, samples, number), process_time()
        gradient(net, given)
        times.append(process_time() - start)
    return float(np.median(times))


def accumulators(model: str, samples: int, ranks: int, density: float, width: int = 32) -> list[Array]:
    """What each rank selects from."""
    return [accumulator(model, samples, rank, density, width) for rank in range(ranks)]


@cache
def accumulator(model: str, samples: int, rank: int, density: float, width: int, rounds: int = 3) -> Array:
    """The residual of some gradients of a rank's own, of which the largest values have been sent, and one more gradient."""
    net = trained(model, samples, width)
    select = ExactTopK(max(1, round(density * count(net))))
    residual = np.zeros(count(net), np.float32)
    for number in range(rounds):
        residual[select(residual).indices] = 0
        residual += gradient(net, batch(model, samples, 100 + rank * rounds + number))
    return residual


def select_seconds(make_selector: Callable[[int], Any], arrays: Sequence[Array], k: int, calls: int = PERIOD) -> float:
    """Of a selection from these in turn, on one core, in time of the processor: the mean of a period, behind a call that prepares."""
    select = make_selector(k)
    select(arrays[0])
    select = make_selector(k)
    times = []
    for number in range(calls):
        start = process_time()
        select(arrays[number % len(arrays)])
        times.append(process_time() - start)
    return float(np.mean(times))


def communication_seconds(method: str, arrays: Sequence[Array], density: float, network: sar.Network) -> float:
    """Of a step's sum, on the network; with reducers that have periods the mean of one. Additions take no time."""
    size = len(arrays[0])
    make_reducer, _ = METHODS[method]
    if make_reducer is None:
        return float(sar.simulate([sar.SparseStream.from_dense(array) for array in arrays], "dense", network).time)
    k = max(1, round(density * size))
    options: dict[str, Any] = {"threshold_period": PERIOD} if method == "Ok-Topk" else {}
    reducers = [make_reducer(size, k, **options) for _ in arrays]
    first = float(sar.simulate(arrays, reducers, network).time)
    if method != "Ok-Topk":
        return first
    return (first + (PERIOD - 1) * float(sar.simulate(arrays, reducers, network).time)) / PERIOD


@cache
def selection_of(method: str, model: str, samples: int, density: float, width: int) -> float:
    """Seconds of a method's selection from an accumulator of this model."""
    _, selector = METHODS[method]
    arrays = accumulators(model, samples, 4, density, width)  # of several ranks, as those of several steps differ, too
    return 0.0 if selector is None else select_seconds(selector, arrays, max(1, round(density * len(arrays[0]))))


def step_of(
    method: str, model: str, samples: int, ranks: int, density: float, network: sar.Network, longer: float = 1.0, width: int = 32
) -> Step:
    """The step of a method; ``longer`` is by how much the vector is longer than the parameters of the model."""
    arrays = accumulators(model, samples, ranks, density, width)
    network = network._replace(bandwidth=network.bandwidth / longer)
    communication = communication_seconds(method, arrays, density, network)
    return Step(selection_of(method, model, samples, density, width), communication, compute_seconds(model, samples, width))
