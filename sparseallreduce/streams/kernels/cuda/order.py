"""Indices in a row: whether they increase, what two sets share, and the values of equal ones combined."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import cuda

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels.contract import ABSENT
from sparseallreduce.streams.kernels.cuda.arrays import operator_of
from sparseallreduce.streams.kernels.cuda.launching import BLOCK, kernel, launch
from sparseallreduce.streams.operator import Operator

__all__ = ["first_violation", "shared", "sum_duplicates"]


def first_violation(indices: Any, size: int, xp: Any) -> int:
    """The position of the first index that does not exceed its predecessor or is not below ``size``; -1 if there is none.

    Parameters
    ----------
    indices : device array of uint32 or uint64, shape (n,)
    size : int
    xp : module
        NumPy or CuPy. Two numbers travel to the host.

    Raises
    ------
    StreamError
        If ``indices`` is no contiguous vector of these dtypes.
    """
    _check(indices)
    if not len(indices):
        return ABSENT
    largest = int(np.iinfo(indices.dtype).max)
    wrong = xp.ones(len(indices), np.bool_) if size <= 0 else indices > indices.dtype.type(min(size - 1, largest))
    wrong[1:] |= indices[1:] <= indices[:-1]
    position = int(xp.argmax(wrong))
    return position if bool(wrong[position]) else ABSENT


def shared(ia: Any, ib: Any, xp: Any) -> tuple[Any, Any]:
    """Where the indices that two sorted sets share lie in either: device arrays of uint64."""
    _check(ia)
    _check(ib)
    if ia.dtype != ib.dtype:
        raise StreamError(f"indices of {ia.dtype} and {ib.dtype} cannot be compared: convert one of them")
    if not len(ia) or not len(ib):
        return xp.empty(0, np.uint64), xp.empty(0, np.uint64)
    found = xp.searchsorted(ib, ia)
    in_a = xp.flatnonzero(ib[xp.minimum(found, len(ib) - 1)] == ia)
    return in_a.astype(np.uint64), found[in_a].astype(np.uint64)


def sum_duplicates(indices: Any, values: Any, op: Operator, xp: Any, *, block: int = BLOCK) -> tuple[Any, Any]:
    """Combine the values of equal neighbouring indices, in order of appearance: a thread for each index and column.

    Parameters
    ----------
    indices : device array of uint32 or uint64, shape (n,)
        Sorted.
    values : device array, shape (n,) or (n, width)
    op : Operator
    xp : module
        NumPy or CuPy.

    Returns
    -------
    indices, values : device arrays, shapes (m,), and (m,) or (m, width)
        How many travels to the host.

    Raises
    ------
    StreamError
        If there are not as many values as indices, or an array has gaps.
    """
    _check(indices)
    if len(values) != len(indices) or not values.flags.c_contiguous:
        raise StreamError(f"{indices.shape} indices need as many values, not {values.shape}, and both must be C-contiguous")
    first = xp.ones(len(indices), np.bool_)
    first[1:] = indices[1:] != indices[:-1]
    starts = xp.flatnonzero(first)
    ends = xp.concatenate([starts[1:], xp.full(1, len(indices), starts.dtype)])[: len(starts)]
    combined, width = values[starts], math.prod(values.shape[1:])
    code = operator_of(op.ufunc, values.dtype)
    if code is not None:
        launch(_combining(code), len(starts) * width, block, xp, values.reshape(-1), starts, ends, width, combined.reshape(-1))
        return indices[starts], combined
    repeats, turn = ends - starts, 1
    longer = xp.flatnonzero(repeats > 1)
    with np.errstate(all="ignore"):
        while len(longer):
            held = combined[longer]
            op.ufunc(held, values[starts[longer] + turn], out=held)
            combined[longer] = held
            turn += 1
            longer = longer[repeats[longer] > turn]
    return indices[starts], combined


def _check(indices: Any) -> None:
    if indices.ndim != 1 or indices.dtype not in (np.uint32, np.uint64) or not indices.flags.c_contiguous:
        raise StreamError(f"indices are a contiguous vector of uint32 or uint64, not {indices.dtype} of shape {indices.shape}")


@functools.cache
def _combining(combined: Any) -> Any:
    """The kernel that combines equal indices, for an operator."""

    @kernel
    def combine_runs(values: Any, starts: Any, ends: Any, width: Any, out: Any) -> None:
        i = cuda.grid(1)
        if i < out.shape[0]:
            run = i // width
            column = i - run * width
            total = values[starts[run] * width + column]
            for entry in range(starts[run] + 1, ends[run]):
                total = combined(total, values[entry * width + column])
            out[i] = total

    return combine_runs
