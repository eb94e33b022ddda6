"""The losses, their derivatives and predictions."""

import doctest
from pathlib import Path

import numpy as np
import pytest

from sparseallreduce.linear.models import MODELS, Logistic

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


def test_the_model_of_the_documentation_trains():
    page = Path(__file__).resolve().parents[2] / "docs" / "training.md"
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried >= 7 and failed == 0
