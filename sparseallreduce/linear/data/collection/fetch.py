"""Fetching data sets of the LIBSVM collection into a cache, with checksums, and converting them to the binary format.

pooch manages the cache and compares checksums; it uses our own downloader, because it has none that resumes an interrupted
transfer. Processes that share a cache wait for each other by locks, so that each file is fetched and converted once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pooch
from filelock import FileLock

from sparseallreduce.atomic_file import atomic_file
from sparseallreduce.cache import default_cache
from sparseallreduce.checked_file import Damaged, open_regular, read_bytes
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.binary.format import HEADER_BYTES, Header
from sparseallreduce.linear.data.collection.download import AbsentError, Downloader
from sparseallreduce.linear.data.collection.sets import COLLECTION, SETS
from sparseallreduce.linear.data.convert import convert
from sparseallreduce.linear.data.files import PathLike, readable, written
from sparseallreduce.linear.data.formats import open_samples
from sparseallreduce.linear.data.parts import Source
from sparseallreduce.linear.data.reading import Reading
from sparseallreduce.runtime.objects import agreed, collective, gather

__all__ = ["fetch"]


Converter = Callable[..., Header]
Received = Callable[[int, int | None], object] | None

_CHECKSUM = re.compile(r"[0-9a-fA-F]{64}")  # of SHA-256
_LONGEST_PIN = 1 << 12  # largest size of a checksum file, in bytes


@collective
def fetch(
    name: str,
    comm: Any,
    *,
    cache: PathLike | None = None,
    mirror: str = COLLECTION,
    checksums: Mapping[str, str] | None = None,
    binary: bool = True,
    convert: Converter = convert,
    on_received: Received = None,
) -> list[Path]:
    """Return the files of a data set, fetched and converted unless they are in the cache. Collective over ``comm``.

    Rank 0 fetches; all ranks convert.

    Parameters
    ----------
    name : str
        A key of :data:`SETS`.
    comm : communicator
        Communicator of ranks that share the cache.
    cache : path, optional
        Cache folder; by default the value of the environment variable ``SPARSEALLREDUCE_CACHE``, or the user's cache folder.
    mirror : str
        URL of the files, by default that of the collection.
    checksums : mapping, optional
        Hashes of the files on the mirror by name, in hexadecimal: SHA-256, or another one such as ``"md5:..."``. For other files it is the
        hash of the first file received with the expected number of samples, stored in the file ``NAME.sha256`` in the cache.
    binary : bool
        Whether to convert the files; otherwise they remain text.
    convert : callable
        Function with the interface of :func:`sparseallreduce.linear.data.convert.convert`.
    on_received : callable, optional
        Function called with the number of bytes received of a file, and the total if known.

    Returns
    -------
    list of Path
        The training set, and the test set if there is one.

    Raises
    ------
    DatasetError
        On every rank.
    """
    chosen = SETS[name]
    folder = Path(gather(comm, os.fspath(cache or default_cache()))[0])
    paths = []
    for file, samples in chosen.files.items():
        result = folder / f"{file.removesuffix('.svm')}.csr"
        if binary and _is_there(result, comm):
            paths.append(result)
            continue
        source = _Source(folder, mirror, [file + suffix for suffix in chosen.suffixes], checksums or {}, on_received)
        text, checked = gather(comm, agreed(comm, source.fetched if comm.rank == 0 else lambda: (Path(), False)))[0]
        with _with_remedy(text):
            if binary:
                with _only(comm, folder / f"{result.name}.lock"):
                    if not _is_there(result, comm):
                        convert(text, result, comm, n_features=chosen.features, n_samples=samples)
            elif not checked:
                _check(text, comm, chosen.features, samples)
        agreed(comm, partial(source.pin, text.name) if comm.rank == 0 else lambda: None)
        paths.append(result if binary else text)
    return paths


def _is_there(path: Path, comm: Any) -> bool:
    """Return True if a file exists with a binary header that matches its length. Collective."""

    def whole() -> bool:
        try:
            with open_regular(path) as file:
                Header.from_bytes(file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size, path)
        except (FileNotFoundError, NotADirectoryError, DatasetError):
            return False
        return True

    def looked() -> bool:
        with readable(path):
            return comm.rank == 0 and whole()

    return gather(comm, agreed(comm, looked))[0]


def _check(text: Path, comm: Any, features: int, samples: int | None) -> None:
    """Read a file of samples completely, and count them. Collective.

    Raises
    ------
    DatasetError
        On every rank, if it contains anything else, or another number of samples.
    """
    blocks = open_samples(Source(str(text), (text,)), comm, "svmlight", Reading(), n_features=features).blocks

    def counted() -> int:
        with closing(blocks):
            return sum(len(block.labels) for block in blocks)

    found = sum(gather(comm, agreed(comm, counted)))
    if samples is not None and found != samples:
        what = f"{found} samples in it instead of {samples}: it is damaged, or has changed"
        raise DatasetError(f"{text}: {what}; remove it to fetch it again")


@contextmanager
def _with_remedy(text: Path) -> Iterator[None]:
    """Add the remedy to errors of a fetched file."""
    try:
        yield
    except DatasetError as error:
        if "to fetch it again" in str(error) or not str(error).startswith((str(text), f"cannot read {text}")):
            raise
        raise DatasetError(f"{error}; if the file is damaged, remove it to fetch it again") from None


@dataclass(frozen=True)
class _Source:
    """A file that the mirror has under one of several names."""

    folder: Path
    mirror: str
    names: list[str]
    checksums: Mapping[str, str]
    on_received: Received

    def fetched(self) -> tuple[Path, bool]:
        """Return the file in the cache, and whether its checksum was known and verified."""
        with written(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        here = [name for name in self.names if (self.folder / name).exists()]
        for name in here[:1]:
            with readable(self.folder / name), open_regular(self.folder / name):
                pass  # fails for a pipe, whose checksum would wait for data
        absent = ""
        for name in here[:1] or self.names:
            try:
                return self._fetched(name), self._expected(name) is not None
            except AbsentError as error:
                absent = str(error)
        raise DatasetError(f"{absent}; there is no {' nor '.join(self.names)}: choose another --mirror")

    def pin(self, name: str) -> None:
        """Store the checksum of a valid file, unless there is one, so that later files must be identical."""
        path = self._pinned(name)
        with written(path):
            if not path.exists():
                checksum = pooch.file_hash(self.folder / name)
                with atomic_file(path, "w", own=True) as file:
                    file.write(f"{checksum}  {name}\n")

    def _pinned(self, name: str) -> Path:
        """Return the path of the checksum file, in the format of ``sha256sum --check``."""
        return self.folder / f"{name}.sha256"

    def _expected(self, name: str) -> str | None:
        """Return the checksum that a file must have, if known: the user's, or that of the file received first."""
        if name in self.checksums:
            return self.checksums[name]
        pinned = self._pinned(name)
        if not os.path.lexists(pinned):
            return None
        with readable(pinned):
            try:
                words = read_bytes(pinned, _LONGEST_PIN).decode().split()
            except (Damaged, UnicodeDecodeError):
                words = []
        if not words or not _CHECKSUM.fullmatch(words[0]):
            raise DatasetError(f"{pinned} is damaged: there is no checksum in it; remove it to trust {name} as it is now")
        return words[0]

    def _fetched(self, name: str) -> Path:
        expected = self._expected(name)
        base = self.mirror if self.mirror.endswith("/") else f"{self.mirror}/"
        keeper = pooch.create(self.folder, base, registry={name: expected})
        with _locked(self.folder / f"{name}.lock"), written(self.folder / name):
            try:
                return Path(keeper.fetch(name, downloader=Downloader(self.folder / f"{name}.part", self.on_received)))
            except DatasetError:
                raise
            except ValueError:  # pooch's error for a wrong checksum
                what = f"has another checksum than {expected}: the received file is discarded"
                if name not in self.checksums:
                    what += f", that of the file received first: if the file has been replaced since, remove {self._pinned(name)}"
                raise DatasetError(f"{base}{name} {what}") from None


@contextmanager
def _only(comm: Any, path: Path) -> Iterator[None]:
    """Hold a lock for all ranks of ``comm``, by rank 0."""
    lock = FileLock(path)
    agreed(comm, lambda: _acquire(lock) if comm.rank == 0 else None)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    _acquire(lock)
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: FileLock) -> None:
    """Wait until no other process holds the lock."""
    with written(Path(lock.lock_file)):
        lock.acquire()
