"""How far calls of ``partial_fit`` have come, for the next to go on from."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.estimators.packing import Packed, packed, packed_all
from sparseallreduce.linear.strategies import LossyStrategy, Strategy

__all__ = ["Progress"]

Array = NDArray[Any]


class Progress(NamedTuple):
    """How far the calls of ``partial_fit`` have come, beside the weights."""

    passes: int  # that have been made with the same seed
    memory: dict[str, Any]  # of the weights; arrays may be packed
    schedule: dict[str, float]  # its state
    rates: str  # the parameters that this state is of
    residual: Array | None  # of a lossy strategy: this rank's
    scales: Array | Packed  # of the features in these

    def checksum(self) -> int:
        """A number that has to be the same on all ranks, whose weights would drift apart else."""
        bits = zlib.crc32(repr((self.passes, sorted(self.schedule.items()))).encode())
        for name in sorted(self.memory):
            value = self.memory[name]
            for part in value if isinstance(value, Packed) else (value,):
                bits = zlib.crc32(np.asarray(part).tobytes(), bits)
        return bits

    @property
    def adaptive(self) -> bool:
        """Whether the memory is that of weights with rates of their own."""
        return "norms" in self.memory

    @classmethod
    def kept(
        cls, passes: int, memory: dict[str, Any], schedule: dict[str, float], rates: str, residual: Array | None, scales: Array
    ) -> Progress:
        """With arrays in little room."""
        return cls(passes, packed_all(memory), schedule, rates, residual, packed(scales, fill=1.0))

    @classmethod
    def of(cls, strategy: Strategy, schedule: dict[str, float], rates: str, passes: int, scales: Array) -> Progress:
        """What a run has left; collective."""
        residual = strategy.residual.copy() if isinstance(strategy, LossyStrategy) else None
        return cls.kept(passes, strategy.weights.memory(), schedule, rates, residual, scales)
