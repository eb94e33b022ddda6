"""The largest magnitude of every feature."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.compilation import kernel

__all__ = ["raise_to_magnitudes"]

Array = NDArray[Any]


@kernel
def raise_to_magnitudes(indices: Array, values: Array, largest: Array) -> None:
    """``largest[index] = max(largest[index], abs(value))`` for every non-zero."""
    for entry in range(indices.size):
        index = np.uint64(indices[entry])
        largest[index] = max(largest[index], abs(values[entry]))
