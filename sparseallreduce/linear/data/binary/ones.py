"""Arrays of ones that take a fixed amount of memory, whatever their length."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["repeated_ones"]

Array = NDArray[Any]

_PIECE = 1 << 24  # smallest size of the piece of memory, in bytes
_PIECES = 1 << 14  # largest number of mappings: a process may have about four times as many
_MAP_FIXED = 0x10  # the value on Linux


def repeated_ones(count: int) -> Array:
    """Return read-only float32 ones of shape (count,), which map one piece of memory repeatedly.

    Ordinary memory is used on systems without memfd.

    Examples
    --------
    >>> float(repeated_ones(10_000_000).sum())
    10000000.0
    """
    size = 4 * count
    piece = max(_PIECE, -(-size // _PIECES // _PIECE) * _PIECE)
    if size <= piece or not hasattr(os, "memfd_create"):
        return np.ones(count, np.float32)
    whole = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    ones = np.frombuffer(whole, np.float32)
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    file = os.memfd_create("ones")
    try:
        os.truncate(file, piece)
        with mmap.mmap(file, piece) as writable:
            writable[:] = np.ones(piece // 4, np.float32).tobytes()
        for begin in range(0, size, piece):
            place, length = ones.ctypes.data + begin, min(piece, size - begin)
            if library.mmap(place, length, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, file, 0) != place:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(file)
    return ones
