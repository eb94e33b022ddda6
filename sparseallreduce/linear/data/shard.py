"""Distribution of rows that every rank has: each rank takes its own block."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.sparse import issparse

from sparseallreduce.errors import MismatchError
from sparseallreduce.linear.data.tables.frames import arrow_table, is_frame, values_of
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.objects import agreed, gather, together

__all__ = ["shard"]


def shard(X: Any, y: Any = None, comm: Any = None) -> Any:
    """Return this rank's block of rows that every rank has. Collective over ``comm``.

    Ranks get contiguous blocks of about the same number of rows, in rank order, of the same type as the arguments.

    Parameters
    ----------
    X : array-like, scipy.sparse matrix or array, or frame
        Rows, the same on every rank.
    y : array-like, optional
        One label per row.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.

    Returns
    -------
    X, y
        Only X, if there is no y.

    Raises
    ------
    MismatchError
        On all ranks, if ranks have different rows, or X and y do not have the same length.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> shard(np.arange(6).reshape(3, 2), [0, 1, 0], sar.SERIAL)
    (array([[0, 1],
           [2, 3],
           [4, 5]]), [0, 1, 0])
    """
    comm = resolve(comm)
    return together(comm, lambda: _distributed(X, y, comm))


def _distributed(X: Any, y: Any, comm: Any) -> Any:
    rows = agreed(comm, lambda: _rows(X))
    if y is not None and agreed(comm, lambda: _rows(y)) != rows:
        raise MismatchError(f"there are {rows} rows in X and {_rows(y)} labels in y")
    ranks = gather(comm, agreed(comm, lambda: _facts(X, y, comm)))
    different = next((rank for rank, facts in enumerate(ranks) if facts != ranks[0]), None)
    if different is not None:
        counts = [facts[0] for facts in (ranks[0], ranks[different])]
        what = f"other ones of {rows}" if counts[0] == counts[1] else f"{counts[0]} and {counts[1]}"
        reason = f"every rank must hold the same rows, but ranks 0 and {different} hold {what}"
        raise MismatchError(f"{reason}: do not call shard for rows that are distributed already")
    low, high = (rows * rank // comm.size for rank in (comm.rank, comm.rank + 1))
    own = _block(X, low, high)
    return own if y is None else (own, _block(y, low, high))


def _facts(X: Any, y: Any, comm: Any) -> tuple[int, int, int]:
    """Return the number of rows, and checksums of X and y."""
    return (_rows(X), _digest(X), 0 if y is None else _digest(y)) if comm.size > 1 else (_rows(X), 0, 0)


def _rows(given: Any) -> int:
    return int(given.shape[0]) if hasattr(given, "shape") else len(given)


def _block(given: Any, low: int, high: int) -> Any:
    if hasattr(given, "iloc"):
        return given.iloc[low:high]
    if hasattr(given, "with_format"):  # Hugging Face
        return given.select(range(low, high))
    if hasattr(given, "slice"):  # Arrow and polars
        return given.slice(low, high - low)
    return (given.tocsr() if issparse(given) else given)[low:high]  # type: ignore[attr-defined]


def _digest(given: Any) -> int:
    bits = 0
    for part in _arrays(given):
        array = part.astype(np.str_) if part.dtype.kind == "O" else part
        bits = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, bits)
    return bits


def _arrays(given: Any) -> Iterator[Any]:
    """Yield the data of rows as NumPy arrays."""
    if issparse(given):
        rows: Any = given.tocsr()  # type: ignore[attr-defined]
        yield from (rows.indptr, rows.indices, rows.data)
    elif is_frame(given):
        for column in arrow_table(given).columns:
            yield from values_of(column)
    else:
        yield np.asarray(given)
