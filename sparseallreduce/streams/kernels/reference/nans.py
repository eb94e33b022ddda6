"""Detect NaNs, in plain NumPy."""

from __future__ import annotations

from typing import Any

from sparseallreduce.streams.kernels.contract import Values

__all__ = ["any_above"]


def any_above(bits: Values, mask: Any, limit: Any) -> bool:
    """Return whether any number under ``mask`` is above ``limit``."""
    return bool(((bits & bits.dtype.type(mask)) > limit).any())
