"""Selectors against NumPy oracles, and the compiled selection loops against their NumPy twins, bit for bit."""

from __future__ import annotations

import copy
import doctest
import importlib
import pkgutil
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseallreduce import SparseStream
from sparseallreduce.errors import StreamError, StreamTypeError
from sparseallreduce.streams import selection
from sparseallreduce.streams.kernels import dispatch, magnitude
from sparseallreduce.streams.kernels import selection as loops
from sparseallreduce.streams.selection import exact

DTYPES = (np.float32, np.float64)
SPECIAL = (0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-40, -5e-324, 1e38, 1.0, -1.0)
LARGE = 3 * exact.SMALL + 17  # which is bracketed by a sample, and ends in no whole group


def no_compiled_code(*_):
    """In the place of what finds it."""


TWINS = {"compiled": dispatch.find, "reference": no_compiled_code}


def find_by(patch, find):
    """Let the loops be found by a function, also those that are known."""
    patch.setattr(loops, "known", no_compiled_code)
    patch.setattr(loops, "find", find)


@pytest.fixture(params=TWINS)
def twin(request, monkeypatch):
    find_by(monkeypatch, TWINS[request.param])
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
        monkeypatch.setattr(exact, "bracket", lambda *_: tuple(magnitude.key_of(t, array.dtype) for t in misled))
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


def top_of_each(array, chunk, k):
    """The places of the largest of each chunk, by an order of every chunk of its own."""
    places, size = [], len(array)
    for begin in range(0, size, chunk):
        part = array[begin : begin + chunk]
        wanted = k * (begin + len(part)) // size - k * begin // size
        places.append(begin + np.sort(order(part)[:wanted]))
    return np.concatenate(places) if places else np.empty(0, np.int64)


class TestChunkTopK:
    @given(vectors(), st.sampled_from([1, 3, 64, 100, 4096, 2**40]), st.data())
    def test_takes_the_share_of_each_chunk_and_among_equals_those_of_lower_index(self, array, chunk, data):
        k = data.draw(st.integers(0, len(array)))
        stream = selection.ChunkTopK(k, chunk)(array.copy())
        expected = top_of_each(array, chunk, k)
        np.testing.assert_array_equal(stream.indices, expected)
        assert len(expected) == k
        np.testing.assert_array_equal(bits(stream.values), bits(array[expected]))

    @pytest.mark.parametrize("contents", CONTENTS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_of_a_large_sum_whose_chunks_differ_in_scale(self, contents, dtype, twin):
        scales = np.repeat(np.float64([1, 1e-6, 1e6, 1, 0, 1, 1e-30]), 4096)[:LARGE]
        with np.errstate(all="ignore"):
            scaled = [(vector(seed, len(scales), dtype, contents) * scales).astype(dtype) for seed in (6, 7)]
        accumulator, gradient = scaled
        summed = total(accumulator, gradient)
        for k in (0, 1, len(scales) // 50, len(scales) // 3, len(scales)):
            residual = accumulator.copy()
            stream = selection.ChunkTopK(k)(residual, gradient, clear=True)
            expected = top_of_each(summed, 4096, k)
            np.testing.assert_array_equal(stream.indices, expected)
            assert same_bits(stream.values, summed[expected])
            remaining = summed.copy()
            remaining[expected] = 0
            assert same_bits(residual, remaining)

    def test_what_does_not_fit_into_memory_leaves_the_gradient_added(self, monkeypatch):
        def no_memory(*_, **__):
            raise MemoryError

        residual = np.float32([1, 2, 3])
        monkeypatch.setattr(loops, "find", no_memory)
        with pytest.raises(MemoryError):
            selection.ChunkTopK(1, 2)(residual, np.float32([1, 1, 1]), clear=True)
        np.testing.assert_array_equal(residual, [2, 3, 4])

    def test_an_empty_chunk_is_an_error(self):
        with pytest.raises(StreamError, match="a chunk holds at least one value, not 0"):
            selection.ChunkTopK(3, 0)


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


def selectors(k):
    """One of each kind."""
    return (
        selection.ExactTopK(k),
        selection.ChunkTopK(k, 100),
        selection.Threshold(0.5),
        selection.ThresholdReuse(k, 3),
        selection.ThresholdReuse(k, 100, drift=0.5),
        selection.Gaussian(k),
        selection.MSTopK(k, 7),
        selection.DoubleSampling(k, share=0.3),
        selection.ApproximateTopK(k),
        selection.ApproximateTopK(k, form="at most", bucket=None, seed=4),
        selection.ApproximateTopK(k, bucket=10, fixed=True),
        selection.RandomK(k),
    )


class TestEverySelector:
    @given(vectors(st.integers(0, 200)), st.integers(0, 2**32), st.data())
    def test_sends_what_it_takes_and_keeps_the_rest(self, array, seed, data):
        k = data.draw(st.integers(0, len(array)))
        selector = data.draw(st.sampled_from(selectors(k)))
        residual = array.copy()
        for step in range(4):
            gradient = vector(seed + step, len(array), array.dtype, "real") / 10
            summed = total(residual, gradient)
            stream = selector(residual, gradient, clear=True)
            indices, values = stream.indices, stream.values
            filled = (values == 0) & (summed[indices] != 0)
            assert not filled.any() or getattr(selector, "fixed", False)
            assert same_bits(values[~filled], summed[indices][~filled])
            remaining = summed.copy()
            remaining[indices[~filled]] = 0
            assert same_bits(residual, remaining)

    @given(vectors(st.integers(1, 200)), st.data())
    def test_takes_what_is_not_finite_first(self, array, data):
        k = data.draw(st.integers(1, len(array)))
        selector = data.draw(st.sampled_from(selectors(k)[:9]))
        stream = selector(array.copy())
        left = np.setdiff1d(np.flatnonzero(~np.isfinite(array)), stream.indices)
        assert len(left) == 0 or stream.nnz >= k

    @pytest.mark.parametrize("number", range(11))
    def test_chooses_the_same_again_in_a_new_run(self, number):
        array = vector(11, LARGE, np.float32, "real")
        runs = []
        for _ in range(2):
            selector = selectors(LARGE // 50)[number]
            runs.append([selector(array) for _ in range(3)])
        for one, two in zip(*runs):
            np.testing.assert_array_equal(one.indices, two.indices)
            np.testing.assert_array_equal(bits(one.values), bits(two.values))

    @pytest.mark.parametrize("number", range(11))
    def test_leaves_its_state_alone_when_an_argument_is_wrong(self, number):
        selector = selectors(2)[number]
        before = copy.deepcopy(selector)
        with pytest.raises(StreamTypeError):
            selector(np.ones(5, np.int32))
        for array in (vector(1, 9, np.float32, "real"), vector(2, 9, np.float32, "real")):
            np.testing.assert_array_equal(selector(array).indices, before(array).indices)


class OutOfMemory:
    """Finds loops of which the call of a number finds no memory."""

    def __init__(self, failing):
        self.failing, self.calls = failing, 0

    def __call__(self, name, *kind):
        loop = dispatch.find(name, *kind)
        if name.startswith(("selection.moments", "selection.norms")):  # which take next to none
            return loop

        def limited(*arguments):
            self.calls += 1
            if self.calls == self.failing:
                raise MemoryError
            return loop(*arguments)

        return limited


class TestWithoutMemory:
    @pytest.mark.parametrize("contents", ["real", "mostly zero"])
    @pytest.mark.parametrize("number", range(11))
    def test_nothing_is_lost_and_the_next_selection_goes_on(self, number, contents, monkeypatch):
        array, gradient = (vector(seed, LARGE, np.float64, contents) for seed in (1, 2))
        for failing in range(1, 20):
            selector, residual, small = selectors(LARGE // 100)[number], array / 100, np.zeros(LARGE)
            selector(residual, clear=True)
            held = residual + gradient
            monkeypatch.setattr(loops, "ROOM", 64)  # so that buffers grow
            find_by(monkeypatch, OutOfMemory(failing))
            try:
                selector(residual, gradient, clear=True)
            except MemoryError:
                np.testing.assert_array_equal(residual, held)
            else:
                break
            monkeypatch.undo()
            taken = selector(residual, small, clear=True)
            np.testing.assert_array_equal(residual + taken.to_dense(), held)
        assert 1 <= failing < 19

    def test_a_stream_that_does_not_fit_is_put_back(self, monkeypatch):
        monkeypatch.setattr("sparseallreduce.streams.selection.base.SparseStream", mock.Mock(side_effect=MemoryError))
        residual = np.arange(10_000.0)
        with pytest.raises(MemoryError):
            selection.Threshold(1.0)(residual, np.ones(10_000), clear=True)
        np.testing.assert_array_equal(residual, np.arange(10_000.0) + 1)


class TestThresholdReuse:
    def test_with_period_one_takes_the_top(self):
        selector, top = selection.ThresholdReuse(40, 1), selection.ExactTopK(40)
        for seed in range(5):
            array = vector(seed, 1000, np.float32, "real")
            np.testing.assert_array_equal(selector(array).indices, top(array).indices)

    @pytest.mark.parametrize("shrink", [1.0, 0.98])
    @pytest.mark.parametrize("distribution", ["normal", "laplace"])
    def test_stays_near_k_while_gradients_shrink_and_residuals_grow(self, distribution, shrink):
        k, residual, counts = LARGE // 100, np.zeros(LARGE, np.float32), []
        selector, rng = selection.ThresholdReuse(k, 32), np.random.default_rng(0)
        for step in range(100):
            gradient = (getattr(rng, distribution)(size=LARGE) * shrink**step).astype(np.float32)
            counts.append(selector(residual, gradient, clear=True).nnz)
        assert counts[0] == counts[32] == counts[64] == k
        assert min(counts) >= 0.9 * k
        assert np.mean(counts) >= 0.99 * k  # Ok-Topk section 5.2 reports an average deviation of 11 %
        assert max(counts) == k

    def test_comes_nearer_to_the_threshold_while_too_many_reach_it_and_withdraws_at_once(self):
        selector, array = selection.ThresholdReuse(100, 1000), 1 + vector(1, 5000, np.float32, "real") / 100
        for _ in range(100):
            selector(array)
        steep = selector.slack
        assert steep < 0.005
        assert np.count_nonzero(array >= selector.threshold) <= 210
        selector(array - 1)
        assert selector.slack == 2 * steep

    def test_does_not_look_further_ahead_than_values_are_finite(self):
        selector = selection.ThresholdReuse(2, 100)
        for values in ([np.nan, np.inf, 1.0], [1.0, 2.0, 3.0], [np.inf, 5.0, 5.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0], [3.0, 2.0, 1.0]):
            array = np.array(values)
            np.testing.assert_array_equal(selector(array).indices, selection.NonZeroTopK(2)(array).indices)
        assert 1.0 < selector.threshold < 2.0

    def test_finds_the_threshold_anew_in_the_step_in_which_too_few_reach_it(self):
        selector, array = selection.ThresholdReuse(100, 1000), vector(1, 5000, np.float32, "real")
        selector(array)
        residual, gradient = array / 10, array / 100
        stream = selector(residual, gradient, clear=True)
        np.testing.assert_array_equal(stream.indices, selection.ExactTopK(100)(array / 10 + gradient).indices)
        assert np.count_nonzero(residual) == 4900

    def test_takes_no_more_than_k(self):
        selector, array = selection.ThresholdReuse(100, 1000), vector(1, 5000, np.float32, "real")
        selector(array)
        for factor in (1.2, 30):  # with somewhat more than k values that reach the threshold, and with far more
            residual = factor * array
            stream = selector(residual, clear=True)
            np.testing.assert_array_equal(stream.indices, selection.ExactTopK(100)(factor * array).indices)
            assert np.count_nonzero(residual) == 4900

    def test_takes_what_there_is_of_sparse_vectors(self):
        selector = selection.ThresholdReuse(100, 1000)
        for seed in range(5):
            array = np.zeros(5000)
            array[seed : 30 * seed + seed] = vector(seed, 30 * seed, np.float64, "real")
            assert selector(array).nnz == min(100, 30 * seed)

    def test_options_out_of_range_are_errors(self):
        for options in ({"period": 0}, {"drift": 1.1}, {"drift": -0.1}):
            with pytest.raises(StreamError, match=next(iter(options))):
                selection.ThresholdReuse(4, **options)


class TestGaussian:
    @pytest.mark.parametrize("contents", ["real", "heavy tail", "mostly zero", "few different", "special"])
    @pytest.mark.parametrize("least", [0.0, 0.75])
    def test_scales_its_threshold_until_enough_are_chosen(self, contents, least, twin):
        array = vector(9, 5000, np.float64, contents)
        finite = array[np.isfinite(array)]
        k = 60
        mean, square = finite.sum() / len(array), (finite**2).sum() / len(array)
        threshold = abs(mean) + np.sqrt(square - mean**2) * 2.5121443279304616  # the normal quantile of 1 - 60 / 10000
        magnitudes = np.where(np.isnan(array), np.inf, np.abs(array))
        while np.count_nonzero((magnitudes >= threshold) & (magnitudes > 0)) <= least * k and threshold > 1e-300 and least:
            threshold *= 0.95
        stream = selection.Gaussian(k, least=least)(array)
        np.testing.assert_array_equal(stream.indices, np.flatnonzero(magnitudes >= threshold))

    @pytest.mark.parametrize("scale", [1e306, 1e150, 1e-161, 1e-200, 1e-306])
    def test_squares_beyond_the_range_of_floats_change_nothing(self, scale, twin):
        array = vector(9, 5000, np.float64, "heavy tail")
        array /= 2 ** np.ceil(np.log2(np.abs(array).max()))  # by powers of two, so that nothing is rounded
        scale = 2.0 ** np.round(np.log2(scale))
        array[np.abs(array) < 1e-10] = 0
        for least in (0.0, 0.75):
            selector = selection.Gaussian(60, least=least)
            expected = selector(array)
            assert expected.nnz > 0
            np.testing.assert_array_equal(selector(array * scale).indices, expected.indices)

    def test_ends_where_the_deviation_overflows_or_no_float_is_smaller(self):
        array = np.zeros(1000)
        array[0], array[1:20] = 1e155, 1e150
        assert selection.Gaussian(10)(array).nnz == 20
        for tiny in (5e-324, 1e-310):
            array[0], array[1:20] = 100 * tiny, tiny
            assert selection.Gaussian(10)(array).nnz == 20
        array[:20] = np.finfo(float).max
        assert selection.Gaussian(10)(array).nnz == 20
        array[:], array[:20] = 1e-320, 1e300
        assert selection.Gaussian(30)(array).nnz == 1000

    def test_ends_soon_with_a_scale_of_nearly_one(self):
        array = vector(9, 5000, np.float64, "heavy tail")
        assert selection.Gaussian(60, scale=1 - 1e-15)(array).nnz >= 46

    def test_options_out_of_range_are_errors(self):
        for options in ({"least": 1.0}, {"scale": 1.0}):
            with pytest.raises(StreamError):
                selection.Gaussian(4, **options)


def algorithm_1(x, k, searches, rng):
    """CommLib's algorithm 1, line by line."""
    a = np.abs(x)
    mean, u = a.mean(), a.max()
    left, right, k1, k2, above, below = 0.0, 1.0, -1, len(x) + 1, np.inf, 0.0
    for _ in range(searches):
        ratio = left + (right - left) / 2
        threshold = mean + ratio * (u - mean)
        nnz = np.count_nonzero(a >= threshold)
        if nnz <= k:
            right = ratio
            if nnz > k1:
                k1, above = nnz, threshold
        else:
            left = ratio
            if nnz < k2:
                k2, below = nnz, threshold
    first, second = np.flatnonzero(a >= above), np.flatnonzero((a < above) & (a >= below))
    start = rng.integers(0, len(second) - (k - len(first)) + 1)
    return np.sort(np.concatenate([first, second[start : start + k - len(first)]]))


class TestMSTopK:
    @pytest.mark.parametrize("contents", ["real", "few different", "all equal", "mostly zero", "sorted"])
    @pytest.mark.parametrize("size", [700, LARGE])
    @pytest.mark.parametrize("searches", [1, 3, 30])
    def test_is_algorithm_1(self, contents, size, searches):
        array = vector(10, size, np.float64, contents)
        for k in (1, size // 100, size // 3, size):
            found = selection.MSTopK(k, searches, seed=7)(array)
            np.testing.assert_array_equal(found.indices, algorithm_1(array, k, searches, np.random.default_rng([7, 0])))

    def test_nearly_takes_the_top(self):
        array = vector(12, LARGE, np.float32, "real")
        k = LARGE // 100
        found, top = selection.MSTopK(k)(array), selection.ExactTopK(k)(array)
        assert found.nnz == k
        assert len(np.intersect1d(found.indices, top.indices)) > 0.99 * k

    @pytest.mark.parametrize("scale", [2.0**1010, 2.0**-1010], ids=["large", "small"])
    def test_sums_beyond_the_range_of_floats_change_nothing(self, scale, twin):
        array = vector(12, LARGE, np.float64, "real")
        array[np.abs(array) < 1e-3] = 0
        expected = selection.MSTopK(300)(array)
        np.testing.assert_array_equal(selection.MSTopK(300)(array * scale).indices, expected.indices)

    def test_no_searches_are_an_error(self):
        with pytest.raises(StreamError, match="at least 1"):
            selection.MSTopK(3, 0)


class TestDoubleSampling:
    def test_takes_about_k_and_the_largest_ones(self):
        array, k = vector(13, LARGE, np.float32, "real"), LARGE // 50
        selector = selection.DoubleSampling(k, share=0.1, overshoot=10.0)
        found = [selector(array) for _ in range(8)]
        assert all(abs(stream.nnz / k - 1) < 0.3 for stream in found)
        assert len({stream.nnz for stream in found}) > 1  # another sample each time
        for stream in found:
            np.testing.assert_array_equal(stream.indices, selection.ExactTopK(stream.nnz)(array).indices)

    @pytest.mark.parametrize("seed", range(20))
    def test_takes_infinities_where_the_sample_has_a_nan_for_its_largest(self, seed):
        array = np.ones(17, np.float32)
        array[[1, 3]] = -np.inf, np.nan
        np.testing.assert_array_equal(selection.DoubleSampling(2, share=0.3, seed=seed)(array).indices[:2], [1, 3])

    def test_chooses_again_where_that_is_far_too_much(self):
        array, k = vector(13, LARGE, np.float32, "few different"), LARGE // 50
        np.testing.assert_array_equal(selection.DoubleSampling(k)(array).indices, selection.ExactTopK(k)(array).indices)

    @pytest.mark.parametrize("seed", range(20))
    def test_chooses_again_where_that_is_far_too_few(self, seed):
        array, k = vector(seed, 10_000, np.float64, "real"), 100
        selector, counts = selection.DoubleSampling(k, seed=seed), []
        for _ in range(20):
            residual = array.copy()
            stream = selector(residual, clear=True)
            np.testing.assert_array_equal(stream.indices, np.sort(order(array)[: stream.nnz]))
            assert np.count_nonzero(residual) == 10_000 - stream.nnz
            counts.append(stream.nnz)
        assert min(counts) >= k / 1.3 and max(counts) <= 1.3 * k

    def test_takes_what_there_is_of_a_sparse_vector(self):
        array = vector(2, 10_000, np.float64, "mostly zero")
        assert selection.DoubleSampling(1000)(array).nnz == np.count_nonzero(array)

    def test_options_out_of_range_are_errors(self):
        for options in ({"share": 0.0}, {"share": 1.1}, {"overshoot": 0.9}):
            with pytest.raises(StreamError):
                selection.DoubleSampling(4, **options)


class TestApproximateTopK:
    def probabilities(self, array, k, form):
        """Both forms of the thesis, section 2.4.1."""
        v, norm = np.abs(array.astype(float)), np.abs(array.astype(float)).sum()
        if form == "at most":
            return np.minimum(1, k * v / norm)
        if v.max() <= norm / k:
            return k * v / norm
        shift = (k * v.max() - norm) / (len(v) - k)
        return k * (v + shift) / (norm + len(v) * shift)

    @pytest.mark.parametrize("form", ["expected", "at most"])
    @pytest.mark.parametrize("contents", ["real", "heavy tail"])
    @pytest.mark.parametrize("bucket", [None, 512])
    def test_takes_each_value_as_often_as_the_thesis_says(self, form, contents, bucket):
        size, k, runs = 1536, 96, 3000
        array = vector(14, size, np.float64, contents)
        parts = np.split(array, 1 if bucket is None else 3)
        expected = np.concatenate([self.probabilities(part, 32 * len(part) / 512, form) for part in parts])
        selector, taken = selection.ApproximateTopK(k, form=form, bucket=bucket), np.zeros(size)
        for _ in range(runs):
            taken[selector(array).indices] += 1
        if form == "expected":
            assert abs(taken.sum() / runs / k - 1) < 0.01
        deviations = np.sqrt(expected * (1 - expected) / runs)
        assert (np.abs(taken / runs - expected) <= 5 * deviations + 1e-6).all()

    @pytest.mark.parametrize("contents", ["real", "mostly zero"])
    def test_fills_up_and_truncates_each_bucket(self, contents):
        array = vector(15, 5 * 512 + 3, np.float32, contents)
        stream = selection.ApproximateTopK(50, fixed=True)(array)
        per_bucket = np.bincount(stream.indices // 512, minlength=6)
        np.testing.assert_array_equal(per_bucket, [10, 10, 10, 10, 10, 3])
        taken = stream.values != 0
        np.testing.assert_array_equal(stream.values[taken], array[stream.indices[taken]])

    @pytest.mark.parametrize("bucket,passes", [(512, 3), (10**6, 4), (None, 4)])
    def test_states_that_buckets_beyond_the_cache_are_read_twice(self, bucket, passes):
        assert selection.ApproximateTopK(10, bucket=bucket).passes == passes

    @pytest.mark.parametrize("dtype,scale", [("float32", -130), ("float32", -149), ("float32", 126), ("float64", -1070), ("float64", 1022)])
    @pytest.mark.parametrize("options", [{}, {"form": "at most"}, {"bucket": None}, {"bucket": 100, "fixed": True}], ids=str)
    def test_chances_do_not_depend_on_the_scale(self, dtype, scale, options, twin):
        magnitudes = np.where(np.random.default_rng(16).random(2000) < 0.05, 2, 1).astype(dtype)  # of few bits, as denormals are
        array = np.ldexp(magnitudes, scale)
        assert np.isfinite(array).all() and (array > 0).all()
        ordinary, scaled = (selection.ApproximateTopK(40, seed=5, **options) for _ in range(2))
        for _ in range(5):
            expected = ordinary(magnitudes)
            assert 10 < expected.nnz < 120
            np.testing.assert_array_equal(scaled(array).indices, expected.indices)

    def test_a_few_denormals_are_chosen_of_many(self):
        array = np.full(10_000, 1e-41, np.float32)
        assert 50 < selection.ApproximateTopK(100)(array).nnz < 200

    def test_of_zeros_takes_nothing(self):
        assert selection.ApproximateTopK(10)(np.zeros(1000)).nnz == 0

    def test_options_out_of_range_are_errors(self):
        for options in ({"form": "about"}, {"bucket": 0}):
            with pytest.raises(StreamError):
                selection.ApproximateTopK(4, **options)


class TestRandomK:
    @pytest.mark.parametrize("k", [0, 1, 5, 12, 20])
    def test_takes_every_place_equally_often(self, k):
        selector, taken, runs = selection.RandomK(k, seed=3), np.zeros(20), 1000
        for _ in range(runs):
            stream = selector(np.ones(20))
            assert stream.nnz == k
            taken[stream.indices] += 1
        share = k / 20
        assert np.abs(taken / runs - share).max() <= 5 * np.sqrt(share * (1 - share) / runs)

    def test_takes_the_same_places_on_all_ranks(self):
        one, other = selection.RandomK(100, seed=3), selection.RandomK(100, seed=3)
        for step in range(3):
            a, b = one(vector(step, 1000, np.float32, "real")), other(vector(50 + step, 1000, np.float32, "real"))
            np.testing.assert_array_equal(a.indices, b.indices)
        assert (one(np.ones(1000)).indices != selection.RandomK(100, seed=4)(np.ones(1000)).indices).any()


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
        seed = data.draw(st.sampled_from([0, 5, 2**64 - 3]))
        options = {
            "bucket": data.draw(st.sampled_from([1, 7, 64, 70, 512, 10_000] if size < 300 else [64, 70, 512, 10_000])),
            "share": data.draw(st.sampled_from([0.5, 3.0, 40.0, 100.0])),
            "at_most": data.draw(st.booleans()),
            "fixed": data.draw(st.sampled_from([0, 1, 4, 70])),
        }
        results = []
        for find in TWINS.values():
            with pytest.MonkeyPatch.context() as patch:
                find_by(patch, find)
                ours = array.copy()
                indices, values, reached = loops.select(ours, gradient, over, np.uint64, clear=True)
                above, inside, found = loops.collect(array, over, largest, 2 * size)
                some_k = [k for k in (1, size // 3, size) if 1 <= k <= size]
                ranks = [loops.kth(array, k) for k in some_k]
                tops = [loops.top(array, *rank, k, np.uint32) for rank, k in zip(ranks, some_k)]
                sampled = loops.sample(array, gradient, size // 7, seed) if size >= 7 else None
                sums = [measure(array.copy(), other) for measure in (loops.moments, loops.norms) for other in (None, gradient)]
                drawn = loops.draw(theirs := array.copy(), gradient, np.uint32, **options, seed=seed, clear=True)
            results.append((ours, indices, values, reached, above, inside, found, ranks, *tops, sampled, sums, theirs, *drawn))
        for one, two in zip(*results):
            if isinstance(one, np.ndarray) and one.dtype.kind == "f":
                assert same_bits(one, two)
            else:
                np.testing.assert_array_equal(one, two)


SELECTORS = {
    "exact": lambda: selection.ExactTopK(3),
    "chunks": lambda: selection.ChunkTopK(3, 16),
    "non-zero": lambda: selection.NonZeroTopK(3),
    "approximate": lambda: selection.ApproximateTopK(3),
    "MSTopK": lambda: selection.MSTopK(3),
    "Gaussian": lambda: selection.Gaussian(3),
    "random": lambda: selection.RandomK(3),
    "sampling": lambda: selection.DoubleSampling(3, share=1.0),
    "reuse": lambda: selection.ThresholdReuse(3),
    "threshold": lambda: selection.Threshold(0.5),
}


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
def test_what_is_read_only_is_not_cleared(selector, twin):
    values = np.arange(40, dtype=np.float32)
    memory = values.tobytes()
    array, before = np.frombuffer(memory, np.float32), bytes(bytearray(memory))
    with pytest.raises(StreamError, match="read-only"):
        selector()(array, clear=True)
    with pytest.raises(StreamError, match="read-only"):
        selector()(array, array)
    assert memory == before
    assert selector()(array).nnz <= 40
    assert memory == before


def test_a_threshold_does_not_clear_what_is_read_only(twin):
    memory = np.ones(40).tobytes()
    with pytest.raises(StreamError, match="read-only"):
        selection.select_at_least(np.frombuffer(memory), 0.5, clear=True)
    assert memory == np.ones(40).tobytes()


def test_masked_vectors_are_refused():
    masked = np.ma.masked_array(np.ones(9), np.arange(9) < 3)
    for call in (
        lambda: selection.ExactTopK(3)(masked),
        lambda: selection.ExactTopK(3)(np.ones(9), masked),
        lambda: selection.kth_magnitude(masked, 3),
    ):
        with pytest.raises(StreamTypeError, match="fill them first"):
            call()


def test_loops_take_no_arrays_or_numbers_that_lead_out_of_their_memory(twin):
    array = np.ones(5000, np.float32)
    backwards, short, locked = array[::-1], np.ones(4999, np.float32), array.copy()
    locked.flags.writeable = False
    draw = {"bucket": 512, "share": 1.0, "at_most": False, "fixed": 0, "seed": 0, "clear": False}
    for call in (
        lambda: loops.select(backwards, None, 0, np.uint32),
        lambda: loops.select(array, short, 0, np.uint32),
        lambda: loops.select(array, array.view(np.int32), 0, np.uint32),
        lambda: loops.select(array.view(np.int32), None, 0, np.uint32),
        lambda: loops.select(array[:, None], None, 0, np.uint32),
        lambda: loops.select(locked, None, 0, np.uint32, clear=True),
        lambda: loops.select(locked, array, 0, np.uint32),
        lambda: loops.draw(locked, None, np.uint32, **draw | {"clear": True}),
        lambda: loops.draw(array, short, np.uint32, **draw),
        lambda: loops.draw(array, None, np.uint32, **draw | {"bucket": 0}),
        lambda: loops.collect(backwards, 0, 1, 9),
        lambda: loops.kth(array, 0),
        lambda: loops.kth(array, 5001),
        lambda: loops.kth(array[:0], 1),
        lambda: loops.sample(array, short, 9),
        lambda: loops.sample(array, None, 5001),
        lambda: loops.moments(locked, array),
        lambda: loops.norms(array, short),
        lambda: loops.top(backwards, 0, 0, 9, np.uint32),
    ):
        with pytest.raises(StreamError):
            call()
    assert (array == 1).all()


def test_more_places_than_were_counted_do_not_lead_out_of_their_memory(twin):
    """As if the array had changed since its k-th magnitude was found."""
    assert loops.top(np.ones(5000, np.float32), 0, 0, 9, np.uint32).tolist() == list(range(9))
