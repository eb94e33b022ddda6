"""The text of a data file, plain or compressed, in pieces of whole lines for each rank.

Plain text is cut into byte ranges, one a rank. Compressed text cannot be entered in the middle: rank 0 alone decompresses it, and
hands it on in pieces, first those for itself, then those for rank 1, and so on; while it decompresses a piece, another rank works on
the one before. A rank's share is then as large as its part of the compressed file, or of the text if that is short.
"""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import os
import stat
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from sparseallreduce.errors import DatasetError
from sparseallreduce.runtime.objects import agreed, gather

__all__ = [
    "PathLike",
    "Piece",
    "Progress",
    "excerpt",
    "first_bytes",
    "line_at",
    "line_number",
    "open_text",
    "quoted",
    "readable",
    "shared_pieces",
]

PathLike = str | os.PathLike[str]
Progress = Callable[[int], object] | None

_PIECE = 1 << 20  # bytes of text that are worked on at once, but for longer lines
_LONGEST_LINE = 1 << 28  # bytes; who finds no end of a line until here reads something else than text
_SHORT = 32  # pieces: a text of fewer is read before it is shared
_EXCERPT = 60  # characters of a bad line that an error shows

# How compressed files begin, and what opens them. No line of svmlight text begins so.
_COMPRESSIONS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
}


class Piece(NamedTuple):
    """Whole lines of a text, and how many lines there are between the origin, a place in the file, and them."""

    origin: int
    line: int
    text: bytes


def open_text(path: PathLike, mode: str = "rb") -> BinaryIO:
    """The bytes of a text file, compressed or decompressed as its suffix says: ``.gz``, ``.bz2``, ``.xz``, any other plain."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast(BinaryIO, openers.get(Path(path).suffix, open)(path, mode))


def shared_pieces(path: PathLike, comm: Any, progress: Progress = None) -> Generator[Piece]:
    """This rank's pieces of a text; collective over ``comm`` until it ends or is closed.

    Parameters
    ----------
    path : path
        Compressed by gzip, bzip2 or xz if its first bytes say so.
    comm : communicator
    progress : callable, optional
        Called with the bytes of the file that this rank has worked off since the last call.

    Raises
    ------
    DatasetError
        If the file cannot be read; on every rank, if it cannot be opened.
    """
    compressed = agreed(comm, lambda: _compression(path) is not None)
    if compressed:
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


def first_bytes(path: PathLike, count: int) -> bytes:
    """So many bytes from the beginning of a file, or all if it has fewer.

    Raises
    ------
    DatasetError
        If it cannot be read, or is no regular file: a pipe may keep its reader waiting for ever, and cannot be read by several.
    """
    with readable(path):
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise OSError("not a regular file")
        with open(path, "rb") as file:
            return file.read(count)


def line_number(path: PathLike, piece: Piece, place: int) -> int:
    """The number, from 1, of the line in which a character of the piece stands."""
    with readable(path), open(path, "rb") as text:
        left, count = piece.origin, 0
        while left > 0 and (block := text.read(min(left, _PIECE))):
            count += block.count(b"\n")
            left -= len(block)
    return count + piece.line + piece.text.count(b"\n", 0, place) + 1


@contextmanager
def readable(path: PathLike) -> Iterator[None]:
    """Every failure to open, read or decompress a file is a DatasetError that names it."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise DatasetError(f"cannot read {path}: {reason}") from None


@contextmanager
def _opened(path: PathLike) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """A file, and the text in it."""
    opener = _compression(path)
    with readable(path), open(path, "rb") as file:
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
            raise DatasetError(f"{path}: a line of more than {_LONGEST_LINE} bytes: {shown}; this is no svmlight text")
    return lines


def _own(path: PathLike, start: int, end: int | None, progress: Progress) -> Generator[Piece]:
    """The lines that begin in bytes [start, end) of the text."""
    with _opened(path) as (file, text):
        origin, line = start, 0
        if start > 0:
            text.seek(start - 1)  # a line that begins exactly at start is ours
            before = len(_whole_lines(path, text, 1)) - 1
            line, start = int(before > 0), start + before
        done = start
        while (end is None or start < end) and (lines := _whole_lines(path, text, min(_PIECE, (end or start + _PIECE) - start))):
            yield Piece(origin, line, lines)
            line += lines.count(b"\n")
            start += len(lines)
            done = _report(progress, done, file.tell())


def _report(progress: Progress, before: int, now: int) -> int:
    if progress is not None:
        progress(now - before)
    return now


def _dealt(path: PathLike, comm: Any, progress: Progress) -> Generator[Piece]:
    """This rank's pieces of a text that rank 0 reads for all."""
    own = comm.Dup()  # no message of the user's must come between
    try:
        yield from _deal(path, own, progress) if comm.rank == 0 else _receive(own)
    finally:
        own.Free()


def _deal(path: PathLike, comm: Any, progress: Progress) -> Generator[Piece]:
    """Read, hand on what is another rank's, and yield what is rank 0's own; a rank that says no ends it all."""
    busy = 0  # the rank that has not yet said how it went
    try:
        with closing(_shares(path, comm.size, progress)) as shares:
            for rank, piece in shares:
                if busy and not comm.recv(source=busy):
                    busy = 0
                    return
                busy = rank
                if rank == 0:
                    yield piece
                else:
                    comm.send(piece, dest=rank)
    finally:
        if busy:
            comm.recv(source=busy)
        for rank in range(1, comm.size):
            comm.send(None, dest=rank)


def _receive(comm: Any) -> Generator[Piece]:
    """What rank 0 hands on, and an answer to each piece: whether this rank takes more."""
    while (piece := comm.recv(source=0)) is not None:
        takes_more = False
        try:
            yield piece
            takes_more = True
        finally:
            comm.send(takes_more, dest=0)
            if not takes_more:
                comm.recv(source=0)  # that there is no more


def _shares(path: PathLike, ranks: int, progress: Progress) -> Generator[tuple[int, Piece]]:
    """The pieces of a compressed text in their order, each with the rank that it is for."""
    with _opened(path) as (file, text):
        size = os.fstat(file.fileno()).st_size
        pieces = _positioned(path, file, text, progress)
        dealt: Iterator[tuple[int, bytes]]
        head = list(itertools.islice(pieces, _SHORT))
        if len(head) < _SHORT:
            dealt = enumerate(_cut(b"".join(lines for _, lines in head), ranks))
        else:
            dealt = ((min(position * ranks // size, ranks - 1), lines) for position, lines in itertools.chain(head, pieces))
        line = 0
        for rank, lines in dealt:
            yield rank, Piece(0, line, lines)
            line += lines.count(b"\n")


def _positioned(path: PathLike, file: BinaryIO, text: BinaryIO, progress: Progress) -> Iterator[tuple[int, bytes]]:
    """The pieces of a text, and how far the file was read before each."""
    position = 0
    while lines := _whole_lines(path, text, _PIECE):
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
