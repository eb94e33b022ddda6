"""DataCache by processes of one host, without MPI: right samples whatever happens, each fetched once, within the bounds."""

import errno
import fcntl
import functools
import math
import mmap
import os
import pickle
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from thoroughness import examples

from sparseallreduce.data_cache import CachedFile, Counts, DataCache, FileVersion, Request, StoredFiles
from sparseallreduce.data_cache import cache as cache_module
from sparseallreduce.data_cache import files as files_module
from sparseallreduce.data_cache import level as level_module
from sparseallreduce.data_cache.level import Level, Name
from sparseallreduce.data_cache.locks import BUSY, HELD, Locks
from sparseallreduce.data_cache.memory import SharedFolder
from sparseallreduce.data_cache.samples import pack, unpack
from sparseallreduce.errors import AlgorithmError, DatasetError

PAGE = mmap.PAGESIZE
LEVELS = {"disk": {}, "memory": {"disk_bytes": 0, "memory_bytes": 1 << 24}, "both": {"memory_bytes": 1 << 24}}


@pytest.fixture
def place():
    """The folder of a cache, and one in the place of the memory's file system; in memory, as disks may keep a test waiting."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        (Path(folder) / "memory").mkdir()
        yield Path(folder)


def cached(place, **options):
    return DataCache(place / "cache", memory=place / "memory", **options)


def value(index):
    return np.full(500, index, np.int64), {"label": index}


def check(sample, index):
    np.testing.assert_array_equal(sample[0], value(index)[0])
    assert sample[1] == {"label": index}


class Store:
    """Notes in a file, which all processes see, what it was asked for."""

    def __init__(self, place, seconds=0.0):
        self._log, self._seconds = place / "asked", seconds

    def request(self, index):
        return Request(f"values/{index}", lambda: self.fetch(index))

    def fetch(self, index):
        with self._log.open("a") as log:
            log.write(f"{index}\n")
        time.sleep(self._seconds)
        return value(index)

    def get(self, cache, *indices):
        for index in indices:
            sample = cache.get(f"values/{index}", lambda index=index: self.fetch(index))
            check(sample, index)
        return sample

    @property
    def asked(self):
        return sorted(map(int, self._log.read_text().split())) if self._log.exists() else []


@contextmanager
def forked(function):
    """A process that calls a function, and ends; killed at the end of the block if it has not."""
    process = os.fork()
    if not process:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    ended = []
    try:
        yield lambda: (ended.append(True), os.waitpid(process, 0)[1])[1], process
    finally:
        if not ended:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def all_of(functions):
    """Call each in a process of its own, at once."""
    if functions:
        with forked(functions[0]) as (wait, _):
            all_of(functions[1:])
            assert wait() == 0


def entries(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and len(path.name) == 30)


def used(folder):
    """Bytes of entries and of what is being written, whole pages."""
    found = [*entries(folder), *folder.rglob("writing/*")]
    return sum(-(-path.stat().st_size // PAGE) * PAGE for path in found)


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters()),
    st.binary(),
    arrays.arrays(
        st.sampled_from(["u1", "<i8", "<f4", ">f8", "?", "c16", "f2", "M8[s]", "U3", "S2"]), arrays.array_shapes(min_dims=0, min_side=0)
    ),
    st.floats(width=32).map(np.float32),
)
samples = st.recursive(
    leaves, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner), max_leaves=6
)


def alike(one, other):
    assert type(one) is type(other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


@given(samples)
def test_a_sample_comes_back_as_it_was(sample):
    assert alike(unpack(np.frombuffer(bytearray().join(pack(sample)), np.uint8)), sample)


STRANGE = [{1, 2}, object(), [np.array([None])], np.zeros(2, "i4,f4"), type("Own", (tuple,), {})()]


@pytest.mark.parametrize("strange", STRANGE, ids=lambda given: type(given).__name__)
def test_what_cannot_be_cached_is_refused(place, strange):
    cache = cached(place)
    with pytest.raises(DatasetError, match="cannot be cached"):
        cache.get("a", lambda: strange)
    assert cache.get("a", lambda: "another") == "another"


def test_arrays_of_another_order_are_kept(place):
    every_other = np.arange(24).reshape(4, 6)[::2, ::-3]
    cache = cached(place)
    for _ in range(2):
        np.testing.assert_array_equal(cache.get("a", lambda: every_other), every_other)


@pytest.mark.parametrize("levels", LEVELS)
def test_a_sample_is_fetched_once_and_is_the_callers_own(place, levels):
    store, cache = Store(place), cached(place, **LEVELS[levels])
    for _ in range(3):
        sample = store.get(cache, 1)
        sample[0][:] = -1
        sample[1].clear()
    assert store.asked == [1]
    assert cache.counts == (Counts(disk=2, fetched=1) if levels == "disk" else Counts(memory=2, fetched=1))


def test_another_process_finds_it_on_the_disk_and_then_in_memory(place):
    store = Store(place)
    all_of([lambda: store.get(cached(place), 1)])
    cache = cached(place, memory_bytes=1 << 20)
    for _ in range(2):
        store.get(cache, 1)
    assert (store.asked, cache.counts) == ([1], Counts(memory=1, disk=1))


@pytest.mark.parametrize("levels", LEVELS)
def test_another_version_is_fetched_and_takes_the_place_of_the_first(place, levels):
    cache = cached(place, **LEVELS[levels])
    asked = [cache.get("a", lambda version=version: f"content of {version}", version=version) for version in ("1", "2", "2", "1")]
    assert asked == ["content of 1", "content of 2", "content of 2", "content of 1"]
    assert cache.counts.fetched == 3 and len(entries(place)) == (2 if levels == "both" else 1)


def test_keys_of_all_kinds_are_told_apart(place):
    cache = cached(place)
    keys = ["", "a", "A", "a/b", "../a", "a\0b", "ü", "\udcff", "x" * 5000]
    for _ in range(2):
        assert [cache.get(key, lambda key=key: f"of {key}") for key in keys] == [f"of {key}" for key in keys]
    assert cache.counts == Counts(disk=len(keys), fetched=len(keys))


def damaged(content):
    """What may become of a file."""
    middle = len(content) // 2
    for position in {0, 100, middle, *range(len(content) - 60, len(content))}:
        yield content[:position] + bytes([content[position] ^ 16]) + content[position + 1 :]
    for length in (0, 1, *range(50, 60), middle, len(content) - 1):  # some as long as the record behind a content, or a byte less
        yield content[:length]
    yield from (content + b"\0", content + content, b"\0" * len(content), content[: middle - 99] + bytes(99) + content[middle:])


def test_what_is_damaged_on_the_disk_is_fetched_again(place):
    store, cache = Store(place), cached(place)
    store.get(cache, 1)
    (path,) = entries(place)
    whole = path.read_bytes()
    forms = list(damaged(whole))
    for form in forms:
        path.write_bytes(form)
        store.get(cache, 1)
        assert path.read_bytes() == whole
    assert cache.counts == Counts(fetched=len(forms) + 1, damaged=len(forms))


def test_an_entry_of_another_sample_is_not_taken_for_it(place):
    store, cache = Store(place), cached(place)
    store.get(cache, 1)
    (first,) = entries(place)
    store.get(cache, 2)
    (second,) = set(entries(place)) - {first}
    shutil.copy(second, first)
    store.get(cache, 1)
    first.unlink()
    first.mkdir()
    with pytest.warns(RuntimeWarning, match="cannot cache"):
        store.get(cache, 1)


def test_the_least_recently_used_goes_first_and_the_bound_holds(place):
    store, cache = Store(place), cached(place, disk_bytes=4 * 2 * PAGE)  # a value takes two pages
    for index in (0, 1, 2, 3, 0, 4, 0, 5):
        store.get(cache, index)
        assert used(place / "cache") <= cache.disk_bytes
    assert cache.counts.fetched == 6
    for index in (0, 3, 4, 5):
        store.get(cache, index)
    assert cache.counts.fetched == 6
    store.get(cache, 1)
    assert cache.counts.fetched == 7


def test_small_entries_are_evicted_many_at_once(place):
    cache = cached(place, disk_bytes=200 * PAGE)
    for index in range(201):
        cache.get(str(index), lambda: 0)
    assert len(entries(place)) == 200 - 13  # 12.5 pages are a sixteenth


def test_a_smaller_bound_of_another_job_holds_when_that_adds(place):
    store, large, small = Store(place), cached(place), cached(place, disk_bytes=2 * 2 * PAGE)
    for index in range(6):
        store.get(large, index)
    store.get(small, 6)
    assert used(place / "cache") <= small.disk_bytes
    store.get(large, 6)
    assert store.asked == list(range(7))


@pytest.mark.parametrize("options", [{"disk_bytes": 0}, {"disk_bytes": PAGE}, {"disk_bytes": 0, "memory_bytes": PAGE}])
def test_what_is_larger_than_the_bound_is_not_kept(place, options):
    store, cache = Store(place), cached(place, **options)
    for _ in range(2):
        store.get(cache, 1)
    assert store.asked == [1, 1] and not entries(place)
    assert cache.fill(3, store.request) <= 3 and (place / "cache").exists() == (options["disk_bytes"] > 0)


def test_bounds_are_checked(place):
    for options in ({"disk_bytes": -1}, {"memory_bytes": -1}, {"patience": math.nan}):
        with pytest.raises(AlgorithmError, match="at least 0"):
            cached(place, **options)


def test_memory_that_is_short_is_not_taken(place, monkeypatch):
    monkeypatch.setattr("sparseallreduce.data_cache.cache.memory_left", lambda: 1 << 20)
    store, cache = Store(place), cached(place, memory_bytes=1 << 24)
    for _ in range(2):
        store.get(cache, 1)
    assert cache.counts == Counts(disk=1, fetched=1)


def test_what_is_left_of_memory_is_asked_again_after_some_was_taken(monkeypatch):
    """So that in all no more is taken than there was, whatever the sizes."""
    monkeypatch.setattr(cache_module, "_MARGIN", 0)
    left = [5 * cache_module._CREDIT]
    monkeypatch.setattr(cache_module, "memory_left", lambda: left[0])
    room, nbytes = cache_module._Room(), cache_module._CREDIT // 2
    taken = 0
    while room(nbytes):
        taken += nbytes
        left[0] -= nbytes
        assert left[0] >= 0
    assert taken == 5 * cache_module._CREDIT


def test_a_process_without_standard_input_finds_what_is_on_the_disk(place):
    """Its files have the number 0."""
    level, name = Level(place / "cache", 4 * PAGE), Name.of("a", "")
    assert level.put(name, [b"content"])

    def read():
        os.close(0)
        assert level.get(name).tobytes() == b"content"

    all_of([read])


def test_what_is_too_large_with_its_record_evicts_nothing(place):
    level = Level(place / "cache", 2 * PAGE)
    first, second = Name.of("first", ""), Name.of("second", "")
    assert level.put(first, [bytes(10)]) is True
    assert level.put(second, [bytes(2 * PAGE)]) is False
    assert level.has(first) and not level.has(second)


def test_a_link_of_an_entry_to_a_large_file_counts_as_a_link(place):
    level, first, second = Level(place / "cache", 4 * PAGE), Name.of("first", ""), Name.of("second", "")
    assert level.put(first, [bytes(10)])
    (place / "large").write_bytes(bytes(8 * PAGE))
    os.utime(place / "large", ns=(0, time.time_ns() + 10**12))
    (place / "cache" / "ab").mkdir(exist_ok=True)
    (place / "cache" / "ab" / ("c" * 30)).symlink_to(place / "large")
    (place / "cache" / "usage").unlink()  # so that all is counted
    assert level.put(second, [bytes(10)])
    assert level.has(first) and level.has(second) and (place / "large").exists()


@pytest.mark.parametrize("form", ["folder", "pipe", "link"])
def test_a_count_that_is_no_file_is_replaced(place, form):
    store, cache, usage = Store(place), cached(place), place / "cache" / "usage"
    (place / "cache").mkdir()
    if form == "folder":
        usage.mkdir()
    elif form == "pipe":
        os.mkfifo(usage)
    else:
        (place / "elsewhere").write_bytes(b"of another")
        usage.symlink_to(place / "elsewhere")
    for _ in range(2):
        store.get(cache, 1)
    assert store.asked == [1] and usage.is_file() and not usage.is_symlink()
    assert form != "link" or (place / "elsewhere").read_bytes() == b"of another"
    number = usage.stat().st_ino
    store.get(cache, 2)
    assert usage.stat().st_ino == number, "a count that is a file is written to in its place"


@pytest.mark.parametrize("call", ["pwritev", "replace", "open", "truncate"])
@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_cannot_be_written_to_is_one_warning(place, monkeypatch, call, reason):
    real = getattr(os, call)

    def fails(path, *given):
        if call == "open" and "writing" not in str(path):
            return real(path, *given)
        raise OSError(reason, os.strerror(reason))

    store, cache = Store(place), cached(place)
    store.get(cache, 0)
    monkeypatch.setattr(os, call, fails)
    with pytest.warns(RuntimeWarning, match=f"cannot cache samples in {place / 'cache'}") as warned:
        store.get(cache, *(1, 1, 2, 0))
    assert len(warned) == 1 and store.asked == [0, 1, 1, 2] and not list(place.rglob("writing/*"))
    assert cache.fill(4, store.request) == 0


def test_after_a_while_a_disk_is_tried_again(place, monkeypatch):
    store, cache = Store(place), cached(place)
    monkeypatch.setattr(level_module, "_RETRY", 0.0)
    with monkeypatch.context() as full:
        full.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.warns(RuntimeWarning, match="cannot cache"):
            store.get(cache, 1)
    for _ in range(2):
        store.get(cache, 1)
    assert store.asked == [1, 1]


def test_without_a_disk_samples_come_from_memory(place):
    (place / "cache").write_text("not a folder")
    store, cache = Store(place), cached(place, memory_bytes=1 << 20)
    with pytest.warns(RuntimeWarning, match="cannot cache samples") as warned:
        store.get(cache, *(1, 1, 2, 2))
    assert (store.asked, len(warned)) == ([1, 2], 1)


@pytest.mark.parametrize("hindrance", ["missing", "of others", "a link"])
def test_without_shared_memory_samples_come_from_the_disk(place, hindrance):
    own = place / "memory" / f"sparseallreduce-{os.geteuid()}"
    if hindrance == "missing":
        (place / "memory").rmdir()
    elif hindrance == "of others":
        own.mkdir()
        own.chmod(0o755)
    else:
        (place / "elsewhere").mkdir(mode=0o700)
        own.symlink_to(place / "elsewhere")
    store, cache = Store(place), cached(place, memory_bytes=1 << 20)
    with pytest.warns(RuntimeWarning, match="no shared memory") as warned:
        store.get(cache, 1, 1)
    assert (store.asked, len(warned), cache.counts) == ([1], 1, Counts(disk=1, fetched=1))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting takes root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_is_full_and_memory_that_is_full(place, small_disk):
    store = Store(place)
    for options in ({}, {"disk_bytes": 0, "memory_bytes": 1 << 24}):
        cache = DataCache(small_disk, memory=small_disk, **options)
        with pytest.warns(RuntimeWarning, match="No space left") as warned:
            store.get(cache, *(*range(10), *range(10)))
        assert len(warned) == 1 and 13 <= cache.counts.fetched < 20 and not list(small_disk.rglob("writing/*"))
        cache.close()
        shutil.rmtree(small_disk / "writing", ignore_errors=True)
        for entry in entries(small_disk):
            entry.unlink()


@pytest.mark.parametrize("call", ["pwritev", "replace"])
@pytest.mark.parametrize("levels", ["disk", "memory"])
def test_a_process_killed_while_it_writes_leaves_nothing_behind(place, monkeypatch, call, levels):
    store = Store(place)

    def kills(*given):
        if call == "pwritev":
            os.pwrite(given[0], bytes(memoryview(given[1][0])[:5]), 0)
        os.kill(os.getpid(), signal.SIGKILL)

    def write():
        monkeypatch.setattr(os, call, kills)
        store.get(cached(place, **LEVELS[levels]), 1)

    with forked(write) as (wait, _):
        assert wait() == signal.SIGKILL
    assert len(list(place.rglob("writing/*"))) == 1 and not entries(place)
    cache = cached(place, **LEVELS[levels])
    for _ in range(2):
        store.get(cache, 1)
    assert store.asked == [1, 1] and not list(place.rglob("writing/*"))


@pytest.mark.parametrize("levels", LEVELS)
def test_who_waits_for_a_killed_process_fetches_itself(place, levels):
    slow, store = Store(place, 100), Store(place)
    with forked(lambda: slow.get(cached(place, **LEVELS[levels]), 1)) as (wait, process):
        until(lambda: store.asked)
        threading.Timer(0.05, os.kill, (process, signal.SIGKILL)).start()
        store.get(cached(place, **LEVELS[levels]), 1)
        assert wait() == signal.SIGKILL and store.asked == [1, 1]


def test_who_waits_for_a_stopped_process_does_so_for_a_while(place):
    slow, store = Store(place, 100), Store(place)
    with forked(lambda: slow.get(cached(place), 1)) as (_, process):
        until(lambda: store.asked)
        os.kill(process, signal.SIGSTOP)
        store.get(cached(place, patience=0.05), 1)
    assert store.asked == [1, 1]


def test_a_counter_that_a_stopped_process_keeps_locked_is_not_waited_for_each_time(place, monkeypatch):
    monkeypatch.setattr(level_module, "_PATIENCE", 0.05)
    store, cache = Store(place), cached(place)
    (place / "cache").mkdir()
    with Locks(place / "cache/lock").held(level_module._USAGE_LOCK, 0) as state:
        assert state == HELD
        with pytest.warns(RuntimeWarning, match="kept it locked"):
            store.get(cache, 1)
        begin = time.monotonic()
        store.get(cache, 2)
        assert time.monotonic() < begin + 10


@pytest.mark.parametrize("levels", LEVELS)
def test_processes_of_a_host_fetch_each_sample_once(place, levels):
    store, cache = Store(place, 0.001), cached(place, **LEVELS[levels])
    holder = cached(place, **LEVELS[levels])
    holder.get("kept", lambda: 0)  # so that memory outlives who comes first

    def read(rank):
        for index in np.random.default_rng(rank).permutation(20):
            store.get(cache, int(index))

    all_of([lambda rank=rank: read(rank) for rank in range(4)])
    assert store.asked == list(range(20))


def test_threads_fetch_each_sample_once(place):
    store, cache = Store(place, 0.001), cached(place, memory_bytes=1 << 20)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: store.get(cache, index % 10), range(80)))
    assert store.asked == list(range(10)) and sum(cache.counts) == 80


def test_filling_is_shared_out(place):
    store = Store(place, 0.001)

    def fill():
        cache = cached(place)
        (place / f"filled-{cache.fill(40, store.request)}-{os.getpid()}").touch()
        assert len(entries(place)) == 40  # all are there when it returns

    all_of([fill] * 3)
    shares = [int(path.name.split("-")[1]) for path in place.glob("filled-*")]
    assert store.asked == list(range(40)) and sum(shares) == 40 and len(shares) == 3
    assert cached(place).fill(40, store.request) == 0 == cached(place).fill(0, store.request)


@pytest.mark.parametrize("levels", ["disk", "memory"])
def test_filling_ends_where_there_is_no_more_room_and_makes_room_among_the_old(place, levels):
    bounds = {"disk_bytes": 10 * 2 * PAGE} if levels == "disk" else {"disk_bytes": 0, "memory_bytes": 10 * 2 * PAGE}
    store, holder = Store(place), cached(place, **bounds)
    store.get(holder, *range(100, 110))
    for entry in entries(place):
        os.utime(entry, (0, 0))
    all_of([lambda: cached(place, **bounds).fill(40, store.request)] * 2)
    fetched = [index for index in store.asked if index < 100]
    assert 10 <= len(fetched) <= 14 and len(set(fetched)) >= 10  # a rank tries one that has no room
    assert used(place) <= 10 * 2 * PAGE


def test_filling_evicts_what_was_last_used_ten_minutes_ago_or_earlier(place, monkeypatch):
    store, cache, now = Store(place), cached(place, disk_bytes=2 * 2 * PAGE), time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    store.get(cache, 100)
    store.get(cache, 101)
    for number, entry in enumerate(entries(place)):
        os.utime(entry, ns=(0, now - 600 * 10**9 - number))  # one not quite so long ago
    assert cache.fill(2, store.request) == 2  # for the second there is no room
    assert len(entries(place)) == 2 and sum(cache._is_there((Name.of(f"values/{index}", ""),) * 2) for index in (0, 1)) == 1


def test_what_is_evicted_stays_readable_for_who_has_it(place):
    level = Level(place / "cache", 2 * PAGE)
    first, second = Name.of("first", ""), Name.of("second", "")
    assert level.put(first, [b"x" * 5000]) and not level.put(second, [b"y" * 5000], unused_since=0)
    with level._opened(first) as (file, size):
        mapped = mmap.mmap(file, size, prot=mmap.PROT_READ)
        assert level.put(second, [b"y" * 5000]) and not level.has(first)
        assert os.pread(file, 5000, 0) == mapped[:5000] == b"x" * 5000


def test_evicting_while_others_read_gives_no_wrong_sample(place):
    store = Store(place)

    def read(rank):
        cache = cached(place, disk_bytes=4 * 2 * PAGE, memory_bytes=3 * 2 * PAGE)
        for index in np.random.default_rng(rank).integers(0, 8, 150):
            store.get(cache, int(index))

    all_of([lambda rank=rank: read(rank) for rank in range(3)])
    assert used(place / "cache") <= 4 * 2 * PAGE


def test_a_lost_count_is_made_up_for(place):
    store, cache = Store(place), cached(place, disk_bytes=4 * 2 * PAGE)
    for index in range(4):
        store.get(cache, index)
    for form in (None, b"", b"short", b"\xff" * 8):
        (place / "cache/usage").unlink() if form is None else (place / "cache/usage").write_bytes(form)
        store.get(cache, len(store.asked))
        assert used(place / "cache") <= cache.disk_bytes and len(entries(place)) == 4


def test_other_files_in_the_folder_are_left_alone(place):
    (place / "cache/ab").mkdir(parents=True)
    others = [place / "cache/notes.txt", place / "cache/ab/notes.txt", place / "cache/ab" / ("X" * 30)]
    for other in others:
        other.write_bytes(bytes(PAGE))
    store, cache = Store(place), cached(place, disk_bytes=2 * PAGE)
    for index in range(3):
        store.get(cache, index)
    assert all(other.exists() for other in others) and len(entries(place)) == 2  # one of them is not an entry


def test_memory_is_there_as_long_as_a_process_uses_it(place):
    store, options = Store(place), {"disk_bytes": 0, "memory_bytes": 1 << 20}
    first, second = cached(place, **options), cached(place, **options)
    store.get(first, 1)
    store.get(second, 1)
    first.close()
    assert entries(place)
    all_of([lambda: store.get(cached(place, **options), 1), lambda: store.get(second, 1), second.close])
    store.get(second, 1)
    second.close()
    assert store.asked == [1] and not list((place / "memory").glob("*/*"))
    store.get(second, 1)
    assert store.asked == [1, 1] and second.counts.memory == 2
    second = None
    assert not list((place / "memory").glob("*/*"))


def test_memory_of_killed_processes_is_removed_by_the_next(place):
    def kill():
        cache = DataCache(place / "another", memory=place / "memory", memory_bytes=1 << 20)
        Store(place).get(cache, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    with forked(kill) as (wait, _):
        assert wait() == signal.SIGKILL
    (place / "memory" / f"sparseallreduce-{os.geteuid()}" / "empty").mkdir()
    assert len(list((place / "memory").glob("*/*"))) == 2
    cache = cached(place, memory_bytes=1 << 20)
    Store(place).get(cache, 1)
    assert len(list((place / "memory").glob("*/*"))) == 1


def test_processes_enter_and_leave_a_folder_at_once(place):
    def enter_and_leave():
        for _ in range(100):
            folder = SharedFolder("name", place / "memory")
            (folder.path / "used").touch()
            folder.leave()

    all_of([enter_and_leave] * 3)
    assert not list((place / "memory").glob("*/*"))


@pytest.mark.parametrize("again", [False, True], ids=["gone", "made again"])
def test_a_folder_that_is_removed_as_it_is_entered_is_entered_anew(place, monkeypatch, again):
    """Between opening the file with the lock and taking it: whoever has it then holds the lock of a file that is not there."""
    flock, struck = fcntl.flock, []
    own = place / "memory" / f"sparseallreduce-{os.geteuid()}" / "name"

    def removed_before(file, how):
        if not struck and how & fcntl.LOCK_SH:
            struck.append(how)
            (own / "users").unlink()
            own.rmdir()
            if again:
                own.mkdir()
                (own / "users").touch()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    folder = SharedFolder("name", place / "memory")
    assert struck and own.is_dir()
    (own / "used").touch()
    SharedFolder("another", place / "memory").leave()  # which removes what nobody uses
    assert (own / "used").exists()
    folder.leave()
    assert not own.exists()


def test_who_leaves_a_folder_that_others_have_made_anew_leaves_theirs_alone(place):
    first = SharedFolder("name", place / "memory")
    shutil.rmtree(first.path)  # as who clears away shared memory does
    second = SharedFolder("name", place / "memory")
    (second.path / "used").touch()
    first.leave()
    assert (second.path / "used").exists()
    second.leave()
    assert not second.path.exists()


def test_what_is_being_written_counts(place, monkeypatch):
    """Also where what is there has to be counted anew."""
    level, write, begun, kept = Level(place / "level", 4 * PAGE), level_module._write, [], []
    first, second, third = (Name.of(key, "1") for key in "abc")

    def while_writing(file, views):
        begun.append(True)
        if len(begun) == 1:
            (place / "level" / "usage").unlink()
            kept.append(level.put(second, [bytes(PAGE // 2)]))
            (place / "level" / "usage").unlink()
            kept.append(level.put(third, [bytes(PAGE)]))  # with its record two pages
            assert used(place / "level") <= 4 * PAGE
        write(file, views)

    monkeypatch.setattr(level_module, "_write", while_writing)
    assert level.put(first, [bytes(2 * PAGE - 100)])
    assert kept == [True, True]
    assert level.has(first) and level.has(third) and not level.has(second)


def test_a_lock_is_not_kept_by_a_process_forked_meanwhile(place):
    with Locks(place / "lock").held(7, 0) as state, forked(lambda: time.sleep(100)):
        assert state == HELD
        with Locks(place / "lock").held(7, 0.01) as other, Locks(place / "lock").held(8, 0) as another:
            assert (other, another) == (BUSY, HELD)
    with Locks(place / "lock").held(7, 0) as state, forked(lambda: time.sleep(100)) as (_, process):
        assert os.path.exists(f"/proc/{process}")
        ended = state == HELD
    assert ended
    held = Locks(place / "lock").held(9, 0)
    assert held.__enter__() == HELD
    with forked(lambda: time.sleep(100)):
        held.__exit__(None, None, None)
        with Locks(place / "lock").held(9, 5) as state:
            assert state == HELD


def test_a_cache_is_pickled(place):
    store, cache = Store(place), cached(place, memory_bytes=1 << 20, patience=3.0)
    store.get(cache, 1)
    other = pickle.loads(pickle.dumps(cache))
    store.get(other, 1)
    assert (other.counts, other.patience, store.asked) == (Counts(memory=1), 3.0, [1])


def test_a_forked_process_counts_its_own_requests(place):
    store, cache = Store(place), cached(place, memory_bytes=1 << 20)
    store.get(cache, 1)

    def read():
        assert cache.counts == Counts()
        store.get(cache, 1)
        assert cache.counts == Counts(memory=1)

    all_of([read])
    assert cache.counts == Counts(fetched=1)


def test_what_fetching_raises_is_raised_and_leaves_nothing_locked(place):
    store, cache = Store(place), cached(place)

    def fails():
        raise ConnectionError("the store is away")

    for _ in range(2):
        with pytest.raises(ConnectionError, match="the store is away"):
            cache.get("values/1", fails)
    store.get(cache, 1)


def double(array):
    array *= 2  # in its place, which is of nobody else's
    return array


def scaled(array, by):
    return array * by


def multiplied(by):
    return lambda array: array * by


class Scaling:
    __hash__ = None

    def __init__(self, by):
        self.by = by

    def __call__(self, array):
        return array * self.by

    def apply(self, array):
        return self(array)


@pytest.mark.parametrize("levels", LEVELS)
def test_what_is_decoded_is_kept_in_memory(place, levels):
    cache, calls = cached(place, **LEVELS[levels]), []

    def get(decode):
        return cache.get("a", lambda: calls.append(0) or np.arange(4), decode=decode).tolist()

    lock = threading.Lock()
    for _ in range(3):
        assert get(double) == [0, 2, 4, 6] and get(None) == [0, 1, 2, 3]
        for by in (3, 4):  # one name, and one code
            assert get(functools.partial(scaled, by=by)) == get(multiplied(by)) == get(Scaling(by)) == [0, by, 2 * by, 3 * by]
            assert get(Scaling(by).apply) == [0, by, 2 * by, 3 * by]
        assert get(lambda array: array + 1) == [1, 2, 3, 4] and get(lambda array: array + 2) == [2, 3, 4, 5]
        assert get(lambda array: array + lock.locked()) == [0, 1, 2, 3]  # which no pickle has
        assert get(lambda array: array + 9 + lock.locked()) == [9, 10, 11, 12]
    assert len(calls) == 1 or levels == "memory"


def test_decoding_happens_once_a_host(place):
    calls = place / "calls"

    def decode(array):
        with calls.open("a") as file:
            file.write("x")
        return array + 1

    cache = cached(place, memory_bytes=1 << 20)
    cache.get("kept", lambda: 0)
    all_of([lambda: [cache.get(str(index), lambda: np.zeros(3), decode=decode) for index in range(10)]] * 3)
    assert len(calls.read_text()) == 10


@settings(max_examples=examples(20))
@given(data=st.data())
def test_a_cached_file_reads_as_the_file(tmp_path_factory, data):
    size = data.draw(st.sampled_from([0, 1, 99, 100, 101, 1000, PAGE - 1, PAGE, 3 * PAGE + 5]))
    content = np.random.default_rng(size).bytes(size)
    folder = tmp_path_factory.getbasetemp() / "cached-file"
    folder.mkdir(exist_ok=True)
    (folder / str(size)).write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        piece = data.draw(st.sampled_from([PAGE, 100]))
        patch.setattr(files_module, "PIECE", piece)
        with CachedFile(folder / str(size), DataCache(folder / "cache")) as file, (folder / str(size)).open("rb") as real:
            for _ in range(5):
                place, length = data.draw(st.integers(0, size + 9)), data.draw(st.integers(-1, size + 9))
                assert file.seek(place) == real.seek(place)
                read, expected = file.read(length), real.read(length)
                assert expected.startswith(read) and bool(read) == bool(expected) and (length >= 0 or read == expected)
                assert file.tell() <= max(size, place)
            assert file.seek(0, os.SEEK_END) == size
            assert file.read_at(0, size).tobytes() == content
            begin = data.draw(st.integers(0, size))
            if piece == PAGE:
                assert file.map_at(begin, size - begin).tobytes() == content[begin:]
                with pytest.raises(EOFError):
                    file.map_at(begin, size - begin + 1)
            with pytest.raises(EOFError):
                file.read_at(0, size + 1)


def test_a_mapped_file_stays_readable_when_it_is_evicted(place, monkeypatch):
    monkeypatch.setattr(files_module, "PIECE", PAGE)
    monkeypatch.setattr(files_module, "MOST_PIECES", 8)  # so that a piece is two pages
    content = np.random.default_rng(0).bytes(16 * PAGE + 7)
    (place / "samples").write_bytes(content)
    for options in ({}, {"disk_bytes": 8 * PAGE}, {"disk_bytes": PAGE}, {"disk_bytes": 0, "memory_bytes": 1 << 20}):
        with cached(place, **options) as cache:
            mapped = CachedFile(place / "samples", cache).map_at(5, 16 * PAGE)
            cached(place, disk_bytes=2 * PAGE).get("another", lambda: 0)
            assert len(entries(place)) <= 1 or options.get("memory_bytes")
            assert mapped.tobytes() == content[5 : 5 + 16 * PAGE] and not mapped.flags.writeable


def test_a_file_that_has_changed_is_read_anew_and_never_mixed(place, monkeypatch):
    monkeypatch.setattr(files_module, "PIECE", 10)
    path, cache = place / "samples", cached(place)
    path.write_bytes(b"a" * 25)
    version = FileVersion.of(path)
    file = CachedFile(path, cache, version)
    assert file.read(10) == b"a" * 10
    path.write_bytes(b"b" * 25)
    os.utime(path, ns=(0, version.modified + 1))
    with pytest.raises(DatasetError, match="has changed"):
        file.read()
    assert CachedFile(path, cache).readall() == b"b" * 25
    path.write_bytes(b"b" * 15)
    with pytest.raises(DatasetError, match="has changed"):
        CachedFile(path, DataCache(place / "other"), FileVersion(25, FileVersion.of(path).modified)).readall()


def test_stored_files_know_their_version(place):
    (place / "a").write_bytes(b"first")
    files, cache = StoredFiles([place / "a"]), cached(place)

    def get(files):
        return cache.get("0", lambda: files[0], version=files.version(0))

    assert get(files) == b"first"
    (place / "a").write_bytes(b"second")
    assert get(files) == b"first" and get(pickle.loads(pickle.dumps(files))) == b"second" == StoredFiles([place / "a"])[0]
    with pytest.raises(DatasetError, match="has changed"):
        files[0]


def test_warnings_are_not_repeated_by_each_request(place):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (place / "cache").write_text("")
        cache = DataCache(place / "cache", memory=place / "none", memory_bytes=1 << 20)
        for index in range(5):
            Store(place).get(cache, index)
    assert len(caught) == 2
