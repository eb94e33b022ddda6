"""Words in shared memory by which ranks tell each other how far they are.

A rank stores a word after all that it wrote before, and who reads the word finds the rest (release and acquire).
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

# How long to look before what should be over at once is taken for a long wait: seconds of a core of our own, or so many turns of the
# others that share it. From then on MPI is called in between, so that messages of the user's arrive, too. After 5 microseconds, which is
# what 8,192 looks take on a fast core, a rank that has sent another the long way has to wait for it the next time, and goes it itself:
# at P = 2 a sum of 10 entries took 27 microseconds a time in a loop instead of 8.
_SECONDS, _SPINS_OVERSUBSCRIBED = 1e-4, 512
_TRIED = 1 << 12  # looks that tell how long one takes
# Of a word by which ranks claim parts: how many have been claimed, in the operation whose sequence number is above these bits.
_CLAIMED_BITS, _CLAIMED = np.uint64(16), np.uint64((1 << 16) - 1)


def spinning(oversubscribed: bool) -> tuple[int, int]:
    """How often to look before a wait is a long one, and the address of what to call in between, or 0.

    Parameters
    ----------
    oversubscribed : bool
        Whether ranks share cores: then they are offered to others between two looks.
    """
    return (_SPINS_OVERSUBSCRIBED, _sched_yield()) if oversubscribed else (_spins(), 0)


@lru_cache(maxsize=1)
def _spins() -> int:
    """How often a core looks before a wait is a long one."""
    (have_come, _), words, fastest = word_kernels(), np.zeros(1, np.uint64), _SECONDS
    for _ in range(5):
        start = perf_counter()
        have_come(words, 0, 1, 1, 1, _TRIED, 0)
        fastest = min(fastest, perf_counter() - start)
    return int(_SECONDS / fastest * _TRIED)


@lru_cache(maxsize=1)
def word_kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compiled ``have_come(words, at, step, count, value, spins, yield_core)`` and ``store_word(words, at, value)``; all are uint64."""
    words, word = types.Array(types.uint64, 1, "C"), types.uint64
    return compiled_entry(_have_come, (words, *(word,) * 6)), compiled_entry(_store_word, (words, word, word))


@kernel
def _store_word(words: Words, at: Any, value: Any) -> None:
    """Write a word, after all that was written or read before."""
    store_release(words, at, value)


@kernel
def _have_come(words: Words, at: Any, step: Any, count: Any, value: Any, spins: Any, yield_core: Any) -> Any:
    """Whether ``count`` words, one every ``step``, have come to a value, or do; what was written before can then be read."""
    return wait_for(words, at, step, count, value, spins, yield_core)


@inlined
def wait_for(words: Words, at: Any, step: Any, count: Any, value: Any, spins: Any, yield_core: Any) -> Any:
    """As ``have_come``, for other kernels: look at most ``spins`` times, and call what lies at ``yield_core``, if anything, in between."""
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
    """Compiled ``claim(words, at, sequence, count)``: a part below ``count`` no rank has claimed yet, -1 if there is none."""
    return compiled_entry(_claim, (types.Array(types.uint64, 1, "C"), *(types.uint64,) * 3))


@kernel
def _claim(words: Words, at: Any, sequence: Any, count: Any) -> Any:
    return claim(words, at, sequence, count)


@inlined
def claim(words: Words, at: Any, sequence: Any, count: Any) -> Any:
    """As :func:`claim_kernel` has it, for other kernels."""
    while True:
        found = load_acquire(words, at)
        claimed = found & _CLAIMED if found >> _CLAIMED_BITS == sequence else np.uint64(0)
        if claimed >= count or found >> _CLAIMED_BITS > sequence:
            return np.int64(-1)
        if compare_exchange(words, at, found, sequence << _CLAIMED_BITS | claimed + np.uint64(1)):
            return np.int64(claimed)


@lru_cache(maxsize=1)
def _sched_yield() -> int:
    """The address of the system's call by which a process offers its core to others."""
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
