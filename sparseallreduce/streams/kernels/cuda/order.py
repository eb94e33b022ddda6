"""CUDA versions of the checks of index order, the intersection of sets, and the combination of duplicates."""

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

__all__ = ["contained", "first_violation", "marked", "shared", "sum_duplicates", "violation_and_nonzeros"]


def first_violation(indices: Any, size: int, xp: Any) -> int:
    """Return the position of the first index that is not larger than its predecessor or not below ``size``, or -1.

    Parameters
    ----------
    indices : device array of uint32 or uint64, shape (n,)
    size : int
    xp : module
        NumPy or CuPy. Two numbers are copied to the host, in one transfer.

    Raises
    ------
    StreamError
        If ``indices`` is not a contiguous vector of these dtypes.
    """
    _check(indices)
    if not len(indices):
        return ABSENT
    wrong = _violations(indices, size, xp)
    position = xp.argmax(wrong)
    at, is_wrong = xp.stack([position.astype(np.int64), wrong[position].astype(np.int64)]).tolist()
    return at if is_wrong else ABSENT


def violation_and_nonzeros(indices: Any, values: Any, size: int, xp: Any) -> tuple[bool, int]:
    """Return whether indices and values are invalid, and the number of non-zero values, in one transfer to the host."""
    _check(indices)
    if len(indices) != len(values) or values.ndim != 1:
        return True, 0
    if not len(indices):
        return False, 0
    numbers = _violations(indices, size, xp).any().astype(np.int64), xp.count_nonzero(values).astype(np.int64)
    is_wrong, count = xp.stack(numbers).tolist()
    return bool(is_wrong), count


def _violations(indices: Any, size: int, xp: Any) -> Any:
    largest = int(np.iinfo(indices.dtype).max)
    wrong = xp.ones(len(indices), np.bool_) if size <= 0 else indices > indices.dtype.type(min(size - 1, largest))
    wrong[1:] |= indices[1:] <= indices[:-1]
    return wrong


def shared(ia: Any, ib: Any, xp: Any) -> tuple[Any, Any]:
    """Return the positions of shared indices in two sorted sets, as device arrays of uint64."""
    _check(ia)
    _check(ib)
    if ia.dtype != ib.dtype:
        raise StreamError(f"indices of {ia.dtype} and {ib.dtype} cannot be compared: convert one of them")
    if not len(ia) or not len(ib):
        return xp.empty(0, np.uint64), xp.empty(0, np.uint64)
    found = xp.searchsorted(ib, ia)
    in_a = xp.flatnonzero(ib[xp.minimum(found, len(ib) - 1)] == ia)
    return in_a.astype(np.uint64), found[in_a].astype(np.uint64)


def contained(ia: Any, ib: Any, xp: Any) -> Any:
    """Return a device mask of which indices, in any order, a sorted set contains, without making the host wait."""
    _check(ib)
    if not len(ib):
        return xp.zeros(len(ia), np.bool_)
    return ib[xp.minimum(xp.searchsorted(ib, ia), len(ib) - 1)] == ia


def marked(flags: Any, count: int, xp: Any, *, block: int = BLOCK) -> Any:
    """Return the positions of the ``count`` True values in a device mask, as uint64 in increasing order."""
    places = xp.empty(count, np.uint64)
    launch(_place_marked, len(flags), block, xp, flags, xp.cumsum(flags, dtype=np.int64), places)
    return places


@kernel
def _place_marked(flags: Any, ends: Any, places: Any) -> None:
    i = cuda.grid(1)
    if i < flags.shape[0] and flags[i] and ends[i] <= places.shape[0]:
        places[ends[i] - 1] = i


def sum_duplicates(indices: Any, values: Any, op: Operator, xp: Any, *, block: int = BLOCK) -> tuple[Any, Any]:
    """Combine the values of equal neighbouring indices, in order of appearance, with a thread for each index and column.

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
        Their number is copied to the host.

    Raises
    ------
    StreamError
        If the numbers of values and indices differ, or an array is not contiguous.
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
    """Return the kernel that combines equal indices with an operator."""

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
