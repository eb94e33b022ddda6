"""Weights of K columns: scores, gradients and steps are those of dense arithmetic in float64, and of one column after the other."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array, random_array

import sparseallreduce as sar
from sparseallreduce.errors import DatasetError, DivergenceError
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.gradients.columns import flattened, new_batch
from sparseallreduce.linear.gradients.dense import DenseGradient
from sparseallreduce.linear.weights import Descent, new_weights
from sparseallreduce.runtime.threads import Threads
from sparseallreduce.streams.stream import SparseStream

FTRL = {"update": "ftrl", "l2": 0.02, "l1": 0.01}


def samples(rows=60, features=20_000, density=0.003, seed=1, dtype=np.float32):
    matrix = random_array((rows, features), density=density, format="csr", rng=np.random.default_rng(seed))
    dataset = Dataset.from_scipy(matrix, np.ones(rows))
    return replace(dataset, values=dataset.values.astype(dtype))


def precise(dataset):
    return dataset.to_scipy().astype(np.float64)


@given(
    data=st.data(),
    features=st.sampled_from([1, 63, 64, 4097, 30_000]),
    density=st.sampled_from([0.0, 0.001, 0.3]),
    columns=st.sampled_from([1, 2, 3, 8, 17]),
    intercept=st.booleans(),
    threads=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from([np.float32, np.float64]),
    descent=st.sampled_from([{}, {"l2": 0.1}, {"momentum": 0.5}, {"l1": 0.01}, {"average_from": 1, "momentum": 0.5}, FTRL]),
)
def test_scores_and_gradients_are_those_of_dense_arithmetic(data, features, density, columns, intercept, threads, dtype, descent):
    dataset = samples(30, features, density, 2, dtype)
    shared, size, matrix = Threads(threads), features + intercept, precise(dataset)
    batch, dense = new_batch(dataset, size, shared, columns, 2), DenseGradient(dataset, size, shared, columns=columns)
    weights = new_weights(size, Descent(intercept=intercept, columns=columns, **descent), dtype, shared)
    rng = np.random.default_rng(3)
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if dtype == np.float32 else {"rtol": 1e-9, "atol": 1e-11}
    before = None
    for _ in range(data.draw(st.integers(1, 5))):
        rows = np.array(data.draw(st.lists(st.integers(0, 29), max_size=40)), np.int64)
        scores, now = batch.scores(rows, weights), weights.at(np.arange(size)).astype(np.float64)
        assert scores.shape == (len(rows), columns) and scores.dtype == np.float64
        np.testing.assert_array_equal(scores, weights.scores(dataset, rows))
        np.testing.assert_allclose(scores, matrix[rows] @ now[:features] + (now[-1] if intercept else 0), **tolerance)
        coefficients = rng.standard_normal((len(rows), columns)).astype(dtype)
        coefficients[rng.random(coefficients.shape) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0
        gradient = batch.gradient(rows, coefficients)
        assert gradient.to_dense().shape == (size, columns)
        np.testing.assert_array_equal(gradient.to_dense(), dense(rows, coefficients))
        np.testing.assert_allclose(gradient.to_dense()[:features], matrix[rows].T @ coefficients.astype(np.float64), **tolerance)
        if intercept:
            np.testing.assert_allclose(gradient.to_dense()[-1], coefficients.sum(axis=0, dtype=np.float64), **tolerance)
        if before is not None:  # with two buffers a gradient outlives the next
            np.testing.assert_array_equal(before[0].to_dense(), before[1])
        before = gradient, gradient.to_dense().copy()
        weights.descend(gradient, 0.1)


@pytest.mark.parametrize(
    "descent",
    [{}, {"l2": 0.02}, {"l1": 0.03}, {"l2": 0.02, "momentum": 0.8, "nesterov": True}, {"average_from": 150}, {"update": "ftrl"}, FTRL],
    ids=str,
)
@pytest.mark.parametrize("form", ["sparse", "dense", "flat"])
@pytest.mark.parametrize("intercept", [False, True])
def test_every_column_descends_as_weights_of_its_own(descent, form, intercept):
    rng, size, columns = np.random.default_rng(5), 30, 4
    together = new_weights(size, Descent(intercept=intercept, columns=columns, **descent), np.float64)
    apart = [new_weights(size, Descent(intercept=intercept, **descent), np.float64) for _ in range(columns)]
    for step in range(300):
        gradient = np.where(rng.random((size, 1)) < 0.1, rng.standard_normal((size, columns)), 0)
        stream = sar.SparseStream.from_dense(gradient, switch_density=0.0 if form == "dense" else None)
        together.descend(flattened(stream, columns) if form == "flat" else stream, 0.2)
        for column, weights in enumerate(apart):  # of the same indices, a zero among them too
            single = SparseStream(stream.indices, np.ascontiguousarray(stream.values[:, column]), size)
            weights.descend(SparseStream._dense_form(gradient[:, column].copy(), size) if form == "dense" else single, 0.2)
        if step in (0, 160, 299):
            np.testing.assert_allclose(together.to_array(), np.stack([weights.to_array() for weights in apart], 1), rtol=1e-12, atol=1e-15)
            indices = np.arange(0, size, 3)
            np.testing.assert_allclose(together.at(indices), np.stack([w.at(indices) for w in apart], 1), rtol=1e-12, atol=1e-15)
            assert together.penalty() == pytest.approx(sum(weights.penalty() for weights in apart))
    assert together.to_array().any()


@pytest.mark.parametrize("descent", [{"l2": 0.1}, {"l1": 0.01, "momentum": 0.9, "average_from": 3}, FTRL])
def test_a_state_goes_through_a_checkpoint_to_the_same_bits(descent):
    rng = np.random.default_rng(6)
    gradients = [sar.SparseStream.from_dense(rng.standard_normal((9, 3)).astype(np.float32)) for _ in range(20)]
    gone, resumed = (new_weights(9, Descent(intercept=True, columns=3, **descent)) for _ in range(2))
    for gradient in gradients[:10]:
        gone.descend(gradient, 0.1)
    state = {name: value.copy() if isinstance(value, np.ndarray) else json.loads(json.dumps(value)) for name, value in gone.state().items()}
    resumed.restore(state)
    for gradient in gradients[10:]:
        gone.descend(gradient, 0.1)
        resumed.descend(gradient, 0.1)
    np.testing.assert_array_equal(gone.to_array(), resumed.to_array())
    again = new_weights(9, Descent(intercept=True, columns=3))
    again.assign(gone.to_array())
    np.testing.assert_array_equal(again.to_array(), gone.to_array())


@pytest.mark.parametrize("where", [0, -1])  # a weight, and an intercept
@pytest.mark.parametrize("update", ["sgd", "ftrl"])
def test_a_weight_of_any_column_that_is_no_number_ends_the_run(where, update):
    weights, gradient = new_weights(5, Descent(intercept=True, columns=3, update=update)), np.zeros((5, 3), np.float32)
    gradient[where, 1] = np.inf
    with pytest.raises(DivergenceError, match="after step 1"):
        weights.descend(sar.SparseStream.from_dense(gradient), 0.1)


@pytest.mark.parametrize("columns", [None, 10**6])
def test_weights_that_no_memory_holds_are_refused_by_their_size(columns):
    with pytest.raises(DatasetError, match=r"bytes, and there is no memory for them: use fewer features or classes"):
        new_weights(2**44, Descent(columns=columns))


def test_a_thousand_columns_and_a_single_sample():
    dataset = Dataset.from_scipy(csr_array(np.eye(1, 100_000, 7)), [1.0])
    batch, weights = new_batch(dataset, 100_001, Threads(), 1000), new_weights(100_001, Descent(intercept=True, columns=1000))
    gradient = batch.gradient(np.array([0]), np.ones((1, 1000), np.float32))
    assert gradient.nnz == 2 and gradient.values.shape == (2, 1000)
    weights.descend(gradient, 1.0)
    np.testing.assert_array_equal(batch.scores(np.array([0]), weights), np.full((1, 1000), -2.0))
