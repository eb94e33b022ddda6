"""What estimators keep of adaptive steps from fit to fit, in memory and in pickles, and pickles of earlier versions."""

import copy
import pickle

import numpy as np
import pytest
import scipy.sparse
from earlier_pickles import EARLIER, earlier, samples

import sparseallreduce as sar
from sparseallreduce.linear import LinearRegression, LogisticRegression
from sparseallreduce.linear.estimators.packing import Packed, packed, unpacked

FEATURES = 20_000


def problem(rows=300, seed=0, features=FEATURES):
    rng = np.random.default_rng(seed)
    counts = np.minimum(rng.zipf(1.3, (rows, 40)) - 1, features - 1)
    X = scipy.sparse.csr_array((np.ones(counts.size, np.float32), counts.ravel(), np.arange(0, counts.size + 1, 40)), (rows, features))
    X.sum_duplicates()
    return X, np.where(X @ np.random.default_rng(7).standard_normal(features) > 0, "bee", "ant")


def made(**parameters):
    return LogisticRegression(**{"update": "ftrl", "tol": None, "max_iter": 8, "comm": sar.SERIAL} | parameters)


def norms_of(model):
    """The square roots of the sums of squared gradients, of features as they are given."""
    if model._live is not None:
        return model._live.weights._norms
    return unpacked(model._progress[1].memory["norms"])


PENALTIES = [{"l2": 0.0}, {"l2": 1e-3, "l1": 1e-4}]


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("then", ["partial_fit", "warm start"])
def test_the_norms_of_gradients_outlive_a_fit(penalties, early_stopping, then):
    X, y = problem()
    model = made(early_stopping=early_stopping, **penalties).fit(X, y)
    before, coef = norms_of(model).copy(), model.coef_.copy()
    assert (before > 0).sum() > 100
    forgetful = copy.deepcopy(model)
    forgetful._progress = None
    few, labels = X[:40], y[:40]
    for each in (model, forgetful):
        each.comm = sar.SERIAL
        if then == "partial_fit":
            each.set_params(early_stopping=False).partial_fit(few, labels)
        else:
            each.set_params(warm_start=True, max_iter=1, early_stopping=False).fit(few, labels)
    after, touched = norms_of(model), np.unique(few.indices)
    assert (after >= before).all() and (after[touched] > before[touched]).any()
    untouched = np.setdiff1d(np.arange(FEATURES), touched)
    np.testing.assert_array_equal(after[untouched], before[untouched])
    moved, moved_without = (np.abs(each.coef_ - coef)[0, touched].mean() for each in (model, forgetful))
    assert moved < 0.6 * moved_without


def test_a_partial_fit_after_a_fit_is_one_training_to_the_bit():
    X, y = problem(64)  # a step a pass, so that their order does not matter
    parameters = {"l2": 0.0, "batch_size": 64, "scale_features": False}
    parted = made(max_iter=5, **parameters).fit(X, y)
    for _ in range(3):
        parted.partial_fit(X, y)
    moments = made(max_iter=1, **parameters).fit(X, y)
    whole = made(max_iter=8, **parameters).fit(X, y)
    assert moments.history_[0][0].learning_rate == whole.history_[0][0].learning_rate
    np.testing.assert_allclose(parted.coef_, whole.coef_, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(norms_of(parted), norms_of(whole), rtol=1e-5)


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_a_warm_start_goes_on_with_adaptive_steps(penalties):
    X, y = problem()
    model = made(warm_start=True, **penalties).fit(X, y)
    last = model.history_[0][-1].progressive_loss
    model.fit(X, y)
    assert model.history_[0][0].progressive_loss < last
    cold = made(max_iter=16, **penalties).fit(X, y)
    np.testing.assert_allclose(model.history_[0][-1].progressive_loss, cold.history_[0][-1].progressive_loss, rtol=0.1)


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_a_pickle_after_a_fit_holds_the_norms_in_little_room(penalties):
    features = 1 << 20
    X, y = problem(100, features=features)
    model = made(**penalties).fit(X, y)
    content = pickle.dumps(model)
    assert len(content) < 200_000  # of weights and norms, those of the features that occur
    twin = pickle.loads(content)
    twin.comm = sar.SERIAL
    np.testing.assert_array_equal(norms_of(twin), norms_of(model))
    for each in (model, twin):
        each.partial_fit(X, y)
    assert len(pickle.dumps(model)) < 200_000  # of live weights, those that have been touched
    np.testing.assert_array_equal(model.coef_.toarray(), twin.coef_.toarray())


def test_weights_that_are_set_after_a_fit_begin_anew():
    X, y = problem()
    model, fresh = made().fit(X, y), made().fit(X, y)
    model.coef_ = np.zeros_like(model.coef_)
    fresh.coef_[:] = 0
    fresh._progress = None
    for each in (model, fresh):
        each.partial_fit(X, y)
    np.testing.assert_array_equal(model.coef_, fresh.coef_)


def test_updates_may_be_changed_between_fits():
    X, y = problem()
    model = made(warm_start=True)
    for update in ("ftrl", "sgd", "ftrl", "sgd"):
        model.set_params(update=update).fit(X, y)
        assert model.score(X, y) > 0.9
        model.partial_fit(X, y)
        assert np.isfinite(model.coef_).all()
    dense = made(strategy="dense", warm_start=True).fit(X, y).fit(X, y)
    assert dense.partial_fit(X, y).score(X, y) > 0.9


@pytest.mark.parametrize("classes", [3])
def test_the_norms_of_several_scores_are_kept_too(classes):
    X, y = problem()
    y = np.arange(len(y)) % classes
    model = made(l2=0.0).fit(X, y)
    before = norms_of(model).copy()
    model.partial_fit(X[:10], y[:10])
    assert len(before) == classes * FEATURES and (norms_of(model) >= before).all()


@pytest.mark.parametrize("fill", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint16])
def test_packed_arrays_come_back_to_the_bit(fill, dtype):
    array = np.full(10_000, fill, dtype)
    array[[3, 77, 9999]] = [5, 7, 9]
    if dtype != np.uint16:
        array[5] = -0.0
    form = packed(array, fill)
    assert isinstance(form, Packed)
    assert unpacked(form).tobytes() == array.tobytes() and unpacked(form).dtype == dtype
    full = np.arange(1, 10_001).astype(dtype)
    assert packed(full, 0.0) is full


@pytest.mark.parametrize("name", EARLIER)
def test_pickles_of_earlier_versions_go_on(name):
    content, scores, weights = earlier(name)
    X, y = samples()
    model = pickle.loads(content)
    regression = isinstance(model, LinearRegression)
    model.comm = sar.SERIAL
    np.testing.assert_allclose(model.predict(X[:3]) if regression else model.decision_function(X[:3]), scores, rtol=1e-12)
    model.partial_fit(X, X[:, 0] if regression else y)
    np.testing.assert_allclose(np.ravel(model.coef_), weights, rtol=1e-9, atol=1e-12)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.coef_, model.coef_)
