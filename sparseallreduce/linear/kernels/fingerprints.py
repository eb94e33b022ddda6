"""Fingerprint of samples, to detect training data that differ."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.compilation import inlined, kernel

__all__ = ["fingerprint"]

Array = NDArray[Any]

_ZERO, _ONE, _THIRTY_TWO = np.uint64(0), np.uint64(1), np.uint64(32)
_MIX = np.uint64(0x9E3779B97F4A7C15)


@kernel
def fingerprint(indptr: Array, indices: Array, values: Array, labels: Array, first: int) -> int:
    """Return the sum, modulo 2**64, of a hash of each non-zero and label with its row, counted from ``first``; values as unsigned bits."""
    total = _ZERO
    for row in range(labels.size):
        number = np.uint64(first + row) * _MIX
        total += _mixed(number ^ np.uint64(labels[row]))
        for entry in range(indptr[row], indptr[row + 1]):
            total += _mixed(number ^ (np.uint64(indices[entry]) << _THIRTY_TWO) ^ (np.uint64(values[entry]) + _ONE))
    return total  # type: ignore[return-value]


@inlined
def _mixed(bits: Any) -> Any:
    """Return a pseudo-random permutation of 64-bit numbers at ``bits``: the finalizer of SplitMix64 (Steele et al., 2014)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
