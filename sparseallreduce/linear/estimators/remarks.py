"""Warnings to who has called an estimator, whatever lies between."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn"]

_BETWEEN = ("sparseallreduce", "contextlib")  # packages whose lines are not the user's


def warn(text: str, category: type[Warning]) -> None:
    """Warn, and name the line outside of the library from which the call has come."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
