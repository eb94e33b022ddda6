"""Selection by a threshold, with the residual updated and cleared, against the CPU's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import FLOATS, SMALL, few, same_bits, seeds, there, values_of

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.selection import select_at_least
from sparseallreduce.streams.selection.threshold import choose_at_least

device = there("selection")

THRESHOLDS = (0.0, 0.5, 1.0, np.inf, np.nan, 1e-50, 1e300)


def check(accumulator, gradient, threshold, clear, index_dtype=np.uint32, **options):
    ours, theirs = accumulator.copy(), accumulator.copy()
    got = device.select_at_least(ours, threshold, gradient, index_dtype, np, clear=clear, **(options or SMALL))
    wanted = choose_at_least(theirs, gradient, threshold, clear)
    same_bits(got[0], wanted[0].astype(index_dtype))
    same_bits(got[1], wanted[1])
    same_bits(ours, theirs)


@few
@given(seeds, st.integers(0, 40), st.sampled_from(THRESHOLDS), st.booleans(), st.booleans(), st.integers(1, 9), st.integers(1, 5))
def test_chosen_and_left_are_those_of_the_cpu(seed, size, threshold, add, clear, run, block):
    rng = np.random.default_rng(seed)
    dtype = rng.choice(FLOATS)
    accumulator = values_of(rng, size, dtype)
    check(accumulator, values_of(rng, size, dtype) if add else None, threshold, clear, run=run, block=block)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [1, 7])
def test_all_equal(dtype, value, size):
    for threshold in (0.0, 1.0, np.inf):
        check(np.full(size, value, dtype), None, threshold, True, np.uint64)


def test_a_stream_of_the_cpu_has_the_same_entries():
    accumulator = values_of(np.random.default_rng(3), 25, np.float32)
    indices, values = device.select_at_least(accumulator.copy(), 0.7, None, np.uint32, np, **SMALL)
    stream = select_at_least(accumulator, 0.7)
    same_bits(indices, stream.indices)
    same_bits(values, stream.values)


def test_what_does_not_fit_is_an_error():
    good = np.ones(4, np.float32)
    for bad in (np.ones(4, np.int32), np.ones((2, 2), np.float32), np.ones(8, np.float32)[::2], np.ones(4, np.float16)):
        with pytest.raises(StreamError, match="contiguous vector"):
            device.select(bad, None, 0, np.uint32, np)
    for bad in (np.ones(3, np.float32), np.ones(4), np.ones(8, np.float32)[::2]):
        with pytest.raises(StreamError, match="gradient"):
            device.select(good, bad, 0, np.uint32, np)
    with pytest.raises(StreamError, match="at least 0"):
        device.select_at_least(good, -1.0, None, np.uint32, np)
