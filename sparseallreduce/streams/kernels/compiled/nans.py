"""Compiled kernel that detects NaNs."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparseallreduce.streams.kernels.compilation import kernel
from sparseallreduce.streams.kernels.compiled.arrays import U, is_list
from sparseallreduce.streams.kernels.compiled.signatures import Kernel
from sparseallreduce.streams.kernels.contract import MALFORMED, Values

__all__ = ["KERNELS"]

BLOCK = 2048  # values whose maximum is computed before it is tested


@kernel
def any_above(bits: Values, mask: Any, limit: Any) -> Any:
    """Return whether any number under ``mask`` is above ``limit``."""
    n = U(bits.shape[0])
    if not is_list(bits):
        return np.int64(MALFORMED)
    for start in range(U(0), n, U(BLOCK)):
        largest = mask ^ mask
        for i in range(start, min(start + U(BLOCK), n)):
            largest = max(largest, bits[i] & mask)
        if largest > limit:
            return np.int64(1)
    return np.int64(0)


KERNELS = {"any_above": Kernel((any_above,), lambda of: (of.values, of.value, of.value))}
