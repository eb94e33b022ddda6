"""What the trainer is given is checked before it trains: data sets, labels, test sets, and what the ranks must have in common."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
from scipy.sparse import csr_array
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.errors import AlgorithmError, DatasetError, MismatchError, StreamError
from sparseallreduce.linear import (
    MODELS,
    STRATEGIES,
    BoldDriver,
    Constant,
    Dataset,
    DenseStrategy,
    Descent,
    EarlyStopping,
    LargeBatch,
    Options,
    SparseStrategy,
    Trainer,
)
from sparseallreduce.linear.data.checks import check_rows, own_samples
from sparseallreduce.linear.data.labels import of_mean_one, weighted_by_class
from sparseallreduce.runtime.objects import agreed

X = csr_array(np.arange(1.0, 41.0).reshape(10, 4) % 7 + 1)
Y = np.where(np.arange(10) % 3 > 0, 1.0, -1.0)
GOOD = Dataset.from_scipy(X, Y)


def trained(dataset, model="logistic", test=None, strategy="sparse", comm=sar.SERIAL, **options):
    trainer = Trainer(MODELS[model](), STRATEGIES[strategy](dataset, comm), Constant(0.1), Options(1, 4, **options))
    return list(trainer.run(test))


def changed(name, place, value):
    array = getattr(GOOD, name).copy()
    array[place] = value
    return replace(GOOD, **{name: array})


BAD = {
    "more labels": (lambda: Dataset.from_scipy(X, np.append(Y, 1.0)), "there are 11 labels for 10 samples"),
    "fewer labels": (lambda: Dataset.from_scipy(X, Y[:-1]), "there are 9 labels for 10 samples"),
    "two dimensions": (lambda: Dataset.from_scipy(X, Y[:, None]), r"labels has the shape \(10, 1\)"),
    "no dimension": (lambda: Dataset.from_scipy(X, 1.0), r"labels has the shape \(\)"),
    "NaN label": (lambda: changed("labels", 3, np.nan), "the label of sample 3 is nan"),
    "infinite label": (lambda: changed("labels", 3, np.inf), "the label of sample 3 is inf"),
    "NaN value": (lambda: changed("values", 5, np.nan), "feature 1 of sample 1 is nan, not a finite float32"),
    "infinite in float32": (lambda: Dataset.from_scipy(X * 1e40, Y), "inf, not a finite float32"),
    "high index": (lambda: changed("indices", 7, 4), "index 4 of sample 1 is not below the 4 features"),
    "repeated index": (lambda: changed("indices", 1, 0), "index 0 of sample 0 does not follow a lower one"),
    "signed indices": (lambda: replace(GOOD, indices=GOOD.indices.astype(np.int32)), "indices are int32, not uint32"),
    "narrow indices": (lambda: replace(GOOD, features=2**32 + 1), "indices are uint32, not uint64"),
    "half values": (lambda: replace(GOOD, values=GOOD.values.astype(np.float16)), "values of float16"),
    "values missing": (lambda: replace(GOOD, values=GOOD.values[:-1]), "there are 39 values of float32 for 40 indices"),
    "indptr falls": (lambda: changed("indptr", 3, 20), "indptr does not increase"),
    "indptr ends beyond": (lambda: changed("indptr", -1, 44), "indptr does not increase"),
    "indptr begins before": (lambda: changed("indptr", 0, -4), "indptr does not increase"),
    "narrow indptr": (lambda: replace(GOOD, indptr=GOOD.indptr.astype(np.int32)), "indptr is int32"),
    "weights missing": (lambda: replace(GOOD, weights=np.ones(9)), "there are weights of 9 samples"),
    "negative weight": (lambda: replace(GOOD, weights=np.linspace(-1, 1, 10)), "the weight of sample 0 is -1.0"),
    "NaN weight": (lambda: replace(GOOD, weights=np.full(10, np.nan)), "the weight of sample 0 is nan"),
    "nothing counts": (lambda: replace(GOOD, weights=np.zeros(10)), "no rank has a sample with a weight"),
    "no samples": (lambda: Dataset.from_scipy(X[:0], []), "there are no samples on any rank"),
}


@pytest.mark.parametrize("strategy", ["sparse", "dense", "ps-sync", "oktopk"])
@pytest.mark.parametrize("what", BAD)
def test_what_no_loop_may_read_is_refused(what, strategy):
    make, message = BAD[what]
    with pytest.raises(DatasetError, match=message):
        trained(make(), strategy=strategy)


@pytest.mark.parametrize("model", ["logistic", "svm"])
@pytest.mark.parametrize("labels", [Y > 0, np.where(Y > 0, 2, 1), Y * 1.5])
def test_a_classifier_takes_no_labels_but_its_own(model, labels):
    with pytest.raises(DatasetError, match=r"those of a classifier .* are -1 and \+1: two_classes"):
        trained(Dataset.from_scipy(X, labels), model)
    with pytest.raises(DatasetError, match="those of a classifier"):
        trained(GOOD, model, test=Dataset.from_scipy(X, labels))
    trained(Dataset.from_scipy(X, labels), "linear")


@pytest.mark.parametrize("labels", [["ham"] * 10, ["1"] * 10, Y + 1j, [None, *Y[1:]], [[1], *Y[1:]], csr_array(Y[None])])
def test_labels_that_are_no_numbers_are_refused(labels):
    with pytest.raises(DatasetError, match="label"):
        trained(Dataset.from_scipy(X, labels))


@pytest.mark.parametrize("samples", [X.toarray()[0], X.astype(complex), [["a"]], "abc", np.zeros((2, 2, 2)), None])
def test_samples_that_are_no_matrix_of_numbers_are_refused(samples):
    with pytest.raises(DatasetError, match="samples"):
        Dataset.from_scipy(samples, [1.0])


def test_rows_in_any_form_are_those_of_the_matrix_they_stand_for():
    repeated = csr_array((np.repeat(X.data / 2, 2), np.repeat(X.indices, 2), X.indptr * 2), X.shape)
    backwards = csr_array((X.data[::-1], X.indices[::-1], X.indptr[-1] - X.indptr[::-1]), X.shape)[::-1]
    for samples in (repeated, backwards, X.toarray(), X.tocoo(), X.tocsc(), scipy.sparse.csr_matrix(X), X.astype(np.int8)):
        before = samples.copy()
        dataset = Dataset.from_scipy(samples, Y)
        np.testing.assert_array_equal(dataset.to_scipy().toarray(), X.toarray())
        assert dataset.nnz <= 40
        assert (samples != before).sum() == 0
        trained(dataset)


@pytest.mark.parametrize("labels", [np.ones(10), -np.ones(10)])
@pytest.mark.parametrize("model", MODELS)
def test_one_class_is_learned_as_what_it_is(model, labels):
    epoch = trained(Dataset.from_scipy(abs(X), labels), model, test=GOOD if model != "linear" else None)[-1]
    assert epoch.train_accuracy in (1.0, None)
    assert epoch.train_auc is None


def test_a_test_set_has_the_features_of_the_training_set():
    wide = csr_array(np.hstack([X.toarray(), X.toarray()]))
    with pytest.raises(DatasetError, match="the test set has 8 features, but the training set 4"):
        trained(GOOD, test=Dataset.from_scipy(wide, Y))
    for make, message in BAD.values():
        with pytest.raises(DatasetError, match=message):
            trained(GOOD, test=make())
    narrow = Dataset.from_scipy(csr_array(X.toarray()[:, :2]), Y)
    assert 0 <= trained(GOOD, test=narrow)[-1].test_accuracy <= 1


def test_one_rank_alone_holds_all_samples():
    with pytest.raises(MismatchError, match="all ranks together hold 10 samples of 20"):
        trained(replace(GOOD, total_samples=20))
    with pytest.raises(MismatchError, match="rank 0 holds 10 of 20 samples from number 5 on"):
        trained(replace(GOOD, first_sample=5, total_samples=20))


def test_weights_to_start_from_are_of_the_models_size():
    for strategy in STRATEGIES:
        descent = Descent(intercept=True, update="ftrl" if strategy == "local" else "sgd")
        with pytest.raises(StreamError, match=r"start from 5 weights, the intercept included, not from those of shape \(4,\)"):
            STRATEGIES[strategy](GOOD, sar.SERIAL, descent).assign(np.zeros(4, np.float32))


def parts(comm, rows=10):
    bounds = [rows * rank**2 // comm.size**2 for rank in range(comm.size + 1)]
    return slice(bounds[comm.rank], bounds[comm.rank + 1])


def told(ranks, function, error):
    """The one message with which all ranks fail."""
    outcomes = on_ranks(ranks, function)
    assert {type(outcome) for outcome in outcomes} == {error}, outcomes
    messages = {str(outcome) for outcome in outcomes}
    assert len(messages) == 1
    return messages.pop()


@pytest.mark.parametrize("ranks", [1, 2, 3, 11])
def test_the_samples_of_the_ranks_make_one_data_set(ranks):
    made = on_ranks(ranks, lambda comm: Dataset.of_ranks(X[parts(comm)], Y[parts(comm)], comm))
    assert {(part.total_samples, part.features) for part in made} == {(10, 4)}
    assert [part.first_sample for part in made] == [sum(part.rows for part in made[:rank]) for rank in range(ranks)]
    np.testing.assert_array_equal(np.vstack([part.to_scipy().toarray() for part in made]), X.toarray())


@pytest.mark.parametrize("ranks", [1, 2, 3, 11])
@pytest.mark.parametrize("weights", [None, np.linspace(0, 2, 10)])
def test_a_data_set_that_all_ranks_give_whole_is_dealt_out(ranks, weights):
    def own(comm):
        strategy = SparseStrategy(replace(GOOD, weights=weights), comm)
        Trainer(MODELS["logistic"](), strategy, Constant(0.1), Options())
        return strategy.dataset

    made = on_ranks(ranks, own)
    assert [part.total_samples for part in made] == [10] * ranks
    assert max(part.rows for part in made) - min(part.rows for part in made) <= 1
    np.testing.assert_array_equal(np.vstack([part.to_scipy().toarray() for part in made]), X.toarray())
    np.testing.assert_array_equal(np.concatenate([part.labels for part in made]), Y)
    if weights is not None:
        np.testing.assert_array_equal(np.concatenate([part.weights for part in made]), weights)


def made(comm, dataset, **settings):
    given = {"model": MODELS["logistic"](), "schedule": Constant(0.1), "options": Options(), "descent": Descent()} | settings
    strategy = settings.get("strategy", SparseStrategy)(dataset, comm, given["descent"])
    return Trainer(given["model"], strategy, given["schedule"], given["options"], stopping=settings.get("stopping"))


WHOLE = {
    "counts": lambda rank: Dataset.from_scipy(X[: 10 - rank], Y[: 10 - rank]),
    "values": lambda rank: Dataset.from_scipy(X + rank * X, Y),
    "labels": lambda rank: Dataset.from_scipy(X, Y if rank else -Y),
    "places": lambda rank: Dataset.from_scipy(X[:, [0, 1, 3, 2]] if rank else X, Y),
}


@pytest.mark.parametrize("what", WHOLE)
def test_different_samples_that_are_said_to_be_all_are_refused(what):
    message = told(3, lambda comm: made(comm, WHOLE[what](comm.rank)), MismatchError)
    assert "claims to have all samples, but those of ranks 0 to 2 differ" in message and "Dataset.of_ranks" in message


PARTS = {
    "one has none": lambda rank: Dataset.from_scipy(X[: 10 * rank], Y[: 10 * rank]),
    "twice the same": lambda rank: Dataset.from_scipy(X, Y, total_samples=20),
    "too few": lambda rank: Dataset.from_scipy(X, Y, first_sample=10 * rank, total_samples=30),
    "other totals": lambda rank: Dataset.from_scipy(X, Y, first_sample=10 * rank, total_samples=20 + rank),
}


@pytest.mark.parametrize("what", PARTS)
def test_parts_that_are_no_whole_are_refused(what):
    message = told(2, lambda comm: made(comm, PARTS[what](comm.rank)), MismatchError)
    assert "do not form one data set" in message and "Dataset.of_ranks" in message


DIFFERENT = {
    "number of features": lambda rank: {"dataset": Dataset.from_scipy(X[:, : 4 - rank], Y)},
    "dtype of values": lambda rank: {"dataset": replace(GOOD, values=GOOD.values.astype("f8" if rank else "f4"))},
    "use": lambda rank: {"strategy": DenseStrategy if rank else SparseStrategy},
    "model": lambda rank: {"model": MODELS["svm" if rank else "logistic"]()},
    "l2": lambda rank: {"descent": Descent(l2=0.1 * rank)},
    "epochs": lambda rank: {"options": Options(3 + rank)},
    "batch_size": lambda rank: {"options": Options(3, 5 + rank)},
    "seed": lambda rank: {"options": Options(seed=rank)},
    "schedule": lambda rank: {"schedule": Constant(0.1) if rank else BoldDriver(0.1)},
    "first learning rate": lambda rank: {"schedule": lambda step: 0.1 + rank},
    "early stopping": lambda rank: {"stopping": EarlyStopping("loss", 1 + rank)},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_settings_that_differ_are_the_same_error_on_all_ranks(what):
    message = told(3, lambda comm: made(comm, **{"dataset": GOOD} | DIFFERENT[what](comm.rank)), MismatchError)
    assert f"the {what} is " in message


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_on_one_rank_is_the_same_error_on_all(what):
    make, _ = BAD[what]
    bad = {"nothing counts", "no samples"}

    def given(comm):
        return made(comm, make() if comm.rank == 1 or what in bad else GOOD)

    told(3, given, DatasetError)


def test_a_rate_that_one_rank_alone_chooses_is_the_same_error_on_all():
    message = told(2, lambda comm: made(comm, GOOD, schedule=Constant(np.inf if comm.rank else 0.1)), AlgorithmError)
    assert "at least 0 and finite, not inf" in message
    climbing = [LargeBatch(Constant(0.1), 1 + rank, 5) for rank in range(2)]
    assert "the schedule is LargeBatch" in told(2, lambda comm: made(comm, GOOD, schedule=climbing[comm.rank]), MismatchError)


def test_labels_and_features_of_one_rank_are_the_same_error_on_all():
    whole = {0: (X, Y), 1: (X, Y > 0)}
    assert "-1 and +1" in told(2, lambda comm: made(comm, Dataset.of_ranks(*whole[comm.rank], comm)), DatasetError)
    wrong = {0: (X, Y), 1: (X, ["a"] * 10)}
    assert "number the classes" in told(2, lambda comm: Dataset.of_ranks(*wrong[comm.rank], comm), DatasetError)
    wide = {0: (X, Y), 1: (X[:, :3], Y), 2: (X[:0, :2], [])}
    assert "ranks 0 to 2 give 4, 3, 2" in told(3, lambda comm: Dataset.of_ranks(*wide[comm.rank], comm), MismatchError)
    narrow = {0: (X, Y), 1: (X[:0, :2], [])}  # a rank without samples has a say in nothing
    assert [part.features for part in on_ranks(2, lambda comm: Dataset.of_ranks(*narrow[comm.rank], comm))] == [4, 4]


@pytest.mark.parametrize("weights", ["balanced", {-1.0: 2.0, 1.0: 0.5}])
def test_class_weights_of_a_whole_data_set_are_those_of_one_rank(weights):
    alone = of_mean_one(weighted_by_class(GOOD, weights, sar.SERIAL), sar.SERIAL).weights
    for given in on_ranks(3, lambda comm: of_mean_one(weighted_by_class(GOOD, weights, comm), comm).weights):
        np.testing.assert_allclose(given, alone)
    assert alone.mean() == pytest.approx(1)
    with pytest.raises(DatasetError, match="no rank has a sample with a weight"):
        of_mean_one(weighted_by_class(GOOD, {-1.0: 0.0, 1.0: 0.0}, sar.SERIAL), sar.SERIAL)


def test_an_error_that_cannot_travel_is_still_one_on_all_ranks():
    class Local(Exception):
        def __init__(self, first, second):
            super().__init__(f"{first} {second}")

    def act(comm):
        def fail():
            if comm.rank == 1:
                raise Local("out of", "luck")

        return agreed(comm, fail)

    assert told(2, act, sar.SparseAllreduceError) == "Local: out of luck"


def test_a_data_set_that_was_checked_is_checked_again_where_its_rows_are_replaced():
    own = own_samples(Dataset.from_scipy([[1.0, 0.0], [0.0, 2.0]], [1, -1]), sar.SERIAL, 1)
    check_rows(replace(own, labels=-own.labels))
    for wrong in ({"values": np.float32([1, np.nan])}, {"indices": np.uint32([0, 7])}, {"features": 1}):
        with pytest.raises(DatasetError):
            check_rows(replace(own, **wrong))
