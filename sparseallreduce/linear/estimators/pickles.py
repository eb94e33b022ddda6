"""Locations of classes that have moved since pickles of estimators were written."""

from __future__ import annotations

import sys

from sparseallreduce.linear.estimators import base
from sparseallreduce.linear.training import schedules, trainer

__all__ = ["MOVED", "find_moved"]

#: Modules of classes in pickles of fitted estimators, by their earlier names.
MOVED = {
    "sparseallreduce.linear.estimator_base": base,
    "sparseallreduce.linear.schedules": schedules,
    "sparseallreduce.linear.trainer": trainer,
}


def find_moved() -> None:
    """Make modules importable by their earlier names too."""
    for name, module in MOVED.items():
        sys.modules.setdefault(name, module)
