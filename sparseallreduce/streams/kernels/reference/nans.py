"""Whether there are NaNs in an array, in plain NumPy."""

from __future__ import annotations

from typing import Any

from sparseallreduce.streams.kernels.contract import Values

__all__ = ["any_above"]


def any_above(bits: Values, mask: Any, limit: Any) -> bool:
    """Find out whether any number is above ``limit`` under ``mask``."""
    return bool(((bits & bits.dtype.type(mask)) > limit).any())
