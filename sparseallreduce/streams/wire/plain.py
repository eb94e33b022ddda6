"""Indices without encoding, 4 or 8 bytes each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels.backend import array_module
from sparseallreduce.streams.wire.header import Bytes

__all__ = ["Plain"]


class Plain:
    """The index codec without compression."""

    number = 0
    name = "plain"
    seconds: float = 0.0

    def bytes_each(self, density: float, index_bytes: int) -> float:
        return index_bytes

    def bound(self, indices: NDArray[Any], lo: int) -> int:
        return indices.nbytes

    def write(self, indices: NDArray[Any], lo: int, out: Bytes) -> int:
        out[: indices.nbytes] = array_module(indices).ascontiguousarray(indices).view(np.uint8)
        return indices.nbytes

    def read(self, payload: Bytes, lo: int, hi: int, out: NDArray[Any]) -> bool:
        if len(payload) != out.nbytes:
            return False
        out.view(np.uint8)[:] = payload
        return is_increasing(out, lo, hi)


def is_increasing(indices: NDArray[Any], lo: int, hi: int) -> bool:
    """Return True if indices are strictly increasing and in ``[lo, hi)``."""
    return len(indices) == 0 or (int(indices[0]) >= lo and kernels.first_violation(indices, hi) < 0)
