"""Rows of features from the values of columns; each column has at most one non-zero in a row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.blocks import Block
from sparseallreduce.linear.data.tables.cells import MISSING
from sparseallreduce.linear.data.tables.columns import Stored
from sparseallreduce.linear.encoding import Column, Encoding
from sparseallreduce.streams.stream import index_dtype

__all__ = ["block_of"]

Array = NDArray[Any]

_CELLS = 1 << 18  # number of values processed in one call, so that they stay in the CPU cache


def block_of(columns: list[Stored], encoding: Encoding, labels: Array, dtype: np.dtype[Any]) -> Block:
    """Return the rows of all columns' values in final form."""
    rows, index = len(labels), index_dtype(encoding.features)
    step = max(1, _CELLS // max(1, len(columns)))
    pieces = [_piece(columns, encoding, first, min(first + step, rows), index, dtype) for first in range(0, rows, step)]
    if not pieces:
        return Block(np.zeros(1, np.int64), np.empty(0, index), np.empty(0, dtype), labels)
    lengths, indices, values = (np.concatenate(parts) for parts in zip(*pieces))
    return Block(np.append(0, np.cumsum(lengths)).astype(np.int64), indices, values, labels)


def _piece(
    columns: list[Stored], encoding: Encoding, first: int, last: int, index: np.dtype[Any], dtype: np.dtype[Any]
) -> tuple[Array, Array, Array]:
    """Return lengths, indices and values of the rows [first, last)."""
    shape = last - first, len(columns)
    indices, values, kept = np.empty(shape, index), np.ones(shape, dtype), np.empty(shape, bool)
    for place, (stored, column, bound) in enumerate(zip(columns, encoding.columns, encoding.bounds)):
        if stored.numbers is not None:
            _numbers(stored.numbers[first:last], column, bound, indices[:, place], values[:, place], kept[:, place])
        else:
            codes = np.full(last - first, MISSING) if stored.codes is None else stored.codes[first:last]
            _codes(codes, column, bound, indices[:, place], kept[:, place])
    return kept.sum(axis=1), indices[kept], values[kept]


def _numbers(numbers: Array, column: Column, bound: int, indices: Array, values: Array, kept: Array) -> None:
    indices[:], values[:] = bound, numbers
    np.not_equal(numbers, 0, out=kept)
    missing = np.isnan(numbers)
    if missing.any():
        # The last feature of the column; the only one if no row of any rank has a value, which makes it a column of categories.
        indices[missing], values[missing], kept[missing] = bound + column.width - 1, 1, column.missing


def _codes(codes: Array, column: Column, bound: int, indices: Array, kept: Array) -> None:
    with np.errstate(over="ignore"):  # negative codes are not kept
        indices[:] = (codes.astype(np.int64, copy=False) + bound).astype(indices.dtype)
    np.greater_equal(codes, 0, out=kept)
    missing = codes == MISSING
    if column.missing and missing.any():
        last = bound + column.width - 1
        indices[missing], kept[missing] = last, True
