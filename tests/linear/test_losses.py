"""Training by other losses ends where scikit-learn's solvers do; files and commands carry the loss."""

import numpy as np
import pytest
import scipy.sparse
from click_runner import CliRunner
from sklearn.datasets import dump_svmlight_file
from sklearn.linear_model import HuberRegressor, PoissonRegressor, QuantileRegressor
from sklearn.svm import LinearSVC
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.cli import main
from sparseallreduce.linear import (
    Constant,
    Dataset,
    DatasetError,
    LinearRegression,
    LinearSVM,
    ModelFileError,
    Options,
    SparseStrategy,
    Trainer,
    load_model,
    model_of,
)

RNG = np.random.default_rng(0)
X = RNG.standard_normal((400, 6)) * (RNG.random((400, 6)) < 0.6)
TRUE = np.array([1.0, -2, 0.5, 0, 3, -0.3])
NOISY = X @ TRUE + 1.5 + np.where(RNG.random(400) < 0.1, 20, 0.5) * RNG.standard_normal(400)
COUNTS = RNG.poisson(np.exp(X @ TRUE / 3 + 0.5)).astype(float)
CLASSES = np.where(NOISY > 1.5, 1, -1)


def objective(model, coef, intercept, y, l2, l1=0.0):
    return model.loss(X @ coef + intercept, y).mean() + l2 / 2 * coef @ coef + l1 * np.abs(coef).sum()


def near(model, ours, theirs, y, l2, share, l1=0.0):
    """Our objective is at most a share above theirs, which is the least."""
    least = objective(model, theirs.coef_.ravel(), np.ravel(theirs.intercept_)[0], y, l2, l1)
    found = objective(model, ours.coef_.ravel(), np.ravel(ours.intercept_)[0], y, l2, l1)
    assert least - 1e-6 <= found <= least * (1 + share), (found, least)


def test_huber_is_huber_regressor_s_of_the_scale_that_it_finds():
    theirs = HuberRegressor(epsilon=1.35, alpha=0.0, max_iter=1000, tol=1e-8).fit(X, NOISY)
    ours = LinearRegression(loss="huber", epsilon=1.35 * theirs.scale_, l2=0, tol=1e-6, scale_features=False).fit(X, NOISY)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=0.02)
    assert ours.intercept_ == pytest.approx(theirs.intercept_, abs=0.02)
    squared = LinearRegression(l2=0).fit(X, NOISY)
    assert np.abs(ours.coef_ - TRUE).max() < 0.5 * np.abs(squared.coef_ - TRUE).max()


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.8])
def test_quantiles_are_quantile_regressor_s(quantile):
    theirs = QuantileRegressor(quantile=quantile, alpha=0.0).fit(X, NOISY)
    ours = LinearRegression(loss="quantile", quantile=quantile, l2=0, scale_features=False).fit(X, NOISY)
    near(model_of("linear", "quantile", quantile), ours, theirs, NOISY, 0, 0.01)
    assert np.mean(ours.predict(X) > NOISY) == pytest.approx(quantile, abs=0.04)


@pytest.mark.parametrize("factor", [1e-3, 1e5])
def test_a_quantile_is_found_whatever_the_unit_of_the_labels(factor):
    theirs = QuantileRegressor(quantile=0.3, alpha=0.0).fit(X, NOISY * factor)
    ours = LinearRegression(loss="quantile", quantile=0.3, l2=0).fit(X, NOISY * factor)
    near(model_of("linear", "quantile", 0.3), ours, theirs, NOISY * factor, 0, 0.01)


@pytest.mark.parametrize("l2", [0.01, 1.0])
def test_poisson_is_poisson_regressor_s(l2):
    theirs = PoissonRegressor(alpha=l2, tol=1e-10, max_iter=1000).fit(X, COUNTS)
    ours = LinearRegression(loss="poisson", l2=l2, tol=1e-7, scale_features=False).fit(X, COUNTS)
    near(model_of("linear", "poisson"), ours, theirs, COUNTS, l2, 1e-3)
    np.testing.assert_allclose(ours.predict(X), theirs.predict(X), rtol=0.05)
    assert ours.score(X, COUNTS) == pytest.approx(1 - np.square(COUNTS - ours.predict(X)).sum() / np.square(COUNTS - COUNTS.mean()).sum())
    with pytest.raises(ValueError, match="the loss poisson is undefined for labels below 0"):
        LinearRegression(loss="poisson").fit(X, NOISY)


def test_the_squared_hinge_is_liblinear_s():
    l2 = 0.01
    theirs = LinearSVC(loss="squared_hinge", C=1 / (len(X) * l2), intercept_scaling=1e4, tol=1e-8, max_iter=100_000).fit(X, CLASSES)
    ours = LinearSVM(loss="squared_hinge", l2=l2, tol=1e-7, scale_features=False).fit(X, CLASSES)
    near(model_of("svm", "squared_hinge"), ours, theirs, CLASSES, l2, 1e-3)
    assert ours.loss == "squared_hinge" and LinearSVM().loss == "auto"


@pytest.mark.parametrize(
    "estimator",
    [
        LinearSVM(loss="squared_hinge"),
        LinearRegression(loss="huber", epsilon=0.7),
        LinearRegression(loss="quantile", quantile=0.2),
        LinearRegression(loss="poisson"),
    ],
    ids=lambda estimator: estimator.loss,
)
def test_files_carry_the_loss(tmp_path, estimator):
    y = CLASSES if isinstance(estimator, LinearSVM) else COUNTS
    estimator.set_params(max_iter=5, tol=None).fit(X, y)
    estimator.to_file(tmp_path / "m.npz")
    again = type(estimator).from_file(tmp_path / "m.npz")
    assert {name: value for name, value in again.get_params().items() if name in ("loss", "epsilon", "quantile")} == {
        name: value for name, value in estimator.get_params().items() if name in ("loss", "epsilon", "quantile")
    }
    np.testing.assert_array_equal(again.predict(X), estimator.predict(X))
    np.testing.assert_array_equal(load_model(tmp_path / "m.npz").predict(X), estimator.predict(X))
    with pytest.raises(ModelFileError, match="holds a model of loss"):
        type(estimator).from_file(tmp_path / "m.npz", loss="hinge" if isinstance(estimator, LinearSVM) else "squared")
    version = str(np.load(tmp_path / "m.npz")["format"])[-1]
    assert version == ("2" if estimator.loss == "poisson" else "1")  # which earlier releases refuse: they know no exponential


def command(*arguments, status=0):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result


def test_commands_train_by_a_loss_and_predict_what_it_says(tmp_path):
    dump_svmlight_file(scipy.sparse.csr_array(X), COUNTS, str(tmp_path / "a.svm"), zero_based=False)
    given = ("train", tmp_path / "a.svm", "--intercept", "--epochs", 60, "--batch-size", 50, "--learning-rate", 0.05)
    command(*given, "--model", "linear", "--loss", "poisson", "--l2", 0.01, "--model-out", tmp_path / "m.npz")
    command("predict", tmp_path / "m.npz", tmp_path / "a.svm", "--out", tmp_path / "out")
    predicted = np.loadtxt(tmp_path / "out")
    theirs = PoissonRegressor(alpha=0.01).fit(X, COUNTS)
    np.testing.assert_allclose(predicted, theirs.predict(X), rtol=0.1)
    command(*given, "--model", "linear", "--loss", "quantile", "--quantile", 0.9, "--model-out", tmp_path / "q.npz")
    assert (load_model(tmp_path / "q.npz").loss, load_model(tmp_path / "q.npz").parameter) == ("quantile", 0.9)
    for extra, says in (
        (("--loss", "huber"), "--loss of --model logistic is log"),
        (("--model", "svm", "--loss", "poisson"), "--loss of --model svm is hinge or squared_hinge"),
        (("--model", "linear", "--epsilon", 1), "--epsilon is for --loss huber"),
        (("--model", "linear", "--loss", "huber", "--quantile", 0.5), "--quantile is for --loss quantile"),
    ):
        assert says in command(*given, *extra, status=2).stderr
    (tmp_path / "negative.svm").write_text("1 1:1\n-2 1:1\n")
    refused = command("train", tmp_path / "negative.svm", "--model", "linear", "--loss", "poisson", status=1)
    assert "sample 1 has the label -2, for which the loss poisson is undefined" in refused.stderr


def test_ranks_that_train_by_different_losses_are_told():
    dataset = Dataset.from_scipy(scipy.sparse.csr_array(X), NOISY)

    def trained(comm):
        model = model_of("linear", "huber", 1.0 + comm.rank)
        return Trainer(model, SparseStrategy(dataset, comm), Constant(0.1), Options(1, 10))

    errors = on_ranks(2, trained)
    assert {str(error) for error in errors} == {str(errors[0])}
    assert "the model is linear, huber of 1.0 (Huber) on rank 0 and linear, huber of 2.0 (Huber) on rank 1" in str(errors[0])
    with pytest.raises(DatasetError, match="for which the loss poisson is undefined"):
        Trainer(model_of("linear", "poisson"), SparseStrategy(dataset, sar.SERIAL), Constant(0.1), Options(1, 10))
