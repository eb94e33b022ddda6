"""How far calls of ``partial_fit`` have come, for the next to go on from."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.estimators.feature_numbers import resized
from sparseallreduce.linear.estimators.packing import Packed, packed, packed_all, unpacked, unpacked_all
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
    features: int = 0  # that the arrays have entries for; 0 for all, as of earlier versions

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
        cls,
        passes: int,
        memory: dict[str, Any],
        schedule: dict[str, float],
        rates: str,
        residual: Array | None,
        scales: Array,
        features: int,
    ) -> Progress:
        """With arrays in little room."""
        return cls(passes, packed_all(memory), schedule, rates, residual, packed(scales, fill=1.0), features)

    @classmethod
    def of(cls, strategy: Strategy, schedule: dict[str, float], rates: str, passes: int, scales: Array) -> Progress:
        """What a run has left; collective."""
        residual = strategy.residual.copy() if isinstance(strategy, LossyStrategy) else None
        return cls.kept(passes, strategy.weights.memory(), schedule, rates, residual, scales, strategy.dataset.features)

    def of_features(self, features: int, width: int) -> Progress:
        """Return this with unpacked arrays for so many features, of ``width`` weights each; of further ones nothing is known."""
        before = self.features or features
        # Numbers of the intercepts may be arrays as well.
        memory = {
            name: resized(value, features * width) if isinstance(value, np.ndarray) and not name.startswith("intercept") else value
            for name, value in unpacked_all(self.memory).items()
        }
        scales, residual = unpacked(self.scales), self.residual
        if len(scales) == before > 1:
            scales = resized(scales, features)
            scales[scales == 0] = 1.0
        if residual is not None:
            residual = np.concatenate([resized(residual[: before * width], features * width), residual[before * width :]])
        return self._replace(memory=memory, scales=scales, residual=residual, features=features)
