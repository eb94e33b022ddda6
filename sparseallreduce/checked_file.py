"""Reading files that the library has written, and that may have become anything since: other bytes, a pipe, a link to a device.

A file is opened without waiting, and read only if it is a regular one. How long it may be is known before it is read, and JSON in it is
parsed only as deep as the library writes any. What is wrong is :class:`Damaged`, whose text goes behind the name of the file: callers
raise the error of their kind of file, or make the file anew.
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

_DEEPEST = 1000  # lists and dictionaries inside each other: Python itself writes no deeper ones, unless its recursion limit is raised
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
# Opening waits neither for the other end of a pipe nor for a device, and makes no terminal that of this process.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class Damaged(Exception):
    """What is wrong with the contents of a file, in words that follow its name."""


@contextmanager
def open_regular(path: PathLike) -> Iterator[BinaryIO]:
    """Open a regular file for reading.

    Raises
    ------
    OSError
        With the name of the file. Also if it is a folder, a pipe, a socket or a device, or a link to one.
    """
    if (kind := _refused(os.stat(path))) is not None:  # before it is opened: that alone rewinds a tape
        raise OSError(*kind, os.fspath(path))
    descriptor = os.open(path, _FLAGS)
    with open(descriptor, "rb") as file:
        if (kind := _refused(os.fstat(descriptor))) is not None:
            raise OSError(*kind, os.fspath(path))
        yield file


def _refused(status: os.stat_result) -> tuple[int, str] | None:
    """The error number and text for what is not a regular file, None for one that is."""
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
    """Return what the JSON in a regular file of at most ``most`` bytes stands for.

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
    """Return what JSON in UTF-8 stands for.

    Raises
    ------
    Damaged
        If it is no JSON, or nested more deeply than anything that the library writes: then Python's parser would run out of stack.
    """
    if _depth(content) > _DEEPEST:
        raise Damaged(f"it is nested more than {_DEEPEST} deep")
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise Damaged(f"it is not JSON: {' '.join(str(error).split())}") from None


def _depth(content: bytes) -> int:
    """Return an upper bound on how many lists and dictionaries of JSON are open at once."""
    if content.count(b"[") + content.count(b"{") <= _DEEPEST:
        return 0
    octets = np.frombuffer(_STRING.sub(b"", content), np.uint8)
    opening, closing = (np.isin(octets, np.frombuffer(each, np.uint8)) for each in (b"[{", b"]}"))
    return int(np.cumsum(opening.astype(np.int64) - closing).max(initial=0))
