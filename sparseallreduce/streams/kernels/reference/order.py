"""Check the order of indices, and combine the values of duplicates, in plain NumPy."""

from __future__ import annotations

import numpy as np

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels.contract import ABSENT, Indices, Values
from sparseallreduce.streams.kernels.reference.arrays import combine
from sparseallreduce.streams.operator import SUM, Operator

__all__ = ["first_violation", "sum_duplicates"]


def first_violation(indices: Indices, size: int) -> int:
    """Return the position of the first index not larger than its predecessor or not below ``size``; ABSENT if none."""
    wrong = indices > size - 1 if size > 0 else np.ones(len(indices), dtype=bool)
    wrong[1:] |= indices[1:] <= indices[:-1]
    return int(np.argmax(wrong)) if wrong.any() else ABSENT


def sum_duplicates(indices: Indices, values: Values, op: Operator = SUM) -> tuple[Indices, Values]:
    """Combine the values of equal neighbouring indices in order of appearance."""
    if len(values) != len(indices):
        raise StreamError("sum_duplicates needs a value for each index")
    first = np.ones(len(indices), dtype=bool)
    first[1:] = indices[1:] != indices[:-1]
    starts = np.flatnonzero(first)
    repeats = np.diff(np.append(starts, len(indices)))
    combined = values[starts]
    longer, turn = np.flatnonzero(repeats > 1), 1
    while len(longer):  # not ufunc.reduceat, which sums pairwise
        combined[longer] = combine(op, combined[longer], values[starts[longer] + turn])
        turn += 1
        longer = longer[repeats[longer] > turn]
    return indices[starts], combined
