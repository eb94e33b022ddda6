"""CSV and TSV, parsed by pyarrow block by block: every rank reads its own contiguous records in bounded memory.

pyarrow determines the types of columns in each block. Differences between blocks and ranks are resolved when the columns become features.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.files import PathLike, Progress
from sparseallreduce.linear.data.line_blocks import (
    BYTE_ORDER_MARK,
    NUMBER,
    LineBlock,
    excerpt,
    first_lines,
    line_number,
    quoted,
    shared_line_blocks,
)
from sparseallreduce.linear.data.parts import Source
from sparseallreduce.linear.data.quoting import characters, record_start
from sparseallreduce.linear.data.reading import TableReading
from sparseallreduce.linear.data.tables.batches import Batch, Chosen
from sparseallreduce.linear.data.tables.extra import arrow

__all__ = ["Layout", "csv_batches", "layouts_of"]

_DELIMITERS = (",", ";", "\t", "|")  # tried in this order
_PLACE = re.compile(r"[1-9][0-9]*")
_RAGGED = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")
_QUOTED = re.compile(rb'"[^"]*("|$)')


class Layout(NamedTuple):
    """The content of the first record of a file."""

    delimiter: str
    names: tuple[str, ...]  # names of all columns
    header: bool  # whether the first record has the names


def layouts_of(source: Source, comm: Any, reading: TableReading, delimiter: str | None) -> list[Layout]:
    """Return the columns of every file. Collective over ``comm``.

    Parameters
    ----------
    delimiter : str, optional
        Delimiter; by default the first of comma, semicolon, tab and bar that occurs in the first line.

    Raises
    ------
    DatasetError
        On every rank, if a file cannot be read, or files do not have the same columns.
    """
    found = source.each(comm, lambda part: _first_record(part, delimiter))
    known = next((each for each in found if each is not None), None)
    if known is None:
        raise DatasetError(f"{source}: it has neither samples nor names of columns")
    header = _has_header(known[1], reading)
    layouts = [_layout(each or known, header, each is not None) for each in found]
    for part, layout in zip(source.parts, layouts):
        if sorted(layout.names) != sorted(layouts[0].names):
            numbers = f"{len(layouts[0].names)} and {len(layout.names)}"
            which = f"{numbers} columns" if len(layout.names) != len(layouts[0].names) else "columns of other names"
            raise DatasetError(f"{source.parts[0]} and {part} have {which}: the files of a data set must have the same columns")
    return layouts


def _layout(found: tuple[str, list[str]], header: bool, is_there: bool) -> Layout:
    mark, fields = found
    return Layout(mark, tuple(fields) if header else tuple(map(str, range(1, len(fields) + 1))), header and is_there)


def _first_record(path: PathLike, delimiter: str | None) -> tuple[str, list[str]] | None:
    """Return the delimiter and the fields of the first record, or None if there is none."""
    with closing(first_lines(Source(str(path), (path,)))) as blocks:
        for block in blocks:
            text = block.text.removeprefix(BYTE_ORDER_MARK)
            begin = int(record_start(characters(text), 0, 0, -1))
            if begin == len(text):
                continue
            bare = _QUOTED.sub(b"", re.split(rb"[\r\n]", text[begin:], maxsplit=1)[0])
            mark = delimiter or next((each for each in _DELIMITERS if each.encode() in bare), ",")
            record = text[begin : int(record_start(characters(text), ord(mark), 1, -1))]
            try:
                return mark, next(csv.reader(io.StringIO(record.decode(), newline=""), delimiter=mark))
            except UnicodeDecodeError as error:
                raise DatasetError(f"{path}, line 1: {error.reason} of UTF-8 in {quoted(record)}") from None
            except (csv.Error, StopIteration) as error:
                raise DatasetError(f"{path}, line 1: {error}: {quoted(record)}") from None
    return None


def _has_header(fields: Sequence[str], reading: TableReading) -> bool:
    """Return True if the first record has column names: if the option says so, it has a given name, or neither numbers nor empty fields."""
    if reading.header != "auto":
        return reading.header == "yes"
    encoded = [column.name for column in reading.encoding.columns] if reading.encoding is not None else []
    given = (reading.target, *(reading.features or ()), *reading.drop, *reading.categorical, *encoded)
    if any(name in fields for name in given if name is not None and not _PLACE.fullmatch(name)):
        return True
    if encoded and all(map(_PLACE.fullmatch, encoded)):
        return False
    return not any(not field or NUMBER.fullmatch(field.strip().encode()) for field in fields)


def csv_batches(
    source: Source, comm: Any, layouts: list[Layout], chosen: Chosen, texts: frozenset[str], progress: Progress
) -> Generator[Batch]:
    """Return this rank's records, block by block. Collective over ``comm`` until it ends or is closed.

    Parameters
    ----------
    texts : set of str
        Columns to read as strings, whatever they look like.

    Raises
    ------
    DatasetError
        With the file, the line and the fault.
    """
    blocks = shared_line_blocks(source, comm, progress, ord(layouts[0].delimiter))
    return _batches(source, blocks, layouts, chosen, texts)


def _batches(
    source: Source, blocks: Generator[LineBlock], layouts: list[Layout], chosen: Chosen, texts: frozenset[str]
) -> Generator[Batch]:
    with closing(blocks):
        for lines in blocks:
            block = _Block(source, lines, layouts[lines.part])
            if not block.is_empty:
                columns = block.columns(chosen.names, texts)
                if len(columns[0]):
                    yield Batch(columns, len(columns[0]), block.where)


class _Block:
    """A block of lines of CSV."""

    def __init__(self, source: Source, lines: LineBlock, layout: Layout) -> None:
        self._source, self._lines, self._layout = source, lines, layout
        self._mark = ord(layout.delimiter)
        self._text, self._skipped = lines.text, 0
        if lines.origin == 0 and lines.line == 0:
            self._skip(len(BYTE_ORDER_MARK) if lines.text.startswith(BYTE_ORDER_MARK) else 0)
            if layout.header:
                self._skip(self._record(1))

    @property
    def is_empty(self) -> bool:
        """True if there are no records."""
        return self._record(0) == len(self._text)

    def columns(self, names: Sequence[str], texts: frozenset[str]) -> list[Any]:
        """Return the named columns as Arrow arrays, those in ``texts`` as strings."""
        places = {name: self._layout.names.index(name) for name in names}
        strings = {place for name, place in places.items() if name in texts}
        table = self._table(list(places.values()), strings)
        integers = [place for place in places.values() if arrow().types.is_integer(table.column(f"f{place}").type)]
        if integers and (b"0x" in self._text or b"0X" in self._text):  # pyarrow reads 0x1F as a number among integers
            strings |= {place for place in integers if self._has_hexadecimal(place)}
            table = self._table(list(places.values()), strings)
        if any(arrow().types.is_binary(kind) for kind in table.schema.types):  # the type that pyarrow uses for strings that are not UTF-8
            self._check_characters()
        return [_whole(table.column(f"f{place}")) for place in places.values()]

    def where(self, row: int) -> str:
        """Return the location of a row, for errors."""
        return self._at(self._record(row))

    def _skip(self, count: int) -> None:
        self._text, self._skipped = self._text[count:], self._skipped + count

    def _record(self, number: int) -> int:
        return int(record_start(characters(self._text), self._mark, number, -1))

    def _at(self, place: int) -> str:
        number = line_number(self._source, self._lines, self._skipped + min(place, max(len(self._text) - 1, 0)))
        return f"{self._source.parts[self._lines.part]}, line {number}"

    def _has_hexadecimal(self, place: int) -> bool:
        words = self._table([place], {place}).column(0)
        return bool(arrow().compute.any(arrow().compute.match_substring(words, "0x", ignore_case=True)).as_py())

    def _table(self, places: list[int], strings: set[int]) -> Any:
        pyarrow, from_csv = arrow(), arrow().csv
        names = [f"f{place}" for place in range(len(self._layout.names))]
        # pyarrow removes a byte order mark from the start of any buffer; inside a file it is part of a field.
        text = BYTE_ORDER_MARK + self._text if self._text.startswith(BYTE_ORDER_MARK) else self._text
        try:
            return from_csv.read_csv(
                pyarrow.BufferReader(text),
                from_csv.ReadOptions(use_threads=False, column_names=names, block_size=len(text) + 1),
                from_csv.ParseOptions(delimiter=self._layout.delimiter, newlines_in_values=True),
                from_csv.ConvertOptions(
                    column_types={f"f{place}": pyarrow.string() for place in strings},
                    strings_can_be_null=True,
                    true_values=["true", "True", "TRUE"],
                    false_values=["false", "False", "FALSE"],
                    include_columns=[f"f{place}" for place in dict.fromkeys(places)],
                ),
            )
        except (pyarrow.ArrowException, ValueError, OSError) as error:
            row = _RAGGED.search(str(error))
            if row is not None:
                number, columns, fields = map(int, row.groups())
                place = self._record(number - 1)
                found = f"{fields} field{'s' * (fields != 1)}, but {columns} columns"
                raise DatasetError(f"{self._at(place)}: {found}: {excerpt(self._text, place)}") from None
            self._check_characters()
            raise DatasetError(f"{self._at(0)} and those after it: {' '.join(str(error).split()).rstrip('.')}") from None

    def _check_characters(self) -> None:
        """Raise an error if the text is not UTF-8."""
        try:
            self._text.decode()
        except UnicodeDecodeError as error:
            raise DatasetError(f"{self._at(error.start)}: {error.reason} of UTF-8 in {quoted(error.object[error.start :])}") from None


def _whole(column: Any) -> Any:
    """Return a column of a table as one array."""
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
