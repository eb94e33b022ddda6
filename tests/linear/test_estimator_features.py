"""Estimators on any number of features: weights live on those that occur, and ``coef_`` is dense or sparse."""

import copy
import pickle
import tracemalloc

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import clone
from test_partial_fit import SETTINGS, chunk, made

import sparseallreduce as sar
from sparseallreduce.errors import SparseAllreduceError
from sparseallreduce.linear import LinearRegression, LinearSVM, LogisticRegression, load_model
from sparseallreduce.linear.data import occurring
from sparseallreduce.linear.estimators import feature_numbers, streaming
from sparseallreduce.linear.estimators.feature_numbers import FeatureNumbers

ESTIMATORS = [LogisticRegression, LinearSVM, LinearRegression]


def problem(size, estimator=LogisticRegression, classes=2, rows=120, seed=0):
    """Samples of some of few features, which lie far apart."""
    rng = np.random.default_rng(seed)
    known = np.unique(np.random.default_rng(5).integers(0, size, 400))
    chosen = np.sort(np.stack([rng.choice(len(known), 15, replace=False) for _ in range(rows)]), axis=1)
    indices, ends = known[chosen].ravel(), np.arange(0, chosen.size + 1, 15)
    X = scipy.sparse.csr_array((rng.random(chosen.size) + 0.5, indices, ends), shape=(rows, size))
    scores = np.random.default_rng(6).standard_normal((len(known), classes))[chosen].sum(axis=1)
    return X, scores[:, 0] if estimator is LinearRegression else np.array(["ant", "bee", "wasp"])[scores.argmax(axis=1)]


def dense(weights):
    return weights.toarray() if scipy.sparse.issparse(weights) else np.atleast_2d(weights)


def alike(ours, theirs, rtol):
    """Predictions, of classes or numbers."""
    if ours.dtype.kind == "f":
        np.testing.assert_allclose(ours, theirs, rtol=rtol)
    else:
        np.testing.assert_array_equal(ours, theirs)


def numbered(monkeypatch, is_numbered):
    """Have features numbered from few on, and ``coef_`` sparse; or never."""
    monkeypatch.setattr(occurring, "_MANY", 1 if is_numbered else 1 << 62)
    monkeypatch.setattr(streaming, "_MANY", 1 if is_numbered else 1 << 62)
    monkeypatch.setattr(occurring, "_SMALL", 0 if is_numbered else 1 << 62)
    monkeypatch.setattr(feature_numbers, "_LEAST_ROOM", 4)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2**40 - 1), max_size=12), st.booleans()), max_size=8), st.booleans())
def test_numbers_are_places_in_a_list_that_keeps_what_was_settled(calls, pickles):
    numbers, settled, known = FeatureNumbers(np.empty(0, np.uint64), 2**40), [], []
    for features, is_kept in calls:
        numbers.forget()
        known = [*settled]
        new = sorted(set(features) - set(known))
        numbers.extend(np.array(new, np.uint64))
        known += new
        asked = np.array([*features, *settled, 3, 2**39], np.uint64)
        expected = [known.index(feature) if feature in known else len(known) for feature in asked.tolist()]
        assert numbers.of(asked).tolist() == expected
        assert numbers.features.tolist() == known and len(numbers) == len(known)
        if is_kept:
            numbers.settle()
            settled = known
        if pickles:
            before = numbers.checksum()
            numbers = pickle.loads(pickle.dumps(numbers))
            assert numbers.features.tolist() == settled and numbers.checksum() == before


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("parameters", [{}, {"solver": "sgd"}, {"update": "ftrl"}, {"penalty": "l1"}, {"early_stopping": True}], ids=str)
def test_weights_on_features_that_occur_are_those_on_all(monkeypatch, estimator, classes, parameters):
    if estimator is LinearRegression and (classes > 2 or "solver" in parameters):
        return
    X, y = problem(3000, estimator, classes)
    unseen = problem(2999, estimator, classes, seed=1)[0]
    unseen.resize((120, 3000))
    models = []
    for is_numbered in (False, True):
        numbered(monkeypatch, is_numbered)
        models.append(estimator(max_iter=20, tol=None, **parameters).fit(X, y))
    whole, part = models
    assert isinstance(whole.coef_, np.ndarray) and isinstance(part.coef_, scipy.sparse.csr_array)
    # Of least squares, products with the second derivatives and all of these come to one optimum by other ways.
    near = {"rtol": 1e-3, "atol": 1e-6} if whole.solver_ == "newton" else {"rtol": 1e-9, "atol": 1e-12}
    np.testing.assert_allclose(dense(part.coef_), dense(whole.coef_), **near)
    np.testing.assert_allclose(part.intercept_, whole.intercept_, **near)
    for samples in (X, unseen, unseen.toarray(), unseen.tocsc(), X[:1]):
        alike(part.predict(samples), whole.predict(samples), near["rtol"])
    assert part.score(X, y) == pytest.approx(whole.score(X, y))


@pytest.mark.parametrize("bits", [26, 31, 40])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_memory_is_by_the_features_that_occur(estimator, bits):
    X, y = problem(2**bits, estimator, rows=300)
    first = np.unique(y) if estimator is not LinearRegression else None
    calls = [lambda model: model.fit(X, y), lambda model: model.partial_fit(X, y, **({} if first is None else {"classes": first}))]
    for call in calls:
        model = call(estimator())
        tracemalloc.start()
        try:
            call(estimator())
            model.predict(X), model.coef_, model.score(X, y)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < 4_000_000
        assert model.coef_.shape == (1, 2**bits) and model.coef_.nnz <= 400
        assert model.score(X, y) > 0.9 or call is calls[1]


@pytest.mark.parametrize("bits", [17, 40])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("parameters", [{}, {"update": "ftrl"}], ids=str)
def test_pickles_copies_and_files_of_sparse_weights_predict_and_go_on(tmp_path, estimator, bits, parameters):
    X, y = problem(2**bits, estimator)
    model = estimator(comm=sar.SERIAL, **parameters).fit(X, y)
    model.to_file(tmp_path / "model.npz")
    twins = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model), copy.copy(model), estimator.from_file(tmp_path / "model.npz")]
    for twin in [*twins, load_model(tmp_path / "model.npz"), model]:
        np.testing.assert_array_equal(twin.predict(X), model.predict(X))
    more, labels = problem(2**bits - 1, estimator, seed=2)  # of features some of which are new
    more.resize((120, 2**bits))
    before = dense_at(model, more)
    for twin in twins:
        twin.partial_fit(more, labels)
        assert np.abs(dense_at(twin, more) - before).max() > 0
    np.testing.assert_array_equal(dense_at(twins[0], more), dense_at(twins[1], more))
    np.testing.assert_array_equal(dense_at(twins[0], more), dense_at(twins[2], more))
    np.testing.assert_array_equal(dense_at(model, more), before)  # which the copies have left alone
    assert not hasattr(clone(model), "coef_")


def dense_at(model, samples):
    """The weights of the features of some samples."""
    features = np.unique(samples.indices)
    if isinstance(model.coef_, np.ndarray):
        return np.atleast_2d(model.coef_)[:, features]
    columns = model.coef_.tocoo()
    found = np.zeros((model.coef_.shape[0], len(features)))
    known = np.isin(columns.col, features)
    found[columns.row[known], np.searchsorted(features, columns.col[known])] = columns.data[known]
    return found


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("setting", SETTINGS)
def test_features_that_come_later_get_room(monkeypatch, setting, classes):
    """Each call brings features that none before had: so weights move to more room again and again."""
    models = []
    for is_numbered in (False, True):
        numbered(monkeypatch, is_numbered)
        model = made(setting, classes)
        for seed in range(6):
            X, y = chunk(seed, rows=20, classes=classes)
            model.partial_fit(X, y, classes=np.arange(classes))
            assert (model._numbers is not None) == is_numbered
        models.append(model)
        X, _ = chunk(9, classes=classes)
        models.append(model.decision_function(X))
    whole, theirs, part, ours = models
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert scipy.sparse.issparse(part.coef_)
    np.testing.assert_allclose(dense(part.coef_), whole.coef_, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(part.intercept_, whole.intercept_, rtol=1e-4, atol=1e-6)
    again = pickle.loads(pickle.dumps(part))
    again.comm = sar.SERIAL
    for twin in (part, again):
        twin.partial_fit(*chunk(10, classes=classes))
    np.testing.assert_array_equal(dense(again.coef_), dense(part.coef_))


@pytest.mark.parametrize("setting", ["plain l2", "momentum l1", "adaptive penalised"])
def test_a_call_that_fails_forgets_the_features_that_it_brought(monkeypatch, setting):
    numbered(monkeypatch, True)
    model = made(setting).partial_fit(*chunk(0), classes=[0, 1])
    twin = copy.deepcopy(model)
    twin.comm = sar.SERIAL
    X, y = chunk(1)
    with pytest.raises(SparseAllreduceError), np.errstate(all="ignore"):
        model.set_params(learning_rate=1e300).partial_fit(X, y)
    model.set_params(learning_rate=twin.learning_rate)
    np.testing.assert_array_equal(dense(model.coef_), dense(twin.coef_))
    for each in (model, twin):
        each.partial_fit(*chunk(2))
    np.testing.assert_array_equal(dense(model.coef_), dense(twin.coef_))
    np.testing.assert_array_equal(model._numbers.features, twin._numbers.features)


@pytest.mark.parametrize("parameters", [{"update": "ftrl", "l2": 0.0}, {"update": "sgd"}, {"strategy": "topka", "density": 1.0}], ids=str)
def test_fits_partial_fits_and_warm_starts_go_on_from_each_other(monkeypatch, parameters):
    models = []
    for is_numbered in (False, True):
        numbered(monkeypatch, is_numbered)
        given = {"tol": None, "max_iter": 2, "warm_start": True, "scale_features": True, "batch_size": 20, "comm": sar.SERIAL}
        model = LogisticRegression(**given | parameters).fit(*chunk(0))
        for number, call in enumerate(("partial_fit", "fit", "partial_fit", "partial_fit", "fit"), 1):
            getattr(model, call)(*chunk(number))
        models.append(model)
    whole, part = models
    np.testing.assert_allclose(dense(part.coef_), whole.coef_, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(part.intercept_, whole.intercept_, rtol=1e-3, atol=1e-5)


def test_weights_that_are_set_have_numbers_too(monkeypatch):
    numbered(monkeypatch, True)
    model = made("plain").fit(*chunk(0))
    free = np.setdiff1d(np.arange(3000), chunk(0)[0].indices)[:2]
    for form in (np.asarray, scipy.sparse.csr_matrix, scipy.sparse.coo_array):
        weights = dense(model.coef_).copy()
        weights[0, free] = 7.0
        model.coef_ = form(weights)
        model.partial_fit(*chunk(1))
        np.testing.assert_allclose(dense(model.coef_)[0, free], 7.0, rtol=0.1)


@pytest.mark.parametrize("after", ["fit", "partial_fit"])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_sparsify_and_densify_change_the_form_alone(tmp_path, estimator, classes, after):
    X, y = problem(3000, estimator, classes)
    first = {} if estimator is LinearRegression or after == "fit" else {"classes": np.unique(y)}
    model, other = (getattr(estimator(update="ftrl", random_state=1), after)(X, y, **first) for _ in range(2))
    predicted, weights, shape = model.predict(X), dense(model.coef_), model.coef_.shape
    assert model.sparsify() is model and isinstance(model.coef_, scipy.sparse.csr_array)
    assert model.sparsify().coef_.shape == weights.shape and model.coef_.nnz == np.count_nonzero(weights)
    for samples in (X, X.toarray()):
        alike(model.predict(samples), predicted, 1e-12)
    model.to_file(tmp_path / "m.npz")
    np.testing.assert_array_equal(dense(load_model(tmp_path / "m.npz").weights), weights)
    if after == "fit":
        assert scipy.sparse.issparse(pickle.loads(pickle.dumps(model)).coef_)
    assert model.densify() is model and model.coef_.shape == shape
    np.testing.assert_array_equal(dense(model.coef_), weights)
    model.sparsify().partial_fit(X, y)
    other.partial_fit(X, y)
    np.testing.assert_array_equal(dense(model.coef_), dense(other.coef_))  # with the norms of gradients that there were
    with pytest.raises(Exception, match="not fitted"):
        estimator().sparsify()


def test_weights_are_dense_while_no_larger_than_the_samples():
    X, y = problem(1 << 18, rows=120)
    assert isinstance(LogisticRegression().fit(X, y).coef_, scipy.sparse.csr_array)
    many = scipy.sparse.vstack([X] * 150, format="csr")
    assert isinstance(LogisticRegression().fit(many, np.tile(y, 150)).coef_, np.ndarray)
    assert isinstance(LogisticRegression().fit(*problem(1 << 16)).coef_, np.ndarray)  # a megabyte is always dense
