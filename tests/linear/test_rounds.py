"""Training in rounds: what its figures say, which weights are learned, and what ends it."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse

import sparseallreduce as sar
from sparseallreduce.errors import AlgorithmError, DatasetError, TrainingStopped
from sparseallreduce.linear import Dataset, Hinge, Logistic, OneVsRest, Squared, SquaredHinge
from sparseallreduce.linear.solvers import CoCoA, RoundOptions, RoundTrainer
from sparseallreduce.linear.training.early_stopping import EarlyStopping

FEATURES = 40


def samples(rows=200, seed=0, classes=None):
    rng = np.random.default_rng(seed)
    X = scipy.sparse.random_array((rows, FEATURES), density=0.2, rng=rng, format="csr", dtype=np.float32)
    true = np.random.default_rng(99).standard_normal((FEATURES, classes or 1))
    scores = X @ true + 0.2 * rng.standard_normal((rows, classes or 1))
    return Dataset.from_scipy(X, np.where(scores[:, 0] > 0, 1.0, -1.0) if classes is None else scores.argmax(axis=1).astype(float))


def dense(dataset):
    return scipy.sparse.csr_array((dataset.values, dataset.indices, dataset.indptr), (dataset.rows, dataset.features)).toarray()


def trainer(dataset, model=None, l2=None, stopping=None, **options):
    return RoundTrainer(model or Logistic(), dataset, sar.SERIAL, l2, RoundOptions(**options), stopping)


def scores(dataset, weights, intercept=True):
    return dense(dataset) @ weights[: dataset.features] + (weights[dataset.features] if intercept else 0.0)


@pytest.mark.parametrize("model", [Hinge(), SquaredHinge(), Logistic()])
def test_the_weights_are_those_of_the_solver_alone(model):
    data = samples()
    run = trainer(data, model, 0.01, seed=3, intercept=True)
    figures = list(run.run())
    alone = CoCoA(data, model, l2=0.01, comm=sar.SERIAL, seed=3)
    alone.fit()
    assert run.converged and figures == run.history
    assert figures[-1].gap <= 1e-3 * figures[-1].loss
    # More rounds are certified than there, by which samples come back that were left out.
    np.testing.assert_allclose(run.weights(), alone.weights, atol=0.05 * np.abs(alone.weights).max())


@pytest.mark.parametrize("intercept", [False, True])
def test_figures_are_what_they_say(intercept):
    data, test = samples(), samples(60, seed=1)
    run = trainer(data, l2=0.02, intercept=intercept, rounds=3, gap=1e-9)
    for last in run.run(test):
        weights = run.solvers[0].weights_of()
        own, others = scores(data, weights, intercept), scores(test, weights, intercept)
        assert last.loss == pytest.approx(np.mean(Logistic().loss(own, data.labels)) + 0.01 * weights @ weights)
        assert last.train_accuracy == np.mean((own > 0) == (data.labels > 0))
        assert last.test_accuracy == np.mean((others > 0) == (test.labels > 0))
        assert last.test_loss == pytest.approx(np.mean(Logistic().loss(others, test.labels)), rel=1e-5)
        assert 0 < last.dual <= last.loss and last.gap >= 0
        assert last.seconds["total"] == pytest.approx(sum(last.seconds[name] for name in ("prepare", "compute", "communicate", "evaluate")))
    assert last.epoch == 3 and not run.converged


def test_no_l2_is_a_c_of_one():
    assert trainer(samples(200)).l2 == 1 / 200
    assert trainer(samples(200), validation=0.25).l2 == 1 / 150


def test_samples_that_are_held_out_change_nothing():
    data = samples()
    run = trainer(data, l2=0.01, validation=0.2, gap=1e-6)
    list(run.run())
    rows = run.division.rows
    X = scipy.sparse.csr_array(dense(data)[rows])
    alone = CoCoA(Dataset.from_scipy(X, data.labels[rows]), Logistic(), l2=0.01, comm=sar.SERIAL, tolerance=1e-6, intercept=False)
    np.testing.assert_allclose(run.solvers[0].weights_of(), alone.fit(), atol=2e-3)
    last = run.history[-1]
    own = scores(data, run.solvers[0].weights_of(), intercept=False)[run.division.held_out]
    assert last.validation_loss == pytest.approx(np.mean(Logistic().loss(own, data.labels[run.division.held_out])))


def test_weights_of_samples_that_are_held_out_count_nothing_either():
    data = samples()
    weights = np.random.default_rng(5).uniform(0.5, 1.5, data.rows)
    run = trainer(replace(data, weights=weights), l2=0.01, validation=0.2, gap=1e-6)
    list(run.run())
    rows, found = run.division.rows, run.solvers[0].weights_of()
    loss = np.sum(weights[rows] * Logistic().loss(scores(data, found, False)[rows], data.labels[rows])) / len(rows)
    assert run.history[-1].loss == pytest.approx(loss + 0.005 * found @ found)


def test_the_model_is_what_did_best_on_the_samples_held_out():
    run = trainer(samples(120, seed=4), Hinge(), 1e-5, validation=0.3, rounds=40, gap=1e-9)
    kept = [run.solvers[0].weights_of() for _ in run.run()]
    losses = [figures.validation_loss for figures in run.history]
    assert run.best_epoch == int(np.argmin(losses)) + 1
    np.testing.assert_array_equal(run.weights(), kept[run.best_epoch - 1])


def test_without_held_out_samples_it_is_that_of_the_lowest_loss():
    run = trainer(samples(120, seed=4), Hinge(), 1e-4, rounds=15, gap=1e-9)
    kept = [run.solvers[0].weights_of() for _ in run.run()]
    losses = [figures.loss for figures in run.history]
    assert run.best_epoch == int(np.argmin(losses)) + 1
    np.testing.assert_array_equal(run.weights(), kept[run.best_epoch - 1])


@pytest.mark.parametrize("base", [SquaredHinge(), Logistic()])
def test_several_classes_are_each_taken_against_the_rest(base):
    data, test = samples(300, classes=4), samples(100, seed=1, classes=4)
    run = trainer(data, OneVsRest(base, 4), 0.01, intercept=True, gap=1e-5)
    list(run.run(test))
    weights = run.weights()
    assert weights.shape == (FEATURES + 1, 4)
    for column in range(4):
        labelled = replace(data, labels=np.where(data.labels == column, 1.0, -1.0))
        alone = CoCoA(labelled, base, l2=0.01, comm=sar.SERIAL, tolerance=1e-5)
        np.testing.assert_allclose(weights[:, column], alone.fit(), atol=0.01)
    last, own = run.history[-1], scores(data, weights)
    assert last.train_accuracy == np.mean(own.argmax(axis=1) == data.labels)
    assert last.test_accuracy == np.mean(scores(test, weights).argmax(axis=1) == test.labels)
    penalty = 0.005 * (weights**2).sum()
    assert last.loss == pytest.approx(np.mean(OneVsRest(base, 4).loss(own, data.labels)) + penalty, rel=1e-4)


@pytest.mark.parametrize("every", [0, 3])
def test_rounds_that_are_not_evaluated_have_no_figures(every):
    run = trainer(samples(), l2=1e-3, evaluate_every=every, gap=1e-6)
    figures = list(run.run())
    evaluated = [each.epoch for each in figures if each.evaluated]
    assert evaluated == ([number for number in range(1, len(figures)) if number % 3 == 0] + [len(figures)] if every else [])
    assert all((each.train_accuracy is None) == (not each.evaluated) for each in figures)
    assert run.converged and figures[-1].loss is not None


def test_no_round_leaves_zeros():
    run = trainer(samples(), rounds=0)
    assert list(run.run()) == [] and run.best_epoch is None
    assert not run.weights().any() and len(run.weights()) == FEATURES


def test_early_stopping_ends_the_rounds():
    run = trainer(samples(), Hinge(), 1e-6, EarlyStopping("train_accuracy", 2), gap=1e-12)
    assert len(list(run.run())) < 100 and not run.converged


@pytest.mark.parametrize(
    ("stopping", "options", "said"),
    [
        ("progressive_loss", {}, "only SGD training"),
        ("validation_loss", {}, "hold out"),
        ("train_auc", {"evaluate_every": 0}, "evaluate_every"),
    ],
)
def test_what_is_not_known_cannot_be_watched(stopping, options, said):
    with pytest.raises(ValueError, match=said):
        trainer(samples(), stopping=EarlyStopping(stopping, 2), **options)


@pytest.mark.parametrize("options", [{"rounds": -1}, {"validation": 1.0}, {"validation": 0.1, "evaluate_every": 0}, {"evaluate_every": -1}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError):
        RoundOptions(**options)


def test_a_gap_of_zero_is_refused():
    with pytest.raises(AlgorithmError, match="tolerance"):
        trainer(samples(), gap=0.0)


def test_models_without_a_dual_are_refused():
    with pytest.raises(AlgorithmError, match="Squared"):
        trainer(samples(), Squared())
    with pytest.raises(AlgorithmError, match="l2"):
        trainer(samples(), l2=0.0)


def test_labels_of_other_classes_are_refused():
    with pytest.raises(DatasetError, match="label 2"):
        trainer(samples(classes=3))


def test_a_test_set_of_more_features_is_refused():
    wide = Dataset.from_scipy(np.ones((2, FEATURES + 1), np.float32), [1, -1])
    with pytest.raises(DatasetError, match="features"):
        next(trainer(samples()).run(wide))


def test_a_request_ends_the_run_after_a_round():
    run = trainer(samples(), l2=1e-6, gap=1e-12)
    rounds = run.run()
    next(rounds), next(rounds)
    run.request_stop("SIGTERM")
    with pytest.raises(TrainingStopped, match="stopped by SIGTERM after round 2"):
        next(rounds)
    assert len(run.history) == 2
