"""The k-th magnitude, the places of the largest, and cuts, against the CPU's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import FLOATS, SMALL, few, indices_of, same_bits, seeds, there, values_of

from sparseallreduce import SparseStream
from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels import selection as loops
from sparseallreduce.streams.partition import split

partition, ranking = there("partition"), there("ranking")


def check(array, k, index_dtype=np.uint32, block=2):
    key, ties = ranking.kth(array, k, np, block=block)
    assert (key, ties) == loops.kth(array, k)
    got = ranking.top(array, key, ties, k, index_dtype, np, **SMALL)
    same_bits(got, loops.top(array, key, ties, k, index_dtype))


@few
@given(seeds, st.integers(1, 30), st.data())
def test_of_random_magnitudes(seed, size, data):
    rng = np.random.default_rng(seed)
    array = values_of(rng, size, rng.choice(FLOATS))
    check(array, data.draw(st.integers(1, size)), data.draw(st.sampled_from([np.uint32, np.uint64])), data.draw(st.integers(1, 3)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [0.0, 1.0, -np.inf, np.nan])
def test_of_equal_magnitudes(dtype, value):
    for size in (1, 7):
        for k in {1, size // 2 + 1, size}:
            check(np.full(size, value, dtype), k)


@pytest.mark.parametrize("dtype", FLOATS)
def test_of_all_ranks_among_neighbours(dtype):
    """Keys that differ in their last digit alone, and one that differs in its first."""
    array = np.array([1.0, 1.5, 1.0, -1.25, 1e30, 0.0], dtype)
    array[2] = np.nextafter(array[2], dtype(2))
    for k in range(1, 7):
        check(array, k)


def test_several_blocks_add_their_counts_up():
    check(values_of(np.random.default_rng(4), 3 * ranking.STRIDES + 1, np.float32), 40, block=1)


@pytest.mark.parametrize("k", [-1, 0, 4])
def test_a_rank_that_is_not_there_is_an_error(k):
    with pytest.raises(StreamError, match="out of range"):
        ranking.kth(np.ones(3), k, np)


def test_other_arrays_are_errors():
    for call in (lambda array: ranking.kth(array, 1, np), lambda array: ranking.top(array, 0, 0, 0, np.uint32, np)):
        with pytest.raises(StreamError, match="contiguous vector"):
            call(np.ones(3, np.int64))


@few
@given(seeds, st.integers(0, 12), st.sampled_from([np.uint32, np.uint64]), st.lists(st.integers(0, 20), max_size=6))
def test_cuts_are_those_of_a_stream(seed, count, dtype, inner):
    size = 2**32 if dtype is np.uint32 else 2**63 - 1  # one more than uint32 holds, and the largest of all
    lo = size - 20
    indices = indices_of(np.random.default_rng(seed), count, 20, dtype, lo)
    stream = SparseStream(indices, np.ones(count), size)
    bounds = [0, *sorted(lo + bound for bound in inner), size]
    cuts = partition.cuts(indices, bounds, 0, size, np)
    assert [len(part.indices) for part in split(stream, bounds)] == np.diff(cuts).tolist()
    assert partition.cuts(indices, bounds[::-1], 0, size, np) == cuts[::-1]


def test_cuts_of_what_is_no_index_set():
    with pytest.raises(StreamError, match="vector"):
        partition.cuts(np.ones(2), [0, 1], 0, 4, np)
