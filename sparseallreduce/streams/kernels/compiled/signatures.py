"""The argument types for which kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

__all__ = ["BOUNDS", "BYTES", "BYTES_IN", "COUNTS", "POSITIONS", "Kernel", "Types", "array_type"]


def array_type(dtype: Any, ndim: int, readonly: bool) -> Any:
    """Return the type of contiguous arrays of a dtype."""
    # Declared unaligned, since a slice of a message may start at any byte; this does not slow down aligned arrays on current processors.
    return types.Array(numba.from_dtype(np.dtype(dtype)), ndim, "C", readonly=readonly, aligned=False)


BYTES, BYTES_IN = array_type(np.uint8, 1, False), array_type(np.uint8, 1, True)
COUNTS, POSITIONS, BOUNDS = array_type(np.int64, 1, False), array_type(np.uint64, 1, False), array_type(np.uint64, 2, False)


class Types:
    """The types of arguments that depend on the dtypes of indices and values.

    Parameters
    ----------
    index_dtype, value_dtype : numpy dtype
        Dtypes of the indices, and of the values or their bits.
    ndim : {1, 2}
        Dimensions of the array of values.
    """

    indices: Any
    iout: Any
    values: Any
    vout: Any

    def __init__(self, index_dtype: Any, value_dtype: Any, ndim: int) -> None:
        self.indices, self.iout = array_type(index_dtype, 1, True), array_type(index_dtype, 1, False)
        self.values, self.vout = array_type(value_dtype, ndim, True), array_type(value_dtype, ndim, False)
        self.value: Any = self.vout.dtype
        self.tables: tuple[Any, Any] = array_type(index_dtype, 2, False), array_type(value_dtype, 2, False)
        self._bits = f"i{np.dtype(value_dtype).itemsize}"

    @cached_property
    def bits(self) -> Any:
        """The type of arrays of values viewed as signed integers."""
        return array_type(self._bits, 1, False)

    @cached_property
    def key(self) -> Any:
        """The type of a value viewed as a signed integer."""
        return self.bits.dtype


class Kernel(NamedTuple):
    """A kernel's dispatchers and signature, as listed in ``KERNELS``."""

    variants: tuple[Any, ...]  # numba's dispatchers: for values, and for rows of them if there is one
    signature: Callable[[Types], tuple[Any, ...]]  # the types of its arguments, except the operator
