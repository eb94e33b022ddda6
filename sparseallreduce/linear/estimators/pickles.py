"""Where pickles of estimators look for classes that have moved since they were written."""

from __future__ import annotations

import sys

from sparseallreduce.linear.estimators import base
from sparseallreduce.linear.training import schedules, trainer

__all__ = ["MOVED", "find_moved"]

#: Modules of classes that fitted estimators hold, by the names that they had.
MOVED = {
    "sparseallreduce.linear.estimator_base": base,
    "sparseallreduce.linear.schedules": schedules,
    "sparseallreduce.linear.trainer": trainer,
}


def find_moved() -> None:
    """From now on, modules are found by their earlier names as well."""
    for name, module in MOVED.items():
        sys.modules.setdefault(name, module)
