"""Find the code for a call: numba's for the dtypes at hand, otherwise plain NumPy.

A caller looks for the compiled kernel, and uses :mod:`~sparseallreduce.streams.kernels.reference` if there is none::

    key = ("rows.sum_rows", SUM.ufunc, rows.dtype, values.dtype, 1) entry = known(key) or find(*key)

A small sum takes ten microseconds in total. Frequent callers therefore look among the known entries first, without a call of this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["find", "known"]

_INDEX_DTYPES = (np.dtype(np.uint32), np.dtype(np.uint64))
_entries: dict[tuple[Any, ...], Callable[..., Any]] = {}
# Kernels found so far, by all arguments of `find`; bound here, which saves an attribute look-up at each call.
known: Callable[[tuple[Any, ...]], Callable[..., Any] | None] = _entries.get


def find(name: str, operator: Any, index_dtype: np.dtype[Any], value_dtype: np.dtype[Any], ndim: int = 1) -> Callable[..., Any] | None:
    """Return the compiled kernel for an operator and dtypes; None if there is none.

    Parameters
    ----------
    name : str
        Module and name of the kernel: ``"merging.merge"``.
    operator : callable, "replace" or None
        The ufunc that it applies to two values; None if it applies none.
    index_dtype, value_dtype : numpy dtype
        Any compiled dtype for a kernel without indices, or without values.
    ndim : {1, 2}
        Dimensions of the array of values.
    """
    key = (name, operator, index_dtype, value_dtype, ndim)
    entry = known(key)
    if entry is not None:
        return entry
    from numba.core import config  # imported here, since it takes half a second that a program without reductions should not pay

    if config.DISABLE_JIT or index_dtype not in _INDEX_DTYPES or ndim not in (1, 2):  # type: ignore[attr-defined]
        return None
    from sparseallreduce.streams.kernels import compiled

    entry = compiled.compile_kernel(*key)
    return None if entry is None else _entries.setdefault(key, entry)
