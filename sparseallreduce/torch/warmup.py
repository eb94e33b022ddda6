"""Mean gradients of the steps before local ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from sparseallreduce import optim
from sparseallreduce.errors import StreamTypeError
from sparseallreduce.runtime.objects import agreed, together

__all__ = ["average_gradients"]


def average_gradients(local: optim.LocalSteps, parameters: Iterable[torch.Tensor], factor: float, infinite: bool) -> bool:
    """Set the gradients of all ranks to their mean, and return True; or False if one of them is infinite on any rank. Collective.

    A missing gradient counts as zero, and stays missing if all ranks lack it.

    Parameters
    ----------
    local : optim.LocalSteps
    parameters : iterable of tensors
    factor : float
        For unscaled gradients of this rank.
    infinite : bool
        Whether a GradScaler has found an infinite gradient on this rank.

    Raises
    ------
    SparseAllreduceError
        The same error on every rank: StreamTypeError if a gradient is sparse.
    """
    tensors = list(parameters)

    def average() -> bool:
        own = agreed(local.comm, lambda: _packed(tensors, local.dtype, factor, infinite))
        mean = torch.from_numpy(np.array(local.mean(own)))
        *parts, present = mean.split([*(each.numel() for each in tensors), len(tensors) + 1])
        if present[-1]:
            return False
        agreed(local.comm, lambda: _unpack(tensors, parts, present))
        return True

    with torch.no_grad():
        return together(local.comm, average)


def _packed(tensors: list[torch.Tensor], dtype: Any, factor: float, infinite: bool) -> Any:
    """Return all gradients as one vector, and behind them a number for each that is not zero if there is one, and one for ``infinite``."""
    kind = torch.float64 if dtype == np.float64 else torch.float32
    parts = []
    for each in tensors:
        if each.grad is not None and each.grad.layout != torch.strided:
            raise StreamTypeError("the steps of a warm-up take dense gradients: use nn.Embedding without sparse=True")
        none = each.grad is None or infinite
        parts.append(torch.zeros(each.numel(), dtype=kind) if none else each.grad.reshape(-1).to("cpu", kind) * factor)
    present = torch.tensor([*(each.grad is not None for each in tensors), infinite], dtype=kind)
    return torch.cat([*parts, present]).numpy()


def _unpack(tensors: list[torch.Tensor], parts: Iterable[torch.Tensor], present: torch.Tensor) -> None:
    for each, part, there in zip(tensors, parts, present):
        if there:
            each.grad = torch.empty_like(each) if each.grad is None else each.grad
            each.grad.copy_(part.reshape(each.shape))
