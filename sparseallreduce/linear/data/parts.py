"""The files of a data set: one or several, a folder of parts, a pattern, or pipes.

The content of a pipe can be read once and by one process, and its number of samples is known only at its end, but every rank takes a
contiguous share. So rank 0 first copies it to disk, into the folder for temporary files, and distributes it from there.
"""

from __future__ import annotations

import glob
import os
import re
import select
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, TypeVar

from sparseallreduce.data_cache import DataCache, FileVersion
from sparseallreduce.errors import DatasetError, WaitTimeoutError
from sparseallreduce.linear.data.files import CachedInput, PathLike, Piped, readable
from sparseallreduce.runtime.objects import agreed, gather
from sparseallreduce.runtime.stalls import LongWait

__all__ = ["COLUMNS_SUFFIX", "LABELS_SUFFIX", "STANDARD_INPUT", "Data", "Source", "check_read_once", "described", "sharing", "source_of"]

T = TypeVar("T")

#: The files of a data set, as users specify them.
Data = PathLike | Sequence[PathLike]
#: The file name that stands for standard input.
STANDARD_INPUT = "-"
#: Suffix of the companion file with the labels of an ``.npz`` file.
LABELS_SUFFIX = ".labels.npy"
#: Suffix of the companion file with the encoding of a binary file's columns.
COLUMNS_SUFFIX = ".columns.json"

_PATTERN = re.compile(r"[*?\[]")
_DESCRIPTORS = re.compile(r"/dev/(stdin|fd/\d+)|/proc/(self|\d+)/fd/\d+")
_STANDARD = (STANDARD_INPUT, "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
_REMEDY = "send the samples to its standard input, and name that, -"
_LOOK_MILLISECONDS = 200  # interval of checks for a long wait
_OF_DATASETS = ("dataset_info.json", "state.json")
_SHOWN = 3  # largest number of file names in an error


@dataclass(frozen=True)
class Source:
    """The files of a data set in order, and its name in errors."""

    name: str
    parts: tuple[PathLike, ...]

    @property
    def piped(self) -> bool:
        """True if only rank 0 has some of the files."""
        return any(isinstance(part, Piped) for part in self.parts)

    def __str__(self) -> str:
        return self.name

    def each(self, comm: Any, look: Callable[[PathLike], T]) -> list[T]:
        """Return the results of ``look`` for every part. Collective over ``comm``.

        All ranks look at a single file, to detect a rank that cannot access it; several files are divided among the ranks.

        Raises
        ------
        Exception
            On every rank, the error that ``look`` raises on any.
        """
        several, ranks = len(self.parts) > 1, range(comm.size)

        def own() -> dict[int, T]:
            found = {}
            for number, part in enumerate(self.parts):
                lookers = (0,) if isinstance(part, Piped) else (number % comm.size,) if several else ranks
                if comm.rank in lookers:
                    found[number] = look(part)
            return found

        merged: dict[int, T] = {}
        for found in reversed(gather(comm, agreed(comm, own))):
            merged |= found
        return [merged[number] for number in range(len(self.parts))]


def described(data: Data) -> str:
    """Return the name of a data set for messages.

    >>> described("a.svm"), described(["a.svm", "b.svm"]), described(["a", "b", "c", "d", "e"])
    ('a.svm', 'a.svm and b.svm', 'a, b and 3 more files')
    """
    names = ["standard input" if name == STANDARD_INPUT else name for name in _named(data)]
    if len(names) > _SHOWN:
        return f"{', '.join(names[: _SHOWN - 1])} and {len(names) - _SHOWN + 1} more files"
    return " and ".join([*filter(None, [", ".join(names[:-1])]), *names[-1:]])


@contextmanager
def source_of(data: Data, comm: Any, cache: DataCache | None = None) -> Iterator[Source]:
    """Provide the files of a data set, through a cache if one is given. Collective over ``comm``.

    Parameters
    ----------
    data : path or sequence of paths
        Files; folders, with all of their files except those whose names start with a dot or an underscore; patterns of
        :mod:`glob`; pipes; and ``-`` for the standard input of rank 0. The files of a folder or a pattern are sorted by name.

    Raises
    ------
    DatasetError
        On every rank, if there are no such files, ranks see different ones, a pipe is named twice, or the disk has no room for the content
        of one.
    """
    names = agreed(comm, lambda: _expanded(data))
    _check_same(names, comm)
    piped = gather(comm, agreed(comm, lambda: _pipes(names) if comm.rank == 0 else set()))[0]
    with ExitStack() as stack:
        parts: list[PathLike] = []
        for name in names:
            if name in piped:
                shown = "standard input" if name in _STANDARD else name
                parts.append(Piped(shown, _copied(name, shown, comm, stack)))
            else:
                parts.append(name if cache is None else _cached(name, cache, comm))
        yield Source(str(parts[0]) if len(parts) == 1 else described(data), tuple(parts))


def check_read_once(comm: Any, *several: Data) -> None:
    """Raise an error if data sets to be read one after the other share a pipe. Collective over ``comm``.

    Raises
    ------
    DatasetError
        On every rank.
    """
    agreed(comm, lambda: _pipes([name for data in several for name in _expanded(data)]) if comm.rank == 0 else None)


def sharing(counts: Sequence[int], comm: Any) -> list[tuple[int, int, int]]:
    """Return this rank's items of each part, given the number of items per part, as (part, first, last + 1).

    Ranks get contiguous shares of about the same size.

    >>> from sparseallreduce import SERIAL
    >>> sharing([3, 0, 2], SERIAL)
    [(0, 0, 3), (2, 0, 2)]
    """
    low, high = (sum(counts) * rank // comm.size for rank in (comm.rank, comm.rank + 1))
    shares, begin = [], 0
    for part, count in enumerate(counts):
        first, last = max(low - begin, 0), min(high - begin, count)
        if first < last:
            shares.append((part, first, last))
        begin += count
    return shares


def _named(data: Data) -> list[str]:
    """Return the names that a user gives, as text."""
    return [os.fspath(data)] if isinstance(data, str | os.PathLike) else [os.fspath(each) for each in data]


def _expanded(data: Data) -> list[str]:
    """Return the names of all files in order."""
    found = []
    given = _named(data)
    for name in given:
        if name == STANDARD_INPUT or _DESCRIPTORS.fullmatch(name):
            found.append(name)
        elif os.path.isdir(name):
            found += _in_folder(name)
        elif _PATTERN.search(name) and not os.path.lexists(name):
            found += _matching(name)
        else:
            found.append(name)
    if not given:
        raise DatasetError("there is no file to read: the list of files is empty")
    return _without_companions(found) if len(found) > 1 else found


def _in_folder(folder: str) -> list[str]:
    """Return the files of a folder, except those that Spark and others add to their parts."""
    with readable(folder), os.scandir(folder) as entries:
        kept = sorted((entry for entry in entries if not entry.name.startswith((".", "_"))), key=lambda entry: entry.name)
        inner = next((entry.path for entry in kept if entry.is_dir()), None)
        if inner is not None:
            raise DatasetError(f"{folder}: it contains folders, such as {inner}: name those to read, or use a pattern like {folder}/*/*")
        if not kept:
            raise DatasetError(f"{folder}: it contains no files except those whose names start with a dot or an underscore")
        return [entry.path for entry in kept]


def _matching(pattern: str) -> list[str]:
    """Return the files that match a pattern, and those of matching folders."""
    hidden = os.path.basename(pattern).startswith((".", "_"))
    found = []
    for name in sorted(glob.glob(pattern, recursive=True)):
        if os.path.isdir(name):
            if "**" not in pattern:
                found += _in_folder(name)
        elif hidden or not os.path.basename(name).startswith((".", "_")):
            found.append(name)
    if not found:
        raise DatasetError(f"there is no file that matches {pattern}")
    return found


def _without_companions(names: list[str]) -> list[str]:
    """Return the names without companion files: labels, encodings, and what Spark and Hugging Face's datasets add."""
    known = set(names)
    has_arrow = any(name.endswith(".arrow") for name in names)

    def accompanies(name: str) -> bool:
        if name.endswith(LABELS_SUFFIX):
            return f"{name.removesuffix(LABELS_SUFFIX)}.npz" in known
        if name.endswith(COLUMNS_SUFFIX):
            return name.removesuffix(COLUMNS_SUFFIX) in known
        if has_arrow and os.path.basename(name) in _OF_DATASETS:
            return True
        return os.path.basename(name) == "_SUCCESS" and os.path.isfile(name) and os.path.getsize(name) == 0

    return [name for name in names if not accompanies(name)]


def _check_same(names: list[str], comm: Any) -> None:
    """Raise an error on every rank if ranks see different files; a single file may have different names."""
    ranks = gather(comm, (len(names), zlib.crc32("\0".join(names).encode(errors="surrogateescape")) if len(names) > 1 else 0))
    different = next((rank for rank, facts in enumerate(ranks) if facts != ranks[0]), None)
    if different is not None:
        counts = f"rank 0 finds {ranks[0][0]} files and rank {different} {ranks[different][0]}"
        raise DatasetError(f"ranks see different files: {counts}, or of other names; every rank must see the same")


def _pipes(names: list[str]) -> set[str]:
    """Return the names that are pipes, or descriptors of this process.

    Raises
    ------
    DatasetError
        If one of them is named twice.
    """
    pipes: dict[object, str] = {}
    for name in names:
        identity: object = STANDARD_INPUT
        if name not in _STANDARD:
            try:
                found = os.stat(name)
            except OSError:  # opening it later raises a better error
                if not _DESCRIPTORS.fullmatch(name):
                    continue
                identity = name
            else:
                if not (_DESCRIPTORS.fullmatch(name) or stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode)):
                    continue
                identity = found.st_dev, found.st_ino
        if identity in pipes:
            shown = "standard input, -," if name in _STANDARD else name
            raise DatasetError(f"{shown} is a pipe and can be read once, but is named twice: write its content to a file")
        pipes[identity] = name
    return set(pipes.values())


def _copied(name: str, shown: str, comm: Any, stack: ExitStack) -> str:
    """Copy the content of a pipe to a file on rank 0, and return the file's name. Collective."""

    def copied() -> str:
        if comm.rank != 0:
            return ""
        with readable(shown), ExitStack() as opened:
            copy = stack.enter_context(NamedTemporaryFile(prefix="sparseallreduce-"))
            try:
                pipe = sys.stdin.buffer if name in _STANDARD else opened.enter_context(_opened_pipe(name, shown, comm))
            except FileNotFoundError as error:
                raise OSError(f"{error.strerror}; processes started by mpiexec cannot access pipes of the shell: {_REMEDY}") from None
            shutil.copyfileobj(pipe, copy)
            copy.flush()
        return copy.name

    return agreed(comm, copied)


def _opened_pipe(name: str, shown: str, comm: Any) -> BinaryIO:
    """Open a pipe once a process writes to it; warn if that takes long.

    Raises
    ------
    OSError
        If the default timeout expires first.
    """
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        wait = LongWait(lambda: (f"rank {comm.rank} of {comm.size}", f"the reading of {shown}: nobody writes into this pipe"), limited=True)
        while not poll.poll(_LOOK_MILLISECONDS):
            wait.check()
        wait.over()
        os.set_blocking(descriptor, True)
        return open(descriptor, "rb")
    except WaitTimeoutError as error:
        os.close(descriptor)
        raise OSError(str(error)) from None
    except BaseException:
        os.close(descriptor)
        raise


def _cached(name: str, cache: DataCache, comm: Any) -> CachedInput:
    """Return a file that is read through a cache, in the version that rank 0 sees. Collective."""

    def version() -> FileVersion:
        with readable(name):
            return FileVersion.of(name)

    return CachedInput(name, cache, gather(comm, agreed(comm, version))[0])
