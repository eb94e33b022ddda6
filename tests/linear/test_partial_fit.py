"""Calls of ``partial_fit`` on live weights: the same bits as one run, the cost of their samples, and whole after whatever goes wrong."""

import copy
import gc
import pickle
import tracemalloc

import numpy as np
import pytest
import scipy.sparse
from sklearn.base import clone
from sklearn.utils.validation import check_is_fitted

import sparseallreduce as sar
from sparseallreduce.errors import DatasetError, DivergenceError
from sparseallreduce.linear import (
    Constant,
    Dataset,
    Descent,
    LinearRegression,
    LinearSVM,
    Logistic,
    LogisticRegression,
    Options,
    SparseStrategy,
    Trainer,
)
from sparseallreduce.linear.weights import AdaptiveWeights, LazyWeights, Weights
from sparseallreduce.linear.weights import lazy as lazy_module

FEATURES = 3000
SETTINGS = {
    "plain": {"momentum": 0.0, "l2": 0.0},
    "plain l2": {"momentum": 0.0, "l2": 0.1},
    "momentum": {"momentum": 0.9},
    "nothing but l1": {"momentum": 0.0, "l1": 1e-3, "l2": 0.0},
    "momentum l1": {"momentum": 0.5, "l1": 1e-3},
    "average": {"average": True},
    "late average": {"average": 3, "l1": 1e-3},
    "no intercept": {"fit_intercept": False},
    "as they are": {"scale_features": False},
    "overlapped": {"strategy": "overlapped"},
    "adaptive": {"update": "ftrl", "l2": 0.0},
    "adaptive penalised": {"update": "ftrl", "l2": 1e-3, "l1": 1e-4},
    "threads": {"threads": 2},
}
each_setting = pytest.mark.parametrize("setting", SETTINGS)


def chunk(seed, rows=60, classes=2, features=FEATURES, dtype=np.float32):
    """Rows of few features, some of them frequent, of values of different sizes."""
    rng = np.random.default_rng(seed)
    columns = np.minimum(rng.zipf(1.3, (rows, 12)) - 1, features - 1)
    values = rng.standard_normal(columns.size) * 4.0 ** (columns.ravel() % 5 - 2)
    X = scipy.sparse.csr_array((values.astype(dtype), columns.ravel(), np.arange(0, columns.size + 1, 12)), shape=(rows, features))
    X.sum_duplicates()
    scores = X @ np.random.default_rng(99).standard_normal((features, classes))
    return X, scores.argmax(axis=1)


def made(setting, classes=2, **parameters):
    given = {"update": "sgd", "learning_rate": 0.05, "batch_size": 16, "schedule": "constant", "l2": 1e-4, "tol": None, "comm": sar.SERIAL}
    kind = LogisticRegression if classes else LinearRegression
    return kind(**given | SETTINGS[setting] | parameters)


def fed(model, seeds, classes=2, **parameters):
    for seed in seeds:
        X, y = chunk(seed, classes=classes)
        model.partial_fit(X, y, classes=np.arange(classes), **parameters)
    return model


def bits(model):
    return model.coef_.tobytes(), np.asarray(model.intercept_).tobytes(), model.t_


@each_setting
@pytest.mark.parametrize("classes", [2, 4])
def test_calls_with_the_same_samples_are_to_the_bit_one_run_over_them(setting, classes):
    X, y = chunk(0, classes=classes)
    parted, whole = made(setting, max_iter=5), made(setting, max_iter=5).fit(X, y)
    for _ in range(5):
        parted.partial_fit(X, y, classes=np.arange(classes))
    np.testing.assert_array_equal(parted.coef_, whole.coef_)
    if setting != "overlapped":  # whose gradients are one step stale, also over the end of a pass
        np.testing.assert_array_equal(parted.intercept_, whole.intercept_)


@pytest.mark.parametrize("descent", [Descent(0.1, True), Descent(1e-3, True, momentum=0.9), Descent(1e-3, True, 1e-3, update="ftrl")])
def test_calls_with_other_samples_are_to_the_bit_trainings_that_are_restored(descent):
    """Each by a strategy and weights of its own, which take over the state that the last has left."""
    model = LogisticRegression(
        l2=descent.l2,
        l1=descent.l1,
        momentum=descent.momentum or "auto",
        update=descent.update,
        learning_rate=0.05,
        batch_size=16,
        schedule="constant",
        scale_features=False,
        random_state=3,
        comm=sar.SERIAL,
    )
    model.set_params(momentum=descent.momentum if descent.update == "sgd" else "auto")
    state = None
    for number in range(4):
        X, y = chunk(number)
        model.partial_fit(X, y, classes=[0, 1])
        strategy = SparseStrategy(Dataset.from_scipy(X, 2.0 * y - 1), sar.SERIAL, descent)
        if state is not None:
            strategy.restore(copy.deepcopy(state))
        seed = np.random.RandomState(3).randint(2**31)
        rate = model.history_[0][0].learning_rate
        unit = 1.0 if descent.update == "sgd" else unit_of(model)
        options = Options(1, 16, seed, before=number, evaluate_every=0)
        list(Trainer(Logistic(), strategy, Constant(rate), options, rate_unit=unit).run())
        state = strategy.state()
    learned = strategy.weights.to_array()
    np.testing.assert_array_equal(model.coef_[0], learned[:-1])
    np.testing.assert_array_equal(model.intercept_, learned[-1:])


def unit_of(model):
    from sparseallreduce.linear.data.feature_scaling import adaptive_rate_unit

    return adaptive_rate_unit(model._moments, True, False)


@each_setting
@pytest.mark.parametrize("classes", [2, 4])
def test_what_was_written_down_is_gone_on_from_within_rounding(setting, classes):
    """The way that calls go whose weights cannot stay where they are: through ``coef_``."""
    live, written = made(setting), made(setting)
    for seed in range(6):
        fed(live, [seed], classes)
        fed(written, [seed], classes)
        written._settled()
        assert live._live is not None and written._live is None
    np.testing.assert_allclose(live.coef_, written.coef_, rtol=2e-3, atol=2e-5)
    np.testing.assert_allclose(live.intercept_, written.intercept_, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("setting", ["plain l2", "momentum", "average", "adaptive", "adaptive penalised"])
def test_calls_and_predictions_make_no_array_of_all_weights(setting):
    features = 1 << 22
    model, chunks = made(setting), [chunk(seed, features=features) for seed in range(5)]
    for X, y in chunks[:3]:
        model.partial_fit(X, y, classes=[0, 1])
        model.predict(X)
    gc.collect()
    tracemalloc.start()
    try:
        for X, y in chunks[3:]:
            model.partial_fit(X, y)
            model.predict(X), model.decision_function(X), model.predict_proba(X)
            assert hasattr(model, "classes_")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < features, f"{most} bytes, where one byte a weight is {features}"
    assert "coef_" not in vars(model)


@each_setting
@pytest.mark.parametrize("classes", [2, 4])
def test_live_weights_say_what_coef_says(setting, classes):
    model = fed(made(setting), range(4), classes)
    X, _ = chunk(7, classes=classes)
    few = X[:3]
    for samples in (few, few.astype(np.float64), few.tocsc(), few[:1]):
        twin = copy.deepcopy(model)
        _ = twin.coef_
        np.testing.assert_array_equal(model.decision_function(samples), twin.decision_function(samples))
        np.testing.assert_array_equal(model.predict(samples), twin.predict(samples))
        np.testing.assert_array_equal(model.predict_proba(samples), twin.predict_proba(samples))
        assert "coef_" not in vars(model)
    np.testing.assert_array_equal(model.predict(few.toarray()), model.predict(few))


def test_a_regression_and_two_scores_of_two_classes_are_live_too():
    X, y = chunk(0)
    regression = LinearRegression(update="sgd", comm=sar.SERIAL)
    two = LogisticRegression(multi_class="multinomial", update="sgd", comm=sar.SERIAL)
    for _ in range(3):
        regression.partial_fit(X, y)
        two.partial_fit(X, y, classes=[0, 1])
    for model in (regression, two):
        assert model._live is not None
        before = model.predict(X[:5])
        assert np.shape(model.coef_)[-1] == FEATURES
        np.testing.assert_array_equal(model.predict(X[:5]), before)
    assert two.coef_.shape == (1, FEATURES) and isinstance(regression.intercept_, float)


def test_coef_is_there_when_somebody_asks():
    model = LogisticRegression(comm=sar.SERIAL)
    assert not hasattr(model, "coef_")
    with pytest.raises(AttributeError, match="LogisticRegression has no coef_ yet: call fit or partial_fit first"):
        _ = model.coef_
    fed(model, [0])
    check_is_fitted(model)
    assert hasattr(model, "coef_")
    assert model.coef_ is model.coef_
    old = model.coef_
    before = old.copy()
    fed(model, [1])
    np.testing.assert_array_equal(old, before)  # what users hold stays what it was
    assert (model.coef_ != before).any()
    assert not hasattr(clone(model), "coef_")
    del model.coef_
    assert not hasattr(model, "coef_")


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("change", ["coef_", "intercept_", "both in place"])
def test_weights_that_somebody_sets_count(read, change):
    model = fed(made("momentum"), range(3))
    if read:
        _ = model.coef_
    X, y = chunk(5)
    if change == "coef_":
        model.coef_ = np.full((1, FEATURES), 2.0, np.float32)
    elif change == "intercept_":
        model.intercept_ = np.array([7.0])
    else:
        model.coef_[:], model.intercept_[:] = 2.0, 7.0
    twin = pickle.loads(pickle.dumps(model))
    expected = X @ model.coef_[0] + model.intercept_
    for each in (model, twin):
        np.testing.assert_allclose(each.decision_function(X), expected, rtol=1e-5)
        each.partial_fit(X[:1], y[:1], sample_weight=[1e-12])
        np.testing.assert_allclose(each.decision_function(X), expected, rtol=1e-3)


@each_setting
@pytest.mark.parametrize("classes", [2, 4])
def test_pickles_and_copies_go_on_to_the_bit_and_apart(setting, classes):
    model = fed(made(setting), range(3), classes)
    twins = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model), copy.copy(model)]
    for twin in twins:
        assert "coef_" not in vars(twin)
        twin.comm = sar.SERIAL
    state = bits(copy.deepcopy(model))
    fed(twins[2], [8], classes)
    assert bits(copy.deepcopy(model)) == state  # no copy shares anything that changes
    fed(twins[2], [9], classes)
    for each in (model, *twins[:2]):
        fed(each, [8, 9], classes)
        assert bits(each) == bits(twins[2])
    assert clone(model).comm is sar.SERIAL


def test_two_models_that_take_turns_are_as_one_after_the_other():
    first, second = made("momentum"), made("adaptive penalised")
    for seed in range(4):
        fed(first, [seed])
        fed(second, [seed + 10])
    assert bits(first) == bits(fed(made("momentum"), range(4)))
    assert bits(second) == bits(fed(made("adaptive penalised"), range(10, 14)))


class Interrupted(KeyboardInterrupt):
    pass


def failing(monkeypatch, kind, method, call, error):
    """Have a method raise when it is called so many times, after it has done its work."""
    original, calls = getattr(kind, method), []

    def instead(self, *arguments):
        result = original(self, *arguments)
        calls.append(None)
        if len(calls) == call:
            raise error
        return result

    monkeypatch.setattr(kind, method, instead)


POINTS = [
    (Weights, "_subtract_intercept", 2),
    (LazyWeights, "_subtract_intercept", 2),
    (AdaptiveWeights, "_subtract_intercept", 2),
    (Weights, "stretch", 1),
    (SparseStrategy, "update", 3),
    (SparseStrategy, "scores", 2),
    (SparseStrategy, "renew", 1),
    (Trainer, "_report", 1),
    (LogisticRegression, "_initial_rate", 1),
    (LogisticRegression, "_run", 1),
]


@pytest.mark.parametrize("setting", ["plain l2", "momentum l1", "late average", "adaptive", "adaptive penalised", "overlapped"])
@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point[0].__name__}.{point[1]}")
def test_a_call_that_fails_leaves_all_as_it_was(monkeypatch, setting, point):
    error = MemoryError("no room") if point[2] == 2 else Interrupted()
    model, undisturbed = fed(made(setting), range(3)), fed(made(setting), range(3))
    with monkeypatch.context() as patch:
        failing(patch, *point, error)
        try:
            fed(model, [3])
        except type(error):
            pass
        else:
            pytest.skip("not on the way of these weights")
    X, _ = chunk(5)
    np.testing.assert_array_equal(model.decision_function(X), undisturbed.decision_function(X))
    assert bits(copy.deepcopy(model)) == bits(copy.deepcopy(undisturbed))
    np.testing.assert_array_equal(model._magnitudes, undisturbed._magnitudes)
    assert bits(fed(model, [4, 5])) == bits(fed(undisturbed, [4, 5]))


@pytest.mark.parametrize("setting", ["plain l2", "momentum", "average"])
def test_a_call_that_fails_after_a_pass_over_all_weights_leaves_all_as_it_was(monkeypatch, setting):
    monkeypatch.setattr(lazy_module, "_STEPS", 9)
    monkeypatch.setattr(Weights, "_SMALLEST_SCALE", 0.93)
    for calls in (1, 2, 3, 4):
        for call in (1, 2, 3, 4):
            model, undisturbed = fed(made(setting), range(calls)), fed(made(setting), range(calls))
            with monkeypatch.context() as patch:
                failing(patch, SparseStrategy, "update", call, Interrupted())
                with pytest.raises(Interrupted):
                    fed(model, [7])
            assert bits(fed(model, [8, 9])) == bits(fed(undisturbed, [8, 9]))


@pytest.mark.parametrize("setting", ["plain", "momentum", "adaptive", "adaptive penalised"])
def test_a_call_that_touches_every_feature_can_be_taken_back(monkeypatch, setting):
    X, y = chunk(1)
    full = scipy.sparse.csr_array(np.random.default_rng(0).standard_normal((64, FEATURES)).astype(np.float32))
    labels = np.arange(64) % 2
    model, undisturbed = fed(made(setting), range(2)), fed(made(setting), range(2))
    with monkeypatch.context() as patch:
        failing(patch, SparseStrategy, "step", 4, Interrupted())
        with pytest.raises(Interrupted):
            model.partial_fit(full, labels)
    assert bits(copy.deepcopy(model)) == bits(copy.deepcopy(undisturbed))
    for each in (model, undisturbed):
        each.partial_fit(full, labels).partial_fit(X, y)
    assert bits(model) == bits(undisturbed)


def test_a_second_interrupt_while_changes_are_taken_back_does_no_harm(monkeypatch):
    model, undisturbed = fed(made("momentum"), range(3)), fed(made("momentum"), range(3))
    with monkeypatch.context() as patch:
        failing(patch, SparseStrategy, "update", 2, Interrupted())
        failing(patch, Weights, "_put_numbers_back", 1, Interrupted())
        with pytest.raises(Interrupted):
            fed(model, [3])
    X, _ = chunk(5)
    np.testing.assert_array_equal(model.decision_function(X), undisturbed.decision_function(X))
    assert bits(fed(model, [4])) == bits(fed(undisturbed, [4]))


@pytest.mark.parametrize("setting", ["plain", "momentum", "average"])
def test_a_call_that_diverges_leaves_finite_weights(setting):
    model, undisturbed = fed(made(setting), range(3)), fed(made(setting), range(3))
    X, y = chunk(3)
    before = model.get_params()
    model.set_params(learning_rate=1e39, l2=0.0)
    with np.errstate(all="ignore"), pytest.raises(DivergenceError):
        model.partial_fit(X, y)
    np.testing.assert_allclose(model.coef_, undisturbed.coef_, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(model.intercept_, undisturbed.intercept_)
    model.set_params(**before).partial_fit(X, y)
    assert np.isfinite(model.decision_function(X)).all()


def test_samples_that_cannot_be_trained_on_change_nothing():
    model, undisturbed = fed(made("momentum"), range(3)), fed(made("momentum"), range(3))
    X, y = chunk(3)
    broken = X.copy()
    broken.indices[-1] = FEATURES + 5
    infinite = X.copy()
    infinite.data[0] = np.inf
    wrong = [
        (lambda: model.partial_fit(X[:, :-1], y), ValueError, "features"),
        (lambda: model.partial_fit(X[:0], y[:0]), ValueError, "0 sample"),
        (lambda: model.partial_fit(X, y, sample_weight=np.zeros(len(y))), ValueError, "no rank has a sample with a weight"),
        (lambda: model.partial_fit(X, y, sample_weight=-np.ones(len(y))), ValueError, "negative"),
        (lambda: model.partial_fit(X, y + 5), ValueError, "not among the classes"),
        (lambda: model.partial_fit(broken, y), (DatasetError, ValueError, IndexError), "ind"),
        (lambda: model.partial_fit(infinite, y), ValueError, "infinity"),
        (lambda: model.set_params(schedule="never").partial_fit(X, y), ValueError, "schedule"),
    ]
    for action, error, text in wrong:
        with pytest.raises(error, match=text):
            action()
        model.set_params(schedule="constant")
    assert bits(fed(model, [4])) == bits(fed(undisturbed, [4]))
    assert model._live is not None


def test_one_class_alone_and_weights_of_samples_are_taken():
    for setting in ("momentum", "adaptive"):
        model, by_weight, one_by_one = (fed(made(setting), range(2)) for _ in range(3))
        X, y = chunk(3)
        model.partial_fit(X[y == 1], y[y == 1])
        assert model.classes_.tolist() == [0, 1]
        by_weight.partial_fit(X, y, sample_weight=(y == 1).astype(float))
        assert bits(by_weight) == bits(model)  # samples that do not count are not there
        one_by_one.partial_fit(X, y, sample_weight=np.where(y == 1, 3.0, 0.5))
        assert (one_by_one.coef_ != model.coef_).any()


CHANGES = [
    {"l2": 0.5},
    {"momentum": 0.2},
    {"scale_features": False},
    {"average": True},
    {"strategy": "dense"},
    {"threads": 2},
    {"learning_rate": 0.01},
    {"fit_intercept": False},
    {"update": "ftrl", "momentum": 0},
]


@pytest.mark.parametrize("changed", CHANGES, ids=str)
def test_parameters_that_change_lose_nothing_that_was_learned(changed):
    model = fed(made("momentum"), range(3))
    X, y = chunk(3)
    before = model.decision_function(X)
    model.set_params(**changed)
    model.partial_fit(X[:1], y[:1], sample_weight=[1e-9])
    if not {"fit_intercept", "scale_features"} & set(changed):  # a rate of scaled features is too large for others
        tolerance = 0.3 if "update" not in changed else 2.0  # a velocity lasts; an adaptive step does not go by sizes
        assert np.abs(model.decision_function(X) - before).max() < tolerance * np.abs(before).max()
    fed(model, [4])
    assert np.isfinite(model.coef_).all()


def test_samples_of_another_precision_are_gone_on_with():
    model = fed(made("momentum"), range(2))
    X, y = chunk(3, dtype=np.float64)
    model.partial_fit(X, y)
    assert model.coef_.dtype == np.float64
    fed(model, [4])
    assert model.coef_.dtype == np.float32 and model._live is not None


def test_a_file_and_a_cold_fit_end_the_calls(tmp_path):
    model = fed(made("momentum"), range(3))
    model.to_file(tmp_path / "model.npz")
    X, y = chunk(3)
    again = LogisticRegression.from_file(tmp_path / "model.npz", comm=sar.SERIAL)
    np.testing.assert_array_equal(again.decision_function(X), model.decision_function(X))
    cold = made("momentum", max_iter=3).fit(X, y)
    np.testing.assert_array_equal(model.set_params(max_iter=3).fit(X, y).coef_, cold.coef_)
    assert model._live is None


def test_svms_and_regressions_keep_their_kinds():
    X, y = chunk(0, classes=3)
    for model, labels in ((LinearSVM(comm=sar.SERIAL), y), (LinearSVM(loss="squared_hinge", update="ftrl", comm=sar.SERIAL), y)):
        for _ in range(2):
            model.partial_fit(X, labels, classes=[0, 1, 2])
        assert model.predict(X).shape == y.shape and model.coef_.shape == (3, FEATURES)
    counts = LinearRegression(loss="poisson", update="ftrl", comm=sar.SERIAL)
    for _ in range(2):
        counts.partial_fit(X, y.astype(float))
    assert (counts.predict(X[:4]) > 0).all() and counts._live is not None
