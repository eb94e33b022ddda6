"""Approximate top-k by buckets and MSTopK, against the CPU's."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import FLOATS, SMALL, few, same_bits, seeds, there, values_of

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels import selection as loops
from sparseallreduce.streams.selection import MSTopK
from sparseallreduce.streams.selection.measures import mean_and_largest

drawing, mstopk, norms = there("drawing"), there("mstopk"), there("norms")


def check_draw(accumulator, gradient, index_dtype=np.uint32, small=SMALL, **options):
    ours, theirs = accumulator.copy(), accumulator.copy()
    got = drawing.draw(ours, gradient, index_dtype, np, **options, **small)
    wanted = loops.draw(theirs, gradient, index_dtype, **options)
    for one, other in zip(got, wanted, strict=True):
        same_bits(one, other)
    same_bits(ours, theirs)


@few
@given(seeds, st.integers(0, 90), st.integers(1, 80), st.data())
def test_drawn_and_left_are_those_of_the_cpu(seed, size, bucket, data):
    rng = np.random.default_rng(seed)
    dtype = rng.choice(FLOATS)
    accumulator = values_of(rng, size, dtype, special=data.draw(st.booleans()))
    check_draw(
        accumulator,
        values_of(rng, size, dtype, special=False) if data.draw(st.booleans()) else None,
        small={"run": data.draw(st.integers(1, 20)), "block": data.draw(st.integers(1, 9))},
        bucket=bucket,
        share=bucket * data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        at_most=data.draw(st.booleans()),
        fixed=data.draw(st.sampled_from([0, 1, bucket // 2 + 1, bucket])),
        seed=data.draw(st.integers(0, 2**64 - 1)),
        clear=data.draw(st.booleans()),
    )


OPTIONS = {"bucket": 16, "share": 4.0, "at_most": False, "fixed": 0, "seed": 2**64 - 3, "clear": True}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [1e-40, 1e-300, 1e-25, 1e25, 1e38, 1e307])
def test_magnitudes_that_are_lifted(dtype, scale):
    rng = np.random.default_rng(6)
    with np.errstate(all="ignore"):
        accumulator = (rng.standard_normal(40) * scale).astype(dtype)
    for at_most in (False, True):
        check_draw(accumulator, None, **OPTIONS | {"at_most": at_most})


def test_a_sum_that_overflows():
    accumulator = np.full(40, 1.7e308)
    accumulator[::3] = 1e300
    accumulator[7] = -np.inf
    check_draw(accumulator, None, **OPTIONS)
    check_draw(accumulator, None, **OPTIONS | {"fixed": 3, "bucket": 40})


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, np.nan, np.inf])
@pytest.mark.parametrize("fixed", [0, 2, 16])
def test_all_equal(value, fixed):
    check_draw(np.full(35, value, np.float32), None, np.uint64, **OPTIONS | {"fixed": fixed})


def test_one_value_stands_out():
    accumulator = np.full(33, 1e-3, np.float32)
    accumulator[[5, 20]] = 100.0
    for fixed in (0, 5):
        check_draw(accumulator, None, **OPTIONS | {"fixed": fixed})


def test_an_empty_bucket_is_an_error():
    with pytest.raises(StreamError, match="bucket"):
        drawing.draw(np.ones(3), None, np.uint32, np, **OPTIONS | {"bucket": 0})


def check_mstopk(accumulator, gradient, k, seed=0, step=0, searches=30, clear=True):
    """The mean and the largest magnitude are those of the CPU, of values whose sums are not rounded."""
    ours, theirs = accumulator.copy(), accumulator.copy()
    selector = MSTopK(k, searches, seed=seed)
    selector.steps = step
    stream = selector(theirs, gradient, clear=clear)
    options = {"searches": searches, "seed": seed, "step": step, "clear": clear}
    indices, values = mstopk.mstopk(ours, gradient, k, np.uint32, np, **options, **SMALL)
    same_bits(indices, stream.indices)
    same_bits(values, stream.values)
    same_bits(ours, theirs)


@few
@given(seeds, st.integers(1, 40), st.sampled_from([1, 4, 30]), st.booleans(), st.booleans(), st.integers(0, 9), st.data())
def test_mstopk_chooses_what_the_cpu_chooses(seed, size, searches, add, clear, step, data):
    rng = np.random.default_rng(seed)
    dtype = rng.choice(FLOATS)
    numbers, added = rng.integers(-9, 9, (2, size)).astype(dtype)
    numbers[rng.random(size) < 0.1] = rng.choice([np.nan, np.inf, -np.inf])
    check_mstopk(numbers, added if add else None, data.draw(st.integers(0, size // 2)), seed % 7, step, searches, clear)


@pytest.mark.parametrize("value", [0.0, 1.0, -2.0, np.nan, np.inf])
def test_mstopk_of_equal_magnitudes(value):
    for k in (0, 1, 3):
        check_mstopk(np.full(9, value, np.float32), None, k)


def test_mstopk_of_all():
    array = np.arange(5.0)
    indices, values = mstopk.mstopk(array, None, 5, np.uint32, np, **SMALL)
    np.testing.assert_array_equal(indices, np.arange(5))
    np.testing.assert_array_equal(values, array)
    assert len(mstopk.mstopk(np.empty(0), None, 0, np.uint32, np)[0]) == 0


def test_mstopk_out_of_range():
    for k, searches in ((-1, 30), (4, 30), (1, 0)):
        with pytest.raises(StreamError):
            mstopk.mstopk(np.ones(3), None, k, np.uint32, np, searches=searches)


@few
@given(seeds, st.integers(0, 60), st.integers(1, 20), st.sampled_from([1.0, 1e300, 1e-300]))
def test_mean_and_largest_are_those_of_the_cpu_but_for_rounding(seed, size, run, scale):
    rng = np.random.default_rng(seed)
    ours = rng.standard_normal(size) * scale
    ours[rng.random(size) < 0.2] = rng.choice([np.nan, np.inf])
    gradient = rng.standard_normal(size) * scale
    theirs = ours.copy()
    mean, largest = norms.mean_and_largest(ours, gradient, np, run=run, block=4)
    wanted = mean_and_largest(theirs, gradient)
    assert largest == wanted[1]
    assert math.isclose(mean, wanted[0], rel_tol=1e-14)
    same_bits(ours, theirs)


def test_a_mean_whose_sum_overflows():
    array = np.full(11, 1.7e308)
    assert norms.mean_and_largest(array, None, np, **SMALL) == pytest.approx((1.7e308, 1.7e308), rel=1e-14)
