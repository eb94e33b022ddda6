"""The losses, their derivatives and predictions."""

import doctest
from pathlib import Path

import numpy as np
import pytest
from scipy.special import huber
from sklearn.metrics import mean_pinball_loss, mean_poisson_deviance

from sparseallreduce.linear.models import MODELS, Logistic, model_of

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

LOSS_CASES = [
    ("svm", "squared_hinge", None),
    ("linear", "huber", 0.4),
    ("linear", "huber", 3.0),
    ("linear", "quantile", 0.1),
    ("linear", "quantile", 0.5),
    ("linear", "poisson", None),
    ("linear", "epsilon_insensitive", 0.77),
    ("linear", "squared_epsilon_insensitive", 0.7),
]


@pytest.mark.parametrize("name,loss,parameter", LOSS_CASES)
@pytest.mark.parametrize("label", [-1.0, 1.0, 3.0])
def test_the_derivative_of_every_loss_is_that_of_the_loss(name, loss, parameter, label):
    if (name == "svm" and label == 3) or (loss == "poisson" and label < 0):
        label = 1.0
    model, step = model_of(name, loss, parameter), 1e-6
    scores = SCORES[:-1]
    labels = np.full(len(scores), label)
    slope = (model.loss(scores + step, labels) - model.loss(scores - step, labels)) / (2 * step)
    np.testing.assert_allclose(model.derivative(scores, labels), slope, rtol=1e-5, atol=1e-6)
    assert (model.loss(scores, labels) >= 0).all()


def test_losses_have_the_values_that_scikit_learn_gives_them():
    scores, labels = np.array([0.0, 2.0, 3.0]), np.array([1.0, 2.0, 1.0])
    np.testing.assert_allclose(model_of("linear", "poisson").loss(np.log([1.0, 4.0, 0.5]), labels) * 2, [
        mean_poisson_deviance([label], [mean]) for label, mean in zip(labels, [1.0, 4.0, 0.5])
    ], atol=1e-12)
    np.testing.assert_allclose(model_of("linear", "quantile", 0.3).loss(scores, labels), [
        mean_pinball_loss([label], [score], alpha=0.3) for label, score in zip(labels, scores)
    ])
    np.testing.assert_allclose(model_of("linear", "huber", 0.5).loss(scores, labels), huber(0.5, scores - labels))


def test_the_logistic_derivative_is_not_zero_where_float64_has_a_number_for_it():
    np.testing.assert_allclose(Logistic().prediction(np.array([-40.0])), np.exp(-40.0), rtol=1e-12)
    np.testing.assert_allclose(Logistic().derivative(np.array([40.0]), np.array([1.0])), -np.exp(-40.0), rtol=1e-12)


def test_poisson_overflows_nowhere_and_its_loss_stays_convex():
    model, scores = model_of("linear", "poisson"), np.array([-1e9, -800.0, 79.0, 80.0, 81.0, 800.0, 1e9])
    with np.errstate(all="raise", under="ignore"):
        losses, slopes = model.loss(scores, np.ones(7)), model.derivative(scores, np.ones(7))
    assert np.isfinite(losses).all() and np.isfinite(slopes.astype(np.float32)).all()
    assert (np.diff(losses[2:]) > 0).all() and (np.diff(slopes) >= 0).all()
    assert model.loss(np.array([0.0]), np.array([0.0])) == 1


@pytest.mark.parametrize("arguments", [("svm", "huber"), ("linear", "hinge"), ("linear", "squared", 1.0), ("logistic", "log", 1.0)])
def test_a_loss_or_parameter_that_a_model_does_not_have_is_refused(arguments):
    with pytest.raises(ValueError, match="the loss"):
        model_of(*arguments)
    for loss, parameter in (("huber", 0.0), ("huber", np.inf), ("quantile", 0.0), ("quantile", 1.0)):
        with pytest.raises(ValueError, match="must be"):
            model_of("linear", loss, parameter)


def test_predictions_are_a_probability_a_class_and_a_number():
    scores = np.array([-2.0, 2.0])
    np.testing.assert_allclose(MODELS["logistic"]().prediction(scores), 1 / (1 + np.exp(-scores)))
    np.testing.assert_array_equal(MODELS["svm"]().prediction(scores), [-1, 1])
    np.testing.assert_array_equal(MODELS["linear"]().prediction(scores), scores)


def test_the_model_of_the_documentation_trains():
    page = Path(__file__).resolve().parents[2] / "docs" / "training.md"
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried >= 7 and failed == 0
