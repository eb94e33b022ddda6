"""Compiled kernels that read and write values at positions of a dense array."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.compiled.arrays import REPLACE, U, combine, is_list, is_table
from sparseallreduce.streams.kernels.compiled.signatures import Kernel
from sparseallreduce.streams.kernels.contract import MALFORMED, Indices, Values
from sparseallreduce.streams.kernels.intrinsics import count_bits, lowest_bit, move, present_of_64

__all__ = ["KERNELS"]

SHORT_ROW = 8  # rows of at least this many values are combined in vectors


@kernel
def scatter(op: int, indices: Indices, values: Values, lo: Any, dense: Values) -> Any:
    """Combine values into a dense array; an index out of range in the middle is skipped, and reported at the end."""
    n, size, outside = U(indices.shape[0]), U(dense.shape[0]), False
    if U(values.shape[0]) != n or not (is_list(indices) and is_list(values) and is_list(dense)):
        return MALFORMED
    if n > U(0) and (indices[U(0)] < lo or U(indices[n - U(1)]) - lo >= size):
        return MALFORMED
    for j in range(n):
        at = U(indices[j]) - lo
        if at < size:
            dense[at] = combine(op, dense[at], values[j])
        else:
            outside = True
    return MALFORMED if outside else 0


@kernel
def scatter_rows(op: int, indices: Indices, values: Values, lo: Any, dense: Values) -> Any:
    """Combine rows of values into a dense array; an index out of range in the middle is skipped, and reported at the end."""
    n, width, size, outside = U(indices.shape[0]), U(dense.shape[1]), U(dense.shape[0]), False
    if U(values.shape[0]) != n or U(values.shape[1]) != width:
        return MALFORMED
    if not (is_list(indices) and is_table(values) and is_table(dense)):
        return MALFORMED
    if n > U(0) and (indices[U(0)] < lo or U(indices[n - U(1)]) - lo >= size):
        return MALFORMED
    for j in range(n):
        at = U(indices[j]) - lo
        if at >= size:
            outside = True
        elif op != REPLACE and width < U(SHORT_ROW):
            _combine_short_row(op, dense, at, values, j, width)
        else:
            for k in range(width):
                dense[at, k] = combine(op, dense[at, k], values[j, k])
    return MALFORMED if outside else 0


@inlined
def _combine_short_row(op: int, dense: Values, at: Any, values: Values, j: Any, width: Any) -> None:
    """Combine four values at a time. LLVM's check whether rows overlap takes longer than a short row."""
    whole = width & ~U(3)
    for k in range(U(0), whole, U(4)):
        a, b, c, d = values[j, k], values[j, k + U(1)], values[j, k + U(2)], values[j, k + U(3)]
        w, x, y, z = dense[at, k], dense[at, k + U(1)], dense[at, k + U(2)], dense[at, k + U(3)]
        dense[at, k] = combine(op, w, a)
        dense[at, k + U(1)] = combine(op, x, b)
        dense[at, k + U(2)] = combine(op, y, c)
        dense[at, k + U(3)] = combine(op, z, d)
    for k in range(whole, width):
        dense[at, k] = combine(op, dense[at, k], values[j, k])


@kernel
def gather_present(bits: Values, mask: Any, lo: Any, iout: Indices, vout: Values) -> Any:
    """Count the elements with a bit under ``mask``, and write those that fit.

    64 elements are tested together, and the positions of those present are taken from the bits of the result, at any density.
    """
    if not (is_list(bits) and is_list(iout) and is_list(vout)) or vout.shape[0] < iout.shape[0]:
        return MALFORMED
    size, room, n = U(bits.shape[0]), U(iout.shape[0]), U(0)
    whole = size & ~U(63)
    for start in range(U(0), whole, U(64)):
        present = present_of_64(bits, start, mask)
        count = count_bits(present)
        if n + count > room:
            n += count
        else:
            while present:
                i = start + lowest_bit(present)
                iout[n] = i + lo
                vout[n] = bits[i]
                n += U(1)
                present &= present - U(1)
    for i in range(whole, size):
        if bits[i] & mask:
            if n < room:
                iout[n] = i + lo
                vout[n] = bits[i]
            n += U(1)
    return np.int64(n)


@kernel
def gather_present_rows(bits: Values, mask: Any, lo: Any, iout: Indices, vout: Values) -> Any:
    """Count the rows with a bit under ``mask``, and write those that fit."""
    size, width, room, n = U(bits.shape[0]), U(bits.shape[1]), U(iout.shape[0]), U(0)
    if not (is_table(bits) and is_list(iout) and is_table(vout)) or vout.shape[0] < iout.shape[0] or U(vout.shape[1]) != width:
        return MALFORMED
    for i in range(size):
        found = mask & U(0)
        for k in range(width):
            found |= bits[i, k] & mask
        if found:
            if n < room:
                iout[n] = i + lo
                move(vout, n * width, bits, i * width, width)
            n += U(1)
    return np.int64(n)


KERNELS = {
    "scatter": Kernel((scatter, scatter_rows), lambda of: (of.indices, of.values, types.uint64, of.vout)),
    "gather_present": Kernel((gather_present, gather_present_rows), lambda of: (of.values, of.value, types.uint64, of.iout, of.vout)),
}
