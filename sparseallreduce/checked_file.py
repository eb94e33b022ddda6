"""Read files that the library has written, and that may have been changed since to other bytes, a pipe, or a link to a device.

A file is opened without blocking, and read only if it is a regular file. Its size is checked before it is read, and JSON is parsed only as
deep as the library writes it. Invalid contents raise :class:`Damaged`, whose text is appended to the name of the file: callers raise the
error for their kind of file, or create the file again.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np

__all__ = ["Damaged", "open_regular", "parse_json", "read_bytes", "read_json"]

PathLike = str | os.PathLike[str]

_DEEPEST = 1000  # nesting depth; Python writes no deeper JSON, unless its recursion limit is raised
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
# Opening does not block on a pipe or a device, and does not acquire a controlling terminal.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class Damaged(Exception):
    """Raised for invalid contents of a file; the text follows the name of the file."""


@contextmanager
def open_regular(path: PathLike) -> Iterator[BinaryIO]:
    """Open a regular file for reading.

    Raises
    ------
    OSError
        It names the file. Also raised for a folder, a pipe, a socket or a device, or a link to one.
    """
    if (kind := _refused(os.stat(path))) is not None:  # before it is opened, since opening rewinds a tape
        raise OSError(*kind, os.fspath(path))
    descriptor = os.open(path, _FLAGS)
    with open(descriptor, "rb") as file:
        if (kind := _refused(os.fstat(descriptor))) is not None:
            raise OSError(*kind, os.fspath(path))
        yield file


def _refused(status: os.stat_result) -> tuple[int, str] | None:
    """Return an error number and text if this is not a regular file, otherwise None."""
    if stat.S_ISDIR(status.st_mode):
        return errno.EISDIR, os.strerror(errno.EISDIR)
    return None if stat.S_ISREG(status.st_mode) else (errno.EINVAL, "Not a regular file")


def read_bytes(path: PathLike, most: int) -> bytes:
    """Return the contents of a regular file of at most ``most`` bytes.

    Raises
    ------
    OSError
    Damaged
        If the file is longer.
    """
    with open_regular(path) as file:
        length = os.fstat(file.fileno()).st_size
        content = b"" if length > most else file.read(most + 1)  # it may have grown
    if max(length, len(content)) > most:
        raise Damaged(f"it has {max(length, len(content)):,} bytes, and no file of its kind has more than {most:,}")
    return content


def read_json(path: PathLike, most: int) -> Any:
    """Return the decoded JSON in a regular file of at most ``most`` bytes.

    Raises
    ------
    OSError
    Damaged

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "constants.json")
    ...     _ = path.write_text('{"alpha": [1, 2]}')
    ...     read_json(path, 100)
    {'alpha': [1, 2]}
    """
    return parse_json(read_bytes(path, most))


def parse_json(content: bytes) -> Any:
    """Return decoded JSON, given as UTF-8.

    Raises
    ------
    Damaged
        If it is not valid JSON, or nested more deeply than the library writes it, which would overflow the stack of Python's parser.
    """
    if _depth(content) > _DEEPEST:
        raise Damaged(f"it is nested more than {_DEEPEST} deep")
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise Damaged(f"it is not JSON: {' '.join(str(error).split())}") from None


def _depth(content: bytes) -> int:
    """Return an upper bound on the nesting depth of JSON."""
    if content.count(b"[") + content.count(b"{") <= _DEEPEST:
        return 0
    octets = np.frombuffer(_STRING.sub(b"", content), np.uint8)
    opening, closing = (np.isin(octets, np.frombuffer(each, np.uint8)) for each in (b"[{", b"]}"))
    return int(np.cumsum(opening.astype(np.int64) - closing).max(initial=0))
