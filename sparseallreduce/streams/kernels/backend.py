"""Which backend works on an array, decided in this one place: NumPy, numba, or CUDA where the array lies in a GPU's memory."""

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
_loaded: ModuleType | None = None  # what cuda_kernels has loaded
_seen: Any = None  # the module of the arrays on a device that have been here

_COMPILED = tuple(np.dtype(name) for name in ("float32", "float64", "int32", "int64", "uint32", "uint64", "complex64", "complex128"))


def backend_of(array: Any) -> str:
    """The backend whose kernels take an array.

    Parameters
    ----------
    array : ndarray, or what has ``__cuda_array_interface__``
        Of any shape.

    Returns
    -------
    {"numpy", "numba", "cuda"}
        "numba" for NumPy arrays of dtypes that are compiled, unless numba is told not to compile.

    Raises
    ------
    StreamTypeError
        For what is neither.

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
    """Let NumPy refuse to write to an array, as a courtesy: others have no such mark, and nothing is decided by it."""
    if isinstance(array, np.ndarray):
        array.flags.writeable = False


def may_be_written(array: Any) -> bool:
    """Whether a user's array that is to be changed can be, as far as the array says."""
    if isinstance(array, np.ndarray):
        return bool(array.flags.writeable)
    return not array.__cuda_array_interface__["data"][1]


def on_device(array: Any) -> bool:
    """Whether an array lies in a GPU's memory."""
    return not isinstance(array, np.ndarray) and hasattr(array, "__cuda_array_interface__")


def as_host(array: Any) -> Any:
    """The array itself, or of one on a device a copy in the memory of the host."""
    return array if isinstance(array, np.ndarray) else array.get()


def as_host_together(*arrays: Any) -> tuple[Any, ...]:
    """Copies of vectors on a device in the memory of the host, made in one piece; of vectors of the host themselves."""
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
    """What makes arrays beside this one, and where it lies: NumPy, CuPy, or another module that is made like CuPy and has this array.

    Raises
    ------
    StreamError
        For an array on a device, if there is no CuPy.
    """
    if type(array) is np.ndarray or isinstance(array, np.ndarray):
        return np
    global _seen
    found = sys.modules.get(type(array).__module__.partition(".")[0])
    _seen = found if isinstance(array, getattr(found, "ndarray", ())) else device_module()
    return _seen


def current_queue() -> Queue | None:
    """Where this thread's work on a device goes at present; None as long as no array on a device has been here."""
    return None if _seen is None else Queue(_seen)


def device_module() -> Any:
    """CuPy. If nobody has imported it before, this rank's GPU, the one of its place on the host, becomes the current one.

    Who has imported it is asked for nothing, and the current device is left as it is: it may have been chosen.

    Raises
    ------
    StreamError
        If it is not installed, or there is no GPU that it can use.
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
    """CuPy, if this process has met arrays on a GPU; None if not, or if there is no CuPy."""
    if _loaded is None:
        return None
    try:
        return device_module()
    except StreamError:
        return None


def device_kernels(*arrays: Any) -> Any:
    """What works on arrays of which one at least is no plain NumPy array: None if all are the host's.

    Raises
    ------
    StreamTypeError
        If some lie on a device and others do not.
    """
    places = {on_device(array) for array in arrays}
    if places == {False}:
        return None
    if len(places) > 1:
        raise StreamTypeError(MIXED)
    return cuda_kernels()


def cuda_kernels() -> ModuleType:
    """The functions of :mod:`~sparseallreduce.streams.kernels` for arrays on a GPU, which are loaded only here.

    Raises
    ------
    StreamError
        If there is no GPU that numba can use.
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
