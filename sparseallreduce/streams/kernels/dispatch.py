"""Which code a call runs on: what numba compiles for the dtypes at hand or, where it does not, plain NumPy.

A caller looks for the compiled code of a kernel, and turns to :mod:`~sparseallreduce.streams.kernels.reference` if there is none::

    key = ("rows.sum_rows", SUM.ufunc, rows.dtype, values.dtype, 1)
    entry = known(key) or find(*key)

A small sum takes ten microseconds in all, so that frequent callers first look among what is known, without a call of ours, and some
without giving the key a name, which takes a twentieth of the time of a scatter of ten entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["find", "known"]

_INDEX_DTYPES = (np.dtype(np.uint32), np.dtype(np.uint64))
_entries: dict[tuple[Any, ...], Callable[..., Any]] = {}
known = _entries.get  # what was found, by all that it was looked for; bound here, since a method of an imported name is bound at each call


def find(name: str, operator: Any, index_dtype: np.dtype[Any], value_dtype: np.dtype[Any], ndim: int = 1) -> Callable[..., Any] | None:
    """The compiled code of a kernel for an operator and dtypes; None where there is none.

    Parameters
    ----------
    name : str
        Of its module among the compiled ones, and its own: ``"merging.merge"``.
    operator : callable, "replace" or None
        The ufunc that it applies to two values; None if it applies none.
    index_dtype, value_dtype : numpy dtype
        If there are no indices, or no values, any of those that are compiled.
    ndim : {1, 2}
        Of the array of values.
    """
    key = (name, operator, index_dtype, value_dtype, ndim)
    entry = known(key)
    if entry is not None:
        return entry
    from numba.core import config  # only here: to import it takes half a second, which a user who never reduces a stream should not pay

    if config.DISABLE_JIT or index_dtype not in _INDEX_DTYPES or ndim not in (1, 2):  # type: ignore[attr-defined]
        return None
    from sparseallreduce.streams.kernels import compiled

    entry = compiled.compile_kernel(*key)
    return None if entry is None else _entries.setdefault(key, entry)
