"""Scores of estimators are those of scikit-learn's metrics, and so is what is refused."""

import warnings

import numpy as np
import pytest
from sklearn.exceptions import UndefinedMetricWarning
from sklearn.metrics import accuracy_score, r2_score

import sparseallreduce as sar
from sparseallreduce.linear import LinearRegression, LogisticRegression

RNG = np.random.default_rng(3)
X = RNG.standard_normal((30, 4))
NUMBERS = X.sum(axis=1) + 0.3 * RNG.standard_normal(30)
CLASSES = (NUMBERS > 0).astype(int)
CLASSIFIER = LogisticRegression(comm=sar.SERIAL, max_iter=3, tol=None).fit(X, CLASSES)
REGRESSION = LinearRegression(comm=sar.SERIAL, max_iter=3, tol=None).fit(X, NUMBERS)
WITH_NAN = np.where(np.arange(30) == 7, np.nan, NUMBERS)


@pytest.mark.parametrize("weights", [None, np.arange(30.0), np.eye(30)[3]], ids=["none", "some", "one sample"])
@pytest.mark.parametrize("y", [CLASSES, CLASSES.reshape(-1, 1), CLASSES.tolist(), CLASSES.astype(float), 1 - CLASSES])
def test_the_accuracy_is_scikit_learns(y, weights):
    assert CLASSIFIER.score(X, y, weights) == pytest.approx(accuracy_score(y, CLASSIFIER.predict(X), sample_weight=weights), abs=1e-15)


@pytest.mark.parametrize("weights", [None, np.arange(30.0)], ids=["none", "some"])
@pytest.mark.parametrize("y", [NUMBERS, NUMBERS.reshape(-1, 1), NUMBERS.tolist(), CLASSES, NUMBERS * 1e-200, np.full(30, 2.0)])
def test_the_coefficient_of_determination_is_scikit_learns(y, weights):
    with np.errstate(under="ignore"):
        wanted = r2_score(y, REGRESSION.predict(X), sample_weight=weights)
    assert REGRESSION.score(X, y, weights) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    "y",
    [CLASSES.astype(str), np.where(CLASSES, "yes", "no"), CLASSES[:1], CLASSES[:-1], None, np.where(CLASSES, 1.0, np.nan), NUMBERS],
    ids=["digits", "strings", "one label for all", "one too few", "none", "not a number", "continuous"],
)
def test_labels_that_scikit_learn_does_not_score_are_refused(y):
    with pytest.raises((TypeError, ValueError)) as theirs, np.errstate(invalid="ignore"):
        accuracy_score(y, CLASSIFIER.predict(X))
    with pytest.raises(type(theirs.value)), np.errstate(invalid="ignore"):
        CLASSIFIER.score(X, y)


@pytest.mark.parametrize(
    "y",
    [CLASSES.astype(str)[:0], np.full(30, "a"), NUMBERS[:1], None, WITH_NAN, np.stack([NUMBERS, NUMBERS], axis=1), np.full(30, np.inf)],
    ids=["nothing", "strings", "one number for all", "none", "not a number", "two columns", "infinite"],
)
def test_numbers_that_scikit_learn_does_not_score_are_refused(y):
    with pytest.raises((TypeError, ValueError)):
        r2_score(y, REGRESSION.predict(X))
    with pytest.raises((TypeError, ValueError)):
        REGRESSION.score(X, y)


@pytest.mark.parametrize("model,y", [(CLASSIFIER, CLASSES), (REGRESSION, NUMBERS)], ids=["classifier", "regression"])
def test_weights_that_are_all_zero_are_an_error_that_says_so(model, y):
    with pytest.raises(ValueError, match="no rank has a sample with a weight"):
        model.score(X, y, np.zeros(30))


def test_one_sample_has_no_coefficient_of_determination():
    with pytest.warns(UndefinedMetricWarning) as told:
        assert np.isnan(REGRESSION.score(X[:1], NUMBERS[:1]))
    assert told[0].filename == __file__


@pytest.mark.parametrize("factor", [1e-300, 1e-160, 1e160, 1e300])
def test_no_square_overflows_in_a_score(factor):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_zero = REGRESSION.score(X, NUMBERS * factor) if factor > 1 else 0.0
    assert of_zero == pytest.approx(r2_score(NUMBERS, REGRESSION.predict(X) / factor) if factor > 1 else 0.0, rel=1e-9)
