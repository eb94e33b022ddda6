"""Track the blocks of shared memory that hold results in use; a block is free again when all views of it are gone."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Leases"]


def _nothing() -> None:
    """Stand in for the reference to a free block's array: return None."""


def _others() -> bool:
    """Stand in for the reference to an array that is kept for ever: return True."""
    return True


class Leases:
    """The blocks that this rank keeps because their results are in use.

    A forked process shares the results in the same memory for an unknown time, so blocks that are kept at a fork are kept for ever.

    Parameters
    ----------
    blocks : int
    """

    def __init__(self, blocks: int) -> None:
        self._blocks: list[Callable[[], object]] = [_nothing] * blocks  # for each block, a reference to the array that keeps it
        _all.add(weakref.ref(self, _all.discard))

    def free(self) -> int:
        """Return a bit mask of the blocks whose results are not in use on this rank."""
        free = 0
        for place, kept_for in enumerate(self._blocks):
            free |= (kept_for() is None) << place
        return free

    def held(self) -> int:
        """Return a bit mask of the blocks whose results are in use on this rank."""
        return self.free() ^ ((1 << len(self._blocks)) - 1)

    def keep(self, place: int, block: memoryview) -> NDArray[np.uint8]:
        """Return the block as an array; the block is free again when all views of the array are gone."""
        array = np.frombuffer(block, np.uint8)  # all views refer to this array
        self._blocks[place] = weakref.ref(array)
        return array

    def pin(self) -> None:
        """Keep the blocks that are in use now for ever."""
        self._blocks = [_nothing if kept_for() is None else _others for kept_for in self._blocks]


_all: set[weakref.ref[Leases]] = set()  # not a WeakSet, whose callbacks run Python code in which an interrupt would be lost


def _pin() -> None:
    for reference in tuple(_all):
        leases = reference()
        if leases is not None:
            leases.pin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_pin)
