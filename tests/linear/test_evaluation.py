"""What is known of a model while it trains: before each step, every so many epochs, and on samples held out."""

import numpy as np
import pytest
import scipy.sparse
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear import (
    MODELS,
    BoldDriver,
    Constant,
    Dataset,
    DenseStrategy,
    Descent,
    EarlyStopping,
    Options,
    OverlappedStrategy,
    Plateau,
    SparseStrategy,
    SynchronousParameterServer,
    Trainer,
)
from sparseallreduce.linear.training.batches import batches, divided, held_out

ROWS, FEATURES, BATCH = 90, 40, 7


def problem(rows=ROWS, seed=1):
    rng = np.random.default_rng(seed)
    matrix = np.where(rng.random((rows, FEATURES)) < 0.3, rng.standard_normal((rows, FEATURES)), 0).astype(np.float32)
    noisy = matrix @ rng.standard_normal(FEATURES) + rng.standard_normal(rows)
    return matrix, np.where(noisy > 0, 1.0, -1.0)


def trainer(samples=None, strategy=SparseStrategy, model="logistic", schedule=None, stopping=None, descent=None, epochs=3, **options):
    matrix, labels = problem() if samples is None else samples
    made = strategy(Dataset.from_scipy(scipy.sparse.csr_array(matrix), labels), sar.SERIAL, descent or Descent())
    return Trainer(MODELS[model](), made, schedule or Constant(0.2), Options(epochs, BATCH, **options), stopping=stopping)


@pytest.mark.parametrize("strategy", [SparseStrategy, DenseStrategy, SynchronousParameterServer])
@pytest.mark.parametrize("model", ["logistic", "svm", "linear"])
def test_progressive_figures_are_those_of_each_batch_before_its_step(strategy, model):
    matrix, labels = problem()
    run = trainer(strategy=strategy, model=model, schedule=Constant(0.05))
    epochs, weights, dataset = list(run.run()), np.zeros(FEATURES), run.dataset
    for epoch in epochs:
        losses, right = 0.0, 0
        for rows, count in batches(dataset, BATCH, (0, epoch.epoch)):
            scores = matrix[rows] @ weights
            losses += MODELS[model]().loss(scores, labels[rows]).sum()
            right += ((scores > 0) == (labels[rows] > 0)).sum()
            weights -= 0.05 / count * (MODELS[model]().derivative(scores, labels[rows]) @ matrix[rows])
        assert epoch.progressive_loss == pytest.approx(losses / ROWS, rel=1e-4)
        assert epoch.progressive_accuracy == right / ROWS


@pytest.mark.parametrize("every,evaluated", [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (7, [5]), (0, [])])
def test_the_model_is_evaluated_as_often_as_is_asked_and_at_the_end(every, evaluated):
    test = Dataset.from_scipy(scipy.sparse.csr_array(problem(20, 5)[0]), problem(20, 5)[1])
    whole, some = trainer(epochs=5), trainer(epochs=5, evaluate_every=every)
    for full, epoch in zip(whole.run(test), some.run(test), strict=True):
        assert epoch.evaluated == (epoch.epoch in evaluated)
        assert epoch.progressive_loss == full.progressive_loss
        if epoch.evaluated:
            assert (epoch.loss, epoch.train_auc, epoch.test_loss) == (full.loss, full.train_auc, full.test_loss)
        else:
            assert epoch.loss == epoch.progressive_loss
            assert (epoch.train_accuracy, epoch.train_auc, epoch.test_loss, epoch.test_accuracy, epoch.test_auc) == (None,) * 5
    np.testing.assert_array_equal(some.weights.to_array(), whole.weights.to_array())


def test_a_model_that_was_never_evaluated_takes_no_time_for_it():
    run = trainer(evaluate_every=0)
    run._evaluation.of_weights = None  # a call would fail
    assert len(list(run.run())) == 3


@pytest.mark.parametrize("make", [lambda: BoldDriver(0.5), lambda: Plateau(0.5, patience=1)])
def test_a_schedule_that_watches_the_loss_is_told_the_progressive_one(make):
    schedule, told = make(), []
    react = schedule.react
    schedule.react = lambda loss: told.append(loss) or react(loss)
    epochs = list(trainer(schedule=schedule, epochs=4, evaluate_every=2).run())
    assert told == [epoch.progressive_loss for epoch in epochs]


@pytest.mark.parametrize("watch,every,ended", [("loss", 0, 3), ("loss", 3, 3), ("progressive_accuracy", 0, 3), ("train_auc", 3, 9)])
def test_early_stopping_counts_epochs_that_know_the_figure(watch, every, ended):
    stopping = EarlyStopping(watch, patience=2, tolerance=100.0)
    epochs = list(trainer(epochs=50, evaluate_every=every, stopping=stopping).run())
    assert len(epochs) == ended
    assert epochs[-1].evaluated == (every > 0), "the last epoch is evaluated"


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.999, 1e-9])
def test_the_same_samples_are_held_out_for_any_number_of_ranks(ranks, share):
    matrix, labels = problem()
    bounds = [ROWS * rank**2 // ranks**2 for rank in range(ranks + 1)]

    def part(comm):
        first, last = bounds[comm.rank], bounds[comm.rank + 1]
        own = Dataset.from_scipy(scipy.sparse.csr_array(matrix[first:last]), labels[first:last], first_sample=first, total_samples=ROWS)
        division = divided(own, share, 3, comm)
        return division, division.rows + first, division.held_out + first

    alone = divided(Dataset.from_scipy(scipy.sparse.csr_array(matrix), labels), share, 3, sar.SERIAL)
    parts = on_ranks(ranks, part)
    out = np.concatenate([held for *_, held in parts])
    np.testing.assert_array_equal(out, alone.held_out)
    assert len(out) == held_out(ROWS, share) == min(ROWS - 1, max(1, round(share * ROWS)))
    assert sorted([*out, *np.concatenate([rows for _, rows, _ in parts])]) == list(range(ROWS))
    assert [division.first for division, *_ in parts] == [sum(len(rows) for _, rows, _ in parts[:rank]) for rank in range(ranks)]
    other = divided(Dataset.from_scipy(scipy.sparse.csr_array(matrix), labels), share, 4, sar.SERIAL)
    assert share == 0.999 or other.held_out.tolist() != out.tolist()


@pytest.mark.parametrize("strategy", [SparseStrategy, DenseStrategy, OverlappedStrategy, SynchronousParameterServer])
def test_samples_held_out_do_not_change_the_weights(strategy):
    """These are, but for which epoch's, those of a run on the others alone."""
    matrix, labels = problem()
    run = trainer(strategy=strategy, validation=0.2, epochs=3, model="svm", schedule=Constant(0.01))
    rows, out = run.division.rows, run.division.held_out
    assert len(out) == 18
    ours = list(run.run())
    test = Dataset.from_scipy(scipy.sparse.csr_array(matrix[out]), labels[out])
    other = trainer((matrix[rows], labels[rows]), strategy, epochs=3, model="svm", schedule=Constant(0.01))
    for epoch, expected in zip(ours, other.run(test), strict=True):
        assert (epoch.steps, epoch.loss, epoch.train_auc) == (expected.steps, expected.loss, expected.train_auc)
        assert epoch.progressive_loss == expected.progressive_loss
        held = epoch.validation_loss, epoch.validation_accuracy, epoch.validation_auc
        assert held == (expected.test_loss, expected.test_accuracy, expected.test_auc)
    assert run.best.epoch == 3
    np.testing.assert_array_equal(run.weights.to_array(), other.weights.to_array())


@pytest.mark.parametrize("descent", [Descent(), Descent(1e-3, True, 1e-4, 0.5)])
@pytest.mark.parametrize("watch", [None, "validation_accuracy"])
def test_the_model_is_that_which_did_best_on_samples_held_out(descent, watch):
    stopping = None if watch is None else EarlyStopping(watch, 4)
    run = trainer(epochs=20, validation=0.3, schedule=Constant(8.0), descent=descent, stopping=stopping)
    learned = [run.weights.to_array() for _ in run.run()]
    figures = [-epoch.validation_accuracy if watch else epoch.validation_loss for epoch in run.history]
    best = int(np.argmin(figures))
    assert run.best.epoch == best + 1 < len(learned), "the last is the best, which shows nothing"
    np.testing.assert_array_equal(run.weights.to_array(), learned[best])
    if watch:
        assert len(learned) == best + 1 + 4


def test_what_is_never_known_cannot_be_watched():
    with pytest.raises(ValueError, match="hold out samples"):
        trainer(stopping=EarlyStopping("validation_loss", 2))
    with pytest.raises(ValueError, match="needs evaluations"):
        trainer(stopping=EarlyStopping("train_auc", 2), evaluate_every=0)
    with pytest.raises(ValueError, match="evaluate_every must be above 0"):
        Options(validation=0.1, evaluate_every=0)
    with pytest.raises(ValueError, match="below 1"):
        Options(validation=1.0)
    with pytest.raises(DatasetError, match="none can be held out"):
        trainer((np.ones((1, FEATURES), np.float32), np.ones(1)), validation=0.5)
