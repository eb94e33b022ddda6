"""Merges and sums of many, against the CPU's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import SMALL, few, indices_of, same_bits, seeds, there, values_of

from sparseallreduce import SparseStream
from sparseallreduce.errors import StreamError
from sparseallreduce.streams import kernels
from sparseallreduce.streams.operator import MAX, MIN, PROD, SUM, Operator
from sparseallreduce.streams.reduction import Reduction

merging = there("merging")

LEFT = Operator("left", lambda a, b, out: np.copyto(out, a), 0)


def on_cpu(ia, va, ib, vb, op):
    room = len(ia) + len(ib)
    indices, values = np.empty(room, ia.dtype), np.empty((room, *va.shape[1:]), va.dtype)
    count = kernels.merge(ia, va, ib, vb, op, indices, values)
    return indices[:count], values[:count]


def check(ia, va, ib, vb, op, **options):
    got = merging.merge(ia, va, ib, vb, op, np, **(options or SMALL))
    for ours, theirs in zip(got, on_cpu(ia, va, ib, vb, op), strict=True):
        same_bits(ours, theirs)


@few
@given(seeds, st.integers(0, 20), st.integers(0, 20), st.sampled_from([np.uint32, np.uint64]), st.integers(1, 9), st.integers(1, 5))
def test_a_merge_has_the_bits_of_the_cpu(seed, m, n, index_dtype, run, block):
    rng = np.random.default_rng(seed)
    lo = 2**64 - 25 if index_dtype is np.uint64 else 2**32 - 25
    dtype = rng.choice([np.float32, np.float64, np.int32, np.int64])
    sets = [indices_of(rng, count, 25, index_dtype, lo) for count in (m, n)]
    check(sets[0], values_of(rng, m, dtype), sets[1], values_of(rng, n, dtype), SUM, run=run, block=block)


KINDS = [
    *((op, dtype) for op in (SUM, PROD, MIN, MAX, LEFT) for dtype in (np.float32, np.int64, np.float16)),
    *((op, dtype) for op in (SUM, PROD, LEFT) for dtype in (np.complex64, np.complex128)),  # which have no order
]


@pytest.mark.parametrize("op, dtype", KINDS, ids=lambda of: getattr(of, "name", getattr(of, "__name__", None)))
@pytest.mark.parametrize("width", [None, 1, 3, 0])
def test_operators_dtypes_and_rows(op, dtype, width):
    rng = np.random.default_rng(5)
    shape = () if width is None else (width,)
    ia, ib = (indices_of(rng, count, 12, np.uint32) for count in (7, 6))
    check(ia, values_of(rng, (7, *shape), dtype), ib, values_of(rng, (6, *shape), dtype), op)


@pytest.mark.parametrize("m, n", [(0, 0), (0, 1), (1, 0), (1, 1), (9, 9), (9, 0), (1, 9)])
def test_equal_sets_and_empty_ones(m, n):
    ia, ib = np.arange(m, dtype=np.uint32), np.arange(n, dtype=np.uint32)
    for run in (1, 2, 3, 100):
        check(ia, np.arange(m) + 0.5, ib, np.arange(n) - 0.25, SUM, run=run, block=3)


@few
@given(seeds, st.integers(1, 7))
def test_many_are_summed_in_the_order_of_the_tree(seed, ranks):
    rng = np.random.default_rng(seed)
    parts = [indices_of(rng, int(rng.integers(0, 9)), 12, np.uint32) for _ in range(ranks)]
    entries = [(indices, values_of(rng, len(indices), np.float32)) for indices in parts]
    expected = Reduction(SUM).many([SparseStream(*entry, 10**6) for entry in entries])
    indices, values = merging.merge_many(entries, SUM, np, **SMALL)
    same_bits(indices, expected.indices)
    same_bits(values, expected.values)


def test_what_does_not_fit_is_an_error():
    indices, values = np.arange(3, dtype=np.uint32), np.ones(3)
    good = (indices, values)
    for bad in ((indices, values[:2]), (indices.astype(np.uint64), values), (indices, np.ones(3, np.float32)), (indices, np.ones((3, 2)))):
        for order in ((*good, *bad), (*bad, *good)):
            with pytest.raises(StreamError):
                merging.merge(*order, SUM, np)
    with pytest.raises(StreamError, match="C-contiguous"):
        merging.merge(indices, np.ones(6)[::2], *good, SUM, np)
    with pytest.raises(StreamError, match="uint32 or uint64"):
        merging.merge(indices.astype(np.int64), values, indices.astype(np.int64), values, SUM, np)
    with pytest.raises(StreamError, match="no streams"):
        merging.merge_many([], SUM, np)


@few
@given(seeds, st.integers(2, 6), st.sampled_from([None, 2]), st.booleans())
def test_sums_of_many_that_nobody_has_counted_have_the_bits_of_the_cpu(seed, count, width, room):
    """Whatever lies behind the entries that count, in the arrays with room for more."""
    rng = np.random.default_rng(seed)
    row = () if width is None else (width,)
    streams = [(indices_of(rng, n, 14, np.uint32), values_of(rng, (n, *row), np.float32)) for n in rng.integers(0, 9, count)]
    wanted, total = streams[0], streams[0]
    for stream in streams[1:]:
        wanted = on_cpu(*wanted, *stream, SUM)
        total = merging.loosely(total, stream, SUM, np, **SMALL)
        assert len(total.indices) >= total.length[0]
        if room:
            total.indices[total.length[0] :] = rng.integers(0, 14)
    for ours, theirs in zip(total, wanted, strict=False):
        same_bits(ours[: total.length[0]], theirs)
    assert merging.loosely(streams[0], streams[1], LEFT, np) is None
