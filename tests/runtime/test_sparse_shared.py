"""Sums in memory that ranks share, seen by all ranks of one process: nobody reads what is not there, or loses what it was given."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import pickle
from functools import reduce
from operator import and_
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES
from thoroughness import ALL

import sparseallreduce as sar
from sparseallreduce.runtime.memory import mapping, sparse
from sparseallreduce.runtime.memory.mapping import Mapping, SharedFile
from sparseallreduce.runtime.memory.sparse import KEPT, SparseMemory
from sparseallreduce.runtime.shortcuts import sparse_shared
from sparseallreduce.runtime.shortcuts.base import FREE_BLOCKS, SPARSE_SHARED
from sparseallreduce.runtime.shortcuts.sparse_shared import SparseShared
from sparseallreduce.streams import packed
from sparseallreduce.streams.operator import SUM
from sparseallreduce.streams.reduction import Reduction

CAPACITY = 1 << 23
FIRST = 7


@pytest.fixture(autouse=True)
def small():
    with mock.patch.object(sparse, "_BYTES", CAPACITY), mock.patch.object(sparse_shared, "_LITTLE", 0):
        yield


def memories(ranks, cores=4):
    """Of ranks that have all opened one file."""
    file = os.memfd_create("sparse")
    os.ftruncate(file, SparseMemory.nbytes(ranks))
    files = [SharedFile(os.dup(file), SparseMemory.nbytes(ranks)) for _ in range(ranks)]
    os.close(file)
    return [SparseMemory(each, rank, ranks, oversubscribed=False, cores=cores) for rank, each in enumerate(files)]


class Published:
    """What a handshake tells of the entries of all ranks."""

    def __init__(self, streams):
        self._entries = [stream.stored for stream in streams]

    def entries(self):
        return self._entries


def shortcut_of(memory, stream, reduction=None):
    reduction = reduction or Reduction()
    return SparseShared(packed.Layout.of(stream, reduction), reduction, memory)


def is_shared(array):
    """Whether it lies in memory that all ranks have mapped."""
    while isinstance(array, np.ndarray | memoryview):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return isinstance(array, Mapping)


def committed(ranks, streams, sequence, density=None):
    """The shortcut of each rank, which all have armed."""
    shortcuts = [shortcut_of(memory, stream, Reduction(SUM, density)) for memory, stream in zip(ranks, streams)]
    flags = [shortcut.arm(sequence, stream) for shortcut, stream in zip(shortcuts, streams)]
    assert all(flags)
    common = reduce(and_, flags)
    assert common & SPARSE_SHARED
    for shortcut in shortcuts:
        shortcut.commit(sequence, common, Published(streams))
    return shortcuts


def summed(ranks, streams, sequence, order=None, density=None):
    """The result of each rank, which go on by turns in some order."""
    shortcuts, results = committed(ranks, streams, sequence, density), [None] * len(ranks)
    while any(result is None for result in results):
        for rank in order or range(len(ranks)):
            if results[rank] is None:
                results[rank] = shortcuts[rank].poll(sequence, 1)
    return results


def random_streams(rng, ranks, size, dtype=np.float32, width=None, fills=(0.0, 0.01, 0.2)):
    streams = []
    for _ in range(ranks):
        indices = np.unique(rng.integers(0, max(size, 1), int(min(size, 2000) * rng.choice(fills)))) if size else []
        shape = (len(indices),) if width is None else (len(indices), width)
        largest = 28 if dtype == "bfloat16" else 50  # nine of which have an exact sum
        streams.append(sar.SparseStream(indices, rng.integers(-largest, largest, shape).astype(dtype), size))
    return streams


# Values and the widths of their indices, for each of which two kernels take the processors 13 s to compile.
KINDS = list(itertools.product(DTYPES, (3000, 2**33)))
if not ALL:
    KINDS = [*itertools.product(("float32", "int64"), (3000, 2**33)), ("bfloat16", 3000), ("complex64", 3000)]


@st.composite
def cases(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ranks, size = draw(st.integers(2, 9)), draw(st.sampled_from([0, 1, 5, 300, 3000, 2**33]))
    dtypes = [dtype for dtype, largest in KINDS if size <= largest]
    dtype, width = draw(st.sampled_from(sorted(set(dtypes)))), draw(st.sampled_from([None, None, 3]))
    fills = draw(st.sampled_from([(0.0, 0.01), (0.3,), (0.2, 3.0), (5.0,)]))
    return random_streams(rng, ranks, size, dtype, width, fills), draw(st.permutations(range(ranks)))


@given(cases(), st.sampled_from([None, 0.1]), st.sampled_from([1, 2, 4, 16]))
def test_the_sum_is_that_of_all_streams(case, density, cores):
    streams, order = case
    size = streams[0].size
    density = density if size <= 3000 else None
    ranks = memories(len(streams), cores)
    for sequence in (FIRST, FIRST + 1):
        results = summed(ranks, streams, sequence, order, density)
        first = results[0]
        assert {result.is_dense for result in results} == {first.is_dense}
        for result in results:
            assert np.array_equal(result.indices, first.indices) and result.values.tobytes() == first.values.tobytes()
            assert result.stored <= result.switch_point or result.is_dense
            assert not result._stored.flags.writeable
        expected = {}
        for stream in streams:
            for index, value in zip(stream.indices.tolist(), stream.values):
                expected[index] = expected[index] + value if index in expected else value
        found = dict(zip(first.indices.tolist(), first.values))
        for index, value in expected.items():
            assert np.array_equal(found.pop(index, np.zeros_like(value)), value)
        assert not found
        if not first.is_dense:
            assert len(first.indices) == len(expected)


@pytest.mark.parametrize("cores", [2, 4])
def test_streams_of_all_kinds_take_turns(cores):
    """With indices of 4 bytes and of 8, and values of both."""
    ranks, rng = memories(3, cores), np.random.default_rng(8)
    for sequence, (dtype, size) in enumerate(KINDS, FIRST):
        streams = random_streams(rng, 3, size, dtype, fills=(0.1,))
        expected = {}
        for stream in streams:
            for index, value in zip(stream.indices.tolist(), stream.values.tolist()):
                expected[index] = expected.get(index, 0) + value
        for result in summed(ranks, streams, sequence):
            assert dict(zip(result.indices.tolist(), result.values.tolist())) == expected


def test_an_entry_that_is_zero_is_kept():
    streams = [sar.SparseStream([1, 5], np.float32([2, 0]), 100), sar.SparseStream([1], np.float32([-2]), 100)]
    for result in summed(memories(2), streams, FIRST):
        assert result.indices.tolist() == [1, 5]
        assert result.values.tolist() == [0, 0]


@pytest.mark.parametrize(("dtype", "width"), [("float32", None), ("float64", 3)])
def test_what_all_ranks_have_in_common_stays_sparse(dtype, width):
    indices = np.arange(0, 3000, 5)
    streams = [sar.SparseStream(indices, np.full((600,) if width is None else (600, width), rank, dtype), 3000) for rank in range(8)]
    for result in summed(memories(8), streams, FIRST):
        assert result.indices.tolist() == indices.tolist()
        assert (result.values == 28).all()


def test_a_short_vector_is_dense_without_a_look():
    stream = sar.SparseStream(np.arange(0, 3000, 5), np.ones(600, np.float32), 3000)
    with mock.patch.object(sparse_shared, "_LITTLE", 12_000):
        assert all(result.is_dense for result in summed(memories(3), [stream] * 3, FIRST))


def test_a_sum_that_comes_to_more_than_the_samples_told_is_dense_after_all():
    streams = random_streams(np.random.default_rng(5), 5, 3000, fills=(0.6,))
    with mock.patch.object(SparseShared, "_becomes_dense", return_value=False):
        for result in summed(memories(5), streams, FIRST):
            assert result.is_dense
            assert np.array_equal(result.to_dense(), sum(stream.to_dense() for stream in streams))


def test_a_result_stays_while_anybody_has_it_and_no_longer():
    ranks, rng = memories(3), np.random.default_rng(0)
    kept, wanted = [], []
    for sequence in range(FIRST, FIRST + KEPT + 3):
        streams = random_streams(rng, 3, 3000, fills=(0.2,))
        results = summed(ranks, streams, sequence)
        assert not results[0].is_dense
        kept.append(results[sequence % 3])  # another rank each time
        wanted.append(sum(stream.to_dense() for stream in streams))
        del results
        for result, expected in zip(kept, wanted):
            assert np.array_equal(result.to_dense(), expected)
    assert sum(memory.free_blocks().bit_count() for memory in ranks) == 3 * KEPT - KEPT  # the last were copied
    indices = kept[0].indices
    kept.clear()
    gc.collect()
    assert sorted(memory.free_blocks().bit_count() for memory in ranks) == [KEPT - 1, KEPT, KEPT]
    assert not np.delete(wanted[0], indices).any()
    del indices
    assert {memory.free_blocks() for memory in ranks} == {(1 << KEPT) - 1}


def test_what_a_process_has_when_it_forks_stays_for_good():
    ranks, rng = memories(2), np.random.default_rng(6)
    first = summed(ranks, random_streams(rng, 2, 3000, fills=(0.1,)), FIRST)
    wanted = first[0].to_dense()
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        os.read(receiving, 1)
        os._exit(not np.array_equal(first[0].to_dense(), wanted))
    del first
    for sequence in range(FIRST + 1, FIRST + 2 * KEPT):
        summed(ranks, random_streams(rng, 2, 3000, fills=(0.1,)), sequence)
    os.write(sending, b".")
    assert os.waitpid(child, 0)[1] == 0
    assert {memory.free_blocks() for memory in ranks} == {(1 << KEPT) - 2}


@pytest.mark.parametrize("fill", [0.1, 5.0])
def test_without_a_free_block_a_result_is_copied_for_good(fill):
    ranks, rng = memories(2), np.random.default_rng(1)
    everything, wanted = [], []
    for sequence in range(FIRST, FIRST + 2 * KEPT + 2):
        streams = random_streams(rng, 2, 3000, fills=(fill,))
        everything.append(summed(ranks, streams, sequence))
        wanted.append(sum(stream.to_dense() for stream in streams))
    for results, expected in zip(everything, wanted):
        for result in results:
            assert np.array_equal(result.to_dense(), expected)
    in_place = [[is_shared(result._stored) for result in results] for results in everything]
    assert in_place == [[True, True]] * KEPT + [[False, False]] * (KEPT + 2)
    with pytest.raises(ValueError, match="WRITEABLE"):
        everything[0][0]._stored.flags.writeable = True


def reachable(array):
    """An array and all that its bases lead to."""
    while array is not None:
        yield array
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)


@pytest.mark.parametrize("fill", [0.1, 5.0])
def test_nothing_that_a_result_leads_to_can_be_written_to(fill):
    """By NumPy, which asks the buffer itself, nor by who takes the buffer without asking: the mapping of the results is read-only."""
    ranks = memories(2)
    first, second = summed(ranks, random_streams(np.random.default_rng(9), 2, 3000, fills=(fill,)), FIRST)
    assert first.is_dense == (fill == 5.0)
    for array in (array for result in (first, second) for array in result._arrays if array is not None):
        assert is_shared(array)
        assert protection_of(array.ctypes.data) == "r--s"
        for form in (array, memoryview(array), dlpack_of(array)):
            for view in reachable(form):
                if isinstance(view, np.ndarray):
                    with pytest.raises(ValueError, match="WRITEABLE"):
                        view.flags.writeable = True
                elif isinstance(view, memoryview):
                    assert view.readonly
                else:
                    assert isinstance(view, Mapping) or type(view).__name__ == "PyCapsule"
    empty = sar.SparseStream([], np.float32([]), 3000)
    for array in (array for array in (first + empty)._arrays if array is not None):
        assert protection_of(array.ctypes.data) != "rw-s"
    assert protection_of(ranks[0].blocks.ctypes.data) == "rw-s"


def dlpack_of(array):
    """What a consumer of DLPack gets; NumPy before 2.1 refuses, as it cannot say that memory is read-only."""
    try:
        return np.from_dlpack(array)
    except BufferError:
        assert np.lib.NumpyVersion(np.__version__) < "2.1.0"
        return None


def protection_of(address):
    """What the system lets this process do with the memory at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, protection, *_ = line.split()
        begin, end = (int(number, 16) for number in span.split("-"))
        if begin <= address < end:
            return protection
    return None


@pytest.mark.parametrize("fill", [0.1, 5.0])
def test_copies_of_a_result_are_the_users_own(fill):
    ranks, streams = memories(2), random_streams(np.random.default_rng(10), 2, 3000, fills=(fill,))
    first, second = summed(ranks, streams, FIRST)
    wanted = sum(stream.to_dense() for stream in streams)
    for copied in (first.copy(), pickle.loads(pickle.dumps(first))):
        for array in copied._arrays:
            if array is not None:
                array[:] = 0
    first.to_dense()[:] = 0
    assert np.array_equal(first.to_dense(), wanted) and np.array_equal(second.to_dense(), wanted)


def test_a_result_stays_where_it_is_when_more_is_mapped():
    ranks, rng = memories(2), np.random.default_rng(11)
    small = random_streams(rng, 2, 3000, fills=(0.1,))
    kept, wanted = summed(ranks, small, FIRST), sum(stream.to_dense() for stream in small)
    values = [result.values for result in kept]
    before = [array.copy() for array in values]
    mapped = ranks[0].rows.shape[1]
    large = [sar.SparseStream(np.arange(rank, 400_000, 4), np.ones(100_000, np.float32), 400_000) for rank in range(2)]
    for sequence in range(FIRST + 1, FIRST + 4):
        for result in summed(ranks, large, sequence):
            assert np.array_equal(result.to_dense(), sum(stream.to_dense() for stream in large))
    assert ranks[0].rows.shape[1] > mapped
    assert all(map(np.array_equal, values, before))
    assert all(np.array_equal(result.to_dense(), wanted) for result in kept)


def test_who_has_little_maps_what_others_have():
    ranks = memories(3)
    streams = [sar.SparseStream(np.arange(count), np.ones(count, np.float32), 400_000) for count in (5, 60_000, 0)]
    for result in summed(ranks, streams, FIRST):
        assert np.array_equal(result.to_dense(), sum(stream.to_dense() for stream in streams))
    assert len({memory.rows.shape[1] for memory in ranks}) == 1


@pytest.mark.parametrize("count", [2, 5, 8])
def test_short_streams_take_little_address_space(count):
    with mock.patch.object(sparse, "_BYTES", 1 << 29):
        before = mapped_bytes()
        ranks = memories(count)
        taken = (mapped_bytes() - before) / count
        assert SparseMemory.nbytes(count) > 2 << 30
        assert taken < 20 << 20
        del ranks
        gc.collect()
        assert mapped_bytes() - before < 1 << 20


def mapped_bytes():
    """Address space of this process that leads to memory to share."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:sparse" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, _, end in (line[0].partition("-") for line in lines))


def test_what_a_sum_takes_is_reserved_before_a_rank_says_that_it_is_ready():
    """Whoever has most has reserved enough for the result of all, and who comes next finds it there."""
    ranks = memories(3)
    streams = [sar.SparseStream(np.arange(rank, 400_000, 40), np.ones(10_000, np.float32), 400_000) for rank in range(3)]
    streams[1] = sar.SparseStream([], np.float32([]), 400_000)
    shortcuts = committed(ranks, streams, FIRST)
    before = resident(ranks[0])
    assert before >= 2 * 80_000 + (KEPT + 1) * 3 * 80_000
    for shortcut in shortcuts:
        shortcut.cancel(FIRST)
    for sequence in range(FIRST + 1, FIRST + 9):
        results = summed(ranks, streams, sequence)
    assert resident(ranks[0]) == before
    assert not results[0].is_dense


def resident(memory):
    return 512 * os.fstat(memory._file.file).st_blocks


def test_a_loop_asks_for_memory_once():
    ranks, rng = memories(2), np.random.default_rng(12)
    with mock.patch.object(SharedFile, "reserve", autospec=True, side_effect=SharedFile.reserve) as asked:
        for sequence in range(FIRST, FIRST + 20):
            summed(ranks, random_streams(rng, 2, 3000, fills=(0.2,)), sequence)
        assert asked.call_count == 2
        count = 30_000
        for sequence in range(FIRST + 20, FIRST + 60):  # streams that grow by a hundredth at a time ask now and then
            count += count // 100
            stream = sar.SparseStream(np.arange(count), np.ones(count, np.float32), 400_000)
            summed(ranks, [stream, stream], sequence)
        assert asked.call_count <= 2 + 2 * 2 * 8


@pytest.mark.parametrize("refusal", ["limit", "fallocate", "mmap"])
def test_without_memory_nothing_is_armed(refusal, monkeypatch):
    """And none is asked for again at once, but later."""
    ranks, streams = memories(2), random_streams(np.random.default_rng(13), 2, 3000, fills=(0.2,))
    large = sar.SparseStream(np.arange(200_000), np.ones(200_000, np.float32), 800_000)
    wanted = sum(stream.to_dense() for stream in streams)
    before, asked = summed(ranks, streams, FIRST), []

    def refuses(*_args):
        asked.append(refusal)
        if refusal == "limit":
            return mapping._MARGIN + 1000
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patched:
        where = {"limit": (mapping, "memory_left"), "fallocate": (os, "posix_fallocate"), "mmap": (SharedFile, "map")}[refusal]
        patched.setattr(*where, refuses)
        for sequence in range(FIRST + 1, FIRST + 10):
            for memory in ranks:
                assert shortcut_of(memory, large).arm(sequence, large) == 0
        assert len(asked) == len(ranks)
        after = summed(ranks, streams, FIRST + 10)  # for which there is memory
    assert all(np.array_equal(result.to_dense(), wanted) for result in before + after)
    later = FIRST + 11 + sparse._LATER
    for result in summed(ranks, [large, large], later):
        assert np.array_equal(result.to_dense(), 2 * large.to_dense())


def test_nobody_writes_while_another_may_still_read():
    ranks, rng = memories(3), np.random.default_rng(2)
    streams = random_streams(rng, 3, 3000, fills=(0.3,))
    first, second, third = committed(ranks, streams, FIRST)
    assert first.poll(FIRST, 1) is None
    first.cancel(FIRST)
    assert first.arm(FIRST + 1, streams[0]) == 0
    for other in (second, third):
        other.cancel(FIRST)
    assert first.arm(FIRST + 2, streams[0])
    assert second.arm(FIRST + 2, streams[1])


def test_a_rank_that_failed_before_the_sum_began_is_free_with_its_next_operation():
    ranks, rng = memories(3), np.random.default_rng(3)
    streams = random_streams(rng, 3, 3000, fills=(0.3,))
    ours, *theirs = shortcuts = [shortcut_of(memory, stream) for memory, stream in zip(ranks, streams)]
    flags = [shortcut.arm(FIRST, stream) for shortcut, stream in zip(shortcuts, streams)]
    ours.commit(FIRST, flags[0], Published(streams))
    assert ours.poll(FIRST, 1) is None
    for shortcut in theirs:  # which have not heard that all agree
        shortcut.cancel(FIRST)
    ours.cancel(FIRST)
    for shortcut, stream in zip(shortcuts, streams):
        assert shortcut.arm(FIRST + 1, stream)
        shortcut.cancel(FIRST + 1)
    for result in summed(ranks, streams, FIRST + 2):
        assert np.array_equal(result.to_dense(), sum(stream.to_dense() for stream in streams))


def test_who_declines_can_write_again_at_once():
    ranks, stream = memories(2), sar.SparseStream([1], np.float32([1]), 9)
    ours, _ = (shortcut_of(memory, stream) for memory in ranks)
    for sequence in range(FIRST, FIRST + 3):  # the other is never armed
        assert ours.arm(sequence, stream)
        ours.decline(sequence)


@pytest.mark.parametrize(("count", "cores", "parts"), [(2, 4, 2), (5, 2, 2), (5, 1, 1), (5, 3, 3)])
def test_who_comes_first_adds_up_what_nobody_has_begun_to(count, cores, parts):
    """Two parts at most lie in their places at once, so that who has added up both has the result."""
    ranks, streams = memories(count, cores), random_streams(np.random.default_rng(7), count, 3000, fills=(0.1,))
    shortcuts, wanted = committed(ranks, streams, FIRST), sum(stream.to_dense() for stream in streams)
    first = shortcuts[-1].poll(FIRST, 1)
    assert (first is not None) == (parts <= 2)
    results = [shortcut.poll(FIRST, 1) for shortcut in shortcuts[:-1]]
    for result in [*results, first or shortcuts[-1].poll(FIRST, 1)]:
        assert np.array_equal((result or shortcuts[0].poll(FIRST, 1)).to_dense(), wanted)


def test_parts_are_claimed_once():
    ranks = memories(3)
    claimed = [memory.claim(FIRST, 2) for memory in ranks for _ in range(2)]
    assert claimed == [0, 1, -1, -1, -1, -1]
    assert [ranks[2].claim(FIRST + 1, 3) for _ in range(4)] == [0, 1, 2, -1]
    assert ranks[0].claim(FIRST, 2) == -1  # an operation that is over


def test_one_operation_at_a_time():
    (memory, _), stream = memories(2), sar.SparseStream([1], [1.0], 9)
    one, other = shortcut_of(memory, stream), shortcut_of(memory, stream)
    assert one.arm(FIRST, stream)
    assert other.arm(FIRST + 1, stream) == 0
    one.decline(FIRST)
    assert other.arm(FIRST + 1, stream)
    one.cancel(FIRST)  # once more is once too often, and concerns nobody
    assert memory.armed == FIRST + 1


def test_a_dense_result_that_only_the_caller_asks_for_must_fit():
    (memory, _), stream = memories(2), sar.SparseStream([1], [1.0], CAPACITY)
    assert shortcut_of(memory, stream, Reduction(SUM, 0.0)).arm(FIRST, stream) == 0
    assert shortcut_of(memory, stream).arm(FIRST, stream)


def test_what_is_sent_is_received():
    rng = np.random.default_rng(4)
    for ranks, fill in ((2, 0.1), (5, 0.1), (4, 5.0)):
        streams = random_streams(rng, ranks, 3000, fills=(fill,))
        shortcuts, results = committed(memories(ranks), streams, FIRST), [None] * ranks
        while None in results:
            results = [result or shortcut.poll(FIRST, 1) for result, shortcut in zip(results, shortcuts)]
        moved = [shortcut.moved() for shortcut in shortcuts]
        assert abs(sum(sent for sent, _, _ in moved) - sum(received for _, received, _ in moved)) <= 2 * ranks
        entry = 4 if results[0].is_dense else 8
        least = (ranks - 1) * results[0].stored * entry  # as every rank is without what others hold of the result
        assert sum(sent for sent, _, _ in moved) >= least
        assert {messages for _, _, messages in moved} == {ranks - 1 + (ranks - 1).bit_length()}


def test_flags_fit_a_byte():
    assert SPARSE_SHARED | (1 << KEPT) - 1 << FREE_BLOCKS < 1 << 7
