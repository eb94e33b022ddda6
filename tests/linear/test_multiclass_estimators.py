"""Estimators of several classes, which are trained in one pass: the optima that scikit-learn finds, and what goes on from them."""

import pickle

import numpy as np
import pytest
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression as ScikitLogisticRegression
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import MaxAbsScaler

from sparseallreduce.linear import LinearSVM, LogisticRegression, load_model

NAMES = np.array(["ant", "bee", "cat", "dog"])
PRECISE = {"tol": 1e-9, "max_iter": 5000, "scale_features": False, "batch_size": 1000}  # all samples a step: no noise


def problem(classes=4, samples=300):
    X, y = make_classification(samples, 12, n_informative=8, n_classes=classes, class_sep=1.5, random_state=1)
    return MaxAbsScaler().fit_transform(X), NAMES[y]


@pytest.mark.parametrize("weights", [None, "balanced", {"bee": 3.0}])
@pytest.mark.parametrize("intercept", [True, False])
def test_the_multinomial_optimum_is_scikit_learns(weights, intercept):
    X, y = problem()
    counts = np.random.default_rng(0).integers(0, 4, len(y)).astype(float)
    both = {"fit_intercept": intercept, "class_weight": weights}
    ours = LogisticRegression(l2=1e-2, **both, **PRECISE).fit(X, y, counts)
    total = counts if weights is None else counts * class_counts(weights, y, counts)
    theirs = ScikitLogisticRegression(C=1 / (1e-2 * total.sum()), tol=1e-9, max_iter=5000, **both).fit(X, y, counts)
    assert ours.coef_.shape == (4, 12) and ours.intercept_.shape == (4,) and len(ours.history_) == 1
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-4)
    # A number may be added to all intercepts.
    np.testing.assert_allclose(ours.intercept_ - ours.intercept_.mean(), theirs.intercept_ - theirs.intercept_.mean(), atol=1e-4)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-4)


def class_counts(weights, y, counts):
    """What a sample of each class counts, as scikit-learn has it."""
    if weights == "balanced":
        share = {name: counts[y == name].sum() / counts.sum() for name in NAMES}
        return np.array([1 / (4 * share[name]) for name in y])
    return np.array([weights.get(name, 1.0) for name in y])


def test_each_class_against_the_rest_is_scikit_learns_wrapper():
    X, y = problem()
    ours = LogisticRegression(l2=1e-2, multi_class="ovr", **PRECISE).fit(X, y)
    theirs = OneVsRestClassifier(ScikitLogisticRegression(C=1 / (1e-2 * len(y)), tol=1e-9)).fit(X, y)
    np.testing.assert_allclose(ours.coef_, np.concatenate([each.coef_ for each in theirs.estimators_]), atol=1e-4)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-4)


@pytest.mark.parametrize("estimator, more", [(LogisticRegression, {"multi_class": "ovr"}), (LinearSVM, {})])
def test_all_at_once_are_the_scores_of_one_after_the_other(estimator, more):
    X, y = problem()
    settings = {"learning_rate": 0.2, "max_iter": 12, "tol": None, "batch_size": 20, "l1": 1e-4, "l2": 1e-3, "schedule": "constant", **more}
    together = estimator(**settings).fit(X, y)
    for number, name in enumerate(NAMES):
        alone = estimator(**settings).fit(X, y == name)
        np.testing.assert_allclose(together.coef_[number], alone.coef_[0], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(together.intercept_[number], alone.intercept_[0], rtol=1e-9, atol=1e-12)


def test_two_classes_by_multinomial_are_one_score():
    X, y = problem(2)
    model = LogisticRegression(multi_class="multinomial", l2=1e-2, **PRECISE).fit(X, y)
    half = LogisticRegression(l2=5e-3, **PRECISE).fit(X, y)  # half the difference, squared, twice
    assert model.coef_.shape == (1, 12) and model.predict_proba(X).shape == (300, 2) and model.decision_function(X).shape == (300,)
    np.testing.assert_allclose(model.coef_, half.coef_, atol=1e-4)


PARAMETERS = [
    {"momentum": 0.9},
    {"average": 25, "momentum": 0.5, "l1": 0.01},
    {"batch_size": 30, "threads": 2, "scale_features": False},
]
LOSSY = {"strategy": "gtopk", "density": 0.3, "average": True}  # not of two scores, whose difference alone is kept


@pytest.mark.parametrize(
    "classes, kind, parameters",
    [
        *((4, kind, parameters) for kind in ("auto", "ovr") for parameters in (*PARAMETERS, LOSSY)),
        *((2, "multinomial", parameters) for parameters in PARAMETERS),
    ],
    ids=str,
)
def test_calls_of_partial_fit_go_on_where_the_last_ended(classes, kind, parameters):
    X, y = problem(classes)
    given = {"l2": 0.05, "learning_rate": 0.05, "schedule": "constant", "batch_size": 200, "multi_class": kind, "tol": None} | parameters
    parted = LogisticRegression(**given)
    for _ in range(20):
        parted.partial_fit(X, y, classes=NAMES[:classes])
    whole = LogisticRegression(max_iter=20, **given).fit(X, y)
    np.testing.assert_allclose(parted.coef_, whole.coef_, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(parted.intercept_, whole.intercept_, rtol=1e-6, atol=1e-9)


def test_features_that_turn_out_larger_change_nothing_that_was_learned():
    X, y = problem()
    model = LogisticRegression(batch_size=50).partial_fit(X, y, classes=NAMES)
    before = model.coef_.copy()
    far = np.zeros((1, 12))
    far[0, 3] = 1000.0
    model.set_params(learning_rate=1e-9).partial_fit(far, y[:1])
    np.testing.assert_allclose(model.coef_, before, rtol=0.2, atol=1e-6)


@pytest.mark.parametrize("estimator, kind", [(LogisticRegression, "auto"), (LogisticRegression, "ovr"), (LinearSVM, None)])
def test_files_and_pickles_predict_the_same_and_go_on(estimator, kind, tmp_path):
    X, y = problem()
    model = estimator(**({} if kind is None else {"multi_class": kind}), max_iter=5, tol=None).fit(X, y)
    model.to_file(tmp_path / "model.npz")
    assert load_model(tmp_path / "model.npz").model == {"auto": "multinomial", "ovr": "logistic", None: "svm"}[kind]
    for twin in (estimator.from_file(tmp_path / "model.npz"), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(twin.predict(X), model.predict(X))
        if kind is not None:  # also where the twin has another choice
            np.testing.assert_array_equal(twin.predict_proba(X), model.predict_proba(X))
        twin.partial_fit(X, y)
        assert twin.coef_.shape == (4, 12)


def test_a_model_pickled_before_there_was_a_choice_has_each_class_against_the_rest():
    X, y = problem()
    model = LogisticRegression(multi_class="ovr", max_iter=5, tol=None).fit(X, y)
    old = pickle.loads(pickle.dumps(model))
    del old.multi_class, old._of_softmax
    np.testing.assert_array_equal(old.predict_proba(X), model.predict_proba(X))
    assert old.get_params()["multi_class"] == "ovr"
    old.partial_fit(X, y)
    assert old._fitted().model == "logistic"


def test_a_class_without_a_sample_has_a_score_all_the_same():
    X, y = problem(3)
    model = LogisticRegression().partial_fit(X, y, classes=NAMES)
    assert model.coef_.shape == (4, 12) and not (model.predict(X) == "dog").any()


def test_a_choice_that_is_not_known_is_refused():
    X, y = problem()
    with pytest.raises(ValueError, match="multi_class must be one of auto, ovr, multinomial, not 'all'"):
        LogisticRegression(multi_class="all").fit(X, y)
