"""Bytes a parameter that each optimiser of sparseallreduce.torch keeps: python bench/optimiser_memory.py

Measured from what is there after three steps, not from what should be: every tensor and array of 1,000 elements or more that is reached
from the optimiser, its buckets, residuals, reducers and selectors, each piece of memory counted once; parameters and gradients apart, which
the model has. The network is a perceptron of 1.2 million parameters, trained by one rank.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import torch
from torch import nn

import sparseallreduce as sar
from sparseallreduce import torch as ours

KINDS = ("DenseSGD", "OkTopkSGD", "GTopkSGD", "TopKSGD", "ApproximateTopKSGD", "MSTopKSGD", "HiTopKSGD", "AutoSGD")
LEAST = 1000  # elements of an array that counts
OPTIONS: dict[str, dict[str, Any]] = {"AutoSGD": {"candidates": ["topka", "oktopk", "gtopk"]}}


@click.command()
@click.option("--density", type=click.FloatRange(0, 1, min_open=True), default=0.01, show_default=True)
def show(density: float) -> None:
    """Print a table."""
    print(f"{'optimiser':<28}{'B/parameter':>12}{'state':>8}{'residual':>10}{'packed':>8}{'rest':>8}")
    makers: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "torch.optim.SGD": lambda model: torch.optim.SGD(model.parameters(), 0.01, momentum=0.9),
        "torch.optim.Adam": lambda model: torch.optim.Adam(model.parameters(), 0.01),
    }
    for name in KINDS:
        makers[name] = lambda model, name=name: getattr(ours, name)(  # type: ignore[misc]
            model.parameters(), 0.01, momentum=0.9, density=density, comm=sar.SERIAL, **OPTIONS.get(name, {})
        )
    makers['distributed(Adam, "oktopk")'] = lambda model: ours.distributed(torch.optim.Adam, "oktopk")(
        model.parameters(), lr=0.01, density=density, comm=sar.SERIAL
    )
    for name, make in makers.items():
        print(row(name, *measured(make)))
    print(row("OkTopkSGD, bfloat16 model", *measured(makers["OkTopkSGD"], torch.bfloat16)))


def measured(make: Callable[[nn.Module], torch.optim.Optimizer], dtype: torch.dtype = torch.float32) -> tuple[int, dict[str, int]]:
    """The parameters, and bytes of each kind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 400), nn.ReLU(), nn.Linear(400, 10)).to(dtype)
    optimizer = make(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 784).to(dtype)).float().square().mean().backward()
        optimizer.step()
    of_model = {place for each in model.parameters() for place in (each.data_ptr(), each.grad.data_ptr() if each.grad is not None else 0)}
    kinds = {"state": 0, "residual": 0, "packed": 0, "rest": 0}
    buckets = getattr(optimizer, "_buckets", [])
    named = {"state": [dict(optimizer.state)], "residual": [each.feedback.residual for each in buckets if each.feedback is not None]}
    named |= {"packed": [each.flat for each in buckets], "rest": [optimizer]}
    seen = set(of_model)
    for kind, roots in named.items():
        kinds[kind] = sum(bytes_from(root, seen) for root in roots)
    return sum(each.numel() for each in model.parameters()), kinds


def bytes_from(root: Any, seen: set[int]) -> int:
    """Of the memory of arrays and tensors reached from an object, those left out whose memory is in ``seen``, to which they are added."""
    found, visited, waiting = 0, set(), [root]
    while waiting:
        each = waiting.pop()
        if id(each) in visited or isinstance(each, type):
            continue
        visited.add(id(each))
        if isinstance(each, torch.Tensor):
            place, nbytes, elements = each.untyped_storage().data_ptr(), each.untyped_storage().nbytes(), each.numel()
        elif isinstance(each, np.ndarray):
            base = each
            while isinstance(base.base, np.ndarray):
                base = base.base
            place, nbytes, elements = base.ctypes.data, base.nbytes, base.size
        else:
            if type(each).__module__.startswith(("sparseallreduce", "torch.optim")) or isinstance(each, dict | list | tuple | set):
                waiting += gc.get_referents(each)
            continue
        if elements >= LEAST and place not in seen:
            seen.add(place)
            found += nbytes
    return found


def row(name: str, parameters: int, kinds: dict[str, int]) -> str:
    total = sum(kinds.values()) / parameters
    return f"{name:<28}{total:>12.2f}" + "".join(f"{kinds[kind] / parameters:>{width}.2f}" for kind, width in WIDTHS.items())


WIDTHS = {"state": 8, "residual": 10, "packed": 8, "rest": 8}

if __name__ == "__main__":
    show()
