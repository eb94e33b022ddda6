"""Loops of a hash table of features, which maps each to its position in a growing list."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.compilation import inlined, kernel

__all__ = ["enter", "look_up"]

Array = NDArray[Any]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio: multiplicative hashing (Knuth, vol. 3, section 6.4)


@kernel
def enter(features: Array, first: int, end: int, table: Array, shift: int) -> None:
    """Insert the features from ``first`` to ``end``, none of them in the table. It has 2^(64 - shift) slots, -1 if free."""
    last = table.size - 1
    for number in range(first, end):
        place = _place_of(np.uint64(features[number]), shift)
        while table[place] >= 0:
            place = 0 if place == last else place + 1
        table[place] = number


@kernel
def look_up(indices: Array, features: Array, table: Array, shift: int, missing: int, out: Array) -> int:
    """Write the number of every index, or ``missing`` if it is not in the table; return how many are missing."""
    last, count = table.size - 1, 0
    for entry in range(indices.size):
        feature = np.uint64(indices[entry])
        place = _place_of(feature, shift)
        while table[place] >= 0 and np.uint64(features[table[place]]) != feature:
            place = 0 if place == last else place + 1
        known = table[place] >= 0
        out[entry] = table[place] if known else missing
        count += not known
    return count


@inlined
def _place_of(feature: Any, shift: int) -> Any:
    return np.int64((feature * _GOLDEN) >> np.uint64(shift))
