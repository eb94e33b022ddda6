"""Blocks of samples from a reader, and growing arrays that collect them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["Block", "Column"]

Array = NDArray[Any]


class Block(NamedTuple):
    """Consecutive samples as compressed sparse rows. The arrays are valid until the next block is read."""

    indptr: Array  # int64, samples + 1, starting at 0: position of each sample's first non-zero
    indices: Array  # from 0, ascending within a sample
    values: Array
    labels: Array  # float64
    weights: Array | None = None  # float64, weight of each sample; None for 1


class Column:
    """An array that grows in place, so that a long one is never in memory twice.

    >>> column = Column("int64")
    >>> column.append(np.arange(3)), column.append(np.arange(2)), column.array()
    (None, None, array([0, 1, 2, 0, 1]))
    """

    def __init__(self, dtype: DTypeLike) -> None:
        self._room = np.empty(0, dtype)
        self._used = 0

    def append(self, items: Array) -> None:
        """Append items."""
        end = self._used + len(items)
        if end > len(self._room):
            # The C library remaps the pages of a large array instead of copying it. Some spare room makes even that rare.
            self._room.resize(end + end // 16, refcheck=False)
        self._room[self._used : end] = items
        self._used = end

    def array(self) -> Array:
        """Return all items, and empty the column."""
        self._room.resize(self._used, refcheck=False)
        whole, self._room, self._used = self._room, np.empty(0, self._room.dtype), 0
        return whole
