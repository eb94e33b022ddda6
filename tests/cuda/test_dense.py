"""Scatters, and what is present in dense arrays, against the CPU's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import few, indices_of, same_bits, seeds, there, values_of

from sparseallreduce.errors import StreamError
from sparseallreduce.streams import kernels
from sparseallreduce.streams.operator import MAX, MIN, PROD, SUM, Operator

device = there("dense")

LEFT = Operator("left", lambda a, b, out: np.copyto(out, a), 0)
KINDS = [
    *((op, dtype) for op in (SUM, PROD, MIN, MAX, LEFT) for dtype in (np.float32, np.float64, np.int32, np.float16)),
    *((op, dtype) for op in (SUM, PROD) for dtype in (np.complex64, np.complex128)),
]


@pytest.mark.parametrize("op, dtype", KINDS, ids=lambda of: getattr(of, "name", getattr(of, "__name__", None)))
@pytest.mark.parametrize("shape", [(), (2,), (0,)], ids=str)
def test_scatter_has_the_bits_of_the_cpu(op, dtype, shape):
    rng = np.random.default_rng(1)
    lo = 2**32 - 9
    indices = indices_of(rng, 6, 9, np.uint32, lo)
    values, start = values_of(rng, (6, *shape), dtype), values_of(rng, (9, *shape), dtype)
    for ours, theirs in ((device.scatter, kernels.scatter), (device.scatter_set, kernels.scatter_set)):
        got, wanted = start.copy(), start.copy()
        operator = (op,) if ours is device.scatter else ()
        ours(indices, values, lo, *operator, got, np, block=4)
        theirs(indices, values, lo, *operator, wanted)
        same_bits(got, wanted)


@pytest.mark.parametrize("index_dtype, lo", [(np.uint32, 0), (np.uint64, 2**64 - 5)])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_scatter_of_none_one_and_all(index_dtype, lo, count):
    indices = (np.arange(count, dtype=np.uint64) + np.uint64(lo)).astype(index_dtype)
    got = np.ones(5)
    device.scatter(indices, np.arange(count) + 0.5, lo, SUM, got, np, block=2)
    np.testing.assert_array_equal(got, 1 + np.where(np.arange(5) < count, np.arange(5) + 0.5, 0))


@pytest.mark.parametrize("indices, lo", [([3, 8], 4), ([4, 9], 4), ([4, 2, 5], 4), ([0], 1)])
def test_a_place_outside_is_an_error_before_anything_is_changed(indices, lo):
    indices, dense = np.array(indices, np.uint32), np.zeros(5)
    for scatter, operator in ((device.scatter, (SUM,)), (device.scatter_set, ()), (device.scatter, (LEFT,))):
        with pytest.raises(StreamError, match="leave the range"):
            scatter(indices, np.ones(len(indices)), lo, *operator, dense, np)
    assert not dense.any()


def test_arrays_that_do_not_fit_are_errors():
    indices = np.arange(2, dtype=np.uint32)
    for values, dense in ((np.ones(3), np.ones(4)), (np.ones(2), np.ones(4, np.float32)), (np.ones(2), np.ones((4, 2)))):
        with pytest.raises(StreamError):
            device.scatter(indices, values, 0, SUM, dense, np)
    with pytest.raises(StreamError, match="contiguous"):
        device.scatter_set(indices, np.ones(2), 0, np.ones(8)[::2], np)
    with pytest.raises(StreamError, match="contiguous"):
        device.gather_present(np.ones(8)[::2], 0, np.uint32, np)
    with pytest.raises(StreamError, match="dimension"):
        device.gather_present(np.ones((2, 2, 2)), 0, np.uint32, np)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32, np.int64, np.complex64, np.complex128])
@pytest.mark.parametrize("shape", [(11,), (7, 3), (5, 1), (4, 0), (0,), (1,)], ids=str)
def test_what_is_present_is_what_the_cpu_finds(dtype, shape):
    rng = np.random.default_rng(2)
    dense = values_of(rng, shape, dtype)
    dense[rng.random(shape[0]) < 0.6] = 0
    dense[rng.random(shape[0]) < 0.2] = -0.0 if dense.dtype.kind != "i" else 0
    for index_dtype, lo in ((np.uint32, 3), (np.uint64, 2**63)):
        got = device.gather_present(dense, lo, index_dtype, np, run=2, block=3)
        for ours, theirs in zip(got, kernels.gather_present(dense, lo, index_dtype), strict=True):
            same_bits(ours, theirs)


@few
@given(seeds, st.integers(0, 30), st.integers(1, 7), st.integers(1, 5))
def test_what_is_present_does_not_depend_on_runs_and_blocks(seed, size, run, block):
    rng = np.random.default_rng(seed)
    dense = np.where(rng.random(size) < rng.random(), values_of(rng, size, np.float32), np.float32(0))
    got = device.gather_present(dense, 0, np.uint32, np, run=run, block=block)
    for ours, theirs in zip(got, kernels.gather_present(dense, 0, np.uint32), strict=True):
        same_bits(ours, theirs)
