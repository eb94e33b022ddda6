"""Weights that all ranks of a host keep together: the same to the bit as those that each keeps alone."""

import os
import time
from contextlib import contextmanager
from unittest import mock

import numpy as np
from mpi_cases import each, limit, on_ranks, shared_folder

import sparseallreduce as sar
from sparseallreduce.errors import DivergenceError
from sparseallreduce.linear import (
    MODELS,
    Constant,
    DenseStrategy,
    Descent,
    Options,
    OverlappedStrategy,
    SparseStrategy,
    Trainer,
    generate,
    load,
    two_classes,
)
from sparseallreduce.linear.strategies.lossy import OkTopkStrategy
from sparseallreduce.linear.weights import Weights, new_weights
from sparseallreduce.linear.weights import lazy as lazy_weights
from sparseallreduce.linear.weights import shared as replica
from sparseallreduce.runtime.hosts import this_place
from sparseallreduce.runtime.memory import meeting
from sparseallreduce.runtime.threads import Threads

RANKS = (1, 2, 5)
SIZE = 5000
DESCENTS = {
    "plain": Descent(),
    "small scale": Descent(0.5, True),  # which falls below what is kept apart
    "lazy": Descent(1e-2, True, 1e-4, 0.5, average_from=5),
    "averaged": Descent(average_from=0),
    "adaptive": Descent(update="ftrl"),
    "adaptive, with penalties": Descent(1e-2, True, 1e-4, update="ftrl"),
    "adaptive, with beta": Descent(1e-2, True, 1e-4, update="ftrl", beta=0.1),
}
AROW = {"arow": Descent(update="arow"), "arow, with penalties": Descent(1e-2, True, 1e-4, update="arow")}


def sparse(*arguments, **options):
    """The sparse strategy by one algorithm, whatever the sizes."""
    return SparseStrategy(*arguments, algorithm="ssar_recursive_doubling", **options)


@contextmanager
def sharing(wanted):
    """Whether weights are shared, however few they are."""
    with mock.patch.object(replica, "_FEW", 0 if wanted else 1 << 60), mock.patch.object(lazy_weights, "_STEPS", 7):
        yield


def trained(comm, path, strategy, descent, threads=1):
    """A strategy at the end of a run over samples in a file."""
    train, _ = two_classes(load(path, comm=comm, n_features=SIZE)[0], comm)
    kept = strategy(train, comm, descent, threads=threads)
    list(Trainer(MODELS["svm" if descent.second_order else "logistic"](), kept, Constant(0.5), Options(3, global_batch=10)).run(train))
    return kept


@on_ranks(1, 2, 3)
@limit(120)
@each(descent=DESCENTS, strategy=[sparse, DenseStrategy, OkTopkStrategy])
def case_a_shared_replica_changes_no_bit(comm, descent, strategy):
    compare_shared_and_own(comm, DESCENTS[descent], strategy)


@on_ranks(1, 2, 3)
@limit(120)
@each(descent=AROW, strategy=[sparse, DenseStrategy])
def case_a_shared_replica_changes_no_bit_of_arow(comm, descent, strategy):
    compare_shared_and_own(comm, AROW[descent], strategy)


def compare_shared_and_own(comm, descent, strategy):
    with shared_folder(comm) as folder:
        if comm.rank == 0:
            generate("url-like", folder / "samples.svm", samples=90, features=SIZE)
        comm.Barrier()
        ends = []
        for shared in (False, True):
            with sharing(shared):
                kept = trained(comm, folder / "samples.svm", strategy, descent, 1 + comm.rank % 2)
            assert (kept.weights._replica is not None) == (shared and comm.size > 1)
            ends.append(kept.weights.to_array())
    assert np.count_nonzero(ends[0]) > 50
    np.testing.assert_array_equal(ends[1].view(np.uint32), ends[0].view(np.uint32))
    assert len(set(comm.allgather(ends[1].tobytes()))) == 1


def case_who_reads_while_others_change_keeps_a_replica_alone(comm):
    with shared_folder(comm) as folder:
        if comm.rank == 0:
            generate("uniform", folder / "samples.svm", samples=40, features=SIZE, density=0.01)
        comm.Barrier()
        with sharing(True):
            kept = trained(comm, folder / "samples.svm", OverlappedStrategy, Descent())
    assert kept.weights._replica is None


@each(where=["first", "last"])
def case_a_weight_that_is_not_finite_is_the_same_error_on_every_rank(comm, where):
    """Though only the rank that changes it sees it."""
    with sharing(True):
        weights = shared(comm, Descent())
    gradient = np.zeros(SIZE, np.float32)
    gradient[0 if where == "first" else -1] = np.inf
    for form in (None, 0.0):
        try:
            weights.descend(sar.SparseStream.from_dense(gradient, switch_density=form), 0.1)
            weights.wait_for_peers()
            told = None
        except DivergenceError as error:
            told = str(error)
        assert told is not None and "lower the learning rate (0.1 there)" in told
        assert len(set(comm.allgather(told))) == 1
        weights.assign(np.zeros(SIZE))
    weights.descend(sar.SparseStream([3], np.float32([1.0]), SIZE), 1.0)
    assert weights.to_array()[3] == -1


def shared(comm, descent, waited=float):
    """Weights of ones that the ranks of a host share."""
    weights = new_weights(SIZE, descent, threads=Threads())
    weights.assign(np.ones(SIZE))
    weights.share(comm, waited)
    return weights


def gradients(seed, steps=20):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        yield sar.SparseStream.from_dense(np.where(rng.random(SIZE) < 0.3, rng.standard_normal(SIZE), 0).astype(np.float32))


@each(descent=DESCENTS)
def case_what_was_taken_down_is_restored(comm, descent):
    with sharing(True):
        weights, alone = shared(comm, DESCENTS[descent]), new_weights(SIZE, DESCENTS[descent])
        alone.assign(np.ones(SIZE))
        for gradient in gradients(1):
            weights.descend(gradient, 0.3)
            alone.descend(gradient, 0.3)
            comm.Barrier()
        state = {name: np.copy(value) if isinstance(value, np.ndarray) else value for name, value in weights.state().items()}
        later = shared(comm, DESCENTS[descent])
        later.restore(state)
        for gradient in gradients(2):
            for each_of_them in (weights, later, alone):
                each_of_them.descend(gradient, 0.3)
            comm.Barrier()
    np.testing.assert_array_equal(weights.to_array(), alone.to_array())
    np.testing.assert_array_equal(later.to_array(), alone.to_array())


def case_who_reads_waits_for_late_ranks(comm):
    seconds = []
    with sharing(True):
        weights = shared(comm, Descent(), seconds.append)
    comm.Barrier()
    if comm.rank == comm.size - 1:
        time.sleep(0.2)
    weights.descend(sar.SparseStream.from_dense(np.ones(SIZE, np.float32)), 1.0)
    assert not seconds
    np.testing.assert_array_equal(weights.to_array(), np.zeros(SIZE))
    assert sum(seconds) >= 0.1 or comm.rank == comm.size - 1


@each(descent=DESCENTS)
def case_ranks_that_read_nothing_for_some_steps_fall_behind_in_nothing(comm, descent):
    """As those without a sample in a batch."""
    with sharing(True):
        weights, alone = shared(comm, DESCENTS[descent]), new_weights(SIZE, DESCENTS[descent])
        alone.assign(np.ones(SIZE))
        for step, gradient in enumerate(gradients(3)):
            comm.Barrier()
            weights.descend(gradient, 0.3)
            alone.descend(gradient, 0.3)
            if step % comm.size == comm.rank:
                np.testing.assert_array_equal(weights.to_array(), alone.to_array())
    np.testing.assert_array_equal(weights.to_array(), alone.to_array())


def case_each_host_has_a_replica(comm):
    hosts = [rank % 2 for rank in range(comm.size)]
    here = this_place()._replace(host=bytes([hosts[comm.rank]]) * 8, memory=bytes([hosts[comm.rank]]) * 8)
    with sharing(True), mock.patch.object(meeting, "this_place", return_value=here):
        weights, alone = shared(comm, DESCENTS["small scale"]), new_weights(SIZE, DESCENTS["small scale"])
    ranks = hosts.count(hosts[comm.rank])
    assert weights._parts == ranks
    assert (weights._replica is not None) == (ranks > 1)
    alone.assign(np.ones(SIZE))
    for gradient in gradients(4):
        comm.Barrier()
        weights.descend(gradient, 0.3)
        alone.descend(gradient, 0.3)
    np.testing.assert_array_equal(weights.to_array(), alone.to_array())


def case_without_shared_memory_each_rank_has_a_replica(comm):
    fails = mock.Mock(side_effect=OSError("none here"))
    with sharing(True), mock.patch.object(os, "memfd_create", fails):
        weights = shared(comm, Descent())
    assert weights._replica is None
    weights.descend(sar.SparseStream([SIZE - 1], np.float32([1.0]), SIZE), 1.0)
    assert weights.to_array()[-1] == 0


def case_few_weights_are_not_shared(comm):
    weights = Weights(100)
    weights.share(comm, float)
    assert weights._replica is None
