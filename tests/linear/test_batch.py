"""A batch of few features: the same scores and gradients as by the whole data set, whatever rows, threads and coefficients."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array, random_array

from sparseallreduce.linear import kernels
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.gradients.compact import CompactBatch
from sparseallreduce.linear.gradients.dense import DenseGradient
from sparseallreduce.linear.weights import Descent, new_weights
from sparseallreduce.runtime.threads import Threads


def samples(rows=60, features=20_000, density=0.003, seed=1, dtype=np.float32):
    matrix = random_array((rows, features), density=density, format="csr", rng=np.random.default_rng(seed))
    dataset = Dataset.from_scipy(matrix, np.ones(rows))
    return Dataset(dataset.indptr, dataset.indices, dataset.values.astype(dtype), dataset.labels, features)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [[3, 1, 4], [], [0], list(range(50)), [7, 7]], ids=str)
def test_features_are_those_of_the_rows_in_order_and_samples_the_rows(rows, threads):
    dataset = samples()
    batch = CompactBatch(dataset, dataset.features, Threads(threads))
    for taken in (list(range(60)), rows):  # what was taken before leaves nothing behind
        batch.take(np.array(taken, np.int64))
    expected = dataset.to_scipy()[rows]
    columns = np.unique(expected.indices)
    assert batch.features.tolist() == columns.tolist()
    indptr, indices, values, starts = batch.samples
    ours = [values[start : start + length] for start, length in zip(starts, np.diff(indptr))]
    taken = csr_array((np.concatenate([[], *ours]), indices.astype(np.int64), indptr), shape=(len(rows), len(columns)))
    np.testing.assert_array_equal(taken.toarray(), expected[:, columns].toarray())


@given(
    data=st.data(),
    features=st.sampled_from([1, 63, 64, 4096, 4097, 30_000]),
    density=st.sampled_from([0.0, 0.001, 0.3]),
    intercept=st.booleans(),
    threads=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from([np.float32, np.float64]),
    descent=st.sampled_from([{}, {"l2": 0.1}, {"momentum": 0.5}, {"l1": 0.01}, {"average_from": 1, "momentum": 0.5}]),
)
def test_scores_and_gradients_have_the_bits_of_the_whole_data_set(data, features, density, intercept, threads, dtype, descent):
    dataset = samples(30, features, density, 2, dtype)
    shared, size = Threads(threads), features + intercept
    batch, dense = CompactBatch(dataset, size, shared, buffers=2), DenseGradient(dataset, size, shared)
    weights = new_weights(size, Descent(intercept=intercept, **descent), dtype, shared)
    rng = np.random.default_rng(3)
    before = None
    for _ in range(data.draw(st.integers(1, 6))):
        rows = np.array(data.draw(st.lists(st.integers(0, 29), max_size=40)), np.int64)
        np.testing.assert_array_equal(batch.scores(rows, weights), weights.scores(dataset, rows))
        coefficients = rng.standard_normal(len(rows)).astype(dtype)
        coefficients[rng.random(len(rows)) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0
        gradient = batch.gradient(rows, coefficients)
        np.testing.assert_array_equal(gradient.to_dense(), dense(rows, coefficients))
        if not gradient.is_dense:
            touched = np.unique(dataset.to_scipy()[rows[coefficients != 0]].indices).tolist()
            assert gradient.indices.tolist() == touched + [features] * (intercept and len(rows) > 0)
        if before is not None:  # with two buffers a gradient outlives the next
            np.testing.assert_array_equal(before[0].to_dense(), before[1])
        before = gradient, gradient.to_dense().copy()
        weights.descend(gradient, 0.1)


def long_rows(features, lengths, dtype, rng):
    """A data set of rows of these lengths."""
    indices = [np.sort(rng.choice(features, length, replace=False, shuffle=False)).astype(np.uint32) for length in lengths]
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    values = rng.standard_normal(indptr[-1]).astype(dtype)
    return Dataset(indptr, np.concatenate(indices), values, np.ones(len(lengths)), features)


def summed(dataset, rows, coefficients):
    """The rows times their coefficients, added up one after the other; and which features occur."""
    total, occurs = np.zeros(dataset.features, dataset.values.dtype), np.zeros(dataset.features, bool)
    for row, coefficient in zip(rows, coefficients):
        entries = slice(dataset.indptr[row], dataset.indptr[row + 1])
        total[dataset.indices[entries]] += coefficient * dataset.values[entries]
        occurs[dataset.indices[entries]] |= coefficient != 0
    return total, np.flatnonzero(occurs)


# Features and lengths of rows, so that rows are taken and renumbered, that they are used in bands where they lie, and that they also
# touch most features.
LARGE = {"taken": (9_000_000, 12_500), "in place": (1_000_000, 5_000), "full": (600_000, 40_000)}


@pytest.mark.parametrize("threads, share", [(1, 0.4), (3, 0.0), (3, 0.4)])  # the share of the rows that do not count
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", LARGE)
def test_batches_too_large_for_the_cache_have_the_same_bits(kind, threads, dtype, share):
    features, length = LARGE[kind]
    rows = 40
    rng = np.random.default_rng(4)
    dataset = long_rows(features, np.r_[0, rng.integers(length // 2, length * 3 // 2, rows - 2), 3], dtype, rng)
    shared, size = Threads(threads), features + 1
    batch, dense = CompactBatch(dataset, size, shared), DenseGradient(dataset, size, shared)
    weights = new_weights(size, Descent(intercept=True), dtype, shared)
    weights.assign(rng.standard_normal(size).astype(dtype))
    for _ in range(2):  # where not all rows count, only those that do are taken the second time
        chosen, coefficients = rng.permutation(rows), rng.standard_normal(rows).astype(dtype)
        coefficients[rng.random(rows) < share] = 0
        row_by_row = [weights.scores(dataset, chosen[i : i + 1])[0] for i in range(rows)]
        np.testing.assert_array_equal(batch.scores(chosen, weights), row_by_row)
        np.testing.assert_array_equal(weights.scores(dataset, chosen), row_by_row)
        gradient = batch.gradient(chosen, coefficients)
        total, occurring = summed(dataset, chosen, coefficients)
        np.testing.assert_array_equal(gradient.to_dense()[:-1], total)
        np.testing.assert_array_equal(dense(chosen, coefficients)[:-1], total)
        if not gradient.is_dense:
            assert gradient.indices.tolist() == [*occurring, features]


@pytest.mark.parametrize("kind", LARGE)
def test_large_batches_are_in_place_where_that_is_worth_while(kind):
    features, length = LARGE[kind]
    assert bool(kernels.width_in_place(38 * length, 40, features, 4)) == (kind != "taken")


@given(
    features=st.sampled_from([1, 64, 1000, 30_000]),
    lengths=st.lists(st.integers(0, 300), max_size=20),
    width=st.sampled_from([64, 128, 4096, 65_536]),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    dtype=st.sampled_from([np.float32, np.float64]),
    index_dtype=st.sampled_from([np.uint32, np.uint64]),
)
def test_collected_are_the_sums_of_a_range_of_features(features, lengths, width, ends, dtype, index_dtype):
    dataset = long_rows(features, [0, *(min(length, features) for length in lengths)], dtype, np.random.default_rng(5))
    low, high = sorted(round(end * features) for end in ends)
    rows = np.random.default_rng(6).permutation(dataset.rows)
    coefficients = np.arange(1, len(rows) + 1).astype(dtype)
    starts = dataset.indptr[rows]
    offsets = np.concatenate([[0], np.cumsum(dataset.indptr[rows + 1] - starts)])
    total, occurring = summed(dataset, rows, coefficients)
    occurring = occurring[(occurring >= low) & (occurring < high)]
    indices, values = np.empty(len(occurring) + kernels.ROOM, index_dtype), np.empty(len(occurring) + kernels.ROOM, dtype)
    count = kernels.collect(dataset.indices, dataset.values, starts, offsets, coefficients, low, high, width, indices, values)
    assert indices[:count].tolist() == occurring.tolist()
    np.testing.assert_array_equal(values[:count], total[occurring])


def test_unsorted_rows_are_sorted():
    unsorted = csr_array((np.float32([1, 2, 3]), [7, 2, 5], [0, 3, 3]), shape=(2, 9))
    dataset = Dataset.from_scipy(unsorted, np.ones(2))
    assert (dataset.indices.tolist(), dataset.values.tolist()) == ([2, 5, 7], [2, 3, 1])
    assert unsorted.indices.tolist() == [7, 2, 5]  # those given stay as they are


def test_entries_that_cancel_out_are_touched():
    matrix = csr_array((np.ones(8, np.float32), ([0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 3, 0, 1, 2, 3])), shape=(2, 4))
    for features, rows in ((4, 8), (100, 2)):  # many non-zeros to a feature, and few
        dataset = Dataset.from_scipy(csr_array((matrix.data, matrix.indices, matrix.indptr), shape=(2, features)), np.ones(2))
        signs = np.resize(np.float32([1, -1]), rows)
        gradient = CompactBatch(dataset, features, Threads()).gradient(np.resize([0, 1], rows), signs)
        assert not gradient.to_dense().any()
        assert gradient.is_dense == (features == 4)
        assert gradient.stored == 4


def test_more_rows_than_before_and_a_stream_that_becomes_dense():
    dataset = samples(40, 50, 0.9)
    batch = CompactBatch(dataset, 50, Threads())
    for count in (1, 40):
        rows = np.arange(count)
        gradient = batch.gradient(rows, np.ones(count, np.float32))
        assert gradient.is_dense
        np.testing.assert_allclose(gradient.to_dense(), dataset.to_scipy()[rows].sum(axis=0), rtol=1e-6)
