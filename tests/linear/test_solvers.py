"""Dual coordinate ascent on one rank: LIBLINEAR's optimum, gaps that bound it, and arguments that are refused."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression as Reference
from sklearn.svm import LinearSVC
from thoroughness import examples

import sparseallreduce as sar
from sparseallreduce.errors import AlgorithmError, DatasetError
from sparseallreduce.linear import Dataset, Hinge, Logistic, Squared, SquaredHinge
from sparseallreduce.linear.data import feature_scaling
from sparseallreduce.linear.data.dataset import read_only
from sparseallreduce.linear.kernels import dual as kernels
from sparseallreduce.linear.solvers import CoCoA, frames
from sparseallreduce.linear.solvers.numbering import Numbering

LOSSES = {"hinge": Hinge, "squared_hinge": SquaredHinge, "logistic": Logistic}


def samples(rows=80, features=30, seed=0, ones=False, density=0.2):
    rng = np.random.default_rng(seed)
    X = scipy.sparse.random_array((rows, features), density=density, rng=rng, format="csr", dtype=np.float32)
    if ones:
        X.data[:] = 1.0
    y = np.where(X @ rng.standard_normal(features) + 0.3 * rng.standard_normal(rows) > 0, 1, -1)
    y[:2] = 1, -1
    return X, y


def objective(model, X, y, weights, l2, intercept=True, sample_weight=1.0):
    scores = X @ weights[: X.shape[1]] + (weights[-1] if intercept else 0.0)
    return l2 / 2 * weights @ weights + np.mean(sample_weight * model.loss(scores, y))


def solver(X, y, model, l2=0.01, **options):
    return CoCoA(Dataset.from_scipy(X, y), model, l2=l2, comm=sar.SERIAL, **options)


def references(name, X, y, l2):
    """LIBLINEAR's weights, the intercept last."""
    C = 1 / (len(y) * l2)
    if name == "logistic":
        found = Reference(solver="liblinear", dual=True, C=C, tol=1e-9, max_iter=100_000).fit(X, y)
    else:
        found = LinearSVC(loss=name, dual=True, C=C, tol=1e-9, max_iter=1_000_000).fit(X, y)
    return np.r_[found.coef_[0], found.intercept_]


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_the_optimum_is_that_of_liblinear(name, ones):
    X, y = samples(ones=ones)
    found = solver(X, y, LOSSES[name](), tolerance=1e-8, rounds=20_000)
    weights = found.fit()
    assert found.converged
    np.testing.assert_allclose(weights, references(name, X, y, 0.01), atol=2e-3)
    best = objective(LOSSES[name](), X, y, references(name, X, y, 0.01), 0.01)
    assert objective(LOSSES[name](), X, y, weights, 0.01) <= best * (1 + 1e-6)


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from(list(LOSSES)), st.integers(1, 40), st.integers(1, 12), st.floats(1e-3, 10.0), st.booleans(), st.integers(0, 1000))
def test_the_gap_bounds_how_far_the_objective_is_above_its_optimum(name, rows, features, l2, intercept, seed):
    rng = np.random.default_rng(seed)
    X = scipy.sparse.random_array((rows, features), density=0.5, rng=rng, format="csr")
    y = rng.choice([-1, 1], rows)
    model = LOSSES[name]()
    found = solver(X, y, model, l2, tolerance=1e-3, rounds=30, seed=seed, intercept=intercept)
    weights = found.fit()
    last = found.history[-1]
    value = objective(model, X, y, weights, l2, intercept)
    assert last.gap >= -1e-7 * value
    assert value - last.dual <= last.gap + 1e-6 * value
    reached = minimize(lambda w: objective(model, X, y, w, l2, intercept), weights, method="Nelder-Mead", options={"maxiter": 300}).fun
    assert last.dual <= reached + 1e-6 * max(1.0, reached)


@pytest.mark.parametrize("name", LOSSES)
def test_the_dual_objective_never_falls(name):
    X, y = samples(rows=200)
    found = solver(X, y, LOSSES[name](), tolerance=1e-9, rounds=50)
    found.fit()
    dual = np.array([each.dual for each in found.history])
    assert np.all(np.diff(dual) >= -1e-12 * np.abs(dual[1:]))


@pytest.mark.parametrize("name", LOSSES)
def test_the_weights_are_those_of_the_lowest_objective_and_not_the_last(name):
    X, y = samples(rows=60, features=200, density=0.5, seed=2)
    found = solver(X, y, LOSSES[name](), 1e-4, tolerance=1e-12, rounds=1)
    primal = []
    for _ in range(40):
        found.advance(certify=True)
        primal.append(found.history[-1].primal)
        if primal[-1] > min(primal):
            break
    assert primal[-1] > min(primal), "this test is to see an objective that rises"
    weights = found.weights_of(found.best_state)
    assert objective(LOSSES[name](), X, y, weights, 1e-4) == pytest.approx(min(primal), rel=1e-9)
    assert found.history[-1].gap == pytest.approx(min(primal) - found.history[-1].dual, rel=1e-9)


def test_a_second_fit_goes_on():
    X, y = samples()
    found = solver(X, y, Logistic(), tolerance=1e-6, rounds=2)
    found.fit()
    assert not found.converged and len(found.history) == 2
    for _ in range(200):
        found.fit()
    assert found.converged and np.all(np.diff([each.dual for each in found.history]) >= -1e-12)


def test_weights_of_samples_multiply_their_losses():
    X, y = samples(rows=20)
    counts = np.random.default_rng(1).integers(0, 4, 20).astype(float)
    data = replace(Dataset.from_scipy(X, y), weights=counts / counts.mean())
    weighted = CoCoA(data, SquaredHinge(), l2=0.1, comm=sar.SERIAL, tolerance=1e-9)
    repeated = np.repeat(np.arange(20), counts.astype(int))
    copies = solver(X[repeated], y[repeated], SquaredHinge(), 0.1, tolerance=1e-9)
    np.testing.assert_allclose(weighted.fit(), copies.fit(), atol=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_samples_without_features_and_of_one_class_are_no_trouble(name):
    X = scipy.sparse.csr_array((5, 7))
    found = solver(X, np.ones(5), LOSSES[name](), intercept=False)
    assert not found.fit().any() and found.converged
    found = solver(X, np.ones(5), LOSSES[name](), 1e-3)
    assert found.fit()[-1] > 0.9 and found.converged


@pytest.mark.parametrize("labels", [[1, 1], [1, -1]])
def test_equal_samples(labels):
    found = solver(scipy.sparse.csr_array(np.ones((2, 3))), np.array(labels), Hinge(), 0.1, tolerance=1e-6)
    weights = found.fit()
    assert found.converged and np.ptp(weights) < 1e-6
    assert (abs(weights[0]) < 1e-6) == (labels == [1, -1])


@pytest.mark.parametrize(
    "options,message",
    [
        ({"l2": 0.0}, "l2 must be above 0"),
        ({"l2": np.nan}, "l2 must be above 0"),
        ({"tolerance": 0.0}, "the tolerance must be above 0"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"local_passes": 0}, "local_passes must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"model": Squared()}, "knows the losses"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    X, y = samples(rows=10)
    with pytest.raises(AlgorithmError, match=message):
        solver(X, y, **{"model": Hinge(), "l2": 0.1} | options)


def test_values_whose_squares_are_no_numbers_are_refused():
    X, y = samples(rows=10)
    data = Dataset.from_scipy(X, y)
    with pytest.raises(DatasetError, match="scale them"):
        CoCoA(
            replace(data, values=np.where(np.arange(data.nnz) == 3, 1e200, data.values.astype(np.float64))),
            Hinge(),
            l2=0.1,
            comm=sar.SERIAL,
        )
    X.data[3] = np.nan
    with pytest.raises(DatasetError):
        solver(X, y, Hinge(), 0.1)


def test_rounds_go_on_after_one_in_which_no_sample_showed_a_gap():
    rng = np.random.default_rng(3)
    counts = rng.integers(0, 5, 15)
    X, y = np.repeat(rng.random((15, 30)), counts, axis=0), np.repeat(np.where(rng.random(15) < 0.4, 1.0, -1.0), counts)
    found = solver(X, y, Logistic(), 1e-4, tolerance=1e-300, rounds=600)
    assert np.isfinite(found.fit()).all()
    assert abs(found.history[-1].gap) <= 1e-14 * found.history[-1].primal


@settings(max_examples=examples(200), deadline=None)
@given(
    features=st.integers(1, 400),
    scale=st.floats(0.1, 30),
    bound=st.floats(1e-3, 1e3),
    share=st.floats(0, 1, exclude_max=True),
    margin=st.floats(-1e3, 1e3),
)
def test_a_visit_sets_a_logistic_dual_variable_to_its_best_value(features, scale, bound, share, margin):
    indptr, indices = read_only(np.array([0, features])), read_only(np.arange(features, dtype=np.uint32))
    rows = indptr, indices, read_only(np.full(features, scale, np.float32)), np.empty(0), read_only(np.ones(1))
    dual, weights = np.array([share * bound]), np.append(margin / scale, np.zeros(features - 1))
    norms, limits, state = np.array([features * np.float64(np.float32(scale)) ** 2]), np.array([np.inf, -np.inf]), np.zeros(1, np.uint64)
    one = np.zeros(1, np.int64)
    kernels.ascend(kernels.LOGISTIC, *rows, np.array([bound]), norms, dual, weights, -1, np.empty(0), one, 1, limits, state)
    score = np.float64(np.float32(scale)) * weights.sum()
    # The best value has a log odds of minus the margin, unless it is at an end of its range.
    ends = np.array([1e-14, 1 - 1e-14])
    odds = np.clip(dual[0] / bound, *ends)
    assert np.log(odds / (1 - odds)) == pytest.approx(np.clip(-score, *np.log(ends / (1 - ends))), abs=1e-5 * (1 + abs(score)))


@pytest.mark.parametrize("name", ["hinge", "squared_hinge"])
def test_few_hard_samples_among_many_easy_ones_take_few_rounds(name):
    rng = np.random.default_rng(1)
    labels, easy = rng.choice([-1.0, 1.0], 4000), np.arange(4000) >= 400
    words = scipy.sparse.random(4000, 300, 0.04, "csr", np.float32, rng=rng)
    words.data[:] = 1
    clues = scipy.sparse.csr_array(np.float32(3) * np.stack([(labels > 0) & easy, (labels < 0) & easy], axis=1))
    samples = Dataset.from_scipy(scipy.sparse.hstack([words, clues]), labels)
    solver = CoCoA(samples, LOSSES[name](), l2=1 / 40_000, comm=sar.SERIAL, tolerance=1e-6, intercept=False)
    solver.fit()
    assert solver.converged
    assert len(solver.history) < 150  # with one pass a round, more than 400


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_samples_of_many_rows_show_whether_features_are_shifted_or_scaled(monkeypatch, units, full, large):
    rng = np.random.default_rng(3)
    values = scipy.sparse.random(4000, 50, 0.1, "csr", rng=rng, data_rvs=lambda size: rng.uniform(0.5, 1.5, size)).toarray()
    values *= 10.0 ** rng.integers(-3, 4, 50) if units else 1
    values[:, 0] = 3 + rng.random(4000) if full else values[:, 0]
    values[77, 5] = 1e30 if large else values[77, 5]
    samples = Dataset.from_scipy(scipy.sparse.csr_array(values, dtype=np.float32), np.ones(4000))
    numbering = Numbering(samples, intercept=True)
    numbering.arrange(numbering.features[:0], numbering.places[:0], alone=True)
    of_all = frames.frame_of(samples, numbering, sar.SERIAL, True, None, ones=False)
    differ = feature_scaling.units_differ_in(samples, sar.SERIAL)
    monkeypatch.setattr(feature_scaling, "_SAMPLED", 1000)
    of_some = frames.frame_of(samples, numbering, sar.SERIAL, True, None, ones=False)
    assert (of_all is not None) == (of_some is not None) == (units or full or large)
    assert of_all is None or all(np.array_equal(one, other) for one, other in zip(of_all, of_some, strict=True))
    monkeypatch.setattr(feature_scaling, "_columns", None if not (units or large) else feature_scaling._columns)  # reads all rows
    assert feature_scaling.units_differ_in(samples, sar.SERIAL) == differ == (units or large)
