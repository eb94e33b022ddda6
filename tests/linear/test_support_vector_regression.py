"""Regression by losses of errors: those that are insensitive up to epsilon, by every solver, and Huber's in any unit of the labels."""

import warnings

import numpy as np
import pytest
import scipy.sparse
from click_runner import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import dump_svmlight_file
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import HuberRegressor
from sklearn.svm import LinearSVR

import sparseallreduce as sar
from sparseallreduce.cli import main
from sparseallreduce.linear import Dataset, EpsilonInsensitive, LinearRegression, SquaredEpsilonInsensitive, load_model
from sparseallreduce.linear.data.labels import huber_epsilon
from sparseallreduce.linear.solvers import CoCoA

LOSSES = ["epsilon_insensitive", "squared_epsilon_insensitive"]


def problem(rows=200, features=30, seed=0, density=0.3):
    rng = np.random.default_rng(seed)
    X = scipy.sparse.random_array((rows, features), density=density, rng=rng, data_sampler=rng.standard_normal).tocsr()
    return X, X @ rng.standard_normal(features) + 0.3 * rng.standard_normal(rows) + 2.0


def objective(weights, intercept, X, y, C, epsilon, loss):
    excess = np.maximum(np.abs(X @ weights + intercept - y) - epsilon, 0)
    return weights @ weights / 2 + C * (excess**2 if loss == LOSSES[1] else excess).sum()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("features", [30, 700])
@pytest.mark.parametrize("C", [0.01, 1.0])
def test_weights_are_those_of_scikit_learns_support_vector_regression(loss, features, C):
    X, y = problem(features=features, density=9 / features)
    epsilon = 0.2
    ours = LinearRegression(loss=loss, C=C, epsilon=epsilon, tol=1e-6, fit_intercept=False).fit(X, y)
    theirs = LinearSVR(loss=loss, C=C, epsilon=epsilon, tol=1e-10, max_iter=100_000, fit_intercept=False).fit(X, y)
    assert ours.solver_ == ("newton" if features < 100 else "dual")
    given = X, y, C, epsilon, loss
    assert objective(ours.coef_, 0.0, *given) <= objective(theirs.coef_, 0.0, *given) * (1 + 2e-6)
    np.testing.assert_allclose(ours.predict(X), theirs.predict(X), atol=0.02)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_intercept_is_not_penalised_wherever_labels_lie(loss):
    X, y = problem()
    settings = {"loss": loss, "epsilon": 0.1, "C": 0.05, "tol": 1e-5, "solver": "dual"}
    near, far = LinearRegression(**settings).fit(X, y), LinearRegression(**settings).fit(X, y + 1e4)
    assert far.solver_ == "dual" and far.n_iter_ < 400
    np.testing.assert_allclose(far.coef_, near.coef_, atol=2e-2)
    assert far.intercept_ == pytest.approx(near.intercept_ + 1e4, abs=0.05)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.1, 2.0]), st.booleans(), st.sampled_from([1e-3, 1e-2, 1.0]))
def test_the_dual_objective_never_rises_and_the_gap_is_that_of_the_weights(seed, epsilon, squared, l2):
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 30))
    X, y = problem(rows, 8, seed)
    y = np.round(y * rng.choice([0, 1, 100]), 1)
    kind = SquaredEpsilonInsensitive if squared else EpsilonInsensitive
    given = {"l2": l2, "comm": sar.SERIAL, "intercept": False, "tolerance": 1e-4, "enough": 1e-9, "rounds": 200}
    solver = CoCoA(Dataset.from_scipy(X, y), kind(epsilon), **given)
    weights = solver.fit()
    objective = l2 / 2 * weights @ weights + kind(epsilon).loss(X @ weights, y).mean()
    last = solver.history[-1]
    assert last.dual <= objective * (1 + 1e-6) + 1e-9
    assert all(after.dual >= before.dual - 1e-9 * (1 + abs(before.dual)) for before, after in zip(solver.history, solver.history[1:]))
    assert solver.converged or len(solver.history) == 200
    if solver.converged:
        assert last.gap <= max(1e-4 * objective, 1e-9) * 1.01


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("update", ["sgd", "ftrl"])
def test_steps_come_near_the_optimum(loss, update):
    X, y = problem()
    given = {"loss": loss, "epsilon": 0.1, "l2": 1e-3, "scale_features": False}
    exact, steps = LinearRegression(**given, tol=1e-5).fit(X, y), LinearRegression(**given, update=update, max_iter=200, tol=None).fit(X, y)
    assert exact.solver_ in ("dual", "newton") and steps.solver_ == "sgd"
    assert steps.score(X, y) == pytest.approx(exact.score(X, y), abs=0.02)


@pytest.mark.parametrize("loss", ["huber", *LOSSES])
def test_the_command_trains_what_the_estimator_does(tmp_path, loss):
    X, y = problem()
    dump_svmlight_file(X, y * 100, str(tmp_path / "train.svm"), zero_based=False)
    command = ["train", str(tmp_path / "train.svm"), "--model", "linear", "--loss", loss, "--model-out", str(tmp_path / "model.npz")]
    done = CliRunner().invoke(main, [*command, *([] if loss == "huber" else ["--epsilon", "10"])], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = load_model(tmp_path / "model.npz")
    ours = LinearRegression(loss=loss, epsilon="auto" if loss == "huber" else 10.0).fit(X, y * 100)
    assert found.parameter == pytest.approx(ours.epsilon_ if loss == "huber" else 10.0)
    np.testing.assert_allclose(found.predict(X), ours.predict(X), atol=0.1 * y.std() * 100)


@pytest.mark.parametrize("loss", LOSSES)
def test_files_keep_the_loss_and_its_epsilon(tmp_path, loss):
    X, y = problem()
    LinearRegression(loss=loss, epsilon=0.3).fit(X, y).to_file(tmp_path / "model.npz")
    again = LinearRegression.from_file(tmp_path / "model.npz")
    assert (again.loss, again.epsilon) == (loss, 0.3) and load_model(tmp_path / "model.npz").parameter == 0.3
    assert LinearRegression(loss=loss).fit(X, y).epsilon_ == 0.0


def test_what_does_not_go_together_is_refused_with_the_remedy():
    X, y = problem()
    with pytest.raises(ValueError, match="epsilon must be at least 0 and finite, not -1"):
        LinearRegression(loss=LOSSES[0], epsilon=-1).fit(X, y)
    with pytest.raises(ValueError, match="solver must be one of auto, dual"):
        LinearRegression(solver="liblinear").fit(X, y)
    with pytest.raises(ValueError, match=r"learning_rate=0\.1 is for solver='sgd'"):
        LinearRegression(loss=LOSSES[0], solver="dual", learning_rate=0.1).fit(X, y)
    with pytest.raises(ValueError, match="ascent knows the losses"):
        LinearRegression(loss="poisson", solver="dual").fit(X, np.abs(y))
    assert not hasattr(LinearRegression(solver="dual"), "partial_fit")


@pytest.mark.parametrize("loss", ["huber", *LOSSES])
@pytest.mark.parametrize("parameters", [{}, {"update": "sgd"}, {"update": "ftrl"}], ids=str)
def test_labels_in_other_units_lead_to_the_same_model(loss, parameters):
    X, y = problem()
    scales, scores = (1e-3, 1.0, 1e3), []
    for scale in scales:
        epsilon = "auto" if loss == "huber" else 0.1 * scale
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = LinearRegression(loss=loss, epsilon=epsilon, l2=0.0 if parameters else 1e-4, **parameters).fit(X, y * scale)
        scores.append(model.score(X, y * scale))
    assert min(scores) > (0.9 if loss != LOSSES[0] or not parameters else 0.8)
    if loss != LOSSES[0]:  # whose penalty has other units than its loss
        assert max(scores) - min(scores) < 0.01


def test_hubers_loss_draws_no_more_to_outliers_than_scikit_learns():
    X, y = problem(400)
    wrong = y.copy()
    wrong[::20] += 500.0
    ours, theirs = LinearRegression(loss="huber").fit(X, wrong), HuberRegressor(max_iter=1000).fit(X.toarray(), wrong)
    assert ours.score(X, y) > theirs.score(X.toarray(), y) - 0.05
    assert ours.score(X, y) > 0.9 > LinearRegression().fit(X, wrong).score(X, y)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30), st.integers(0, 2**32 - 1))
def test_the_spread_of_labels_counts_a_weight_as_so_many_labels(labels, seed):
    labels, counts = np.array(labels), np.random.default_rng(seed).integers(1, 4, len(labels))
    ours, repeated = huber_epsilon(labels, counts.astype(float), sar.SERIAL), huber_epsilon(np.repeat(labels, counts), None, sar.SERIAL)
    assert ours == pytest.approx(repeated, rel=1e-9)
    assert huber_epsilon(labels * 4, counts.astype(float), sar.SERIAL) == pytest.approx(4 * ours) or np.ptp(labels) == 0
