"""The weights: equal to those of plain dense arithmetic, however few of them a step touches."""

import numpy as np
import pytest
import scipy.sparse

import sparseallreduce as sar
from sparseallreduce.linear.datasets import Dataset
from sparseallreduce.linear.weights import Descent, Weights


@pytest.mark.parametrize("steps,rate,l2", [(50, 0.5, 0.0), (50, 0.5, 0.1), (400, 1.0, 0.2)])
@pytest.mark.parametrize("dense", [False, True])
def test_scaled_weights_are_the_plain_ones(steps, rate, l2, dense):
    rng = np.random.default_rng(3)
    weights, plain = Weights(40, Descent(l2)), np.zeros(40)
    for _ in range(steps):
        gradient = np.where(rng.random(40) < 0.2, rng.standard_normal(40), 0).astype(np.float32)
        stream = sar.SparseStream.from_dense(gradient, switch_density=0.0 if dense else None)
        assert stream.is_dense == dense
        weights.descend(stream, rate)
        plain = (1 - rate * l2) * plain - rate * gradient
    np.testing.assert_allclose(weights.to_array(), plain, rtol=1e-4, atol=1e-5)
    assert weights.penalty() == pytest.approx(l2 / 2 * plain @ plain, rel=1e-4)


def test_a_rate_that_falls_by_the_scale_keeps_precision():
    weights = Weights(2, Descent(0.5))
    for _ in range(2000):  # the scale alone would be 0.5 ** 2000
        weights.descend(sar.SparseStream([0], np.float32([1.0]), 2), 1.0)
    np.testing.assert_allclose(weights.to_array(), [-2.0, 0.0], rtol=1e-6)


def test_scores_are_inner_products():
    rng = np.random.default_rng(0)
    matrix = np.where(rng.random((30, 25)) < 0.3, rng.standard_normal((30, 25)), 0)
    dataset = Dataset.from_scipy(scipy.sparse.csr_array(matrix), np.ones(30))
    weights = Weights(25, Descent(0.5))
    weights.descend(sar.SparseStream.from_dense(rng.standard_normal(25).astype(np.float32)), 1.0)
    weights.descend(sar.SparseStream.from_dense(rng.standard_normal(25).astype(np.float32)), 0.1)
    rows = np.array([4, 29, 4, 0])
    np.testing.assert_allclose(weights.scores(dataset, rows), matrix[rows] @ weights.to_array(), rtol=1e-4, atol=1e-5)
    assert len(weights.scores(dataset, rows[:0])) == 0
