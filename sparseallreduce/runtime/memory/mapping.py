"""Create memory files shared by the ranks of one host, and map parts of them.

The file has no name, and its size costs nothing. Mapping uses address space, and reserving uses memory. Touching a page when no memory is
left kills the process; a rank therefore reserves what an operation may use before it publishes that it is armed, and a refusal leads to
another method.
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

# From this size on memory is requested in large pages, which Linux gives if the administrator allows them for shared memory ("advise" in
# shmem_enabled): with them two ranks took 0.95 of the time for gradient and update at N = 3.2 million. A large page is aligned to its
# size in memory and in the file.
_LARGE, _LARGE_PAGE = 1 << 22, 1 << 21
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MARGIN = 1 << 26  # bytes that a reservation leaves for other allocations
_RESERVED = 1 << 16  # smallest reservation, in bytes, of memory that may grow
_SECRET = 16  # bytes
_PATH = 64  # bytes
_NAME = "sparseallreduce"
_MEMORY = b"/memfd:" + _NAME.encode()  # target of the link to such a file
# Linux constants that Python's mmap module lacks.
_MAP_FIXED, _MADV_POPULATE_WRITE = 0x10, 23
_FAILED = 2 ** (8 * ctypes.sizeof(ctypes.c_void_p)) - 1  # mmap's return value on failure


class SharedFile:
    """A file in memory, initially zero, of which each rank of a host maps what it uses.

    Parameters
    ----------
    file : int
        Its descriptor, which is closed with this object.
    nbytes : int
        Its size, without the identifier at its end.
    """

    file: int
    nbytes: int

    def __init__(self, file: int, nbytes: int) -> None:
        self.file, self.nbytes = file, nbytes
        self._close = Finalizer(os.close, file)

    def map(self, places: Sequence[int], nbytes: int, writeable: bool = True) -> NDArray[np.uint8]:
        """Map pieces of ``nbytes`` bytes as the rows of one array; they are unmapped when the array and all views of it are gone.

        Parameters
        ----------
        places : sequence of int
            Offsets in the file, multiples of :data:`PAGE`.
        nbytes : int
            Size of a row; with several rows a multiple of :data:`PAGE`.
        writeable : bool
            If False, the memory cannot be written through the array or a pointer: the system terminates a process that does.

        Raises
        ------
        OSError
            If there is no address space left.
        """
        array = map_rows([(self.file, place) for place in places], nbytes, writeable)
        length = page_multiple(nbytes) * len(places)
        if length >= _LARGE:
            _calls().advise(array.ctypes.data, length, getattr(mmap, "MADV_HUGEPAGE", 14))  # only a hint
        return array

    def read(self, place: int, out: NDArray[np.uint8]) -> None:
        """Fill an array with the bytes from offset ``place`` on, without mapping them.

        Raises
        ------
        OSError
            If the file is too short.
        """
        done, left = 0, memoryview(out)  # type: ignore[arg-type]
        while done < len(out):
            count = os.preadv(self.file, [left[done:]], place + done)
            if not count:
                raise OSError(f"shared memory of {self.nbytes} bytes ends before {place + len(out)}")
            done += count

    def write(self, place: int, source: NDArray[np.uint8]) -> None:
        """Write bytes from offset ``place`` on, without mapping them."""
        done, left = 0, memoryview(source)  # type: ignore[arg-type]
        while done < len(source):
            done += os.pwrite(self.file, left[done:], place + done)

    def taken(self) -> int:
        """Return the bytes of memory that the file uses, whichever rank has reserved them."""
        return 512 * os.fstat(self.file).st_blocks

    def reserve(self, pieces: Iterable[tuple[int, int]], needed: int | None = None) -> bool:
        """Allocate memory for pieces of the file, given as (offset, size in bytes); return False if there is not enough.

        ``needed`` is the number of bytes that must be available, by default the sum of the pieces: fewer if other ranks have already
        allocated some of them, more if they are about to.
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
        """Map this part of the file for a moment to allocate its memory in large pages, if the system supports it."""
        begin = place // _LARGE_PAGE * _LARGE_PAGE
        array = self.map([begin], max(_LARGE, page_multiple(place + nbytes - begin)))
        untouched = (place - begin) // PAGE * PAGE
        _calls().advise(array.ctypes.data + untouched, page_multiple(place + nbytes - begin) - untouched, _MADV_POPULATE_WRITE)


def map_rows(places: Sequence[tuple[int, int]], nbytes: int, writeable: bool = False) -> NDArray[np.uint8]:
    """Map pieces of files as the rows of one array; they are unmapped when the array and all views of it are gone.

    Parameters
    ----------
    places : sequence of (int, int)
        File descriptor, which may be closed afterwards, and offset of the piece, a multiple of :data:`PAGE`.
    nbytes, writeable
        As for :meth:`SharedFile.map`.

    Raises
    ------
    OSError
        If there is no address space left, or the system allows no more mappings.
    """
    calls, length = _calls(), page_multiple(nbytes) * len(places)
    aligned = _LARGE_PAGE if nbytes >= _LARGE_PAGE else PAGE
    # Compiled code needs contiguous rows, so their address range is reserved first.
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
    """Create a memory file that all ranks open, and return ``make(file)``; None on all ranks if any of them fails.

    The file belongs to no file system and disappears with the last process that has it open. It is not created if compiled kernels are
    disabled.

    Parameters
    ----------
    rank, nbytes : int
    reserved : iterable of (int, int)
        Pieces whose memory is allocated immediately, as for :meth:`SharedFile.reserve`.
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
    except (OSError, AttributeError, ValueError, MemoryError):  # no memory, or no such call on this system
        made = None
    records = yield Share(path.ljust(_PATH, b"\0") + secret)
    path, secret = records[0][:_PATH].rstrip(b"\0"), records[0][_PATH:]
    try:
        if rank and path and jit and os.readlink(path).startswith(_MEMORY):
            file = SharedFile(os.open(path, os.O_RDWR | os.O_CLOEXEC), nbytes)
            if os.fstat(file.file).st_size == nbytes + _SECRET and os.pread(file.file, _SECRET, nbytes) == secret:
                made = make(file)  # checked by the secret: in another PID namespace the path may name another file
    except (OSError, ValueError, MemoryError):
        made = None
    flags: list[bytes] = yield Share(bytes([made is not None]))
    return made if all(map(any, flags)) else None


def shared_memory(rank: int, nbytes: int) -> Generator[Step, Any, NDArray[np.uint8] | None]:
    """Return zeroed, reserved memory that all ranks have mapped; None on all ranks if any of them fails."""
    return (yield from shared_file(rank, nbytes, [(0, nbytes)], lambda file: file.map([0], nbytes)[0]))


def page_multiple(nbytes: int) -> int:
    """Round ``nbytes`` up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def rounded_up(nbytes: int) -> int:
    """Round ``nbytes`` up by at most an eighth to one of few sizes, so that growing streams rarely request memory."""
    nbytes = max(nbytes, _RESERVED)
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return page_multiple(-(-nbytes // step) * step)


class _Calls(NamedTuple):
    map: Callable[..., int | None]
    unmap: Callable[..., int]
    advise: Callable[..., int]


@lru_cache(maxsize=1)
def _calls() -> _Calls:
    """Return the system's calls. Python's mmap chooses the address itself and keeps a descriptor open for each mapping."""
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes, library.mmap.restype = (address, size, number, number, number, ctypes.c_long), address
    library.munmap.argtypes, library.madvise.argtypes = (address, size), (address, size, number)
    return _Calls(library.mmap, library.munmap, library.madvise)


class Mapping:
    """The owner of a mapping, to which all arrays on it refer; it unmaps the memory when it is deleted."""

    __slots__ = ("__array_interface__", "_unmap")

    def __init__(self, address: int, length: int, shape: tuple[int, ...], writeable: bool) -> None:
        self._unmap = Finalizer(_calls().unmap, address, length)
        self.__array_interface__: dict[str, Any] = {"version": 3, "typestr": "|u1", "shape": shape, "data": (address, not writeable)}


def _gives_large_pages() -> bool:
    """Return True if the system gives large pages for shared memory on madvise; a plain reservation does not get them."""
    with contextlib.suppress(OSError):
        return "[advise]" in _LARGE_PAGES.read_text()
    return False
