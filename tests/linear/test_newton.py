"""Newton's method on one rank: the optimum, gaps that bound it, objectives that never rise, and arguments that are refused."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from thoroughness import examples

import sparseallreduce as sar
from sparseallreduce.errors import AlgorithmError, DatasetError, DivergenceError
from sparseallreduce.linear import Dataset, Hinge, LinearSVM, Logistic, LogisticRegression, Squared, SquaredHinge
from sparseallreduce.linear.solvers import TruncatedNewton

LOSSES = {"logistic": Logistic, "squared_hinge": SquaredHinge, "squared": Squared}


def samples(rows=80, features=30, seed=0, name="logistic", density=0.2, scale=1.0):
    rng = np.random.default_rng(seed)
    X = scipy.sparse.random_array((rows, features), density=density, rng=rng, format="csr", dtype=np.float32)
    X.data *= np.float32(scale)
    y = X @ rng.standard_normal(features) + 0.3 * rng.standard_normal(rows)
    return X, y if name == "squared" else np.where(y > 0, 1.0, -1.0)


def objective(model, X, y, weights, l2, intercept=True, counts=1.0):
    scores = X @ weights[: X.shape[1]] + (weights[-1] if intercept else 0.0)
    return l2 / 2 * weights @ weights + np.mean(counts * model.loss(scores, y))


def optimum(model, X, y, l2, intercept=True, counts=1.0):
    start = np.zeros(X.shape[1] + intercept)
    options = {"maxiter": 10_000, "ftol": 1e-15, "gtol": 1e-10}
    return minimize(lambda w: objective(model, X, y, w, l2, intercept, counts), start, method="L-BFGS-B", options=options).fun


def solver(X, y, model, l2=0.01, **options):
    return TruncatedNewton(Dataset.from_scipy(X, y), model, l2=l2, comm=sar.SERIAL, **options)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_the_optimum_is_the_least_objective(name, intercept):
    X, y = samples(name=name)
    model = LOSSES[name]()
    found = solver(X, y, model, tolerance=1e-10, intercept=intercept)
    weights = found.fit()
    assert found.converged
    assert objective(model, X, y, weights, 0.01, intercept) <= optimum(model, X, y, 0.01, intercept) * (1 + 1e-8)
    np.testing.assert_allclose(found.scores(), X @ weights[:30] + (weights[-1] if intercept else 0.0), atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_a_weighted_sample_counts_as_often_as_it_says(name):
    X, y = samples(name=name)
    counts = np.arange(80) % 4.0
    data = Dataset.from_scipy(X, y)
    repeated = np.repeat(np.arange(80), counts.astype(int))
    weighted = TruncatedNewton(replace(data, weights=counts), LOSSES[name](), l2=0.01, comm=sar.SERIAL, tolerance=1e-12).fit()
    again = solver(X[repeated], y[repeated], LOSSES[name](), l2=0.01 * 80 / len(repeated), tolerance=1e-12).fit()
    np.testing.assert_allclose(weighted, again, atol=1e-6)


@given(
    name=st.sampled_from(list(LOSSES)),
    rows=st.integers(1, 12),
    features=st.integers(1, 12),
    seed=st.integers(0, 1000),
    l2=st.sampled_from([1e-6, 1e-3, 1.0, 1e3]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
)
@settings(deadline=None, max_examples=examples(60))
def test_the_objective_never_rises_and_the_gap_bounds_it(name, rows, features, seed, l2, scale):
    assume(scale**2 / l2 < 1e11)  # above, rounding errors of the gradient may keep the gap open
    X, y = samples(rows, features, seed, name, density=0.4, scale=scale)
    found = solver(X, y, LOSSES[name](), l2=l2, tolerance=1e-9, rounds=200)
    weights = found.fit()
    values = [each.primal for each in found.history]
    assert found.converged
    assert all(after <= before for before, after in pairwise(values))
    assert values[-1] == pytest.approx(objective(LOSSES[name](), X, y, weights, l2), rel=1e-9)
    best = optimum(LOSSES[name](), X, y, l2)
    assert all(each.dual <= best * (1 + 1e-6) + 1e-12 for each in found.history)


def test_conjugate_gradients_whose_residual_all_but_vanishes_go_on_from_what_is_left():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 1500))
    y = np.where(X @ rng.normal(size=1500) + 20 * rng.normal(size=200) > 0, 1.0, -1.0)
    found = solver(X, y, SquaredHinge(), l2=1 / 200, tolerance=1e-6, rounds=20)
    found.fit()
    values = [each.primal for each in found.history]
    assert all(after < before for before, after in pairwise(values))
    assert len(values) == 20


def test_a_set_without_features_or_with_empty_rows_has_an_optimum():
    X = scipy.sparse.csr_array((4, 0), dtype=np.float32)
    weights = solver(X, np.array([1.0, 1.0, 1.0, -1.0]), Logistic(), l2=1e-6, tolerance=1e-9).fit()
    assert weights == pytest.approx([np.log(3)], rel=1e-3)
    nothing = solver(scipy.sparse.csr_array((4, 3), dtype=np.float32), np.ones(4), SquaredHinge(), intercept=False).fit()
    assert nothing.tolist() == [0.0, 0.0, 0.0]


def test_a_second_call_goes_on_where_the_first_ended():
    X, y = samples()
    whole, parts = (solver(X, y, Logistic(), tolerance=1e-12, rounds=rounds) for rounds in (50, 1))
    whole.fit()
    while not parts.converged:
        parts.fit()
    assert [each.primal for each in parts.history] == [each.primal for each in whole.history]


def test_losses_without_a_second_derivative_are_refused():
    X, y = samples()
    with pytest.raises(AlgorithmError, match="Newton's method knows the losses Logistic, SquaredHinge, Squared, not that of Hinge"):
        solver(X, y, Hinge())


@pytest.mark.parametrize("options", [{"l2": 0.0}, {"l2": np.inf}, {"tolerance": 0.0}, {"rounds": 0}])
def test_arguments_out_of_range_are_refused(options):
    X, y = samples()
    with pytest.raises(AlgorithmError):
        solver(X, y, Logistic(), **options)


def test_values_that_are_no_finite_numbers_are_refused():
    X, y = samples()
    X.data[3] = np.inf
    with pytest.raises(DatasetError):
        solver(X, y, Logistic())


def test_an_objective_that_overflows_is_an_error():
    X, y = samples()
    with pytest.raises(DivergenceError):
        solver(X * 1e30, y, Squared(), l2=1e-300).fit()


def test_a_free_intercept_is_as_good_as_not_penalised_and_values_are_taken_in_other_units():
    X, y = samples(features=500, density=0.05)
    y = np.where(np.arange(80) % 5 == 0, -1.0, 1.0)
    X = scipy.sparse.csr_array(X @ scipy.sparse.diags_array(10.0 ** (np.arange(500) % 7 - 3)), dtype=np.float64)
    options = {"l2": 0.01, "tolerance": 1e-8, "free_intercept": True, "scale_features": True}
    one, other = (TruncatedNewton(Dataset.from_scipy(each, y), Logistic(), comm=sar.SERIAL, **options) for each in (X, X * 7.0))
    weights = one.fit()
    np.testing.assert_allclose(other.fit()[:-1] * 7, weights[:-1], rtol=1e-5, atol=1e-9)
    scores = X @ weights[:-1] + weights[-1]
    np.testing.assert_allclose(one.scores(), scores, atol=1e-8)
    assert abs(np.mean(-y / (1 + np.exp(y * scores)))) < 1e-6  # which is the slope by the intercept


@pytest.mark.parametrize("estimator", [LogisticRegression, LinearSVM])
def test_estimators_take_newton_steps_for_many_features(estimator):
    X, y = samples(rows=200, features=700, density=0.02)
    options = {"loss": "squared_hinge"} if estimator is LinearSVM else {}
    newton, dual = (estimator(solver=solver, tol=1e-6, **options).fit(X, y) for solver in ("newton", "dual"))
    assert newton.solver_ == "newton"
    np.testing.assert_allclose(newton.coef_, dual.coef_, atol=5e-3)
    assert newton.n_iter_ < 20
