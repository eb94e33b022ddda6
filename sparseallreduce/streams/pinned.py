"""A bounded pool of page-locked host memory for copies from and to a GPU.

Only with page-locked memory is a copy asynchronous and as fast as the link. Such memory cannot be paged out, and allocating it takes longer
than most messages, so blocks are kept for later arrays of about the same size.
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
    """Return the limit of page-locked memory in bytes, 0 for none, from the environment.

    Raises
    ------
    StreamError
        If the variable is not a number.

    Examples
    --------
    >>> bound_of({}), bound_of({"SPARSEALLREDUCE_PINNED": "0"})
    (268435456, 0)
    """
    variable = (os.environ if environment is None else environment).get(VARIABLE, "").strip()
    if not variable:
        return _BOUND
    if not variable.isdecimal():
        raise StreamError(f"{VARIABLE} is a number of bytes, 0 for no pinned memory, not {variable!r}")
    return int(variable)


class PinnedPool:
    """Blocks of page-locked memory with a limit on their total size, including blocks in use.

    Parameters
    ----------
    allocate : callable
        Takes a size in bytes; returns page-locked memory as an object with the buffer protocol, or raises.
    bound : int
        Limit in bytes.

    Attributes
    ----------
    allocated : int
        Size of all blocks in bytes.
    in_use : int
        Size of the blocks that arrays use, in bytes.
    """

    def __init__(self, allocate: Callable[[int], Any], bound: int) -> None:
        self._allocate, self._bound = allocate, bound
        self._idle: defaultdict[int, deque[NDArray[np.uint8]]] = defaultdict(deque)
        self._lock = threading.RLock()
        self.allocated: int = 0

    @property
    def in_use(self) -> int:
        return self.allocated - sum(size * len(blocks) for size, blocks in tuple(self._idle.items()))

    def take(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any] | None:
        """Return an array on page-locked memory; None if the pool is full or the system provides none.

        The block is reused when the array and all views of it are gone. Keep the array while a copy uses it.
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
            except Exception:  # CuPy cannot allocate more: use pageable memory from now on
                self._bound = self.allocated
                return None
            self.allocated += size
            return block

    def _has_room(self, size: int) -> bool:
        """Return True if ``size`` more bytes are within the limit, after freeing idle blocks of other sizes."""
        for other in sorted(self._idle, reverse=True):
            blocks = self._idle[other]
            while self.allocated + size > self._bound and blocks:
                blocks.pop()
                self.allocated -= other
        return self.allocated + size <= self._bound
