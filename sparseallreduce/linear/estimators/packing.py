"""Arrays of which most entries are alike, as the places and values of the others: what pickles of estimators hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.stream import index_dtype

__all__ = ["Packed", "packed", "packed_all", "unpacked", "unpacked_all"]

Array = NDArray[Any]

_FEW = 1 << 12  # bytes that are not worth it


class Packed(NamedTuple):
    """A one-dimensional array."""

    size: int
    fill: float  # what the entries are that are not given
    indices: Array
    values: Array


def packed(array: Array, fill: float = 0.0) -> Array | Packed:
    """The array in the smaller of its two forms; to the bit, signs of zeros included.

    >>> packed(np.zeros(100_000))
    Packed(size=100000, fill=0.0, indices=array([], dtype=uint32), values=array([], dtype=float64))
    """
    if array.ndim != 1 or array.nbytes < _FEW:
        return array
    bits = f"u{array.itemsize}"
    different = array.view(bits) != np.full(1, fill, array.dtype).view(bits)
    index = index_dtype(len(array))
    if np.count_nonzero(different) * (array.itemsize + index.itemsize) >= array.nbytes:
        return array
    indices = np.flatnonzero(different)
    return Packed(len(array), fill, indices.astype(index), array[indices])


def unpacked(form: Any) -> Any:
    """The array of a form; anything else as it is."""
    if not isinstance(form, Packed):
        return form
    array = np.full(form.size, form.fill, form.values.dtype) if form.fill else np.zeros(form.size, form.values.dtype)
    array[form.indices] = form.values
    return array


def packed_all(values: dict[str, Any]) -> dict[str, Any]:
    """With every array among the values packed."""
    return {name: packed(value) if isinstance(value, np.ndarray) else value for name, value in values.items()}


def unpacked_all(values: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`packed_all`."""
    return {name: unpacked(value) for name, value in values.items()}
