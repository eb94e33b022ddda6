"""The union and the intersection of two index sets with values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import StreamError
from sparseallreduce.streams import memory
from sparseallreduce.streams.dtypes import HALVES
from sparseallreduce.streams.kernels.backend import device_kernels
from sparseallreduce.streams.kernels.contract import MALFORMED, UINT32, Indices, Values, unlike
from sparseallreduce.streams.kernels.dispatch import find, known
from sparseallreduce.streams.kernels.reference import merging as reference
from sparseallreduce.streams.kernels.reference.arrays import combine
from sparseallreduce.streams.operator import Operator

__all__ = ["merge", "merged", "shared"]


def merged(ia: Indices, va: Values, ib: Indices, vb: Values, op: Operator) -> tuple[Indices, Values]:
    """Return the union of two sorted index sets with their values in new arrays; see :func:`merge`.

    On a device the entries are counted before arrays are allocated; on the host, arrays for all entries are allocated and cut.
    """
    if not va.__class__ is vb.__class__ is np.ndarray:
        device = device_kernels(ia, va, ib, vb)
        if device is not None:
            return device.merged(ia, va, ib, vb, op)  # type: ignore[no-any-return]
    room = len(ia) + len(ib)
    indices = memory.empty(room, ia.dtype)
    values = memory.empty(room if va.ndim == 1 else (room, *va.shape[1:]), va.dtype)
    count = merge(ia, va, ib, vb, op, indices, values)
    return indices[:count], values[:count]


def merge(ia: Indices, va: Values, ib: Indices, vb: Values, op: Operator, iout: Indices, vout: Values) -> int:
    """Write the union of two sorted index sets with their values.

    Parameters
    ----------
    ia, ib : ndarray of uint32 or uint64, shapes (m,) and (n,)
        Strictly increasing indices, both of one dtype.
    va, vb : ndarray, shapes (m,) and (n,), or (m, width) and (n, width)
        Their values, both of one dtype.
    op : Operator
        For an index in both sets the output is ``op.ufunc(va, vb)``, otherwise a bit-exact copy of the one value.
    iout, vout : ndarray
        The outputs, of the dtypes of the inputs and at least ``m + n`` entries long. Their content beyond the returned length is undefined.

    Returns
    -------
    int
        The number of indices in the union.

    Raises
    ------
    StreamError
        If lengths, widths, dimensions or dtypes do not match, an array is not contiguous, or an output is read-only.

    Notes
    -----
    The time per output does not depend on the order of the indices or on how many are shared. It is that of a copy if the ranges are
    disjoint or one input is many times longer than the other.
    """
    if not va.__class__ is vb.__class__ is np.ndarray:
        device = device_kernels(ia, va, ib, vb, iout, vout)
        if device is not None:
            return device.merge(ia, va, ib, vb, op, iout, vout)  # type: ignore[no-any-return]
    if not (
        ia.ndim == ib.ndim == iout.ndim == 1
        and va.ndim == vb.ndim == vout.ndim
        and ia.dtype == ib.dtype == iout.dtype
        and va.dtype == vb.dtype == vout.dtype
        and iout.flags.writeable
        and vout.flags.writeable
    ):
        raise unlike("merged", ia=ia, va=va, ib=ib, vb=vb, iout=iout, vout=vout)
    entry = known(("merging.merge", op.ufunc, ia.dtype, va.dtype, va.ndim)) or find("merging.merge", op.ufunc, ia.dtype, va.dtype, va.ndim)
    n: int = entry(ia, va, ib, vb, iout, vout) if entry is not None else _merge_by_parts(ia, va, ib, vb, op, iout, vout)
    if n == MALFORMED:
        raise StreamError(
            f"cannot merge {ia.shape} indices with {va.shape} values and {ib.shape} with {vb.shape} into {iout.shape} and {vout.shape}: "
            "each index needs a value, the outputs room for all, and every array must be C-contiguous"
        )
    return n


def _merge_by_parts(ia: Indices, va: Values, ib: Indices, vb: Values, op: Operator, iout: Indices, vout: Values) -> int:
    """Merge in compiled code, and apply the operator to all values at shared indices by NumPy."""
    copied = (va, vb, vout)
    if va.dtype in HALVES:  # with which numba does not compute on processors
        copied = (va.view(np.uint16), vb.view(np.uint16), vout.view(np.uint16))
    copy = find("merging.merge", "replace", ia.dtype, copied[0].dtype, va.ndim)
    if copy is None:
        return reference.merge(ia, va, ib, vb, op, iout, vout)
    n: int = copy(ia, copied[0], ib, copied[1], iout, copied[2])
    if n == MALFORMED:
        return n
    if n == len(ia) + len(ib):
        return n
    in_a, in_b = shared(ia, ib)
    vout[in_a + in_b - np.arange(len(in_a), dtype=np.uint64)] = combine(op, va[in_a], vb[in_b])
    return n


def shared(ia: Indices, ib: Indices) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the positions of the indices that two sorted sets share.

    Parameters
    ----------
    ia, ib : ndarray of uint32 or uint64, shapes (m,) and (n,)
        Strictly increasing, both of one dtype, C-contiguous.

    Returns
    -------
    in_a, in_b : ndarray of uint64, shape (s,)
        The positions: ``ia[in_a]`` and ``ib[in_b]`` are equal and increasing.

    Raises
    ------
    StreamError
        If dtypes or dimensions differ, or an array is not contiguous.
    """
    if not type(ia) is type(ib) is np.ndarray:
        device = device_kernels(ia, ib)
        if device is not None:
            return device.shared(ia, ib)  # type: ignore[no-any-return]
    if not (ia.ndim == ib.ndim == 1 and ia.dtype == ib.dtype):
        raise unlike("compared", ia=ia, ib=ib)
    entry = find("merging.shared", None, ia.dtype, UINT32, 1)
    if entry is None:
        return reference.shared(ia, ib)
    in_a, in_b = np.empty((2, min(len(ia), len(ib)) + 1), np.uint64)
    count = entry(ia, ib, in_a, in_b)
    if count == MALFORMED:
        raise StreamError(f"indices of strides {ia.strides} and {ib.strides} cannot be compared: both must be C-contiguous")
    return in_a[:count], in_b[:count]
