"""Sums of dense vectors in shared memory, seen by all ranks of one process."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import sparseallreduce as sar
from sparseallreduce.runtime.memory import dense, mapping
from sparseallreduce.runtime.memory.dense import VectorSum
from sparseallreduce.runtime.memory.mapping import SharedFile
from sparseallreduce.runtime.memory.words import claim_kernel
from sparseallreduce.runtime.shortcuts.base import DENSE_SHARED
from sparseallreduce.runtime.shortcuts.dense_shared import DenseShared
from sparseallreduce.streams import packed
from sparseallreduce.streams.reduction import Reduction

FIRST = 7


def ranks_of(ranks, cores=16):
    """The areas as each rank sees them."""
    memory = np.zeros(dense.nbytes(ranks, cores), np.uint8)
    return [dense.areas_in(memory, rank, ranks, cores, lambda *_: True) for rank in range(ranks)]


def summed(each, sequence, spins=1):
    """What one rank has of the sum, None if that is not there."""
    total = np.empty(each.shape, each.dtype)
    return total if each.sum_into(sequence, total, spins) else None


@st.composite
def dense_streams(draw):
    dtype = np.dtype(draw(st.sampled_from(["float32", "float64", "int32", "int64", "complex64", "complex128"])))
    ranks, size, width = draw(st.integers(2, 9)), draw(st.integers(1, 400)), draw(st.sampled_from([None, 3]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (size,) if width is None else (size, width)
    share = draw(st.sampled_from([0.1, 0.7, 1.0]))
    draws = [(100 * generator.standard_normal(shape)).astype(dtype) for _ in range(ranks)]
    if dtype.kind != "i":
        for array in draws:
            array[generator.random(shape) < 0.1] = generator.choice([np.nan, np.inf])
    arrays = [np.where(generator.random(shape) < share, array, dtype.type(0)) for array in draws]
    return [sar.SparseStream.from_dense(array) for array in arrays], arrays


@given(dense_streams(), st.integers(0, 8), st.integers(1, 9))
def test_a_sum_by_parts_is_added_up_in_the_order_of_the_ranks(given_streams, late, cores):
    streams, arrays = given_streams
    sums = [VectorSum(areas[0], arrays[0].shape, arrays[0].dtype) for areas in ranks_of(len(streams), cores=cores)]
    expected = arrays[0].copy()
    for array in arrays[1:]:
        expected += array
    for sequence in (FIRST, FIRST + 2):
        assert all(each.area.is_free() for each in sums)
        for each, stream in zip(sums, streams):
            each.write(stream)
            each.area.enter(sequence)
        totals = [summed(each, sequence) for each in sums[late:] + sums[:late]]
        assert {total.tobytes() for total in totals} == {expected.tobytes()}


@given(dense_streams(), st.integers(1, 9))
def test_ranks_at_once_claim_each_part_of_a_sum_once(given_streams, cores):
    """In threads, each on a core whenever compiled code lets it go."""
    streams, arrays = given_streams
    expected = functools.reduce(np.add, arrays)
    sums = [VectorSum(areas[0], arrays[0].shape, arrays[0].dtype) for areas in ranks_of(len(streams), cores=cores)]
    for each, stream in zip(sums, streams):
        each.write(stream)
    with ThreadPoolExecutor(len(sums)) as pool:
        totals = list(pool.map(lambda each: summed(each, FIRST, 1 << 30), sums))
    assert {total.tobytes() for total in totals} == {expected.tobytes()}


def test_an_area_is_free_when_all_have_the_sum():
    ours, theirs = (VectorSum(areas[1], (100,), np.dtype(np.float32)) for areas in ranks_of(2))
    stream = sar.SparseStream.from_dense(np.ones(100, np.float32))
    for each in (ours, theirs):
        each.write(stream)
        each.area.enter(FIRST)
    assert summed(ours, FIRST).sum() == 200  # who comes first adds all up
    assert not ours.area.is_free()
    assert summed(theirs, FIRST).sum() == 200
    assert ours.area.is_free()
    assert theirs.area.is_free()


def test_a_part_that_another_has_claimed_is_waited_for():
    ours, theirs = (VectorSum(areas[0], (100,), np.dtype(np.float32)) for areas in ranks_of(2))
    stream = sar.SparseStream.from_dense(np.ones(100, np.float32))
    for each in (ours, theirs):
        each.write(stream)
    words, at = ours.area.terms[0], dense._CLAIMED
    assert claim_kernel()(words, at, FIRST, 2) == 0
    assert summed(theirs, FIRST, 5) is None


def test_a_shortcut_is_armed_only_when_all_have_left_its_area():
    streams = [sar.SparseStream.from_dense(np.full(100, rank + 1, np.float32)) for rank in range(2)]
    kind = packed.Layout.of(streams[0], Reduction())
    ours, theirs = (DenseShared(kind, areas, 1) for areas in ranks_of(2))
    for sequence in range(FIRST, FIRST + 4):
        for each, stream in zip((ours, theirs), streams):
            assert each.arm(sequence, stream) == DENSE_SHARED
        assert ours.poll(sequence, 1).to_dense().tolist() == [3] * 100
        if sequence == FIRST + 3:
            break
        assert theirs.poll(sequence, 1).to_dense().tolist() == [3] * 100
    later = FIRST + 3 + dense.AREAS
    assert ours.arm(later, streams[0]) == 0  # the other has still to copy the sum
    theirs.cancel(FIRST + 3)
    assert ours.arm(later, streams[0]) == DENSE_SHARED
    ours.decline(later)
    assert ours.arm(later + dense.AREAS, streams[0]) == DENSE_SHARED  # nobody has read what it wrote


def test_the_rows_of_vectors_are_reserved_as_they_are_used():
    ranks, cores = 3, 1
    file = os.memfd_create("areas")
    os.ftruncate(file, dense.nbytes(ranks, cores))
    memory = SharedFile(file, dense.nbytes(ranks, cores))
    assert memory.reserve(dense.reserved(ranks, cores))
    view = memory.map([0], memory.nbytes)[0]

    def reserve(place, nbytes):
        return memory.reserve([(place, nbytes)])

    each_rank = [dense.areas_in(view, rank, ranks, cores, reserve) for rank in range(ranks)]
    begun = memory.taken()
    assert begun < 1 << 18
    for sequence, count in enumerate((1000, 100_000, 500, 300_000), FIRST):
        sums = [VectorSum(areas[1], (count,), np.dtype(np.float32)) for areas in each_rank]
        assert all(areas[1].reserve(4 * count) for areas in each_rank)
        before = memory.taken()
        for each in sums:
            each.write(sar.SparseStream.from_dense(np.ones(count, np.float32)))
        assert all((summed(each, sequence) == ranks).all() for each in sums)
        assert memory.taken() == before
    assert before >= ranks * 1_200_000
    with mock.patch.object(mapping, "memory_left", return_value=0):
        assert not each_rank[0][0].reserve(8000)
        assert each_rank[0][1].reserve(8000)
