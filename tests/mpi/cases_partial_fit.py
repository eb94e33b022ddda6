"""Calls of ``partial_fit`` on live weights under MPI: one model on all ranks, whatever samples each has, and whatever fails on one."""

import pickle

import numpy as np
from cases_estimators import problem, same, share, told
from mpi_cases import each, limit, skip

import sparseallreduce as sar
from sparseallreduce.errors import MismatchError, SparseAllreduceError
from sparseallreduce.linear import LogisticRegression

RANKS = (1, 2, 3)
SETTINGS = [{}, {"momentum": 0.0, "l2": 0.1}, {"average": True}, {"strategy": "overlapped"}, {"update": "ftrl", "l1": 1e-3}]


def made(comm, ranks, setting):
    given = {"learning_rate": 0.05, "schedule": "constant", "update": "sgd", "batch_size": 12 // ranks, "tol": None}
    return LogisticRegression(comm=comm, **given | setting)


def fed(model, comm, calls, rows=None):
    """Feed chunks of samples of growing size, of which a rank has a share of its own."""
    X, y = problem(LogisticRegression)
    for call in calls:
        own = share(comm) if rows is None else rows
        model.partial_fit(X[own] * (1 + call), y[own], classes=np.unique(y))
    return model


@limit(120)
@each(setting=SETTINGS)
def case_calls_are_those_of_one_process(comm, setting):
    ours = fed(made(comm, comm.size, setting), comm, range(5))
    assert ours._live is not None and ours._live.weights._replica is None
    alone = fed(made(sar.SERIAL, 1, setting), comm, range(5), slice(None))
    assert same(comm, ours.coef_, ours.intercept_, ours.t_, ours._live.token, ours._magnitudes)
    np.testing.assert_allclose(ours.coef_, alone.coef_, rtol=1e-5, atol=1e-7)
    X, _ = problem(LogisticRegression)
    fed(ours, comm, [1])
    assert "coef_" not in vars(ours)
    assert same(comm, ours.decision_function(X))


@each(setting=SETTINGS)
def case_a_rank_may_have_no_samples_in_some_calls(comm, setting):
    model = fed(made(comm, comm.size, setting), comm, range(2))
    for call in range(3):
        rows = slice(0, 0) if comm.rank == call and comm.size > 1 else slice(10 * comm.rank, 10 * comm.rank + 30)
        fed(model, comm, [call], rows)
    assert same(comm, model.coef_, model.intercept_, model._live.token)


@limit(30)
@each(setting=SETTINGS[:3] + SETTINGS[4:], where=["scores", "gradient"])
def case_a_call_that_fails_on_one_rank_changes_nothing_on_any(comm, setting, where):
    model = fed(made(comm, comm.size, setting), comm, range(3))
    undisturbed = fed(made(comm, comm.size, setting), comm, range(3))
    if comm.rank == comm.size - 1:
        batch, calls = model._live.strategy._batch, []
        original = getattr(batch, where)

        def instead(*arguments):
            calls.append(None)
            if len(calls) == 2:
                raise MemoryError("no room")
            return original(*arguments)

        setattr(batch, where, instead)
    told(comm, lambda: fed(model, comm, [3]), (MemoryError, SparseAllreduceError))
    assert model._live.strategy is None
    fed(model, comm, [4])
    fed(undisturbed, comm, [4])
    assert same(comm, model.coef_, model.intercept_)
    np.testing.assert_array_equal(model.coef_, undisturbed.coef_)
    np.testing.assert_array_equal(model.intercept_, undisturbed.intercept_)


@each(setting=SETTINGS)
def case_a_model_that_some_ranks_have_from_a_pickle_is_gone_on_with(comm, setting):
    model = fed(made(comm, comm.size, setting), comm, range(3))
    content = comm.bcast(pickle.dumps(model) if comm.rank == 0 else None)
    undisturbed = pickle.loads(content)
    undisturbed.comm = comm
    if comm.rank > 0:
        model = pickle.loads(content)
        model.comm = comm
    for each_model in (model, undisturbed):
        fed(each_model, comm, [3, 4])
        assert same(comm, each_model.coef_, each_model._live.token)
    np.testing.assert_array_equal(model.coef_, undisturbed.coef_)


def case_ranks_that_have_trained_apart_are_told(comm):
    if comm.size == 1:
        skip("needs two ranks")
    model = fed(made(sar.SERIAL, 1, {}), comm, range(2), slice(0, 20 + comm.rank))
    model.comm = comm
    assert "different calls of partial_fit" in told(comm, lambda: fed(model, comm, [2]), MismatchError)
