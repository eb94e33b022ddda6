"""Columns of samples on their way from a reader to where they are kept: blocks, and arrays that grow."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["Block", "Column"]

Array = NDArray[Any]


class Block(NamedTuple):
    """Some consecutive samples as compressed sparse rows; the arrays hold until the next block is asked for."""

    indptr: Array  # int64, samples + 1, from zero: where each sample begins among the non-zeros
    indices: Array  # from 0, increasing within a sample
    values: Array
    labels: Array  # float64
    weights: Array | None = None  # float64, what each sample counts; None for 1


class Column:
    """An array that grows in place, so that a long one never lies in memory twice.

    >>> column = Column("int64")
    >>> column.append(np.arange(3)), column.append(np.arange(2)), column.array()
    (None, None, array([0, 1, 2, 0, 1]))
    """

    def __init__(self, dtype: DTypeLike) -> None:
        self._room = np.empty(0, dtype)
        self._used = 0

    def append(self, items: Array) -> None:
        """Add the items behind those that are there."""
        end = self._used + len(items)
        if end > len(self._room):
            # The C library moves the pages of a large array rather than its contents. A little room to spare makes that rare.
            self._room.resize(end + end // 16, refcheck=False)
        self._room[self._used : end] = items
        self._used = end

    def array(self) -> Array:
        """All items; the column itself is empty afterwards."""
        self._room.resize(self._used, refcheck=False)
        whole, self._room, self._used = self._room, np.empty(0, self._room.dtype), 0
        return whole
