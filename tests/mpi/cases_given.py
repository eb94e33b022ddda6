"""What the ranks give a trainer: samples of each or the same of all, and the same error on every rank where they do not fit together."""

from dataclasses import replace

import numpy as np
import scipy.sparse
from cases_faults import failing
from mpi_cases import each, limit, skip

import sparseallreduce as sar
from sparseallreduce.errors import AlgorithmError, DatasetError, MismatchError
from sparseallreduce.linear import (
    MODELS,
    STRATEGIES,
    Checkpoints,
    Constant,
    Dataset,
    Descent,
    EarlyStopping,
    LargeBatch,
    Options,
    Trainer,
)
from sparseallreduce.linear.strategies import base

RANKS = (2, 3)


def problem(rows=60, features=40):
    """Samples and their labels, the same on all ranks."""
    rng = np.random.default_rng(8)
    X = scipy.sparse.random_array((rows, features), density=0.3, rng=rng, data_sampler=rng.standard_normal).tocsr()
    return X, np.where(X @ rng.standard_normal(features) > 0, 1.0, -1.0)


def share(comm, rows=60):
    """This rank's rows: blocks of different sizes, of which the first is empty."""
    bounds = [rows * rank * (rank + 1) // (comm.size * (comm.size + 1)) for rank in range(comm.size + 1)]
    bounds[1] = 0
    return slice(bounds[comm.rank], bounds[comm.rank + 1])


def trained(dataset, comm, strategy="sparse", test=None, model="logistic", descent=None, **settings):
    made = STRATEGIES[strategy](dataset, comm, descent or Descent(1e-3, True))
    given = {"schedule": Constant(0.3), "options": Options(2, global_batch=6)} | settings
    trainer = Trainer(MODELS[model](), made, given.pop("schedule"), given.pop("options"), **given)
    return list(trainer.run(test)), trainer.weights.to_array()


def told(comm, action, error):
    """The message of the error that the action raises: the same on all ranks."""
    try:
        action()
        raised = None
    except error as caught:
        raised = type(caught).__name__, str(caught)
    assert len(set(comm.allgather(raised))) == 1, comm.allgather(raised)
    assert raised is not None, "no error"
    trained(Dataset.from_scipy(*problem()), comm)  # the communicator is as good as before
    return raised[1]


@limit(120)
@each(strategy=["sparse", "dense", "overlapped", "ps-sync", "oktopk"], how=["whole", "own"])
def case_all_ranks_train_on_all_samples_once(comm, strategy, how):
    X, y = problem()
    if how == "own" and strategy.startswith("ps"):  # the last rank is a server
        low, high = (60 * min(rank, comm.size - 1) // (comm.size - 1) for rank in (comm.rank, comm.rank + 1))
        mine = slice(low, high)
    else:
        mine = share(comm)
    dataset = Dataset.from_scipy(X, y) if how == "whole" else Dataset.of_ranks(X[mine], y[mine], comm)
    epochs, weights = trained(dataset, comm, strategy, test=dataset)
    expected, alone = trained(Dataset.from_scipy(X, y), sar.SERIAL, strategy, test=Dataset.from_scipy(X, y))
    assert len(set(comm.allgather(weights.tobytes()))) == 1
    assert epochs[-1].test_accuracy == epochs[-1].train_accuracy <= 1
    if strategy != "oktopk":
        np.testing.assert_allclose(weights, alone, rtol=1e-3, atol=1e-5)
        assert [epoch.train_accuracy for epoch in epochs] == [epoch.train_accuracy for epoch in expected]


SAMPLES = {
    "labels of one rank": lambda X, y, rank: (X, y > 0 if rank else y),
    "length of labels": lambda X, y, rank: (X, y[rank:]),
    "form of labels": lambda X, y, rank: (X, y[:, None] if rank else y),
    "labels that are text": lambda X, y, rank: (X, ["ham"] * 60 if rank else y),
    "values": lambda X, y, rank: (X * (np.nan if rank else 1), y),
}


@each(what=SAMPLES, how=["whole", "own"])
def case_what_one_rank_cannot_train_on_is_the_same_error_on_all(comm, what, how):
    X, y = SAMPLES[what](*problem(), comm.rank)
    if how == "whole" and what == "labels that are text":
        return  # from_scipy speaks for its own rank alone
    make = Dataset.from_scipy if how == "whole" else lambda X, y: Dataset.of_ranks(X, y, comm)
    error = MismatchError if (what, how) == ("labels of one rank", "whole") else DatasetError
    told(comm, lambda: trained(make(X, y), comm), error)


@each(kind=["own samples", "own number", "other features"])
def case_each_ranks_own_samples_are_not_taken_for_all(comm, kind):
    X, y = problem()
    mine = slice(20 * comm.rank, 20 * comm.rank + 20 + (kind == "own number") * comm.rank)
    columns = 40 - (kind == "other features") * comm.rank
    message = told(comm, lambda: trained(Dataset.from_scipy(X[mine, :columns], y[mine]), comm), MismatchError)
    assert ("number of features is 40 on rank 0 and 39 on rank 1" in message) == (kind == "other features")
    assert ("Dataset.of_ranks" in message) == (kind != "other features")


def case_features_of_the_ranks_must_agree(comm):
    X, y = problem()
    message = told(comm, lambda: Dataset.of_ranks(X[:, : 40 - comm.rank], y, comm), MismatchError)
    assert "ranks 0 to" in message and "give 40, 39" in message


TESTS = {
    "some ranks alone": (lambda X, y, rank: Dataset.from_scipy(X, y) if rank else None, MismatchError),
    "more columns": (lambda X, y, rank: Dataset.from_scipy(scipy.sparse.hstack([X, X]), y), DatasetError),
    "each its own": (lambda X, y, rank: Dataset.from_scipy(X[rank:], y[rank:]), MismatchError),
    "other labels": (lambda X, y, rank: Dataset.from_scipy(X, y + 1), DatasetError),
}


@each(what=TESTS, strategy=["sparse", "ps-sync"])
def case_a_test_set_that_does_not_fit_is_the_same_error_on_all(comm, what, strategy):
    X, y = problem()
    make, error = TESTS[what]
    told(comm, lambda: trained(Dataset.from_scipy(X, y), comm, strategy, test=make(X, y, comm.rank)), error)


SETTINGS = {
    "options": lambda rank: {"options": Options(2 + rank)},
    "descent": lambda rank: {"descent": Descent(l1=rank * 1e-3)},
    "schedule": lambda rank: {"schedule": Constant(0.1 + rank)},
    "function": lambda rank: {"schedule": lambda step: 0.1 * (rank + 1)},
    "stopping": lambda rank: {"stopping": EarlyStopping("loss", 2 + rank)},
    "checkpoints": lambda rank: {"checkpoints": Checkpoints("/nowhere") if rank else None},
    "strategy": lambda rank: {"strategy": ("sparse", "dense", "ps-sync")[rank]},
    "model": lambda rank: {"model": "svm" if rank else "logistic"},
}


@each(what=SETTINGS)
def case_settings_that_differ_are_the_same_error_on_all(comm, what):
    X, y = problem()
    message = told(comm, lambda: trained(Dataset.from_scipy(X, y), comm, **SETTINGS[what](comm.rank)), MismatchError)
    assert "all ranks must use the same settings" in message


@each(strategy=["sparse", "overlapped", "ps-sync", "ps-async"])
def case_a_rate_that_rises_too_far_is_the_same_error_on_all(comm, strategy):
    dataset = Dataset.from_scipy(*problem())
    for schedule in (lambda step: 0.3 * (step + 1), LargeBatch(Constant(0.3), 20, 10)):
        message = told(comm, lambda s=schedule: trained(dataset, comm, strategy, schedule=s, descent=Descent(0.5)), AlgorithmError)
        assert "learning rate times l2 must be below 1" in message


@each(strategy=["sparse", "ps-sync", "oktopk"])
def case_weights_to_start_from_that_differ_are_the_same_error_on_all(comm, strategy):
    made = STRATEGIES[strategy](Dataset.from_scipy(*problem()), comm)
    told(comm, lambda: made.assign(np.full(40, comm.rank, np.float32)), MismatchError)


def case_a_parameter_server_holds_no_samples(comm):
    X, y = problem()
    dataset = Dataset.of_ranks(X, y, comm)
    assert "is a parameter server, but holds 60 samples" in told(comm, lambda: trained(dataset, comm, "ps-sync"), MismatchError)
    dataset = replace(dataset, weights=np.zeros(60))
    assert "a weight other than zero" in told(comm, lambda: trained(dataset, comm), DatasetError)


def other_options(rank):
    """For some strategies: constructor arguments of which only those of rank 0 are right."""
    wrong = rank == 1
    return {
        "density": ("oktopk", {"density": 2 if wrong else 0.1}, sar.SparseAllreduceError, "density must be above 0"),
        "threads": ("sparse", {"threads": 0 if wrong else 1}, sar.SparseAllreduceError, "at least 1 thread"),
        "kind of threads": ("dense", {"threads": "two" if wrong else 1}, sar.SparseAllreduceError, "not supported between"),
        "descent": ("overlapped", {"descent": "steep" if wrong else Descent()}, sar.SparseAllreduceError, "descent"),
        "no server": ("ps-sync", {"servers": 0 if wrong else 1}, AlgorithmError, "at least one server, not 0"),
        "no worker": ("ps-async", {"servers": 9 if wrong else 1}, AlgorithmError, "leave none to compute"),
        "momentum": ("ps-async", {"descent": Descent(momentum=0.9 if wrong else 0.0)}, AlgorithmError, "does not support momentum"),
    }


@each(what=other_options(0))
def case_an_argument_of_a_strategy_that_is_wrong_on_one_rank_is_the_same_error_on_all(comm, what):
    strategy, options, error, message = other_options(comm.rank)[what]
    dataset = Dataset.from_scipy(*problem())
    raised = told(comm, lambda: STRATEGIES[strategy](dataset, comm, **options), (error, ValueError, TypeError))
    assert message in raised, raised


@each(strategy=["sparse", "dense", "oktopk", "ps-sync"])
def case_no_memory_for_the_weights_of_one_rank_is_the_same_error_on_all(comm, strategy):
    def make():
        with failing(base, "new_weights", MemoryError("no room"), comm.rank == 1):
            STRATEGIES[strategy](Dataset.from_scipy(*problem()), comm)

    assert told(comm, make, MemoryError) == "no room"


def case_numbers_of_servers_that_differ_are_the_same_error_on_all(comm):
    if comm.size == 2:
        skip("one of two ranks is a server")
    dataset = Dataset.from_scipy(*problem())
    told(comm, lambda: STRATEGIES["ps-sync"](dataset, comm, servers=1 + comm.rank % 2), MismatchError)


@each(what=["options", "model", "schedule"])
def case_what_is_no_argument_of_a_trainer_is_the_same_error_on_all(comm, what):
    wrong = {what: 3 if comm.rank else {"options": Options(2), "model": "logistic", "schedule": Constant(0.3)}[what]}
    strategy = STRATEGIES["sparse"](Dataset.from_scipy(*problem()), comm)

    def make():
        given = {"model": "logistic", "schedule": Constant(0.3), "options": Options(2)} | wrong
        model = MODELS["logistic"]() if given["model"] == "logistic" else given["model"]
        Trainer(model, strategy, given["schedule"], given["options"])

    told(comm, make, (AttributeError, TypeError))


class Breaking(MODELS["logistic"]):
    """Fails on one rank, in the middle of an epoch, after a step, or as an epoch is evaluated."""

    def __init__(self, rank, error, where="derivative"):
        self.steps, self.rank, self.error, self.where = 0, rank, error, where

    def fail(self, where):
        if where == self.where:
            self.steps += 1
            if self.steps == 5 and self.rank == 1:
                raise self.error

    def derivative(self, scores, labels):
        self.fail("derivative")
        return super().derivative(scores, labels)

    def loss(self, scores, labels):
        for _ in range(5):
            self.fail("loss")
        return super().loss(scores, labels)

    def after_step(self):
        self.fail("on_step")


@limit(60)
@each(
    strategy=["sparse", "dense", "overlapped", "ps-sync", "ps-async", "oktopk", "gaussiank"],
    error=[KeyboardInterrupt, ValueError],
    where=["derivative", "on_step", "loss"],
)
def case_a_rank_that_fails_ends_the_run_on_all(comm, strategy, error, where):
    """In the loss or in a callback of the user's."""
    if strategy.startswith("ps") and comm.size == 2 and where != "loss":
        skip("rank 1 computes nothing")
    if where == "loss" and error is KeyboardInterrupt:
        skip("which is in the sums of the evaluation")
    X, y = problem()
    made = STRATEGIES[strategy](Dataset.from_scipy(X, y), comm)
    model = Breaking(comm.rank, error("of my own"), where)
    trainer = Trainer(model, made, Constant(0.1), Options(3, 2))
    try:
        list(trainer.run(on_step=model.after_step))
        raised = None
    except (sar.SparseAllreduceError, error) as caught:
        raised = type(caught).__name__, str(caught)
    everyones = comm.allgather(raised)
    assert None not in everyones, everyones
    own = everyones.pop(1) if error is KeyboardInterrupt else everyones[1]
    assert len(set(everyones)) == 1, everyones
    if where == "loss":
        assert own == ("ValueError", "of my own")
    else:
        assert own[0] == ("KeyboardInterrupt" if error is KeyboardInterrupt else "SparseAllreduceError")
        assert "rank 1" in everyones[0][1] and error.__name__ in everyones[0][1]
    trained(Dataset.from_scipy(X, y), comm, strategy)
