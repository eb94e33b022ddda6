"""Estimators that train in rounds of dual coordinate ascent: optima of LIBLINEAR, what ends them, and what they refuse."""

import pickle
import warnings

import numpy as np
import pytest
import scipy.sparse
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression as ScikitLogisticRegression
from sklearn.multiclass import OneVsRestClassifier
from sklearn.svm import LinearSVC
from sklearn.utils.estimator_checks import check_class_weight_balanced_linear_classifier, parametrize_with_checks

from sparseallreduce.linear import LinearRegression, LinearSVM, LogisticRegression
from sparseallreduce.linear.models import Logistic
from sparseallreduce.linear.solvers import Figures

ESTIMATORS = [LogisticRegression, LinearSVM]
PRECISE = {"solver": "cocoa", "tol": 1e-7, "scale_features": False, "max_iter": 5000}


def problem(classes=2, samples=300):
    X, y = make_classification(samples, 12, n_informative=8, n_classes=classes, class_sep=1.0, random_state=1)
    return X / np.abs(X).max(axis=0), np.array(["ant", "bee", "cat", "dog"])[y]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks([estimator(solver="cocoa", l2=0.1, tol=None, max_iter=300) for estimator in ESTIMATORS])
def test_scikit_learns_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_balanced_class_weights_are_those_of_scikit_learn(estimator):
    check_class_weight_balanced_linear_classifier(estimator.__name__, estimator(solver="cocoa"))


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weights", [None, "balanced", {"bee": 3.0}])
def test_the_optimum_is_liblinears(classes, intercept, weights):
    X, y = problem(classes)
    ours = LogisticRegression(l2=1 / len(y), fit_intercept=intercept, **PRECISE).set_params(class_weight=weights).fit(X, y)
    counts = ours._class_counts(np.searchsorted(ours.classes_, y), np.ones(len(y)), ours._communicator(), False)
    counts = counts[np.searchsorted(ours.classes_, y)]
    # Counts have mean one in ours, and scikit-learn's C weighs their sum.
    theirs = ScikitLogisticRegression(C=len(y) / counts.sum(), fit_intercept=intercept, solver="liblinear", tol=1e-10, max_iter=10_000)
    if classes == 2:
        theirs.fit(X, y, counts)
        found = theirs.coef_, theirs.intercept_
    else:
        parts = [clone(theirs).fit(X, y == label, counts) for label in ours.classes_]
        found = np.concatenate([part.coef_ for part in parts]), np.array([float(np.sum(part.intercept_)) for part in parts])
    np.testing.assert_allclose(ours.coef_, found[0], atol=2e-3)
    np.testing.assert_allclose(ours.intercept_, np.broadcast_to(found[1], ours.intercept_.shape), atol=2e-3)
    assert ours.coef_.shape == ((1, 12) if classes == 2 else (classes, 12))


@pytest.mark.parametrize("loss", ["hinge", "squared_hinge"])
def test_the_support_vector_machine_is_liblinears(loss):
    X, y = problem()
    ours = LinearSVM(loss=loss, l2=1 / len(y), **PRECISE).fit(X, y)
    theirs = LinearSVC(loss=loss, C=1.0, tol=1e-9, max_iter=200_000, dual=True).fit(X, y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=2e-3)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, atol=2e-3)


def test_several_classes_are_each_taken_against_the_rest():
    X, y = problem(4)
    ours = LogisticRegression(l2=1e-2, **PRECISE).fit(X, y)
    theirs = OneVsRestClassifier(LogisticRegression(l2=1e-2, **PRECISE)).fit(X, y)
    np.testing.assert_allclose(ours.decision_function(X), theirs.decision_function(X), atol=2e-3)
    np.testing.assert_allclose(ours.predict_proba(X).sum(axis=1), 1.0)
    assert ours.predict_proba(X)[0] == pytest.approx(theirs.predict_proba(X)[0], abs=1e-3)  # which are no softmax


def test_weights_of_samples_count_like_repetitions():
    X, y = problem()
    counts = np.random.default_rng(0).integers(0, 3, len(y))
    weighted = LogisticRegression(l2=1e-2, **PRECISE).fit(X, y, counts)
    repeated = LogisticRegression(l2=1e-2, **PRECISE).fit(np.repeat(X, counts, axis=0), np.repeat(y, counts))
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, atol=1e-3)


def test_penalised_are_the_weights_of_scaled_features():
    X, y = problem()
    scale = 2.0 ** np.arange(12)
    plain = LogisticRegression(solver="cocoa", l2=1e-2, scale_features=True).fit(X, y)
    scaled = LogisticRegression(solver="cocoa", l2=1e-2, scale_features=True).fit(X * scale, y)
    np.testing.assert_array_equal(scaled.coef_ * scale, plain.coef_)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_array])
def test_the_gap_bounds_the_loss_and_is_told(dtype, form):
    X, y = problem()
    model = LogisticRegression(solver="cocoa", l2=1e-2, scale_features=False).fit(form(X.astype(dtype)), y)
    assert model.coef_.dtype == dtype and model.n_iter_ == len(model.history_[0])
    last = model.history_[0][-1]
    assert isinstance(last, Figures) and last.gap <= 1e-3 * last.loss
    signs = np.where(y == "bee", 1.0, -1.0)
    penalty = 0.005 * (np.sum(model.coef_**2) + model.intercept_[0] ** 2)
    assert np.mean(Logistic().loss(model.decision_function(X), signs)) + penalty == pytest.approx(last.loss, rel=1e-4)


def test_a_gap_that_is_not_reached_is_told_and_no_tol_makes_all_rounds():
    X, y = problem()
    with pytest.warns(ConvergenceWarning, match="the duality gap is above 1e-09 of the loss after max_iter = 2 rounds") as told:
        LinearSVM(solver="cocoa", tol=1e-9, max_iter=2).fit(X, y)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LinearSVM(solver="cocoa", tol=None, max_iter=7).fit(X, y).n_iter_ == 7
        assert LinearSVM(solver="cocoa").fit(X, y).n_iter_ < 1000


def test_early_stopping_gives_the_best_weights_on_samples_held_out():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((120, 100))
    y = X[:, 0] + 2 * rng.standard_normal(120) > 0
    settings = {"solver": "cocoa", "early_stopping": True, "validation_fraction": 0.25, "l2": 1e-4, "tol": 1e-6, "random_state": 3}
    model = LogisticRegression(**settings, n_iter_no_change=3).fit(X, y)
    losses = [figures.validation_loss for figures in model.history_[0]]
    best = int(np.argmin(losses))
    assert best + 1 < len(losses) < 1000
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        short = LogisticRegression(**settings, max_iter=best + 1).fit(X, y)
    np.testing.assert_array_equal(model.coef_, short.coef_)


@pytest.mark.parametrize(
    "parameters",
    [
        {"l1": 1e-3},
        {"update": "sgd"},
        {"learning_rate": 0.1},
        {"schedule": "constant"},
        {"schedule": lambda rate: rate},
        {"momentum": 0.9},
        {"average": True},
        {"batch_size": 10},
        {"strategy": "dense"},
        {"algorithm": "ssar_ring"},
        {"threads": 2},
        {"warm_start": True},
        {"density": 0.1, "strategy": "oktopk"},
        {"l2": 0},
        {"tol": 0.0},
    ],
    ids=lambda parameters: next(iter(parameters)),
)
def test_what_means_nothing_to_rounds_is_refused(parameters):
    X, y = problem()
    with pytest.raises(ValueError, match="cocoa") as raised:
        LogisticRegression(solver="cocoa", **parameters).fit(X, y)
    assert next(iter(parameters)) in str(raised.value) or "strategy" in str(raised.value)


def test_defaults_may_be_said_and_other_solvers_are_refused():
    X, y = problem()
    said = {"l1": 0, "update": "auto", "average": 0, "strategy": None, "density": None, "threads": 1, "warm_start": False}
    LogisticRegression(solver="cocoa", **said).fit(X, y)
    with pytest.raises(ValueError, match="solver must be one of auto, dual, cocoa, newton, sgd, not 'lbfgs'"):
        LinearSVM(solver="lbfgs").fit(X, y)
    with pytest.raises(ValueError, match="solver must be one of"):
        LinearRegression(solver="lbfgs").fit(X, np.arange(len(y), dtype=float))


def test_there_is_no_partial_fit():
    X, y = problem()
    model = LogisticRegression(solver="cocoa")
    assert not hasattr(model, "partial_fit")
    with pytest.raises(AttributeError) as raised:
        model.partial_fit(X, y, classes=["ant", "bee"])
    assert "solver='cocoa' needs all samples" in str(raised.value.__cause__ or raised.value)
    assert hasattr(model.set_params(solver="sgd"), "partial_fit")


def test_steps_go_on_from_rounds_and_rounds_begin_anew():
    X, y = problem()
    model = LogisticRegression(solver="cocoa", l2=1e-2).fit(X, y)
    first, loss = model.coef_.copy(), model.history_[0][-1].loss
    model.set_params(solver="sgd").partial_fit(X, y)
    assert 0 < np.linalg.norm(model.coef_ - first) < np.linalg.norm(first) and model.t_ == 2
    assert model.history_[0][0].loss < loss + 0.05
    np.testing.assert_array_equal(model.set_params(solver="cocoa").fit(X, y).coef_, first)


@pytest.mark.parametrize("classes", [2, 3])
def test_files_and_pickles_predict_the_same(classes, tmp_path):
    X, y = problem(classes)
    model = LogisticRegression(solver="cocoa").fit(X, y)
    model.to_file(tmp_path / "model.npz")
    for other in (pickle.loads(pickle.dumps(model)), LogisticRegression.from_file(tmp_path / "model.npz")):
        np.testing.assert_array_equal(other.predict_proba(X), model.predict_proba(X))
    assert clone(model).solver == "cocoa"
    earlier = pickle.loads(pickle.dumps(model))
    del earlier.solver  # which there was not yet
    assert pickle.loads(pickle.dumps(earlier)).solver == "auto"


def test_lines_are_printed_on_demand(capsys):
    X, y = problem()
    model = LinearSVM(solver="cocoa", verbose=1).fit(X, y)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("solver cocoa")
    assert len(lines) == 1 + model.n_iter_ and lines[-1].startswith(f"round {model.n_iter_}: loss ") and "gap" in lines[-1]


def test_the_same_call_gives_the_same_bits_and_another_seed_others():
    X, y = problem()
    first, second, third = (LinearSVM(solver="cocoa", random_state=seed).fit(X, y).coef_ for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, second)
    assert (first != third).any()
