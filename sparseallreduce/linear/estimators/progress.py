"""How far calls of ``partial_fit`` have come, for the next to go on from."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.strategies import LossyStrategy, Strategy
from sparseallreduce.linear.training.schedules import Reactive, Schedule

__all__ = ["Progress"]

Array = NDArray[Any]


class Progress(NamedTuple):
    """How far the calls of ``partial_fit`` have come, beside the weights."""

    passes: int  # that have been made with the same seed
    memory: dict[str, Any]  # of the weights
    schedule: dict[str, float]  # its state
    rates: str  # the parameters that this state is of
    residual: Array | None  # of a lossy strategy: this rank's
    scales: Array  # of the features in these

    def checksum(self) -> int:
        """A number that has to be the same on all ranks, whose weights would drift apart else."""
        bits = zlib.crc32(repr((self.passes, sorted(self.schedule.items()))).encode())
        for name in sorted(self.memory):
            bits = zlib.crc32(np.asarray(self.memory[name]).tobytes(), bits)
        return bits

    @classmethod
    def of(cls, strategy: Strategy, schedule: Schedule, rates: str, passes: int, scales: Array) -> Progress:
        """What a run has left; collective."""
        residual = strategy.residual.copy() if isinstance(strategy, LossyStrategy) else None
        state = schedule.state() if isinstance(schedule, Reactive) else {}
        return cls(passes, strategy.weights.memory(), state, rates, residual, scales)
