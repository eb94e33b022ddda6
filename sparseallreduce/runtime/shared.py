"""Memory that the ranks of one host share, and words in it by which they tell each other how far they have come.

A rank writes a word after all that it wrote before, and who reads the word finds the rest (release and acquire).

The memory is a file without a name. Its size costs nothing. Address space goes to what a rank has mapped, memory to what has been reserved:
a page that is touched without either being left kills the process, so that a rank reserves what an operation may use before it says to
the others that it is ready, and a refusal sends the operation another way.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numba import types
from numba.core import config
from numpy.typing import NDArray

from sparseallreduce.algorithms.allreduce import Told
from sparseallreduce.algorithms.steps import Share, Step
from sparseallreduce.runtime.limits import memory_left
from sparseallreduce.streams.kernels.compilation import compiled_entry, inlined, kernel
from sparseallreduce.streams.kernels.intrinsics import LINE, call, compare_exchange, load_acquire, store_release
from sparseallreduce.streams.stream import SparseStream

__all__ = [
    "LINE",
    "PAGE",
    "Mapping",
    "SharedFile",
    "SharedStep",
    "Words",
    "claim",
    "claim_kernel",
    "come",
    "page_multiple",
    "patience",
    "shared_file",
    "shared_memory",
    "word_kernels",
]

Words = NDArray[np.uint64]
T = TypeVar("T")

PAGE = mmap.PAGESIZE  # bytes

# How long to look before what should be over at once is taken for a long wait: seconds of a core of our own, or so many turns of the
# others that share it. From then on MPI is called in between, so that messages of the user's arrive, too. After 5 microseconds, which is
# what 8,192 looks take on a fast core, a rank that has sent another the long way has to wait for it the next time, and goes it itself:
# at P = 2 a sum of 10 entries took 27 microseconds a time in a loop instead of 8.
_PATIENCE, _POLLS_OFFERED = 1e-4, 512
_TRIED = 1 << 12  # looks that tell how long one takes
# Of a word by which ranks claim parts: how many have been claimed, in the turn whose number is above these bits.
_CLAIMED_BITS, _CLAIMED = np.uint64(16), np.uint64((1 << 16) - 1)
# Bytes from which on memory is asked for in large pages, which Linux gives where the administrator lets processes share them ("advise"
# in shmem_enabled): with them two ranks took 0.95 of the time for gradient and update at N = 3.2 million. Such a page lies in memory and in
# the file at multiples of its size.
_LARGE, _LARGE_PAGE = 1 << 22, 1 << 21
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MARGIN = 1 << 26  # bytes that a reservation leaves to what the ranks take otherwise, meanwhile
_SECRET = 16  # bytes
_PATH = 64  # bytes
_NAME = "sparseallreduce"
_MEMORY = b"/memfd:" + _NAME.encode()  # where a path to such memory leads
# Of Linux, which Python's mmap does not have.
_MAP_FIXED, _MADV_POPULATE_WRITE = 0x10, 23
_FAILED = 2 ** (8 * ctypes.sizeof(ctypes.c_void_p)) - 1  # what mmap returns then


class SharedStep(ABC):
    """A step of an operation that ranks take in memory that they share, without the network."""

    __slots__ = ()

    @abstractmethod
    def result(self, polls: int = 1) -> SparseStream | None:
        """What it comes to, if the others have come as far as that takes, or do while we look so many times."""

    @abstractmethod
    def moved(self) -> tuple[int, int, int]:
        """Bytes that this rank would have sent and received by messages, in equal parts, and how many it would have sent."""

    @abstractmethod
    def told(self) -> Told:
        """What this rank tells the others, once it can take the step."""

    @abstractmethod
    def decline(self) -> None:
        """Not all ranks take the step: nobody does."""

    @abstractmethod
    def abandon(self) -> None:
        """This rank takes no part any more, if it did, and gives the memory of the others back; they may still be at it."""


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
        weakref.finalize(self, os.close, file).atexit = False  # the system closes it then

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
        calls, length = _calls(), page_multiple(nbytes) * len(places)
        aligned = _LARGE_PAGE if nbytes >= _LARGE_PAGE else PAGE
        # Rows lie side by side, as compiled code has them, in addresses that are taken first.
        start = calls.map(None, length + aligned, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if start in (None, _FAILED):
            raise OSError(ctypes.get_errno(), f"no address space for {length} bytes of shared memory")
        begin = -(-start // aligned) * aligned
        for address, rest in ((start, begin - start), (begin + length, start + aligned - begin)):
            if rest:
                calls.unmap(address, rest)
        mapping = Mapping(begin, length, (len(places), nbytes), writeable)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writeable else 0)
        for row, place in enumerate(places):
            mapped = calls.map(begin + row * nbytes, page_multiple(nbytes), protection, mmap.MAP_SHARED | _MAP_FIXED, self.file, place)
            if mapped in (None, _FAILED):
                raise OSError(ctypes.get_errno(), f"cannot map {nbytes} bytes of shared memory")
        if length >= _LARGE:
            calls.advise(begin, length, getattr(mmap, "MADV_HUGEPAGE", 14))  # which not every system has, nor has to
        return np.asarray(mapping)

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

    __slots__ = ("__array_interface__", "_place", "_unmap")

    def __init__(self, address: int, length: int, shape: tuple[int, ...], writeable: bool) -> None:
        self._place, self._unmap = (address, length), _calls().unmap  # since globals may be gone when the interpreter ends
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": shape, "data": (address, not writeable)}

    def __del__(self) -> None:
        self._unmap(*self._place)


def _gives_large_pages() -> bool:
    """Whether shared memory comes in large pages to who asks for them by madvise, which reserving does not."""
    with contextlib.suppress(OSError):
        return "[advise]" in _LARGE_PAGES.read_text()
    return False


def patience(crowded: bool) -> tuple[int, int]:
    """How often to look before a wait is a long one, and the address of what to call in between, or 0.

    Parameters
    ----------
    crowded : bool
        Whether ranks share cores: then they are offered to others between two looks.
    """
    return (_POLLS_OFFERED, _sched_yield()) if crowded else (_polls(), 0)


@lru_cache(maxsize=1)
def _polls() -> int:
    """How often a core looks while it has patience."""
    (have_come, _), words, fastest = word_kernels(), np.zeros(1, np.uint64), _PATIENCE
    for _ in range(5):
        start = perf_counter()
        have_come(words, 0, 1, 1, 1, _TRIED, 0)
        fastest = min(fastest, perf_counter() - start)
    return int(_PATIENCE / fastest * _TRIED)


@lru_cache(maxsize=1)
def word_kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compiled ``have_come(words, at, step, count, value, polls, offer)`` and ``set_word(words, at, value)``; all are uint64."""
    words, word = types.Array(types.uint64, 1, "C"), types.uint64
    return compiled_entry(_have_come, (words, *(word,) * 6)), compiled_entry(_set, (words, word, word))


@kernel
def _set(words: Words, at: Any, value: Any) -> None:
    """Write a word, after all that was written or read before."""
    store_release(words, at, value)


@kernel
def _have_come(words: Words, at: Any, step: Any, count: Any, value: Any, polls: Any, offer: Any) -> Any:
    """Whether ``count`` words, one every ``step``, have come to a value, or do; what was written before can then be read."""
    return come(words, at, step, count, value, polls, offer)


@inlined
def come(words: Words, at: Any, step: Any, count: Any, value: Any, polls: Any, offer: Any) -> Any:
    """As ``have_come``, for other kernels: look at most ``polls`` times, and call what lies at ``offer``, if anything, in between."""
    i = np.uint64(0)
    for _ in range(polls):
        while i < count and load_acquire(words, at + i * step) >= value:
            i += np.uint64(1)
        if i == count:
            return True
        if offer:
            call(offer)
    return False


@lru_cache(maxsize=1)
def claim_kernel() -> Callable[..., Any]:
    """Compiled ``claim(words, at, turn, count)``: a part below ``count`` that nobody has claimed in this turn, -1 if there is none left."""
    return compiled_entry(_claim, (types.Array(types.uint64, 1, "C"), *(types.uint64,) * 3))


@kernel
def _claim(words: Words, at: Any, turn: Any, count: Any) -> Any:
    return claim(words, at, turn, count)


@inlined
def claim(words: Words, at: Any, turn: Any, count: Any) -> Any:
    """As :func:`claim_kernel` has it, for other kernels."""
    while True:
        found = load_acquire(words, at)
        claimed = found & _CLAIMED if found >> _CLAIMED_BITS == turn else np.uint64(0)
        if claimed >= count or found >> _CLAIMED_BITS > turn:
            return np.int64(-1)
        if compare_exchange(words, at, found, turn << _CLAIMED_BITS | claimed + np.uint64(1)):
            return np.int64(claimed)


@lru_cache(maxsize=1)
def _sched_yield() -> int:
    """The address of the system's call by which a process offers its core to others."""
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
