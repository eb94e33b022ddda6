"""Files of samples: opening them, and errors that name them."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from sparseallreduce.errors import DatasetError

__all__ = ["PathLike", "Progress", "first_bytes", "open_text", "readable", "written"]

PathLike = str | os.PathLike[str]
Progress = Callable[[int], object] | None


def open_text(path: PathLike, mode: str = "rb") -> BinaryIO:
    """The bytes of a text file, compressed or decompressed as its suffix says: ``.gz``, ``.bz2``, ``.xz``, any other plain."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast(BinaryIO, openers.get(Path(path).suffix, open)(path, mode))


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


@contextmanager
def readable(path: PathLike) -> Iterator[None]:
    """Every failure to open, read or decompress a file is a DatasetError that names it."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise DatasetError(f"cannot read {path}: {reason}") from None


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Every failure to write a file is a DatasetError that names it."""
    try:
        yield
    except OSError as error:
        raise DatasetError(f"cannot write {path}: {error.strerror or error}") from None
