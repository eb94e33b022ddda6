"""Choose the backend for an array: NumPy, numba, or CUDA for arrays in GPU memory."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from sparseallreduce.errors import StreamError, StreamTypeError
from sparseallreduce.streams.kernels.devices import Queue, local_rank, numbered

__all__ = [
    "MIXED",
    "array_module",
    "as_host",
    "as_host_together",
    "backend_of",
    "cuda_kernels",
    "current_queue",
    "device_kernels",
    "device_module",
    "mark_read_only",
    "may_be_written",
    "module_in_use",
    "on_device",
]

MIXED = "arrays of the host and of a GPU meet: move one of the streams, as with stream.to_device() or stream.to_host()"
_loaded: ModuleType | None = None  # the module that cuda_kernels has imported
_seen: Any = None  # the array module of device arrays used so far

_COMPILED = tuple(np.dtype(name) for name in ("float32", "float64", "int32", "int64", "uint32", "uint64", "complex64", "complex128"))


def backend_of(array: Any) -> str:
    """Return the name of the backend whose kernels process an array.

    Parameters
    ----------
    array : ndarray, or object with ``__cuda_array_interface__``
        Of any shape.

    Returns
    -------
    {"numpy", "numba", "cuda"}
        "numba" for NumPy arrays of compiled dtypes, unless numba's compilation is disabled.

    Raises
    ------
    StreamTypeError
        For any other object.

    Examples
    --------
    >>> backend_of(np.zeros(3, np.float16))
    'numpy'
    """
    if isinstance(array, np.ndarray):
        return "numba" if array.dtype in _COMPILED and _compiles() else "numpy"
    if hasattr(array, "__cuda_array_interface__"):
        return "cuda"
    raise StreamTypeError(f"no kernels work on {type(array).__name__}: pass an array of NumPy, or one of CuPy or with its interface")


def mark_read_only(array: Any) -> None:
    """Mark a NumPy array as read-only, to protect users. Other arrays have no such mark, and no code depends on it."""
    if isinstance(array, np.ndarray):
        array.flags.writeable = False


def may_be_written(array: Any) -> bool:
    """Return True unless a user's array is marked as read-only."""
    if isinstance(array, np.ndarray):
        return bool(array.flags.writeable)
    return not array.__cuda_array_interface__["data"][1]


def on_device(array: Any) -> bool:
    """Return True if an array is in GPU memory."""
    return not isinstance(array, np.ndarray) and hasattr(array, "__cuda_array_interface__")


def as_host(array: Any) -> Any:
    """Return the array itself, or a host copy of a device array."""
    return array if isinstance(array, np.ndarray) else array.get()


def as_host_together(*arrays: Any) -> tuple[Any, ...]:
    """Return host copies of device vectors, made by one transfer; host vectors are returned as they are."""
    if not on_device(arrays[0]):
        return arrays
    order = sorted(range(len(arrays)), key=lambda place: -arrays[place].itemsize)  # so that each begins at a multiple of its items
    octets = array_module(arrays[0]).concatenate([arrays[place].view(np.uint8) for place in order]).get()
    found, at = {}, 0
    for place in order:
        array = arrays[place]
        found[place] = octets[at : at + array.nbytes].view(array.dtype)
        at += array.nbytes
    return tuple(found[place] for place in range(len(arrays)))


def array_module(array: Any) -> Any:
    """Return the module that creates arrays like this one, in the same memory: NumPy, CuPy, or a module compatible with CuPy.

    Raises
    ------
    StreamError
        For an array on a device, if CuPy is not installed.
    """
    if type(array) is np.ndarray or isinstance(array, np.ndarray):
        return np
    global _seen
    found = sys.modules.get(type(array).__module__.partition(".")[0])
    _seen = found if isinstance(array, getattr(found, "ndarray", ())) else device_module()
    return _seen


def current_queue() -> Queue | None:
    """Return the device queue of this thread; None if no device array has been used yet."""
    return None if _seen is None else Queue(_seen)


def device_module() -> Any:
    """Import and return CuPy.

    If it has not been imported before, this rank's GPU (by its number on the host) becomes the current device. Otherwise the current device
    is left unchanged, since the program may have chosen it.

    Raises
    ------
    StreamError
        If CuPy is not installed, or it finds no usable GPU.
    """
    cuda_kernels()
    chosen = "cupy" in sys.modules
    try:
        xp = import_module("cupy")
    except ImportError as error:
        raise StreamError(f"arrays on a GPU need CuPy, which cannot be imported ({error}): install the extra gpu") from None
    if not chosen:
        xp.cuda.Device(numbered(local_rank(), xp)).use()
    return xp


def module_in_use() -> Any:
    """Return CuPy if this process has used arrays on a GPU, otherwise None."""
    if _loaded is None:
        return None
    try:
        return device_module()
    except StreamError:
        return None


def device_kernels(*arrays: Any) -> Any:
    """Return the kernels for arrays on a device; None if all arrays are on the host.

    Raises
    ------
    StreamTypeError
        If some arrays are on a device and others are not.
    """
    places = {on_device(array) for array in arrays}
    if places == {False}:
        return None
    if len(places) > 1:
        raise StreamTypeError(MIXED)
    return cuda_kernels()


def cuda_kernels() -> ModuleType:
    """Return the CUDA versions of the functions of :mod:`~sparseallreduce.streams.kernels`, which are imported only here.

    Raises
    ------
    StreamError
        If numba finds no usable GPU.
    """
    global _loaded
    if _loaded is None:
        from numba import cuda

        if not cuda.is_available():
            raise StreamError("there is no GPU here that numba can use: take NumPy arrays, or run where the CUDA driver finds a device")
        _loaded = import_module("sparseallreduce.streams.kernels.cuda.functions")
    return _loaded


def _compiles() -> bool:
    from numba.core import config

    return not config.DISABLE_JIT
