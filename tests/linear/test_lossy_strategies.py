"""Lossy strategies on one rank: what they promise beside what every strategy does, from the class to the command."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from click_runner import CliRunner

import sparseallreduce as sar
from sparseallreduce.cli import main
from sparseallreduce.linear import (
    LOSSY,
    MODELS,
    STRATEGIES,
    Checkpoints,
    Constant,
    Dataset,
    Descent,
    DivergenceError,
    LogisticRegression,
    Options,
    SparseStrategy,
    StepDecay,
    Trainer,
    load,
    two_classes,
)
from sparseallreduce.linear.strategies.residuals import gathered, own_share
from sparseallreduce.reducers import REDUCERS

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
ALL = pytest.mark.parametrize("name", LOSSY)


def problem(rows=120, features=200, seed=1):
    rng = np.random.default_rng(seed)
    matrix = np.where(rng.random((rows, features)) < 0.2, rng.standard_normal((rows, features)), 0).astype(np.float32)
    return Dataset.from_scipy(scipy.sparse.csr_array(matrix), np.where(matrix @ rng.standard_normal(features) > 0, 1.0, -1.0))


def trainer(strategy, descent=None, schedule=None, folder=None, epochs=4, dataset=None):
    made = strategy(dataset or problem(), sar.SERIAL, descent or Descent(1e-3, True))
    checkpoints = None if folder is None else Checkpoints(folder, every_steps=5)
    return Trainer(MODELS["logistic"](), made, schedule or Constant(0.3), Options(epochs, 10), checkpoints=checkpoints)


def trained(*arguments, **options):
    made = trainer(*arguments, **options)
    list(made.run())
    return made


@pytest.mark.parametrize("name", [name for name in LOSSY if name != "gaussiank"])  # which never says how many it takes
@pytest.mark.parametrize("descent", [Descent(1e-3, True), Descent(1e-3, False, 1e-4, 0.8, True, average_from=5)])
def test_all_entries_end_where_the_sparse_strategy_does(name, descent):
    schedule = StepDecay(0.2, 0.5, every=9)
    lossy = trained(partial(STRATEGIES[name], density=1.0), descent, schedule)
    sparse = trained(SparseStrategy, descent, schedule)
    expected = sparse.weights.to_array()
    assert np.any(expected)
    np.testing.assert_allclose(lossy.weights.to_array(), expected, rtol=1e-4, atol=1e-5)
    assert lossy.strategy.measures()["residual_norm"] == 0


@ALL
def test_weights_and_residuals_hold_all_gradients(name):
    """Without penalties, the weights are what the gradients so far have come to, but for what waits in the residual."""
    made = trainer(partial(STRATEGIES[name], density=0.05), Descent(0.0, True), StepDecay(0.3, 0.9, every=1))
    strategy, came_in = made.strategy, np.zeros(201)
    exchange = strategy.update

    def update(gradient, rate):
        came_in[:] += rate * gradient.to_dense()
        exchange(gradient, rate)

    strategy.update = update
    list(made.run())
    residual = strategy.residual
    assert np.any(residual) and np.any(made.weights.to_array())
    np.testing.assert_allclose(residual - made.weights.to_array(), came_in, rtol=1e-4, atol=1e-5)


@ALL
def test_a_rate_of_zero_leaves_weights_and_residual(name):
    made = trainer(partial(STRATEGIES[name], density=0.05), schedule=lambda step: 0.3 if step < 24 else 0.0, epochs=3)
    _, second, third = [(made.weights.to_array(), made.strategy.residual.copy()) for _ in made.run()]
    assert np.any(second[0]) and np.any(second[1])
    np.testing.assert_array_equal(third[0], second[0])
    np.testing.assert_array_equal(third[1], second[1])


@ALL
def test_a_run_that_goes_on_has_the_bits_of_one_that_never_stopped(name, tmp_path):
    strategy = partial(STRATEGIES[name], density=0.03)
    descent = Descent(1e-3, True, 1e-4, 0.5, average_from=10)
    whole = trained(strategy, descent)
    trained(strategy, descent, folder=tmp_path, epochs=2)
    again = trainer(strategy, descent, folder=tmp_path)
    checkpoint, _ = again.checkpoints.prepare(sar.SERIAL, resume=True)
    again.resume(checkpoint)
    assert 0 < again.step < 48
    list(again.run())
    np.testing.assert_array_equal(again.weights.to_array(), whole.weights.to_array())
    np.testing.assert_array_equal(again.strategy.residual, whole.strategy.residual)


@ALL
def test_the_number_of_threads_changes_no_bit(name):
    ends = [trained(partial(STRATEGIES[name], density=0.03, threads=threads)).weights.to_array() for threads in (1, 3)]
    assert np.any(ends[0])
    np.testing.assert_array_equal(*ends)


@ALL
def test_a_rate_too_high_is_noticed(name):
    dataset = problem()
    strategy = STRATEGIES[name](dataset, sar.SERIAL, Descent(0.0, True), density=0.05)
    with pytest.raises(DivergenceError, match="lower the learning rate"), np.errstate(all="ignore"):
        list(Trainer(MODELS["linear"](), strategy, Constant(1e6), Options(30, 10)).run())


@ALL
def test_an_epoch_tells_selection_and_densities(name):
    made = trainer(partial(STRATEGIES[name], density=0.05))
    epoch = list(made.run())[-1]
    assert epoch.seconds["select"] > 0 and epoch.seconds["communicate"] > 0
    assert 0 < epoch.gradient_density <= (1 if name == "hitopk" else 0.1) and 0 < epoch.total_density <= 0.1
    assert epoch.measures["residual_norm"] > 0


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5, float("nan")])
def test_a_density_out_of_range_is_refused(density):
    with pytest.raises(ValueError, match="density must be above 0 and at most 1"):
        STRATEGIES["topka"](problem(), sar.SERIAL, density=density)


def test_few_entries_are_at_least_one():
    assert STRATEGIES["topka"](problem(), sar.SERIAL, density=1e-9).k == 1
    assert STRATEGIES["topka"](problem(), sar.SERIAL, Descent(intercept=True), density=1.0).k == 201


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_residuals_are_shared_out_among_another_number_of_ranks(ranks):
    rng = np.random.default_rng(ranks)
    before = [np.where(rng.random(50) < 0.4, rng.standard_normal(50), 0) for _ in range(3)]
    entries = [np.flatnonzero(residual) for residual in before]
    state = {
        "residual_entries": [len(part) for part in entries],
        "residual_indices": np.concatenate(entries),
        "residual_values": np.concatenate([residual[part] for residual, part in zip(before, entries)]),
    }
    after = []
    for rank in range(ranks):
        after.append(np.full(50, np.nan))
        own_share(state, after[-1], Place(rank, ranks))
    if ranks == 3:
        np.testing.assert_array_equal(after, before)
    np.testing.assert_allclose(sum(after), sum(before), rtol=1e-12, atol=1e-15)


class Place:
    """Of a communicator the rank and the size alone."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def test_a_residual_is_written_as_its_non_zeros():
    state = gathered(np.array([0, 2.5, 0, np.nan], np.float32), sar.SERIAL)
    assert state["residual_entries"] == (2,)
    assert state["residual_indices"].tolist() == [1, 3]
    np.testing.assert_array_equal(state["residual_values"], [2.5, np.nan])


@ALL
def test_estimators_take_the_strategy_and_its_density(name):
    rng = np.random.default_rng(0)
    X = scipy.sparse.random_array((300, 100), density=0.2, rng=rng, dtype=np.float32, format="csr")
    y = X @ rng.standard_normal(100) > 0
    options = {"comm": sar.SERIAL, "max_iter": 60, "tol": None, "momentum": 0.0}
    lossy = LogisticRegression(strategy=name, density=0.1, **options).fit(X, y)
    sparse = LogisticRegression(**options).fit(X, y)
    assert lossy.score(X, y) > sparse.score(X, y) - 0.05
    assert lossy.history_[0][-1].gradient_density <= (1 if name == "hitopk" else 0.2)


@pytest.mark.parametrize(
    "parameters,message",
    [
        ({"strategy": "topka", "density": 0.0}, "density must be above 0 and at most 1, not 0.0"),
        ({"strategy": "topka", "density": "much"}, "density must be above 0 and at most 1, not 'much'"),
        ({"density": 0.1}, "density is for the strategies .*topka.*: leave it out, or use one of them"),
    ],
)
def test_estimators_refuse_a_density_that_makes_no_sense(parameters, message):
    with pytest.raises(ValueError, match=message):
        LogisticRegression(comm=sar.SERIAL, **parameters).fit([[0.0], [1.0]], [0, 1])


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    path = tmp_path_factory.mktemp("lossy") / "samples.csr"
    made = CliRunner().invoke(main, ["generate", "url-like", str(path), "--samples", "600", "--features", "3000"])
    assert made.exit_code == 0, made.output
    return path


def train(path, *arguments, status=0):
    result = CliRunner().invoke(main, ["train", str(path), "--epochs", "3", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


@ALL
def test_the_command_trains_resumes_and_is_drawn(name, samples, tmp_path):
    asked = ["--strategy", name, "--density", 0.02, "--intercept", "--batch-size", 20, "--densities"]
    asked += ["--checkpoint", tmp_path / "kept", "--early-stopping", "loss", "--json", tmp_path / "run.json"]
    train(samples, *asked)
    assert "resumed after step" in train(samples, *asked, "--epochs", 4, "--resume").output
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["arguments"]["density"] == 0.02
    assert [epoch["epoch"] for epoch in report["epochs"]] == [1, 2, 3, 4]
    assert report["epochs"][-1]["loss"] < report["epochs"][0]["loss"]
    assert report["epochs"][-1]["residual_norm"] > 0
    assert report["epochs"][-1]["seconds"]["select"] > 0
    assert len(report["epochs"][0]["gradient_densities"]) == report["epochs"][0]["steps"] == 30
    drawn = CliRunner().invoke(main, ["plot", str(tmp_path / "run.json"), str(tmp_path / "run.png")])
    assert drawn.exit_code == 0, drawn.output
    refused = train(samples, *asked, "--epochs", 4, "--resume", "--density", 0.03, status=1)
    assert "its density is 0.02, and here it is 0.03" in refused.stderr


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--strategy", "topka", "--density", "0"], "0.0 is not in the range"),
        (["--strategy", "topka", "--density", "1.1"], "1.1 is not in the range"),
        (["--density", "0.1"], "--density is for the strategies"),
        (["--strategy", "topka", "--algorithm", "ssar_ring"], "--algorithm is for the strategies"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(samples, arguments, message):
    refused = train(samples, *arguments, status=2)
    assert message in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def phishing():
    """The real URLs, and what the sparse strategy makes of them in one pass."""
    if not SHARED.is_dir():
        pytest.skip("the real data set is not here")
    train, test = load(SHARED / "phishing_url.svm.bz2", SHARED / "phishing_url.t.svm.bz2", comm=sar.SERIAL, n_features=3_231_961)
    train, classes = two_classes(train, sar.SERIAL)
    test, _ = two_classes(test, sar.SERIAL, classes)
    return train, test, accuracy(SparseStrategy, train, test)


def accuracy(strategy, train, test):
    made = Trainer(MODELS["logistic"](), strategy(train, sar.SERIAL), Constant(1.0), Options(1, 200))
    return list(made.run(test))[-1].test_accuracy


@pytest.mark.release
@ALL
def test_real_urls_are_told_from_phishing_by_one_entry_in_a_thousand(phishing, name):
    train, test, expected = phishing
    found = accuracy(partial(STRATEGIES[name], density=0.001), train, test)
    assert expected > 0.985
    assert found > expected - 0.002


@pytest.fixture(scope="module")
def folded(phishing):
    """Some of the real URLs, with features folded to 2**13, and what four ranks make of them in 150 dense steps."""
    matrix = phishing[1].to_scipy()
    matrix = scipy.sparse.csr_array((matrix.data.copy(), matrix.indices % 2**13, matrix.indptr.copy()), shape=(matrix.shape[0], 2**13))
    matrix.sum_duplicates()
    samples = matrix, phishing[1].labels
    return *samples, descended(*samples, 4, lambda gradients: np.mean(gradients, axis=0))


def descended(matrix, labels, ranks, mean, steps=150, batch=16, rate=0.3):
    """Loss and accuracy of logistic regression after some steps by the mean of the ranks' gradients."""
    rng, weights = np.random.default_rng(0), np.zeros(matrix.shape[1], np.float32)
    for _ in range(steps):
        gradients = []
        for _ in range(ranks):
            rows = rng.choice(len(labels), batch, replace=False)
            slopes = -labels[rows] / (1 + np.exp(labels[rows] * (matrix[rows] @ weights))) / batch
            gradients.append((matrix[rows].T @ slopes).astype(np.float32))
        weights -= rate * mean(gradients)
    margins = labels * (matrix @ weights)
    return np.logaddexp(0, -margins).mean(), (margins > 0).mean()


@ALL
def test_four_ranks_come_near_dense_training_on_real_urls(folded, name):
    """With 1 % a step, the loss is at most a tenth above that of dense steps, and a percent more of the samples are told wrongly."""
    *samples, (expected_loss, expected_accuracy) = folded
    feedbacks = [sar.ErrorFeedback(REDUCERS[name](2**13, 82)) for _ in range(4)]
    loss, accuracy = descended(*samples, 4, lambda gradients: sar.simulate(gradients, feedbacks).outputs[0].to_dense())
    assert expected_accuracy > 0.95
    assert loss < 1.1 * expected_loss
    assert accuracy > expected_accuracy - 0.01
