"""The optimiser of PyTorch's that applies the means: a new one, or one that exists and is taken over with its groups and its state."""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

import torch

from sparseallreduce.errors import AlgorithmError
from sparseallreduce.torch.masters import HALVES

if TYPE_CHECKING:
    from sparseallreduce.torch.optimizer import DistributedOptimizer

__all__ = ["in_full_precision", "made", "settings_of", "taken"]


def settings_of(base: type[torch.optim.Optimizer]) -> Container[str]:
    """Return the names of the settings of a class of optimisers."""
    return inspect.signature(base.__init__).parameters


def made(params: Any, outer: DistributedOptimizer, given: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return a new optimiser of ``outer.base`` for these parameters, with these settings."""
    return outer.base(params, **given, **({"comm": outer.comm} if "comm" in settings_of(outer.base) else {}))


def taken(optimizer: torch.optim.Optimizer, kind: type[DistributedOptimizer], given: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return an optimiser that exists.

    Raises
    ------
    AlgorithmError
        If an optimiser of the class ``kind`` cannot take it over, or if there are settings beside its own.
    """
    if hasattr(optimizer, "gather_state_dict"):
        raise AlgorithmError(f"this {type(optimizer).__name__} sums gradients over the ranks already: pass what it was made of")
    if type(optimizer) is not kind.base:
        raise AlgorithmError(f"{kind.__name__} takes over a {kind.base.__name__}, not a {type(optimizer).__name__}")
    for name in given:
        raise AlgorithmError(f"{name} is a setting of the optimiser that is taken over: change it there")
    return optimizer


def in_full_precision(kept: Mapping[torch.Tensor, dict[str, Any]]) -> dict[torch.Tensor, dict[str, Any]]:
    """Return what an optimiser keeps for its parameters, that of parameters of 16 bits in float32, as their master copies are."""
    return {
        parameter: {name: _widened(value) if parameter.dtype in HALVES else value for name, value in each.items()}
        for parameter, each in kept.items()
    }


def _widened(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, torch.Tensor) and value.dtype in HALVES else value
