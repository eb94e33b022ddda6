"""The optimiser of PyTorch that applies the means.

It is either created here or an existing one, whose groups and state are taken over.
"""

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
    """Return the names of the constructor arguments of an optimiser class."""
    return inspect.signature(base.__init__).parameters


def made(params: Any, outer: DistributedOptimizer, given: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return a new optimiser of the class ``outer.base`` with the given parameters and settings."""
    return outer.base(params, **given, **({"comm": outer.comm} if "comm" in settings_of(outer.base) else {}))


def taken(optimizer: torch.optim.Optimizer, kind: type[DistributedOptimizer], given: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return an existing optimiser after checking that it can be taken over.

    Raises
    ------
    AlgorithmError
        If the class ``kind`` cannot take the optimiser over, or if ``given`` contains any settings.
    """
    if hasattr(optimizer, "gather_state_dict"):
        raise AlgorithmError(f"this {type(optimizer).__name__} sums gradients over the ranks already: pass one of PyTorch instead")
    if type(optimizer) is not kind.base:
        raise AlgorithmError(f"{kind.__name__} takes over a {kind.base.__name__}, not a {type(optimizer).__name__}")
    for name in given:
        raise AlgorithmError(f"{name} is a setting of the existing optimiser: change it there")
    return optimizer


def in_full_precision(kept: Mapping[torch.Tensor, dict[str, Any]]) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the state of an optimiser by parameter, converted to float32 for 16-bit parameters, as their master copies are."""
    return {
        parameter: {name: _widened(value) if parameter.dtype in HALVES else value for name, value in each.items()}
        for parameter, each in kept.items()
    }


def _widened(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, torch.Tensor) and value.dtype in HALVES else value
