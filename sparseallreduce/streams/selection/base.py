"""The base class of selectors: it checks arguments and returns results as streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import StreamError, StreamTypeError
from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels.backend import array_module, device_kernels, may_be_written, on_device
from sparseallreduce.streams.kernels.selection import put_back
from sparseallreduce.streams.stream import SparseStream, refuse_masked

__all__ = ["Array", "Selector", "add", "before_adding", "checked", "clear_places"]

Array = NDArray[Any]


class Selector(ABC):
    """Base class of selectors, which choose values of vectors.

    Parameters
    ----------
    k : int
        Number of values to select, from 0 to the size.
    """

    def __init__(self, k: int) -> None:
        if k < 0:
            raise StreamError(f"k is the number of values to choose, at least 0, not {k}")
        self.k: int = int(k)

    @property
    @abstractmethod
    def passes(self) -> float:
        """The memory traffic of a selection with gradient and ``clear``, in multiples of reading N values; terms in k are left out."""

    def __call__(self, accumulator: Array, gradient: Array | None = None, *, clear: bool = False) -> SparseStream:
        """Return the selected values as a stream.

        Parameters
        ----------
        accumulator : ndarray of float32 or float64, shape (N,)
            The gradient is added to it; with ``clear``, selected values are set to zero.
        gradient : ndarray, shape (N,), optional
            Of the same dtype.

        Raises
        ------
        StreamTypeError
            If a dtype is not supported, or the two differ.
        StreamError
            If the shapes differ, an array is not contiguous, k exceeds N, or the accumulator would be modified and is read-only.
        MemoryError
            The gradient has then been added to the accumulator, and no values were cleared, as after any other error of a selection.
        """
        self._check(accumulator, gradient, clear)
        indices, values = self.choose(accumulator, gradient, clear)
        try:
            return SparseStream(indices, values, len(accumulator))
        except BaseException:
            if clear:
                put_back(accumulator, indices, values)
            raise

    def nonzero(self, accumulator: Array, gradient: Array | None = None) -> SparseStream:
        """Select as a call does, but without zeros that fill up k values; for device arrays the host waits once."""
        self._check(accumulator, gradient)
        if not on_device(accumulator):
            return _without_zeros(SparseStream(*self.choose(accumulator, gradient, False), len(accumulator)))
        indices, values = self.choose(accumulator, gradient, False)
        there = device_kernels(indices, values)
        is_wrong, count = there.violation_and_nonzeros(indices, values, len(accumulator))
        if is_wrong or len(indices) > SparseStream._sparse_form(indices, values, len(accumulator)).switch_point:
            return SparseStream(indices, values, len(accumulator))  # raises an error, or makes a dense stream
        if count < len(values):
            present = there.marked(values != 0, count)
            indices, values = indices[present], values[present]
        return SparseStream._sparse_form(indices, values, len(accumulator))

    def _check(self, accumulator: Array, gradient: Array | None, clear: bool = False) -> None:
        checked(accumulator, gradient, clear)
        if self.k > len(accumulator):
            raise StreamError(f"k = {self.k} values cannot be chosen of {len(accumulator)}: take a smaller k")

    @abstractmethod
    def choose(self, accumulator: Array, gradient: Array | None, clear: bool) -> tuple[Array, Array]:
        """Return increasing indices, and values. On an error, the gradient has been added to ``accumulator`` and nothing is cleared."""


def _without_zeros(stream: SparseStream) -> SparseStream:
    if stream.is_dense:  # zeros are no entries in the dense form
        return stream
    indices, values = stream._entries()
    if int(np.count_nonzero(values)) == len(values):
        return stream
    present = values != 0
    return SparseStream._sparse_form(indices[present], values[present], stream.size)


def checked(accumulator: Array, gradient: Array | None = None, clear: bool = False) -> None:
    """Raise an error if selection does not support an array, or has to modify an array that is read-only."""
    refuse_masked(accumulator)
    if not (isinstance(accumulator, np.ndarray) or on_device(accumulator)) or accumulator.dtype not in (np.float32, np.float64):
        kind = getattr(accumulator, "dtype", type(accumulator).__name__)
        raise StreamTypeError(f"values are selected from an array of float32 or float64, not {kind}: convert it")
    if accumulator.ndim != 1 or not accumulator.flags.c_contiguous:
        raise StreamError(f"values are selected from a contiguous vector, not shape {accumulator.shape}, strides {accumulator.strides}")
    if clear and not may_be_written(accumulator):
        raise StreamError("the accumulator is read-only, so the selected values cannot be removed from it: pass a copy")
    if gradient is None:
        return
    refuse_masked(gradient)
    if type(accumulator) is not np.ndarray or type(gradient) is not np.ndarray:
        device_kernels(accumulator, gradient)  # raises unless both are on a GPU
    if gradient.dtype != accumulator.dtype:
        raise StreamTypeError(f"the gradient is of {gradient.dtype}, but the accumulator of {accumulator.dtype}")
    if gradient.shape != accumulator.shape or not gradient.flags.c_contiguous:
        raise StreamError(f"a gradient of shape {gradient.shape} does not fit an accumulator of shape {accumulator.shape}, or has gaps")
    if not may_be_written(accumulator):
        raise StreamError("the accumulator is read-only, and a gradient cannot be added to it: pass a copy")


def add(accumulator: Array, gradient: Array | None) -> None:
    """Add the gradient, if there is one, in place and without warnings of overflow or NaN, like compiled loops."""
    if gradient is not None:
        with np.errstate(all="ignore"):
            np.add(accumulator, gradient, out=accumulator)


@contextmanager
def before_adding(accumulator: Array, gradient: Array | None) -> Iterator[None]:
    """Run code that precedes the addition of the gradient; if it fails, for example out of memory, add the gradient nevertheless."""
    try:
        yield
    except BaseException:
        add(accumulator, gradient)
        raise


def clear_places(accumulator: Array, indices: Array) -> None:
    """Set selected values to zero in the accumulator."""
    if on_device(accumulator):
        device_kernels(accumulator, indices).clear(indices, accumulator)
        return
    kernels.scatter_set(indices, array_module(accumulator).zeros(len(indices), accumulator.dtype), 0, accumulator)
