"""DataCache: cache data of a slow store on the local disk and in shared memory, fetched once by all processes of a host together."""

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
_RECENT = 600 * 10**9  # ns: samples used since then are not evicted by `fill`, so that processes do not evict each other's
_MARGIN = 1 << 28  # bytes of memory left for other purposes
_CREDIT = 1 << 26  # bytes after which free memory is checked again


class Counts(NamedTuple):
    """How the requests of a process were served, in samples."""

    memory: int = 0  # found in shared memory
    disk: int = 0  # found on the disk
    fetched: int = 0  # fetched from the store
    damaged: int = 0  # entries that did not match their checksums or were not valid samples, and were fetched again


class Request(NamedTuple):
    """A sample to take from the cache, or else from the store.

    ``fetch()`` gets it from the store; ``decode`` converts that to the sample that is kept in memory and returned. ``key`` identifies it in
    all caches of a folder. A sample cached under another ``version`` is fetched again.
    """

    key: str
    fetch: Callable[[], Any]
    version: str = ""
    decode: Callable[[Any], Any] | None = None


class _Kept(NamedTuple):
    """An entry found in the cache: its bytes, and the sample in them."""

    content: NDArray[np.uint8]
    sample: Any


class DataCache:
    """A cache for samples of slow stores, on the disk of this host and in memory shared by its processes.

    A request has three steps. A sample in memory is copied from there. Otherwise the process takes the lock of the sample and looks again,
    since another process may have cached it meanwhile. If not, it reads the sample from the disk, or fetches it from the store and writes
    it to the disk; it then decodes it and puts it into memory. A host therefore fetches each sample once from its store, whichever of its
    processes request it, as long as there is room.

    Closing is optional. A cache may be pickled, and used by several threads and by forked processes.

    Parameters
    ----------
    folder : path
        Folder on a local disk, which any number of caches and jobs may share.
    disk_bytes, memory_bytes : int
        Limits of the folder, and of the memory of all caches of that folder; least recently used entries are evicted first. 0 disables a
        level. Memory is released when the last process that uses it ends.
    patience : float
        Seconds to wait for another process that is fetching the same sample, before this one fetches it as well.
    memory : path
        A file system in memory.

    Notes
    -----
    A sample consists of None, numbers, strings, bytes and NumPy arrays, in tuples, lists and dictionaries; arrays are returned as copies.

    A full or read-only disk, or a lack of memory, raises a RuntimeWarning once per process and level. Samples then come from the other
    level or
    from the store. Exceptions of ``fetch`` propagate.

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

    folder: Path
    disk_bytes: int
    memory_bytes: int
    patience: float

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
        """Release the memory if no other process uses it. A later request opens the cache again."""
        if self._shared is not None:
            self._shared.leave()
        self._shared = self._memory = None
        self._entered = False

    @property
    def counts(self) -> Counts:
        """The counts of this process, since this object was created or unpickled in it."""
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
        """Return a sample from memory, from the disk, or from the store.

        Parameters
        ----------
        key, fetch, version, decode
            As in :class:`Request`. ``decode`` functions are distinguished by their code and bound values, but not by functions that they
            call: change the version when these change.
        check : callable, optional
            Returns whether a cached sample is plausible for this key. If not, it counts as damaged, and is fetched again.
        to_array, from_array : callable, optional
            Convert leaves of other types to arrays, and back.

        Returns
        -------
        object
            The sample, as ``decode`` returns it.

        Raises
        ------
        DatasetError
            If the sample contains an unsupported type.
        Exception
            Whatever ``fetch`` or ``decode`` raise.
        """
        return self._sample(Request(key, fetch, version, decode), to_array, from_array, check)

    def open(self, key: str, fetch: Callable[[], Any], *, version: str = "", check: Check = None) -> tuple[int, int] | None:
        """Return a file descriptor for a sample that is an array, and the array's offset in the file; None if it is not cached on disk.

        The caller must close the descriptor. It, and any mapping of it, stays readable when the sample is evicted. The offset is a multiple
        of 4,096 bytes if the length of the array is.
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
        """Cache samples 0 to ``number`` - 1 together with the other processes of the host; return how many this one has fetched.

        Each process starts at a random sample, continues in order, and skips samples that are cached or being fetched by others. It returns
        when all are cached, or when there is no room for more: samples used in the last ten minutes are not evicted. Not all processes have
        to call it.
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
        """Return whether a sample is cached now, without evicting samples used since ``recent``.

        Return None if another process is fetching it.
        """
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
        """Return a sample, and store it at all levels that accept it."""
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
        """Return a sample from a level; None if it has none, or a damaged one, which is then removed."""
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
        """Return the lock of a sample, in the folder that the processes of this host share."""
        folder = self._disk if self._disk.accepts() or self._memory is None else self._memory
        return folder.locks.held(name.number, patience)

    def _count(self, what: str) -> None:
        with self._guard:
            self._counts[what] += 1

    def _enter(self) -> None:
        """Remove what killed processes have left, and open the shared memory, once."""
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
    """Checks whether the system has memory for more bytes, since exceeding it kills the process."""

    def __init__(self) -> None:
        self._credit = 0.0  # bytes that may be used before the next check

    def __call__(self, nbytes: int) -> bool:
        if self._credit < nbytes:
            left = memory_left() - _MARGIN
            if left < nbytes:
                return False
            self._credit = min(left, nbytes + _CREDIT)
        self._credit -= nbytes
        return True


def _names(wanted: Request) -> tuple[Name, Name]:
    """Return the names of the stored and of the decoded sample."""
    stored = Name.of(wanted.key, wanted.version)
    if wanted.decode is None:
        return stored, stored
    return stored, Name.of(f"{wanted.key}\0{_code_of(wanted.decode)}", wanted.version)


def _code_of(function: Callable[[Any], Any]) -> str:
    try:
        return _known_code_of(function)
    except TypeError:  # not hashable
        return _known_code_of.__wrapped__(function)


@lru_cache(maxsize=256)
def _known_code_of(function: Callable[[Any], Any]) -> str:
    """Return an identifier of a function: its module, code and bound values; a unique one if these are unknown."""
    code = getattr(function, "__code__", None)
    try:
        if code is None:
            return hashlib.blake2b(pickle.dumps(function)).hexdigest()
        owner: Any = function
        bound = [getattr(owner, "__self__", None), *(cell.cell_contents for cell in owner.__closure__ or ())]
        state = pickle.dumps((owner.__module__, owner.__qualname__, bound, owner.__defaults__, owner.__kwdefaults__, _outline(code)))
        return hashlib.blake2b(state).hexdigest()
    except Exception:  # pickling may raise anything
        return f"not shared {secrets.token_hex(16)}"


def _outline(code: CodeType) -> tuple[Any, ...]:
    """Return what a code object executes, without source positions."""
    constants = [_outline(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return code.co_code, code.co_names, constants


def _decoded(wanted: Request, stored: Any) -> Any:
    return stored if wanted.decode is None else wanted.decode(stored)


def _restored(content: NDArray[np.uint8], from_array: FromArray | None) -> Any:
    """Return the sample encoded in bytes that have just been packed."""
    try:
        return unpack(content, from_array)
    except Damaged as fault:
        raise DatasetError(f"a sample cannot be cached: {fault}") from None


def _array_in(file: int, sample: NDArray[Any]) -> int | None:
    """Return the offset of this array in an entry's file; None if the entry contains something else."""
    head = b"".join(pack(sample)[:2])
    begin = first_array(head, sample.nbytes)
    whole = os.pread(file, len(head), 0) == head and os.fstat(file).st_size >= begin + sample.nbytes
    return begin if whole else None


def _joined(parts: list[Any]) -> NDArray[np.uint8]:
    """Concatenate parts in new memory."""
    return np.frombuffer(bytearray().join(parts), np.uint8)


_caches: weakref.WeakSet[DataCache] = weakref.WeakSet()


def _begin_anew() -> None:
    """Reset all caches in a forked process, where locks of other threads may be held and the memory belongs to the parent."""
    for cache in _caches:
        cache._reset()


os.register_at_fork(after_in_child=_begin_anew)
