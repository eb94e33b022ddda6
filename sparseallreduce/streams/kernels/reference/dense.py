"""Read and write values at positions of a dense array, in plain NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels.contract import Indices, Values
from sparseallreduce.streams.kernels.reference.arrays import combine, places
from sparseallreduce.streams.operator import Operator

__all__ = ["gather_present", "scatter", "scatter_set"]


def scatter(indices: Indices, values: Values, lo: int, op: Operator, dense: Values) -> None:
    """Combine ``values`` into ``dense[indices - lo]``."""
    _check_lengths(indices, values)
    at = places(indices, lo, len(dense))
    dense[at] = combine(op, dense[at], values)


def scatter_set(indices: Indices, values: Values, lo: int, dense: Values) -> None:
    """Assign ``values`` to ``dense[indices - lo]``."""
    _check_lengths(indices, values)
    dense[places(indices, lo, len(dense))] = values


def gather_present(dense: Values, lo: int, index_dtype: DTypeLike) -> tuple[Indices, Values]:
    """Return the positions of the non-zeros of ``dense``, plus ``lo``, and their values."""
    present = dense != 0
    positions = np.flatnonzero(present if dense.ndim == 1 else present.any(axis=1))
    return (positions.astype(np.uint64) + np.uint64(lo)).astype(index_dtype), dense[positions]


def _check_lengths(indices: Indices, values: Values) -> None:
    if len(values) != len(indices):
        raise StreamError(f"{len(indices)} indices but {len(values)} values")
