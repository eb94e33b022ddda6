"""A file in memory that the ranks of one host share, and what each of them maps of it.

The file has no name, and its size costs nothing. Address space goes to what a rank has mapped, memory to what has been reserved: a page
that is touched when none is left kills the process, so that a rank reserves what an operation may use before it publishes that it is
armed, and a refusal sends the operation another way.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numba.core import config
from numpy.typing import NDArray

from sparseallreduce.algorithms.steps import Share, Step
from sparseallreduce.finalizer import Finalizer
from sparseallreduce.runtime.limits import memory_left

__all__ = ["PAGE", "Mapping", "SharedFile", "map_rows", "page_multiple", "rounded_up", "shared_file", "shared_memory"]

T = TypeVar("T")

PAGE = mmap.PAGESIZE  # bytes

# Bytes from which on memory is asked for in large pages, which Linux gives where the administrator lets processes share them ("advise"
# in shmem_enabled): with them two ranks took 0.95 of the time for gradient and update at N = 3.2 million. Such a page lies in memory and in
# the file at multiples of its size.
_LARGE, _LARGE_PAGE = 1 << 22, 1 << 21
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MARGIN = 1 << 26  # bytes that a reservation leaves to what the ranks take otherwise, meanwhile
_RESERVED = 1 << 16  # bytes that are reserved at least, where more may follow
_SECRET = 16  # bytes
_PATH = 64  # bytes
_NAME = "sparseallreduce"
_MEMORY = b"/memfd:" + _NAME.encode()  # where a path to such memory leads
# Of Linux, which Python's mmap does not have.
_MAP_FIXED, _MADV_POPULATE_WRITE = 0x10, 23
_FAILED = 2 ** (8 * ctypes.sizeof(ctypes.c_void_p)) - 1  # what mmap returns then


class SharedFile:
    """A file in memory, zeros at first, of which each rank of a host maps what it uses.

    Parameters
    ----------
    file : int
        Its descriptor, which is closed with this object.
    nbytes : int
        How long it is, but for what tells it from others.
    """

    def __init__(self, file: int, nbytes: int) -> None:
        self.file, self.nbytes = file, nbytes
        self._close = Finalizer(os.close, file)

    def map(self, places: Sequence[int], nbytes: int, writeable: bool = True) -> NDArray[np.uint8]:
        """The bytes from each of some places on, as rows of one array; unmapped when the array and all views of it are gone.

        Parameters
        ----------
        places : sequence of int
            In the file; multiples of :data:`PAGE`.
        nbytes : int
            Of a row; if there are several, a multiple of :data:`PAGE`.
        writeable : bool
            If not, nobody can write there through the array, nor through a pointer: the system ends a process that does.

        Raises
        ------
        OSError
            If there is no address space left.
        """
        array = map_rows([(self.file, place) for place in places], nbytes, writeable)
        length = page_multiple(nbytes) * len(places)
        if length >= _LARGE:
            _calls().advise(array.ctypes.data, length, getattr(mmap, "MADV_HUGEPAGE", 14))  # which not every system has, nor has to
        return array

    def read(self, place: int, out: NDArray[np.uint8]) -> None:
        """Fill an array with the bytes from a place on, which need not be mapped.

        Raises
        ------
        OSError
            If there are not so many.
        """
        done, left = 0, memoryview(out)  # type: ignore[arg-type]
        while done < len(out):
            count = os.preadv(self.file, [left[done:]], place + done)
            if not count:
                raise OSError(f"shared memory of {self.nbytes} bytes ends before {place + len(out)}")
            done += count

    def write(self, place: int, source: NDArray[np.uint8]) -> None:
        """Write bytes from a place on, which need not be mapped."""
        done, left = 0, memoryview(source)  # type: ignore[arg-type]
        while done < len(source):
            done += os.pwrite(self.file, left[done:], place + done)

    def taken(self) -> int:
        """Bytes of memory that it takes, whoever has reserved them."""
        return 512 * os.fstat(self.file).st_blocks

    def reserve(self, pieces: Iterable[tuple[int, int]], needed: int | None = None) -> bool:
        """Take memory for pieces of the file, each from a place on so many bytes, unless there is not enough.

        ``needed`` tells for how many bytes there has to be memory, by default for as many as are in the pieces: fewer where others have
        taken some of it, more where they are about to.
        """
        pieces = [(place, nbytes) for place, nbytes in pieces if nbytes > 0]
        total = sum(nbytes for _, nbytes in pieces)
        if memory_left() < (total if needed is None else needed) + _MARGIN:
            return False
        large = total >= _LARGE and _gives_large_pages()
        try:
            for place, nbytes in pieces:
                if large:
                    self._touch(place, nbytes)
                os.posix_fallocate(self.file, place, nbytes)
        except OSError:
            return False
        return True

    def _touch(self, place: int, nbytes: int) -> None:
        """Take memory in large pages, which the system gives to who has mapped it, if it has this call."""
        begin = place // _LARGE_PAGE * _LARGE_PAGE
        array = self.map([begin], max(_LARGE, page_multiple(place + nbytes - begin)))
        untouched = (place - begin) // PAGE * PAGE
        _calls().advise(array.ctypes.data + untouched, page_multiple(place + nbytes - begin) - untouched, _MADV_POPULATE_WRITE)


def map_rows(places: Sequence[tuple[int, int]], nbytes: int, writeable: bool = False) -> NDArray[np.uint8]:
    """Pieces of files as rows of one array; unmapped when the array and all views of it are gone.

    Parameters
    ----------
    places : sequence of (int, int)
        The descriptor of a file, which may be closed afterwards, and where its piece begins, a multiple of :data:`PAGE`.
    nbytes, writeable
        As for :meth:`SharedFile.map`.

    Raises
    ------
    OSError
        If there is no address space left, or the system maps no more pieces.
    """
    calls, length = _calls(), page_multiple(nbytes) * len(places)
    aligned = _LARGE_PAGE if nbytes >= _LARGE_PAGE else PAGE
    # Rows lie side by side, as compiled code has them, in addresses that are taken first.
    start = calls.map(None, length + aligned, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if start is None or start == _FAILED:
        raise OSError(ctypes.get_errno(), f"no address space for {length} bytes of shared memory")
    begin = -(-start // aligned) * aligned
    for address, rest in ((start, begin - start), (begin + length, start + aligned - begin)):
        if rest:
            calls.unmap(address, rest)
    mapping = Mapping(begin, length, (len(places), nbytes), writeable)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writeable else 0)
    for row, (file, place) in enumerate(places):
        mapped = calls.map(begin + row * nbytes, page_multiple(nbytes), protection, mmap.MAP_SHARED | _MAP_FIXED, file, place)
        if mapped in (None, _FAILED):
            raise OSError(ctypes.get_errno(), f"cannot map {nbytes} bytes of shared memory")
    return np.asarray(mapping)


def shared_file(
    rank: int, nbytes: int, reserved: Iterable[tuple[int, int]], make: Callable[[SharedFile], T]
) -> Generator[Step, Any, T | None]:
    """What each rank makes of a file that all ranks have; None on all of them if any cannot.

    It belongs to no file system, and is gone with the last process that has it. Without compiled kernels there is no use for it.

    Parameters
    ----------
    rank, nbytes : int
    reserved : iterable of (int, int)
        Pieces for which there is to be memory at once, as for :meth:`SharedFile.reserve`.
    make : callable
        May raise OSError or MemoryError.
    """
    secret, path, file = secrets.token_bytes(_SECRET), b"", None
    made: T | None = None
    jit = not config.DISABLE_JIT  # type: ignore[attr-defined]
    try:
        if rank == 0 and jit:
            file = SharedFile(os.memfd_create(_NAME), nbytes)
            os.ftruncate(file.file, nbytes + _SECRET)
            if file.reserve(reserved):
                os.pwrite(file.file, secret, nbytes)
                made = make(file)
                path = f"/proc/{os.getpid()}/fd/{file.file}".encode()
    except (OSError, AttributeError, ValueError, MemoryError):  # there is none to be had, or no such call on this system
        made = None
    records = yield Share(path.ljust(_PATH, b"\0") + secret)
    path, secret = records[0][:_PATH].rstrip(b"\0"), records[0][_PATH:]
    try:
        if rank and path and jit and os.readlink(path).startswith(_MEMORY):
            file = SharedFile(os.open(path, os.O_RDWR | os.O_CLOEXEC), nbytes)
            if os.fstat(file.file).st_size == nbytes + _SECRET and os.pread(file.file, _SECRET, nbytes) == secret:
                made = make(file)  # and not of that of other ranks, in a container that numbers its own
    except (OSError, ValueError, MemoryError):
        made = None
    everyone: list[bytes] = yield Share(bytes([made is not None]))
    return made if all(map(any, everyone)) else None


def shared_memory(rank: int, nbytes: int) -> Generator[Step, Any, NDArray[np.uint8] | None]:
    """Memory filled with zeros that all ranks have mapped, and that is reserved; None on all of them if any cannot."""
    return (yield from shared_file(rank, nbytes, [(0, nbytes)], lambda file: file.map([0], nbytes)[0]))


def page_multiple(nbytes: int) -> int:
    """Bytes of the pages that so many bytes lie on."""
    return -(-nbytes // PAGE) * PAGE


def rounded_up(nbytes: int) -> int:
    """As many bytes or up to an eighth more, of which few numbers are told apart, so that streams that grow seldom ask for memory."""
    nbytes = max(nbytes, _RESERVED)
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return page_multiple(-(-nbytes // step) * step)


class _Calls(NamedTuple):
    map: Callable[..., int | None]
    unmap: Callable[..., int]
    advise: Callable[..., int]


@lru_cache(maxsize=1)
def _calls() -> _Calls:
    """The system's own: Python's mmap chooses the place itself, and keeps a descriptor open for each."""
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes, library.mmap.restype = (address, size, number, number, number, ctypes.c_long), address
    library.munmap.argtypes, library.madvise.argtypes = (address, size), (address, size, number)
    return _Calls(library.mmap, library.munmap, library.madvise)


class Mapping:
    """What all arrays on a mapping refer to; it leads to nothing else."""

    __slots__ = ("__array_interface__", "_unmap")

    def __init__(self, address: int, length: int, shape: tuple[int, ...], writeable: bool) -> None:
        self._unmap = Finalizer(_calls().unmap, address, length)
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": shape, "data": (address, not writeable)}


def _gives_large_pages() -> bool:
    """Whether shared memory comes in large pages to who asks for them by madvise, which reserving does not."""
    with contextlib.suppress(OSError):
        return "[advise]" in _LARGE_PAGES.read_text()
    return False
