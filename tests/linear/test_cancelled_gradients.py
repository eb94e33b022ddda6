"""Adaptive weights whose first gradient is the rounding error of a sum that cancels, which says nothing of where to go."""

import numpy as np
import pytest
import scipy.sparse

import sparseallreduce as sar
from sparseallreduce import SparseStream
from sparseallreduce.errors import DivergenceError
from sparseallreduce.linear import Dataset, Descent, Logistic, LogisticRegression, OneVsRest, SparseStrategy
from sparseallreduce.linear.weights import AdaptiveWeights

RARE = 40


def balanced(samples=100, seed=0):
    """Samples of two classes, as many of each: feature 0 is the same in all, 1 says the class, and each has one of its own."""
    labels = np.where(np.arange(samples) % 2 == 0, 1.0, -1.0)
    rows = scipy.sparse.lil_array((samples, 2 + RARE), dtype=np.float32)
    rng = np.random.default_rng(seed)
    for row, label in enumerate(labels):
        rows[row, 0], rows[row, 1], rows[row, 2 + rng.integers(RARE)] = 0.7, label, 1.0
    return rows.tocsr(), labels


def first_gradient(order):
    _, labels = balanced()
    coefficients = (-labels * np.float32(0.3) / 100).astype(np.float32)
    total = np.float32(0)
    for row in order:
        total += coefficients[row] * np.float32(0.7)
    return float(total)


def stepped(order, descent, threads=1):
    X, labels = balanced()
    dataset = Dataset.from_scipy(X[order], labels[order])
    strategy = SparseStrategy(dataset, sar.SERIAL, descent, threads=threads)
    strategy.weights.features_scaled = True
    rows = np.arange(len(labels))
    coefficients = (-labels[order] * np.float32(0.3) / 100).astype(np.float32)
    strategy.scores(rows)
    strategy.step(rows, coefficients, 0.5)
    return strategy.weights


@pytest.mark.parametrize("descent", [Descent(update="ftrl"), Descent(1e-3, update="ftrl"), Descent(1e-6, True, 1e-6, update="ftrl")])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_feature_that_all_samples_have_stays_where_their_slopes_cancel(descent, threads):
    orders = [np.random.default_rng(seed).permutation(100) for seed in range(30)]
    noisy = [order for order in orders if first_gradient(order) != 0]
    assert len(noisy) > 10, "in these orders sums leave a rounding error"
    for order in noisy:
        weights = stepped(order, descent, threads).to_array()
        assert weights[0] == 0
        assert weights[1] == pytest.approx(0.5, rel=3e-3)
        assert (np.abs(weights[2 : 2 + RARE]) > 0.4).any()


def test_by_rows_and_by_streams_the_same_weights_wait():
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(100)
        alone, together = (stepped(order, Descent(update="ftrl"), threads) for threads in (1, 2))
        for name, value in alone.state().items():
            np.testing.assert_array_equal(value, together.state()[name])


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_only_first_gradients_wait_and_only_for_noise(dtype, dense):
    eps = np.finfo(dtype).eps
    slopes = np.array([1.0, 100 * eps, 10 * eps, -10 * eps, 0.0], dtype)
    weights = AdaptiveWeights(5, Descent(update="ftrl"), dtype)
    weights.features_scaled = True
    stream = SparseStream.from_dense(slopes) if not dense else SparseStream._dense_form(slopes, 5)
    weights.descend(stream, 0.5)
    np.testing.assert_allclose(weights.to_array(), [-0.5, -0.5, 0, 0, 0])
    later = np.array([10 * eps, 1.0, 10 * eps, 0.5, 0.0], dtype)
    weights.descend(SparseStream.from_dense(later), 0.5)
    np.testing.assert_allclose(weights.to_array()[:2], [-0.5, -1.0], rtol=1e-3)
    np.testing.assert_allclose(weights.to_array()[2:], [0, -0.5, 0])


def test_what_is_no_number_does_not_wait():
    for bad in (np.inf, np.nan):
        weights = AdaptiveWeights(3, Descent(update="ftrl"))
        weights.features_scaled = True
        with pytest.raises(DivergenceError), np.errstate(all="ignore"):
            weights.descend(SparseStream([0, 1], np.float32([1.0, bad]), 3), 0.5)


@pytest.mark.parametrize("classes", [3, 7, 10])
def test_intercepts_of_balanced_classes_stay(classes):
    samples = 10 * classes
    labels = np.arange(samples) % classes
    X = scipy.sparse.csr_array((np.ones(samples, np.float32), (np.arange(samples), labels)), shape=(samples, classes))
    model = OneVsRest(Logistic(), classes)
    for seed in range(10):
        order = np.random.default_rng(seed).permutation(samples)
        dataset = Dataset.from_scipy(X[order], labels[order])
        strategy = SparseStrategy(dataset, sar.SERIAL, Descent(0.0, True, update="ftrl", columns=classes))
        strategy.weights.features_scaled = True
        rows = np.arange(samples)
        scores = strategy.scores(rows)
        slopes = model.derivative(scores, dataset.labels) - (0.5 - 1 / classes)  # of which each class's add up to zero
        strategy.step(rows, (slopes / samples).astype(np.float32), 0.5)
        weights = strategy.weights.to_array()
        np.testing.assert_array_equal(weights[-1], 0)
        np.testing.assert_allclose(np.diag(weights), 0.5, rtol=1e-3)


def test_a_model_of_balanced_samples_does_not_depend_on_noise():
    X, labels = balanced()
    settings = {"update": "ftrl", "batch_size": 100, "comm": sar.SERIAL, "max_iter": 1, "tol": None}
    found = [LogisticRegression(random_state=seed, **settings).fit(X, labels).coef_[0] for seed in range(10)]
    for weights in found:
        np.testing.assert_allclose(weights, found[0], atol=1e-5)
        assert weights[0] == 0


def test_features_of_different_sizes_do_not_wait():
    weights = AdaptiveWeights(2, Descent(update="ftrl"))
    weights.descend(SparseStream([0, 1], np.float32([1e6, 1e-3]), 2), 0.5)
    np.testing.assert_allclose(weights.to_array(), [-0.5, -0.5])
