"""DataCache: what a slow store gives, kept on the local disk and in shared memory; fetched once by all processes of a host together."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import secrets
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.checked_file import Damaged
from sparseallreduce.data_cache.level import Level, Name
from sparseallreduce.data_cache.locks import BUSY
from sparseallreduce.data_cache.memory import SHARED_MEMORY, SharedFolder
from sparseallreduce.data_cache.samples import FromArray, ToArray, first_array, pack, unpack
from sparseallreduce.errors import AlgorithmError, DatasetError
from sparseallreduce.runtime.limits import memory_left

__all__ = ["Counts", "DataCache", "Request"]

PathLike = str | os.PathLike[str]
Check = Callable[[Any], bool] | None

_PATIENCE = 60.0  # seconds
_RECENT = 600 * 10**9  # ns: what has been used since then is not evicted to fill the cache, so that no process evicts what others bring
_MARGIN = 1 << 28  # bytes of memory that are left to others
_CREDIT = 1 << 26  # bytes after which the system is asked again how much is left


class Counts(NamedTuple):
    """What has become of the requests of a process, samples each."""

    memory: int = 0  # found in shared memory
    disk: int = 0  # found on the disk
    fetched: int = 0  # fetched from the store
    damaged: int = 0  # of entries found, those that did not match their checksums, or are none of a sample, and were fetched again


class Request(NamedTuple):
    """A sample that is wanted.

    ``fetch()`` asks the store for it; ``decode`` makes of that what is kept in memory and handed over. ``key`` names it, and what it is a
    sample of, in all caches of a folder. What was cached under another ``version`` is fetched anew.
    """

    key: str
    fetch: Callable[[], Any]
    version: str = ""
    decode: Callable[[Any], Any] | None = None


class _Kept(NamedTuple):
    """What was found in the cache: its bytes, and what they are of."""

    content: NDArray[np.uint8]
    sample: Any


class DataCache:
    """Samples of slow stores, on the disk of this host and in memory that its processes share.

    Three steps. A sample that is in memory is copied from there. Otherwise the process takes the lock of that sample, and looks again: then
    another may have brought it. Then it takes it from the disk, or from the store and puts it on the disk; decodes it; and puts it into
    memory. So a host asks its store once for each sample, whichever of its processes want it, as long as there is room.

    Nothing has to be closed. A cache may be pickled, used by several threads, and by processes that are forked.

    Parameters
    ----------
    folder : path
        On a local disk. Any number of caches and jobs may have the same.
    disk_bytes, memory_bytes : int
        What there may be in the folder, and in the memory of all caches of that folder; what has not been used for longest goes first. 0
        for nothing. Memory is given back when the last process that uses it ends.
    patience : float
        Seconds to wait for another process that is fetching the same sample, before this one fetches it as well.
    memory : path
        A file system in memory.

    Notes
    -----
    A sample is made of None, numbers, strings, bytes and NumPy arrays, in tuples, lists and dictionaries; arrays are copies of the
    caller's own.

    A disk that is full or cannot be written to, and memory that is short, are a RuntimeWarning, once a process and level. Samples then come
    from the other level or from the store. What ``fetch`` raises is raised.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> folder = tempfile.TemporaryDirectory()
    >>> cache = DataCache(folder.name, memory_bytes=1 << 20)
    >>> for _ in range(3):
    ...     sample = cache.get("squares/3", fetch=lambda: (np.arange(3) ** 2, "three"))
    >>> sample, cache.counts
    ((array([0, 1, 4]), 'three'), Counts(memory=2, disk=0, fetched=1, damaged=0))
    >>> cache.close()
    >>> DataCache(folder.name).get("squares/3", fetch=lambda: "not asked for")
    (array([0, 1, 4]), 'three')
    >>> DataCache(folder.name).get("squares/3", fetch=lambda: "the store has changed", version="2")
    'the store has changed'
    """

    def __init__(
        self,
        folder: PathLike,
        *,
        disk_bytes: int = 1 << 36,
        memory_bytes: int = 0,
        patience: float = _PATIENCE,
        memory: PathLike = SHARED_MEMORY,
    ) -> None:
        if disk_bytes < 0 or memory_bytes < 0 or not patience >= 0:
            raise AlgorithmError(f"bounds of a cache are at least 0, not {disk_bytes} and {memory_bytes} bytes and {patience} seconds")
        self.folder, self.disk_bytes, self.memory_bytes = Path(folder).absolute(), disk_bytes, memory_bytes
        self.patience, self._memory_root = patience, Path(memory)
        self._begin()

    def __repr__(self) -> str:
        return f"DataCache({str(self.folder)!r}, disk_bytes={self.disk_bytes}, memory_bytes={self.memory_bytes})"

    def _begin(self) -> None:
        self._counts: Counter[str] = Counter()
        self._guard = threading.Lock()
        self._disk = Level(self.folder, self.disk_bytes)
        self._shared: SharedFolder | None = None
        self._memory: Level | None = None
        self._entered = False
        _caches.add(self)

    def _reset(self) -> None:
        if self._shared is not None:
            self._shared.leave()
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("folder", "disk_bytes", "memory_bytes", "patience", "_memory_root")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back, if no other process uses it. A later request begins anew."""
        if self._shared is not None:
            self._shared.leave()
        self._shared = self._memory = None
        self._entered = False

    @property
    def counts(self) -> Counts:
        """Of this process, since this object was made in it, or came to it."""
        return Counts(**self._counts)

    def get(
        self,
        key: str,
        fetch: Callable[[], Any],
        *,
        version: str = "",
        decode: Callable[[Any], Any] | None = None,
        check: Check = None,
        to_array: ToArray = lambda _: None,
        from_array: FromArray | None = None,
    ) -> Any:
        """A sample, from memory, from the disk, or from the store.

        Parameters
        ----------
        key, fetch, version, decode
            As in :class:`Request`. ``decode`` is told from others by its code and what it has bound, and not by functions that it calls:
            when these change, so does the version.
        check : callable, optional
            Tells whether what the cache has can be what the store gives under this key. If not, it is damaged, and fetched again.
        to_array, from_array : callable, optional
            What leaves of other types are as arrays, and back.

        Raises
        ------
        DatasetError
            If the sample is of another type.
        Exception
            Whatever ``fetch`` or ``decode`` raise.
        """
        return self._sample(Request(key, fetch, version, decode), to_array, from_array, check)

    def open(self, key: str, fetch: Callable[[], Any], *, version: str = "", check: Check = None) -> tuple[int, int] | None:
        """A descriptor of the file in which the disk has a sample that is an array, and where the array begins in it.

        It is the caller's to close, and stays readable, also where it is mapped, when the sample is evicted. The array begins at a multiple
        of 4,096 bytes if it is as long. None if the disk does not take it.
        """
        sample, name = self.get(key, fetch, version=version, check=check), Name.of(key, version)
        file = self._disk.open(name)
        begin = None if file is None else _array_in(file, sample)
        if file is None or begin is None:
            if file is not None:
                os.close(file)
                self._disk.drop(name)
            return None
        return file, begin

    def fill(
        self, number: int, request: Callable[[int], Request], *, to_array: ToArray = lambda _: None, from_array: FromArray | None = None
    ) -> int:
        """Bring samples [0, number) into the cache, together with all processes of the host that do so; returns how many this one fetched.

        Each begins somewhere, goes on in order, and leaves out what is there or what others are about to fetch. It returns when all are
        there, or when there is no room for more: what has been used in the last ten minutes is not evicted. Others need not take part.
        """
        before, recent, later = self._counts["fetched"], time.time_ns() - _RECENT, []
        start = secrets.randbelow(max(number, 1))
        for place in (*range(start, number), *range(start)):
            cached = self._ensured(request(place), 0.0, to_array, from_array, recent)
            if cached is None:
                later.append(place)
            elif not cached:
                break
        for place in later:
            self._ensured(request(place), self.patience, to_array, from_array, recent)
        return self._counts["fetched"] - before

    def _ensured(self, wanted: Request, patience: float, to_array: ToArray, from_array: FromArray | None, recent: int) -> bool | None:
        """Whether a sample is cached now, without eviction of what has been used since a time; None if others are about to fetch it."""
        self._enter()
        names = _names(wanted)
        if self._is_there(names):
            return True
        if not (self._has_memory() or self._disk.accepts()):
            return False
        with self._lock(names[0], patience) as state:
            if state == BUSY and patience == 0.0:
                return None
            if not self._is_there(names):
                self._brought(wanted, names, to_array, from_array, None, recent)
        return self._is_there(names)

    def _is_there(self, names: tuple[Name, Name]) -> bool:
        return self._disk.has(names[0]) or (self._memory is not None and self._memory.has(names[1]))

    def _sample(self, wanted: Request, to_array: ToArray, from_array: FromArray | None, check: Check = None) -> Any:
        self._enter()
        names = _names(wanted)
        kept = self._found("memory", wanted, names, from_array, check)
        if kept is not None:
            return kept.sample
        if not self._has_memory():
            kept = self._found("disk", wanted, names, from_array, check)
            if kept is not None:
                return _decoded(wanted, kept.sample)
        if self._has_memory() or self._disk.accepts():
            with self._lock(names[0], self.patience):
                return self._brought(wanted, names, to_array, from_array, check)
        return self._brought(wanted, names, to_array, from_array, check)

    def _brought(
        self,
        wanted: Request,
        names: tuple[Name, Name],
        to_array: ToArray,
        from_array: FromArray | None,
        check: Check,
        unused_since: int | None = None,
    ) -> Any:
        """A sample, which is kept at all levels that take it."""
        kept = self._found("memory", wanted, names, from_array, check)
        if kept is not None:
            return kept.sample
        kept = self._found("disk", wanted, names, from_array, check)
        if kept is None:
            fetched = wanted.fetch()
            parts = pack(fetched, to_array)
            self._count("fetched")
            self._disk.put(names[0], parts, unused_since)
            content = _joined(parts)
            kept = _Kept(content, _restored(content, from_array))
        sample = _decoded(wanted, kept.sample)
        if self._has_memory():
            parts = [kept.content] if wanted.decode is None else pack(sample, to_array)
            cast(Level, self._memory).put(names[1], parts, unused_since)
        return sample

    def _found(self, where: str, wanted: Request, names: tuple[Name, Name], from_array: FromArray | None, check: Check) -> _Kept | None:
        """What a level has of a sample; None if it has none, or one that is damaged, which is gone then."""
        level = self._memory if where == "memory" else self._disk
        name, decoded = names[level is self._memory], where == "memory" and wanted.decode is not None
        content = None if level is None else level.get(name)
        if level is None or content is None:
            return None
        try:
            if isinstance(content, np.ndarray):
                kept = _Kept(content, unpack(content, from_array))
                if check is None or decoded or check(kept.sample):
                    self._count(where)
                    return kept
        except Damaged:
            pass
        level.drop(name)
        self._count("damaged")
        return None

    def _has_memory(self) -> bool:
        return self._memory is not None and self._memory.accepts()

    def _lock(self, name: Name, patience: float) -> contextlib.AbstractContextManager[str]:
        """The lock of a sample, where the processes of this host meet."""
        folder = self._disk if self._disk.accepts() or self._memory is None else self._memory
        return folder.locks.held(name.number, patience)

    def _count(self, what: str) -> None:
        with self._guard:
            self._counts[what] += 1

    def _enter(self) -> None:
        """Clear what killed processes have left, and enter the memory; once."""
        if self._entered:
            return
        with self._guard:
            if self._entered:
                return
            with contextlib.suppress(OSError):
                if self.disk_bytes:
                    self.folder.mkdir(parents=True, exist_ok=True)
            self._disk.clear_left()
            if self.memory_bytes:
                try:
                    named = hashlib.blake2b(os.fsencode(self.folder.resolve()), digest_size=8).hexdigest()
                    self._shared = SharedFolder(named, self._memory_root)
                    self._memory = Level(self._shared.path, self.memory_bytes, room=_Room(), verified=False)
                except OSError as error:
                    why = error.strerror or error
                    warnings.warn(f"no shared memory for samples: {why}; they come from the disk", RuntimeWarning, stacklevel=4)
            self._entered = True


class _Room:
    """Whether the system has memory for so many bytes more: who takes more is killed."""

    def __init__(self) -> None:
        self._credit = 0.0  # bytes that may be taken before it is asked again

    def __call__(self, nbytes: int) -> bool:
        if self._credit < nbytes:
            left = memory_left() - _MARGIN
            if left < nbytes:
                return False
            self._credit = min(left, nbytes + _CREDIT)
        self._credit -= nbytes
        return True


def _names(wanted: Request) -> tuple[Name, Name]:
    """Of what the store gives, and of what becomes of it."""
    stored = Name.of(wanted.key, wanted.version)
    if wanted.decode is None:
        return stored, stored
    return stored, Name.of(f"{wanted.key}\0{_code_of(wanted.decode)}", wanted.version)


def _code_of(function: Callable[[Any], Any]) -> str:
    try:
        return _known_code_of(function)
    except TypeError:  # it has no hash
        return _known_code_of.__wrapped__(function)


@lru_cache(maxsize=256)
def _known_code_of(function: Callable[[Any], Any]) -> str:
    """A name of what a function does: where it is from, its code, and what it has bound; of its own where that cannot be told."""
    code = getattr(function, "__code__", None)
    try:
        if code is None:
            return hashlib.blake2b(pickle.dumps(function)).hexdigest()
        owner: Any = function
        bound = [getattr(owner, "__self__", None), *(cell.cell_contents for cell in owner.__closure__ or ())]
        state = pickle.dumps((owner.__module__, owner.__qualname__, bound, owner.__defaults__, owner.__kwdefaults__, _outline(code)))
        return hashlib.blake2b(state).hexdigest()
    except Exception:  # pickles raise what they like
        return f"not shared {secrets.token_hex(16)}"


def _outline(code: CodeType) -> tuple[Any, ...]:
    """What is executed, without where it is written."""
    constants = [_outline(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return code.co_code, code.co_names, constants


def _decoded(wanted: Request, stored: Any) -> Any:
    return stored if wanted.decode is None else wanted.decode(stored)


def _restored(content: NDArray[np.uint8], from_array: FromArray | None) -> Any:
    """A sample of which these bytes have just been made."""
    try:
        return unpack(content, from_array)
    except Damaged as fault:
        raise DatasetError(f"a sample cannot be cached: {fault}") from None


def _array_in(file: int, sample: NDArray[Any]) -> int | None:
    """Where in the file of an entry this array begins; None if the entry is of something else."""
    head = b"".join(pack(sample)[:2])
    begin = first_array(head, sample.nbytes)
    whole = os.pread(file, len(head), 0) == head and os.fstat(file).st_size >= begin + sample.nbytes
    return begin if whole else None


def _joined(parts: list[Any]) -> NDArray[np.uint8]:
    """Parts behind each other, in memory of their own."""
    return np.frombuffer(bytearray().join(parts), np.uint8)


_caches: weakref.WeakSet[DataCache] = weakref.WeakSet()


def _begin_anew() -> None:
    """In a forked process: locks of threads that are not there may be held, and the use of the memory is the parent's."""
    for cache in _caches:
        cache._reset()


os.register_at_fork(after_in_child=_begin_anew)
