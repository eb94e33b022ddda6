"""Convert arrays of other libraries to NumPy views, or CuPy views of GPU memory, without copies."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import StreamError, StreamTypeError
from sparseallreduce.streams.kernels.backend import array_module, on_device
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["DTYPES", "as_vector", "is_array", "no_indices", "nothing", "viewed"]

DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


def as_vector(array: Any, size: int) -> NDArray[Any]:
    """Return a view of ``array`` as a vector of shape (size,): an ndarray, or a CuPy array for GPU memory.

    Parameters
    ----------
    array : object
        In host memory with the buffer protocol, ``__array_interface__`` or DLPack, such as an ndarray, an ``array.array`` or a PyTorch CPU
        tensor; or in GPU memory with ``__cuda_array_interface__``, such as a CuPy array or a PyTorch CUDA tensor.
    size : int

    Returns
    -------
    array of float32 or float64
        A C-contiguous view of the same memory.

    Raises
    ------
    StreamTypeError
        If it is not such an array, or has another dtype. StreamError
            If its shape differs, or it is not contiguous.

    Examples
    --------
    >>> from array import array
    >>> as_vector(array("f", [1.0, 2.0]), 2)
    array([1., 2.], dtype=float32)
    """
    vector = viewed(array)
    if vector.dtype not in DTYPES:
        raise StreamTypeError(f"an array of float32 or float64 is needed, not one of {vector.dtype}: convert it")
    if vector.shape != (size,):
        raise StreamError(f"this reducer takes arrays of shape ({size},), not {vector.shape}")
    if not vector.flags.c_contiguous:
        raise StreamError("the array must be contiguous: pass a contiguous copy")
    return vector


def viewed(array: Any) -> NDArray[Any]:
    """Return a view of ``array`` as an ndarray, or as a CuPy array for GPU memory.

    Raises
    ------
    StreamTypeError
        If its memory cannot be read in place, or it is masked.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise StreamTypeError("masked arrays are not supported: pass array.filled(0)")
    if isinstance(array, np.ndarray):
        return np.asarray(array)  # drops subclasses
    if on_device(array):
        return array_module(array).asarray(array)  # type: ignore[no-any-return]
    if not is_array(array):
        raise StreamTypeError(f"an array is needed (buffer protocol, __array_interface__ or DLPack), not {type(array).__name__}")
    try:
        return np.from_dlpack(array) if hasattr(array, "__dlpack__") else np.asarray(array)
    except Exception as error:  # another library may raise anything; it is reported to the other ranks
        raise StreamTypeError(f"this {type(array).__name__} cannot be read in place: {error}") from error


def is_array(array: Any) -> bool:
    """Return True if the object is an array of any library."""
    if hasattr(array, "__dlpack__") or hasattr(array, "__array_interface__") or on_device(array):
        return True
    try:
        memoryview(array)
    except TypeError:
        return False
    return True


def no_indices(size: int, xp: Any = np) -> NDArray[Any]:
    """Return an empty array of indices of a vector of this size."""
    return xp.empty(0, index_dtype(size))  # type: ignore[no-any-return]


def nothing(size: int, like: NDArray[Any]) -> SparseStream:
    """Return a stream of this size without entries, with the dtype and in the memory of ``like``."""
    xp = array_module(like)
    return SparseStream._sparse_form(no_indices(size, xp), xp.empty(0, like.dtype), size)
