"""The text of data files, plain or compressed, in blocks of whole lines for each rank.

Plain text is cut into byte ranges, one a rank, whatever the number of files. Compressed text cannot be entered in the middle. If there are
so many files that each rank can take whole ones, about as many bytes as the other ranks, it does. Otherwise rank 0 alone decompresses
them, and hands the text on in blocks, first those for itself, then those for rank 1, and so on; while it decompresses a block, another
rank works on the one before. A rank's share is then as large as its part of the compressed files, or of the text if that is short.

A UTF-8 byte-order mark at the beginning of a file is skipped.

Of CSV the blocks are of whole records, whose quoted fields may hold newlines. Whether the first line of a rank's range is in quotes, all
ranks find out together: each goes over its own range for both cases, unless there are no quotes in it.
"""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import os
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from io import BufferedReader
from typing import Any, BinaryIO, NamedTuple

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.files import PathLike, Progress, first_bytes, open_input, readable
from sparseallreduce.linear.data.parts import Source, sharing
from sparseallreduce.linear.data.quoting import IN_QUOTES, NOT_QUOTED, characters, end_of_quotes, record_start
from sparseallreduce.linear.data.zstd import ZSTD_MAGIC, ZstdFile
from sparseallreduce.runtime.objects import agreed, gather
from sparseallreduce.runtime.stalls import blocked

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


_BLOCK = 1 << 20  # bytes of text that are worked on at once, but for longer lines
_RECORDS = 1 << 22  # likewise, of CSV
_LONGEST_LINE = 1 << 28  # bytes; who finds no end of a line until here reads something else than text
_SHORT = 32  # blocks: a text of fewer is read before it is shared
_EXCERPT = 60  # characters of a bad line that an error shows
_UNEVEN = 1.25  # the largest share of whole files that a rank takes, in units of the mean one

# How compressed files begin, and what opens them. No line of svmlight text begins so.
_COMPRESSIONS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
    ZSTD_MAGIC: lambda file: BufferedReader(ZstdFile(file)),
}
#: How some editors begin text that is UTF-8.
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


#: What is a finite number in a text of samples, if float64 has room for it.
NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class LineFault(Exception):
    """What is wrong, and at which character of a block of lines."""

    def __init__(self, reason: str, place: int) -> None:
        self.reason, self.place = reason, place


class LineBlock(NamedTuple):
    """Hold whole lines of a file, and the number of lines between a place in the file, the origin, and the first of them."""

    origin: int
    line: int
    text: bytes
    part: int = 0  # number of the file


def shared_line_blocks(source: Source, comm: Any, progress: Progress = None, delimiter: int = 0) -> Generator[LineBlock]:
    """This rank's blocks of a text; collective over ``comm`` until it ends or is closed.

    Parameters
    ----------
    source : Source
        Compressed by gzip, bzip2, xz or Zstandard where the first bytes of a file say so. What has come by a pipe is dealt out by rank 0,
        as compressed text is.
    comm : communicator
    progress : callable, optional
        Called with the bytes of the files that this rank has worked off since the last call.
    delimiter : int
        The character between the fields of CSV; 0 if the text is none.

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
        return _dealt(source, sizes, comm, progress, delimiter) if mine is None else _several(source, mine, progress, delimiter)
    if compressed:
        return _several(source, [(part, 0, None) for part in range(len(sizes))], progress, delimiter)
    ranges: Any = sharing(sizes, comm)
    if delimiter and comm.size > 1:
        ranges = _from_records(source, ranges, comm, delimiter)
    return _several(source, ranges, progress, delimiter)


def _outline(path: PathLike) -> tuple[int, bool]:
    """The bytes of a file, and whether it is compressed."""
    with readable(path):
        return os.stat(path).st_size, _compression(path) is not None


def _whole_files(sizes: list[int], comm: Any) -> list[tuple[int, int, int | None]] | None:
    """The files that this rank takes if each is read by one; None if some ranks would have much more to read than others."""
    total = sum(sizes)
    middles = [2 * end - size for size, end in zip(sizes, itertools.accumulate(sizes))]  # in units of half a byte
    readers = [min(middle * comm.size // max(2 * total, 1), comm.size - 1) for middle in middles]
    loads = [sum(size for size, reader in zip(sizes, readers) if reader == rank) for rank in range(comm.size)]
    if max(loads) > _UNEVEN * total / comm.size:
        return None
    return [(part, 0, None) for part, reader in enumerate(readers) if reader == comm.rank]


def first_lines(source: Source) -> Generator[LineBlock]:
    """The blocks of all files in their order, from the first, for one rank to look at how they begin."""
    for part, path in enumerate(source.parts):
        with _opened(path) as (file, text):
            for _, lines in _positioned(path, file, text, None):
                yield LineBlock(0, 0, lines, part)


@contextmanager
def opened_text(path: PathLike) -> Iterator[BinaryIO]:
    """The text of a file, decompressed."""
    with _opened(path) as (_, text):
        yield text


def _compression(path: PathLike) -> Callable[[BinaryIO], Any] | None:
    """What decompresses a file, None if it is plain.

    Raises
    ------
    DatasetError
        If the file cannot be read.
    """
    head = first_bytes(path, 6)
    return next((opener for magic, opener in _COMPRESSIONS.items() if head.startswith(magic)), None)


def line_number(source: Source, block: LineBlock, place: int) -> int:
    """The number, from 1, of the line in which a character of the block stands."""
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
    """A file, and the text in it."""
    opener = _compression(path)
    with readable(path), open_input(path) as file:
        if opener is None:
            yield file, file
        else:
            with opener(file) as text:
                yield file, text


def _whole_lines(path: PathLike, text: BinaryIO, most: int, delimiter: int = 0) -> bytes:
    """The next so many bytes of text, or fewer at its end, up to the end of the line, or of the record of CSV, that they end in."""
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
        raise DatasetError(f"{path}: a line of more than {_LONGEST_LINE} bytes: {shown}; this is no text of samples")
    return rest


def _whole_record(path: PathLike, text: BinaryIO, lines: bytes, delimiter: int, opened: int) -> bytes:
    """Lines that end in a quoted field, and those up to the end of the record.

    Raises
    ------
    DatasetError
        If the quotes do not end.
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
    """What :func:`end_of_quotes` says of lines, of which the first may begin with a byte-order mark."""
    found: tuple[int, int, int] = end_of_quotes(characters(lines.removeprefix(BYTE_ORDER_MARK)), delimiter, state)
    return found


class _Range(NamedTuple):
    """Bytes of a file: the lines, or records, that begin in them are a rank's."""

    part: int
    start: int
    end: int | None
    begin: int | None = None  # where the first of them begins, if that is known


def _from_records(source: Source, ranges: list[tuple[int, int, int]], comm: Any, delimiter: int) -> list[_Range]:
    """Byte ranges of files with the places where their first records begin; collective."""
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
    """A range, and for each state that its first line may begin in: where its first record begins, and the state behind its last line."""
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
    afters = [IN_QUOTES if state == IN_QUOTES else NOT_QUOTED for state in states.values()]  # the last line may have no end
    behind = {entry: (begin if begin >= 0 else end, after) for (entry, begin), after in zip(begins.items(), afters)}
    return part, start, end, behind


def _several(source: Source, ranges: list[Any], progress: Progress, delimiter: int = 0) -> Generator[LineBlock]:
    """The lines that begin in these byte ranges of files, each given by the file's number."""
    for each in ranges:
        yield from _own(source.parts[each[0]], _Range(*each), progress, delimiter)


def _own(path: PathLike, range_: _Range, progress: Progress, delimiter: int) -> Generator[LineBlock]:
    """The lines that begin in a range of bytes of the text."""
    part, start, end, begin = range_
    block = _RECORDS if delimiter else _BLOCK
    with _opened(path) as (file, text):
        origin, line = start, 0
        if start > 0 and begin is None:
            text.seek(start - 1)  # a line that begins exactly at start is ours
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
    """How many lines end in the next so many bytes of text."""
    found = 0
    while count > 0 and (piece := text.read(min(count, _BLOCK))):
        found += piece.count(b"\n")
        count -= len(piece)
    return found


def _report(progress: Progress, before: int, now: int) -> int:
    if progress is not None:
        progress(now - before)
    return now


def _dealt(source: Source, sizes: list[int], comm: Any, progress: Progress, delimiter: int) -> Generator[LineBlock]:
    """This rank's blocks of a text that rank 0 reads for all."""
    with blocked(comm.rank, comm.size, "the reading of a text that rank 0 hands on: MPI does not tell which ranks have not come to it"):
        own = comm.Dup()  # no message of the user's must come between
    try:
        yield from _deal(source, sizes, own, progress, delimiter) if comm.rank == 0 else _receive(own)
    finally:
        own.Free()


def _deal(source: Source, sizes: list[int], comm: Any, progress: Progress, delimiter: int) -> Generator[LineBlock]:
    """Read, hand on what is another rank's, and yield what is rank 0's own; a rank that says no ends it all."""
    busy = 0  # the rank that has not yet said how it went
    try:
        with closing(_shares(source, sizes, comm.size, progress, delimiter)) as shares:
            for rank, block in shares:
                if busy and not _received(comm, busy):
                    busy = 0
                    return
                busy = rank
                if rank == 0:
                    yield block
                else:
                    _send(comm, block, rank)
    finally:
        if busy:
            _received(comm, busy)
        for rank in range(1, comm.size):
            _send(comm, None, rank)


def _receive(comm: Any) -> Generator[LineBlock]:
    """What rank 0 hands on, and an answer to each block: whether this rank takes more."""
    while (block := _received(comm, 0)) is not None:
        takes_more = False
        try:
            yield block
            takes_more = True
        finally:
            _send(comm, takes_more, 0)
            if not takes_more:
                _received(comm, 0)  # that there is no more


def _received(comm: Any, source: int) -> Any:
    with blocked(comm.rank, comm.size, f"the reading of a text that rank 0 hands on: rank {source} has not sent what is due"):
        return comm.recv(source=source)


def _send(comm: Any, message: Any, dest: int) -> None:
    with blocked(comm.rank, comm.size, f"the reading of a text that rank 0 hands on: rank {dest} has not received what was sent"):
        comm.send(message, dest=dest)


def _shares(source: Source, sizes: list[int], ranks: int, progress: Progress, delimiter: int) -> Generator[tuple[int, LineBlock]]:
    """The blocks of a text in their order, each with the rank that it is for."""
    size = sum(sizes)
    with closing(_all_blocks(source, sizes, progress, delimiter)) as blocks:
        head = list(itertools.islice(blocks, _SHORT))
        if len(head) < _SHORT:
            yield from _cut([block for _, block in head], ranks, delimiter)
            return
        for position, block in itertools.chain(head, blocks):
            yield min(position * ranks // size, ranks - 1), block


def _all_blocks(source: Source, sizes: list[int], progress: Progress, delimiter: int) -> Generator[tuple[int, LineBlock]]:
    """The blocks of all files, and how many bytes of these were read before each."""
    begin = 0
    for part, path in enumerate(source.parts):
        with _opened(path) as (file, text):
            line = 0
            for position, lines in _positioned(path, file, text, progress, delimiter):
                yield begin + position, LineBlock(0, line, lines, part)
                line += lines.count(b"\n")
        begin += sizes[part]


def _positioned(
    path: PathLike, file: BinaryIO, text: BinaryIO, progress: Progress, delimiter: int = 0
) -> Iterator[tuple[int, bytes]]:
    """The blocks of a text, and how far the file was read before each."""
    position, first = 0, True
    while lines := _whole_lines(path, text, _BLOCK, delimiter):
        yield position, lines.removeprefix(BYTE_ORDER_MARK) if first else lines
        position, first = _report(progress, position, file.tell()), False


def _cut(blocks: list[LineBlock], ranks: int, delimiter: int) -> Iterator[tuple[int, LineBlock]]:
    """Blocks cut at ends of lines into shares of about the same length, one a rank."""
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
    """Where the first line, or record, begins that begins at this place or behind it."""
    if place == 0:
        return 0
    if delimiter and b'"' in text:
        return int(record_start(characters(text), delimiter, 0, place))
    end = text.find(b"\n", place - 1)
    return len(text) if end < 0 else end + 1


def line_at(text: bytes, place: int) -> bytes:
    end = text.find(b"\n", place)
    return text[text.rfind(b"\n", 0, place) + 1 : end if end >= 0 else len(text)]


def excerpt(text: bytes, place: int) -> str:
    return quoted(line_at(text, place))


def quoted(words: bytes) -> str:
    return repr(words[:_EXCERPT])[1:] + ("..." if len(words) > _EXCERPT else "")
