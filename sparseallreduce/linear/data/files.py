"""Opening files of samples, possibly through a cache, with errors that name them."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from sparseallreduce.data_cache import CachedFile, DataCache, FileVersion
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.zstd import open_zstd

__all__ = [
    "CachedInput",
    "PathLike",
    "Piped",
    "Progress",
    "first_bytes",
    "open_input",
    "open_text",
    "readable",
    "written",
]

PathLike = str | os.PathLike[str]
Progress = Callable[[int], object] | None


def open_text(path: PathLike, mode: str = "rb") -> BinaryIO:
    """Open a text file, compressed if its suffix is ``.gz``, ``.bz2``, ``.xz`` or ``.zst``.

    Written files depend only on their content.
    """
    openers: dict[str, Callable[..., Any]] = {".gz": _open_gzip, ".bz2": bz2.open, ".xz": lzma.open, ".zst": open_zstd}
    return cast(BinaryIO, openers.get(Path(path).suffix, open)(path, mode))


def _open_gzip(path: PathLike, mode: str) -> gzip.GzipFile:
    """Open a gzip file, without writing the time and the name into its header."""
    raw = open(path, mode)  # noqa: SIM115 - closed with the other
    file = gzip.GzipFile("", mode, fileobj=raw, mtime=0)
    file.myfileobj = raw  # type: ignore[assignment]  # GzipFile closes it, whatever its type
    return file


def first_bytes(path: PathLike, count: int) -> bytes:
    """Return the first ``count`` bytes of a file, or all if it has fewer.

    Raises
    ------
    DatasetError
        If it cannot be read, or is not a regular file: a device may have no end.
    """
    with readable(path):
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise OSError("it is neither a file nor a pipe")
        with open_input(path) as file:
            return file.read(count)


def open_input(path: PathLike) -> BinaryIO:
    """Open a file of samples for reading.

    Raises
    ------
    OSError
    """
    return cast(BinaryIO, io.BufferedReader(path.opened())) if isinstance(path, CachedInput) else open(path, "rb")


class Piped:
    """The name of a file in which rank 0 has stored the content of a pipe. Errors show the name of the pipe."""

    def __init__(self, name: str, copy: str) -> None:
        self._name, self._copy = name, copy

    def __fspath__(self) -> str:
        return self._copy

    def __str__(self) -> str:
        return self._name


class CachedInput:
    """A file on a slow store, which ranks read through a cache of their host that keeps what has been read."""

    def __init__(self, path: PathLike, cache: DataCache, version: FileVersion) -> None:
        self._path, self._cache, self._version = os.fspath(path), cache, version

    def __fspath__(self) -> str:
        return self._path

    def __str__(self) -> str:
        return self._path

    def opened(self) -> CachedFile:
        """Open the file."""
        return CachedFile(self._path, self._cache, self._version)


@contextmanager
def readable(path: PathLike) -> Iterator[None]:
    """Turn every failure to open, read or decompress a file into a DatasetError that names it."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise DatasetError(f"cannot read {path}: {reason}") from None


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Turn every failure to write a file into a DatasetError that names it."""
    try:
        yield
    except OSError as error:
        raise DatasetError(f"cannot write {path}: {error.strerror or error}") from None
