"""Read and write values at positions of a dense array."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.dtypes import HALVES, is_float
from sparseallreduce.streams.kernels.backend import device_kernels
from sparseallreduce.streams.kernels.contract import MALFORMED, UINT32, UINT64, Indices, Values, unlike
from sparseallreduce.streams.kernels.dispatch import find, known
from sparseallreduce.streams.kernels.reference import dense as reference
from sparseallreduce.streams.operator import Operator

__all__ = ["gather_present", "scatter", "scatter_set"]

_BITS: dict[np.dtype[Any], np.dtype[Any]] = {  # unsigned dtype for the bits of values
    **dict.fromkeys(HALVES, np.dtype(np.uint16)),
    **{np.dtype(name): UINT32 for name in ("float32", "int32")},
    **{np.dtype(name): UINT64 for name in ("float64", "int64")},
}


def scatter(indices: Indices, values: Values, lo: int, op: Operator, dense: Values) -> None:
    """Combine values into a dense array: ``dense[indices - lo] = op.ufunc(dense[indices - lo], values)``.

    Parameters
    ----------
    indices : ndarray of uint32 or uint64, shape (n,)
        Strictly increasing, each in ``[lo, lo + len(dense))``.
    values : ndarray, shape (n,) or (n, width)
    lo : int
        The index of ``dense[0]``.
    op : Operator
    dense : ndarray, shape (size,) or (size, width)
        Modified in place; of the dtype of ``values``.

    Raises
    ------
    StreamError
        If lengths, widths, dimensions or dtypes do not match, an array is not contiguous, ``dense`` is read-only, or the first or last
        index is out of range; nothing has then been modified. Also if another index is out of range; all others have then been combined.
    """
    if not values.__class__ is dense.__class__ is np.ndarray:
        device = device_kernels(indices, values, dense)
        if device is not None:
            device.scatter(indices, values, lo, op, dense)
            return
    if indices.ndim != 1 or dense.ndim != values.ndim or dense.dtype != values.dtype or not dense.flags.writeable:
        raise unlike("scattered", indices=indices, values=values, dense=dense)
    entry = known(("dense.scatter", op.ufunc, indices.dtype, values.dtype, values.ndim)) or find(
        "dense.scatter", op.ufunc, indices.dtype, values.dtype, values.ndim
    )
    if entry is None:
        reference.scatter(indices, values, lo, op, dense)
    elif entry(indices, values, lo, dense) == MALFORMED:
        raise _scatter_error(indices, values, lo, dense)


def scatter_set(indices: Indices, values: Values, lo: int, dense: Values) -> None:
    """Assign values to places of a dense array: ``dense[indices - lo] = values``, bit by bit.

    Parameters and exceptions are those of :func:`scatter`.
    """
    if not values.__class__ is dense.__class__ is np.ndarray:
        device = device_kernels(indices, values, dense)
        if device is not None:
            device.scatter_set(indices, values, lo, dense)
            return
    if indices.ndim != 1 or dense.ndim != values.ndim or dense.dtype != values.dtype or not dense.flags.writeable:
        raise unlike("scattered", indices=indices, values=values, dense=dense)
    if values.dtype in HALVES:
        values, dense = values.view(np.uint16), dense.view(np.uint16)
    entry = known(("dense.scatter", "replace", indices.dtype, values.dtype, values.ndim)) or find(
        "dense.scatter", "replace", indices.dtype, values.dtype, values.ndim
    )
    if entry is None:
        reference.scatter_set(indices, values, lo, dense)
    elif entry(indices, values, lo, dense) == MALFORMED:
        raise _scatter_error(indices, values, lo, dense)


def _scatter_error(indices: Indices, values: Values, lo: int, dense: Values) -> StreamError:
    bounds = f" {indices.min()}..{indices.max()}" if len(indices) else ""
    return StreamError(
        f"cannot scatter {indices.shape} indices{bounds} with {values.shape} values into a dense array of shape {dense.shape} that "
        f"begins at {lo}: each index needs a value and a place there, and every array must be C-contiguous"
    )


def gather_present(dense: Values, lo: int, index_dtype: DTypeLike) -> tuple[Indices, Values]:
    """Return the indices and values of the non-zero elements or rows of a dense array.

    Parameters
    ----------
    dense : ndarray, shape (size,) or (size, width)
    lo : int
        The index of ``dense[0]``.
    index_dtype : {uint32, uint64}
        Dtype of the indices; it must hold ``lo + size - 1``.

    Returns
    -------
    indices : ndarray, shape (n,)
        ``lo`` plus the positions of the non-zero elements, or of the rows that have one. NaN counts as non-zero, -0.0 as zero.
    values : ndarray, shape (n,) or (n, width)
        A copy of the elements or rows at these positions.

    Raises
    ------
    StreamError
        If ``dense`` is not C-contiguous.
    """
    if type(dense) is not np.ndarray:
        device = device_kernels(dense)
        if device is not None:
            return device.gather_present(dense, lo, index_dtype)  # type: ignore[no-any-return]
    index_dtype = np.dtype(index_dtype)
    complex_ = dense.dtype.kind == "c"  # which are rows of real and imaginary parts
    dtype = dense.real.dtype if complex_ else dense.dtype
    bits = _BITS.get(dtype)
    entry = None if bits is None else find("dense.gather_present", None, index_dtype, bits, 2 if complex_ else dense.ndim)
    if entry is None or bits is None:
        return reference.gather_present(dense, lo, index_dtype)
    width = dense.shape[1:]
    mask = 2 ** (8 * dtype.itemsize - is_float(dtype)) - 1  # without the sign of a zero
    present = _as_bits(dense, bits, complex_)
    room = _expected_present(present, mask)
    while True:
        indices, values = np.empty(room, index_dtype), np.empty((room, *width), dense.dtype)
        found = entry(present, mask, lo, indices, _as_bits(values, bits, complex_))
        if found == MALFORMED:
            raise StreamError(f"the dense array of shape {dense.shape} and strides {dense.strides} is not C-contiguous")
        if found <= room:
            indices.resize(found, refcheck=False)
            values.resize((found, *width), refcheck=False)
            return indices, values
        room = found


def _as_bits(values: Values, bits: np.dtype[Any], complex_: bool) -> Values:
    """Return a view as unsigned integers."""
    if not complex_:
        return values.view(bits)
    if not values.flags.c_contiguous:
        raise StreamError(f"the dense array of shape {values.shape} and strides {values.strides} is not C-contiguous")
    return values.reshape(-1).view(bits).reshape(len(values), 2 * math.prod(values.shape[1:]))


def _expected_present(bits: Values, mask: int) -> int:
    """Return a buffer size for the non-zeros of a dense array, estimated from a sample, so that it is rarely read twice."""
    blocks = len(bits) // 2048
    if bits.ndim != 1 or blocks < 32 or not bits.flags.c_contiguous:
        return 0
    sample = bits[: blocks * 2048].reshape(blocks, 2048)[:, :64] & bits.dtype.type(mask)
    return min(len(bits), 48 * int(np.count_nonzero(sample)) + 4096)  # half as much again; unused memory is never touched
