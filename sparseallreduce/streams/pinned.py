"""Page-locked memory of the host, which a GPU copies from and to by itself, in a pool of a bounded size.

Only from and to such memory is a copy asynchronous, and only so it runs at the speed of the link. The system can page out none of it, and
to allocate it takes longer than most messages do: blocks are kept for the next array of about that size.
"""

from __future__ import annotations

import math
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.errors import StreamError
from sparseallreduce.finalizer import Finalizer

__all__ = ["VARIABLE", "PinnedPool", "bound_of"]

VARIABLE = "SPARSEALLREDUCE_PINNED"
_BOUND = 1 << 28  # bytes, unless the variable says otherwise
_SMALLEST = 1 << 12  # bytes of a block: a page


def bound_of(environment: Mapping[str, str] | None = None) -> int:
    """Bytes that may be page-locked, 0 for none.

    Raises
    ------
    StreamError
        If the variable holds anything else.

    >>> bound_of({}), bound_of({"SPARSEALLREDUCE_PINNED": "0"})
    (268435456, 0)
    """
    told = (os.environ if environment is None else environment).get(VARIABLE, "").strip()
    if not told:
        return _BOUND
    if not told.isdecimal():
        raise StreamError(f"{VARIABLE} is a number of bytes, 0 for no pinned memory, not {told!r}")
    return int(told)


class PinnedPool:
    """Blocks of page-locked memory, at most so many bytes of them, those in use included.

    Parameters
    ----------
    allocate : callable
        Gives page-locked memory of so many bytes, as an object with the buffer protocol; may raise.
    bound : int
        Bytes.

    Attributes
    ----------
    allocated : int
        Bytes of all blocks.
    in_use : int
        Bytes of those that arrays lie on.
    """

    def __init__(self, allocate: Callable[[int], Any], bound: int) -> None:
        self._allocate, self._bound = allocate, bound
        self._idle: defaultdict[int, deque[NDArray[np.uint8]]] = defaultdict(deque)
        self._lock = threading.RLock()
        self.allocated = 0

    @property
    def in_use(self) -> int:
        return self.allocated - sum(size * len(blocks) for size, blocks in tuple(self._idle.items()))

    def take(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any] | None:
        """An array on page-locked memory; None where the pool is full, or the system gives none.

        The block comes back when the array and all views of it are gone. Who has a copy under way keeps the array until that is done.
        """
        dtype = np.dtype(dtype)
        nbytes = (math.prod(shape) if isinstance(shape, tuple) else shape) * dtype.itemsize
        step = max(_SMALLEST, 1 << max(nbytes.bit_length() - 3, 0))  # as in `memory`: a fourth at most is wasted
        block = self._take(max(-(-nbytes // step), 1) * step)
        if block is None:
            return None
        lease = Finalizer(self._idle[len(block)].append, block)
        lease.__array_interface__ = block.__array_interface__  # type: ignore[attr-defined]
        return np.asarray(lease)[:nbytes].view(dtype).reshape(shape)

    def _take(self, size: int) -> NDArray[np.uint8] | None:
        try:
            return self._idle[size].pop()
        except IndexError:
            pass
        with self._lock:
            if size > self._bound or not self._has_room(size):
                return None
            try:
                block = np.frombuffer(self._allocate(size), np.uint8, size)
            except Exception:  # whatever CuPy raises for memory that is not to be had: pageable memory will do, now and later
                self._bound = self.allocated
                return None
            self.allocated += size
            return block

    def _has_room(self, size: int) -> bool:
        """Whether so many bytes more are within the bound, once idle blocks of other sizes are let go."""
        for other in sorted(self._idle, reverse=True):
            blocks = self._idle[other]
            while self.allocated + size > self._bound and blocks:
                blocks.pop()
                self.allocated -= other
        return self.allocated + size <= self._bound
