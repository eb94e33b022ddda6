"""Check that indices are increasing, and combine the values of duplicates."""

from __future__ import annotations

import numpy as np

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels.backend import device_kernels
from sparseallreduce.streams.kernels.contract import MALFORMED, UINT32, Indices, Values, unlike
from sparseallreduce.streams.kernels.dispatch import find, known
from sparseallreduce.streams.kernels.reference import order as reference
from sparseallreduce.streams.operator import SUM, Operator

__all__ = ["first_violation", "sum_duplicates"]

_LARGEST = 2**64 - 1


def first_violation(indices: Indices, size: int) -> int:
    """Find the first index that is not larger than its predecessor, or not below ``size``.

    Parameters
    ----------
    indices : ndarray of uint32 or uint64, shape (n,)
    size : int
        The dimension of the stream, of any magnitude.

    Returns
    -------
    int
        The position of that index, or -1.

    Raises
    ------
    StreamError
        If ``indices`` is not a C-contiguous vector.
    """
    if type(indices) is not np.ndarray:
        device = device_kernels(indices)
        if device is not None:
            return device.first_violation(indices, size)  # type: ignore[no-any-return]
    if indices.ndim != 1:
        raise unlike("checked", indices=indices)
    entry = known(("order.first_violation", None, indices.dtype, UINT32, 1)) or find(
        "order.first_violation", None, indices.dtype, UINT32, 1
    )
    if entry is None or size <= 0:
        return reference.first_violation(indices, size)
    position: int = entry(indices, min(size - 1, _LARGEST))
    if position == MALFORMED:
        raise StreamError(f"the indices of shape {indices.shape} and strides {indices.strides} are not C-contiguous")
    return position


def sum_duplicates(indices: Indices, values: Values, op: Operator = SUM) -> tuple[Indices, Values]:
    """Combine the values of equal indices, in order of appearance.

    Parameters
    ----------
    indices : ndarray of uint32 or uint64, shape (n,)
        Sorted, with duplicates next to each other.
    values : ndarray, shape (n,) or (n, width)
    op : Operator
        The values ``x, y, z`` of an index become ``op.ufunc(op.ufunc(x, y), z)``.

    Returns
    -------
    indices : ndarray, shape (m,)
        Strictly increasing.
    values : ndarray, shape (m,) or (m, width)

    Raises
    ------
    StreamError
        If the numbers of values and indices differ, an array is not contiguous, or the indices change during the call.
    """
    if not type(indices) is type(values) is np.ndarray:
        device = device_kernels(indices, values)
        if device is not None:
            return device.sum_duplicates(indices, values, op)  # type: ignore[no-any-return]
    if indices.ndim != 1:
        raise unlike("added up", indices=indices, values=values)
    entry = find("order.sum_duplicates", op.ufunc, indices.dtype, values.dtype, values.ndim)
    if entry is None:
        return reference.sum_duplicates(indices, values, op)
    width = values.shape[1:]
    different = entry(indices, values, np.empty(0, indices.dtype), np.empty((0, *width), values.dtype))
    if different == MALFORMED:
        raise StreamError(f"{indices.shape} indices need as many values, not {values.shape}, and both must be C-contiguous")
    iout, vout = np.empty(different, indices.dtype), np.empty((different, *width), values.dtype)
    if entry(indices, values, iout, vout) != different:
        raise StreamError("the indices have changed while the values of equal indices were added: do not modify them during the call")
    return iout, vout
