"""The text of a data file, plain or compressed, in blocks of whole lines for each rank.

Plain text is cut into byte ranges, one a rank. Compressed text cannot be entered in the middle: rank 0 alone decompresses it, and
hands it on in blocks, first those for itself, then those for rank 1, and so on; while it decompresses a block, another rank works on
the one before. A rank's share is then as large as its part of the compressed file, or of the text if that is short.
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
from typing import Any, BinaryIO, NamedTuple

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.files import PathLike, Progress, StandardInput, first_bytes, open_input, readable
from sparseallreduce.runtime.objects import agreed, gather
from sparseallreduce.runtime.stalls import blocked

__all__ = [
    "NUMBER",
    "LineBlock",
    "LineFault",
    "excerpt",
    "line_at",
    "line_number",
    "quoted",
    "shared_line_blocks",
]


_BLOCK = 1 << 20  # bytes of text that are worked on at once, but for longer lines
_LONGEST_LINE = 1 << 28  # bytes; who finds no end of a line until here reads something else than text
_SHORT = 32  # blocks: a text of fewer is read before it is shared
_EXCERPT = 60  # characters of a bad line that an error shows

# How compressed files begin, and what opens them. No line of svmlight text begins so.
_COMPRESSIONS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
}


#: What is a finite number in a text of samples, if float64 has room for it.
NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class LineFault(Exception):
    """What is wrong, and at which character of a block of lines."""

    def __init__(self, reason: str, place: int) -> None:
        self.reason, self.place = reason, place


class LineBlock(NamedTuple):
    """Whole lines of a text, and how many lines there are between the origin, a place in the file, and them."""

    origin: int
    line: int
    text: bytes


def shared_line_blocks(path: PathLike, comm: Any, progress: Progress = None) -> Generator[LineBlock]:
    """This rank's blocks of a text; collective over ``comm`` until it ends or is closed.

    Parameters
    ----------
    path : path
        Compressed by gzip, bzip2 or xz if its first bytes say so. Standard input is dealt out by rank 0, as compressed text is.
    comm : communicator
    progress : callable, optional
        Called with the bytes of the file that this rank has worked off since the last call.

    Raises
    ------
    DatasetError
        If the file cannot be read; on every rank, if it cannot be opened.
    """
    if isinstance(path, StandardInput) and comm.size > 1:
        return _dealt(path, comm, progress)
    if agreed(comm, lambda: _compression(path) is not None):
        return _dealt(path, comm, progress) if comm.size > 1 else _own(path, 0, None, progress)
    size = gather(comm, os.stat(path).st_size)[0]
    return _own(path, size * comm.rank // comm.size, size * (comm.rank + 1) // comm.size, progress)


def _compression(path: PathLike) -> Callable[[BinaryIO], Any] | None:
    """What decompresses a file, None if it is plain.

    Raises
    ------
    DatasetError
        If the file cannot be read.
    """
    head = first_bytes(path, 6)
    return next((opener for magic, opener in _COMPRESSIONS.items() if head.startswith(magic)), None)


def line_number(path: PathLike, block: LineBlock, place: int) -> int:
    """The number, from 1, of the line in which a character of the block stands."""
    count = 0
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


def _whole_lines(path: PathLike, text: BinaryIO, most: int) -> bytes:
    """The next so many bytes of text, or fewer at its end, up to the end of the line that they end in."""
    lines = text.read(most)
    if len(lines) == most and not lines.endswith(b"\n"):
        rest = text.readline(_LONGEST_LINE)
        lines += rest
        if len(rest) == _LONGEST_LINE and not rest.endswith(b"\n"):
            shown = excerpt(lines, len(lines) - 1)
            raise DatasetError(f"{path}: a line of more than {_LONGEST_LINE} bytes: {shown}; this is no text of samples")
    return lines


def _own(path: PathLike, start: int, end: int | None, progress: Progress) -> Generator[LineBlock]:
    """The lines that begin in bytes [start, end) of the text."""
    with _opened(path) as (file, text):
        origin, line = start, 0
        if start > 0:
            text.seek(start - 1)  # a line that begins exactly at start is ours
            before = len(_whole_lines(path, text, 1)) - 1
            line, start = int(before > 0), start + before
        done = start
        while (end is None or start < end) and (lines := _whole_lines(path, text, min(_BLOCK, (end or start + _BLOCK) - start))):
            yield LineBlock(origin, line, lines)
            line += lines.count(b"\n")
            start += len(lines)
            done = _report(progress, done, file.tell())


def _report(progress: Progress, before: int, now: int) -> int:
    if progress is not None:
        progress(now - before)
    return now


def _dealt(path: PathLike, comm: Any, progress: Progress) -> Generator[LineBlock]:
    """This rank's blocks of a text that rank 0 reads for all."""
    with blocked(comm.rank, comm.size, "the reading of a text that rank 0 hands on: MPI does not tell which ranks have not come to it"):
        own = comm.Dup()  # no message of the user's must come between
    try:
        yield from _deal(path, own, progress) if comm.rank == 0 else _receive(own)
    finally:
        own.Free()


def _deal(path: PathLike, comm: Any, progress: Progress) -> Generator[LineBlock]:
    """Read, hand on what is another rank's, and yield what is rank 0's own; a rank that says no ends it all."""
    busy = 0  # the rank that has not yet said how it went
    try:
        with closing(_shares(path, comm.size, progress)) as shares:
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


def _shares(path: PathLike, ranks: int, progress: Progress) -> Generator[tuple[int, LineBlock]]:
    """The blocks of a compressed text in their order, each with the rank that it is for."""
    with _opened(path) as (file, text):
        size = os.stat(path).st_size
        blocks = _positioned(path, file, text, progress)
        dealt: Iterator[tuple[int, bytes]]
        head = list(itertools.islice(blocks, _SHORT))
        if len(head) < _SHORT:
            dealt = enumerate(_cut(b"".join(lines for _, lines in head), ranks))
        else:
            dealt = ((min(position * ranks // size, ranks - 1), lines) for position, lines in itertools.chain(head, blocks))
        line = 0
        for rank, lines in dealt:
            yield rank, LineBlock(0, line, lines)
            line += lines.count(b"\n")


def _positioned(path: PathLike, file: BinaryIO, text: BinaryIO, progress: Progress) -> Iterator[tuple[int, bytes]]:
    """The blocks of a text, and how far the file was read before each."""
    position = 0
    while lines := _whole_lines(path, text, _BLOCK):
        yield position, lines
        position = _report(progress, position, file.tell())


def _cut(text: bytes, parts: int) -> list[bytes]:
    """So many parts of about the same length, each of whole lines."""
    cuts = [_line_start(text, len(text) * part // parts) for part in range(parts + 1)]
    return [text[start:end] for start, end in itertools.pairwise(cuts)]


def _line_start(text: bytes, place: int) -> int:
    """Where the first line begins that begins at this place or behind it."""
    if place == 0:
        return 0
    end = text.find(b"\n", place - 1)
    return len(text) if end < 0 else end + 1


def line_at(text: bytes, place: int) -> bytes:
    end = text.find(b"\n", place)
    return text[text.rfind(b"\n", 0, place) + 1 : end if end >= 0 else len(text)]


def excerpt(text: bytes, place: int) -> str:
    return quoted(line_at(text, place))


def quoted(words: bytes) -> str:
    return repr(words[:_EXCERPT])[1:] + ("..." if len(words) > _EXCERPT else "")
