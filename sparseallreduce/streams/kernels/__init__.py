"""Kernels, the only code that loops over elements: they merge, scatter, gather, check and encode sorted indices and their values.

Compiled code does not check its arguments' types, so dtypes, dimensions and whether an output is writeable are checked here; the contents
of arrays are checked in compiled code (see :mod:`~sparseallreduce.streams.kernels.compiled`).

Arrays are one-dimensional and C-contiguous, indices ``uint32`` or ``uint64`` and strictly increasing, values in the native byte order and
of shape ``(n,)`` or, row-sparse, ``(n, width)``. Inputs may be read-only and may start at any byte; outputs must not overlap inputs. numba
compiles NumPy's four arithmetic operators for float32, float64, int32 and int64, and additions of complex numbers, on first use, and caches
them on disk. For other operators and dtypes the same functions run in NumPy (:mod:`~sparseallreduce.streams.kernels.reference`), with
bitwise the same results as NumPy. Every compiled kernel releases the GIL.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from sparseallreduce.streams.kernels.bitmap import decode_bitmap, decode_nonzero, encode_bitmap, encode_nonzero
from sparseallreduce.streams.kernels.contract import PIECE, QSGD_BLOCK
from sparseallreduce.streams.kernels.dense import gather_present, scatter, scatter_set
from sparseallreduce.streams.kernels.gaps import decode_gaps, encode_gaps, gaps_bound
from sparseallreduce.streams.kernels.merging import merge, merged, shared
from sparseallreduce.streams.kernels.nans import has_nan, unify_nans
from sparseallreduce.streams.kernels.order import first_violation, sum_duplicates
from sparseallreduce.streams.kernels.partition import cuts, places
from sparseallreduce.streams.kernels.quantisation import from_two_levels, narrow, quantise, restore, to_two_levels, widen
from sparseallreduce.streams.kernels.rows import cut_rows, estimate_union, inner_sums, sum_cut_rows, sum_rows, write_past
from sparseallreduce.streams.operator import SUM, Operator

__all__ = [
    "PIECE",
    "QSGD_BLOCK",
    "cut_rows",
    "cuts",
    "decode_bitmap",
    "decode_gaps",
    "decode_nonzero",
    "encode_bitmap",
    "encode_gaps",
    "encode_nonzero",
    "estimate_union",
    "first_violation",
    "from_two_levels",
    "gaps_bound",
    "gather_present",
    "has_nan",
    "inner_sums",
    "merge",
    "merged",
    "narrow",
    "places",
    "quantise",
    "restore",
    "scatter",
    "scatter_set",
    "shared",
    "sum_cut_rows",
    "sum_duplicates",
    "sum_rows",
    "to_two_levels",
    "unify_nans",
    "warm_up",
    "widen",
    "write_past",
]


def warm_up(index_dtype: DTypeLike = np.uint32, value_dtype: DTypeLike = np.float32, ndim: int = 1, op: Operator = SUM) -> None:
    """Compile the kernels for one kind of stream, or load them from disk, so that no later call has to.

    If several processes of a machine start together, one compiles and the others wait for it. Without this call, each kernel is compiled at
    its first use, which takes half a second.
    """
    indices = np.zeros(1, index_dtype)
    dense = np.ones((1, 1) if ndim == 2 else 1, value_dtype)
    merge(indices, dense, indices, dense, op, np.empty(2, index_dtype), np.repeat(dense, 2, axis=0))
    scatter(indices, dense, 0, op, dense.copy())
    scatter_set(indices, dense, 0, dense.copy())
    gather_present(dense, 0, index_dtype)
    first_violation(indices, 1)
    sum_duplicates(indices, dense, op)
    has_nan(dense)
    if op.is_sum and ndim == 1:
        rows = np.zeros((2, 2), np.uint64)
        packed, none = (rows.view(index_dtype), rows.view(value_dtype)), np.zeros(2, np.int64)
        bounds = np.zeros((4, 3), np.uint64)
        sum_rows(*packed, 0, none, 0, 1, dense)
        cut_rows(packed[0], dense.itemsize, none, 1, 0, 2, bounds)
        estimate_union(packed[0], 0, dense.itemsize, none, 1)
        write_past(rows[0].view(np.uint8), 0, rows[1].view(np.uint8))
        sum_cut_rows(*packed, 0, none, bounds, inner_sums(2, 0, index_dtype, value_dtype), *(array[:1] for array in packed))
