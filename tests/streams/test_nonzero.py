"""The top k without zeros: the same as sorting, for few and for many non-zeros."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseallreduce.streams.selection import NonZeroTopK


def expected(vector, k):
    order = np.lexsort([np.arange(len(vector)), -np.abs(vector)])[:k]
    return np.sort(order[vector[order] != 0])


@given(
    size=st.integers(0, 300),
    share=st.sampled_from([0.0, 0.02, 0.2, 1.0]),
    k=st.integers(0, 60),
    dtype=st.sampled_from(["float32", "float64"]),
    integers=st.booleans(),
    fused=st.booleans(),
    clear=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_is_what_sorting_finds(size, share, k, dtype, integers, fused, clear, seed):
    rng = np.random.default_rng(seed)
    k = min(k, size)
    values = rng.integers(-3, 4, (2, size)) if integers else rng.standard_normal((2, size))
    accumulator, gradient = np.where(rng.random((2, size)) < share, values, 0).astype(dtype)
    total = accumulator + gradient if fused else accumulator.copy()

    stream = NonZeroTopK(k)(accumulator, gradient if fused else None, clear=clear)

    where = expected(total, k)
    np.testing.assert_array_equal(stream.indices, where)
    np.testing.assert_array_equal(stream.values, total[where])
    if clear:
        total[where] = 0
    np.testing.assert_array_equal(accumulator, total)


@pytest.mark.parametrize("nonzeros", [0, 50, 399, 400, 401, 1700, 100_000, 200_000])
def test_few_and_many_non_zeros(nonzeros):
    rng = np.random.default_rng(nonzeros)
    vector = np.zeros(200_000, np.float32)
    vector[rng.choice(len(vector), nonzeros, replace=False)] = rng.standard_normal(nonzeros)

    stream = NonZeroTopK(400)(vector.copy(), np.zeros_like(vector), clear=True)

    np.testing.assert_array_equal(stream.indices, expected(vector, 400))
    np.testing.assert_array_equal(stream.values, vector[stream.indices])


def test_what_is_not_finite_comes_first():
    vector = np.array([0, 1e30, np.nan, 0, -np.inf, 2], np.float32)
    assert NonZeroTopK(2)(vector).indices.tolist() == [2, 4]
