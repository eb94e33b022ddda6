"""Models of several classes at once: derivatives, labels, and what is chosen."""

import numpy as np
import pytest
from scipy.sparse import csr_array

import sparseallreduce as sar
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear import Hinge, Logistic, Multinomial, OneVsRest, Squared, model_of_classes, numbered_classes
from sparseallreduce.linear.data.checks import check_labels
from sparseallreduce.linear.data.dataset import Dataset

MODELS = [Multinomial(2), Multinomial(5), OneVsRest(Logistic(), 4), OneVsRest(Hinge(), 3)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{type(model).__name__} {model.name}")
@pytest.mark.parametrize("size", [0.1, 3.0, 30.0])
def test_the_derivative_is_the_slope_of_the_loss(model, size):
    rng = np.random.default_rng(0)
    scores, labels = size * rng.standard_normal((50, model.columns)), rng.integers(0, model.columns, 50).astype(np.float64)
    slopes, width = model.derivative(scores, labels), 1e-6
    assert slopes.shape == scores.shape and model.loss(scores, labels).shape == (50,)
    for column in range(model.columns):
        moved = scores.copy()
        moved[:, column] += width
        higher = model.loss(moved, labels)
        moved[:, column] -= 2 * width
        np.testing.assert_allclose((higher - model.loss(moved, labels)) / (2 * width), slopes[:, column], atol=1e-7)


def test_scores_beyond_every_exponent_have_a_loss_and_a_derivative():
    model, scores = Multinomial(3), np.array([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    np.testing.assert_allclose(model.loss(scores, np.array([1.0, 0.0])), [2e4, np.log(3)])
    np.testing.assert_allclose(model.derivative(scores, np.array([1.0, 0.0])), [[1, -1, 0], [-2 / 3, 1 / 3, 1 / 3]])


def test_two_scores_of_a_softmax_are_a_logistic_model_of_their_difference():
    scores, labels = np.random.default_rng(1).standard_normal((20, 2)), np.arange(20) % 2.0
    np.testing.assert_allclose(Multinomial(2).loss(scores, labels), Logistic().loss(scores[:, 1] - scores[:, 0], 2 * labels - 1))


def test_losses_against_the_rest_add_up():
    scores, labels = np.random.default_rng(2).standard_normal((20, 3)), np.arange(20) % 3.0
    expected = sum(Hinge().loss(scores[:, k], np.where(labels == k, 1.0, -1.0)) for k in range(3))
    np.testing.assert_allclose(OneVsRest(Hinge(), 3).loss(scores, labels), expected)


@pytest.mark.parametrize(
    "base, classes, choice, kind",
    [
        (Logistic, 2, "auto", Logistic),
        (Logistic, 2, "ovr", Logistic),
        (Logistic, 2, "multinomial", Multinomial),
        (Logistic, 3, "auto", Multinomial),
        (Logistic, 3, "ovr", OneVsRest),
        (Hinge, 2, "auto", Hinge),
        (Hinge, 3, "auto", OneVsRest),
    ],
)
def test_what_is_chosen(base, classes, choice, kind):
    assert type(model_of_classes(base(), classes, choice)) is kind


@pytest.mark.parametrize(
    "base, classes, choice, what",
    [
        (Hinge, 3, "multinomial", "use 'ovr'"),
        (Logistic, 3, "one", "must be one of auto, ovr, multinomial"),
        (Logistic, 1, "multinomial", "at least two classes"),
        (Squared, 3, "ovr", "not a classifier"),
    ],
)
def test_what_is_refused(base, classes, choice, what):
    with pytest.raises(ValueError, match=what):
        model_of_classes(base(), classes, choice)


def labelled(labels):
    return Dataset.from_scipy(csr_array(np.ones((len(labels), 1))), labels)


def test_labels_become_the_numbers_of_classes():
    numbered, classes = numbered_classes(labelled([2.5, -1, 7, 2.5]), sar.SERIAL)
    assert numbered.labels.tolist() == [1, 0, 2, 1] and classes == (-1.0, 2.5, 7.0)
    assert numbered_classes(labelled([7, 7]), sar.SERIAL, classes)[0].labels.tolist() == [2, 2]
    with pytest.raises(DatasetError, match="label 8 is not one of the training set's 3 classes"):
        numbered_classes(labelled([7, 8]), sar.SERIAL, classes)


@pytest.mark.parametrize("labels, what", [([3, 3], "needs two classes, but the labels are 3"), ([1, np.nan], "sample 1 is nan")])
def test_labels_that_are_no_classes_are_refused(labels, what):
    with pytest.raises(DatasetError, match=what):
        numbered_classes(labelled(labels), sar.SERIAL)


def test_labels_that_are_no_numbers_of_classes_are_refused():
    check_labels(labelled([0, 2, 1]), Multinomial(3))
    for strange in (3, -1, 0.5):
        with pytest.raises(DatasetError, match=f"sample 1 has the label {strange:g}, but those of 3 classes are 0 to 2"):
            check_labels(labelled([0, strange]), Multinomial(3))
