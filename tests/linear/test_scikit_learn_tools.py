"""The estimators inside scikit-learn's tools, and weights of samples that count as repetitions with every solver of an optimum."""

import numpy as np
import pytest
import scipy.sparse
import sklearn
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_classification, make_regression
from sklearn.ensemble import BaggingClassifier, StackingClassifier, VotingRegressor
from sklearn.feature_selection import RFE, SelectFromModel
from sklearn.model_selection import GridSearchCV, cross_val_score, cross_validate
from sklearn.multiclass import OneVsRestClassifier
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from sparseallreduce.linear import LinearRegression, LinearSVM, LogisticRegression

CLASSIFIERS, ESTIMATORS = [LogisticRegression, LinearSVM], [LogisticRegression, LinearSVM, LinearRegression]


def problem(estimator=LogisticRegression, classes=3):
    if estimator is LinearRegression:
        return make_regression(120, 10, noise=5.0, random_state=0)
    X, y = make_classification(120, 10, n_informative=6, n_classes=classes, class_sep=2.0, random_state=0)
    return X, np.array(["ant", "bee", "wasp"])[y]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_cross_validation_and_searches_take_the_names_that_scikit_learn_has(estimator):
    X, y = problem(estimator)
    assert cross_val_score(make_pipeline(StandardScaler(), estimator()), X, y, cv=3).min() > 0.7
    for form in (X, scipy.sparse.csr_matrix(X)):
        search = GridSearchCV(estimator(), {"C": [1e-5, 1.0], "fit_intercept": [True, False]}, cv=3).fit(form, y)
        assert search.best_params_["C"] == 1.0
    found = cross_validate(estimator(), X, y, cv=3, params={"sample_weight": np.ones(120)}, return_estimator=True)
    assert [each.solver_ for each in found["estimator"]] == ["newton"] * 3


@pytest.mark.parametrize("estimator", CLASSIFIERS)
def test_classifiers_are_calibrated_combined_and_selected_by(estimator):
    X, y = problem(estimator)
    shares = CalibratedClassifierCV(estimator(), cv=3).fit(X, y).predict_proba(X)
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    assert OneVsRestClassifier(estimator()).fit(X, y).score(X, y) > 0.8
    assert BaggingClassifier(estimator(), 3, random_state=0).fit(X, y).score(X, y) > 0.8
    assert StackingClassifier([("a", estimator()), ("b", estimator(C=0.1))], estimator(), cv=3).fit(X, y).score(X, y) > 0.8
    assert SelectFromModel(estimator(penalty="l1", C=0.5)).fit(X, y).transform(X).shape[0] == 120
    assert RFE(estimator(), n_features_to_select=4, step=3).fit(X, y).support_.sum() == 4


def test_regressions_are_combined():
    X, y = problem(LinearRegression)
    assert VotingRegressor([("a", LinearRegression()), ("b", LinearRegression(loss="huber"))]).fit(X, y).score(X, y) > 0.9
    several = MultiOutputRegressor(LinearRegression()).fit(X, np.stack([y, -y], axis=1))
    assert several.predict(X).shape == (120, 2)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_weights_of_samples_are_routed(estimator):
    X, y = problem(estimator)
    counts = np.random.default_rng(0).integers(0, 3, len(y)).astype(float)
    with sklearn.config_context(enable_metadata_routing=True):
        model = estimator().set_fit_request(sample_weight=True).set_score_request(sample_weight=True)
        pipeline = Pipeline([("scale", StandardScaler().set_fit_request(sample_weight=False)), ("model", model)])
        pipeline.fit(X, y, sample_weight=counts)
        scores = cross_validate(model, X, y, cv=3, params={"sample_weight": counts})["test_score"]
    direct = estimator().fit(StandardScaler().fit_transform(X), y, counts)
    np.testing.assert_array_equal(pipeline["model"].coef_, direct.coef_)
    assert len(scores) == 3


def test_parameters_that_contradict_each_other_are_errors_with_the_remedy():
    X, y = problem()
    for parameters, what in (
        ({"C": 2.0, "l2": 0.1}, "l2 and C both set the penalty: leave one of them out"),
        ({"penalty": "l2", "l1_ratio": 0.5}, "penalty='l2' means l1_ratio=0, not 0.5: leave one of them out"),
        ({"n_jobs": 2, "threads": 2}, "mean the same: leave one of them out"),
        ({"penalty": None, "l1_ratio": 0.5}, "leave one of them out"),
        ({"C": 0.0}, "C must be above 0"),
        ({"solver": "newton", "penalty": "l1"}, "use solver='sgd'"),
        ({"n_jobs": 0}, "n_jobs must be a number of threads"),
    ):
        with pytest.raises(ValueError) as caught:
            LogisticRegression(**parameters).fit(X, y)
        assert what in str(caught.value)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), solver=st.sampled_from(["newton", "dual"]), classes=st.sampled_from([2, 3]))
def test_a_weight_of_k_is_as_good_as_k_repetitions(estimator, seed, solver, classes):
    rng = np.random.default_rng(seed)
    X = scipy.sparse.random_array((60, 20), density=0.4, rng=rng, data_sampler=rng.standard_normal).tocsr()
    scores = X @ rng.standard_normal((20, classes)) + rng.standard_normal((60, classes))
    y = scores[:, 0] if estimator is LinearRegression else scores.argmax(axis=1)
    counts = rng.integers(0, 4, 60)
    loss = {"loss": "squared_epsilon_insensitive"} if estimator is LinearRegression and solver == "dual" else {}
    make = lambda: estimator(solver=solver, tol=1e-7, max_iter=10_000, C=0.1, **loss)  # noqa: E731
    chosen = counts > 0
    if estimator is not LinearRegression and len(np.unique(y[chosen])) < classes:
        return
    weighted, repeated = make().fit(X, y, counts), make().fit(X[np.repeat(np.arange(60), counts)], np.repeat(y, counts))
    size = np.abs(repeated.coef_).max()
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, atol=(1e-6 if solver == "newton" else 2e-3) * size)
    np.testing.assert_allclose(weighted.intercept_, repeated.intercept_, atol=(1e-6 if solver == "newton" else 1e-2) * max(1.0, size))
