"""The compiled kernels against their NumPy twins, bit for bit, and the promises of both."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import ALL, examples

from sparseallreduce.errors import StreamError
from sparseallreduce.streams import dtypes, kernels
from sparseallreduce.streams.kernels import reference
from sparseallreduce.streams.operator import MAX, MIN, PROD, SUM, Operator

INDEX_DTYPES = (np.uint32, np.uint64)
COMPLEX = (np.complex64, np.complex128)
HALVES = tuple(dtype.type for dtype in dtypes.HALVES)
VALUE_DTYPES = (np.float32, np.float64, np.int32, np.int64, *HALVES, *COMPLEX)
OPERATORS = (SUM, PROD, MIN, MAX, Operator("left", lambda a, b, out: np.copyto(out, a), 0), Operator("hypot", np.fmax, 0))
# Each is compiled apart, so not all combinations: all values and operators with usual indices, and some of each with the others.
KINDS = (
    *((np.uint32, value_dtype, 1, op) for value_dtype in VALUE_DTYPES[:-2] for op in OPERATORS),
    *((np.uint32, value_dtype, 1, op) for value_dtype in COMPLEX for op in (SUM, PROD, OPERATORS[-2])),
    *((np.uint64, value_dtype, 1, SUM) for value_dtype in (np.float32, np.float64, np.int64)),  # narrower than an index, and not
    *((np.uint32, value_dtype, 2, op) for value_dtype in (np.float32, *HALVES, np.int32) for op in (SUM, MIN, OPERATORS[-1])),
    (np.uint64, np.float64, 2, SUM),
    (np.uint32, np.complex64, 2, SUM),
)
# Compiling takes most of these tests' time: but for a release all sums, all of float32, and one or two operators on each other dtype.
KINDS = tuple(kind for place, kind in enumerate(KINDS) if ALL or kind[3] is SUM or kind[1] is np.float32 or place % 5 == 0)
SPECIAL = (0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, 5e-324, 1e38, 6e-8, 65504.0, 1.0, -1.0)

fast = settings(deadline=None, max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow])


def bits(values):
    """The values as integers, every NaN that arithmetic made as one and the same."""
    if values.dtype.kind == "c":
        values = parts_of(values)
    integers = values.view(f"u{values.itemsize}")
    return integers if values.dtype.kind in "iu" else np.where(np.isnan(values), integers.dtype.type(7), integers)


def parts_of(values):
    """Of complex numbers, real and imaginary parts as rows."""
    return np.ascontiguousarray(values).view(values.real.dtype).reshape(*values.shape, 2)


def random_values(rng, shape, dtype):
    dtype = np.dtype(dtype)
    if dtype.kind == "i":
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    if dtype.kind == "c":
        return random_values(rng, (*np.atleast_1d(shape), 2), f"f{dtype.itemsize // 2}").view(dtype)[..., 0]
    values = rng.standard_normal(shape)
    with np.errstate(all="ignore"):
        special = rng.choice(SPECIAL, shape).astype(dtype)
        return np.where(rng.random(shape) < 0.4, special, values.astype(dtype))


def misplaced(array):
    """A read-only copy that starts at an odd address, as a part of a message does."""
    room = np.empty(array.nbytes + 1, np.uint8)
    copy = room[1:].view(array.dtype).reshape(array.shape) if array.nbytes else array.copy()
    copy[...] = array
    copy.flags.writeable = False
    return copy


def random_indices(rng, count, low, high, dtype):
    return np.unique(rng.integers(low, high, count, dtype=np.uint64, endpoint=True)).astype(dtype)


@st.composite
def streams(draw, how_many=1, dense_at_most=None):
    """Some sorted index sets in related ranges, with values of one dtype and width, and an operator."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    index_dtype, value_dtype, ndim, op = draw(st.sampled_from(KINDS))
    width = (draw(st.sampled_from([0, 1, 3, 16])),) if ndim == 2 else ()
    largest = dense_at_most or int(np.iinfo(index_dtype).max)
    parts = []
    for _ in range(how_many):
        span = draw(st.sampled_from([10, 300, 5_000, largest]))
        low = draw(st.sampled_from([0, 100, 4_000, largest]))
        low, high = min(low, max(largest - span, 0)), min(low + span, largest)
        indices = random_indices(rng, draw(st.sampled_from([0, 1, 2, 7, 100, 3_000, 20_000])), low, high, index_dtype)
        parts.append((misplaced(indices), misplaced(random_values(rng, (len(indices), *width), value_dtype))))
    return *parts, op


def merged(module, a, b, op):
    iout = np.empty(len(a[0]) + len(b[0]), a[0].dtype)
    vout = np.empty((len(iout), *a[1].shape[1:]), a[1].dtype)
    n = module.merge(*a, *b, op, iout, vout)
    return iout[:n], vout[:n]


def assert_same(found, expected):
    assert found[0].dtype == expected[0].dtype and found[1].dtype == expected[1].dtype
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(bits(found[1]), bits(expected[1]))


@fast
@given(streams(2))
def test_merge_gives_the_bits_of_its_twin(given_streams):
    a, b, op = given_streams
    assert_same(merged(kernels, a, b, op), merged(reference, a, b, op))


@fast
@given(streams(2))
def test_merge_gives_what_the_dense_operator_gives(given_streams):
    (ia, va), (ib, vb), op = given_streams
    indices, values = merged(kernels, (ia, va), (ib, vb), op)
    expected_indices = np.union1d(ia, ib)
    np.testing.assert_array_equal(indices, expected_indices)
    for i, v, other in ((ia, va, ib), (ib, vb, ia)):
        alone = ~np.isin(i, other)
        assert values[np.searchsorted(indices, i[alone])].tobytes() == v[alone].tobytes()  # copies keep the payload of a NaN
    shared, in_a, in_b = np.intersect1d(ia, ib, assume_unique=True, return_indices=True)
    with np.errstate(all="ignore"):
        combined = np.empty_like(va[in_a])
        op.ufunc(va[in_a], vb[in_b], out=combined)
    np.testing.assert_array_equal(bits(values[np.searchsorted(indices, shared)]), bits(combined))


@pytest.mark.parametrize("value_dtype", VALUE_DTYPES)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize(
    ("count_a", "count_b", "range_a", "range_b"),
    [
        (60_000, 60_000, (0, 2**24), (0, 2**24)),
        (60_000, 60_000, (0, 70_000), (0, 70_000)),
        (60_000, 60_000, (0, 2**20), (2**20 + 1, 2**21)),
        (60_000, 60_000, (2**20 + 1, 2**21), (0, 2**20)),
        (60_000, 30_000, (0, 2**20), (2**19, 2**21)),
        (100_000, 300, (0, 2**24), (0, 2**24)),
        (300, 100_000, (0, 120_000), (0, 120_000)),
        (100_000, 20_000, (0, 2**24), (2**20, 2**20 + 25_000)),
        (59_000, 60_000, (0, 2**20), (2**20 + 1, 2**21)),
        (60_000, 59_000, (2**20 + 1, 2**21), (0, 2**20)),
    ],
)
def test_merge_of_many_blocks_gives_the_bits_of_its_twin(index_dtype, value_dtype, count_a, count_b, range_a, range_b):
    rng = np.random.default_rng(count_b)
    ia, ib = random_indices(rng, count_a, *range_a, index_dtype), random_indices(rng, count_b, *range_b, index_dtype)
    a, b = (ia, random_values(rng, ia.shape, value_dtype)), (ib, random_values(rng, ib.shape, value_dtype))
    assert_same(merged(kernels, a, b, SUM), merged(reference, a, b, SUM))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, *HALVES])
@pytest.mark.parametrize("width", [(), (4,)])
def test_merge_copies_signalling_nans_and_negative_zeros_untouched(dtype, width):
    unsigned = np.dtype(f"u{np.dtype(dtype).itemsize}")
    quiet_bit = {2: 0x7C01, 4: 0x7F800001, 8: 0x7FF0000000000001}[unsigned.itemsize]
    patterns = np.array([quiet_bit, 1 << (8 * unsigned.itemsize - 1), 1], unsigned)
    values = np.tile(patterns, 1000)
    values = np.repeat(values[:, None], 4, axis=1) if width else values
    ia, ib = np.arange(0, 6000, 2, dtype=np.uint32), np.arange(1, 6000, 2, dtype=np.uint32)
    _, union = merged(kernels, (ia, values.view(dtype)), (ib, values.view(dtype)), SUM)
    np.testing.assert_array_equal(union.view(unsigned), np.repeat(values, 2, axis=0))


def test_integer_sums_wrap_as_in_numpy():
    index = np.array([3], np.uint32)
    for dtype in (np.int32, np.int64):
        largest = np.array([np.iinfo(dtype).max], dtype)
        assert merged(kernels, (index, largest), (index, largest), SUM)[1][0] == -2


def test_merge_combines_in_the_order_of_its_arguments():
    rng = np.random.default_rng(0)
    minus = Operator("minus", np.subtract, 0)
    ia, ib = np.arange(0, 900, 3, dtype=np.uint32), np.arange(0, 900, 2, dtype=np.uint32)
    a, b = (ia, rng.standard_normal(len(ia))), (ib, rng.standard_normal(len(ib)))
    indices, values = merged(kernels, a, b, minus)
    assert values[np.searchsorted(indices, 6)] == a[1][2] - b[1][3]


@pytest.mark.parametrize("op", OPERATORS[:4], ids=lambda op: op.name)
def test_minimum_and_maximum_hand_on_nan_and_choose_between_zeros_as_numpy_does(op):
    values = np.array(np.meshgrid(SPECIAL, SPECIAL)).reshape(2, -1)
    indices = np.arange(values.shape[1], dtype=np.uint32)
    for dtype in (np.float32, np.float64, *HALVES):
        with np.errstate(all="ignore"):
            a, b = np.ascontiguousarray(values[0].astype(dtype)), np.ascontiguousarray(values[1].astype(dtype))
        assert_same(merged(kernels, (indices, a), (indices, b), op), merged(reference, (indices, a), (indices, b), op))


@fast
@given(streams(dense_at_most=30_000), st.integers(0, 100), st.integers(0, 2**32))
def test_scatter_gives_the_bits_of_its_twin(given_stream, before, seed):
    (indices, values), op = given_stream
    lo = max(int(indices[0]) - before, 0) if len(indices) else 0
    size = int(indices[-1]) - lo + 1 + before if len(indices) else before
    found = random_values(np.random.default_rng(seed), (size, *values.shape[1:]), values.dtype)
    expected = found.copy()
    kernels.scatter(indices, values, lo, op, found)
    reference.scatter(indices, values, lo, op, expected)
    np.testing.assert_array_equal(bits(found), bits(expected))
    kernels.scatter_set(indices, values, lo, found)
    reference.scatter_set(indices, values, lo, expected)
    np.testing.assert_array_equal(bits(found), bits(expected))


@fast
@given(
    st.sampled_from(VALUE_DTYPES),
    st.sampled_from([(), (1,), (5,)]),
    st.sampled_from([0, 1, 15, 16, 17, 4096, 10_000]),
    st.sampled_from([0.0, 0.0005, 0.01, 0.3, 0.9, 1.0]),
    st.sampled_from(INDEX_DTYPES),
    st.sampled_from([0, 1, 2**32 - 10_000]),
    st.integers(0, 2**32),
)
def test_gather_present_gives_the_bits_of_its_twin(dtype, width, size, density, index_dtype, lo, seed):
    rng = np.random.default_rng(seed)
    dense = random_values(rng, (size, *width), dtype)
    dense[rng.random(size) >= density] = 0
    found = kernels.gather_present(misplaced(dense), lo, index_dtype)
    expected = reference.gather_present(dense, lo, index_dtype)
    assert_same(found, expected)
    assert found[0].flags.owndata and found[1].flags.owndata and found[1].flags.writeable


def test_gather_present_takes_nan_for_present_and_negative_zero_for_absent():
    for dtype in (*HALVES, np.float32, np.float64, *COMPLEX):
        indices, values = kernels.gather_present(np.array([0.0, np.nan, -0.0, 2.0], dtype), 7, np.uint64)
        assert indices.tolist() == [8, 10] and np.isnan(values[0]) and values[1] == 2
        indices, values = kernels.gather_present(np.array([[0.0, -0.0], [-0.0, np.nan], [3.0, 0.0]], dtype), 0, np.uint32)
        assert indices.tolist() == [1, 2] and values.shape == (2, 2)


@fast
@given(streams(), st.integers(0, 2**65), st.lists(st.integers(0, 20_000), max_size=3))
def test_first_violation_finds_the_first(given_stream, size, repeats):
    indices = np.array(given_stream[0][0])
    for position in repeats:
        if 0 < position < len(indices):
            indices[position] = indices[position - 1]
    wrong = indices.astype(object) >= size
    wrong[1:] |= indices[1:] <= indices[:-1]
    expected = np.flatnonzero(wrong)
    assert kernels.first_violation(misplaced(indices), size) == (expected[0] if len(expected) else -1)
    assert reference.first_violation(indices, size) == (expected[0] if len(expected) else -1)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_first_violation_at_the_ends_of_the_range(index_dtype):
    largest = int(np.iinfo(index_dtype).max)
    full = np.array([0, largest], index_dtype)
    for module in (kernels, reference):
        assert module.first_violation(full, largest + 1) == -1
        assert module.first_violation(full, largest) == 1
        assert module.first_violation(full, 0) == 0
        assert module.first_violation(full[:0], 0) == -1


@fast
@given(streams(), st.sampled_from([1, 2, 5, 40]), st.integers(0, 2**32))
def test_sum_duplicates_gives_the_bits_of_its_twin(given_stream, repeats, seed):
    (unique, some), op = given_stream
    rng = np.random.default_rng(seed)
    unique = unique[:500]
    indices = np.repeat(unique, rng.integers(1, repeats, len(unique), endpoint=True))
    values = random_values(rng, (len(indices), *some.shape[1:]), some.dtype)
    found = kernels.sum_duplicates(misplaced(indices), misplaced(values), op)
    assert_same(found, reference.sum_duplicates(indices, values, op))
    np.testing.assert_array_equal(found[0], unique)


@st.composite
def rows(draw):
    """Packed streams of a few ranks behind 16 bytes, their counts, the dimension and a range."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    index_dtype, value_dtype = draw(st.sampled_from([kind[:2] for kind in KINDS if kind[2:] == (1, SUM)]))
    size, ranks = draw(st.sampled_from([1, 2, 9, 64, 700, 40_000])), draw(st.integers(2, 9))
    fills = draw(st.lists(st.sampled_from(["none", "one", "few", "half", "dense"]), min_size=ranks, max_size=ranks))
    held, counts = np.zeros((ranks, 32 + 32 * size), np.uint8), []
    for row, fill in zip(held, fills):
        count = {"none": 0, "one": 1, "few": size // 8, "half": size // 2, "dense": size}[fill]
        values = random_values(rng, count, value_dtype)
        row[16 : 16 + values.nbytes] = values.view(np.uint8)
        if fill != "dense":
            indices = np.sort(rng.choice(size, count, replace=False)).astype(index_dtype)
            behind = -(-(16 + values.nbytes) // indices.itemsize) * indices.itemsize
            row[behind : behind + indices.nbytes] = indices.view(np.uint8)
        counts.append(-1 if fill == "dense" else count)
    bounds = sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    return held.view(index_dtype), held.view(value_dtype), np.array(counts), size, *bounds


@fast
@given(rows())
def test_sum_rows_gives_the_bits_of_its_twin(given_rows):
    held, values, counts, size, lo, hi = given_rows
    ours, theirs = np.ones((2, size), values.dtype)
    kernels.sum_rows(held, values, 16, counts, lo, hi, ours)
    assert reference.sum_rows(held, values, 16, counts, lo, hi, None, theirs) == 0
    assert (ours[:lo] == 1).all()
    assert (ours[hi:] == 1).all()
    np.testing.assert_array_equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("module", [kernels, reference])
@pytest.mark.parametrize(("counts", "index"), [([1, 9], 0), ([-1, 1], 50), ([2, -1], 50), ([9, -1], 0)])
def test_sum_rows_refuses_what_would_lead_out_of_its_arrays(module, counts, index):
    rows, dense = np.zeros((2, 16), np.uint32), np.zeros(12 if index else 40, np.float32)
    rows[:, [1, 3]] = index  # behind one value, and the second behind two
    cursors = [None] * (module is reference)
    with pytest.raises(StreamError) if module is kernels else nullcontext():
        assert module.sum_rows(rows, rows.view(np.float32), 0, np.array(counts), 0, len(dense), *cursors, dense) < 0


@st.composite
def packed_rows(draw):
    """Packed streams of a few ranks behind some bytes, their counts and the dimension, up to the largest that their indices know."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    index_dtype, value_dtype = draw(st.sampled_from([kind[:2] for kind in KINDS if kind[2:] == (1, SUM)]))
    size, ranks = draw(st.sampled_from([1, 9, 700, 50_000, int(np.iinfo(index_dtype).max)])), draw(st.integers(1, 9))
    counts = np.array(draw(st.lists(st.sampled_from([0, 1, 5, 300, 20_000]), min_size=ranks, max_size=ranks)))
    span = max(1, size // draw(st.sampled_from([1, 1, 10])))  # they may all lie in one corner
    streams = [random_indices(rng, count, 0, span - 1, index_dtype)[:size] for count in counts]
    start = draw(st.sampled_from([0, 48]))
    held = np.zeros((ranks, start + 32 * max(map(len, streams)) + 16), np.uint8)
    for row, indices in zip(held, streams):
        values = random_values(rng, len(indices), value_dtype)
        behind = -(-(start + values.nbytes) // indices.itemsize) * indices.itemsize
        row[start : start + values.nbytes] = values.view(np.uint8)
        row[behind : behind + indices.nbytes] = indices.view(np.uint8)
    return held.view(index_dtype), held.view(value_dtype), start, np.array([len(indices) for indices in streams]), size


@fast
@given(packed_rows(), st.integers(1, 9), st.sampled_from([None, 16, 500]), st.booleans())
def test_cut_rows_gives_the_bits_of_its_twin_and_sums_of_equal_parts(packed, parts, piece, at_end):
    """Whatever the pieces that are summed at a time, down to one with an entry of each row."""
    held, values, start, counts, size = packed
    ranks = len(counts)
    before, shares = np.zeros(ranks + 1, np.uint64), []
    for part in range(parts):
        found = []
        for module in (kernels, reference):
            bounds = np.zeros((4, ranks + 1), np.uint64)
            bounds[1] = [*counts, size]
            total, different = int(counts.sum()), module.estimate_union(held, start, values.itemsize, counts, 7)
            if start == 0:
                total = module.cut_rows(held, values.itemsize, counts, size, part, parts, bounds)
            begins, ends, earlier = bounds[0].copy(), bounds[1].copy(), bounds[2, ranks].copy()
            out = np.zeros((1, total + 3), held.dtype), np.zeros((1, total + 3), values.dtype)
            if module is kernels:
                with mock.patch.object(kernels.rows, "PIECE", piece or kernels.PIECE):
                    inner = kernels.inner_sums(ranks, total, held.dtype, values.dtype)
                    n = kernels.sum_cut_rows(held, values, start, counts, bounds, inner, *out, whole=start > 0, at_end=at_end)
            else:
                n = reference.sum_cut_rows(held, values, start, counts, bounds, start > 0, at_end, total, 0, *out, *out)
            place = slice(total + 3 - n, None) if at_end else slice(n)
            found.append((total, different, begins, ends, earlier, out[0][0, place], out[1][0, place]))
        for ours, theirs in zip(*found):
            np.testing.assert_array_equal(bits(np.asarray(ours)), bits(np.asarray(theirs)))
        total, different, begins, ends, earlier, indices, _ = found[0]
        assert (indices[1:] > indices[:-1]).all()
        if start:
            return
        assert (counts.sum() > 0) <= different <= counts.sum()
        np.testing.assert_array_equal(begins, before)
        assert earlier == before[:ranks].sum()
        before = ends
        shares.append(total)
    np.testing.assert_array_equal(before, [*counts, size])
    if size == np.iinfo(held.dtype).max and counts.min() > 1000:  # where chance evens out
        assert max(shares) < 1.3 * sum(shares) / parts


@pytest.mark.parametrize("module", [kernels, reference])
def test_the_estimate_of_a_union_is_about_right(module):
    rng, rows = np.random.default_rng(0), np.zeros((8, 2000), np.uint32)
    for wanted in (1000, 1.0):  # entries that all have, and a share of what there is by chance
        if wanted == 1000:
            rows[:, 1000:] = np.arange(0, 2000, 2)
        else:
            rows[:, 1000:] = [np.sort(rng.choice(4000, 1000, replace=False)) for _ in range(8)]
            wanted = len(np.unique(rows[:, 1000:]))
        assert abs(module.estimate_union(rows, 0, 4, np.full(8, 1000), 100) - wanted) < 0.1 * wanted


def test_a_sum_of_cut_rows_is_given_up_where_it_has_too_many_entries():
    rows = np.zeros((3, 8), np.uint32)
    rows[:, 4:] = [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]
    counts, out = np.full(3, 4), np.zeros((1, 12), np.uint32)
    inner = kernels.inner_sums(3, 12, np.uint32, np.float32)
    for limit, wanted in ((8, 8), (7, -1)):
        bounds = np.array([[0, 0, 0], [4, 4, 4], [0, 0, 0], [0, 0, 0]], np.uint64)
        given, outputs = (rows, rows.view(np.float32), 0, counts, bounds), (out, out.view(np.float32))
        assert reference.sum_cut_rows(*given, False, False, limit, 0, *inner, *outputs) == wanted
        assert kernels.sum_cut_rows(*given, inner, *outputs, limit=limit) == wanted


@pytest.mark.parametrize("length", [0, 1, 63, 64, 1000, 4097])
@pytest.mark.parametrize("at", [0, 1, 15, 64])
@pytest.mark.parametrize("module", [kernels, reference])
def test_what_is_written_past_the_caches_is_there(module, length, at):
    source = np.random.default_rng(0).integers(0, 256, length, np.uint8)
    for skipped in (0, 7):
        target = np.zeros(5000, np.uint8)[skipped:]
        module.write_past(target, at, source)
        assert np.array_equal(target[at : at + length], source)
        assert not target[:at].any() and not target[at + length :].any()
    with pytest.raises(StreamError) if module is kernels else nullcontext():
        assert module.write_past(target[: at + length][:-1], at, np.zeros(length + 1, np.uint8)) < 0


@pytest.mark.parametrize("module", [kernels, reference])
def test_cut_rows_do_not_lead_out_of_their_arrays(module):
    rows, outputs = np.zeros((2, 16), np.uint32), (np.zeros((1, 9), np.uint32), np.zeros((1, 9), np.float32))
    begins, ends, wide = np.zeros(2, np.uint64), np.array([5, 5], np.uint64), np.array([8, 8])

    def summed(counts, begins, ends, start=0):
        bounds, last = np.array([begins, ends, begins, begins]), () if module is kernels else (False, False, 99, 99)
        inner = [outputs] if module is kernels else outputs
        return module.sum_cut_rows(rows, rows.view(np.float32), start, counts, bounds, *last, *inner, *outputs)

    for call in (
        lambda: module.cut_rows(rows, 4, np.array([0, 9]), 100, 0, 2, np.zeros((4, 3), np.uint64)),
        lambda: module.cut_rows(rows, 4, np.array([0, 5]), 100, 0, 2, np.zeros((4, 2), np.uint64)),
        lambda: module.estimate_union(rows, 0, 4, np.array([0, 9]), 3),
        lambda: summed(np.array([0, 9]), begins, np.array([0, 9], np.uint64)),
        lambda: summed(wide, begins, ends),  # ten entries for nine places
        lambda: summed(wide, ends + np.uint64(1), ends),
        lambda: summed(np.array([4, 4]), begins, ends),
        lambda: summed(np.array([5, 0]), begins, np.array([5, 0], np.uint64), 32),
    ):
        try:
            found = call()
        except StreamError:
            continue
        assert found < 0


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@given(seed=st.integers(0, 2**32 - 1), count_a=st.integers(0, 50), count_b=st.integers(0, 50))
def test_shared_finds_the_indices_of_both(index_dtype, seed, count_a, count_b):
    rng = np.random.default_rng(seed)
    ia, ib = (np.sort(rng.choice(60, count, replace=False)).astype(index_dtype) for count in (count_a, count_b))
    for module in (kernels, reference):
        in_a, in_b = module.shared(ia, ib)
        assert ia[in_a].tolist() == ib[in_b].tolist() == sorted(set(ia.tolist()) & set(ib.tolist()))


@pytest.mark.parametrize("module", [kernels, reference])
def test_duplicates_are_combined_in_order_of_appearance(module):
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    _, total = module.sum_duplicates(np.zeros(1000, np.uint32), values)
    expected = np.float32(0)
    for value in values:
        expected += value
    assert total.tolist() == [expected]


@pytest.mark.parametrize("module", [kernels, reference])
def test_arrays_that_do_not_fit_together_are_refused(module):
    i, v = np.arange(4, dtype=np.uint32), np.ones(4, np.float32)
    with pytest.raises(StreamError):
        module.merge(i, v, i, v, SUM, np.empty(7, np.uint32), np.empty(8, np.float32))
    with pytest.raises(StreamError):
        module.merge(i, v[:3], i, v, SUM, np.empty(8, np.uint32), np.empty(8, np.float32))
    with pytest.raises(StreamError):
        module.scatter(i, v, 1, SUM, np.zeros(4, np.float32))
    with pytest.raises(StreamError):
        module.scatter_set(i, v, 0, np.zeros(3, np.float32))
    with pytest.raises(StreamError):
        module.sum_duplicates(i, v[:3])


def test_arrays_with_gaps_are_refused_by_compiled_kernels():
    i, v = np.arange(8, dtype=np.uint32)[::2], np.ones(8, np.float32)[::2]
    with pytest.raises(StreamError):
        kernels.merge(i, v, i, v, SUM, np.empty(8, np.uint32), np.empty(8, np.float32))
    with pytest.raises(StreamError):
        kernels.scatter(i, v, 0, SUM, np.zeros(8, np.float32))
    with pytest.raises(StreamError):
        kernels.gather_present(np.ones(8, np.float32)[::2], 0, np.uint32)
    with pytest.raises(StreamError):
        kernels.first_violation(i, 8)
    with pytest.raises(StreamError):
        kernels.sum_duplicates(i, v)


@pytest.mark.parametrize("wrong", [2**32 - 16, 64, 2**31])
@pytest.mark.parametrize("value_dtype", VALUE_DTYPES)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_an_index_out_of_range_amid_others_is_not_written_and_is_an_error(index_dtype, value_dtype, wrong):
    indices, values = np.arange(1, 60, dtype=index_dtype), np.ones(59, value_dtype)
    indices[30] = wrong
    minus = Operator("minus", np.subtract, 0)  # not compiled
    for width, module, op in product((0, 3, 16), (kernels, reference), (SUM, minus, None)):
        given = np.repeat(values[:, None], width, axis=1) if width else values
        memory = np.zeros((192, *given.shape[1:]), value_dtype)
        with pytest.raises(StreamError):
            module.scatter(indices, given, 0, op, memory[64:128]) if op else module.scatter_set(indices, given, 0, memory[64:128])
        assert not memory[:64].any() and not memory[128:].any()


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("module", [kernels, reference])
def test_an_index_below_a_part_is_an_error_and_not_a_place_counted_from_its_end(module, index_dtype):
    indices, dense = np.array([100, 99, 110], index_dtype), np.zeros(64)
    for write in (
        lambda: module.scatter(indices, np.ones(3), 100, SUM, dense),
        lambda: module.scatter_set(indices, np.ones(3), 100, dense),
    ):
        with pytest.raises(StreamError):
            write()
        assert not dense[11:].any()


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_garbage_do_not_lead_out_of_their_arrays_nor_on_for_ever(seed):
    """Whatever the indices and the counts: an error, or a result that means nothing, and no byte beside the outputs is written."""
    rng = np.random.default_rng(seed)
    ranks, room = int(rng.integers(1, 6)), 40_000
    for largest in (50, 100_000, 2**32 - 1):
        rows = rng.integers(0, largest, (ranks, room), dtype=np.uint32, endpoint=True)
        rows[: ranks // 2].sort(axis=1)
        for counts in (
            rng.integers(0, room // 2 + 1, ranks),
            rng.integers(-3, 4, ranks) * 2 ** int(rng.integers(0, 62)),
            np.array([-1, 3, 2**61, -(2**63), 2**62][:ranks]),
        ):
            assert_bounds_are_kept(rows, counts, 60_000)


def assert_bounds_are_kept(rows, counts, size):
    """Whatever kernels make of such rows, they write to their outputs alone."""
    ranks, values, total = len(rows), rows.view(np.float32), min(max(int(np.minimum(counts, rows.shape[1]).sum()), 0), rows.size)
    bounds, dense = np.zeros((4, ranks + 1), np.uint64), np.full(size + 128, 7, np.float32)
    inner = kernels.inner_sums(ranks, max(total, 1), np.uint32, np.float32)
    memory = np.full((2, total + 128), 7, np.uint32)
    sums = memory[:1, 64:-64], memory[1:, 64:-64].view(np.float32)
    for call in (
        lambda: kernels.sum_rows(rows, values, 0, counts, 0, size, dense[64:-64]),
        lambda: kernels.sum_rows(rows, values, 64, counts, 500, size // 2, dense[64:-64]),
        lambda: kernels.estimate_union(rows, 0, 4, counts, 5),
        lambda: kernels.cut_rows(rows, 4, counts, size, 1, 3, bounds),
        lambda: kernels.sum_cut_rows(rows, values, 0, counts, bounds, inner, *sums),
        lambda: kernels.sum_cut_rows(rows, values, 0, counts, bounds, inner, *sums, whole=True),
        lambda: kernels.sum_cut_rows(rows, values, 0, counts, bounds, inner, *sums, whole=True, at_end=True),
    ):
        with suppress(StreamError):
            call()
        assert (dense[:64] == 7).all() and (dense[-64:] == 7).all()
        assert (memory[:, :64] == 7).all() and (memory[:, -64:] == 7).all()


@pytest.mark.parametrize("at_end", [False, True])
def test_a_row_in_disorder_comes_to_an_end(at_end):
    """Pieces are cut at an index value, below which all of such a row may lie, or nothing."""
    rows = np.zeros((2, 80_000), np.uint32)
    for order in (np.arange(40_000)[::-1], np.roll(np.arange(40_000), 20_000), np.zeros(40_000)):
        rows[:, 40_000:] = order
        counts, bounds, out = np.full(2, 40_000), np.zeros((4, 3), np.uint64), np.zeros((1, 80_000), np.uint32)
        inner, values, sums = kernels.inner_sums(2, 80_000, np.uint32, np.float32), rows.view(np.float32), out.view(np.float32)
        n = kernels.sum_cut_rows(rows, values, 0, counts, bounds, inner, out, sums, whole=True, at_end=at_end)
        assert 0 < n <= 80_000


def test_rows_whose_entries_are_not_all_added_are_an_error():
    rows, dense = np.zeros((1, 12), np.uint32), np.zeros(100, np.float32)
    rows[0, 6:] = [1, 2, 2**32 - 1, 3, 4, 5]  # what follows the index out of range is not reached
    with pytest.raises(StreamError):
        kernels.sum_rows(rows, rows.view(np.float32), 0, np.array([6]), 0, 100, dense)


@pytest.mark.parametrize("width", [(), (3,)])
def test_indices_that_another_thread_changes_do_not_lead_out_of_the_arrays(width):
    """Run under a tool that watches memory, or long enough, this finds an index that is read twice."""
    rng, size, done = np.random.default_rng(0), 1000, threading.Event()
    sound = np.sort(rng.choice(size, 300, replace=False)).astype(np.uint32)
    indices, values = sound.copy(), np.ones((300, *width), np.float32)

    def disturb():
        while not done.is_set():
            indices[1:-1] = 2**32 - 1
            indices[:] = sound
            indices[150:] = indices[100]

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    try:
        memory = np.zeros((3 * size, *width), np.float32)
        for _ in range(300):
            for write in (
                lambda: kernels.scatter(indices, values, 0, SUM, memory[size:-size]),
                lambda: kernels.scatter_set(indices, values, 0, memory[size:-size]),
                lambda: kernels.sum_duplicates(indices, values),
                lambda: kernels.merge(
                    indices, values, sound, values, SUM, np.empty(600, np.uint32), np.empty((600, *width), np.float32)
                ),
            ):
                with suppress(StreamError):
                    write()
    finally:
        done.set()
        disturbing.join()
    assert not memory[:size].any() and not memory[-size:].any()


def misfits(array, output=False):
    """The same bytes as arrays that a kernel compiled for this one must not get."""
    yield array.view(f"{'i' if array.dtype.kind != 'i' else 'f'}{array.itemsize}")
    yield array.view(array.dtype.newbyteorder())
    yield array[..., None]
    yield array[None, None, None]
    yield array.reshape(-1)[0].reshape(())
    if output:
        locked = array.view()
        locked.flags.writeable = False
        yield locked


@pytest.mark.parametrize("op", [SUM, Operator("minus", np.subtract, 0)], ids=lambda op: op.name)
@pytest.mark.parametrize("value_dtype", [np.float32, *HALVES, np.complex64])
def test_no_kernel_takes_an_array_of_another_dtype_or_dimension_or_writes_to_a_read_only_one(op, value_dtype):
    i, v = np.arange(4, dtype=np.uint32), np.ones(4, value_dtype)
    wide, out, places = np.zeros(8, value_dtype), np.zeros(8, value_dtype), np.zeros(8, np.uint32)
    calls = [
        *(lambda x=x: kernels.merge(i, v, x, v, op, places, out) for x in misfits(i)),
        *(lambda x=x: kernels.merge(i, v, i, x, op, places, out) for x in misfits(v)),
        *(lambda x=x: kernels.merge(i, v, i, v, op, x, out) for x in misfits(places, output=True)),
        *(lambda x=x: kernels.merge(i, v, i, v, op, places, x) for x in misfits(out, output=True)),
        *(lambda x=x: kernels.scatter(i, v, 0, op, x) for x in misfits(wide, output=True)),
        *(lambda x=x: kernels.scatter_set(i, v, 0, x) for x in misfits(wide, output=True)),
        *(lambda x=x: kernels.shared(i, x) for x in misfits(i)),
        *(lambda x=x: kernels.scatter(x, v, 0, op, wide) for x in [*misfits(i)][2:]),
        *(lambda x=x: kernels.first_violation(x, 9) for x in [*misfits(i)][2:]),
        *(lambda x=x: kernels.sum_duplicates(x, v, op) for x in [*misfits(i)][2:]),
        *(lambda x=x: kernels.write_past(x, 0, np.zeros(2, np.uint8)) for x in [*misfits(np.zeros(9, np.uint8), output=True)][2:]),
    ]
    for call in calls:
        with pytest.raises(StreamError):
            call()
    assert not wide.any()


def test_no_kernel_of_rows_takes_arrays_that_it_was_not_compiled_for():
    rows, out = np.zeros((2, 16), np.uint32), np.zeros((1, 8), np.uint32)
    values, counts, bounds, dense = rows.view(np.float32), np.zeros(2, np.int64), np.zeros((4, 3), np.uint64), np.zeros(9, np.float32)
    inner = kernels.inner_sums(2, 8, np.uint32, np.float32)
    sums = out.view(np.float32)
    for call in (
        *(lambda x=x: kernels.sum_rows(rows, values, 0, counts, 0, 9, x) for x in misfits(dense, output=True)),
        *(lambda x=x: kernels.sum_rows(rows, values, 0, x, 0, 9, dense) for x in misfits(counts)),
        *(lambda x=x: kernels.cut_rows(rows, 4, counts, 9, 0, 2, x) for x in misfits(bounds, output=True)),
        *(lambda x=x: kernels.estimate_union(rows, 0, 4, x, 3) for x in misfits(counts)),
        *(lambda x=x: kernels.sum_cut_rows(rows, values, 0, counts, bounds, inner, x, sums) for x in misfits(out, output=True)),
        *(lambda x=x: kernels.sum_cut_rows(rows, values, 0, counts, bounds, inner, out, x) for x in misfits(sums, output=True)),
        *(lambda x=x: kernels.sum_cut_rows(rows, values, 0, counts, x, inner, out, sums) for x in misfits(bounds, output=True)),
        *(lambda x=x: kernels.sum_cut_rows(rows, values, 0, counts, bounds, (x, x), out, sums) for x in misfits(out)),
    ):
        with pytest.raises(StreamError):
            call()


def test_a_kernel_lets_other_threads_run():
    indices, values = np.arange(4_000_000, dtype=np.uint32), np.ones(4_000_000, np.float32)
    iout, vout = np.empty(8_000_000, np.uint32), np.empty(8_000_000, np.float32)
    kernels.merge(indices, values, indices, values, SUM, iout, vout)
    ticks, done = [], threading.Event()

    def merge_often():
        for _ in range(10):
            kernels.merge(indices, values, indices, values, SUM, iout, vout)
        done.set()

    merging = threading.Thread(target=merge_often)
    merging.start()
    while not done.is_set():
        time.sleep(0.0005)
        ticks.append(1)
    merging.join()
    assert len(ticks) > 12  # holding the lock, ten calls would leave room for about ten


PROBE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from sparseallreduce.streams import kernels
assert "numba" not in sys.modules, "importing the kernels must not import numba"
begin = time.perf_counter()
if sys.argv[2] == "all":
    kernels.warm_up()
else:
    import numpy as np
    kernels.scatter_set(np.arange(2, dtype=np.uint32), np.ones(2, np.float32), 0, np.zeros(4, np.float32))
from sparseallreduce.streams.kernels import compiled
used = ("merging.merge", "dense.scatter", "dense.gather_present", "order.first_violation", "order.sum_duplicates", "rows.sum_rows",
    "rows.cut_rows", "rows.estimate_union", "rows.sum_cut_rows", "rows.write_past")
dispatchers = [compiled.kernel_named(name).variants[0] for name in used]
print(sum(sum(d.stats.cache_misses.values()) for d in dispatchers), time.perf_counter() - begin)
"""


def probe(cache, which="all", root=Path(kernels.__file__).parents[3], **variables):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONWARNINGS": "error::UserWarning", **variables}
    return subprocess.Popen(
        [sys.executable, "-c", PROBE, str(root), which], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def outcome(process):
    printed, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, complaints
    return int(printed.split()[0])


def test_of_processes_that_start_together_one_compiles_each_kernel_and_later_ones_none_unless_the_cache_is_damaged(tmp_path):
    together = [probe(tmp_path) for _ in range(4)]
    compiled = [outcome(process) for process in together]
    assert sum(compiled) == 11
    assert outcome(probe(tmp_path)) == 0
    for path in tmp_path.rglob("*.nbi"):
        path.write_bytes(path.read_bytes()[:100])
    assert outcome(probe(tmp_path, "one")) >= 0


def test_kernels_work_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    nowhere = tmp_path / "file" / "cache"
    shutil.copytree(Path(kernels.__file__).parents[2], tmp_path / "sparseallreduce", ignore=shutil.ignore_patterns("__pycache__"))
    for package in ("kernels", "kernels/compiled"):
        (tmp_path / "sparseallreduce/streams" / package / "__pycache__").write_text("not beside the source either, nor at home")
    assert outcome(probe(nowhere, "one", tmp_path, HOME=str(nowhere), XDG_CACHE_HOME=str(nowhere))) == 1
    assert not list(tmp_path.rglob("*.nbi"))


def test_kernels_work_without_compilation():
    root = Path(kernels.__file__).parents[3]
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(root)}
    subprocess.run(
        [sys.executable, "-c", "from sparseallreduce.streams import kernels; kernels.warm_up()"], env=environment, check=True, timeout=60
    )
