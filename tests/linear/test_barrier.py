"""Losses with a kink on few features: the optimum is that of libsvm, in few iterations."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning
from sklearn.svm import SVC, SVR

import sparseallreduce as sar
from sparseallreduce.linear import Dataset, Hinge, LinearRegression, LinearSVM
from sparseallreduce.linear.models import EpsilonInsensitive
from sparseallreduce.linear.solvers.barrier import Barrier
from sparseallreduce.linear.solvers.newton import Newton


def objective(model, X, y, found, C, counts=1.0):
    return found[:-1] @ found[:-1] / 2 + C * np.sum(counts * model.loss(X @ found[:-1] + found[-1], y))


@given(
    st.sampled_from([None, 0.0, 0.5]),
    st.integers(2, 40),
    st.integers(1, 12),
    st.sampled_from([1e-2, 1.0, 100.0]),
    st.integers(0, 1000),
)
@settings(deadline=None, max_examples=25)
def test_the_optimum_is_that_of_libsvm(epsilon, rows, features, C, seed):
    rng = np.random.default_rng(seed)
    X, counts = rng.normal(size=(rows, features)).astype(np.float32).astype(np.float64), rng.integers(1, 4, rows).astype(float)
    y = X @ rng.normal(size=features) + rng.normal(size=rows)
    model, theirs = EpsilonInsensitive(epsilon or 0.0), SVR(kernel="linear", C=C, epsilon=epsilon or 0.0, tol=1e-6)
    if epsilon is None:
        y = np.sign(y)
        y[:2] = -1.0, 1.0
        model, theirs = Hinge(), SVC(kernel="linear", C=C, tol=1e-6)
    theirs.fit(X, y, sample_weight=counts)
    data = replace(Dataset.from_scipy(X, y), weights=counts)
    solver = Newton(data, model, l2=1 / (rows * C), comm=sar.SERIAL, tolerance=1e-7, rounds=300, scale_features=False)
    ours = objective(model, X, y, solver.fit(), C, counts)
    assert solver.converged
    assert ours <= objective(model, X, y, np.append(theirs.coef_, theirs.intercept_), C, counts) * (1 + 1e-6) + 1e-9
    last = solver.history[-1]
    assert 0 <= last.gap <= 1e-7 * last.primal or last.gap < 1e-12


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_numbers_in_other_units_take_no_more_iterations(scale):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 4))
    y = scale * (X @ [1.0, 2.0, -1.0, 0.0] + rng.standard_t(2, 300))
    model = LinearRegression(loss="epsilon_insensitive", C=1e6).fit(X, y)
    assert model.solver_ == "newton" and model.n_iter_ < 40
    np.testing.assert_allclose(model.coef_ / scale, [1.0, 2.0, -1.0, 0.0], atol=0.3)


@pytest.mark.parametrize("epsilon", [0.0, 2.0])
def test_labels_that_need_no_weights_get_none(epsilon):
    data = Dataset.from_scipy(np.eye(3), np.zeros(3))
    solver = Newton(data, EpsilonInsensitive(epsilon), l2=0.1, comm=sar.SERIAL)
    assert np.abs(solver.fit()).max() < 2.0
    assert solver.converged


@given(st.sampled_from([Hinge(), EpsilonInsensitive(0.0), EpsilonInsensitive(0.3)]), st.floats(-1e6, 1e6), st.floats(1e-9, 1e3))
def test_slopes_of_the_barrier_are_those_of_its_value_and_rise(model, score, loss):
    barrier, labels, shares = Barrier(model, loss, 1.0), np.ones(1), np.ones(1)
    step = 1e-3 * loss
    at = np.array([score])
    slope, curvature = (each if isinstance(each, np.ndarray) else each(0, 0) for each in barrier.derivatives(at, labels))
    before, after = (barrier.derivatives(at + way * step, labels)[0] for way in (-1, 1))
    assert -1 - 1e-9 <= before[0] <= slope[0] + 1e-9 and slope[0] <= after[0] + 1e-9 and after[0] <= 1 + 1e-9
    assert np.isfinite(barrier.total(at, labels, shares)) and np.isfinite(curvature).all() and (curvature >= 0).all()


def test_a_support_vector_machine_on_few_columns_ends_where_dual_ascent_does_not():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 3))
    y = np.where(X @ rng.normal(size=3) + 3 * rng.normal(size=200) > 0, 1, 0)
    model = LinearSVM(loss="hinge", C=100.0).fit(X, y)
    with pytest.warns(ConvergenceWarning, match="the duality gap is above"):
        dual = LinearSVM(loss="hinge", C=100.0, solver="dual", max_iter=300).fit(X, y)
    assert model.n_iter_ < 30
    assert model.history_[0][-1].loss < 0.95 * dual.history_[0][-1].loss


def dense_and_noisy(columns=150, rows=120):
    """Dense columns with which dual ascent of the hinge takes far more rounds than a test has time for."""
    rng = np.random.default_rng(4)
    X = rng.normal(size=(rows, columns))
    return X, np.where(X[:, 0] + 2 * rng.normal(size=rows) > 0, 1, -1)


def test_a_warning_says_that_newton_may_end_what_dual_ascent_does_not():
    X, y = dense_and_noisy()
    options = {"loss": "hinge", "C": 100.0, "comm": sar.SERIAL}
    with pytest.warns(ConvergenceWarning, match=r"raise max_iter or tol, or use solver='newton'"):
        slow = LinearSVM(max_iter=3, tol=1e-9, **options).fit(X, y)
    assert slow.solver_ == "dual"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = LinearSVM(solver="newton", tol=1e-4, **options).fit(X, y)
    theirs = SVC(kernel="linear", C=100.0, tol=1e-6).fit(X, y)
    ours, least = (objective(Hinge(), X, y, np.append(model.coef_, model.intercept_), 100.0) for model in (found, theirs))
    assert ours <= 1.001 * least


def test_a_warning_names_the_squared_loss_where_newton_has_too_many_weights():
    X, y = dense_and_noisy(1300, 40)
    with pytest.warns(ConvergenceWarning, match=r"or use loss='squared_hinge'"):
        LinearSVM(loss="hinge", max_iter=1, tol=1e-12, comm=sar.SERIAL).fit(X, y)
