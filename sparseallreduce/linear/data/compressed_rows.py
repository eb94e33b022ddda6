"""Blocks of samples from compressed rows of other formats, whose features may be unsorted."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.blocks import Block
from sparseallreduce.linear.data.row_kernels import increasing, merge_rows
from sparseallreduce.streams.stream import index_dtype

__all__ = ["NONZEROS_AT_ONCE", "checked_block"]

Array = NDArray[Any]

#: Number of non-zeros that a reader processes in one block, except for longer samples.
NONZEROS_AT_ONCE = 1 << 20


def checked_block(
    indptr: Array, indices: Array, values: Array, labels: Array, *, features: int, first: int, source: object, dtype: np.dtype[Any]
) -> Block:
    """Return a block of these rows, with features sorted and duplicates added.

    Parameters
    ----------
    indptr, indices, values, labels : ndarray
        Numeric arrays; ``indptr`` starts at 0 and does not decrease.
    features : int
        Number of features; indices must be below it.
    first : int
        Number of the first sample.
    source
        Name of the file in errors.
    dtype : dtype
        Data type of the block's values, float32 or float64.

    Raises
    ------
    DatasetError
        With the file, the sample and what is wrong with it.
    """

    def refuse(entry: int, reason: str) -> None:
        sample = first + int(np.searchsorted(indptr, entry, "right")) - 1
        raise DatasetError(f"{source}, sample {sample}: {reason}")

    strange = (indices < 0) | (indices >= features)
    if strange.any():
        index = int(indices[strange.argmax()])
        refuse(int(strange.argmax()), f"index {index} is {'below 0' if index < 0 else f'not below the {features} features'}")
    with np.errstate(over="ignore"):
        taken = values.astype(dtype)
    rows, places = indptr.astype(np.int64), indices.astype(index_dtype(features))
    if not increasing(rows, places):
        count = int(merge_rows(rows, places, taken))
        places, taken, indptr = places[:count], taken[:count], rows
    finite = np.isfinite(taken)
    if not finite.all():
        entry = int(finite.argmin())
        refuse(entry, f"the value of index {places[entry]} is {taken[entry]}, not a finite {dtype}")
    return Block(rows, places, taken, labels.astype(np.float64))
