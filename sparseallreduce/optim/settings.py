"""What an optimiser is told beside its parameters, learning rate, density and communicator."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparseallreduce.errors import AlgorithmError
from sparseallreduce.optim.rules import Adam

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """The same on all ranks."""

    momentum: float = 0.0  # the share of the velocity that is left after a step
    momentum_correction: bool = False  # whether each rank's velocity is summed, and not the gradients: see `PackDescent`
    momentum_masking: bool = True  # with the correction: whether velocity stops where a value was applied
    weight_decay: float = 0.0  # of every gradient, in multiples of the parameters; with Adam decoupled from the gradients
    clip_norm: float | None = None  # the largest L2 norm of the mean gradient over all parameters
    adam: Adam | None = None  # whether updates go through Adam's moments
    by_layer: bool = False  # whether each parameter is summed for itself

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise AlgorithmError(f"momentum must be at least 0 and below 1, not {self.momentum}")
        if self.momentum_correction and not self.momentum:
            raise AlgorithmError("momentum correction needs a momentum above 0")
        if self.adam is not None and self.momentum:
            raise AlgorithmError("Adam has a first moment instead of a momentum: leave one of them out")
        if not 0 <= self.weight_decay < math.inf:
            raise AlgorithmError(f"weight_decay must be at least 0, not {self.weight_decay}")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise AlgorithmError(f"clip_norm must be above 0, or None for no clipping, not {self.clip_norm}")

    @property
    def penalty(self) -> float:
        """The weight decay that is part of the gradient."""
        return 0.0 if self.adam else self.weight_decay

    def clipped(self, norm: float, ranks: int) -> float:
        """What a gradient of this norm is multiplied by: each rank has 1 / sqrt(P) of the limit (DGC, section 3.2)."""
        if self.clip_norm is None:
            return 1.0
        limit = self.clip_norm / math.sqrt(ranks)
        return limit / norm if norm > limit else 1.0
