"""Dual coordinate ascent in rounds under MPI: one optimum for any number of ranks, the same bits on all, and errors that all share."""

import numpy as np
import pytest
import scipy.sparse
from mpi_cases import each, on_ranks

import sparseallreduce as sar
from sparseallreduce.errors import DatasetError, SparseAllreduceError
from sparseallreduce.linear import Dataset, Hinge, Logistic, SquaredHinge
from sparseallreduce.linear.solvers import CoCoA

FEATURES, SAMPLES, L2 = 60, 120, 0.02
LOSSES = {"hinge": Hinge, "squared_hinge": SquaredHinge, "logistic": Logistic}


def matrix():
    rng = np.random.default_rng(4)
    X = scipy.sparse.random_array((SAMPLES, FEATURES), density=0.1, rng=rng, format="csr", dtype=np.float32)
    y = np.where(X @ rng.standard_normal(FEATURES) + 0.1 * rng.standard_normal(SAMPLES) > 0, 1.0, -1.0)
    return X, y


def part(comm, bounds=None):
    """This rank's samples, by default about as many as each other's."""
    X, y = matrix()
    bounds = np.linspace(0, SAMPLES, comm.size + 1).astype(int) if bounds is None else bounds
    low, high = bounds[comm.rank], bounds[comm.rank + 1]
    return Dataset.from_scipy(X[low:high], y[low:high], first_sample=int(low), total_samples=SAMPLES)


def solved(data, comm, loss, **options):
    found = CoCoA(data, LOSSES[loss](), l2=L2, comm=comm, **{"tolerance": 1e-6, "rounds": 5000} | options)
    return found, found.fit()


def check_alike_and_best(comm, found, weights, loss):
    assert len({each.tobytes() for each in comm.allgather(weights)}) == 1
    X, y = matrix()
    _, alone = solved(Dataset.from_scipy(X, y), sar.SERIAL, loss)

    def value(w):
        return L2 / 2 * w @ w + np.mean(LOSSES[loss]().loss(X @ w[:-1] + w[-1], y))

    assert found.converged
    assert abs(value(weights) - value(alone)) <= 4e-6 * value(alone)


@on_ranks(1, 2, 3, 4, 5)
@each(loss=LOSSES)
def case_any_number_of_ranks_comes_to_the_same_optimum(comm, loss):
    check_alike_and_best(comm, *solved(part(comm), comm, loss), loss)


@on_ranks(2, 4)
@each(loss=["squared_hinge", "logistic"])
def case_ranks_with_few_samples_or_none_take_part(comm, loss):
    bounds = np.full(comm.size + 1, SAMPLES)
    bounds[:2] = 0, SAMPLES - 1
    bounds[0] = 0
    check_alike_and_best(comm, *solved(part(comm, bounds), comm, loss), loss)


@on_ranks(2, 3)
def case_several_passes_a_round_come_to_the_same_optimum(comm):
    check_alike_and_best(comm, *solved(part(comm), comm, "logistic", local_passes=3), "logistic")


@on_ranks(3)
def case_values_that_are_wrong_on_one_rank_are_refused_on_all(comm):
    data = part(comm)
    if comm.rank == 1:
        values = np.array(data.values)
        values[0] = np.nan
        data = Dataset(data.indptr, data.indices, values, data.labels, FEATURES, data.first_sample, SAMPLES)
    with pytest.raises(DatasetError):
        solved(data, comm, "hinge")


@on_ranks(2, 3)
def case_settings_that_differ_are_refused_on_all(comm):
    with pytest.raises(SparseAllreduceError, match="l2"):
        CoCoA(part(comm), Hinge(), l2=0.1 + comm.rank, comm=comm)
