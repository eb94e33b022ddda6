"""CUDA kernels that read and write values at positions of a dense array, without atomic operations, since indices are unique."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import DTypeLike

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.dtypes import is_float
from sparseallreduce.streams.kernels.cuda.arrays import U, as_bits, check_together, operator_of, replace, smaller
from sparseallreduce.streams.kernels.cuda.launching import BLOCK, RUN, exclusive, kernel, launch, threads_for
from sparseallreduce.streams.operator import Operator

__all__ = ["clear", "gather_present", "scatter", "scatter_set"]


def scatter(indices: Any, values: Any, lo: int, op: Operator, dense: Any, xp: Any, *, block: int = BLOCK) -> None:
    """Combine values into a dense array: ``dense[indices - lo] = op.ufunc(dense[indices - lo], values)``.

    Parameters
    ----------
    indices : device array of uint32 or uint64, shape (n,)
        Strictly increasing, each in ``[lo, lo + len(dense))``.
    values : device array, shape (n,) or (n, width)
    lo : int
        The index of ``dense[0]``.
    op : Operator
    dense : device array, shape (size,) or (size, width)
        Modified in place; of the dtype of ``values``.
    xp : module
        NumPy or CuPy.

    Raises
    ------
    StreamError
        If an index is out of range (checking this makes the host wait), lengths, widths, dimensions or dtypes do not match, or an array is
        not contiguous. Nothing has then been modified.
    """
    _check_places(indices, values, lo, dense, xp)
    combined = operator_of(op.ufunc, values.dtype)
    width = math.prod(values.shape[1:])
    if combined is not None:
        arguments = indices, values.reshape(-1), U(lo), width, dense.reshape(-1)
        launch(_scattering(combined), len(indices) * width, block, xp, *arguments)
    elif len(indices):
        places = (indices.astype(np.uint64) - U(lo)).astype(np.int64)
        held = dense[places]
        with np.errstate(all="ignore"):
            op.ufunc(held, values, out=held)
        dense[places] = held


def scatter_set(indices: Any, values: Any, lo: int, dense: Any, xp: Any, *, block: int = BLOCK) -> None:
    """Assign values to places of a dense array: ``dense[indices - lo] = values``, bit by bit.

    Parameters and exceptions are those of :func:`scatter`.
    """
    _check_places(indices, values, lo, dense, xp)
    (bits, width), (target, _) = as_bits(values), as_bits(dense)
    launch(_scattering(replace), len(bits), block, xp, indices, bits, U(lo), width, target)


def clear(indices: Any, dense: Any, xp: Any, *, block: int = BLOCK) -> None:
    """Set elements of a vector to zero without making the host wait. Positions out of range are skipped.

    Parameters
    ----------
    indices : device array of uint32 or uint64, shape (n,)
    dense : device array, shape (size,)
    """
    zeros = xp.zeros(len(indices), dense.dtype)
    check_together("scattered", indices, zeros)
    (bits, width), (target, _) = as_bits(zeros), as_bits(dense)
    launch(_scattering(replace), len(bits), block, xp, indices, bits, U(0), width, target)


def _check_places(indices: Any, values: Any, lo: int, dense: Any, xp: Any) -> None:
    check_together("scattered", indices, values)
    if dense.dtype != values.dtype or dense.shape[1:] != values.shape[1:] or not dense.flags.c_contiguous:
        raise StreamError(
            f"{values.dtype} values of shape {values.shape} do not go into a dense array of {dense.dtype} and shape {dense.shape}: "
            "dtype and width must be the same, and the array C-contiguous"
        )
    if len(indices) and int((indices.astype(np.uint64) - U(lo)).max()) >= len(dense):
        raise StreamError(f"indices {indices.min()}..{indices.max()} leave the range {lo}..{lo + len(dense)} of the dense array")


@functools.cache
def _scattering(combined: Any) -> Any:
    """Return the kernel that scatters with an operator."""

    @kernel
    def scatter_values(indices: Any, values: Any, lo: Any, width: Any, dense: Any) -> None:
        i = cuda.grid(1)
        if i < values.shape[0]:
            entry = i // width
            place = U(indices[entry]) - lo
            if place < U(dense.shape[0] // width):  # still checked, since the indices may have changed since
                at = np.int64(place) * width + (i - entry * width)
                dense[at] = combined(dense[at], values[i])

    return scatter_values


def gather_present(dense: Any, lo: int, index_dtype: DTypeLike, xp: Any, *, run: int = RUN, block: int = BLOCK) -> tuple[Any, Any]:
    """Return the indices and values of the non-zero elements or rows of a dense array.

    Parameters
    ----------
    dense : device array, shape (size,) or (size, width)
        Of any dtype of streams except bfloat16.
    lo : int
        The index of ``dense[0]``.
    index_dtype : {uint32, uint64}
        It must hold ``lo + size - 1``.
    xp : module
        NumPy or CuPy.

    Returns
    -------
    indices : device array, shape (n,)
        ``lo`` plus the positions of the non-zero elements, or of the rows that have one. NaN counts as non-zero, -0.0 as zero.
    values : device array, shape (n,) or (n, width)
        A copy of the elements or rows at these positions. Their number is copied to the host.

    Raises
    ------
    StreamError
        If ``dense`` is not contiguous or has more than two dimensions.
    """
    if dense.ndim not in (1, 2):
        raise StreamError(f"a dense array has one dimension, or two if it is of rows, not {dense.ndim}")
    real = dense.real.dtype if dense.dtype.kind == "c" else dense.dtype
    if not dense.flags.c_contiguous:
        raise StreamError(f"the dense array of shape {dense.shape} and strides {dense.strides} is not C-contiguous")
    bits, width = dense.reshape(-1).view(f"u{real.itemsize}"), math.prod(dense.shape[1:]) * (dense.dtype.itemsize // real.itemsize)
    mask = bits.dtype.type(2 ** (8 * real.itemsize - is_float(real)) - 1)  # without the sign of a zero
    threads = threads_for(len(dense), run) if width else 0
    counts = xp.empty(threads, np.int64)
    launch(_count_present, threads, block, xp, bits, width, mask, run, counts)
    starts, total = exclusive(counts, xp)
    found = int(total[0])
    indices, values = xp.empty(found, index_dtype), xp.empty((found, *dense.shape[1:]), dense.dtype)
    copies = values.reshape(-1).view(bits.dtype)
    launch(_place_present, threads, block, xp, bits, width, mask, U(lo), run, starts, indices, copies)
    return indices, values


@kernel
def _count_present(bits: Any, width: Any, mask: Any, run: Any, counts: Any) -> None:
    thread = cuda.grid(1)
    if thread < counts.shape[0]:
        count = 0
        for row in range(thread * run, smaller((thread + 1) * run, bits.shape[0] // width)):
            present = False
            for k in range(row * width, (row + 1) * width):
                present = present or (bits[k] & mask) != U(0)
            if present:
                count += 1
        counts[thread] = count


@kernel
def _place_present(bits: Any, width: Any, mask: Any, lo: Any, run: Any, starts: Any, indices: Any, values: Any) -> None:
    thread = cuda.grid(1)
    if thread < starts.shape[0]:
        at = starts[thread]
        for row in range(thread * run, smaller((thread + 1) * run, bits.shape[0] // width)):
            present = False
            for k in range(row * width, (row + 1) * width):
                present = present or (bits[k] & mask) != U(0)
            if present and at < indices.shape[0]:
                indices[at] = lo + U(row)
                for k in range(width):
                    values[at * width + k] = bits[row * width + k]
                at += 1
