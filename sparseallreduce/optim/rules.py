"""Rules that apply an update to the parameters: plain descent, momentum, or Adam.

All ranks apply the same operations to identical values, so that their parameters stay identical.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparseallreduce.errors import AlgorithmError
from sparseallreduce.optim.packs import Pack, blocks
from sparseallreduce.streams.stream import SparseStream

__all__ = ["Adam", "AdamRule", "MomentumRule", "PlainRule", "Rule"]


class Rule(ABC):
    """Base class of rules that update the parameters of a pack; a rule's arrays are as long as the pack."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack

    @abstractmethod
    def apply(self, update: SparseStream, rate: float) -> None:
        """Update the parameters by a mean of gradients."""

    def state(self) -> dict[str, Any]:
        """Return the state: numbers and arrays."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027 - a rule need not remember anything
        """Restore a state."""


class PlainRule(Rule):
    """``w -= rate * update``, at a cost proportional to the update's entries."""

    def apply(self, update: SparseStream, rate: float) -> None:
        self.pack.descend(update, rate)


class MomentumRule(Rule):
    """``velocity = momentum * velocity + update; w -= rate * velocity``: a pass over all parameters."""

    def __init__(self, pack: Pack, momentum: float) -> None:
        super().__init__(pack)
        self.momentum = momentum
        self.velocity: Any = pack.xp.zeros(pack.size, pack.dtype)

    def apply(self, update: SparseStream, rate: float) -> None:
        self.velocity *= self.pack.dtype.type(self.momentum)
        update.add_to(self.velocity)
        for parameter, own in self.pack.parts():
            velocity = self.velocity[own]
            for block in blocks(parameter):
                parameter[block] -= self.pack.dtype.type(rate) * velocity[block]

    def state(self) -> dict[str, Any]:
        return {"velocity": self.velocity}

    def restore(self, state: dict[str, Any]) -> None:
        self.velocity[:] = self.pack.xp.asarray(state["velocity"])


@dataclass(frozen=True)
class Adam:
    """The constants of Adam (Kingma and Ba, 2015); the defaults are those with which Ok-Topk section 5 trains BERT.

    A ``weight_decay`` of the optimiser is decoupled from the gradients (AdamW), as is usual for BERT.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    bias_correction: bool = True  # whether the moments of the first steps are corrected for their bias

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise AlgorithmError(f"{name} of Adam must be at least 0 and below 1, not {getattr(self, name)}")
        if not 0 < self.epsilon < math.inf:
            raise AlgorithmError(f"epsilon of Adam must be above 0, not {self.epsilon}")


class AdamRule(Rule):
    """Adam on the sums: an element that is not in an update has gradient zero in that step, and still moves by its first moment."""

    first: Any
    second: Any

    def __init__(self, pack: Pack, adam: Adam, weight_decay: float) -> None:
        super().__init__(pack)
        self.adam = adam
        self.weight_decay = weight_decay
        self.steps: int = 0
        self.first, self.second = pack.xp.zeros(pack.size, pack.dtype), pack.xp.zeros(pack.size, pack.dtype)

    def apply(self, update: SparseStream, rate: float) -> None:
        adam, number = self.adam, self.pack.dtype.type
        self._take(update)
        self.steps += 1
        corrections = (1 - adam.beta1**self.steps, 1 - adam.beta2**self.steps) if adam.bias_correction else (1.0, 1.0)
        scale, root, kept = number(rate / corrections[0]), number(1 / math.sqrt(corrections[1])), number(1 - rate * self.weight_decay)
        for parameter, own in self.pack.parts():
            first, second = self.first[own], self.second[own]
            for block in blocks(parameter):
                divisor = np.sqrt(second[block])
                divisor *= root
                divisor += number(adam.epsilon)
                np.divide(first[block], divisor, out=divisor)
                divisor *= scale
                parameter[block] *= kept
                parameter[block] -= divisor

    def _take(self, update: SparseStream) -> None:
        """Decay the moments, and add the update to them."""
        adam, number = self.adam, self.pack.dtype.type
        values = update._stored
        places: Any = slice(None) if update.is_dense else update.indices
        added, squared = number(1 - adam.beta1) * values, number(1 - adam.beta2) * values * values  # allocates before anything changes
        self.first *= number(adam.beta1)
        self.second *= number(adam.beta2)
        self.first[places] += added
        self.second[places] += squared

    def state(self) -> dict[str, Any]:
        return {"adam_steps": self.steps, "first_moment": self.first, "second_moment": self.second}

    def restore(self, state: dict[str, Any]) -> None:
        self.steps = int(state["adam_steps"])
        self.first[:] = self.pack.xp.asarray(state["first_moment"])
        self.second[:] = self.pack.xp.asarray(state["second_moment"])
