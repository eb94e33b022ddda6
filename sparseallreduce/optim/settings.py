"""The settings of an optimiser other than parameters, learning rate, density and communicator."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparseallreduce.errors import AlgorithmError
from sparseallreduce.optim.rules import Adam

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """Settings that must be equal on all ranks."""

    momentum: float = 0.0  # factor of the velocity in each step
    momentum_correction: bool = False  # whether velocities of ranks are summed instead of gradients: see `PackDescent`
    momentum_masking: bool = True  # with the correction: whether velocity is set to zero where a value was applied
    weight_decay: float = 0.0  # multiple of the parameters added to gradients; decoupled from them with Adam
    clip_norm: float | None = None  # the largest L2 norm of the mean gradient over all parameters
    adam: Adam | None = None  # apply updates by Adam
    by_layer: bool = False  # whether parameters are summed separately

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
        """Return the factor that clips a gradient of this norm: each rank has 1 / sqrt(P) of the limit (DGC, section 3.2)."""
        if self.clip_norm is None:
            return 1.0
        limit = self.clip_norm / math.sqrt(ranks)
        return limit / norm if norm > limit else 1.0
