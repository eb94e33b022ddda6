"""Results that stay where they lie, in blocks of shared memory: a block is free again when all views of it are gone."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Leases"]

def _nothing() -> None:
    """Whom a block is kept for that is free."""


def _others() -> bool:
    """Whom one is kept for that is kept for good."""
    return True


class Leases:
    """Which of some blocks this rank keeps.

    A process that is forked off has the same results in the same memory, and nobody knows for how long: what is kept then stays so for
    good.

    Parameters
    ----------
    blocks : int
    """

    def __init__(self, blocks: int) -> None:
        self._blocks: list[Callable[[], object]] = [_nothing] * blocks  # what each is kept for
        _all.add(weakref.ref(self, _all.discard))

    def free(self) -> int:
        """The blocks whose results this rank does not have: a bit for each."""
        free = 0
        for place, kept_for in enumerate(self._blocks):
            free |= (kept_for() is None) << place
        return free

    def held(self) -> int:
        """The others."""
        return self.free() ^ ((1 << len(self._blocks)) - 1)

    def keep(self, place: int, block: memoryview) -> NDArray[np.uint8]:
        """The block as an array, which is free again when all views of it are gone."""
        array = np.frombuffer(block, np.uint8)  # which all views refer to
        self._blocks[place] = weakref.ref(array)
        return array

    def pin(self) -> None:
        """Keep for good what is kept now."""
        self._blocks = [_nothing if kept_for() is None else _others for kept_for in self._blocks]


_all: set[weakref.ref[Leases]] = set()  # a WeakSet runs Python as one goes, in which an interrupt would be lost


def _pin() -> None:
    for reference in tuple(_all):
        leases = reference()
        if leases is not None:
            leases.pin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_pin)
