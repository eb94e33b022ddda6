"""Streams that lie one in a row of bytes: their sum, or a part of it, and how large it is going to be."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.errors import StreamError
from sparseallreduce.streams import memory
from sparseallreduce.streams.kernels.contract import MALFORMED, PIECE, UINT32, UINT64, Indices, Positions, Values, unlike
from sparseallreduce.streams.kernels.dispatch import find, known
from sparseallreduce.streams.kernels.reference import rows as reference
from sparseallreduce.streams.operator import SUM

__all__ = ["cut_rows", "estimate_union", "inner_sums", "sum_cut_rows", "sum_rows", "write_past"]

_UINT8, _INT64 = np.dtype(np.uint8), np.dtype(np.int64)
_LARGEST = 2**64 - 1


def sum_rows(
    rows: Indices,
    values: Values,
    start: int,
    counts: NDArray[np.int64],
    lo: int,
    hi: int,
    dense: Values,
    *,
    checked: bool = False,
) -> None:
    """Sum streams that lie one in a row of bytes: from byte ``start`` on their values, behind them aligned their indices.

    Parameters
    ----------
    rows, values : ndarray, shapes (ranks, bytes / index size) and (ranks, bytes / value size)
        The same bytes as indices and as values.
    start : int
        A multiple of both sizes.
    counts : ndarray of int64, shape (ranks,)
        Entries of each row, or -1 for all values of a dense vector without indices.
    lo, hi : int
    dense : ndarray, shape (size,)
        The sum is written to ``dense[lo:hi]``, added up in the order of the rows; the rest is left as it is.
    checked : bool
        Whether dtypes, dimensions and flags of the arrays are known to be right, as those that a caller has made itself are.

    Raises
    ------
    StreamError
        If a row is too short for what it is to hold, or ``dense`` for an index or the range; or arrays are of other dtypes or dimensions,
        or ``dense`` is read-only.
    """
    if not checked and not (_are_rows(rows, values, counts) and dense.ndim == 1 and dense.dtype == values.dtype and dense.flags.writeable):
        raise unlike("summed", rows=rows, values=values, counts=counts, dense=dense)
    key = ("rows.sum_rows", SUM.ufunc, rows.dtype, values.dtype, 1)
    entry = known(key) or find(*key)
    if (entry or reference.sum_rows)(rows, values, start, counts, lo, hi, np.empty(len(counts), np.uint64), dense) == MALFORMED:
        raise StreamError(f"rows of {values[:1].nbytes} bytes cannot hold {counts} entries, or a vector of {len(dense)} not the indices")


def cut_rows(rows: Indices, itemsize: int, counts: NDArray[np.int64], size: int, part: int, parts: int, bounds: Positions) -> int:
    """Find one of some parts of the index space which all have about as many entries of all streams together.

    Parameters
    ----------
    rows : ndarray, shape (ranks, bytes / index size)
        Streams one in a row of bytes, their values in front and their indices aligned behind them.
    itemsize : int
        Bytes of a value, or of a row of them.
    counts : ndarray of int64, shape (ranks,)
        Entries of each row.
    size : int
        Of the index space.
    part : int
        Below ``parts``.
    parts : int
        How many there are.
    bounds : ndarray of uint64, shape (4, ranks + 1)
        Filled in: where in each row the entries of the part begin and, in the second row, where they end; last in these rows, where
        the part begins and ends in the index space, and in the third, how many entries lie before it.

    Returns
    -------
    int
        How many entries these are.

    Raises
    ------
    StreamError
        If a row is too short for what it is to hold.
    """
    if not (_are_rows(rows, rows, counts) and _are_bounds(bounds)):
        raise unlike("cut", rows=rows, counts=counts, bounds=bounds)
    key = ("rows.cut_rows", None, rows.dtype, UINT32, 1)
    entry = known(key) or find(*key)
    found: int = (entry or reference.cut_rows)(rows, itemsize, counts, size, part, parts, bounds)
    if found == MALFORMED:
        raise StreamError(f"rows of {rows[:1].nbytes} bytes cannot hold {counts} entries, or {bounds.shape} bounds not all there are")
    return found


def estimate_union(rows: Indices, start: int, itemsize: int, counts: NDArray[np.int64], samples: int) -> int:
    """How many different indices streams that lie one in a row of bytes have, as some of their entries tell: the same wherever it is asked.

    Parameters
    ----------
    rows, start, counts
        As for :func:`sum_rows`, without dense vectors.
    itemsize : int
        Bytes of a value, or of a row of them.
    samples : int
        Entries that are looked for in all rows.

    Raises
    ------
    StreamError
        If a row is too short for what it is to hold.
    """
    if not _are_rows(rows, rows, counts):
        raise unlike("looked at", rows=rows, counts=counts)
    key = ("rows.estimate_union", None, rows.dtype, UINT32, 1)
    entry = known(key) or find(*key)
    found: int = (entry or reference.estimate_union)(rows, start, itemsize, counts, samples)
    if found == MALFORMED:
        raise StreamError(f"rows of {rows[:1].nbytes} bytes cannot hold {counts} entries")
    return found


def sum_cut_rows(
    rows: Indices,
    values: Values,
    start: int,
    counts: NDArray[np.int64],
    bounds: Positions,
    inner: tuple[Indices, Values],
    iout: Indices,
    vout: Values,
    *,
    whole: bool = False,
    at_end: bool = False,
    limit: int = _LARGEST,
    checked: bool = False,
) -> int:
    """Sum a part of streams that lie one in a row of bytes, as :func:`cut_rows` has found it, as a balanced tree.

    Parameters
    ----------
    rows, values, start, counts
        As for :func:`sum_rows`, without dense vectors.
    bounds : ndarray of uint64, shape (4, ranks) or wider
        Where in each row the entries begin and, in the second row, where they end; they hold nothing of use afterwards.
    inner : (indices, values)
        Memory that :func:`inner_sums` has made.
    iout, vout : ndarray, shape (1, room)
        The outputs, with room for all entries of the part. What they hold beside the sum is undefined afterwards.
    whole : bool
        Whether the part is all there is, whatever ``bounds`` says.
    at_end : bool
        Whether the sum is to lie at the end of the outputs, not at their beginning.
    limit : int, optional
        The most entries that the sum may have.
    checked : bool
        As for :func:`sum_rows`.

    Returns
    -------
    int
        How many entries the sum has; ``ABSENT``, which is -1, if more than ``limit``.

    Raises
    ------
    StreamError
        If the rows do not hold the entries, the outputs are too short, have gaps or are read-only, or dtypes or dimensions are others.
    """
    if not checked and not (
        _are_rows(rows, values, counts)
        and _are_bounds(bounds)
        and inner[0].dtype == iout.dtype == rows.dtype
        and inner[1].dtype == vout.dtype == values.dtype
        and inner[0].ndim == inner[1].ndim == iout.ndim == vout.ndim == 2
        and _is_output(iout)
        and _is_output(vout)
    ):
        raise unlike("summed", rows=rows, values=values, counts=counts, bounds=bounds, iout=iout, vout=vout)
    key = ("rows.sum_cut_rows", SUM.ufunc, rows.dtype, values.dtype, 1)
    entry = known(key) or find(*key)
    found: int = (entry or reference.sum_cut_rows)(rows, values, start, counts, bounds, whole, at_end, limit, PIECE, *inner, iout, vout)
    if found == MALFORMED:
        raise StreamError(f"rows of {values[:1].nbytes} bytes do not hold these parts of {counts} entries, or more than {iout.shape[1]}")
    return found


def inner_sums(ranks: int, total: int, index_dtype: DTypeLike, value_dtype: DTypeLike) -> tuple[Indices, Values]:
    """Memory for the sums of two levels of the tree that :func:`sum_cut_rows` makes of so many entries of so many ranks at most."""
    shape = (2, min(total, PIECE) if ranks > 2 else 0)
    return memory.empty(shape, index_dtype), memory.empty(shape, value_dtype)


def write_past(target: NDArray[np.uint8], to: int, source: NDArray[np.uint8]) -> None:
    """Copy bytes past the caches, to memory that other processes read.

    Parameters
    ----------
    target, source : ndarray of uint8, shapes (m,) and (n,)
        Without gaps.
    to : int
        Where in ``target`` the copy is to begin.

    Raises
    ------
    StreamError
        If ``target`` is too short or read-only.
    """
    if not (target.ndim == source.ndim == 1 and target.dtype == source.dtype == _UINT8 and target.flags.writeable):
        raise unlike("copied", target=target, source=source)
    key = ("rows.write_past", None, UINT32, UINT32, 1)
    entry = known(key) or find(*key)
    if (entry or reference.write_past)(target, to, source) == MALFORMED:
        raise StreamError(f"{len(source)} bytes from {to} on do not fit into {len(target)}")


def _are_rows(rows: Indices, values: Values, counts: NDArray[np.int64]) -> bool:
    return rows.ndim == values.ndim == 2 and counts.ndim == 1 and counts.dtype == _INT64 and counts.flags.c_contiguous


def _are_bounds(bounds: Positions) -> bool:
    return bounds.ndim == 2 and bounds.dtype == UINT64 and bounds.flags.writeable


def _is_output(array: NDArray[Any]) -> bool:
    flags = array.flags
    return flags.c_contiguous and flags.writeable
