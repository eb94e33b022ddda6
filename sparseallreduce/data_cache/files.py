"""Files on a slow store: one file read in cached pieces, and many files whose contents are samples."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.data_cache.cache import DataCache
from sparseallreduce.errors import DatasetError
from sparseallreduce.runtime.memory.mapping import PAGE, map_rows, page_multiple

__all__ = ["PIECE", "CachedFile", "FileVersion", "StoredFiles"]

PathLike = str | os.PathLike[str]

#: Size of a cached piece, which grows for files of more than MOST_PIECES pieces, since systems allow 65,530 mappings.
PIECE, MOST_PIECES = 1 << 20, 1 << 14


class FileVersion(NamedTuple):
    """Size and modification time of a file, which identify its version."""

    size: int  # bytes
    modified: int  # ns since 1970

    @staticmethod
    def of(path: PathLike | int) -> FileVersion:
        """Return the current version of a file, given its path or descriptor.

        Raises
        ------
        OSError
        """
        status = os.stat(path)
        return FileVersion(status.st_size, status.st_mtime_ns)

    def __str__(self) -> str:
        return f"{self.size}-{self.modified}"


class CachedFile(io.RawIOBase):
    """A file open for reading, whose pieces come from a cache, or from the file itself if they are not cached.

    Parameters
    ----------
    path : path
    cache : DataCache
    version : FileVersion, optional
        Required version, by default the current one.

    Raises
    ------
    DatasetError
        On reading, if the file no longer has this version.
    OSError

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "samples.svm"
    ...     _ = path.write_text("1 3:0.5 7:1")
    ...     with CachedFile(path, DataCache(Path(folder) / "cache")) as file:
    ...         file.seek(2)
    ...         file.read(5)
    2
    b'3:0.5'
    """

    def __init__(self, path: PathLike, cache: DataCache, version: FileVersion | None = None) -> None:
        self._path, self._cache = Path(path).absolute(), cache
        self._version = FileVersion.of(path) if version is None else version
        self._place, self._step = 0, PIECE
        while self._step * MOST_PIECES < self._version.size:
            self._step *= 2
        self._piece: tuple[int, NDArray[np.uint8]] = (-1, np.empty(0, np.uint8))  # number and content of the piece read last

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._version.size}[whence]
        if place < 0:
            raise ValueError(f"there is nothing before the beginning of {self._path}")
        self._place = place
        return place

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer).cast("B")
        number, inside = divmod(self._place, self._step)
        if self._place >= self._version.size or not len(wanted):
            return 0
        if self._piece[0] != number:
            self._piece = number, self._read(number)
        found = self._piece[1][inside : inside + len(wanted)]
        wanted[: len(found)] = found.data
        self._place += len(found)
        return len(found)

    def read_at(self, offset: int, length: int) -> NDArray[np.uint8]:
        """Return ``length`` bytes from ``offset`` on, as a new array.

        Raises
        ------
        EOFError
            If the file is too short.
        """
        out = np.empty(length, np.uint8)
        view, done = out.data, 0
        self.seek(offset)
        while done < length:
            count = self.readinto(view[done:])
            if not count:
                raise EOFError(f"the file ends at {offset + done}")
            done += count
        return out

    def map_at(self, offset: int, length: int) -> NDArray[np.uint8]:
        """Return ``length`` bytes from ``offset`` on as a read-only array of memory-mapped pieces.

        The pieces stay mapped if they are evicted, and use disk space until the array is deleted. Pieces that cannot be cached are mapped
        from the file itself.

        Raises
        ------
        OSError
            If the system allows no more mappings.
        """
        if offset + length > self._version.size:
            raise EOFError(f"the file ends at {self._version.size}")
        first, last = offset // self._step, -(-(offset + length) // self._step)
        with ExitStack() as stack:
            places = [self._mappable(number, stack) for number in range(first, last)] or [None]
            if None in places:
                return self.read_at(offset, length)
            rows = map_rows([place for place in places if place is not None], self._step)
        return rows.reshape(-1)[offset - first * self._step :][:length]

    def _mappable(self, number: int, stack: ExitStack) -> tuple[int, int] | None:
        """Return a file that contains a piece, open until the end of the block, and the offset; None if that is not page-aligned."""
        check = self._is_piece(number)
        found = self._cache.open(self._key(number), lambda: self._fetched(number), version=str(self._version), check=check)
        if found is None:
            found = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC), number * self._step
            if FileVersion.of(found[0]) != self._version:
                raise DatasetError(f"{self._path} has changed while it was read: begin again")
        stack.callback(os.close, found[0])
        return found if found[1] % PAGE == 0 else None

    def _key(self, number: int) -> str:
        return f"{self._path}\0{number}"

    def _read(self, number: int) -> NDArray[np.uint8]:
        check = self._is_piece(number)
        content = self._cache.get(self._key(number), lambda: self._fetched(number), version=str(self._version), check=check)
        return np.asarray(content[: self._length(number)], np.uint8)

    def _is_piece(self, number: int) -> Callable[[Any], bool]:
        """Return a function that checks whether a sample has the type and size of this piece, which consists of whole pages."""
        shape = (page_multiple(self._length(number)),)
        return lambda sample: isinstance(sample, np.ndarray) and sample.dtype == np.uint8 and sample.shape == shape

    def _length(self, number: int) -> int:
        """Return the length of a piece in bytes."""
        return min(self._step, self._version.size - number * self._step)

    def _fetched(self, number: int) -> NDArray[np.uint8]:
        """Read a piece from the file itself; the last one is padded to whole pages, so that it can be mapped."""
        length = self._length(number)
        with open(self._path, "rb", buffering=0) as file:
            file.seek(number * self._step)
            content = np.zeros(page_multiple(length), np.uint8)
            done = 0
            while done < length and (count := file.readinto(content.data[done:length])):
                done += count
            if done < length or FileVersion.of(file.fileno()) != self._version:
                raise DatasetError(f"{self._path} has changed while it was read: begin again")
        return content


class StoredFiles:
    """A data set of files, where the bytes of each file are a sample.

    Parameters
    ----------
    paths : sequence of path

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a").write_bytes(b"first")
    ...     StoredFiles([Path(folder, "a")])[0]
    b'first'
    """

    def __init__(self, paths: Sequence[PathLike]) -> None:
        self.paths: list[str] = [os.fspath(path) for path in paths]
        self._versions: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> bytes:
        path = self.paths[index]
        with open(path, "rb") as file:
            content = file.read()
            known = self._versions.get(index)
            if known is not None and known != _named(path, FileVersion.of(file.fileno())):
                raise DatasetError(f"{path} has changed since its version was asked for: begin again")
        return content

    def version(self, index: int) -> str:
        """Return path, size and time of a file, which are read once per process."""
        if index not in self._versions:
            self._versions[index] = _named(self.paths[index], FileVersion.of(self.paths[index]))
        return self._versions[index]

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.paths, self._versions = state["paths"], {}


def _named(path: str, version: FileVersion) -> str:
    return f"{path} {version}"
