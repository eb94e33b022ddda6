"""Models as scikit-learn's own estimators: the same predictions, and nothing of this library in a pickle of them."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.linear_model import LogisticRegression as TheirLogistic
from sklearn.linear_model import PoissonRegressor, Ridge
from sklearn.multiclass import OneVsRestClassifier
from sklearn.svm import LinearSVC

import sparseallreduce as sar
from sparseallreduce.linear import FittedModel, LinearRegression, LinearSVM, LogisticRegression, load_model

RNG = np.random.default_rng(2)
X = RNG.standard_normal((80, 5))
LABELS = {classes: np.array(["ant", "bee", "cat"])[X[:, :classes].argmax(axis=1)] for classes in (2, 3)}
COUNTS = RNG.poisson(np.exp(X[:, 0] / 2)).astype(float)
SAME = {"rtol": 1e-6, "atol": 1e-9}

MODELS = {
    "logistic": (LogisticRegression(), LABELS[2], TheirLogistic),
    "softmax": (LogisticRegression(), LABELS[3], TheirLogistic),
    "one against the rest": (LogisticRegression(multi_class="ovr"), LABELS[3], OneVsRestClassifier),
    "svm": (LinearSVM(), LABELS[2], LinearSVC),
    "svm of three": (LinearSVM(loss="hinge"), LABELS[3], LinearSVC),
    "without intercept": (LinearSVM(fit_intercept=False), (X[:, 0] > 0).astype(int), LinearSVC),
    "numbers": (LinearRegression(), X.sum(axis=1) + 3, Ridge),
    "quantile": (LinearRegression(loss="quantile", quantile=0.8), X.sum(axis=1), Ridge),
    "counts": (LinearRegression(loss="poisson"), COUNTS, PoissonRegressor),
}


def agree(ours, theirs):
    np.testing.assert_allclose(*(model.predict(X) for model in (ours, theirs)), **SAME) if LinearRegression is type(
        ours
    ) else np.testing.assert_array_equal(ours.predict(X), theirs.predict(X))
    for method in ("decision_function", "predict_proba"):
        if hasattr(ours, method):
            np.testing.assert_allclose(getattr(theirs, method)(X), getattr(ours, method)(X), **SAME)
            np.testing.assert_allclose(getattr(theirs, method)(csr_array(X)), getattr(ours, method)(X), **SAME)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_scikit_learns_estimator_predicts_the_same(tmp_path, name, dtype):
    estimator, y, kind = MODELS[name]
    ours = estimator.set_params(comm=sar.SERIAL, max_iter=50, tol=None).fit(X.astype(dtype), y)
    theirs = ours.to_sklearn()
    assert type(theirs) is kind
    if dtype == np.float64:
        agree(ours, theirs)
        agree(ours, pickle.loads(pickle.dumps(theirs)))
    ours.to_file(tmp_path / "model.npz")
    np.testing.assert_array_equal(load_model(tmp_path / "model.npz").to_sklearn().predict(X), theirs.predict(X))
    if name != "counts":  # whose score is of the deviance in scikit-learn
        assert theirs.score(X, y) == pytest.approx(ours.score(X, y), abs=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_pickle_of_it_needs_scikit_learn_alone(name):
    estimator, y, _ = MODELS[name]
    ours = estimator.set_params(comm=sar.SERIAL, max_iter=50, tol=None).fit(X, y)
    assert b"sparseallreduce" not in pickle.dumps(ours.to_sklearn())


def test_a_process_without_this_library_predicts(tmp_path):
    ours = LogisticRegression(comm=sar.SERIAL, multi_class="ovr").fit(X, LABELS[3])
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((ours.to_sklearn(), X, ours.predict_proba(X))))
    program = (
        "import pickle, sys, numpy\nsys.modules['sparseallreduce'] = None\n"
        f"model, X, wanted = pickle.load(open({str(tmp_path / 'model.pickle')!r}, 'rb'))\n"
        "numpy.testing.assert_allclose(model.predict_proba(X), wanted, rtol=1e-6)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("kind,classes", [("logistic", 2), ("multinomial", 3), ("logistic", 3), ("svm", 3), ("linear", 0)])
def test_sparse_weights_stay_sparse_where_scikit_learn_takes_them(kind, classes):
    dense = np.where(RNG.random((max(classes - 1, 1) if classes < 3 else 3, 5)) < 0.5, RNG.standard_normal(5), 0)
    intercept = np.zeros(3) if classes > 2 else 0.0
    model = FittedModel(kind, csr_array(dense), intercept, np.arange(classes))
    theirs = model.to_sklearn()
    np.testing.assert_allclose(theirs.predict(X), model.predict(X), **SAME)
    if model.gives_probabilities:
        np.testing.assert_allclose(theirs.predict_proba(X), model.predict_proba(X), **SAME)


def test_names_of_columns_go_with_it():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=list("abcde"))
    ours = LogisticRegression(comm=sar.SERIAL).fit(frame, LABELS[2])
    assert ours.to_sklearn().feature_names_in_.tolist() == list("abcde")
