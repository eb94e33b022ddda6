"""The losses, and the weights that shrink without a pass over them."""

import numpy as np
import pytest

import sparseallreduce as sar
from sparseallreduce.linear.datasets import Dataset
from sparseallreduce.linear.models import MODELS, Logistic, Weights, save_model

SCORES = np.array([-30.0, -2.5, -1.0001, -0.3, 0.0, 0.7, 0.9999, 1.5, 40.0])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("label", [-1.0, 1.0])
def test_the_derivative_is_that_of_the_loss(name, label):
    model, labels, step = MODELS[name](), np.full(len(SCORES), label), 1e-5
    slope = (model.loss(SCORES + step, labels) - model.loss(SCORES - step, labels)) / (2 * step)
    np.testing.assert_allclose(model.derivative(SCORES, labels), slope, rtol=1e-5, atol=1e-9)


def test_losses_are_those_of_the_thesis():
    labels = np.array([1.0, -1.0])
    scores = np.array([0.5, 0.5])
    np.testing.assert_allclose(MODELS["logistic"]().loss(scores, labels), np.log(1 + np.exp(-labels * scores)))
    np.testing.assert_allclose(MODELS["svm"]().loss(scores, labels), [0.5, 1.5])
    np.testing.assert_allclose(MODELS["linear"]().loss(scores, labels), [0.125, 1.125])


def test_no_score_overflows():
    scores, labels = np.array([-1e30, -800.0, 800.0, 1e30]), np.array([1.0, 1.0, -1.0, -1.0])
    with np.errstate(all="raise", under="ignore"):
        assert np.isfinite(Logistic().loss(scores, labels)).all()
        np.testing.assert_allclose(Logistic().derivative(scores, labels), [-1, -1, 1, 1])


def test_predictions_are_a_probability_a_class_and_a_number():
    scores = np.array([-2.0, 2.0])
    np.testing.assert_allclose(MODELS["logistic"]().prediction(scores), 1 / (1 + np.exp(-scores)))
    np.testing.assert_array_equal(MODELS["svm"]().prediction(scores), [-1, 1])
    np.testing.assert_array_equal(MODELS["linear"]().prediction(scores), scores)


@pytest.mark.parametrize("steps,rate,l2", [(50, 0.5, 0.0), (50, 0.5, 0.1), (400, 1.0, 0.2)])
@pytest.mark.parametrize("dense", [False, True])
def test_scaled_weights_are_the_plain_ones(steps, rate, l2, dense):
    rng = np.random.default_rng(3)
    weights, plain = Weights(40), np.zeros(40)
    for _ in range(steps):
        gradient = np.where(rng.random(40) < 0.2, rng.standard_normal(40), 0).astype(np.float32)
        stream = sar.SparseStream.from_dense(gradient, switch_density=0.0 if dense else None)
        assert stream.is_dense == dense
        weights.descend(stream, rate, l2)
        plain = (1 - rate * l2) * plain - rate * gradient
    np.testing.assert_allclose(weights.to_array(), plain, rtol=1e-4, atol=1e-5)
    assert weights.squared_norm() == pytest.approx(plain @ plain, rel=1e-4)


def test_a_rate_that_falls_by_the_scale_keeps_precision():
    weights = Weights(2)
    for _ in range(2000):  # the scale alone would be 0.5 ** 2000
        weights.descend(sar.SparseStream([0], np.float32([1.0]), 2), 1.0, 0.5)
    np.testing.assert_allclose(weights.to_array(), [-2.0, 0.0], rtol=1e-6)


def test_scores_are_inner_products():
    rng = np.random.default_rng(0)
    matrix = np.where(rng.random((30, 25)) < 0.3, rng.standard_normal((30, 25)), 0)
    import scipy.sparse

    dataset = Dataset.from_scipy(scipy.sparse.csr_array(matrix), np.ones(30))
    weights = Weights(25)
    weights.descend(sar.SparseStream.from_dense(rng.standard_normal(25).astype(np.float32)), 1.0)
    weights.descend(sar.SparseStream.from_dense(rng.standard_normal(25).astype(np.float32)), 0.1, 0.5)
    rows = np.array([4, 29, 4, 0])
    np.testing.assert_allclose(weights.scores(dataset, rows), matrix[rows] @ weights.to_array(), rtol=1e-4, atol=1e-5)
    assert len(weights.scores(dataset, rows[:0])) == 0


def test_a_model_file_holds_all_that_prediction_needs(tmp_path):
    weights = Weights(3)
    weights.descend(sar.SparseStream([1], np.float32([2.0]), 3), 1.0)
    save_model(tmp_path / "model.npz", weights, Logistic(), (0.0, 4.0))
    with np.load(tmp_path / "model.npz") as file:
        np.testing.assert_array_equal(file["weights"], np.float32([0, -2, 0]))
        assert file["weights"].dtype == np.float32
        assert (str(file["model"]), int(file["n_features"]), file["classes"].tolist()) == ("logistic", 3, [0.0, 4.0])
    assert [path.name for path in tmp_path.iterdir()] == ["model.npz"]
