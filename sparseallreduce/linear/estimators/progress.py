"""Progress of the calls of ``partial_fit``, from which the next call continues."""

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
    """State of the calls of ``partial_fit``, besides the weights."""

    passes: int  # number of passes made with the same seed
    memory: dict[str, Any]  # memory of the weights; arrays may be packed
    schedule: dict[str, float]  # state of the schedule
    rates: str  # parameters that this state belongs to
    residual: Array | None  # this rank's residual of a lossy strategy
    scales: Array | Packed  # scales of the features
    features: int = 0  # number of features in the arrays; 0 for all, as in earlier versions

    def checksum(self) -> int:
        """Return a checksum that must be the same on all ranks, because otherwise their weights would diverge."""
        bits = zlib.crc32(repr((self.passes, sorted(self.schedule.items()))).encode())
        for name in sorted(self.memory):
            value = self.memory[name]
            for part in value if isinstance(value, Packed) else (value,):
                bits = zlib.crc32(np.asarray(part).tobytes(), bits)
        return bits

    @property
    def adaptive(self) -> bool:
        """True if the memory is that of weights with individual learning rates."""
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
        """Return a progress with packed arrays."""
        return cls(passes, packed_all(memory), schedule, rates, residual, packed(scales, fill=1.0), features)

    @classmethod
    def of(cls, strategy: Strategy, schedule: dict[str, float], rates: str, passes: int, scales: Array) -> Progress:
        """Return the progress at the end of a run. Collective."""
        residual = strategy.residual.copy() if isinstance(strategy, LossyStrategy) else None
        return cls.kept(passes, strategy.weights.memory(), schedule, rates, residual, scales, strategy.dataset.features)

    def of_features(self, features: int, width: int) -> Progress:
        """Return this progress with unpacked arrays for ``features`` features of ``width`` weights; new ones have no history."""
        before = self.features or features
        # Values of the intercepts may be arrays too.
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
