"""Tables in Parquet and Arrow files (Feather, IPC): every rank reads its own contiguous rows, a batch at a time."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.files import CachedInput, PathLike, Progress, first_bytes, open_input
from sparseallreduce.linear.data.parts import Source, sharing
from sparseallreduce.linear.data.tables.batches import Batch, Chosen
from sparseallreduce.linear.data.tables.extra import arrow_for

__all__ = ["Outline", "arrow_batches", "arrow_outline", "holds_lists", "parquet_batches", "parquet_outline"]

_ROWS = 1 << 16  # rows per batch
_FILE = b"ARROW1"
_OLD = b"FEA1"


class Outline(NamedTuple):
    """The number of rows and the columns of a Parquet or Arrow file."""

    rows: int
    names: tuple[str, ...]
    types: tuple[str, ...]


def holds_lists(outlines: list[Outline]) -> bool:
    """Return True if samples are lists of indices and values, not rows of a table."""
    return all({"indices", "values"} <= set(each.names) and any("list" in kind for kind in each.types) for each in outlines)


def parquet_outline(path: PathLike) -> Outline:
    """Return the metadata of a Parquet file. Raises DatasetError."""
    with _opened(path) as (pyarrow, given), _parquet(pyarrow, given) as file:
        schema = file.schema_arrow
        return Outline(file.metadata.num_rows, tuple(schema.names), tuple(map(str, schema.types)))


def _parquet(pyarrow: Any, given: Any) -> Any:
    return pyarrow.parquet.ParquetFile(given, memory_map=True, page_checksum_verification=True)


def arrow_outline(path: PathLike) -> Outline:
    """Return the metadata of an Arrow file. Raises DatasetError."""
    with _opened(path) as (pyarrow, given):
        rows, names, types = 0, tuple[str, ...](), tuple[str, ...]()
        for schema, batch in _record_batches(pyarrow, path, given, first_alone=True):
            names, types = tuple(schema.names), tuple(map(str, schema.types))
            rows += 0 if batch is None else batch.num_rows
        return Outline(rows, names, types)


def parquet_batches(source: Source, comm: Any, outlines: list[Outline], chosen: Chosen, progress: Progress) -> Generator[Batch]:
    """Yield this rank's rows of Parquet files."""
    for part, first, last in sharing([each.rows for each in outlines], comm):
        path = source.parts[part]
        with _opened(path) as (pyarrow, given), _parquet(pyarrow, given) as file:
            ends = [0, *itertools.accumulate(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))]
            wanted = [group for group in range(file.num_row_groups) if ends[group] < last and ends[group + 1] > max(first, ends[group])]
            at = ends[wanted[0]] if wanted else first
            _check_groups(path, file, wanted, chosen)
            batches = file.iter_batches(_ROWS, row_groups=wanted, columns=list(chosen.names), use_threads=False)
            yield from _within(path, batches, at, first, last, chosen, progress)


def _check_groups(path: PathLike, file: Any, groups: list[int], chosen: Chosen) -> None:
    """Read a row of each row group, so that pyarrow raises an error if a column is stored as another type than the schema's.

    It compares them only if it reads a single row group. Their metadata cannot be used instead: pyarrow 26 ends the process if the
    statistics in it are damaged.
    """
    for group in groups:
        try:
            next(file.iter_batches(1, row_groups=[group], columns=list(chosen.names), use_threads=False), None)
        except OSError as error:
            raise DatasetError(f"cannot read {path}: in row group {group}: {' '.join(str(error).split())}: the file is damaged") from None


def arrow_batches(source: Source, comm: Any, outlines: list[Outline], chosen: Chosen, progress: Progress) -> Generator[Batch]:
    """Yield this rank's rows of Arrow files."""
    for part, first, last in sharing([each.rows for each in outlines], comm):
        path = source.parts[part]
        with _opened(path) as (pyarrow, given):
            batches = (batch for _, batch in _record_batches(pyarrow, path, given) if batch is not None)
            yield from _within(path, batches, 0, first, last, chosen, progress)


def _within(path: PathLike, batches: Iterator[Any], at: int, first: int, last: int, chosen: Chosen, progress: Progress) -> Generator[Batch]:
    """Yield the rows [first, last) of record batches, the first of which starts at row ``at``."""
    for record_batch in batches:
        low, high = max(first - at, 0), min(last - at, record_batch.num_rows)
        for begin in range(low, high, _ROWS):
            batch = record_batch.slice(begin, min(_ROWS, high - begin))
            start = at + begin
            columns = [batch.column(batch.schema.get_field_index(name)) for name in chosen.names]
            yield Batch(columns, batch.num_rows, lambda row, start=start: f"{path}, row {start + row}")  # type: ignore[misc]
            if progress is not None:
                progress(batch.nbytes)
        at += record_batch.num_rows
        if at >= last:
            return
    raise DatasetError(f"{path}: only {at} of its rows can be read: the file is damaged")


def _record_batches(pyarrow: Any, path: PathLike, given: Any, first_alone: bool = False) -> Iterator[tuple[Any, Any]]:
    """Yield the schema with each batch of an Arrow file or stream, preceded by the schema alone.

    With ``first_alone`` the batches contain one column, which is enough to count rows.
    """
    head = first_bytes(path, len(_FILE))
    if head.startswith(_OLD):
        raise DatasetError(f"cannot read {path}: it is Feather of version 1: write it by pyarrow.feather.write_feather, in version 2")
    kind = pyarrow.ipc.open_file if head == _FILE else pyarrow.ipc.open_stream
    with pyarrow.memory_map(given) if isinstance(given, str) else pyarrow.PythonFile(given, mode="r") as content:
        schema = kind(content).schema
        yield schema, None
        content.seek(0)
        options = pyarrow.ipc.IpcReadOptions(included_fields=[0] if first_alone and len(schema) else None, use_threads=False)
        reader = kind(content, options=options)
        for batch in (reader.get_batch(number) for number in range(reader.num_record_batches)) if head == _FILE else reader:
            batch.validate(full=True)  # the format has no checksums
            yield schema, batch


@contextmanager
def _opened(path: PathLike) -> Iterator[tuple[Any, Any]]:
    """Provide pyarrow, and the argument with which it opens the file; turn every fault into a DatasetError."""
    first_bytes(path, 1)
    pyarrow = arrow_for(path)
    try:
        with ExitStack() as stack:
            yield pyarrow, stack.enter_context(open_input(path)) if isinstance(path, CachedInput) else str(path)
    except DatasetError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError, EOFError, MemoryError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise DatasetError(f"cannot read {path}: {reason or type(error).__name__}") from None
