"""The kernels in the form that numba compiles: plain loops over sorted indices, without allocations or the GIL.

None reads or writes outside of its arrays, whatever the arrays hold and even if they change during the call: a position computed from an
index is read once and checked against the length, and lengths and counts are checked first. numba itself checks only that an argument is an
array with items of the right size; :mod:`~sparseallreduce.streams.kernels` checks dtypes and dimensions. For invalid arguments a kernel
returns one of the negative numbers in :mod:`~sparseallreduce.streams.kernels.contract`. Only the kernels of
:mod:`~sparseallreduce.streams.kernels.compiled.selection` leave these checks to their callers, and allocate memory for counts.

Two rules keep the loops fast. Every position is a ``uint64``, so that numba emits no code for negative positions (and ``uint64`` combined
with a signed integer would become a float). And loops select without branches, because in random streams no branch on the order of two
indices can be predicted.

Each module lists its kernels in ``KERNELS``. Kernels of other packages import their building blocks from here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from numba import types

from sparseallreduce.streams.kernels.compilation import compiled_entry
from sparseallreduce.streams.kernels.compiled.arrays import ADD, MAXIMUM, MINIMUM, MULTIPLY, REPLACE
from sparseallreduce.streams.kernels.compiled.order import BLOCK
from sparseallreduce.streams.kernels.compiled.rows import cut, sum_cut
from sparseallreduce.streams.kernels.compiled.signatures import Kernel, Types, array_type
from sparseallreduce.streams.kernels.contract import MALFORMED

__all__ = ["ADD", "BLOCK", "MALFORMED", "array_type", "compile_kernel", "cut", "kernel_named", "sum_cut"]

_OPERATORS = {np.add: ADD, np.multiply: MULTIPLY, np.minimum: MINIMUM, np.maximum: MAXIMUM, "replace": REPLACE}
_VALUE_DTYPES = tuple(np.dtype(name) for name in ("float32", "float64", "int32", "int64"))
_COMPLEX_DTYPES = tuple(np.dtype(name) for name in ("complex64", "complex128"))
_COPIED_DTYPES = (*_VALUE_DTYPES, *_COMPLEX_DTYPES, np.dtype("uint16"))  # the last for the bits of halves, with which numba cannot compute
# What is compiled for each operator. Complex numbers are only added: NumPy may round their products once less than compiled code would.
_DTYPES_OF: dict[Any, tuple[np.dtype[Any], ...]] = {np.add: (*_VALUE_DTYPES, *_COMPLEX_DTYPES), "replace": _COPIED_DTYPES}


def kernel_named(name: str) -> Kernel:
    """Return a kernel by its module and name: ``"merging.merge"``."""
    module, _, kernel = name.partition(".")
    found: Kernel = import_module(f"{__name__}.{module}").KERNELS[kernel]
    return found


def compile_kernel(
    name: str, operator: Any, index_dtype: np.dtype[Any], value_dtype: np.dtype[Any], ndim: int
) -> Callable[..., Any] | None:
    """Compile one specialisation of a kernel, or load it from numba's cache on disk.

    Parameters
    ----------
    name : str
        As for :func:`kernel_named`; ``ndim`` selects the variant for rows.
    operator : callable, "replace" or None
        A ufunc that the kernel applies to two values, bound to its first argument; None for kernels that apply none.
    index_dtype, value_dtype : numpy dtype
        Dtypes of the indices, and of the values or their bits.
    ndim : {1, 2}
        Dimensions of the array of values.

    Returns
    -------
    callable or None
        None if the operator or the dtype of the values is not compiled.
    """
    known = operator is None or operator in _OPERATORS
    if not known or (operator is not None and value_dtype not in _DTYPES_OF.get(operator, _VALUE_DTYPES)):
        return None
    kernel = kernel_named(name)
    dispatcher, signature = kernel.variants[ndim - 1], kernel.signature(Types(index_dtype, value_dtype, ndim))
    if operator is None:
        return compiled_entry(dispatcher, signature)
    code = _OPERATORS[operator]
    literal = types.literal(code)  # type: ignore[no-untyped-call]
    return functools.partial(compiled_entry(dispatcher, (literal, *signature)), code)
