"""Parameters as one vector, whose ranges local steps read and write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import StreamError
from sparseallreduce.optim.arrays import as_flat_parameter
from sparseallreduce.reducers.arrays import is_array
from sparseallreduce.streams.kernels.backend import array_module, as_host

__all__ = ["Arrays", "Vector"]

Array = NDArray[Any]


class Vector(ABC):
    """Parameters of any framework, concatenated to one vector.

    Parameters
    ----------
    lengths : iterable of int
        The number of elements of each parameter.
    dtype : data-type
        The dtype of the vector: float32 or float64.

    Attributes
    ----------
    exact : bool
        Whether written values are read back unchanged, because no parameter has fewer bits than the vector.
    """

    exact: bool = True
    size: int
    dtype: np.dtype[Any]

    def __init__(self, lengths: Iterable[int], dtype: Any) -> None:
        self.lengths: list[int] = list(lengths)
        self.size, self.dtype = sum(self.lengths), np.dtype(dtype)
        self._bounds = list(pairwise([0, *accumulate(self.lengths)]))

    @abstractmethod
    def read_part(self, number: int, part: slice) -> Array:
        """Return a part of a parameter in the vector's dtype. It may share the parameter's memory."""

    @abstractmethod
    def write_part(self, number: int, part: slice, values: Array) -> None:
        """Set a part of a parameter."""

    def read(self, lo: int, hi: int) -> Array:
        """Return a copy of the elements in ``[lo, hi)``."""
        out = np.empty(hi - lo, self.dtype)
        for number, part, own in self._parts(lo, hi):
            out[own] = self.read_part(number, part)
        return out

    def write(self, lo: int, hi: int, values: Array) -> None:
        """Set the elements in ``[lo, hi)``."""
        for number, part, own in self._parts(lo, hi):
            self.write_part(number, part, values[own])

    def _parts(self, lo: int, hi: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield each parameter with elements in the range, with their slices of the parameter and of the range."""
        for number, (begin, end) in enumerate(self._bounds):
            first, last = max(lo, begin), min(hi, end)
            if first < last:
                yield number, slice(first - begin, last - begin), slice(first - lo, last - lo)


class Arrays(Vector):
    """Arrays that are modified in place, as for :class:`~sparseallreduce.optim.Optimizer`: of NumPy or CuPy, or tensors on the CPU.

    Raises
    ------
    StreamError, StreamTypeError
        If they cannot be modified in place, or if a dtype is neither float32 nor float64.
    """

    def __init__(self, parameters: Any) -> None:
        given = [parameters] if not isinstance(parameters, Iterable) or is_array(parameters) else list(parameters)
        if not given:
            raise StreamError("local steps need parameters: pass an array, or a sequence of arrays")
        self._flat = [as_flat_parameter(parameter) for parameter in given]
        dtype = max((array.dtype for array in self._flat), key=lambda dtype: dtype.itemsize)
        super().__init__((array.size for array in self._flat), dtype)
        self.exact: bool = all(array.dtype == dtype for array in self._flat)

    def read_part(self, number: int, part: slice) -> Array:
        values: Array = as_host(self._flat[number][part])
        return values

    def write_part(self, number: int, part: slice, values: Array) -> None:
        self._flat[number][part] = array_module(self._flat[number]).asarray(values)
