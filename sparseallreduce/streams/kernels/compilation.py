"""Compile each kernel once per machine: the first process that needs it compiles and caches it, others wait and load it."""

from __future__ import annotations

import contextlib
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import filelock
import numba
from numba.core import event
from numba.core.compiler_lock import global_compiler_lock
from numba.core.errors import NumbaWarning
from numba.core.event import Listener

from sparseallreduce.streams.kernels import compilations

__all__ = ["compiled_entry", "inlined", "kernel"]

# numba also compiles wrappers for calls from C and from Python. A kernel needs only the latter, and functions inside kernels neither, which
# saves a third of the time to compile a merge. The latter also have no reference counting (_nrt): they allocate no arrays, and counting
# takes locked instructions at every call. (numba's stubs do not declare these names.)
_KERNEL: Any = {"nogil": True, "no_cfunc_wrapper": True}
_PART: Any = {"_nrt": False, "nogil": True, "no_cfunc_wrapper": True, "no_cpython_wrapper": True, "forceinline": True}

_prepared: set[Any] = set()  # numba's contexts in which a kernel has been loaded
LOCK_TIMEOUT = 60.0  # seconds; a kernel compiles in a few, so after this the process that holds the lock has probably been stopped


class _Compiling(Listener):
    """Reports what numba compiles."""

    def on_start(self, event: Any) -> None:
        compilations.begin(compiles=True)

    def on_end(self, event: Any) -> None:
        compilations.end(compiles=True)


event.register("numba:compile", _Compiling())  # type: ignore[no-untyped-call]


def kernel(function: Callable[..., Any]) -> Any:
    """Decorate a kernel: compiled on demand, without the GIL, and cached on disk if a cache directory is writeable."""
    try:
        return numba.njit(cache=True, **_KERNEL)(function)
    except RuntimeError:  # numba found neither __pycache__ nor a user cache directory that it can write
        return numba.njit(**_KERNEL)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Decorate a function that only kernels call. It is inlined into each, and must not allocate arrays."""
    return numba.njit(**_PART)(function)


def compiled_entry(dispatcher: Any, signature: tuple[Any, ...]) -> Callable[..., Any]:
    """Return the compiled code of a kernel for one signature, as a function that skips numba's look-up of argument types.

    Parameters
    ----------
    dispatcher : numba dispatcher
        The result of :func:`kernel`.
    signature : tuple of numba types
        The argument types. Calls are checked only for item size and number of dimensions.

    Returns
    -------
    callable
        A call takes about 0.2 microseconds; numba's dispatcher takes several for read-only arrays.
    """
    known = dispatcher.overloads.get(signature)
    if known is not None:  # avoids a look-up on disk, which takes milliseconds
        return known.entry_point  # type: ignore[no-any-return]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaWarning)
        try:
            # Preparing numba takes 0.2 s and loading from the cache 3 ms; the lock is needed only to compile.
            with global_compiler_lock:  # threads may use the library for the first time at once
                cached = _load(dispatcher, signature)
                if cached is not None:  # as compile() does, without loading it again
                    dispatcher.targetctx.insert_user_function(cached.entry_point, cached.fndesc, [cached.library])
                    dispatcher.add_overload(cached)
                    return cached.entry_point  # type: ignore[no-any-return]
            with _only_process(dispatcher):
                entry = dispatcher.compile(signature)
        except (OSError, EOFError, pickle.UnpicklingError):  # the disk is full or a cache file is damaged: compile without a cache
            entry = numba.njit(**_KERNEL)(dispatcher.py_func).compile(signature)
    return entry  # type: ignore[no-any-return]


def _load(dispatcher: Any, signature: tuple[Any, ...]) -> Any:
    """Return the compiled code of a kernel from the cache on disk, or None.

    numba looks for new types and functions before it loads a kernel, which takes as long as loading. Only compilation needs them, so it is
    left to the first kernel of a process.
    """
    cache, context = dispatcher._cache, dispatcher.targetctx
    if context in _prepared and hasattr(cache, "_load_overload"):
        with cache._guard_against_spurious_io_errors():
            return cache._load_overload(signature, context)
    dispatcher.typingctx.refresh()
    found = cache.load_overload(signature, context)
    _prepared.add(context)
    return found


@contextlib.contextmanager
def _only_process(dispatcher: Any) -> Iterator[None]:
    """Hold the lock of a kernel in its cache directory, which also protects the index file of the cache."""
    folder = dispatcher.stats.cache_path
    lock = filelock.FileLock(os.path.join(folder, f"{dispatcher.py_func.__name__}.lock")) if folder else None
    try:
        if lock is not None:
            _acquire(lock)
    except (OSError, filelock.Timeout):  # no locks on this file system, or its holder hangs: compiling twice is harmless
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _acquire(lock: filelock.BaseFileLock) -> None:
    compilations.begin(compiles=False)
    try:
        lock.acquire(timeout=LOCK_TIMEOUT, poll_interval=0.01)
    finally:
        compilations.end(compiles=False)
