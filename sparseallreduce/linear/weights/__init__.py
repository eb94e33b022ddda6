"""Weights of a linear model: plain, lazy, adaptive, and shared by the ranks of a host."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from sparseallreduce.linear.weights.adaptive import AdaptiveWeights
from sparseallreduce.linear.weights.arow import ArowWeights, batch_sums, with_sums
from sparseallreduce.linear.weights.descent import UPDATES, Descent
from sparseallreduce.linear.weights.lazy import LazyWeights
from sparseallreduce.linear.weights.on_gpu import GpuWeights, check_on_gpu, new_gpu_weights
from sparseallreduce.linear.weights.plain import Weights, flat_indices
from sparseallreduce.runtime.threads import Threads

__all__ = [
    "UPDATES",
    "AdaptiveWeights",
    "ArowWeights",
    "Descent",
    "GpuWeights",
    "LazyWeights",
    "Weights",
    "batch_sums",
    "check_on_gpu",
    "flat_indices",
    "new_gpu_weights",
    "new_weights",
    "with_sums",
]


def new_weights(size: int, descent: Descent, dtype: DTypeLike = np.float32, threads: Threads | None = None) -> Weights:
    """Return zero weights of the class that ``descent`` needs; for the arguments see :class:`Weights`."""
    if descent.second_order:
        return ArowWeights(size, descent, dtype, threads)
    if descent.adaptive:
        return AdaptiveWeights(size, descent, dtype, threads)
    plain = not (descent.l1 or descent.momentum or descent.averages)
    return Weights(size, descent, dtype, threads) if plain else LazyWeights(size, descent, dtype, threads)
