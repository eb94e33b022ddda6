"""The text of data files, plain or compressed, in blocks of whole lines for each rank.

Plain text is divided into byte ranges, one per rank, for any number of files. Compressed text can only be read from its start. If there are
enough compressed files to give each rank whole ones with about the same number of bytes, each rank reads its own. Otherwise rank 0
decompresses all of them, and sends the text on in blocks, first those for itself, then those for rank 1, and so on; while it decompresses a
block, another rank processes the previous one. A rank's share is then as large as its part of the compressed files, or of the text if that
is short.

A UTF-8 byte-order mark at the start of a file is skipped.

For CSV the blocks consist of whole records, whose quoted fields may contain newlines. To find out whether the first line of a rank's range
is inside quotes, each rank scans its own range for both cases, unless it contains no quotes, and the ranks combine the results.
"""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import os
import pickle
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from io import BufferedReader
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.files import PathLike, Progress, first_bytes, open_input, readable
from sparseallreduce.linear.data.parts import Source, sharing
from sparseallreduce.linear.data.quoting import IN_QUOTES, NOT_QUOTED, characters, end_of_quotes, record_start
from sparseallreduce.linear.data.zstd import ZSTD_MAGIC, ZstdFile
from sparseallreduce.runtime.objects import agreed, exchange, gather, mark_known, portable

__all__ = [
    "BYTE_ORDER_MARK",
    "NUMBER",
    "LineBlock",
    "LineFault",
    "excerpt",
    "first_lines",
    "line_at",
    "line_number",
    "opened_text",
    "quoted",
    "shared_line_blocks",
]


_BLOCK = 1 << 20  # bytes of text per block, except for longer lines
_RECORDS = 1 << 22  # bytes per block of CSV
_LONGEST_LINE = 1 << 28  # bytes; a file with a longer line is not text
_SHORT = 32  # a text of fewer blocks is read completely before it is shared
_EXCERPT = 60  # characters of an invalid line that an error shows
_UNEVEN = 1.25  # largest share of whole files that a rank takes, relative to the mean

# First bytes of compressed files, and functions that open them. No line of svmlight text starts with these.
_COMPRESSIONS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
    ZSTD_MAGIC: lambda file: BufferedReader(ZstdFile(file)),
}
#: The mark that some editors write at the start of UTF-8 text.
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


#: Pattern of numbers in a text of samples, finite unless they overflow float64.
NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class LineFault(Exception):
    """Raised for a fault in a block of lines, with its position in the block."""

    reason: str
    place: int

    def __init__(self, reason: str, place: int) -> None:
        self.reason, self.place = reason, place


class LineBlock(NamedTuple):
    """Whole lines of a file, and the number of lines between a position in the file, the origin, and the first of them."""

    origin: int
    line: int
    text: bytes
    part: int = 0  # number of the file


def shared_line_blocks(source: Source, comm: Any, progress: Progress = None, delimiter: int = 0) -> Generator[LineBlock]:
    """Return this rank's blocks of a text. Collective over ``comm`` until it ends or is closed.

    Parameters
    ----------
    source : Source
        Files, decompressed if their first bytes are those of gzip, bzip2, xz or Zstandard. Rank 0 distributes the content of pipes, as it
        does compressed text.
    comm : communicator
    progress : callable, optional
        Function called with the number of bytes of the files that this rank has processed since the last call.
    delimiter : int
        The character between the fields of CSV; 0 for other text.

    Raises
    ------
    DatasetError
        If a file cannot be read; on every rank, if it cannot be opened.
    """
    outlines = source.each(comm, _outline)
    sizes = [size for size, _ in outlines]
    compressed = any(packed for _, packed in outlines)
    if comm.size > 1 and (compressed or source.piped):
        mine = None if source.piped else _whole_files(sizes, comm)
        return _distributed(source, sizes, comm, progress, delimiter) if mine is None else _several(source, mine, progress, delimiter)
    if compressed:
        return _several(source, [(part, 0, None) for part in range(len(sizes))], progress, delimiter)
    ranges: Any = sharing(sizes, comm)
    if delimiter and comm.size > 1:
        ranges = _from_records(source, ranges, comm, delimiter)
    return _several(source, ranges, progress, delimiter)


def _outline(path: PathLike) -> tuple[int, bool]:
    """Return the size of a file in bytes, and whether it is compressed."""
    with readable(path):
        return os.stat(path).st_size, _compression(path) is not None


def _whole_files(sizes: list[int], comm: Any) -> list[tuple[int, int, int | None]] | None:
    """Return the files that this rank reads if each is read by one rank; None if the ranks' shares would be too uneven."""
    total = sum(sizes)
    middles = [2 * end - size for size, end in zip(sizes, itertools.accumulate(sizes))]  # in half bytes
    readers = [min(middle * comm.size // max(2 * total, 1), comm.size - 1) for middle in middles]
    loads = [sum(size for size, reader in zip(sizes, readers) if reader == rank) for rank in range(comm.size)]
    if max(loads) > _UNEVEN * total / comm.size:
        return None
    return [(part, 0, None) for part, reader in enumerate(readers) if reader == comm.rank]


def first_lines(source: Source) -> Generator[LineBlock]:
    """Yield the blocks of all files in order from the first, for one rank to examine their start."""
    for part, path in enumerate(source.parts):
        with _opened(path) as (file, text):
            for _, lines in _positioned(path, file, text, None):
                yield LineBlock(0, 0, lines, part)


@contextmanager
def opened_text(path: PathLike) -> Iterator[BinaryIO]:
    """Open the decompressed text of a file."""
    with _opened(path) as (_, text):
        yield text


def _compression(path: PathLike) -> Callable[[BinaryIO], Any] | None:
    """Return the function that decompresses a file, or None if it is plain.

    Raises
    ------
    DatasetError
        If the file cannot be read.
    """
    head = first_bytes(path, 6)
    return next((opener for magic, opener in _COMPRESSIONS.items() if head.startswith(magic)), None)


def line_number(source: Source, block: LineBlock, place: int) -> int:
    """Return the number, from 1, of the line that contains a position of the block."""
    path, count = source.parts[block.part], 0
    if block.origin == 0:
        return block.line + block.text.count(b"\n", 0, place) + 1
    with readable(path), open_input(path) as text:
        left = block.origin
        while left > 0 and (before := text.read(min(left, _BLOCK))):
            count += before.count(b"\n")
            left -= len(before)
    return count + block.line + block.text.count(b"\n", 0, place) + 1


@contextmanager
def _opened(path: PathLike) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file, and the text in it."""
    opener = _compression(path)
    with readable(path), open_input(path) as file:
        if opener is None:
            yield file, file
        else:
            with opener(file) as text:
                yield file, text


def _whole_lines(path: PathLike, text: BinaryIO, most: int, delimiter: int = 0) -> bytes:
    """Return the next ``most`` bytes of text, or fewer at its end, completed to the end of the line or, for CSV, of the record."""
    lines = text.read(most)
    if len(lines) == most and not lines.endswith(b"\n"):
        lines += _rest_of_line(path, text, lines)
    if delimiter and b'"' in lines:
        state, _, opened = _quotes(lines, delimiter, NOT_QUOTED)
        if state == IN_QUOTES:
            return _whole_record(path, text, lines, delimiter, opened)
    return lines


def _rest_of_line(path: PathLike, text: BinaryIO, before: bytes) -> bytes:
    rest = text.readline(_LONGEST_LINE)
    if len(rest) == _LONGEST_LINE and not rest.endswith(b"\n"):
        shown = excerpt(before + rest, len(before + rest) - 1)
        raise DatasetError(f"{path}: a line of more than {_LONGEST_LINE} bytes: {shown}; this is not a text of samples")
    return rest


def _whole_record(path: PathLike, text: BinaryIO, lines: bytes, delimiter: int, opened: int) -> bytes:
    """Return lines that end inside a quoted field, completed to the end of the record.

    Raises
    ------
    DatasetError
        If the quotes are not closed.
    """
    pieces, state, length = [lines], IN_QUOTES, len(lines) - opened
    while state == IN_QUOTES:
        piece = _rest_of_line(path, text, b"")
        length += len(piece)
        if not piece or length > _LONGEST_LINE:
            shown = quoted(lines[opened : opened + _EXCERPT + 1])
            raise DatasetError(f"{path}: a quote that opens a field is not closed within {length} bytes: {shown}")
        state, _, _ = _quotes(piece, delimiter, state)
        pieces.append(piece)
    return b"".join(pieces)


def _quotes(lines: bytes, delimiter: int, state: int) -> tuple[int, int, int]:
    """Return the result of :func:`end_of_quotes` for lines that may start with a byte-order mark."""
    found: tuple[int, int, int] = end_of_quotes(characters(lines.removeprefix(BYTE_ORDER_MARK)), delimiter, state)
    return found


class _Range(NamedTuple):
    """A byte range of a file; the lines, or records, that start in it belong to a rank."""

    part: int
    start: int
    end: int | None
    begin: int | None = None  # position of the first of them, if known


def _from_records(source: Source, ranges: list[tuple[int, int, int]], comm: Any, delimiter: int) -> list[_Range]:
    """Return byte ranges of files with the positions of their first records. Collective."""
    found = agreed(comm, lambda: [_line_states(source.parts[part], part, start, end, delimiter) for part, start, end in ranges])
    known, states = [], dict.fromkeys(range(len(source.parts)), NOT_QUOTED)
    for rank, each in enumerate(gather(comm, found)):
        for part, start, end, lines in each:
            begin, after = lines[states[part]]
            states[part] = after
            if rank == comm.rank:
                known.append(_Range(part, start, end, begin))
    return known


def _line_states(path: PathLike, part: int, start: int, end: int, delimiter: int) -> tuple[int, int, int, dict[int, tuple[int, int]]]:
    """Return a range and, for each state of its first line, the position of its first record and the state after its last line."""
    with _opened(path) as (_, text):
        at = start
        if start > 0:
            text.seek(start - 1)
            at = start + len(_whole_lines(path, text, 1)) - 1
        states = {NOT_QUOTED: NOT_QUOTED, IN_QUOTES: IN_QUOTES}
        begins = {NOT_QUOTED: at, IN_QUOTES: -1}
        while at < end and (lines := _whole_lines(path, text, min(_BLOCK, end - at))):
            if b'"' in lines:
                for entry, state in states.items():
                    states[entry], first, _ = _quotes(lines, delimiter, state)
                    if begins[entry] < 0 and first >= 0:
                        begins[entry] = at + first
            at += len(lines)
    afters = [IN_QUOTES if state == IN_QUOTES else NOT_QUOTED for state in states.values()]  # the last line may lack a newline
    behind = {entry: (begin if begin >= 0 else end, after) for (entry, begin), after in zip(begins.items(), afters)}
    return part, start, end, behind


def _several(source: Source, ranges: list[Any], progress: Progress, delimiter: int = 0) -> Generator[LineBlock]:
    """Yield the lines that start in these byte ranges of files."""
    for each in ranges:
        yield from _own(source.parts[each[0]], _Range(*each), progress, delimiter)


def _own(path: PathLike, range_: _Range, progress: Progress, delimiter: int) -> Generator[LineBlock]:
    """Yield the lines that start in a byte range of the text."""
    part, start, end, begin = range_
    block = _RECORDS if delimiter else _BLOCK
    with _opened(path) as (file, text):
        origin, line = start, 0
        if start > 0 and begin is None:
            text.seek(start - 1)  # a line that starts exactly at `start` belongs to this range
            before = len(_whole_lines(path, text, 1)) - 1
            line, start = int(before > 0), start + before
        elif start > 0:
            assert begin is not None
            text.seek(start)
            line, start = _newlines(text, begin - start), begin
        done = start
        while (end is None or start < end) and (lines := _whole_lines(path, text, min(block, (end or start + block) - start), delimiter)):
            yield LineBlock(origin, line, lines.removeprefix(BYTE_ORDER_MARK) if start == 0 else lines, part)
            line += lines.count(b"\n")
            start += len(lines)
            done = _report(progress, done, file.tell())


def _newlines(text: BinaryIO, count: int) -> int:
    """Return the number of newlines in the next ``count`` bytes of text."""
    found = 0
    while count > 0 and (piece := text.read(min(count, _BLOCK))):
        found += piece.count(b"\n")
        count -= len(piece)
    return found


def _report(progress: Progress, before: int, now: int) -> int:
    if progress is not None:
        progress(now - before)
    return now


def _distributed(source: Source, sizes: list[int], comm: Any, progress: Progress, delimiter: int) -> Generator[LineBlock]:
    """Yield this rank's blocks of a text that rank 0 reads for all, one after the other. A rank that takes no more ends it for all.

    Rank 0 reads the next block while another rank processes the one before.
    """
    shares = _shares(source, sizes, comm.size, progress, delimiter)  # of which the other ranks take none
    with closing(shares):
        while (yield from _next_block(shares, comm)):
            pass


def _next_block(shares: Iterator[tuple[int, LineBlock]], comm: Any) -> Generator[LineBlock, None, bool]:
    """Take part in the distribution of one block, and yield it on the rank that it is for. Return False after the last one."""
    dest, block, failure = None, None, None
    if comm.rank == 0:
        try:
            dest, block = next(shares, (None, None))
        except Exception as error:
            failure = error
    found = gather(comm, (True, dest, portable(failure)), long_wait=True)  # the reading of a pipe may take any time
    _, dest, raised = found[0]
    if raised is not None:
        raised = failure or raised
        mark_known(comm, raised)
        raise raised
    if dest is None or not all(takes_more for takes_more, _, _ in found):
        return False
    if dest > 0:
        content = np.frombuffer(pickle.dumps(block), np.uint8)
        received = exchange(comm, [content if rank == dest and comm.rank == 0 else content[:0] for rank in range(comm.size)])
        block = pickle.loads(received[0].data) if comm.rank == dest else None
    if block is not None:
        takes_more = False
        try:
            yield block
            takes_more = True
        finally:
            if not takes_more:
                gather(comm, (False, None, None))
    return True


def _shares(source: Source, sizes: list[int], ranks: int, progress: Progress, delimiter: int) -> Generator[tuple[int, LineBlock]]:
    """Yield the blocks of a text in order, each with its destination rank."""
    size = sum(sizes)
    with closing(_all_blocks(source, sizes, progress, delimiter)) as blocks:
        head = list(itertools.islice(blocks, _SHORT))
        if len(head) < _SHORT:
            yield from _cut([block for _, block in head], ranks, delimiter)
            return
        for position, block in itertools.chain(head, blocks):
            yield min(position * ranks // size, ranks - 1), block


def _all_blocks(source: Source, sizes: list[int], progress: Progress, delimiter: int) -> Generator[tuple[int, LineBlock]]:
    """Yield the blocks of all files, and the number of bytes of these that were read before each."""
    begin = 0
    for part, path in enumerate(source.parts):
        with _opened(path) as (file, text):
            line = 0
            for position, lines in _positioned(path, file, text, progress, delimiter):
                yield begin + position, LineBlock(0, line, lines, part)
                line += lines.count(b"\n")
        begin += sizes[part]


def _positioned(path: PathLike, file: BinaryIO, text: BinaryIO, progress: Progress, delimiter: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the blocks of a text, and the position in the file before each."""
    position, first = 0, True
    while lines := _whole_lines(path, text, _BLOCK, delimiter):
        yield position, lines.removeprefix(BYTE_ORDER_MARK) if first else lines
        position, first = _report(progress, position, file.tell()), False


def _cut(blocks: list[LineBlock], ranks: int, delimiter: int) -> Iterator[tuple[int, LineBlock]]:
    """Yield blocks divided at ends of lines into one share of about the same length per rank."""
    total, begin = sum(len(block.text) for block in blocks), 0
    pieces: list[list[LineBlock]] = [[] for _ in range(ranks)]
    for block in blocks:
        text = block.text
        cuts = [_line_start(text, min(max(total * rank // ranks - begin, 0), len(text)), delimiter) for rank in range(ranks + 1)]
        for rank, (start, end) in enumerate(itertools.pairwise(cuts)):
            if start < end:
                pieces[rank].append(block._replace(line=block.line + text.count(b"\n", 0, start), text=text[start:end]))
        begin += len(text)
    for rank, own in enumerate(pieces):
        yield from ((rank, piece) for piece in own)


def _line_start(text: bytes, place: int, delimiter: int) -> int:
    """Return the start of the first line, or record, that starts at this position or after it."""
    if place == 0:
        return 0
    if delimiter and b'"' in text:
        return int(record_start(characters(text), delimiter, 0, place))
    end = text.find(b"\n", place - 1)
    return len(text) if end < 0 else end + 1


def line_at(text: bytes, place: int) -> bytes:
    """Return the line that contains a position."""
    end = text.find(b"\n", place)
    return text[text.rfind(b"\n", 0, place) + 1 : end if end >= 0 else len(text)]


def excerpt(text: bytes, place: int) -> str:
    """Return an excerpt of the line that contains a position, for an error message."""
    return quoted(line_at(text, place))


def quoted(words: bytes) -> str:
    """Return words quoted and shortened for an error message."""
    return repr(words[:_EXCERPT])[1:] + ("..." if len(words) > _EXCERPT else "")
