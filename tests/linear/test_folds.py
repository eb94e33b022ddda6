"""Folds of cross-validation: equal parts of every class, the same for any number of ranks; and penalties that follow each other."""

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.errors import AlgorithmError, DatasetError
from sparseallreduce.linear import Dataset, Hinge, LinearModel, Logistic, Multinomial, Squared, SquaredHinge
from sparseallreduce.linear.solvers import RoundOptions, RoundTrainer
from sparseallreduce.linear.training.batches import Fold, divided, held_out


def labelled(labels, first=0, total=-1):
    rows = scipy.sparse.csr_array(np.ones((len(labels), 1)))
    return Dataset.from_scipy(rows, labels, first_sample=first, total_samples=total)


def numbers_held_out(labels, folds, seed, ranks, classes):
    """The numbers of the samples that each fold holds out."""
    cuts = [len(labels) * rank // ranks for rank in range(ranks + 1)]

    def call(comm):
        first, end = cuts[comm.rank : comm.rank + 2]
        part = labelled(labels[first:end], first, len(labels))
        divisions = [divided(part, Fold(number, folds), seed, comm, classes) for number in range(folds)]
        assert [each.total for each in divisions] == [len(labels) - held_out(len(labels), Fold(number, folds)) for number in range(folds)]
        return [(first + each.held_out).tolist() for each in divisions]

    parts = on_ranks(ranks, call)
    return [sorted(number_held for part in parts for number_held in part[number]) for number in range(folds)]


@given(
    counts=st.lists(st.integers(4, 30), min_size=1, max_size=4),
    folds=st.integers(2, 4),
    seed=st.integers(0, 5),
    ranks=st.integers(2, 4),
    stratified=st.booleans(),
)
def test_folds_share_out_every_class_evenly_and_alike_for_any_number_of_ranks(counts, folds, seed, ranks, stratified):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(float(len(counts))), counts))
    classes = np.arange(float(len(counts))) if stratified else None
    found = numbers_held_out(labels, folds, seed, 1, classes)
    assert sorted(each for fold in found for each in fold) == list(range(len(labels)))
    assert [len(each) for each in found] == [held_out(len(labels), Fold(number, folds)) for number in range(folds)]
    if stratified:
        shares = np.array([np.bincount(labels[each].astype(int), minlength=len(counts)) for each in found])
        assert (np.ptp(shares, axis=0) <= 1).all()
    assert numbers_held_out(labels, folds, seed, ranks, classes) == found


def test_another_seed_makes_other_folds():
    labels = np.tile([-1.0, 1.0], 20)
    first, second = (numbers_held_out(labels, 4, seed, 1, np.array([-1.0, 1.0])) for seed in (0, 1))
    assert first != second


def test_a_class_of_fewer_samples_than_folds_is_the_same_error_on_all_ranks():
    errors = on_ranks(2, lambda comm: divided(labelled([1.0, -1.0, 1.0], 3 * comm.rank, 6), Fold(0, 3), 0, comm, np.array([-1.0, 1.0])))
    assert {type(error) for error in errors} == {DatasetError} and len(set(map(str, errors))) == 1
    assert "one has 2" in str(errors[0])


@pytest.mark.parametrize("fold", [Fold(2, 2), Fold(-1, 2), Fold(0, 1)])
def test_there_is_no_such_fold(fold):
    with pytest.raises(ValueError, match="one of at least 2"):
        RoundOptions(validation=fold)


def samples(model, features=40, rows=300):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, features)) * (rng.random((rows, features)) < 0.3)
    scores = X @ rng.normal(size=(features, 3)) + rng.normal(size=(rows, 3)) + [1, 0, 0]
    labels = {None: scores[:, 0], 3: scores.argmax(axis=1)}[model.columns]
    return Dataset.from_scipy(scipy.sparse.csr_array(X), np.sign(labels) if model.classifies and model.columns is None else labels)


KINDS = [
    (Logistic(), "dual", 40),
    (Hinge(), "dual", 40),
    (SquaredHinge(), "dual", 40),
    (Multinomial(3), "dual", 40),
    (Logistic(), "newton", 40),
    (Multinomial(3), "newton", 40),
    (Multinomial(3), "newton", 450),  # by products
    (Squared(), "newton", 40),
    (SquaredHinge(), "newton", 1500),  # truncated
]


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("model,solver,features", KINDS, ids=lambda value: value.title if isinstance(value, LinearModel) else str(value))
def test_a_run_with_another_penalty_ends_at_the_optimum_of_that(model, solver, features, free):
    data = samples(model, features)
    held = {"validation": Fold(1, 3), "evaluate_every": 10**6}
    options = RoundOptions(gap=1e-5, intercept=True, free_intercept=free, scale_features=None, solver=solver, **held)
    run = RoundTrainer(model, data, sar.SERIAL, 0.3, options)
    list(run.run())
    for l2 in (0.1, 0.02, 0.05):
        run.penalise(l2)
        last = list(run.run())[-1]
        anew = RoundTrainer(model, data, sar.SERIAL, l2, options)
        expected = list(anew.run())[-1]
        assert run.converged and run.history[0].epoch == 1 and run.l2 == l2
        assert last.loss == pytest.approx(expected.loss, rel=1e-4)
        assert last.validation_loss == pytest.approx(expected.validation_loss, rel=3e-2)
        scale = np.abs(anew.weights()).max()
        np.testing.assert_allclose(run.weights(), anew.weights(), atol=0.03 * scale)


def test_a_penalty_of_nothing_has_no_dual():
    run = RoundTrainer(Logistic(), samples(Logistic()), sar.SERIAL, 0.03)
    with pytest.raises(AlgorithmError, match="l2 must be above 0"):
        run.penalise(0.0)
