"""Reading tables in files as samples."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.files import Progress
from sparseallreduce.linear.data.parts import Source
from sparseallreduce.linear.data.reading import DEFAULT_BITS, Reading, naming_option
from sparseallreduce.linear.data.tables.arrow_files import (
    Outline,
    arrow_batches,
    arrow_outline,
    holds_lists,
    parquet_batches,
    parquet_outline,
)
from sparseallreduce.linear.data.tables.batches import Chosen, choose, listed
from sparseallreduce.linear.data.tables.csv_text import csv_batches, layouts_of
from sparseallreduce.linear.data.tables.extra import arrow_for
from sparseallreduce.linear.data.tables.learning import Learned, Reader, learn
from sparseallreduce.linear.encoding import Encoding
from sparseallreduce.runtime.objects import agreed

__all__ = ["is_table", "table"]

_DELIMITERS = {"csv": None, "tsv": "\t"}


class _Opened(NamedTuple):
    """A table whose columns have been chosen, and the function that reads its rows."""

    chosen: Chosen
    read: Reader


def is_table(source: Source, comm: Any, format: str, reading: Reading) -> bool:
    """Return True if files in a format hold a table. Collective over ``comm``."""
    if format != "parquet":
        return format in ("csv", "tsv", "arrow")
    if reading.table.names_columns:
        return True
    return not holds_lists(source.each(comm, parquet_outline))


def table(
    source: Source,
    comm: Any,
    format: str,
    reading: Reading,
    *,
    n_features: int | None = None,
    dtype: Any = np.float32,
    progress: Progress = None,
    keep: bool = True,
) -> Learned:
    """Read a table. Collective over ``comm``.

    Parameters
    ----------
    source, comm
        Files, and communicator of the ranks, which take about the same number of rows each.
    format : str
        One of :data:`~sparseallreduce.linear.data.reading.TABLES`.
    reading : Reading
    n_features : int, optional
        Expected number of features.
    dtype : dtype
        Data type of the values, float32 or float64.
    progress : callable, optional
        Function called with the number of bytes that this rank has read since the last call.
    keep : bool
        Whether to keep rows in memory until they are encoded; otherwise they are read twice.

    Raises
    ------
    DatasetError
        On every rank, with the file, the line or row, and the column of the fault.
    """
    agreed(comm, lambda: arrow_for(source))
    opener = _opened_text if format in _DELIMITERS else _opened_arrow
    opened = opener(source, comm, format, reading, progress)
    bits = reading.hash_bits or DEFAULT_BITS
    learned = learn(
        opened.read, opened.chosen, comm, reading.table, bits=bits, unlabelled=reading.unlabelled, dtype=np.dtype(dtype), keep=keep
    )
    if n_features is not None and learned.encoding.features != n_features:
        what = f"its columns become {learned.encoding.features} features, not {n_features}"
        raise naming_option(f"{source}: {what}: leave {{option}} out", "n_features", "--features")
    return learned


def _opened_text(source: Source, comm: Any, format: str, reading: Reading, progress: Progress) -> _Opened:
    layouts = layouts_of(source, comm, reading.table, _DELIMITERS[format])
    names, encoding = layouts[0].names, reading.table.encoding
    if not layouts[0].header and encoding is not None and encoding.target is not None and encoding.target not in (names[-1:] or ("",)):
        layouts = [layout._replace(names=_around(layout.names, encoding)) for layout in layouts]
        names = layouts[0].names
    chosen = agreed(comm, lambda: choose(names, reading.table, source, reading.unlabelled))
    return _Opened(chosen, lambda texts: csv_batches(source, comm, layouts, chosen, texts, progress))


def _around(names: tuple[str, ...], encoding: Encoding) -> tuple[str, ...]:
    """Return the numbers of columns without a header as in training, if the target has been left out."""
    known = [column.name for column in encoding.columns]
    if encoding.target in known or len(names) != len(known) or not all(name.isdigit() for name in (*known, encoding.target or "")):
        return names
    return tuple(known)


def _opened_arrow(source: Source, comm: Any, format: str, reading: Reading, progress: Progress) -> _Opened:
    outlines: list[Outline] = source.each(comm, parquet_outline if format == "parquet" else arrow_outline)
    for part, outline in zip(source.parts, outlines):
        if sorted(outline.names) != sorted(outlines[0].names):
            both = f"{listed(outlines[0].names)}, and {part} {listed(outline.names)}"
            raise DatasetError(f"{source.parts[0]} has the columns {both}: the files of a data set must have the same columns")
    chosen = agreed(comm, lambda: choose(outlines[0].names, reading.table, source, reading.unlabelled))
    batches = parquet_batches if format == "parquet" else arrow_batches
    return _Opened(chosen, lambda texts: batches(source, comm, outlines, chosen, progress))
