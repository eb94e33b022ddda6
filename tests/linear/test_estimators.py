"""The estimators on one process: scikit-learn's own checks, accuracies that users expect, and what they add to them."""

import copy
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine, make_classification, make_regression
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LogisticRegression as ScikitLogisticRegression
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler
from sklearn.utils.estimator_checks import check_class_weight_balanced_linear_classifier, parametrize_with_checks

import sparseallreduce as sar
from sparseallreduce.linear import (
    SCHEDULES,
    Constant,
    LargeBatch,
    LinearRegression,
    LinearSVM,
    LogisticRegression,
    ModelFileError,
    load_model,
)

CLASSIFIERS = [LogisticRegression, LinearSVM]
ESTIMATORS = [*CLASSIFIERS, LinearRegression]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks([LogisticRegression(), LinearSVM(), LinearRegression()])
def test_scikit_learns_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("estimator", CLASSIFIERS)
def test_balanced_class_weights_are_those_of_scikit_learn(estimator):
    check_class_weight_balanced_linear_classifier(estimator.__name__, estimator())  # which it runs on classes of its own only


@pytest.mark.parametrize(
    "estimator,load,least",
    [
        (LogisticRegression, load_iris, 0.93),
        (LogisticRegression, load_wine, 0.96),
        (LogisticRegression, load_breast_cancer, 0.96),
        (LogisticRegression, load_digits, 0.96),
        (LinearSVM, load_wine, 0.95),
        (LinearSVM, load_breast_cancer, 0.95),
        (LinearSVM, load_digits, 0.95),
        (LinearRegression, load_diabetes, 0.5),
    ],
)
def test_defaults_are_right_for_unscaled_data(estimator, load, least):
    X, y = load(return_X_y=True)
    assert estimator().fit(X, y).score(X, y) > least


def problem(classes=2, samples=200, seed=0):
    X, y = make_classification(samples, 12, n_informative=8, n_classes=classes, class_sep=2.0, random_state=seed)
    return X, np.array(["ant", "bee", "wasp"])[y]


def test_weights_are_those_of_the_same_problem_solved_by_scikit_learn():
    X, y = problem()
    X = MaxAbsScaler().fit_transform(X)  # so that both penalise the same weights
    ours = LogisticRegression(l2=1e-2, tol=1e-9, max_iter=5000, scale_features=False).fit(X, y)
    theirs = ScikitLogisticRegression(C=1 / (1e-2 * len(y)), tol=1e-8).fit(X, y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-3)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, atol=1e-3)

    X, y = make_regression(150, 5, noise=1.0, random_state=0)
    ours = LinearRegression(l2=1e-2, tol=1e-10, max_iter=5000, scale_features=False).fit(X, y)
    theirs = Ridge(alpha=1e-2 * len(y)).fit(X, y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-3)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "form",
    [
        scipy.sparse.csr_array,
        scipy.sparse.csr_matrix,
        scipy.sparse.csc_array,
        scipy.sparse.csc_matrix,
        scipy.sparse.coo_array,
        scipy.sparse.coo_matrix,
    ],
)
def test_sparse_samples_are_as_good_as_dense_ones(estimator, dtype, form):
    X, y = problem()
    X = np.where(X > 0.5, X, 0).astype(dtype)
    y = X @ np.arange(12) if estimator is LinearRegression else y
    dense = estimator(max_iter=30, tol=None).fit(X, y)
    sparse = estimator(max_iter=30, tol=None).fit(form(X), y)
    assert sparse.coef_.dtype == dtype
    np.testing.assert_allclose(dense.coef_, sparse.coef_, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(sparse.predict(form(X)), sparse.predict(form(X)))


def test_indices_of_64_bits_and_repeated_entries_are_accepted():
    X, y = problem()
    X = np.where(X > 0.5, X, 0)
    plain = scipy.sparse.csr_array(X)
    wide = scipy.sparse.csr_array((plain.data, plain.indices.astype(np.int64), plain.indptr.astype(np.int64)), plain.shape)
    halves = scipy.sparse.coo_array((np.tile(plain.data / 2, 2), np.tile(plain.nonzero(), 2)), plain.shape)
    repeated = scipy.sparse.csr_array(
        (np.repeat(plain.data / 2, 2), np.repeat(plain.indices, 2), plain.indptr * 2), plain.shape
    )
    expected = LogisticRegression(max_iter=20, tol=None).fit(plain, y).coef_
    for samples in (wide, halves, repeated):
        before = samples.data.copy()
        np.testing.assert_allclose(LogisticRegression(max_iter=20, tol=None).fit(samples, y).coef_, expected, rtol=1e-12)
        np.testing.assert_array_equal(samples.data, before)


@pytest.mark.parametrize("estimator", CLASSIFIERS)
@pytest.mark.parametrize("classes", [2, 3])
def test_labels_may_be_strings_and_many(estimator, classes):
    X, y = problem(classes)
    model = estimator().fit(X, y)
    assert model.classes_.tolist() == ["ant", "bee", "wasp"][:classes]
    assert model.coef_.shape == ((1 if classes == 2 else classes), 12)
    assert model.score(X, y) > 0.8
    assert set(model.predict(X)) == set(y)


def test_probabilities_belong_to_the_classes():
    X, y = problem(3)
    model = LogisticRegression().fit(X, y)
    shares = model.predict_proba(X)
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    np.testing.assert_array_equal(model.classes_[shares.argmax(axis=1)], model.predict(X))
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), shares)
    assert not hasattr(LinearSVM(), "predict_proba")


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_partial_fits_learn_from_batches_that_come_one_by_one(estimator):
    X, y = problem(samples=1000)
    X[:300] /= 4  # the scales of features are not known from the first batches
    y = X @ np.arange(12.0) if estimator is LinearRegression else y
    extra = {} if estimator is LinearRegression else {"classes": np.unique(y)}
    model = estimator(batch_size=20)
    for _ in range(10):
        for batch in np.split(np.arange(1000), 5):
            model.partial_fit(X[batch], y[batch], **extra)
    assert model.score(X, y) > 0.85
    assert model.t_ == 10 * 5 * 10


def test_classes_are_known_from_the_first_partial_fit_on():
    X, y = problem()
    with pytest.raises(ValueError, match="classes must be passed on the first call"):
        LogisticRegression().partial_fit(X, y)
    model = LogisticRegression().partial_fit(X[:1], y[:1], classes=["bee", "ant"])
    assert model.classes_.tolist() == ["ant", "bee"]
    with pytest.raises(ValueError, match="the label wasp is not among the classes"):
        model.partial_fit(X[:1], ["wasp"])
    with pytest.raises(ValueError, match="in the first call"):
        model.partial_fit(X[:1], y[:1], classes=["ant", "wasp"])
    with pytest.raises(ValueError, match="needs all samples"):
        LogisticRegression(class_weight="balanced").partial_fit(X, y, classes=["ant", "bee"])


def test_a_warm_start_goes_on():
    X, y = problem()
    cold = LogisticRegression(solver="sgd", max_iter=20, tol=None).fit(X, y)
    warm = LogisticRegression(max_iter=20, tol=None, warm_start=True).fit(X, y)
    np.testing.assert_array_equal(cold.coef_, warm.coef_)
    warm.fit(X, y)
    assert warm.history_[0][-1].loss < cold.history_[0][-1].loss
    with pytest.raises(ValueError, match="not among the classes"):
        warm.fit(*problem(3))


def test_weights_of_samples_and_classes_count_like_repetitions():
    X, y = problem()
    counts = np.random.default_rng(0).integers(0, 3, len(y))
    twice_bees = np.where(y == "bee", 2, 1)
    repeated = LogisticRegression(tol=None, max_iter=20).fit(np.repeat(X, counts, axis=0), np.repeat(y, counts))
    weighted = LogisticRegression(tol=None, max_iter=20).fit(X, y, counts)
    np.testing.assert_allclose(repeated.coef_, weighted.coef_, rtol=1e-9)
    by_class = LogisticRegression(tol=None, max_iter=20, class_weight={"bee": 2}).fit(X, y)
    by_sample = LogisticRegression(tol=None, max_iter=20).fit(X, y, twice_bees)
    np.testing.assert_allclose(by_class.coef_, by_sample.coef_, rtol=1e-12)
    assert weighted.score(X, y, counts) == pytest.approx(np.average(weighted.predict(X) == y, weights=counts))


def test_the_score_of_a_regression_is_that_of_scikit_learn():
    X, y = make_regression(60, 4, noise=5.0, random_state=1)
    counts = np.random.default_rng(0).random(60)
    model = LinearRegression().fit(X, y)
    assert model.score(X, y, counts) == pytest.approx(r2_score(y, model.predict(X), sample_weight=counts))


def test_the_same_call_gives_the_same_bits():
    X, y = problem()
    first, again, other = (LogisticRegression(batch_size=10, max_iter=5, tol=None, random_state=seed).fit(X, y) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.coef_, again.coef_)
    assert not np.array_equal(first.coef_, other.coef_)


def test_dense_and_sparse_strategy_agree():
    X, y = problem()
    names, settings = ("dense", "sparse", "overlapped"), {"solver": "sgd", "max_iter": 10, "tol": None}
    by = {name: LogisticRegression(strategy=name, **settings).fit(X, y).coef_ for name in names}
    assert np.abs(by["overlapped"] - by["sparse"]).max() < 0.1 * np.abs(by["sparse"]).max()  # one step stale
    np.testing.assert_allclose(by["dense"], by["sparse"], rtol=1e-10)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_pickles_copies_and_files_predict_the_same(estimator, tmp_path):
    X, y = problem(3)
    y = X[:, 0] if estimator is LinearRegression else y
    model = estimator(comm=sar.SERIAL).fit(X, y)
    model.to_file(tmp_path / "model.npz")
    twins = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model), estimator.from_file(tmp_path / "model.npz", l2=0.5)]
    for twin in [*twins, load_model(tmp_path / "model.npz")]:
        np.testing.assert_array_equal(twin.predict(X), model.predict(X))
    assert twins[2].l2 == 0.5
    twins[2].partial_fit(X, y)
    assert clone(model).comm is sar.SERIAL
    assert twins[0].comm is None


def test_a_file_of_another_kind_of_model_is_refused(tmp_path):
    X, y = problem()
    LinearSVM().fit(X, y).to_file(tmp_path / "model.npz")
    with pytest.raises(ModelFileError, match=r"kind 'svm', and LogisticRegression is of kind 'logistic'"):
        LogisticRegression.from_file(tmp_path / "model.npz")
    with pytest.raises(NotFittedError):
        LinearSVM().to_file(tmp_path / "other.npz")


def test_it_is_tuned_as_any_estimator():
    X, y = problem()
    model = make_pipeline(MaxAbsScaler(), LogisticRegression(max_iter=20, tol=None))
    search = GridSearchCV(model, {"logisticregression__l2": [1e-4, 10.0]})
    assert search.fit(X, y).best_params_ == {"logisticregression__l2": 1e-4}


@pytest.mark.parametrize(
    "parameters,what",
    [
        ({"l2": -1}, "l2 must be at least 0"),
        ({"l1": float("nan")}, "l1 must be at least 0"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        ({"average": -1}, "average must be at least 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"max_iter": 0}, "max_iter must be at least 1"),
        ({"learning_rate": 0}, "learning_rate must be 'auto' or a number above 0"),
        ({"learning_rate": "fast"}, "learning_rate must be 'auto' or a number above 0"),
        ({"strategy": "gossip"}, "strategy must be one of dense, sparse, overlapped, .*, not .gossip."),
        ({"schedule": "never"}, "schedule must be a function or one of plateau, constant"),
        ({"class_weight": "fair"}, "'fair' is not known"),
        ({"algorithm": "gossip"}, "gossip"),
    ],
)
def test_parameters_out_of_range_are_refused(parameters, what):
    X, y = problem()
    with pytest.raises(ValueError, match=what):
        LogisticRegression(**parameters).fit(X, y)


def test_negative_weights_of_samples_are_refused():
    X, y = problem()
    with pytest.raises(ValueError, match="must not be negative, but the lowest is -2"):
        LogisticRegression().fit(X, y, np.full(len(y), -2))


def test_too_few_passes_are_told():
    X, y = problem()
    with pytest.warns(ConvergenceWarning, match="max_iter = 2"):
        LogisticRegression(max_iter=2).fit(X, y)


def test_a_line_is_printed_for_every_pass_on_demand(capsys):
    X, y = problem()
    LogisticRegression(solver="sgd", max_iter=3, tol=None, verbose=1).fit(X, y)
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"solver sgd, l2 {1 / len(y):.6g}, l1 0"
    assert [line.split(":")[0] for line in others] == ["pass 1", "pass 2", "pass 3"]


@pytest.mark.parametrize("schedule", [*SCHEDULES, lambda rate: Constant(rate / 2)])
def test_any_schedule_may_be_chosen(schedule):
    X, y = problem()
    assert LogisticRegression(schedule=schedule, max_iter=50, tol=None).fit(X, y).score(X, y) > 0.9


def test_l1_leaves_weights_of_zero():
    X, y = problem(samples=400)
    X = np.hstack([X, np.random.default_rng(0).standard_normal((400, 30))])  # which decide nothing
    full, thin = (LogisticRegression(l1=l1).fit(X, y) for l1 in (0.0, 0.02))
    assert np.count_nonzero(full.coef_) == 42
    assert np.count_nonzero(thin.coef_[0, 12:]) < 10
    assert thin.score(X, y) > 0.9


def test_an_average_swings_less_than_the_last_weights():
    X, y = problem(samples=400)
    noisy = {"batch_size": 5, "learning_rate": 20.0, "momentum": 0.0, "max_iter": 20, "tol": None}
    epochs = (LogisticRegression(average=average, **noisy).fit(X, y).history_[0][-10:] for average in (False, True, 800))
    last, mean, late = (np.ptp([epoch.loss for epoch in history]) for history in epochs)
    assert mean < 0.7 * last
    assert late < 0.7 * last


def test_threads_change_no_bit():
    X, y = problem(samples=400)
    weights = [LinearSVM(solver="sgd", threads=threads, max_iter=5, tol=None).fit(X, y).coef_ for threads in (1, 2, 3)]
    np.testing.assert_array_equal(weights[0], weights[1])
    np.testing.assert_array_equal(weights[0], weights[2])


def passes(estimator, times, X, y, **parameters):
    """As many calls of `partial_fit` with the same samples, and one of `fit` with as many passes."""
    classes = {} if estimator is LinearRegression else {"classes": np.unique(y)}
    parted = estimator(tol=None, **parameters)
    for _ in range(times):
        parted.partial_fit(X, y, **classes)
    return parted, estimator(tol=None, max_iter=times, **parameters).fit(X, y)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    "parameters",
    [
        {"momentum": 0.9},
        {"momentum": 0.0},
        {"momentum": 0.9, "l1": 0.01, "l2": 0.1},
        {"average": True},
        {"average": 25, "momentum": 0.0},
        {"average": 25, "momentum": 0.5, "l1": 0.01},
        {"schedule": "inverse-time", "l2": 0.1},
        {"schedule": "bold-driver"},
        {"schedule": lambda rate: LargeBatch(Constant(rate / 4), 4, 30)},
        {"strategy": "gtopk", "density": 0.3},
        {"batch_size": 30},
    ],
    ids=lambda parameters: ",".join(f"{name}={getattr(value, '__name__', value)}" for name, value in parameters.items()),
)
def test_calls_of_partial_fit_go_on_where_the_last_ended(estimator, parameters):
    X, y = problem()
    y = X @ np.arange(12.0) / 10 if estimator is LinearRegression else y
    given = {"l2": 0.05, "learning_rate": 0.05, "schedule": "constant", "batch_size": 200} | parameters
    parted, whole = passes(estimator, 40, X, y, **given)
    np.testing.assert_allclose(parted.coef_, whole.coef_, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(parted.intercept_, whole.intercept_, rtol=1e-6, atol=1e-9)
    figure = "loss" if "bold-driver" in parameters.values() else "progressive_loss"  # which is all that others measure of a call
    assert getattr(parted.history_[0][-1], figure) == pytest.approx(getattr(whole.history_[0][-1], figure))
    assert parted.history_[0][-1].learning_rate == pytest.approx(whole.history_[0][-1].learning_rate)


@pytest.mark.parametrize("l1,l2", [(0.0, 0.1), (0.02, 0.0)])
def test_partial_fit_penalises_as_fit_does(l1, l2):
    X, y = problem(samples=400)
    models = passes(LogisticRegression, 300, X, y, l1=l1, l2=l2, batch_size=400)  # a step a call
    np.testing.assert_allclose(models[0].coef_, models[1].coef_, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("average", [False, True])
def test_a_pickled_model_goes_on_as_the_model_itself(average):
    X, y = problem()
    model = LogisticRegression(average=average, batch_size=50).partial_fit(X, y, classes=["ant", "bee"])
    twins = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    for twin in (model, *twins):
        twin.partial_fit(X / 2, y)
    for twin in twins:
        np.testing.assert_array_equal(twin.coef_, model.coef_)


def test_a_pickle_from_before_its_classes_moved_is_read(tmp_path):
    X, y = problem()
    model = LogisticRegression(schedule=SCHEDULES["inverse-time"], strategy="dense").partial_fit(X, y, classes=["ant", "bee"])
    del model.early_stopping, model.validation_fraction  # which there was not yet
    pickled = pickle.dumps((model, X), protocol=2)  # which writes names as lines of text
    earlier = {"estimators.classes\n": "estimators\n", "estimators.progress\nProgress\n": "estimator_base\n_Progress\n"}
    earlier |= {"training.epoch\n": "trainer\n", "training.schedules\n": "schedules\n"}
    for now, before in earlier.items():
        found = f"csparseallreduce.linear.{now}".encode()
        assert found in pickled
        pickled = pickled.replace(found, f"csparseallreduce.linear.{before}".encode())
    (tmp_path / "earlier.pickle").write_bytes(pickled)
    code = "import pickle, sys; model, X = pickle.load(open(sys.argv[1], 'rb')); model.get_params(); "
    code += "print(*model.predict(X)); print(len(model.history_[0]))"
    command = [sys.executable, "-c", code, str(tmp_path / "earlier.pickle")]
    environment = os.environ | {"PYTHONPATH": str(Path(sar.__file__).parents[1])}
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert said.stdout.split() == [*model.predict(X), "1"]


def test_weights_that_were_set_are_gone_on_from():
    X, y = problem()
    model = LogisticRegression(average=True, batch_size=50).partial_fit(X, y, classes=["ant", "bee"])
    model.coef_ = np.full((1, 12), 5.0)
    model.partial_fit(X[:1], y[:1])
    np.testing.assert_allclose(model.coef_, 5.0, atol=0.5)


@pytest.mark.parametrize("average", [False, True])
def test_weights_that_were_changed_in_place_are_gone_on_from(average):
    X, y = problem()
    model = LogisticRegression(average=average, batch_size=50).partial_fit(X, y, classes=["ant", "bee"])
    model.coef_[:], model.intercept_[:] = 5.0, -3.0
    model.partial_fit(X[:1], y[:1], sample_weight=[1e-9])
    np.testing.assert_allclose(model.coef_, 5.0, atol=0.1)
    np.testing.assert_allclose(model.intercept_, -3.0, atol=0.1)


def large_batches(rate):
    return LargeBatch(Constant(rate))


SETTINGS = [
    {"momentum": 0.0},
    {"average": True},
    {"l1": 0.01},
    {"l2": 0.5},
    {"strategy": "oktopk", "density": 0.3},
    {"fit_intercept": False},
    {"schedule": "bold-driver"},
    {"schedule": "inverse-time"},
    {"schedule": large_batches},
    {"learning_rate": 0.01},
    {"scale_features": False},
]


def named(setting):
    """Functions by name, not by address: processes that share tests collect the same ones."""
    return " ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in setting.items()) or "defaults"


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("first", [{}, *SETTINGS], ids=named)
@pytest.mark.parametrize("then", [{}, *SETTINGS], ids=named)
def test_parameters_may_change_between_partial_fits(first, then):
    """What calls before have left is taken up where it still means something."""
    X, y = problem()
    model = LogisticRegression(batch_size=50)
    for number, changed in enumerate((first, then, first)):
        model = clone_with(model, changed).partial_fit(X, y, **({} if number else {"classes": np.unique(y)}))
        assert np.isfinite(model.coef_).all() and np.isfinite(model.intercept_).all()
        if not model.fit_intercept:
            assert model.intercept_ == 0
            expected = np.where((X @ model.coef_[0]) > 0, "bee", "ant")
            np.testing.assert_array_equal(model.predict(X), expected)


def clone_with(model, changed):
    """The model with the defaults but for these parameters, and all that it has learned."""
    return model.set_params(**{**LogisticRegression(batch_size=50).get_params(), **changed})


@pytest.mark.parametrize("average", [False, True])
def test_features_that_turn_out_larger_change_nothing_that_was_learned(average):
    X, y = problem()
    settings = {"average": average, "learning_rate": 0.01, "schedule": "constant", "l2": 0.0, "scale_features": True}
    model = LogisticRegression(**settings).partial_fit(X, y, classes=["ant", "bee"])
    before = model.coef_.copy()
    far = scipy.sparse.csr_array(([1e9], ([0], [3])), shape=(1, 12))
    model.partial_fit(far, ["bee"], sample_weight=[1e-12])
    still = np.arange(12) != 3
    if not average:
        assert (np.abs(model.coef_ - before)[0, still] > 0).all()  # the velocity lasts
    np.testing.assert_allclose(model.coef_[0, still], before[0, still], rtol=1)
    assert abs(model.coef_[0, 3] - before[0, 3]) < 1e-6


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_weights_of_samples_multiply_the_loss_of_a_partial_fit(estimator):
    X, y = problem()
    y = X @ np.arange(12.0) if estimator is LinearRegression else y
    classes = {} if estimator is LinearRegression else {"classes": np.unique(y)}

    def learned(rate, l2, weight, calls=3):
        model = estimator(learning_rate=rate, l2=l2, batch_size=50)
        for _ in range(calls):
            model.partial_fit(X, y, sample_weight=None if weight is None else np.full(200, weight), **classes)
        return np.append(model.coef_, model.intercept_)

    np.testing.assert_allclose(learned(0.01, 0.2, 2.0), learned(0.02, 0.1, None), rtol=1e-9)  # as with SGDClassifier
    assert np.abs(learned(0.01, 0.2, 2.0) - learned(0.01, 0.2, None)).max() > 1e-3
    whole = [estimator(l2=1e-3, max_iter=5, tol=None).fit(X, y, weight).coef_ for weight in (None, np.full(200, 2.0))]
    np.testing.assert_allclose(*whole, rtol=1e-12)  # in fit they count as repetitions, of which a mean loss does not know


def test_the_automatic_rate_of_partial_fits_never_rises():
    X, y = problem()
    model = LogisticRegression(batch_size=50)
    rates = []
    for scale in (1, 0.01, 1, 0.01):
        model.partial_fit(scale * X, y, classes=["ant", "bee"])
        rates.append(model.history_[0][-1].learning_rate)
    assert rates[0] == pytest.approx(rates[1]) == pytest.approx(rates[2]) == pytest.approx(rates[3])


@pytest.mark.parametrize("estimator", [LogisticRegression, LinearSVM, LinearRegression])
def test_early_stopping_gives_the_best_weights_on_samples_held_out(estimator):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((120, 100))
    y = X[:, 0] + 2 * rng.standard_normal(120)
    y = y if estimator is LinearRegression else (y > 0).astype(int)
    settings = {"early_stopping": True, "validation_fraction": 0.25, "l2": 0.0, "batch_size": 16, "random_state": 3}
    model = estimator(**settings, max_iter=300).fit(X, y)
    losses = [epoch.validation_loss for epoch in model.history_[0]]
    best = int(np.argmin(losses))
    assert best + 1 < len(losses) < 300
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        short = estimator(**settings, max_iter=best + 1).fit(X, y)
    np.testing.assert_array_equal(model.coef_, short.coef_)
    assert estimator(**settings | {"early_stopping": False}, max_iter=5, tol=None).fit(X, y).history_[0][0].validation_loss is None


def test_early_stopping_is_for_fit_and_a_share_of_the_samples():
    X, y = np.eye(4), np.array([0, 0, 1, 1])
    with pytest.raises(ValueError, match="partial_fit does not support early_stopping"):
        LogisticRegression(early_stopping=True).partial_fit(X, y, [0, 1])
    with pytest.raises(ValueError, match="validation_fraction must be above 0 and below 1"):
        LogisticRegression(early_stopping=True, validation_fraction=1.0).fit(X, y)
    with pytest.raises(ValueError, match="none can be held out"):
        LinearRegression(early_stopping=True).fit(X[:1], y[:1])


def sparse_problem(samples=300, features=20_000, seed=0):
    """Rows of few features, some of them rare, and what a linear model says of them."""
    rng = np.random.default_rng(seed)
    counts = np.minimum(rng.zipf(1.3, (samples, 40)) - 1, features - 1)
    X = scipy.sparse.csr_array((np.ones(counts.size), counts.ravel(), np.arange(0, counts.size + 1, 40)), shape=(samples, features))
    X.sum_duplicates()
    X.data[:] = 1.0
    return X, np.where(X @ rng.standard_normal(features) > 0, "bee", "ant")


def test_many_features_are_trained_by_adaptive_steps_and_few_are_not():
    X, y = sparse_problem()
    settings = {"solver": "sgd", "max_iter": 20, "tol": None}
    by = {update: LogisticRegression(update=update, **settings).fit(X, y) for update in ("auto", "ftrl", "sgd")}
    assert by["auto"]._pick is not None  # the rate of adaptive steps, which is not picked for those that are asked for
    assert by["ftrl"]._pick is None
    assert (by["auto"].coef_ != by["sgd"].coef_).any()
    assert by["auto"].score(X, y) > 0.95
    few = X[:, :9999]
    few_by = [LogisticRegression(update=update, **settings).fit(few, y) for update in ("auto", "sgd")]
    np.testing.assert_array_equal(few_by[0].coef_, few_by[1].coef_)


@pytest.mark.parametrize("asked", [{"momentum": 0.5}, {"average": True}, {"schedule": "plateau"}, {"schedule": "inverse-time"}], ids=str)
def test_parameters_of_sgd_choose_it_and_go_with_no_other_update(asked):
    X, y = sparse_problem()
    chosen, named = (LogisticRegression(**asked, **update, max_iter=5, tol=None).fit(X, y) for update in ({}, {"update": "sgd"}))
    np.testing.assert_array_equal(chosen.coef_, named.coef_)
    with pytest.raises(ValueError, match=f"{next(iter(asked))}=.* is for the update 'sgd', not for 'ftrl'"):
        LogisticRegression(**asked, update="ftrl").fit(X, y)
    with pytest.raises(ValueError, match="update must be one of auto, sgd, ftrl, arow, not 'adam'"):
        LogisticRegression(update="adam").fit(X, y)


@pytest.mark.parametrize("asked", [{"learning_rate": 0.3}, {"strategy": "oktopk"}], ids=str)
def test_rates_that_are_given_and_lossy_strategies_choose_sgd_and_go_with_both(asked):
    X, y = sparse_problem()
    fits = [LogisticRegression(**asked, **update, max_iter=5, tol=None).fit(X, y) for update in ({}, {"update": "sgd"}, {"update": "ftrl"})]
    np.testing.assert_array_equal(fits[0].coef_, fits[1].coef_)
    assert (fits[2].coef_ != fits[0].coef_).any()


def test_adaptive_steps_end_by_the_loss_on_the_way_and_measure_no_pass():
    X, y = sparse_problem()
    model = LogisticRegression(solver="sgd").fit(X, y)
    assert not any(epoch.evaluated for epoch in model.history_[0])
    losses = [epoch.progressive_loss for epoch in model.history_[0]]
    assert losses[-1] < losses[0] and 3 <= model.n_iter_ < 100
    held_out = LogisticRegression(early_stopping=True, update="ftrl").fit(X, y)
    assert all(epoch.validation_loss is not None for epoch in held_out.history_[0])


@pytest.mark.parametrize("choice", ["multinomial", "ovr"])
def test_adaptive_steps_train_all_classes_at_once(choice):
    X, y = sparse_problem()
    y = np.where(X[:, 3].toarray().ravel() > 0, "cat", y)
    settings = {"update": "ftrl", "max_iter": 20, "tol": None, "l2": 1e-4}
    model = LogisticRegression(multi_class=choice, **settings).fit(X, y)
    assert model.coef_.shape == (3, X.shape[1]) and model.score(X, y) > 0.95
    if choice == "ovr":
        for number, label in enumerate(model.classes_):
            alone = LogisticRegression(**settings).fit(X, y == label)
            np.testing.assert_allclose(model.coef_[number], alone.coef_[0], rtol=1e-3, atol=1e-4)


def test_plain_steps_are_by_name_what_they_were():
    X, y = problem()
    named = {"schedule": "plateau", "momentum": 0.9, "batch_size": 256, "tol": 1e-4, "n_iter_no_change": 5}
    np.testing.assert_array_equal(*(LogisticRegression(**k).fit(X, y).coef_ for k in ({"solver": "sgd"}, {"update": "sgd"} | named)))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_adaptive_steps_need_no_tuning_to_the_scale_of_features_and_labels(estimator, scale):
    X, y = sparse_problem()
    plain = {"l2": 0.0, "max_iter": 10, "tol": None, "scale_features": False, "update": "ftrl", "fit_intercept": False}
    if estimator is LinearRegression:
        y = X @ np.random.default_rng(1).standard_normal(X.shape[1])
        one, other = estimator(**plain).fit(X, y), estimator(**plain).fit(X * scale, y * 7.0)
        np.testing.assert_allclose(other.coef_ * scale / 7.0, one.coef_, rtol=1e-3, atol=1e-4)
        assert one.score(X, y) > 0.8
    else:
        one, other = estimator(**plain).fit(X, y), estimator(**plain).fit(X * scale, y)
        np.testing.assert_allclose(other.coef_ * scale, one.coef_, rtol=1e-3, atol=1e-4)


def test_arow_is_of_the_svm_of_two_classes():
    X, y = sparse_problem()
    assert LinearSVM(update="arow").fit(X, y).score(X, y) > 0.9
    with pytest.raises(ValueError, match="the update arow is for the model svm, not for logistic"):
        LogisticRegression(update="arow").fit(X, y)
    with pytest.raises(ValueError, match="the update arow has one score per sample"):
        LinearSVM(update="arow").fit(X, np.arange(len(y)) % 3)
    parted = LinearSVM(update="arow", tol=None, l2=1e-3)
    for _ in range(4):
        parted.partial_fit(X, y, classes=["ant", "bee"])
    whole = LinearSVM(update="arow", tol=None, l2=1e-3, max_iter=4).fit(X, y)
    np.testing.assert_allclose(parted.coef_, whole.coef_, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("penalties", [{"l2": 0.0}, {"l2": 1e-3, "l1": 1e-4}], ids=str)
def test_calls_of_partial_fit_go_on_with_adaptive_steps(penalties):
    X, y = sparse_problem()
    parted = LogisticRegression(update="ftrl", tol=None, **penalties)
    for _ in range(4):
        parted.partial_fit(X, y, classes=["ant", "bee"])
    whole = LogisticRegression(update="ftrl", tol=None, max_iter=4, **penalties).fit(X, y)
    np.testing.assert_allclose(parted.coef_, whole.coef_, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(parted.intercept_, whole.intercept_, rtol=1e-6, atol=1e-9)
    parted.set_params(update="sgd").partial_fit(X, y)  # of whose memory adaptive weights have none, nor the other way round
    parted.set_params(update="ftrl").partial_fit(X, y)
    assert parted.score(X, y) > 0.8
