"""Estimators on features of which each rank has some, of any number: one numbering, one model on all ranks, and that of one process."""

import numpy as np
import pytest
import scipy.sparse
from mpi_cases import each, limit

import sparseallreduce as sar
from sparseallreduce.errors import MismatchError
from sparseallreduce.linear import LinearRegression, LinearSVM, LogisticRegression

RANKS = (1, 2, 3)
ESTIMATORS = [LogisticRegression, LinearSVM, LinearRegression]


def problem(estimator, size, seed=0, rows=90, classes=3):
    """The samples of all ranks, the same on each; every third of them has features of its own beside those of all."""
    rng = np.random.default_rng(seed)
    known = np.unique(np.random.default_rng(5).integers(0, size, 200)).reshape(4, -1)
    own = [np.concatenate([known[0], known[1 + 3 * row // rows]]) for row in range(rows)]
    columns = np.sort(np.stack([rng.choice(features, 12, replace=False) for features in own]), axis=1)
    X = scipy.sparse.csr_array((rng.random(columns.size) + 0.5, columns.ravel(), np.arange(0, columns.size + 1, 12)), (rows, size))
    scores = np.random.default_rng(6).standard_normal((known.size, classes))[np.searchsorted(np.sort(known.ravel()), columns)].sum(axis=1)
    return X, (scores[:, 0] if estimator is LinearRegression else np.array(["ant", "bee", "wasp"])[scores.argmax(axis=1)])


def share(comm, rows=90):
    """This rank's rows; of three ranks the last has none."""
    parts = max(1, comm.size - (comm.size > 2))
    return slice(rows * min(comm.rank, parts) // parts, rows * min(comm.rank + 1, parts) // parts)


def bits(model):
    form = model.coef_
    parts = (form.data, form.indices, form.indptr) if scipy.sparse.issparse(form) else (form,)
    return [part.tobytes() for part in (*parts, np.asarray(model.intercept_))]


@limit(120)
@each(estimator=ESTIMATORS, size=[2**31, 2**40], solver=["auto", "sgd"])
def case_features_of_any_rank_have_weights(comm, estimator, size, solver):
    X, y = problem(estimator, size)
    own = share(comm)
    by_steps = {"update": "sgd", "learning_rate": 0.1, "max_iter": 5, "tol": None, "batch_size": 90}
    given = by_steps if solver == "sgd" else {"tol": 1e-6}
    ours = estimator(comm=comm, **given)
    ours.fit(X[own], y[own])
    assert ours.coef_.shape[-1] == size and scipy.sparse.issparse(ours.coef_)
    assert comm.allgather(bits(ours)) == [bits(ours)] * comm.size
    if solver == "sgd":
        return
    alone = estimator(comm=sar.SERIAL, **given).fit(X, y)
    assert abs(ours.coef_ - alone.coef_).max() < 0.01 * abs(alone.coef_).max()
    assert ours.score(X[own], y[own]) == comm.bcast(ours.score(X[own], y[own]))


@limit(120)
@each(parameters=[{"update": "ftrl", "l2": 0.0}, {"update": "sgd", "momentum": 0.5}])
def case_features_that_one_rank_brings_later_get_room_on_all(comm, parameters):
    given = {"batch_size": 90, "learning_rate": 0.1, "schedule": "constant", "scale_features": False, "tol": None} | parameters
    ours, alone = (LogisticRegression(comm=each, **given) for each in (comm, sar.SERIAL))
    for call in range(4):
        X, y = problem(LogisticRegression, 2**40, seed=call)
        few = slice(0, 15 * (call + 1))  # calls bring features of later thirds one by one
        X, y = X[few], y[few]
        own = share(comm, X.shape[0])
        before = bits(ours) if call else None
        if call == 2:
            wrong = y[own] if comm.rank else np.where(np.arange(len(y[own])) == 0, "newt", y[own])
            with pytest.raises(ValueError, match="newt"):
                ours.partial_fit(X[own], wrong)
            assert bits(ours) == before
        ours.partial_fit(X[own], y[own], classes=["ant", "bee", "wasp"])
        alone.partial_fit(X, y, classes=["ant", "bee", "wasp"])
        assert comm.allgather(bits(ours)) == [bits(ours)] * comm.size
    if comm.size < 3:  # whose batches are of ranks with samples alone
        np.testing.assert_allclose(ours.decision_function(X), alone.decision_function(X), rtol=1e-6, atol=1e-8)


def case_a_rank_without_a_model_is_the_same_error_on_all(comm):
    X, y = problem(LinearRegression, 2**31)
    own, model = share(comm), LinearRegression(comm=comm)
    if comm.rank == 0:
        model.set_params(comm=sar.SERIAL).fit(X, y).set_params(comm=comm)
    if comm.size == 1:
        model.partial_fit(X[own], y[own])
        return
    with pytest.raises(MismatchError, match="use the same model on all ranks") as caught:
        model.partial_fit(X[own], y[own])
    assert comm.allgather(str(caught.value)) == [str(caught.value)] * comm.size


@limit(120)
@each(loss=["epsilon_insensitive", "squared_epsilon_insensitive"])
def case_support_vector_regression_comes_to_the_optimum_of_one_process(comm, loss):
    X, y = problem(LinearRegression, 2**31)
    own, given = share(comm), {"loss": loss, "epsilon": 0.2, "l2": 1e-2, "tol": 1e-4, "solver": "dual"}
    ours, alone = LinearRegression(comm=comm, **given).fit(X[own], y[own] + 50), LinearRegression(comm=sar.SERIAL, **given).fit(X, y + 50)
    assert comm.allgather(bits(ours)) == [bits(ours)] * comm.size
    assert ours.solver_ == "dual"

    def objective(model):
        excess = np.maximum(np.abs(model.predict(X) - y - 50) - 0.2, 0)
        weights = model.coef_.data if scipy.sparse.issparse(model.coef_) else model.coef_
        return 5e-3 * (weights @ weights) + (excess**2 if loss.startswith("squared") else excess).mean()

    assert objective(ours) <= objective(alone) * (1 + 3e-4)
