"""Selectors against NumPy oracles, and the compiled selection loops against their NumPy twins, bit for bit."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseallreduce import SparseStream
from sparseallreduce.errors import StreamError, StreamTypeError
from sparseallreduce.streams import selection
from sparseallreduce.streams.kernels import magnitude, selection_compiled, selection_reference
from sparseallreduce.streams.kernels import selection as loops
from sparseallreduce.streams.selection import exact

DTYPES = (np.float32, np.float64)
SPECIAL = (0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-40, -5e-324, 1e38, 1.0, -1.0)
LARGE = 3 * exact.SMALL + 17  # which is bracketed by a sample, and ends in no whole group


@pytest.fixture(params=[selection_compiled, selection_reference], ids=["compiled", "reference"])
def twin(request, monkeypatch):
    monkeypatch.setattr(loops, "_loops", lambda: request.param)
    return request.param


def vector(seed, size, dtype, contents):
    """A vector of one of the kinds that selection has to bear."""
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        values = {
            "real": lambda: rng.standard_normal(size),
            "heavy tail": lambda: rng.standard_cauchy(size) ** 5,
            "special": lambda: np.where(rng.random(size) < 0.4, rng.choice(SPECIAL, size), rng.standard_normal(size)),
            "few different": lambda: rng.integers(-2, 3, size),
            "all equal": lambda: np.full(size, -1.5),
            "mostly zero": lambda: np.where(rng.random(size) < 0.01, rng.standard_normal(size), 0.0),
            "sorted": lambda: np.sort(rng.standard_normal(size)),
        }[contents]()
        array = values.astype(dtype)
    if contents == "special":  # NaN of any payload
        bits = magnitude.bits_of(array)
        payloads = rng.integers(0, 1000, size)
        bits[np.isnan(array)] |= payloads[np.isnan(array)].astype(bits.dtype)
    return array


CONTENTS = ("real", "heavy tail", "special", "few different", "all equal", "mostly zero", "sorted")
SIZES = st.one_of(st.sampled_from([0, 1, 2, 63, 64, 65, 4095, 4096, 4097]), st.integers(0, 300), st.integers(4000, 9000))


@st.composite
def vectors(draw, sizes=SIZES):
    contents, dtype = draw(st.sampled_from(CONTENTS)), draw(st.sampled_from(DTYPES))
    return vector(draw(st.integers(0, 2**32)), draw(sizes), dtype, contents)


def order(array):
    """The places by magnitude, largest first, NaN before infinity, among equals in order of place."""
    magnitudes = np.abs(array.astype(np.float64))
    return np.lexsort((np.arange(len(array)), -np.where(np.isnan(magnitudes), np.inf, magnitudes), ~np.isnan(magnitudes)))


def bits(values):
    return magnitude.bits_of(np.ascontiguousarray(values))


def total(accumulator, gradient):
    with np.errstate(all="ignore"):
        return accumulator + gradient


def same_bits(a, b):
    """Whether two arrays agree to the bit, apart from the payloads of the NaN that an addition makes."""
    return np.array_equal(np.isnan(a), np.isnan(b)) and np.array_equal(bits(a)[~np.isnan(a)], bits(b)[~np.isnan(b)])


@pytest.mark.parametrize("module", [module.name for module in pkgutil.walk_packages(selection.__path__, selection.__name__ + ".")])
def test_examples_in_docstrings_are_true(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0
    assert doctest.testmod(magnitude).failed == 0


class TestKthMagnitude:
    @given(vectors(), st.data())
    def test_equals_that_of_a_sorted_vector(self, array, data):
        if len(array):
            k = data.draw(st.integers(1, len(array)))
            np.testing.assert_equal(selection.kth_magnitude(array, k), float(abs(array[order(array)[k - 1]])))

    @pytest.mark.parametrize("contents", CONTENTS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_equals_that_of_a_sorted_large_vector_at_any_k(self, contents, dtype, twin):
        array = vector(3, LARGE, dtype, contents)
        ranked = np.abs(array[order(array)])
        for k in (1, 2, 40, LARGE // 100, LARGE // 2, LARGE - 1, LARGE):
            np.testing.assert_equal(selection.kth_magnitude(array, k), float(ranked[k - 1]))

    @pytest.mark.parametrize("misled", [(0.0, 0.0), (9.0, 9.0), (2.0, 9.0), (0.0, 0.5), (0.0, 9.0)])
    def test_does_not_depend_on_what_the_sample_says(self, misled, monkeypatch, twin):
        array = vector(4, LARGE, np.float32, "real")
        monkeypatch.setattr(exact, "_bracket", lambda *_: tuple(magnitude.key_of(t, array.dtype) for t in misled))
        k = LARGE // 50
        assert selection.kth_magnitude(array, k) == np.abs(array[order(array)[k - 1]])
        np.testing.assert_array_equal(selection.ExactTopK(k)(array).indices, np.sort(order(array)[:k]))

    def test_leaves_a_read_only_vector_as_it_is(self):
        array = vector(5, LARGE, np.float32, "real")
        array.flags.writeable = False
        before = array.copy()
        selection.kth_magnitude(array, 100)
        selection.select_at_least(array, 1.0)
        np.testing.assert_array_equal(array, before)

    @pytest.mark.parametrize("k", [0, 4, -1])
    def test_a_k_out_of_range_is_an_error(self, k):
        with pytest.raises(StreamError, match="from 1 to 3"):
            selection.kth_magnitude(np.ones(3), k)


class TestExactTopK:
    @given(vectors(), st.data())
    def test_takes_exactly_k_and_among_equals_those_of_lower_index(self, array, data):
        k = data.draw(st.integers(0, len(array)))
        stream = selection.ExactTopK(k)(array.copy())
        expected = np.sort(order(array)[:k])
        np.testing.assert_array_equal(stream.indices, expected)
        np.testing.assert_array_equal(bits(stream.values), bits(array[expected]))

    @pytest.mark.parametrize("contents", CONTENTS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_of_a_large_sum(self, contents, dtype, twin):
        accumulator, gradient = vector(6, LARGE, dtype, contents), vector(7, LARGE, dtype, contents)
        summed = total(accumulator, gradient)
        for k in (0, 1, LARGE // 100, LARGE // 3, LARGE):
            residual = accumulator.copy()
            stream = selection.ExactTopK(k)(residual, gradient, clear=True)
            expected = np.sort(order(summed)[:k])
            np.testing.assert_array_equal(stream.indices, expected)
            assert same_bits(stream.values, summed[expected])
            remaining = summed.copy()
            remaining[expected] = 0
            assert same_bits(residual, remaining)


class TestThreshold:
    @given(vectors(), st.sampled_from([0.0, 5e-324, 1e-40, 0.1, 1.0, 1.5, 2.5, 1e39, np.inf, np.nan]), st.booleans(), st.booleans())
    def test_takes_what_is_at_least_the_threshold_and_not_zero(self, array, threshold, clear, fused):
        gradient = array[::-1].copy() if fused else None
        summed = total(array, gradient) if fused else array.copy()
        stream = selection.select_at_least(array, threshold, gradient, clear=clear)
        expected = np.flatnonzero(np.isnan(summed) | ((np.abs(summed.astype(np.float64)) >= threshold) & (summed != 0)))
        np.testing.assert_array_equal(stream.indices, expected)
        assert same_bits(stream.values, summed[expected])
        if clear:
            summed[expected] = 0
        assert same_bits(array, summed)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("expected", [None, 0, LARGE])
    def test_takes_more_than_expected(self, dtype, expected, twin):
        array = vector(8, LARGE, dtype, "real")
        stream = selection.select_at_least(array.copy(), 0.5, expected=expected)
        np.testing.assert_array_equal(stream.indices, np.flatnonzero(np.abs(array) >= 0.5))

    def test_a_negative_threshold_is_an_error(self):
        for select in (lambda: selection.Threshold(-1.0), lambda: selection.select_at_least(np.ones(3), -1.0)):
            with pytest.raises(StreamError, match="at least 0"):
                select()


class TestOfStreams:
    @given(vectors(), st.data())
    def test_the_top_of_a_stream_is_that_of_its_values(self, values, data):
        k = data.draw(st.integers(0, len(values) + 2))
        stream = SparseStream(3 * np.arange(len(values)), values, 3 * len(values) + 5)
        expected = np.sort(order(values)[:k])
        found = selection.top_of_stream(stream, k)
        np.testing.assert_array_equal(found.indices, 3 * expected)
        np.testing.assert_array_equal(bits(found.values), bits(values[expected]))

    @given(vectors(), st.sampled_from([0.0, 1.0, np.inf]))
    def test_a_threshold_chooses_among_a_stream_as_among_its_values(self, values, threshold):
        stream = SparseStream(3 * np.arange(len(values)), values, 3 * len(values) + 5)
        expected = selection.select_at_least(values, threshold)
        found = selection.stream_at_least(stream, threshold)
        np.testing.assert_array_equal(found.indices, 3 * expected.indices)
        np.testing.assert_array_equal(bits(found.values), bits(expected.values))

    def test_a_dense_stream_is_chosen_from_like_a_sparse_one(self):
        stream = SparseStream.from_dense(np.array([3.0, 1.0, 0.0, -5.0]))
        assert stream.is_dense
        np.testing.assert_array_equal(selection.top_of_stream(stream, 2).indices, [0, 3])
        np.testing.assert_array_equal(selection.stream_at_least(stream, 3.0).values, [3.0, -5.0])

    def test_a_part_keeps_its_range(self):
        part = SparseStream._sparse_form(np.array([5, 7], np.uint32), np.array([1.0, 2.0]), 20, 5, 10)
        for found in (selection.top_of_stream(part, 1), selection.stream_at_least(part, 1.5)):
            assert (found.lo, found.hi, found.size, found.indices.tolist()) == (5, 10, 20, [7])

    def test_rows_and_integers_are_errors(self):
        with pytest.raises(StreamError, match="rows"):
            selection.top_of_stream(SparseStream([0], np.ones((1, 2)), 3), 1)
        with pytest.raises(StreamTypeError, match="int32"):
            selection.stream_at_least(SparseStream([0], np.ones(1, np.int32), 3), 1.0)


class TestArguments:
    @pytest.mark.parametrize("array", [np.ones(3, np.float16), np.ones(3, int), [1.0, 2.0]])
    def test_of_another_dtype_are_errors(self, array):
        with pytest.raises(StreamTypeError, match="float32 or float64"):
            selection.ExactTopK(1)(array)

    def test_that_do_not_fit_are_errors(self):
        array = np.ones(6)
        for accumulator, gradient in ((np.ones((2, 3)), None), (array[::2], None), (array, np.ones(5)), (array, np.ones(12)[::2])):
            with pytest.raises(StreamError):
                selection.ExactTopK(1)(accumulator, gradient)
        with pytest.raises(StreamTypeError, match="float32"):
            selection.ExactTopK(1)(array, np.ones(6, np.float32))
        with pytest.raises(StreamError, match="smaller k"):
            selection.ExactTopK(7)(array)
        array.flags.writeable = False
        with pytest.raises(StreamError, match="read-only"):
            selection.ExactTopK(1)(array, np.ones(6))


class TestTwins:
    @given(vectors(), vectors(), st.data())
    def test_give_the_same_bits(self, array, other, data):
        size = min(len(array), len(other))
        array, gradient = array[:size].copy(), other[:size].astype(array.dtype)
        largest = magnitude.nan(bits(array).dtype)
        over = data.draw(st.sampled_from([0, largest - 2, magnitude.key_of(1.0, array.dtype) - 1]))
        results = []
        for module in (selection_compiled, selection_reference):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(loops, "_loops", lambda module=module: module)
                ours = array.copy()
                indices, values, reached = loops.select(ours, gradient, over, np.uint64, clear=True)
                above, inside, found = loops.collect(array, over, largest, 2 * size)
                ranks = [loops.kth(array, k) for k in range(1, size, 97)]
                tops = [loops.top(array, *rank, k, np.uint32) for rank, k in zip(ranks, range(1, size, 97))]
                sampled = loops.sample(array, gradient, size // 7) if size >= 7 else None
            results.append((ours, indices, values, reached, above, inside, found, ranks, *tops, sampled))
        for one, two in zip(*results):
            if isinstance(one, np.ndarray) and one.dtype.kind == "f":
                assert same_bits(one, two)
            else:
                np.testing.assert_array_equal(one, two)
