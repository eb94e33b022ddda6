"""Master copies in float32 of 16-bit parameters, which the inner optimiser updates.

Parameters of other dtypes are updated in place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, MutableMapping
from typing import Any

import torch

__all__ = ["HALVES", "Masters", "apply"]

HALVES = (torch.float16, torch.bfloat16)


class Masters:
    """Float32 copies of 16-bit parameters, so that steps too small for 16 bits add up (Micikevicius et al., 2018, section 3.1)."""

    def __init__(self) -> None:
        self._copies: dict[torch.Tensor, torch.Tensor] = {}

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter.dtype in HALVES

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the inner optimiser updates for a parameter.

        This is the parameter itself or its float32 copy. Elements of the parameter that were changed from outside are copied first.
        """
        if parameter.dtype not in HALVES:
            return parameter.detach()
        copy = self._copies.get(parameter)
        if copy is None:
            copy = self._copies[parameter] = parameter.detach().to(torch.float32)
        else:
            changed = parameter.detach() != copy.to(parameter.dtype)
            copy.copy_(torch.where(changed, parameter.detach().to(torch.float32), copy))  # does not wait for the GPU
        return copy

    def round(self) -> None:
        """Round the copies to the dtype of their parameters, and write them there."""
        for parameter, copy in self._copies.items():
            parameter.detach().copy_(copy)

    def state(self, parameters: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the copies by the position of their parameter."""
        return {place: self._copies[each].clone() for place, each in enumerate(parameters) if each in self._copies}

    def restore(self, parameters: Iterable[torch.Tensor], state: dict[int, torch.Tensor]) -> None:
        """Restore the copies in ``state``.

        Where a parameter is not the rounded value of its copy, it was changed later, and its value is used.
        """
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
    """Let the inner optimiser make a step with the given gradients. The ``.grad`` of the parameters does not change.

    Parameters
    ----------
    inner : torch.optim.Optimizer
        The inner optimiser, whose own groups and state are set for the step.
    groups : list of dict
        The parameter groups of the outer optimiser.
    state : dict
        The state of ``inner`` for each parameter, which is updated.
    gradients : dict
        The gradients by parameter, with None for a parameter that does not change.
    masters : Masters
        The float32 copies of 16-bit parameters.
    corrected : container of tensors
        Parameters whose gradients already contain the momentum. Their weight decay does not, and is multiplied by 1 / (1 - momentum), as
        momentum would do.
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
    """Return the settings of a group for gradients that already contain the momentum."""
    return {**group, "momentum": 0.0, "weight_decay": group["weight_decay"] / (1 - group["momentum"])}
