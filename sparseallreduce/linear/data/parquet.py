"""Parquet files with one row per sample: columns ``label``, ``indices`` and ``values``, the latter two lists of numbers of the same length.

Indices count from 0. Every rank reads its own contiguous rows, a batch at a time, from the row groups that contain them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.blocks import Block
from sparseallreduce.linear.data.compressed_rows import checked_block
from sparseallreduce.linear.data.files import CachedInput, PathLike, Progress, first_bytes, open_input
from sparseallreduce.linear.data.parts import Source, sharing

__all__ = ["parquet_blocks"]

Array = NDArray[Any]

_ROWS = 1 << 12  # rows read in one call
_HIGHEST = 2**32  # largest number of features, if it is not given


def parquet_blocks(
    source: Source,
    comm: Any,
    *,
    n_features: int | None = None,
    unlabelled: bool = False,
    dtype: DTypeLike = np.float32,
    progress: Progress = None,
) -> Generator[Block]:
    """Return this rank's samples of files, block by block. Collective over ``comm``.

    Parameters
    ----------
    source, comm
        Files, and communicator of the ranks, which take about the same number of samples each.
    n_features : int, optional
        Bound of the indices; 2**32 by default.
    unlabelled : bool
        Whether the column ``label`` may be missing or null; labels are then NaN.
    dtype : dtype
        Data type of the values, float32 or float64.
    progress : callable, optional
        Function called with the number of bytes that this rank has read since the last call.

    Raises
    ------
    DatasetError
        On every rank, if a file is not in this format, or pyarrow is missing. From the generator, with the file and the invalid sample.
    """
    outlines = source.each(comm, lambda part: _outline(part, unlabelled))
    shares = sharing([rows for rows, _ in outlines], comm)
    return _of_parts(source, shares, [columns for _, columns in outlines], n_features or _HIGHEST, unlabelled, np.dtype(dtype), progress)


def _of_parts(
    source: Source, shares: list[tuple[int, int, int]], columns: list[list[str]], features: int, unlabelled: bool, *how: Any
) -> Generator[Block]:
    """Yield samples of files, given their columns."""
    for part, first, last in shares:
        yield from _blocks(source.parts[part], first, last, columns[part], features, unlabelled, *how)


def _outline(path: PathLike, unlabelled: bool) -> tuple[int, list[str]]:
    """Return the number of samples, and the columns to read."""
    with _opened(path) as file:
        import pyarrow.types as kinds

        schema = file.schema_arrow
        columns = [name for name in ("label", "indices", "values") if name in schema.names or name != "label" or not unlabelled]
        for name in columns:
            if schema.names.count(name) != 1:
                found = ", ".join(schema.names[:5])
                raise DatasetError(f"{path}: there is no column {name!r} but {found}: samples are label, indices, values")
            kind = schema.field(name).type
            is_list = kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)
            item = kind.value_type if is_list else kind
            number = kinds.is_integer(item) or (name != "indices" and (kinds.is_floating(item) or kinds.is_boolean(item)))
            if is_list == (name == "label") or not number:
                expected = {"label": "a number", "indices": "a list of integers", "values": "a list of numbers"}[name]
                raise DatasetError(f"{path}: the column {name!r} is {kind}, not {expected} per sample")
        return file.metadata.num_rows, columns


def _blocks(
    path: PathLike, first: int, last: int, columns: list[str], features: int, unlabelled: bool, dtype: np.dtype[Any], progress: Progress
) -> Generator[Block]:
    """Yield the samples [first, last)."""
    if first == last:
        return
    with _opened(path) as file:
        groups = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        begins = [0, *itertools.accumulate(groups)]
        wanted = [number for number in range(len(groups)) if begins[number] < last and begins[number + 1] > first and groups[number]]
        at = begins[wanted[0]] if wanted else first
        for batch in file.iter_batches(_ROWS, row_groups=wanted, columns=columns, use_threads=False):
            low, high = max(first - at, 0), min(last - at, batch.num_rows)
            if low < high:
                yield _block(path, batch.slice(low, high - low), at + low, features, unlabelled, dtype)
                if progress is not None:
                    progress(batch.nbytes)
            at += batch.num_rows
        if at < last:
            raise DatasetError(f"{path}: only {at} of its samples can be read: the file is damaged")


def _block(path: PathLike, batch: Any, first: int, features: int, unlabelled: bool, dtype: np.dtype[Any]) -> Block:
    names = batch.schema.names
    labels = np.full(batch.num_rows, math.nan)
    if "label" in names:
        column = batch.column(names.index("label"))
        if column.null_count and not unlabelled:
            _refuse(path, first + _first_null(column), "there is no label")
        labels = np.asarray(column.to_numpy(zero_copy_only=False), np.float64)
        strange = ~np.isfinite(labels) & np.asarray(column.is_valid().to_numpy(zero_copy_only=False))
        if strange.any():
            _refuse(path, first + int(strange.argmax()), f"the label is {labels[strange.argmax()]}")
    items, lengths = [], []
    for name in ("indices", "values"):
        column = batch.column(names.index(name))
        if column.null_count:
            _refuse(path, first + _first_null(column), f"there are no {name}")
        flat = column.flatten()
        if flat.null_count:
            _refuse(path, first, f"some {name} of this sample or one of the {batch.num_rows - 1} after it are null")
        items.append(flat.to_numpy(zero_copy_only=False))
        lengths.append(column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
    different = np.flatnonzero(lengths[0] != lengths[1])
    if len(different):
        pair = f"{lengths[0][different[0]]} indices and {lengths[1][different[0]]} values"
        _refuse(path, first + int(different[0]), f"there are {pair}")
    indptr = np.append(0, np.cumsum(lengths[0]))
    return checked_block(indptr, items[0], items[1], labels, features=features, first=first, source=path, dtype=dtype)


def _refuse(path: PathLike, sample: int, reason: str) -> None:
    raise DatasetError(f"{path}, sample {sample}: {reason}")


def _first_null(column: Any) -> int:
    return int(np.asarray(column.is_null().to_numpy(zero_copy_only=False)).argmax())


@contextmanager
def _opened(path: PathLike) -> Iterator[Any]:
    """Open a file with pyarrow; turn every fault into a DatasetError."""
    first_bytes(path, 1)
    try:
        # An optional dependency.
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DatasetError(f"cannot read {path}: Parquet needs pyarrow: install sparseallreduce[parquet]") from None
    try:
        with ExitStack() as stack:
            source = stack.enter_context(open_input(path)) if isinstance(path, CachedInput) else path
            yield stack.enter_context(pyarrow.parquet.ParquetFile(source, memory_map=True, page_checksum_verification=True))
    except DatasetError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError, EOFError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise DatasetError(f"cannot read {path}: {reason}") from None
