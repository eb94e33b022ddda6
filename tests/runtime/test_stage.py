"""Sums in memory that ranks share, seen by all ranks of one process: nobody reads what is not there, or loses what it was given."""

from __future__ import annotations

import errno
import gc
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

import sparseallreduce as sar
from sparseallreduce.algorithms.allreduce import FREE, STAGED
from sparseallreduce.runtime import shared
from sparseallreduce.runtime import stage as module
from sparseallreduce.runtime.shared import Mapping, SharedFile
from sparseallreduce.runtime.stage import KEPT, Stage
from sparseallreduce.streams import packed
from sparseallreduce.streams.operator import SUM
from sparseallreduce.streams.reduction import Reduction

ROOM = 1 << 23
FIRST = 7


@pytest.fixture(autouse=True)
def small():
    with mock.patch.object(module, "_BYTES", ROOM), mock.patch.object(module, "_LITTLE", 0):
        yield


def stages(ranks, cores=4):
    """Of ranks that have all opened one file."""
    file = os.memfd_create("stage")
    os.ftruncate(file, Stage.nbytes(ranks))
    memories = [SharedFile(file, Stage.nbytes(ranks)), *(SharedFile(os.dup(file), Stage.nbytes(ranks)) for _ in range(ranks - 1))]
    return [Stage(memory, rank, ranks, crowded=False, cores=cores) for rank, memory in enumerate(memories)]


def is_shared(array):
    """Whether it lies in memory that all ranks have mapped."""
    while isinstance(array, np.ndarray | memoryview):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return isinstance(array, Mapping)


def offered(ranks, streams, turn, density=None):
    """The split of each rank, begun by all."""
    splits = []
    for stage, stream in zip(ranks, streams):
        reduction = Reduction(SUM, density)
        splits.append(stage.offer(turn, stream, packed.Kind.of(stream, reduction), reduction))
    assert all(splits)
    common = reduce(and_, (split.flags for split in splits))
    assert common & STAGED
    for split in splits:
        assert split.told().ready([stream.stored for stream in streams], common) is split
    return splits


def summed(ranks, streams, turn, order=None, density=None):
    """The result of each rank, which go on by turns in some order."""
    splits, results = offered(ranks, streams, turn, density), [None] * len(ranks)
    while any(result is None for result in results):
        for rank in order or range(len(ranks)):
            if results[rank] is None:
                results[rank] = splits[rank].result()
    return results


def random_streams(rng, ranks, size, dtype=np.float32, width=None, fills=(0.0, 0.01, 0.2)):
    streams = []
    for _ in range(ranks):
        indices = np.unique(rng.integers(0, max(size, 1), int(min(size, 2000) * rng.choice(fills)))) if size else []
        shape = (len(indices),) if width is None else (len(indices), width)
        streams.append(sar.SparseStream(indices, rng.integers(-50, 50, shape).astype(dtype), size))
    return streams


@st.composite
def cases(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ranks, size = draw(st.integers(2, 9)), draw(st.sampled_from([0, 1, 5, 300, 3000, 2**33]))
    dtype, width = draw(st.sampled_from(["float32", "float64", "float16", "int32", "int64"])), draw(st.sampled_from([None, None, 3]))
    fills = draw(st.sampled_from([(0.0, 0.01), (0.3,), (0.2, 3.0), (5.0,)]))
    return random_streams(rng, ranks, size, dtype, width, fills), draw(st.permutations(range(ranks)))


@given(cases(), st.sampled_from([None, 0.1]), st.sampled_from([1, 2, 4, 16]))
def test_the_sum_is_that_of_all_streams(case, density, cores):
    streams, order = case
    size = streams[0].size
    density = density if size <= 3000 else None
    ranks = stages(len(streams), cores)
    for turn in (FIRST, FIRST + 1):
        results = summed(ranks, streams, turn, order, density)
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
    ranks, rng = stages(3, cores), np.random.default_rng(8)
    kinds = [(2**33, "float32"), (3000, "float32"), (3000, "int64"), (2**33, "int64"), (3000, "float16")]
    for turn, (size, dtype) in enumerate(kinds, FIRST):
        streams = random_streams(rng, 3, size, dtype, fills=(0.1,))
        expected = {}
        for stream in streams:
            for index, value in zip(stream.indices.tolist(), stream.values.tolist()):
                expected[index] = expected.get(index, 0) + value
        for result in summed(ranks, streams, turn):
            assert dict(zip(result.indices.tolist(), result.values.tolist())) == expected


def test_an_entry_that_is_zero_is_kept():
    streams = [sar.SparseStream([1, 5], np.float32([2, 0]), 100), sar.SparseStream([1], np.float32([-2]), 100)]
    for result in summed(stages(2), streams, FIRST):
        assert result.indices.tolist() == [1, 5]
        assert result.values.tolist() == [0, 0]


@pytest.mark.parametrize(("dtype", "width"), [("float32", None), ("float64", 3)])
def test_what_all_ranks_have_in_common_stays_sparse(dtype, width):
    indices = np.arange(0, 3000, 5)
    streams = [sar.SparseStream(indices, np.full((600,) if width is None else (600, width), rank, dtype), 3000) for rank in range(8)]
    for result in summed(stages(8), streams, FIRST):
        assert result.indices.tolist() == indices.tolist()
        assert (result.values == 28).all()


def test_a_short_vector_is_dense_without_a_look():
    stream = sar.SparseStream(np.arange(0, 3000, 5), np.ones(600, np.float32), 3000)
    with mock.patch.object(module, "_LITTLE", 12_000):
        assert all(result.is_dense for result in summed(stages(3), [stream] * 3, FIRST))


def test_a_sum_that_comes_to_more_than_the_samples_told_is_dense_after_all():
    streams = random_streams(np.random.default_rng(5), 5, 3000, fills=(0.6,))
    with mock.patch.object(module.Split, "_becomes_dense", return_value=False):
        for result in summed(stages(5), streams, FIRST):
            assert result.is_dense
            assert np.array_equal(result.to_dense(), sum(stream.to_dense() for stream in streams))


def test_a_result_stays_while_anybody_has_it_and_no_longer():
    ranks, rng = stages(3), np.random.default_rng(0)
    kept, wanted = [], []
    for turn in range(FIRST, FIRST + KEPT + 3):
        streams = random_streams(rng, 3, 3000, fills=(0.2,))
        results = summed(ranks, streams, turn)
        assert not results[0].is_dense
        kept.append(results[turn % 3])  # another rank each time
        wanted.append(sum(stream.to_dense() for stream in streams))
        del results
        for result, expected in zip(kept, wanted):
            assert np.array_equal(result.to_dense(), expected)
    assert sum(stage.free_blocks().bit_count() for stage in ranks) == 3 * KEPT - KEPT  # the last were copied
    indices = kept[0].indices
    kept.clear()
    gc.collect()
    assert sorted(stage.free_blocks().bit_count() for stage in ranks) == [KEPT - 1, KEPT, KEPT]
    assert not np.delete(wanted[0], indices).any()
    del indices
    assert {stage.free_blocks() for stage in ranks} == {(1 << KEPT) - 1}


def test_what_a_process_has_when_it_forks_stays_for_good():
    ranks, rng = stages(2), np.random.default_rng(6)
    first = summed(ranks, random_streams(rng, 2, 3000, fills=(0.1,)), FIRST)
    wanted = first[0].to_dense()
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        os.read(receiving, 1)
        os._exit(not np.array_equal(first[0].to_dense(), wanted))
    del first
    for turn in range(FIRST + 1, FIRST + 2 * KEPT):
        summed(ranks, random_streams(rng, 2, 3000, fills=(0.1,)), turn)
    os.write(sending, b".")
    assert os.waitpid(child, 0)[1] == 0
    assert {stage.free_blocks() for stage in ranks} == {(1 << KEPT) - 2}


@pytest.mark.parametrize("fill", [0.1, 5.0])
def test_without_a_free_block_a_result_is_copied_for_good(fill):
    ranks, rng = stages(2), np.random.default_rng(1)
    everything, wanted = [], []
    for turn in range(FIRST, FIRST + 2 * KEPT + 2):
        streams = random_streams(rng, 2, 3000, fills=(fill,))
        everything.append(summed(ranks, streams, turn))
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
    ranks = stages(2)
    first, second = summed(ranks, random_streams(np.random.default_rng(9), 2, 3000, fills=(fill,)), FIRST)
    assert first.is_dense == (fill == 5.0)
    for array in (array for result in (first, second) for array in result._arrays if array is not None):
        assert is_shared(array)
        assert protection_of(array.ctypes.data) == "r--s"
        for form in (array, memoryview(array), np.from_dlpack(array)):
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
    ranks, streams = stages(2), random_streams(np.random.default_rng(10), 2, 3000, fills=(fill,))
    first, second = summed(ranks, streams, FIRST)
    wanted = sum(stream.to_dense() for stream in streams)
    for copied in (first.copy(), pickle.loads(pickle.dumps(first))):
        for array in copied._arrays:
            if array is not None:
                array[:] = 0
    first.to_dense()[:] = 0
    assert np.array_equal(first.to_dense(), wanted) and np.array_equal(second.to_dense(), wanted)


def test_a_result_stays_where_it_is_when_more_is_mapped():
    ranks, rng = stages(2), np.random.default_rng(11)
    small = random_streams(rng, 2, 3000, fills=(0.1,))
    kept, wanted = summed(ranks, small, FIRST), sum(stream.to_dense() for stream in small)
    values = [result.values for result in kept]
    before = [array.copy() for array in values]
    mapped = ranks[0].rows.shape[1]
    large = [sar.SparseStream(np.arange(rank, 400_000, 4), np.ones(100_000, np.float32), 400_000) for rank in range(2)]
    for turn in range(FIRST + 1, FIRST + 4):
        for result in summed(ranks, large, turn):
            assert np.array_equal(result.to_dense(), sum(stream.to_dense() for stream in large))
    assert ranks[0].rows.shape[1] > mapped
    assert all(map(np.array_equal, values, before))
    assert all(np.array_equal(result.to_dense(), wanted) for result in kept)


def test_who_has_little_maps_what_others_have():
    ranks = stages(3)
    streams = [sar.SparseStream(np.arange(count), np.ones(count, np.float32), 400_000) for count in (5, 60_000, 0)]
    for result in summed(ranks, streams, FIRST):
        assert np.array_equal(result.to_dense(), sum(stream.to_dense() for stream in streams))
    assert len({stage.rows.shape[1] for stage in ranks}) == 1


@pytest.mark.parametrize("count", [2, 5, 8])
def test_short_streams_take_little_address_space(count):
    with mock.patch.object(module, "_BYTES", 1 << 29):
        before = mapped_bytes()
        ranks = stages(count)
        taken = (mapped_bytes() - before) / count
        assert Stage.nbytes(count) > 2 << 30
        assert taken < 20 << 20
        del ranks
        gc.collect()
        assert mapped_bytes() - before < 1 << 20


def mapped_bytes():
    """Address space of this process that leads to memory to share."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:stage" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, _, end in (line[0].partition("-") for line in lines))


def test_what_a_sum_takes_is_reserved_before_a_rank_says_that_it_is_ready():
    """Whoever has most has reserved enough for the result of all, and who comes next finds it there."""
    ranks = stages(3)
    streams = [sar.SparseStream(np.arange(rank, 400_000, 40), np.ones(10_000, np.float32), 400_000) for rank in range(3)]
    streams[1] = sar.SparseStream([], np.float32([]), 400_000)
    offered(ranks, streams, FIRST)
    memory = resident(ranks[0])
    assert memory >= 2 * 80_000 + (KEPT + 1) * 3 * 80_000
    for stage in ranks:
        stage.held._next = None
        stage.held.abandon()
    for turn in range(FIRST + 1, FIRST + 9):
        results = summed(ranks, streams, turn)
    assert resident(ranks[0]) == memory
    assert not results[0].is_dense


def resident(stage):
    return 512 * os.fstat(stage._file.file).st_blocks


def test_a_loop_asks_for_memory_once():
    ranks, rng = stages(2), np.random.default_rng(12)
    with mock.patch.object(SharedFile, "reserve", autospec=True, side_effect=SharedFile.reserve) as asked:
        for turn in range(FIRST, FIRST + 20):
            summed(ranks, random_streams(rng, 2, 3000, fills=(0.2,)), turn)
        assert asked.call_count == 2
        count = 30_000
        for turn in range(FIRST + 20, FIRST + 60):  # streams that grow by a hundredth at a time ask now and then
            count += count // 100
            stream = sar.SparseStream(np.arange(count), np.ones(count, np.float32), 400_000)
            summed(ranks, [stream, stream], turn)
        assert asked.call_count <= 2 + 2 * 2 * 8


@pytest.mark.parametrize("refusal", ["limit", "fallocate", "mmap"])
def test_without_memory_nothing_is_offered(refusal, monkeypatch):
    """And none is asked for again at once, but later."""
    ranks, streams = stages(2), random_streams(np.random.default_rng(13), 2, 3000, fills=(0.2,))
    large = sar.SparseStream(np.arange(200_000), np.ones(200_000, np.float32), 800_000)
    wanted = sum(stream.to_dense() for stream in streams)
    before, asked = summed(ranks, streams, FIRST), []

    def refuses(*_args):
        asked.append(refusal)
        if refusal == "limit":
            return shared._MARGIN + 1000
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patched:
        where = {"limit": (shared, "memory_left"), "fallocate": (os, "posix_fallocate"), "mmap": (SharedFile, "map")}[refusal]
        patched.setattr(*where, refuses)
        for turn in range(FIRST + 1, FIRST + 10):
            for stage in ranks:
                assert stage.offer(turn, large, packed.Kind.of(large, Reduction()), Reduction()) is None
        assert len(asked) == len(ranks)
        after = summed(ranks, streams, FIRST + 10)  # for which there is memory
    assert all(np.array_equal(result.to_dense(), wanted) for result in before + after)
    later = FIRST + 11 + module._LATER
    for result in summed(ranks, [large, large], later):
        assert np.array_equal(result.to_dense(), 2 * large.to_dense())


def test_nobody_writes_while_another_may_still_read():
    ranks, rng = stages(3), np.random.default_rng(2)
    streams = random_streams(rng, 3, 3000, fills=(0.3,))
    first, second, third = offered(ranks, streams, FIRST)
    assert first.result() is None
    first.abandon()
    reduction = Reduction()
    kind = packed.Kind.of(streams[0], reduction)
    assert ranks[0].offer(FIRST + 1, streams[0], kind, reduction) is None
    for other in (second, third):
        other.abandon()
    assert ranks[0].offer(FIRST + 2, streams[0], kind, reduction) is not None
    assert ranks[1].offer(FIRST + 2, streams[1], kind, reduction) is not None


def test_a_rank_that_failed_before_the_sum_began_is_free_with_its_next_offer():
    ranks, rng = stages(3), np.random.default_rng(3)
    streams, reduction = random_streams(rng, 3, 3000, fills=(0.3,)), Reduction()
    kind = packed.Kind.of(streams[0], reduction)
    ours, *theirs = (stage.offer(FIRST, stream, kind, reduction) for stage, stream in zip(ranks, streams))
    ours.begin([stream.stored for stream in streams], ours.flags)
    assert ours.result() is None
    for split in theirs:  # which have not heard that all agree
        split.abandon()
    ours.abandon()
    for stage, stream in zip(ranks, streams):
        assert stage.offer(FIRST + 1, stream, kind, reduction) is not None
        stage.held.abandon()
    for result in summed(ranks, streams, FIRST + 2):
        assert np.array_equal(result.to_dense(), sum(stream.to_dense() for stream in streams))


@pytest.mark.parametrize(("count", "cores", "parts"), [(2, 4, 2), (5, 2, 2), (5, 1, 1), (5, 3, 3)])
def test_who_comes_first_adds_up_what_nobody_has_begun_to(count, cores, parts):
    """Two parts at most lie in their places at once, so that who has added up both has the result."""
    ranks, streams = stages(count, cores), random_streams(np.random.default_rng(7), count, 3000, fills=(0.1,))
    splits, wanted = offered(ranks, streams, FIRST), sum(stream.to_dense() for stream in streams)
    first = splits[-1].result()
    assert (first is not None) == (parts <= 2)
    results = [split.result() for split in splits[:-1]]
    for result in [*results, first or splits[-1].result()]:
        assert np.array_equal((result or splits[0].result()).to_dense(), wanted)


def test_parts_are_claimed_once():
    ranks = stages(3)
    claimed = [stage.claim(FIRST, 2) for stage in ranks for _ in range(2)]
    assert claimed == [0, 1, -1, -1, -1, -1]
    assert [ranks[2].claim(FIRST + 1, 3) for _ in range(4)] == [0, 1, 2, -1]
    assert ranks[0].claim(FIRST, 2) == -1  # a turn that is over


def test_one_split_at_a_time():
    (stage, _), stream, reduction = stages(2), sar.SparseStream([1], [1.0], 9), Reduction()
    kind = packed.Kind.of(stream, reduction)
    split = stage.offer(FIRST, stream, kind, reduction)
    assert stage.offer(FIRST + 1, stream, kind, reduction) is None
    split.abandon()
    later = stage.offer(FIRST + 1, stream, kind, reduction)
    split.abandon()  # once more is once too often, and concerns nobody
    assert stage.held is later


def test_a_dense_result_that_only_the_caller_asks_for_must_fit():
    (stage, _), stream, reduction = stages(2), sar.SparseStream([1], [1.0], ROOM), Reduction(SUM, 0.0)
    assert stage.offer(FIRST, stream, packed.Kind.of(stream, reduction), reduction) is None
    reduction = Reduction()
    assert stage.offer(FIRST, stream, packed.Kind.of(stream, reduction), reduction) is not None


def test_what_is_sent_is_received():
    rng = np.random.default_rng(4)
    for ranks, fill in ((2, 0.1), (5, 0.1), (4, 5.0)):
        streams = random_streams(rng, ranks, 3000, fills=(fill,))
        splits = offered(stages(ranks), streams, FIRST)
        for _ in range(3):
            results = [split.result() for split in splits]
        moved = [split.moved() for split in splits]
        assert abs(sum(sent for sent, _, _ in moved) - sum(received for _, received, _ in moved)) <= 2 * ranks
        entry = 4 if results[0].is_dense else 8
        least = (ranks - 1) * results[0].stored * entry  # as every rank is without what others hold of the result
        assert sum(sent for sent, _, _ in moved) >= least
        assert {messages for _, _, messages in moved} == {ranks - 1 + (ranks - 1).bit_length()}


def test_flags_fit_a_byte():
    assert STAGED | (1 << KEPT) - 1 << FREE < 1 << 7
