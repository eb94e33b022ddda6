"""Compile each kernel once a machine: the first process to need it compiles and caches it, the others wait and load it."""

from __future__ import annotations

import contextlib
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import filelock
import numba
from numba.core.compiler_lock import global_compiler_lock
from numba.core.errors import NumbaWarning

__all__ = ["compiled_entry", "inlined", "kernel"]

# What is compiled beside the code itself, to be called from C and from Python: of a kernel only the latter is used, of what kernels
# call neither, which takes a third of the time of compiling a merge. The latter counts no references to arrays either: it makes none,
# and to count those it is given takes locked instructions at every call. (numba's stubs know none of these names.)
_KERNEL: Any = {"nogil": True, "no_cfunc_wrapper": True}
_PART: Any = {"_nrt": False, "nogil": True, "no_cfunc_wrapper": True, "no_cpython_wrapper": True, "forceinline": True}

LOCK_TIMEOUT = 60.0  # seconds; a kernel compiles in a few at most, so who waits this long has met a stopped process


def kernel(function: Callable[..., Any]) -> Any:
    """Decorate a kernel: releases the GIL, compiled on demand, cached on disk where a directory can be written."""
    try:
        return numba.njit(cache=True, **_KERNEL)(function)
    except RuntimeError:  # numba found neither __pycache__ nor a user cache directory that it can write
        return numba.njit(**_KERNEL)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Decorate what only kernels call: it becomes a part of each, and makes no arrays."""
    return numba.njit(**_PART)(function)


def compiled_entry(dispatcher: Any, signature: tuple[Any, ...]) -> Callable[..., Any]:
    """The machine code of a kernel for one signature, as a function that skips numba's look-up of argument types.

    Parameters
    ----------
    dispatcher : numba dispatcher
        What :func:`kernel` returned.
    signature : tuple of numba types
        The argument types; calls are not checked against them beyond item size and number of dimensions.

    Returns
    -------
    callable
        Takes about 0.2 microseconds a call where the dispatcher takes several for read-only arrays.
    """
    known = dispatcher.overloads.get(signature)
    if known is not None:  # looking for it on disk would take milliseconds
        return known.entry_point  # type: ignore[no-any-return]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaWarning)
        try:
            # Preparing numba takes 0.2 s and loading from the cache 3 ms; only who has to compile takes the lock.
            with global_compiler_lock:  # threads may use the library for the first time at once
                dispatcher.typingctx.refresh()
                dispatcher.targetctx.refresh()
                cached = dispatcher._cache.load_overload(signature, dispatcher.targetctx)
                if cached is not None:  # what compile() does with it, which would load it once more
                    dispatcher.targetctx.insert_user_function(cached.entry_point, cached.fndesc, [cached.library])
                    dispatcher.add_overload(cached)
                    return cached.entry_point  # type: ignore[no-any-return]
            with _only_process(dispatcher):
                entry = dispatcher.compile(signature)
        except (OSError, EOFError, pickle.UnpicklingError):  # the disk is full, or a cache file damaged: do without
            entry = numba.njit(**_KERNEL)(dispatcher.py_func).compile(signature)
    return entry  # type: ignore[no-any-return]


@contextlib.contextmanager
def _only_process(dispatcher: Any) -> Iterator[None]:
    """Hold the lock of a kernel in its cache directory, which also keeps its index file from being rewritten by two at once."""
    folder = dispatcher.stats.cache_path
    lock = filelock.FileLock(os.path.join(folder, f"{dispatcher.py_func.__name__}.lock")) if folder else None
    try:
        if lock is not None:
            lock.acquire(timeout=LOCK_TIMEOUT, poll_interval=0.01)
    except (OSError, filelock.Timeout):  # no locks on this file system, or its holder hangs: compiling twice is harmless
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
