"""Words in shared memory by which ranks publish their progress.

A rank stores a word after everything that it wrote before, and a rank that reads the word can read the rest (release and acquire).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.compilation import compiled_entry, inlined, kernel
from sparseallreduce.streams.kernels.intrinsics import LINE, call, compare_exchange, load_acquire, store_release

__all__ = ["LINE", "Words", "claim", "claim_kernel", "spinning", "wait_for", "word_kernels"]

Words = NDArray[np.uint64]

# How long to poll before a wait counts as long: seconds if the rank has its own core, or polls if ranks share cores. After that MPI is
# called between polls, so that the user's messages progress, too. With a limit of 5 microseconds (8,192 polls on a fast core), one rank
# took the slow path, made the other wait in the next operation, and both stayed on it: a sum of 10 entries at P = 2 took 27
# microseconds in a loop instead of 8.
_SECONDS, _SPINS_OVERSUBSCRIBED = 1e-4, 512
_TRIED = 1 << 12  # polls by which the time of one is measured
# A word by which ranks claim parts holds the number of claimed parts in these bits, and above them the operation's sequence number.
_CLAIMED_BITS, _CLAIMED = np.uint64(16), np.uint64((1 << 16) - 1)


def spinning(oversubscribed: bool) -> tuple[int, int]:
    """Return the number of polls before a wait counts as long, and the address of a function to call between polls, or 0.

    Parameters
    ----------
    oversubscribed : bool
        Whether ranks share cores, which are then yielded between polls.
    """
    return (_SPINS_OVERSUBSCRIBED, _sched_yield()) if oversubscribed else (_spins(), 0)


@lru_cache(maxsize=1)
def _spins() -> int:
    """Return the number of polls, measured for this core, before a wait counts as long."""
    (all_reached, _), words, fastest = word_kernels(), np.zeros(1, np.uint64), _SECONDS
    for _ in range(5):
        start = perf_counter()
        all_reached(words, 0, 1, 1, 1, _TRIED, 0)
        fastest = min(fastest, perf_counter() - start)
    return int(_SECONDS / fastest * _TRIED)


@lru_cache(maxsize=1)
def word_kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return compiled ``all_reached(words, at, step, count, value, spins, yield_core)`` and ``store_word(words, at, value)``."""
    words, word = types.Array(types.uint64, 1, "C"), types.uint64
    return compiled_entry(_all_reached, (words, *(word,) * 6)), compiled_entry(_store_word, (words, word, word))


@kernel
def _store_word(words: Words, at: Any, value: Any) -> None:
    """Store a word, ordered after all previous reads and writes."""
    store_release(words, at, value)


@kernel
def _all_reached(words: Words, at: Any, step: Any, count: Any, value: Any, spins: Any, yield_core: Any) -> Any:
    """Return True if ``count`` words, ``step`` apart, have reached ``value``, polling ``spins`` times."""
    return wait_for(words, at, step, count, value, spins, yield_core)


@inlined
def wait_for(words: Words, at: Any, step: Any, count: Any, value: Any, spins: Any, yield_core: Any) -> Any:
    """Implement ``all_reached`` for use in other kernels; the function at ``yield_core``, if not 0, is called between polls."""
    i = np.uint64(0)
    for _ in range(spins):
        while i < count and load_acquire(words, at + i * step) >= value:
            i += np.uint64(1)
        if i == count:
            return True
        if yield_core:
            call(yield_core)
    return False


@lru_cache(maxsize=1)
def claim_kernel() -> Callable[..., Any]:
    """Return compiled ``claim(words, at, sequence, count)``: it returns a part that no rank has claimed, or -1."""
    return compiled_entry(_claim, (types.Array(types.uint64, 1, "C"), *(types.uint64,) * 3))


@kernel
def _claim(words: Words, at: Any, sequence: Any, count: Any) -> Any:
    return claim(words, at, sequence, count)


@inlined
def claim(words: Words, at: Any, sequence: Any, count: Any) -> Any:
    """Implement :func:`claim_kernel` for use in other kernels."""
    while True:
        found = load_acquire(words, at)
        claimed = found & _CLAIMED if found >> _CLAIMED_BITS == sequence else np.uint64(0)
        if claimed >= count or found >> _CLAIMED_BITS > sequence:
            return np.int64(-1)
        if compare_exchange(words, at, found, sequence << _CLAIMED_BITS | claimed + np.uint64(1)):
            return np.int64(claimed)


@lru_cache(maxsize=1)
def _sched_yield() -> int:
    """Return the address of the system call by which a process yields its core."""
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
