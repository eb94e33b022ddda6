"""The border to other libraries: arrays of theirs as NumPy sees them, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import StreamError, StreamTypeError
from sparseallreduce.streams.kernels.backend import on_device

__all__ = ["DTYPES", "as_vector", "is_array", "viewed"]

DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


def as_vector(array: Any, size: int) -> NDArray[Any]:
    """The memory of ``array`` as an ndarray of shape (size,).

    Parameters
    ----------
    array : object
        With the buffer protocol, ``__array_interface__`` or DLPack, in the memory of the processor: an ndarray, an
        ``array.array``, a PyTorch CPU tensor, ...
    size : int

    Returns
    -------
    ndarray of float32 or float64
        C-contiguous, on the same memory.

    Raises
    ------
    StreamTypeError
        If it is no such array, or of another dtype.
    StreamError
        If its shape differs, or it has gaps.

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
        raise StreamError("an array without gaps is needed: pass a contiguous copy")
    return vector


def viewed(array: Any) -> NDArray[Any]:
    """The memory of ``array`` as an ndarray; raises StreamTypeError if there is none that can be read in place, or a mask on it."""
    if isinstance(array, np.ma.MaskedArray):
        raise StreamTypeError("a masked array has values that do not count: pass array.filled(0)")
    if isinstance(array, np.ndarray):
        return np.asarray(array)  # not a subclass of it
    if on_device(array):
        raise StreamTypeError(f"this {type(array).__name__} lies on a GPU, and one of the host is needed: pass a copy, as of array.get()")
    if not is_array(array):
        raise StreamTypeError(f"an array is needed (buffer protocol, __array_interface__ or DLPack), not {type(array).__name__}")
    try:
        return np.from_dlpack(array) if hasattr(array, "__dlpack__") else np.asarray(array)
    except Exception as error:  # whatever another library raises: the other ranks wait to be told of it
        raise StreamTypeError(f"this {type(array).__name__} cannot be read in place: {error}") from error


def is_array(array: Any) -> bool:
    """Whether this is one array, of whatever library."""
    if hasattr(array, "__dlpack__") or hasattr(array, "__array_interface__"):
        return True
    try:
        memoryview(array)
    except TypeError:
        return False
    return True
