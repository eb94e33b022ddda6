"""Files of samples: opening them, by way of a cache or not, and errors that name them."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, cast

from sparseallreduce.data_cache import CachedFile, DataCache, FileVersion
from sparseallreduce.errors import DatasetError
from sparseallreduce.runtime.objects import agreed, gather

__all__ = [
    "STANDARD_INPUT",
    "CachedInput",
    "PathLike",
    "Progress",
    "StandardInput",
    "first_bytes",
    "input_file",
    "open_input",
    "open_text",
    "readable",
    "written",
]

PathLike = str | os.PathLike[str]
#: What stands for the standard input in the place of a file's name.
STANDARD_INPUT = "-"
Progress = Callable[[int], object] | None


def open_text(path: PathLike, mode: str = "rb") -> BinaryIO:
    """The bytes of a text file, compressed or decompressed as its suffix says: ``.gz``, ``.bz2``, ``.xz``, any other plain.

    What is written depends on nothing but the bytes.
    """
    openers: dict[str, Callable[..., Any]] = {".gz": _open_gzip, ".bz2": bz2.open, ".xz": lzma.open}
    return cast(BinaryIO, openers.get(Path(path).suffix, open)(path, mode))


def _open_gzip(path: PathLike, mode: str) -> gzip.GzipFile:
    """Without the time and the file's name, which gzip writes before the rest."""
    raw = open(path, mode)  # noqa: SIM115 - closed with the other
    file = gzip.GzipFile("", mode, fileobj=raw, mtime=0)
    file.myfileobj = raw  # type: ignore[assignment]  # any file will do
    return file


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
        with open_input(path) as file:
            return file.read(count)


def open_input(path: PathLike) -> BinaryIO:
    """A file of samples, open for reading.

    Raises
    ------
    OSError
    """
    return cast(BinaryIO, io.BufferedReader(path.opened())) if isinstance(path, CachedInput) else open(path, "rb")


class StandardInput:
    """What has come on standard input, in a file that rank 0 alone has: a path by another name."""

    def __init__(self, copy: str) -> None:
        self._copy = copy

    def __fspath__(self) -> str:
        return self._copy

    def __str__(self) -> str:
        return "standard input"


class CachedInput:
    """A file on a slow store, of which ranks read what is in a cache of their host, and bring there what is not: a path by another name."""

    def __init__(self, path: PathLike, cache: DataCache, version: FileVersion) -> None:
        self._path, self._cache, self._version = os.fspath(path), cache, version

    def __fspath__(self) -> str:
        return self._path

    def __str__(self) -> str:
        return self._path

    def opened(self) -> CachedFile:
        return CachedFile(self._path, self._cache, self._version)


@contextmanager
def input_file(path: PathLike, comm: Any, cache: DataCache | None = None) -> Iterator[PathLike]:
    """A file to read samples from: ``path`` itself, by way of a cache, or for ``-`` all that comes on standard input of rank 0; collective.

    How many samples there are is known at the end, and every rank takes a contiguous share: so rank 0 first copies its standard
    input to the disk, into the folder for temporary files, and reads it from there.

    Raises
    ------
    DatasetError
        On every rank alike, if the standard input cannot be read, or there is no room for it on the disk.
    """
    if os.fspath(path) != STANDARD_INPUT:
        if cache is not None:

            def version() -> FileVersion:
                with readable(path):
                    return FileVersion.of(path)

            path = CachedInput(path, cache, gather(comm, agreed(comm, version))[0])  # of one time, for all ranks
        yield path
        return
    with ExitStack() as stack:

        def copied() -> str:
            if comm.rank != 0:
                return ""
            with readable("standard input"):
                copy = stack.enter_context(NamedTemporaryFile(prefix="sparseallreduce-"))
                shutil.copyfileobj(sys.stdin.buffer, copy)
                copy.flush()
            return copy.name

        yield StandardInput(agreed(comm, copied))


@contextmanager
def readable(path: PathLike | StandardInput) -> Iterator[None]:
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
