"""Allocate arrays from a pool of reusable blocks, because the system clears fresh pages, which costs more than a merge.

Four ranks that add streams of 170,000 entries spent half of their time in page faults, since the C library returns large blocks to the
system.
"""

from __future__ import annotations

import math
import os
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.finalizer import Finalizer

__all__ = ["FRESH", "INSTALLED", "copy", "empty", "full", "idle_bytes"]

SMALLEST = 1 << 17  # bytes; the C library keeps shorter blocks itself
# Up to this size in bytes, zeroed memory comes from the system: it clears pages as they are touched, in the cache of this core, whereas a
# reused block may be in the cache of another core. At 4 MiB and P = 2 that takes 0.63 ms instead of 0.81; at 64 MiB it is slower.
FRESH = 1 << 23
# Bytes of the machine, where the system tells.
INSTALLED = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if "SC_PHYS_PAGES" in os.sysconf_names else 1 << 47
IDLE_LIMIT = 1 << 28  # limit of idle bytes: of blocks of one size, and of all blocks when the next is allocated


class _Pool:
    """Idle blocks that can be reused, by their size."""

    def __init__(self) -> None:
        self.idle: dict[int, deque[NDArray[np.uint8]]] = {}

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return a block, which becomes idle again when all arrays on it are gone."""
        idle = self.idle.get(size)
        if idle is None:  # when full, it drops the oldest block
            idle = self.idle.setdefault(size, deque(maxlen=IDLE_LIMIT // size))
        try:
            block = idle.pop()
        except IndexError:
            self._trim()
            block = np.empty(size, np.uint8)
        lease = Finalizer(idle.append, block)
        lease.__array_interface__ = block.__array_interface__  # type: ignore[attr-defined]
        return np.asarray(lease)

    def idle_bytes(self) -> int:
        return sum(size * len(idle) for size, idle in tuple(self.idle.items()))

    def _trim(self) -> None:
        """Drop idle blocks above the limit; blocks that become idle later may exceed it again, up to the limit for each size."""
        above = self.idle_bytes() - IDLE_LIMIT
        for size, idle in sorted(self.idle.items(), reverse=True) if above > 0 else ():
            with suppress(IndexError):  # another thread may take the last
                while above > 0:
                    idle.popleft()
                    above -= size


_pool = _Pool()


def empty(shape: int | tuple[int, ...], dtype: DTypeLike, xp: Any = np) -> NDArray[Any]:
    """Return an uninitialised array like ``numpy.empty``; its memory is reused when the array and all views of it are gone.

    For another array module, such as CuPy, which manages memory itself, this is the module's own ``empty``.

    Examples
    --------
    >>> empty((2, 3), "float32").shape
    (2, 3)
    """
    if xp is not np:
        return xp.empty(shape, dtype)  # type: ignore[no-any-return]
    dtype = np.dtype(dtype)
    nbytes = (math.prod(shape) if isinstance(shape, tuple) else shape) * dtype.itemsize
    if nbytes < SMALLEST:
        return np.empty(shape, dtype)
    # Sizes have three significant bits, so that a fourth at most is wasted and few sizes are told apart.
    step = 1 << (nbytes.bit_length() - 3)
    block = _pool.take(-(-nbytes // step) * step)
    return block[:nbytes].view(dtype).reshape(shape)


def full(shape: int | tuple[int, ...], value: Any, xp: Any = np) -> NDArray[Any]:
    """Return an array filled with ``value``, of its dtype, like ``numpy.full``.

    Examples
    --------
    >>> full(2, np.float32(1))
    array([1., 1.], dtype=float32)
    """
    if xp is not np:
        return xp.full(shape, value, value.dtype)  # type: ignore[no-any-return]
    if not value and math.prod(shape if isinstance(shape, tuple) else (shape,)) * value.itemsize <= FRESH:
        return np.zeros(shape, value.dtype)
    array = empty(shape, value.dtype)
    array.fill(value)
    return array


def copy(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of an array, from the pool if it is large.

    Examples
    --------
    >>> copy(full(2, np.float32(1)))
    array([1., 1.], dtype=float32)
    """
    if array.nbytes <= FRESH or type(array) is not np.ndarray:
        return array.copy()
    copied = empty(array.shape, array.dtype)
    np.copyto(copied, array)
    return copied


def idle_bytes() -> int:
    """Return the total size of idle blocks in bytes."""
    return _pool.idle_bytes()
