"""Compact form of arrays whose entries are mostly equal, for pickles of estimators: positions and values of the other entries."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.stream import index_dtype

__all__ = ["Packed", "packed", "packed_all", "unpacked", "unpacked_all"]

Array = NDArray[Any]

_FEW = 1 << 12  # bytes below which arrays are not packed


class Packed(NamedTuple):
    """A one-dimensional array of which most values are equal, as this value and the others with their positions."""

    size: int
    fill: float  # value of all other entries
    indices: Array
    values: Array


def packed(array: Array, fill: float = 0.0) -> Array | Packed:
    """Return the array in the smaller of its two forms, exact including signs of zeros.

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
    """Return the array of a :class:`Packed`; anything else as it is."""
    if not isinstance(form, Packed):
        return form
    array = np.full(form.size, form.fill, form.values.dtype) if form.fill else np.zeros(form.size, form.values.dtype)
    array[form.indices] = form.values
    return array


def packed_all(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a dict with every array packed."""
    return {name: packed(value) if isinstance(value, np.ndarray) else value for name, value in values.items()}


def unpacked_all(values: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`packed_all`."""
    return {name: unpacked(value) for name, value in values.items()}
