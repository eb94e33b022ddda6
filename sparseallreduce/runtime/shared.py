"""Memory that the ranks of one host share, and words in it by which they tell each other how far they have come.

A rank writes a word after all that it wrote before, and who reads the word finds the rest (release and acquire).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np
from numba import types
from numba.core import config
from numpy.typing import NDArray

from sparseallreduce.algorithms.steps import Share, Step
from sparseallreduce.streams.kernels.compilation import compiled_entry, inlined, kernel
from sparseallreduce.streams.kernels.intrinsics import LINE, call, compare_exchange, load_acquire, store_release
from sparseallreduce.streams.stream import SparseStream

__all__ = ["LINE", "SharedStep", "Words", "claim", "claim_kernel", "come", "patience", "shared_memory", "word_kernels"]

Words = NDArray[np.uint64]

# How long to look before what should be over at once is taken for a long wait: seconds of a core of our own, or so many turns of the
# others that share it. From then on MPI is called in between, so that messages of the user's arrive, too. After 5 microseconds, which is
# what 8,192 looks take on a fast core, a rank that has sent another the long way has to wait for it the next time, and goes it itself:
# at P = 2 a sum of 10 entries took 27 microseconds a time in a loop instead of 8.
_PATIENCE, _POLLS_OFFERED = 1e-4, 512
_TRIED = 1 << 12  # looks that tell how long one takes
# Of a word by which ranks claim parts: how many have been claimed, in the turn whose number is above these bits.
_CLAIMED_BITS, _CLAIMED = np.uint64(16), np.uint64((1 << 16) - 1)
# Bytes from which on memory is asked for in large pages, which Linux gives where the administrator lets processes share them ("advise"
# in shmem_enabled): with them two ranks took 0.95 of the time for gradient and update at N = 3.2 million.
_LARGE = 1 << 22
_SECRET = 16  # bytes
_PATH = 64  # bytes
_NAME = "sparseallreduce"
_MEMORY = b"/memfd:" + _NAME.encode()  # where a path to such memory leads


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
    def abandon(self) -> None:
        """Let the others use the memory: this rank takes no part any more, if it did."""


def shared_memory(rank: int, nbytes: int) -> Generator[Step, Any, NDArray[np.uint8] | None]:
    """Memory filled with zeros that all ranks have mapped; None on all of them if any cannot.

    It belongs to no file system, and is gone with the last process that has it. Without compiled kernels there is no use for it.
    """
    secret, path, file = secrets.token_bytes(_SECRET), b"", -1
    memory: NDArray[np.uint8] | None = None
    try:
        if rank == 0 and not config.DISABLE_JIT:  # type: ignore[attr-defined]
            file = os.memfd_create(_NAME)
            os.ftruncate(file, nbytes + _SECRET)
            memory = _mapped(file, nbytes)
            memory[nbytes:] = np.frombuffer(secret, np.uint8)
            path = f"/proc/{os.getpid()}/fd/{file}".encode()
    except (OSError, AttributeError, ValueError):  # there is none to be had, or no such call on this system
        memory = None
    records = yield Share(path.ljust(_PATH, b"\0") + secret)
    path, secret = records[0][:_PATH].rstrip(b"\0"), records[0][_PATH:]
    try:
        if rank and path and not config.DISABLE_JIT and os.readlink(path).startswith(_MEMORY):  # type: ignore[attr-defined]
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            memory = _mapped(file, nbytes) if os.fstat(file).st_size == nbytes + _SECRET else None
    except (OSError, ValueError):
        memory = None
    if memory is not None and memory[nbytes:].tobytes() != secret:  # that of other ranks, in a container that numbers its own
        memory = None
    everyone: list[bytes] = yield Share(bytes([memory is not None]))
    if file >= 0:
        os.close(file)
    return memory[:nbytes] if memory is not None and all(map(any, everyone)) else None


def _mapped(file: int, nbytes: int) -> NDArray[np.uint8]:
    memory = mmap.mmap(file, nbytes + _SECRET)
    if nbytes >= _LARGE:
        with contextlib.suppress(AttributeError, OSError):  # not every system has large pages, nor lets processes share them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


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
