"""Sums in memory that ranks share, seen by all ranks of one process: nobody reads what is not there, or loses what it was given."""

from __future__ import annotations

import gc
import os
from functools import reduce
from operator import and_
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparseallreduce as sar
from sparseallreduce.algorithms.allreduce import FREE, STAGED
from sparseallreduce.runtime import stage as module
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
    memory = np.zeros(Stage.nbytes(ranks), np.uint8)
    return [Stage(memory, rank, ranks, crowded=False, cores=cores) for rank in range(ranks)]


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
    in_place = [[np.shares_memory(result._stored, ranks[0].blocks) for result in results] for results in everything]
    assert in_place == [[True, True]] * KEPT + [[False, False]] * (KEPT + 2)
    with pytest.raises(ValueError, match="WRITEABLE"):
        everything[0][0]._stored.flags.writeable = True


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
    assert ranks[0].offer(FIRST + 1, streams[0], kind, reduction) is None
    for stage, stream in zip(ranks[1:], streams[1:]):
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
