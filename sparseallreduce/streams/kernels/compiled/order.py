"""Compiled kernels that check the order of indices and combine the values of duplicates."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.compiled.arrays import U, combine, copy_rows, is_list, is_table
from sparseallreduce.streams.kernels.compiled.signatures import Kernel
from sparseallreduce.streams.kernels.contract import ABSENT, MALFORMED, Indices, Values
from sparseallreduce.streams.kernels.intrinsics import select

__all__ = ["BLOCK", "KERNELS"]

BLOCK = 4096  # indices tested together before their position is searched, while they are in the L1 cache


@kernel
def first_violation(indices: Indices, last: Any) -> Any:
    """Test whole blocks, where only a block's last index can be the first beyond ``last``; then find the position."""
    n = U(indices.shape[0])
    if not is_list(indices):
        return MALFORMED
    if n > U(0) and indices[U(0)] > last:
        return 0
    for start in range(U(1), n, U(BLOCK)):
        end = min(start + U(BLOCK), n)
        wrong = np.uint32(0)
        for i in range(start, end):
            wrong |= np.uint32(indices[i] <= indices[i - U(1)])
        if wrong or indices[end - U(1)] > last:
            for i in range(start, end):
                if indices[i] <= indices[i - U(1)] or indices[i] > last:
                    return np.int64(i)
    return ABSENT


@kernel
def sum_duplicates(op: int, indices: Indices, values: Values, iout: Indices, vout: Values) -> Any:
    """Count the different indices; if that many fit, write each with its combined values, without a branch on duplicates."""
    length, n, room = U(indices.shape[0]), U(0), U(min(iout.shape[0], vout.shape[0]))
    if U(values.shape[0]) != length or not (is_list(indices) and is_list(values) and is_list(iout) and is_list(vout)):
        return MALFORMED
    if length == U(0):
        return 0
    different = _count_different(indices)
    if room < different:
        return np.int64(different)
    total, before = values[U(0)], indices[U(0)]
    iout[U(0)] = before
    vout[U(0)] = total
    for i in range(U(1), length):
        index, value = indices[i], values[i]
        starts = index != before
        total = select(starts, value, combine(op, total, value))
        n += U(starts)
        if n >= room:  # indices have changed since they were counted
            return MALFORMED
        iout[n] = index
        vout[n] = total
        before = index
    return np.int64(n + U(1))


@kernel
def sum_duplicates_rows(op: int, indices: Indices, values: Values, iout: Indices, vout: Values) -> Any:
    """Count the different indices; if that many fit, write each with its combined rows."""
    length, width, n, room = U(indices.shape[0]), U(values.shape[1]), U(0), U(min(iout.shape[0], vout.shape[0]))
    if U(values.shape[0]) != length or not (is_list(indices) and is_table(values) and is_list(iout) and is_table(vout)):
        return MALFORMED
    if length == U(0):
        return 0
    different = _count_different(indices)
    if room < different:
        return np.int64(different)
    if U(vout.shape[1]) != width:
        return MALFORMED
    for i in range(length):
        if n == U(0) or indices[i] != iout[n - U(1)]:
            if n >= room:  # indices have changed since they were counted
                return MALFORMED
            n = copy_rows(indices, values, i, i + U(1), iout, vout, n, width)
        else:
            for k in range(width):
                vout[n - U(1), k] = combine(op, vout[n - U(1), k], values[i, k])
    return np.int64(n)


@inlined
def _count_different(indices: Indices) -> Any:
    different = U(1)
    for i in range(U(1), U(indices.shape[0])):
        different += U(indices[i] != indices[i - U(1)])
    return different


KERNELS = {
    "first_violation": Kernel((first_violation,), lambda of: (of.indices, types.uint64)),
    "sum_duplicates": Kernel((sum_duplicates, sum_duplicates_rows), lambda of: (of.indices, of.values, of.iout, of.vout)),
}
