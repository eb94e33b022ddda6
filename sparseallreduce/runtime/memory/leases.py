"""Results that stay where they lie, in blocks of shared memory: a block is free again when all views of it are gone."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Leases"]

_NOT, _HERE, _FOREVER = range(3)  # whether this rank keeps a block


class Leases:
    """Which of some blocks this rank keeps.

    A process that is forked off has the same results in the same memory, and nobody knows for how long: what is kept then stays so for
    good.

    Parameters
    ----------
    blocks : int
    """

    def __init__(self, blocks: int) -> None:
        self._kept = [_NOT] * blocks
        self._released = [_release(self._kept, place) for place in range(blocks)]
        self._leases: list[Any] = [None] * blocks
        _all.add(self)

    def free(self) -> int:
        """The blocks whose results this rank does not have: a bit for each."""
        free = 0
        for place, kept in enumerate(self._kept):
            free |= (kept == _NOT) << place
        return free

    def held(self) -> int:
        """The others."""
        return self.free() ^ ((1 << len(self._kept)) - 1)

    def keep(self, place: int, block: memoryview) -> NDArray[np.uint8]:
        """The block as an array, which is free again when all views of it are gone."""
        array = np.frombuffer(block, np.uint8)  # which all views refer to
        self._leases[place] = weakref.ref(array, self._released[place])
        self._kept[place] = _HERE  # last, so that no interrupt can keep a block for nobody
        return array

    def pin(self) -> None:
        """Keep for good what is kept now."""
        self._kept[:] = [_FOREVER if kept else _NOT for kept in self._kept]


_all: weakref.WeakSet[Leases] = weakref.WeakSet()


def _pin() -> None:
    for leases in _all:
        leases.pin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_pin)


def _release(kept: list[int], place: int, here: int = _HERE, free: int = _NOT) -> Callable[[Any], None]:
    """What is called when a result is gone, also while the interpreter ends."""

    def release(_lease: Any) -> None:
        if kept[place] == here:
            kept[place] = free

    return release
