"""What the optimiser beneath works on: the memory of the parameters themselves, or copies in float32 of those that have 16 bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, MutableMapping
from typing import Any

import torch

__all__ = ["HALVES", "Masters", "apply"]

HALVES = (torch.float16, torch.bfloat16)


class Masters:
    """Parameters of 16 bits in float32, so that steps that are too small for 16 bits add up (Micikevicius et al., 2018, section 3.1)."""

    def __init__(self) -> None:
        self._copies: dict[torch.Tensor, torch.Tensor] = {}

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter.dtype in HALVES

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor that stands for a parameter: on its memory, or its copy, in which what was changed from outside is taken over."""
        if parameter.dtype not in HALVES:
            return parameter.detach()
        copy = self._copies.get(parameter)
        if copy is None:
            copy = self._copies[parameter] = parameter.detach().to(torch.float32)
        else:
            changed = parameter.detach() != copy.to(parameter.dtype)
            copy.copy_(torch.where(changed, parameter.detach().to(torch.float32), copy))  # nothing that a GPU has to be waited for
        return copy

    def round(self) -> None:
        """Write the copies into their parameters."""
        for parameter, copy in self._copies.items():
            parameter.detach().copy_(copy)

    def state(self, parameters: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The copies by the place of their parameter."""
        return {place: self._copies[each].clone() for place, each in enumerate(parameters) if each in self._copies}

    def restore(self, parameters: Iterable[torch.Tensor], state: dict[int, torch.Tensor]) -> None:
        """Take over copies: of parameters that are their rounded values; others were changed since."""
        for place, parameter in enumerate(parameters):
            if parameter.dtype in HALVES:
                self._copies.pop(parameter, None)
                if place in state:
                    self._copies[parameter] = state[place].detach().to(parameter.device, torch.float32, copy=True)


def apply(
    inner: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: MutableMapping[Any, Any],
    gradients: dict[torch.Tensor, torch.Tensor | None],
    masters: Masters,
    corrected: Container[torch.Tensor] = (),
) -> None:
    """Let an optimiser make a step with these gradients, and leave those of the parameters as they are.

    Parameters
    ----------
    inner : torch.optim.Optimizer
        Its own groups and state are set for the step.
    groups : list of dict
    state : dict
        Of what ``inner`` keeps for each parameter; it is brought up to date.
    gradients : dict
        By parameter; None for those that stay as they are.
    masters : Masters
    corrected : container of tensors
        Parameters whose gradients have momentum already. Their weight decay, which has not, is as many times as large as momentum makes it.
    """
    standing = {parameter: masters.of(parameter) for group in groups for parameter in group["params"]}
    inner.state = defaultdict(dict, {standing[each]: kept for each, kept in state.items() if each in standing})
    inner.param_groups = [
        {**settings, "params": [standing[each] for each in group["params"] if (each in corrected) == without]}
        for group in groups
        for without, settings in ((False, group), *([(True, _without_momentum(group))] if corrected else []))
    ]
    for parameter, stand in standing.items():
        stand.grad = gradients.get(parameter)
    try:
        inner.step()
    finally:
        for parameter, stand in standing.items():
            stand.grad = None
            if stand in inner.state:
                state[parameter] = inner.state[stand]
        inner.state, inner.param_groups = defaultdict(dict), groups
    masters.round()


def _without_momentum(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group whose gradients have momentum already."""
    return {**group, "momentum": 0.0, "weight_decay": group["weight_decay"] / (1 - group["momentum"])}
