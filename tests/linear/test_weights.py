"""The weights: equal to those of plain dense arithmetic, however few of them a step touches."""

import json
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse

import sparseallreduce as sar
from sparseallreduce.errors import DivergenceError
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.weights import Descent, Weights, new_weights
from sparseallreduce.linear.weights import lazy as lazy_weights
from sparseallreduce.runtime.threads import Threads


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


def plain_steps(descent, gradients, rates):
    """What a descent comes to in dense float64: the weights after all steps, their average, and the last weights alone."""
    features = gradients.shape[1] - descent.intercept
    shrunk = np.arange(gradients.shape[1]) < features
    weights, velocity, total, averaged = (np.zeros(gradients.shape[1]) for _ in range(4))
    count = 0
    for step, (gradient, rate) in enumerate(zip(gradients.astype(float), rates), start=1):
        weights = np.where(shrunk, (1 - rate * descent.l2 * descent.penalty_factor) * weights, weights)
        velocity = descent.momentum * velocity + gradient
        weights = weights - rate * (gradient + descent.momentum * velocity if descent.nesterov else velocity)
        soft = np.sign(weights) * np.maximum(np.abs(weights) - rate * descent.l1 * descent.penalty_factor, 0)
        weights = np.where(shrunk, soft, weights)
        if descent.averages and step > descent.average_from:
            total, count = total + weights, count + 1
    averaged = total / count if count else weights
    return averaged, weights


def sparse_gradients(steps, size, density, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    often = rng.random(size) ** 3  # some features nearly always, some hardly ever
    present = rng.random((steps, size)) < density * often / often.mean()
    return np.where(present, rng.standard_normal((steps, size)), 0).astype(dtype)


DESCENTS = [
    Descent(l2=l2, l1=l1, momentum=momentum, nesterov=nesterov, average_from=average, intercept=intercept)
    for l2 in (0.0, 0.02)
    for l1 in (0.0, 0.03)
    for momentum, nesterov in ((0.0, False), (0.9, False), (0.8, True))
    for average in (None, 0, 150)
    for intercept in (False, True)
]


@pytest.mark.parametrize("descent", DESCENTS, ids=repr)
@pytest.mark.parametrize("dense", [False, True])
def test_every_descent_is_that_of_plain_arithmetic(descent, dense):
    gradients = sparse_gradients(400, 30, 0.08)
    rates = 0.3 / (1 + np.arange(400) / 100) * np.where(np.arange(400) % 7 == 0, 2.0, 1.0)
    weights = new_weights(30, descent, np.float64)
    features = 30 - descent.intercept
    dataset = Dataset.from_scipy(scipy.sparse.csr_array(np.eye(features)), np.ones(features))
    dataset = replace(dataset, values=dataset.values.astype(np.float64))
    for step, (gradient, rate) in enumerate(zip(gradients, rates), start=1):
        weights.descend(sar.SparseStream.from_dense(gradient, switch_density=0.0 if dense else None), rate)
        if step in (1, 149, 400):
            expected, last = plain_steps(descent, gradients[:step], rates[:step])
            np.testing.assert_allclose(weights.to_array(), expected, rtol=1e-9, atol=1e-11)
            np.testing.assert_allclose(weights.at(np.arange(30)), last, rtol=1e-9, atol=1e-11)
            bias = last[-1] if descent.intercept else 0.0
            np.testing.assert_allclose(weights.scores(dataset, np.arange(features)), last[:features] + bias, rtol=1e-9, atol=1e-11)
    assert np.any(expected)
    if descent.l1:
        assert (last[:-1] == 0).any(), "L1 has put no weight to zero"
    size = descent.l2 / 2 * expected[:features] @ expected[:features] + descent.l1 * np.abs(expected[:features]).sum()
    assert weights.penalty() == pytest.approx(size)


@pytest.mark.parametrize(
    "descent", [Descent(l1=0.01), Descent(momentum=0.9, average_from=0), Descent(0.5, l1=1e-3, momentum=0.5, average_from=9)], ids=repr
)
def test_a_full_table_and_a_small_scale_lose_nothing(descent, monkeypatch):
    monkeypatch.setattr(lazy_weights, "_STEPS", 64)
    gradients = sparse_gradients(500, 20, 0.05)
    rates = np.full(500, 0.1)
    weights = new_weights(20, descent, np.float64)
    for gradient, rate in zip(gradients, rates):
        weights.descend(sar.SparseStream.from_dense(gradient), rate)
    np.testing.assert_allclose(weights.to_array(), plain_steps(descent, gradients, rates)[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("descent", DESCENTS[::5], ids=repr)
def test_a_restored_state_goes_on_to_the_same_bits(descent):
    gradients = sparse_gradients(90, 40, 0.1, dtype=np.float32)
    streams = [sar.SparseStream.from_dense(gradient) for gradient in gradients]
    whole, again = new_weights(40, descent), new_weights(40, descent)
    for step, stream in enumerate(streams):
        whole.descend(stream, 0.2)
        if step == 40:
            state = whole.state()
            arrays = {name: value.copy() for name, value in state.items() if isinstance(value, np.ndarray)}
            numbers = {name: value for name, value in state.items() if name not in arrays}
            again.restore(arrays | json.loads(json.dumps(numbers)))  # as from a checkpoint
        if step > 40:
            again.descend(stream, 0.2)
    np.testing.assert_array_equal(again.to_array(), whole.to_array())


@pytest.mark.parametrize("descent", [Descent(1e-3), Descent(1e-3, True, 1e-3, 0.9, True, 5)], ids=repr)
def test_threads_change_no_bit(descent):
    gradients = sparse_gradients(60, 50, 0.3, dtype=np.float32)
    ends = []
    for threads in (1, 3):
        weights = new_weights(50, descent, threads=Threads(threads))
        for gradient in gradients:
            weights.descend(sar.SparseStream.from_dense(gradient), 0.1)
        ends.append(weights.to_array())
    np.testing.assert_array_equal(*ends)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_weight_that_is_no_number_is_named_with_its_step_and_rate(lazy):
    weights = new_weights(3, Descent(l1=1e-9 if lazy else 0.0))
    weights.descend(sar.SparseStream([1], np.float32([1.0]), 3), 0.5)
    told = r"after step 2: lower the learning rate \(1e\+30 there\)"
    with np.errstate(all="ignore"), pytest.raises(DivergenceError, match=told):
        weights.descend(sar.SparseStream([1], np.float32([1e30]), 3), 1e30)


@pytest.mark.parametrize("momentum,nesterov", [(0.0, False), (0.9, False), (0.8, True)])
@pytest.mark.parametrize("average", [None, 0])
@pytest.mark.parametrize("dense", [False, True])
def test_l1_leaves_a_weight_that_is_no_number_one(momentum, nesterov, average, dense):
    descent = Descent(l1=0.1, momentum=momentum, nesterov=nesterov, average_from=average)
    weights = new_weights(3, descent, np.float64)
    weights.assign(np.array([1.0, np.nan, 2.0]))
    gradient = np.array([0.5, 0.0, 0.0])
    for _ in range(3):  # sparse gradients never touch the second
        weights.descend(sar.SparseStream.from_dense(gradient), 0.1)
    assert np.isnan(weights.at(np.arange(3))).tolist() == [False, True, False]
    assert np.isnan(weights.to_array()).tolist() == [False, True, False]
    assert np.isnan(weights.penalty())
    gradient[:] = 0.0, np.nan, 0.0
    with pytest.raises(DivergenceError, match="not finite after step 4"):
        weights.descend(sar.SparseStream.from_dense(gradient, switch_density=0.0 if dense else None), 0.1)


@pytest.mark.parametrize("average", [None, 0])
def test_what_an_intercept_has_left_is_nothing_to_weights_without(average):
    gradient = sar.SparseStream.from_dense(np.ones(4, np.float32))
    before = new_weights(4, Descent(intercept=True, momentum=0.9, average_from=average))
    before.descend(gradient, 0.1)
    weights = new_weights(3, Descent(momentum=0.9, average_from=average))
    weights.remember(before.memory())
    weights.descend(sar.SparseStream.from_dense(np.zeros(3, np.float32)), 0.1)
    assert weights.intercept == 0
    assert weights.at(np.arange(3)).any()  # of whose velocity something was left
