"""Which backend works on an array, decided in this one place: NumPy, numba, or CUDA where the array lies in a GPU's memory."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from sparseallreduce.errors import StreamError, StreamTypeError

__all__ = ["array_module", "backend_of", "cuda_kernels", "mark_read_only", "may_be_written"]

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


def array_module(array: Any) -> ModuleType:
    """NumPy or CuPy: what makes arrays beside this one, and where it lies."""
    return import_module("cupy" if backend_of(array) == "cuda" else "numpy")


def cuda_kernels() -> ModuleType:
    """The package of the CUDA kernels, which is loaded only here.

    Raises
    ------
    StreamError
        If there is no GPU that numba can use.
    """
    from numba import cuda

    if not cuda.is_available():
        raise StreamError("there is no GPU here that numba can use: take NumPy arrays, or run where the CUDA driver finds a device")
    return import_module("sparseallreduce.streams.kernels.cuda")


def _compiles() -> bool:
    from numba.core import config

    return not config.DISABLE_JIT
