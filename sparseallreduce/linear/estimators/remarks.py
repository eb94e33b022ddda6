"""Warnings that point at the user's line of code."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn"]

_BETWEEN = ("sparseallreduce", "contextlib")  # packages to skip in the call stack


def warn(text: str, category: type[Warning]) -> None:
    """Issue a warning that names the line outside of the library from which it was called."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
