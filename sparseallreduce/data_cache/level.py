"""One level of the cache: a folder of entries with checksums, of limited size.

``ab/cd...``   an entry, named by the digest of its key: its content, followed by a record that describes it
``writing/``   entries being written, each locked by its writer; unlocked ones were left by killed processes
``usage``      total size in bytes, updated when entries are added, and a checksum; never less than the true size
``lock``       a file whose bytes are used as locks

An entry gets its name once it is complete. It is not synchronised to the disk: after a crash of the machine its checksum shows whether it
was written. Evicted or replaced entries stay readable for processes that have them open or mapped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import stat
import struct
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.checked_file import Damaged, read_bytes
from sparseallreduce.data_cache.locks import BUSY, HELD, Locks
from sparseallreduce.runtime.limits import memory_left

__all__ = ["DAMAGED", "Level", "Name"]

Bytes = NDArray[np.uint8]
Part = Any  # whatever has bytes

_MAGIC = b"\x89SARe01\n"
_DIGEST = 16  # bytes
_RECORD = struct.Struct(f"<8s{_DIGEST}s{_DIGEST}sQI")  # magic, key, version, length of the content, its checksum
_CHECKSUM = struct.Struct("<I")  # of the record
_BEHIND = _RECORD.size + _CHECKSUM.size
_WRITING, _USAGE = "writing", "usage"
_HEX = "0123456789abcdef"

_USAGE_LOCK = 1 << 61  # number of the lock for `usage`, above those of entries
_PATIENCE = 10.0  # seconds to wait for a process that counts or evicts, before an entry is not added
_RETRY = 60.0  # seconds before another attempt after a folder could not be written to
_MOST_PARTS = 512  # parts of one write call; systems allow 1,024
_LARGE = 1 << 26  # free memory is checked for entries of at least this size
_OPENING = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # does not block on a pipe or a device
_SLACK = 16  # with small entries, 1/16 of the limit is freed at once, since listing all entries each time is slow


class Name(NamedTuple):
    """The digests of an entry's key and version."""

    key: bytes
    version: bytes

    @staticmethod
    def of(key: str, version: str) -> Name:
        return Name(*(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST).digest() for text in (key, version)))

    @property
    def number(self) -> int:
        """The number of the entry's lock."""
        return int.from_bytes(self.key[:7], "little")


class _Damaged:
    """Stands for an entry that does not match its checksums."""


DAMAGED = _Damaged()


class Level:
    """A folder of cached entries with a limited total size.

    Parameters
    ----------
    folder : path
        Created when the first entry is added; other files in it are not touched.
    bound : int
        Limit of the size of entries in bytes, in whole pages, including those being written. Among processes with different limits, the
        smallest applies whenever they add entries.
    room : callable, optional
        Returns whether there is room for a number of bytes elsewhere.
    verified : bool
        Whether contents are verified when they are read, in addition to the records.
    """

    folder: Path
    bound: int

    def __init__(self, folder: Path, bound: int, *, room: Callable[[int], bool] = lambda _: True, verified: bool = True) -> None:
        self.folder, self.bound = folder, bound
        self.locks: Locks = Locks(folder / "lock")
        self.warned: bool = False
        self._room, self._verified = room, verified
        self._closed_until = 0.0

    def accepts(self, nbytes: int = 0) -> bool:
        """Return True if an entry of this size is expected to be kept."""
        return 0 < self.bound >= _pages(nbytes) and time.monotonic() >= self._closed_until

    def has(self, name: Name) -> bool:
        """Return True if there is an entry, judged by its record."""
        with self._opened(name) as (file, size), contextlib.suppress(OSError):
            return file >= 0 and 0 <= size - _BEHIND == _length(_record(file, size), name)
        return False

    def get(self, name: Name) -> Bytes | _Damaged | None:
        """Return the content of an entry as a new array; None if there is none with this key and version.

        A damaged entry is removed.
        """
        with self._opened(name) as (file, size):
            return self._content(name, file, size)

    def open(self, name: Name) -> int | None:
        """Return a descriptor of an entry, to be closed by the caller, after verifying its content; None if there is none."""
        with self._opened(name) as (file, size):
            return os.dup(file) if isinstance(self._content(name, file, size), np.ndarray) else None

    def _content(self, name: Name, file: int, size: int) -> Bytes | _Damaged | None:
        if file < 0 or not self.bound:
            return None
        try:
            record = _record(file, size)
            length = _length(record, name)
            if length is None or (length > _LARGE and length > memory_left()):
                return None
            agrees = 0 <= length == size - _BEHIND
            content = np.empty(length if agrees else 0, np.uint8)
            whole = agrees and _filled(file, content)
        except OSError:  # of the disk
            whole = False
        if not whole or (self._verified and zlib.crc32(content.data) != _RECORD.unpack_from(record)[4]):
            self.drop(name)
            return DAMAGED
        with contextlib.suppress(OSError):  # another user's file keeps its old time
            now = time.time_ns()
            os.utime(file, ns=(now, now))
        return content

    def put(self, name: Name, parts: Sequence[Part], unused_since: int | None = None) -> bool:
        """Add an entry that consists of concatenated parts, evicting others if needed; return whether it was added.

        Parameters
        ----------
        unused_since : int, optional
            In ns since 1970: entries used or added since then are not evicted for it.

        Warns
        -----
        RuntimeWarning
            The first time that the folder cannot be written to, for example on a full disk. It is not tried again for a minute.
        """
        views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        length, checksum = sum(len(view) for view in views), 0
        if not self.accepts(length + _BEHIND) or not self._room(length):
            return False
        for view in views:
            checksum = zlib.crc32(view, checksum)
        record = _RECORD.pack(_MAGIC, name.key, name.version, length, checksum)
        views.append(memoryview(record + _CHECKSUM.pack(zlib.crc32(record))))
        part: Path | None = None
        try:
            part, file = self._reserved(length + _BEHIND, unused_since)
            if part is None:
                return False
            try:
                _write(file, views)
                self._rename(part, self._path(name))
                part = None
            finally:
                os.close(file)
        except OSError as error:
            self._close(error)
            return False
        finally:
            if part is not None:
                with contextlib.suppress(OSError):
                    part.unlink()
        return True

    def _path(self, name: Name) -> Path:
        digest = name.key.hex()
        return self.folder / digest[:2] / digest[2:]

    @contextlib.contextmanager
    def _opened(self, name: Name) -> Iterator[tuple[int, int]]:
        """Open the file of an entry, and yield descriptor and size; -1 if there is none. Anything but a regular file has size 0."""
        try:
            file = os.open(self._path(name), os.O_RDONLY | _OPENING)
        except OSError:
            yield -1, 0
            return
        try:
            status = os.fstat(file)
            yield file, status.st_size if stat.S_ISREG(status.st_mode) else 0
        finally:
            os.close(file)

    def drop(self, name: Name) -> None:
        """Remove a damaged entry."""
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    def _close(self, error: OSError) -> None:
        self._closed_until = time.monotonic() + _RETRY
        if not self.warned:
            self.warned = True
            what = f"cannot cache samples in {self.folder}: {error.strerror or error}"
            warnings.warn(f"{what}; they come from the next level, or the store", RuntimeWarning, stacklevel=2)

    def _reserved(self, nbytes: int, unused_since: int | None) -> tuple[Path | None, int]:
        """Return a locked file of this size to write to, which counts from now on; None if there is no room."""
        (self.folder / _WRITING).mkdir(parents=True, exist_ok=True)
        with self.locks.held(_USAGE_LOCK, _PATIENCE) as state:
            if state == BUSY:
                raise OSError(errno.EBUSY, "another process has kept it locked")
            used, needed = self._used(), _pages(nbytes)
            if used is None or used + needed > self.bound:
                used = self._evicted(needed, unused_since)
            if used + needed > self.bound:
                return None, -1
            part = self.folder / _WRITING / secrets.token_hex(12)
            file = os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.truncate(file, nbytes)  # so that it is counted by other processes
                self._count(used + needed)
            except BaseException:
                os.close(file)
                part.unlink(missing_ok=True)
                raise
        return part, file

    def _rename(self, part: Path, path: Path) -> None:
        try:
            os.replace(part, path)
        except FileNotFoundError:
            path.parent.mkdir(exist_ok=True)
            os.replace(part, path)

    def _used(self) -> int | None:
        """Return the total size by the last count; None if there was none."""
        try:
            record = read_bytes(self.folder / _USAGE, 12)
        except (OSError, Damaged):
            return None
        used = int.from_bytes(record[:8], "little")
        return used if record == _counted(used) else None

    def _count(self, used: int) -> None:
        path = self.folder / _USAGE
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(path).st_mode
            if not stat.S_ISREG(mode):
                path.rmdir() if stat.S_ISDIR(mode) else path.unlink()
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | _OPENING, 0o666)
        try:
            os.pwrite(file, _counted(used), 0)
        finally:
            os.close(file)

    def _evicted(self, needed: int, unused_since: int | None) -> int:
        """Evict the least recently used entries until there is room for ``needed`` bytes; return the size of the rest.

        The caller must hold the lock of the usage.
        """
        used = self._cleared()
        entries = sorted(self._entries())
        used += sum(size for _, size, _ in entries)
        if used + needed <= self.bound:
            return used
        target = self.bound - needed - (self.bound // _SLACK if self.bound >= 8 * _SLACK * needed else 0)
        for last, size, path in entries:
            if used <= target or (unused_since is not None and last >= unused_since):
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            used -= size
        return used

    def _entries(self) -> Iterator[tuple[int, int, str]]:
        """Yield for each entry when it was last used, its size, and its path."""
        for first in (high + low for high in _HEX for low in _HEX):
            try:
                found = os.scandir(self.folder / first)
            except (FileNotFoundError, NotADirectoryError):
                continue
            with found:
                for each in found:
                    if len(each.name) == 2 * _DIGEST - 2 and not each.name.strip(_HEX):
                        with contextlib.suppress(FileNotFoundError):
                            status = each.stat(follow_symlinks=False)
                            if not stat.S_ISDIR(status.st_mode):  # which is nobody's entry
                                yield status.st_mtime_ns, _pages(status.st_size), each.path

    def _cleared(self) -> int:
        """Remove files whose writers have ended, and return the total size of files being written. The caller must hold the usage lock."""
        used = 0
        for path in (self.folder / _WRITING).iterdir():
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(os.lstat(path).st_mode):
                    with contextlib.suppress(OSError):  # of a folder, which is nobody's
                        path.unlink()
                    continue
                file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | _OPENING)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                except BlockingIOError:
                    used += _pages(os.fstat(file).st_size)
                finally:
                    os.close(file)
        return used

    def clear_left(self) -> None:
        """Remove what killed writers have left, if the lock is free."""
        with contextlib.suppress(OSError):
            if any((self.folder / _WRITING).iterdir()):
                with self.locks.held(_USAGE_LOCK, 0.0) as state:
                    if state == HELD:
                        self._cleared()


def _record(file: int, size: int) -> bytes:
    """Read the record that follows the content."""
    return os.pread(file, _BEHIND, max(size - _BEHIND, 0))


def _length(record: bytes, name: Name) -> int | None:
    """Return the length of the content that a record describes; None if it has another name, -1 if it is damaged."""
    body = record[: _RECORD.size]
    if len(record) < _BEHIND or not body.startswith(_MAGIC) or _CHECKSUM.unpack(record[_RECORD.size :])[0] != zlib.crc32(body):
        return -1
    _, key, version, length, _ = _RECORD.unpack(body)
    return length if (key, version) == name else None


def _counted(used: int) -> bytes:
    number = used.to_bytes(8, "little")
    return number + _CHECKSUM.pack(zlib.crc32(number))


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _filled(file: int, content: Bytes) -> bool:
    """Read a file from its start, and return whether it was long enough."""
    done, view = 0, memoryview(content)  # type: ignore[arg-type]
    while done < len(content):
        count = os.preadv(file, [view[done:]], done)
        if not count:
            return False
        done += count
    return True


def _write(file: int, views: list[memoryview]) -> None:
    offset = 0
    while views:
        written = os.pwritev(file, views[:_MOST_PARTS], offset)
        if not written:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        offset += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
