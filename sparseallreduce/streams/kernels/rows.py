"""Sums of streams that are stored one in a row of bytes: of whole streams or parts of them, and estimates of their size."""

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
    """Sum streams that are stored one in a row of bytes: values from byte ``start`` on, followed by the aligned indices.

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
        The sum is written to ``dense[lo:hi]``, added in the order of the rows; the rest is not modified.
    checked : bool
        True skips the checks of dtypes, dimensions and flags, for arrays that the caller has created itself.

    Raises
    ------
    StreamError
        If a row is too short for its entries, ``dense`` is too short or read-only, or dtypes or dimensions are wrong.
    """
    if not checked and not (_are_rows(rows, values, counts) and dense.ndim == 1 and dense.dtype == values.dtype and dense.flags.writeable):
        raise unlike("summed", rows=rows, values=values, counts=counts, dense=dense)
    key = ("rows.sum_rows", SUM.ufunc, rows.dtype, values.dtype, 1)
    entry = known(key) or find(*key)
    if (entry or reference.sum_rows)(rows, values, start, counts, lo, hi, np.empty(len(counts), np.uint64), dense) == MALFORMED:
        raise StreamError(f"rows of {values[:1].nbytes} bytes cannot hold {counts} entries, or a vector of {len(dense)} not the indices")


def cut_rows(rows: Indices, itemsize: int, counts: NDArray[np.int64], size: int, part: int, parts: int, bounds: Positions) -> int:
    """Find one of ``parts`` parts of the index space that have about the same number of entries of all streams together.

    Parameters
    ----------
    rows : ndarray, shape (ranks, bytes / index size)
        Streams stored one in a row of bytes: values, then the aligned indices.
    itemsize : int
        Size in bytes of a value, or of a row of values.
    counts : ndarray of int64, shape (ranks,)
        Entries of each row.
    size : int
        Size of the index space.
    part : int
        Number of the part, from 0.
    parts : int
    bounds : ndarray of uint64, shape (4, ranks + 1)
        Output. The first two rows hold the start and the end of the part in each row of entries, and in their last element its start and
        end in the index space. The last element of the third row holds the number of entries before the part.

    Returns
    -------
    int
        The number of entries in the part.

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
    """Estimate the number of different indices of streams stored one in a row of bytes, from a deterministic sample.

    Parameters
    ----------
    rows, start, counts
        As for :func:`sum_rows`, without dense vectors.
    itemsize : int
        Size in bytes of a value, or of a row of values.
    samples : int
        Number of entries that are searched for in all rows.

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
    """Sum a part, found by :func:`cut_rows`, of streams stored one in a row of bytes, as a balanced tree.

    Parameters
    ----------
    rows, values, start, counts
        As for :func:`sum_rows`, without dense vectors.
    bounds : ndarray of uint64, shape (4, ranks) or wider
        Start of the entries in each row and, in the second row, their end. Overwritten.
    inner : (indices, values)
        Work memory from :func:`inner_sums`.
    iout, vout : ndarray, shape (1, room)
        The outputs, with room for all entries of the part. Their content apart from the sum is undefined.
    whole : bool
        Sum all entries and ignore ``bounds``.
    at_end : bool
        Place the sum at the end of the outputs instead of their start.
    limit : int, optional
        The most entries that the sum may have.
    checked : bool
        As for :func:`sum_rows`.

    Returns
    -------
    int
        The number of entries of the sum, or ``ABSENT`` (-1) if it is above ``limit``.

    Raises
    ------
    StreamError
        If rows or outputs are too short, not contiguous or read-only, or dtypes or dimensions are wrong.
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
    """Return work memory for two levels of the tree of :func:`sum_cut_rows`, for at most ``total`` entries of ``ranks`` ranks."""
    shape = (2, min(total, PIECE) if ranks > 2 else 0)
    return memory.empty(shape, index_dtype), memory.empty(shape, value_dtype)


def write_past(target: NDArray[np.uint8], to: int, source: NDArray[np.uint8]) -> None:
    """Copy bytes past the caches, to memory that other processes read.

    Parameters
    ----------
    target, source : ndarray of uint8, shapes (m,) and (n,)
        Contiguous.
    to : int
        Offset of the copy in ``target``.

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
