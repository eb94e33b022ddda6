"""Finite numbers whose squares are none are trained on, or refused by an error that names them."""

import numpy as np
import pytest

import sparseallreduce as sar
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear import LinearRegression, LinearSVM, LogisticRegression
from sparseallreduce.linear.data.feature_scaling import feature_scales

RNG = np.random.default_rng(3)
X = RNG.standard_normal((20, 3))
NUMBERS = X.sum(axis=1)
CLASSES = (NUMBERS > 0).astype(int)
LARGE = np.where(np.arange(60).reshape(20, 3) == 4, 1.79e308, X)
LABELS = np.where(np.arange(20) == 4, 1e300, NUMBERS)
SETTINGS = {"comm": sar.SERIAL, "max_iter": 3, "tol": None}


pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # an error says it all, or nothing has gone wrong


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_scale_of_the_largest_number_is_a_power_of_two(dtype):
    largest = np.array([np.finfo(dtype).max], dtype)
    assert 1 < largest / feature_scales(largest) < 2
    assert np.frexp(feature_scales(largest))[0] == 0.5


@pytest.mark.parametrize("update", ["auto", "sgd", "ftrl"])
@pytest.mark.parametrize("estimator,y", [(LinearRegression, NUMBERS), (LogisticRegression, CLASSES), (LinearSVM, CLASSES)])
def test_a_large_value_is_scaled_or_named(estimator, y, update):
    assert np.isfinite(estimator(update=update, **SETTINGS).fit(LARGE, y).coef_).all()
    with pytest.raises(DatasetError, match=r"the value 1\.79e\+308 is too large .* divide all values"):
        estimator(update=update, scale_features=False, **SETTINGS).fit(LARGE, y)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("options", [{}, {"update": "sgd"}, {"update": "ftrl"}, {"scale_features": False}, {"learning_rate": 1e-3}])
def test_a_large_label_is_named(options, partial):
    model = LinearRegression(**SETTINGS, **options)
    with pytest.raises(DatasetError, match=r"the label 1e\+300 is too large .* divide all labels"):
        (model.partial_fit if partial else model.fit)(X, LABELS)


def test_losses_that_are_finite_take_large_labels():
    assert np.isfinite(LinearRegression(loss="huber", **SETTINGS).fit(X, LABELS).coef_).all()


@pytest.mark.parametrize("estimator,y", [(LinearRegression, NUMBERS), (LogisticRegression, CLASSES)])
def test_weights_whose_sum_is_infinite_are_named(estimator, y):
    with pytest.raises(ValueError, match="the sum of all sample_weight is inf"):
        estimator(**SETTINGS).fit(X, y, np.full(20, 1.7e308))
