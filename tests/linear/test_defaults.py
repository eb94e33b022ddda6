"""What is chosen where users leave it open: penalties by their names, solvers, frames of values; and the optima of all solvers."""

import json
import warnings

import numpy as np
import pytest
import scipy.sparse
from click_runner import CliRunner
from sklearn.datasets import dump_svmlight_file, load_breast_cancer, load_diabetes, load_wine, make_classification
from sklearn.linear_model import LogisticRegression as Reference
from sklearn.linear_model import Ridge
from sklearn.svm import LinearSVC

import sparseallreduce as sar
from sparseallreduce.cli import main
from sparseallreduce.linear import Dataset, Hinge, Huber, LinearRegression, LinearSVM, Logistic, LogisticRegression, Multinomial
from sparseallreduce.linear.defaults import Factors, Penalty, chosen_solver
from sparseallreduce.linear.solvers import CoCoA
from sparseallreduce.linear.solvers.newton import Newton


def classes(count=2, samples=200, features=12, seed=0):
    return make_classification(samples, features, n_informative=8, n_classes=count, random_state=seed)


def wide(samples=150, features=900, count=2, seed=0):
    """Sparse samples of too many features for Newton's method."""
    rng = np.random.default_rng(seed)
    X = scipy.sparse.random_array((samples, features), density=0.03, rng=rng, format="csr")
    scores = X @ rng.standard_normal((features, count)) + 0.1 * rng.standard_normal((samples, count))
    return X, scores.argmax(axis=1)


@pytest.mark.parametrize("penalty", [{"C": 0.3}, {"C": 0.3, "penalty": "l2"}, {"C": 0.3, "penalty": "elasticnet"}, {"l2": 1 / 60}])
def test_the_penalty_means_what_scikit_learns_does(penalty):
    X, y = classes()
    theirs = Reference(C=0.3, tol=1e-10, max_iter=10_000).fit(X, y)
    ours = LogisticRegression(**penalty).fit(X, y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-4)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, atol=1e-4)
    assert ours.solver_ == "newton"


def test_no_penalty_is_an_infinite_c():
    X, y = classes()
    np.testing.assert_array_equal(LogisticRegression(penalty=None).fit(X, y).coef_, LogisticRegression(C=np.inf).fit(X, y).coef_)
    assert LogisticRegression(penalty="l1", C=0.1, max_iter=20, tol=None).fit(X, y).solver_ == "sgd"


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"l2": 0.1, "C": 2.0}, "l2 and C both set"),
        ({"l1": 0.1, "l1_ratio": 0.5}, "l1 and l1_ratio both set"),
        ({"l2": 0.1, "penalty": "l2"}, "l2 and penalty both set"),
        ({"penalty": "l2", "l1_ratio": 0.5}, "penalty='l2' means l1_ratio=0"),
        ({"penalty": None, "l1_ratio": 0.5}, "penalty=None takes no l1_ratio"),
        ({"C": 0.0}, "C must be above 0"),
        ({"l1_ratio": 2}, "l1_ratio must be between"),
        ({"penalty": "ridge"}, "penalty must be one of"),
        ({"n_jobs": 2, "threads": 2}, "n_jobs=2 and threads=2 mean the same"),
        ({"n_jobs": 0}, "n_jobs must be"),
        ({"scale_features": "yes"}, "scale_features must be"),
        ({"solver": "dual", "C": np.inf}, "needs an L2 penalty, but C is inf"),
    ],
)
def test_contradictions_and_what_is_out_of_range_are_refused(said, named):
    with pytest.raises(ValueError, match=named):
        LogisticRegression(**said).fit(*classes())


def test_a_penalty_shares_out_c():
    assert Penalty(C=2.0, l1_ratio=0.25).factors(50) == (0.0075, 0.0025)
    assert Penalty(C=2.0, penalty="l1").factors(50) == (0.0, 0.01)
    assert Penalty(C=None).factors(50) == (1e-4, 0.0)
    assert Penalty(l2=0.5).factors(None) == (0.5, 0.0)


def test_whole_weights_of_samples_are_repetitions_to_every_solver():
    counts = np.random.default_rng(1).integers(0, 4, 150)
    for X, y in (classes(samples=150), wide()):
        repeated = np.repeat(np.arange(150), counts)
        ours = LogisticRegression(tol=1e-8).fit(X, y, counts)
        again = LogisticRegression(tol=1e-8).fit(X[repeated], y[repeated])
        np.testing.assert_allclose(ours.coef_, again.coef_, atol=2e-3)
        balanced = LogisticRegression(class_weight="balanced", tol=1e-8).fit(X, y)
        theirs = Reference(class_weight="balanced", tol=1e-8, max_iter=10_000).fit(X, y)
        np.testing.assert_allclose(balanced.coef_, theirs.coef_, atol=2e-3)


@pytest.mark.parametrize("count", [2, 4])
def test_the_dual_finds_the_optimum_of_scikit_learn_without_a_penalty_of_the_intercept(count):
    X, y = wide(count=count)
    theirs = Reference(C=5.0, tol=1e-10, max_iter=10_000).fit(X, y)
    ours = LogisticRegression(C=5.0, tol=1e-8, max_iter=5000).fit(X, y)
    assert ours.solver_ == "dual"
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=2e-3)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-3)


def test_support_vector_machines_are_those_of_scikit_learn():
    X, y = classes(samples=300)
    X -= X.mean(axis=0)
    theirs = LinearSVC(loss="squared_hinge", dual=False, tol=1e-10, intercept_scaling=1000, max_iter=100_000).fit(X, y)
    ours = LinearSVM(tol=1e-8).fit(X, y)
    assert ours.solver_ == "newton"
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-3)
    hinge, dual = (LinearSVM(loss="hinge", solver=solver, tol=1e-4, max_iter=20_000).fit(X, y) for solver in ("auto", "dual"))
    assert hinge.solver_ == "newton" and hinge.n_iter_ < 50
    lowest = [each.history_[0][-1].loss for each in (hinge, dual)]
    assert lowest[0] <= lowest[1] * (1 + 1e-4)


@pytest.mark.parametrize("solver", ["auto", "dual"])
def test_units_of_columns_do_not_matter_and_weights_are_in_them(solver):
    X, y = load_wine(return_X_y=True)
    units = 10.0 ** np.linspace(-4, 4, X.shape[1])
    ours = LogisticRegression(solver=solver, tol=1e-6).fit(X * units, y)
    again = LogisticRegression(solver=solver, tol=1e-6).fit(X, y)
    assert ours.score(X * units, y) > 0.98
    np.testing.assert_allclose(ours.coef_ * units, again.coef_, atol=1e-2)
    standard = LogisticRegression(solver=solver, tol=1e-6).fit((X - X.mean(axis=0)) / X.std(axis=0), y)
    np.testing.assert_allclose(again.coef_ * X.std(axis=0), standard.coef_, atol=1e-2)


def test_comparable_columns_are_left_as_they_are():
    X, y = wide()
    left = LogisticRegression(tol=1e-7).fit(X, y)
    np.testing.assert_allclose(left.coef_, LogisticRegression(tol=1e-7, scale_features=False).fit(X, y).coef_, atol=1e-6)
    assert np.abs(left.coef_ - LogisticRegression(tol=1e-7, scale_features=True).fit(X, y).coef_).max() > 1e-2


def test_samples_are_not_copied_and_not_changed():
    X, y = load_breast_cancer(return_X_y=True)
    data = Dataset.from_scipy(X, np.where(y == 1, 1.0, -1.0))
    before = data.values.copy()
    found = CoCoA(data, Logistic(), l2=1 / len(y), comm=sar.SERIAL, free_intercept=True, scale_features=None)
    assert np.shares_memory(found._local._rows[2], data.values)
    found.fit()
    np.testing.assert_array_equal(data.values, before)


def test_numbers_are_predicted_by_newtons_method():
    X, y = load_diabetes(return_X_y=True)
    theirs = Ridge(alpha=1e-4 * len(y)).fit(X, y)
    np.testing.assert_allclose(LinearRegression().fit(X, y).coef_, theirs.coef_, rtol=1e-6)
    assert LinearRegression(loss="huber").fit(X, y).score(X, y) > 0.35  # whose epsilon is far below the spread of the labels
    assert LinearRegression(loss="poisson").fit(X, y).score(X, y) > 0.45
    found = Newton(Dataset.from_scipy(X, y), Huber(40.0), l2=1e-4, comm=sar.SERIAL, tolerance=1e-6)
    found.fit()
    assert found.converged and np.all(np.diff([each.primal for each in found.history]) <= 0)


def test_what_asks_for_steps_gets_them():
    X, y = classes()
    for asked in ({"momentum": 0.5}, {"batch_size": 10}, {"update": "ftrl"}, {"strategy": "dense"}, {"l1": 1e-3}, {"warm_start": True}):
        assert LogisticRegression(**asked, max_iter=3, tol=None).fit(X, y).solver_ == "sgd", asked
    assert LogisticRegression(early_stopping=True).fit(X, y).solver_ == "dual"
    model = LogisticRegression().fit(X, y)
    assert model.solver_ == "newton" and model.partial_fit(X, y).solver_ == "sgd"


@pytest.mark.parametrize("model", ["logistic", "svm", "linear"])
@pytest.mark.parametrize("make", [classes, wide])
def test_the_command_and_the_estimators_choose_alike(tmp_path, model, make):
    X, y = make()
    dump_svmlight_file(X, y, str(tmp_path / "train.svm"), zero_based=False)
    files = ["--json", str(tmp_path / "out.json"), "--model-out", str(tmp_path / "model.npz"), "--features", str(X.shape[1])]
    done = CliRunner().invoke(main, ["train", str(tmp_path / "train.svm"), "--model", model, *files])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out.json").read_text())
    estimator = {"logistic": LogisticRegression, "svm": LinearSVM, "linear": LinearRegression}[model]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = estimator().fit(X.astype(np.float32), y)
    solver = "newton" if make is classes or model == "linear" else "dual"
    assert report["results"]["solver"] == ours.solver_ == solver
    if solver != "sgd":
        assert f"solver {solver}, C 1" in done.output or model == "linear"
        read = estimator.from_file(tmp_path / "model.npz")
        np.testing.assert_allclose(read.coef_, ours.coef_, atol=0.05 * np.abs(ours.coef_).max())


def test_c_on_the_command_line_is_that_of_the_estimators_and_goes_with_no_factor(tmp_path):
    X, y = wide()
    dump_svmlight_file(X, y, str(tmp_path / "train.svm"), zero_based=False)
    report = str(tmp_path / "out.json")
    run = ["train", str(tmp_path / "train.svm"), "--json", report]
    assert CliRunner().invoke(main, [*run, "--C", "4"]).exit_code == 0
    assert json.loads((tmp_path / "out.json").read_text())["results"]["l2"] == pytest.approx(1 / 600)
    refused = CliRunner().invoke(main, [*run, "--C", "4", "--l2", "0.1"])
    assert refused.exit_code == 2 and "--C and --l2 both set" in refused.output


def test_the_dual_of_several_classes_never_falls():
    X, y = wide(count=5)
    found = CoCoA(Dataset.from_scipy(X, y), Multinomial(5), l2=1e-3, comm=sar.SERIAL, tolerance=1e-9, rounds=60)
    found.fit()
    dual = np.array([each.dual for each in found.history])
    assert np.all(np.diff(dual) >= -1e-12 * np.abs(dual[1:])) and found.history[-1].gap >= 0


@pytest.mark.parametrize("solver", ["newton", "dual"])
@pytest.mark.parametrize("unit", [1e200, 1e300])
def test_columns_whose_squares_overflow_are_divided_by_their_largest_magnitude(solver, unit):
    X, y = classes()
    huge = np.arange(X.shape[1]) % 3 == 0
    ours = LogisticRegression(solver=solver, tol=1e-6).fit(X * np.where(huge, unit, 1.0), y)
    taken = np.where(huge, X / np.abs(X).max(axis=0), (X - X.mean(axis=0)) / X.std(axis=0))
    theirs = Reference(tol=1e-10, max_iter=10_000).fit(taken, y)
    np.testing.assert_allclose(ours.decision_function(X * np.where(huge, unit, 1.0)), theirs.decision_function(taken), atol=2e-2)


def test_the_loss_of_a_support_vector_machine_is_the_squared_hinge_unless_steps_are_asked_for(tmp_path):
    X, y = classes()
    ours, squared = (LinearSVM(loss=loss).fit(X, y) for loss in ("auto", "squared_hinge"))
    np.testing.assert_array_equal(ours.coef_, squared.coef_)
    for asked in ({"update": "ftrl"}, {"solver": "sgd"}, {"solver": "cocoa"}):
        steps, hinge = (LinearSVM(loss=loss, max_iter=3, tol=None, **asked).fit(X, y) for loss in ("auto", "hinge"))
        np.testing.assert_array_equal(steps.coef_, hinge.coef_)
    ours.to_file(tmp_path / "model.npz")
    assert LinearSVM.from_file(tmp_path / "model.npz").loss == "squared_hinge"
    with pytest.raises(ValueError):
        ours.partial_fit(X, y[:3])
    assert ours._loss_model().loss_name == "squared_hinge"
    assert ours.partial_fit(X, y)._loss_model().loss_name == "hinge"


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("C", [0.1, 100.0])
def test_a_softmax_of_many_classes_is_solved_by_products(intercept, C):
    X, y = make_classification(900, 45, n_informative=20, n_classes=15, n_clusters_per_class=1, random_state=0)
    counts = np.random.default_rng(0).integers(0, 3, len(y))
    settings = {"C": C, "fit_intercept": intercept}
    theirs = Reference(tol=1e-10, max_iter=10_000, **settings).fit(X, y, counts)
    ours = LogisticRegression(tol=1e-9, scale_features=False, **settings).fit(X, y, counts)
    assert ours.solver_ == "newton" and ours.n_iter_ < 40
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-4)
    rough = LogisticRegression(scale_features=False, **settings).fit(X, y, counts)
    assert rough.n_iter_ < 12
    np.testing.assert_allclose(rough.predict_proba(X), theirs.predict_proba(X), atol=2e-2)


@pytest.mark.parametrize("alike", [0.0, 3.0])
def test_a_softmax_of_columns_that_say_nothing_leaves_the_shares_of_the_classes(alike):
    y = np.arange(300) % 30 // 2 * (np.arange(300) % 3 > 0)
    model = LogisticRegression().fit(np.full((300, 40), alike), y)
    np.testing.assert_allclose(model.predict_proba(np.full((1, 40), alike))[0], np.bincount(y) / 300, atol=1e-3)


def test_least_squares_of_many_features_is_ridge_regression():
    X, _ = wide(samples=300, features=1500)
    y = 50 + X @ np.random.default_rng(1).standard_normal(1500)
    for penalty in ({"C": 1.0}, {"l2": 1e-4}):
        ours = LinearRegression(tol=1e-9, **penalty).fit(X, y)
        theirs = Ridge(alpha=1.0 if "C" in penalty else 300 * 1e-4, tol=1e-12).fit(X, y)
        assert ours.solver_ == "newton"
        np.testing.assert_allclose(ours.predict(X), theirs.predict(X), atol=1e-2)


@pytest.mark.parametrize("estimator", [LogisticRegression, LinearSVM])
def test_dense_rows_of_more_features_are_solved_by_newtons_method(estimator):
    X, y = make_classification(600, 700, n_informative=20, random_state=0)
    ours, dual = (estimator(solver=solver, tol=1e-5, max_iter=20_000, C=1e-3).fit(X, y) for solver in ("auto", "dual"))
    assert (ours.solver_, dual.solver_) == ("newton", "dual")
    np.testing.assert_allclose(ours.decision_function(X), dual.decision_function(X), atol=3e-2)


def test_n_jobs_are_threads_and_change_no_bit(monkeypatch):
    monkeypatch.setattr("sparseallreduce.linear.estimators.parameters.usable_cores", lambda: 3)
    X, y = classes()
    one, *others = (LogisticRegression(solver="sgd", max_iter=2, tol=None, n_jobs=jobs).fit(X, y) for jobs in (None, 2, -1, -2, -9))
    assert [model._thread_count for model in others] == [2, 3, 2, 1]
    for model in others:
        np.testing.assert_array_equal(model.coef_, one.coef_)


@pytest.mark.parametrize(
    ("ranks", "tolerance", "chosen"),
    [(1, 1e-8, "dual"), (64, None, "dual"), (64, 1e-3, "dual"), (16, 1e-6, "dual"), (32, 1e-6, "newton"), (256, 1e-8, "newton")],
)
def test_a_tight_tolerance_on_many_ranks_is_newtons_whose_iterations_do_not_grow_with_the_ranks(ranks, tolerance, chosen):
    of_many = 10**6, 1e-4, Factors(1e-3, 0.0), False
    assert chosen_solver("auto", Logistic(), *of_many, False, ranks, tolerance) == chosen
    assert chosen_solver("auto", Hinge(), *of_many, False, ranks, tolerance) == "dual"  # has no second derivative
    assert chosen_solver("auto", Multinomial(3), *of_many, False, ranks, tolerance) == "dual"
    assert chosen_solver("auto", Logistic(), *of_many, True, ranks, tolerance) == "dual"  # held-out samples end it early
