"""Advice to the system on how a mapped file that is larger than memory will be read.

By default, the system reads some megabytes around every missing page, which suits sequential reading. Samples are read in random order, for
which that evicts pages that are still needed. So during training the system is advised to read only requested pages, and the rows of the
next step are requested while the present one is computed.
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
        Start of each row in the other arrays.
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
        """Advise the system to read only missing pages from now on."""
        self._advise_all(mmap.MADV_RANDOM)

    def read_in_order(self) -> None:
        """Advise the system to read ahead from now on."""
        self._advise_all(mmap.MADV_NORMAL)

    def fetch(self, rows: Array) -> None:
        """Start to read some rows, without waiting for them."""
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
            self._madvise(begin, length, advice)  # failure is harmless: it is only advice
