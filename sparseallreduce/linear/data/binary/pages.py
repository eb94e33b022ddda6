"""What the system is told of a mapped file that is larger than the memory: which of its pages will be read.

By itself it reads some megabytes around every page that is missed, as suits who goes through a file in order. Samples are read in random
order, in which that drops what others need. So in training it is to read no more than it is asked for, and it is asked for the rows of
the next step while the present one is computed.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

__all__ = ["Pages"]

Array = NDArray[Any]

_PAGE = mmap.PAGESIZE


class Pages:
    """The pages of arrays that are parts of a mapped file.

    Parameters
    ----------
    indptr : ndarray
        Where each row begins in all of the others.
    arrays : iterable of ndarray
    """

    def __init__(self, indptr: Array, arrays: Iterable[Array]) -> None:
        self._indptr = indptr
        self._extents = [(array.ctypes.data, array.itemsize, array.nbytes) for array in arrays]
        library = ctypes.CDLL(None)
        self._madvise = getattr(library, "madvise", None)
        if self._madvise is not None:
            self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def read_at_random(self) -> None:
        """From now on, read what is missed, and no more."""
        self._advise_all(mmap.MADV_RANDOM)

    def read_in_order(self) -> None:
        """From now on, read ahead."""
        self._advise_all(mmap.MADV_NORMAL)

    def fetch(self, rows: Array) -> None:
        """Begin to read some rows, and do not wait for them."""
        starts, ends = self._indptr[rows], self._indptr[rows + 1]
        for address, itemsize, _ in self._extents:
            begins = (address + starts * itemsize) // _PAGE * _PAGE
            for begin, length in zip(begins.tolist(), (address + ends * itemsize - begins).tolist()):
                self._advise(begin, length, mmap.MADV_WILLNEED)

    def _advise_all(self, advice: int) -> None:
        for address, _, nbytes in self._extents:
            begin = address // _PAGE * _PAGE
            self._advise(begin, address + nbytes - begin, advice)

    def _advise(self, begin: int, length: int, advice: int) -> None:
        if self._madvise is not None and length > 0:
            self._madvise(begin, length, advice)  # which may be refused: it is advice
