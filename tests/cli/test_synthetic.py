"""The data of `bench` and `simulate`: as many positions as asked for, anywhere, and a check that misses no wrong result."""

import numpy as np
import pytest
from strategies import DTYPES

import sparseallreduce as sar
from sparseallreduce.cli.synthetic import draw_positions, draw_values, largest_deviation

SUM = sar.Operator("sum", np.add, 0)


@pytest.mark.parametrize(
    "size,count",
    [(0, 0), (1, 0), (1, 1), (7, 3), (100, 50), (100, 51), (100, 100), (10**6, 10), (10**6, 10**5), (2**32, 1000), (2**33, 1000)],
)
def test_positions_are_exactly_as_many_different_ones_in_order(size, count):
    positions = draw_positions(np.random.default_rng(0), size, count)

    assert len(positions) == count
    assert positions.dtype == (np.uint32 if size <= 2**32 else np.uint64)
    assert (positions[1:] > positions[:-1]).all()
    assert count == 0 or positions[-1] < size


@pytest.mark.parametrize("size,count", [(6, 2), (6, 5), (500, 2)])
def test_every_position_is_equally_likely(size, count):
    rng = np.random.default_rng(0)
    rounds = 20000

    hits = np.bincount(np.concatenate([draw_positions(rng, size, count) for _ in range(rounds)]), minlength=size)

    expected = rounds * count / size
    assert np.abs(hits - expected).max() < 5 * np.sqrt(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_have_the_dtype_and_differ(dtype):
    values = draw_values(np.random.default_rng(0), 1000, dtype)

    assert values.dtype == dtype
    assert len(np.unique(values)) > 100


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if not dtype.startswith("int")])
def test_another_order_of_the_sum_is_no_deviation(dtype):
    parts = [draw_values(np.random.default_rng(rank), 1000, dtype) for rank in range(16)]
    forward, backward = sum(parts), sum(reversed(parts))
    magnitude = sum(np.abs(part) for part in parts)
    assert (forward != backward).any()

    assert largest_deviation(sar.SparseStream.from_dense(backward), forward, magnitude, 16, SUM) <= 1


@pytest.mark.parametrize("wrong", [1.001, np.nan, np.inf, -1.0])
def test_a_single_wrong_value_is_a_deviation(wrong):
    expected = draw_values(np.random.default_rng(0), 1000, "float32")
    altered = expected.copy()
    altered[500] *= np.float32(wrong)

    assert largest_deviation(sar.SparseStream.from_dense(altered), expected, np.abs(expected), 4, SUM) > 1


def test_integers_must_be_equal():
    expected = np.arange(100, dtype=np.int64)
    altered = expected.copy()
    altered[50] += 1

    assert largest_deviation(sar.SparseStream.from_dense(expected), expected, None, 4, SUM) == 0
    assert largest_deviation(sar.SparseStream.from_dense(altered), expected, None, 4, SUM) > 1


def test_another_size_or_dtype_is_a_deviation():
    expected = np.ones(10, np.float32)

    for other in (np.ones(9, np.float32), np.ones(10, np.float64)):
        assert largest_deviation(sar.SparseStream.from_dense(other), expected, None, 4, SUM) > 1
