"""Convert arrays of any framework to NumPy views without copies, through the buffer protocol, ``__array_interface__`` or DLPack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import DivergenceError, StreamError, StreamTypeError
from sparseallreduce.reducers.arrays import DTYPES, viewed
from sparseallreduce.streams.kernels.backend import array_module, as_host, may_be_written, on_device

__all__ = ["as_array", "as_flat_parameter", "finite_norm", "norms", "place_of"]

Array = NDArray[Any]


def as_array(given: Any) -> Array:
    """Return a view of ``given`` as an ndarray, or as a CuPy array for GPU memory.

    Parameters
    ----------
    given : ndarray, or any object with the buffer protocol, ``__array_interface__`` or DLPack
        Of float32 or float64, in host memory; or in GPU memory, with ``__cuda_array_interface__``. A tensor that is part of automatic
        differentiation is detached, which does not copy.

    Raises
    ------
    StreamTypeError
        If it is not such an object, or has another dtype.

    Examples
    --------
    >>> from array import array
    >>> numbers = array("f", [1.0, 2.0])
    >>> as_array(numbers)[0] = 3.0
    >>> numbers
    array('f', [3.0, 2.0])
    """
    if hasattr(given, "detach"):
        given = given.detach()
    view = _writeable(viewed(given), given)
    if view.dtype not in DTYPES:
        raise StreamTypeError(f"parameters and gradients hold float32 or float64, not {view.dtype}: convert them")
    return view


def as_flat_parameter(given: Any) -> Array:
    """Return a writeable view of a parameter as a vector.

    Raises
    ------
    StreamError
        If it is read-only, or not C-contiguous.
    """
    view = as_array(given)
    if not view.flags.c_contiguous:
        raise StreamError(f"parameters are changed in place, without gaps in C order; one of shape {view.shape} is not: make it contiguous")
    if not may_be_written(view):
        raise StreamError(f"parameters are changed in place, but one of shape {view.shape} is read-only: pass one that can be written to")
    return view.reshape(-1)


def place_of(array: Array) -> str:
    """Return where an array is: "host", or the name of its GPU."""
    return f"GPU {getattr(array, 'device', '')}".rstrip() if on_device(array) else "host"


def norms(arrays: Sequence[Array]) -> list[float]:
    """Return the L2 norm of each array. Norms of arrays on a GPU are copied to the host together.

    Examples
    --------
    >>> norms([np.float32([3, 4]), np.zeros((2, 2))])
    [5.0, 0.0]
    """
    with np.errstate(over="ignore"):  # corrected below
        found = [np.linalg.norm(array) for array in arrays]
    on_gpu = [place for place, array in enumerate(arrays) if on_device(array)]
    if on_gpu:
        xp = array_module(arrays[on_gpu[0]])
        for place, norm in zip(on_gpu, as_host(xp.stack([found[place] for place in on_gpu]))):
            found[place] = norm
    return [float(norm) if math.isfinite(norm) else _large_norm(array) for norm, array in zip(found, arrays)]


def _large_norm(array: Array) -> float:
    """Return the L2 norm of an array of values whose squares overflow."""
    xp = array_module(array)
    largest = float(xp.abs(array).max())
    if not math.isfinite(largest):
        return largest
    return largest * float(np.linalg.norm(array.astype(np.float64) / largest))


def finite_norm(norm: float) -> float:
    """Return a gradient's norm, after checking that it is finite.

    Raises
    ------
    DivergenceError
        If it is not finite.
    """
    if math.isfinite(norm):
        return norm
    why = "some of its values are infinite or NaN, or too large for the norm to be a float64"
    raise DivergenceError(f"the norm of a gradient is {norm}: {why}; the learning rate may be too large")


def _writeable(view: Array, given: Any) -> Array:
    """Return a writeable view of the same memory, if possible.

    Before version 1.0, DLPack cannot say that memory is writeable, and NumPy assumes that it is not.
    """
    if may_be_written(view) or not hasattr(given, "__array__"):
        return view
    other = np.asarray(given)
    return other if may_be_written(other) and np.may_share_memory(view, other) else view
