"""Local steps of arrays over MPI: as in the simulator, with ranks that join, states of other numbers of ranks, and errors in flight."""

import numpy as np
import pytest
from mpi_cases import each

import sparseallreduce as sar
from sparseallreduce.errors import CheckpointError
from sparseallreduce.optim import DiLoCo, LocalSGD, SparseLoCo, simulated_local_step

RANKS = (2, 3)
SIZE, H = 1000, 4
KINDS = {
    "SparseLoCo": lambda own, comm, **how: SparseLoCo(own, H, 0.1, chunk=128, comm=comm, **how),
    "DiLoCo": lambda own, comm, **how: DiLoCo(own, H, comm=comm, **how),
    "LocalSGD": lambda own, comm, **how: LocalSGD(own, H, comm=comm, **how),
}
WHENS = {"at once": {}, "delayed": {"delay": 3}, "in turn": {"fragments": 2, "delay": 4}}


def advance(weights, local, rank, steps, first=0):
    for step in range(first, first + steps):
        weights += np.random.default_rng((rank, step)).standard_normal(SIZE).astype(np.float32) / 10
        local.step()


@each(kind=KINDS, when=WHENS)
def case_ranks_come_to_what_the_simulator_says(comm, kind, when):
    weights = np.full(SIZE, 1 + comm.rank, np.float32)
    local = KINDS[kind](weights, comm, **WHENS[when])
    advance(weights, local, comm.rank, 14)
    replicas = [np.ones(SIZE, np.float32) for _ in range(comm.size)]
    simulated = [KINDS[kind](own, sar.SERIAL, **WHENS[when]) for own in replicas]
    for step in range(14):
        for rank, own in enumerate(replicas):
            own += np.random.default_rng((rank, step)).standard_normal(SIZE).astype(np.float32) / 10
        simulated_local_step(simulated)
    if kind == "SparseLoCo":
        assert weights.tobytes() == replicas[comm.rank].tobytes()
    np.testing.assert_allclose(weights, replicas[comm.rank], atol=1e-5)
    local.check_replicas()
    local.synchronize()
    assert len(set(comm.allgather(weights.tobytes()))) == 1


@each(kind=KINDS)
def case_a_rank_that_joins_late_gets_the_weights_and_goes_on_with_all(comm, kind):
    first = comm.Split(comm.rank < comm.size - 1, comm.rank)
    weights = np.full(SIZE, 1 + comm.rank, np.float32)
    if comm.rank < comm.size - 1:
        local = KINDS[kind](weights, first, delay=1)
        advance(weights, local, comm.rank, 8)
        with pytest.raises(sar.AlgorithmError, match="in flight"):
            local.set_communicator(comm)
        local.finish()
        local.set_communicator(comm)
    else:
        with pytest.raises(sar.AlgorithmError, match="in flight"):
            KINDS[kind](weights, comm, delay=1)
        local = KINDS[kind](weights, comm, delay=1)
        assert weights.tobytes() == local._anchor.tobytes()
    assert (local.steps, local.sums) == (8, 2)
    local.check_replicas()
    advance(weights, local, comm.rank, 6, 8)
    local.synchronize()
    local.check_replicas()
    assert len(set(comm.allgather(weights.tobytes()))) == 1
    first.Free()


def case_the_first_rank_of_those_that_go_on_is_not_new(comm):
    first = comm.Split(comm.rank > 0, comm.rank)
    weights = np.ones(SIZE, np.float32)
    if comm.rank:
        local = LocalSGD(weights, H, comm=first)
        advance(weights, local, comm.rank, 4)
    with pytest.raises(sar.AlgorithmError, match="rank 0 is new"):
        local.set_communicator(comm) if comm.rank else LocalSGD(weights, H, comm=comm)
    if comm.rank:
        advance(weights, local, comm.rank, 4, 4)  # among those that were there
        assert local.sums == 2
    first.Free()


@each(kind=KINDS, when=WHENS)
def case_a_state_goes_on_to_the_bit_with_sums_in_flight(comm, kind, when):
    weights, again = np.ones(SIZE, np.float32), np.zeros(SIZE, np.float32)
    local, other = (KINDS[kind](own, comm, **WHENS[when]) for own in (weights, again))
    advance(weights, local, comm.rank, 6)
    state, parameters = local.state(), weights.copy()
    advance(weights, local, comm.rank, 8, 6)
    again[:] = parameters
    other.restore(state)
    advance(again, other, comm.rank, 8, 6)
    assert again.tobytes() == weights.tobytes()


@each(kind=KINDS)
def case_states_go_on_with_another_number_of_ranks(comm, kind):
    """From fewer ranks to more: the new ones load the state and the parameters of rank 0. And back."""
    fewer = comm.Split(comm.rank < comm.size - 1, comm.rank)
    weights = np.ones(SIZE, np.float32)
    local = KINDS[kind](weights, fewer, delay=2) if comm.rank < comm.size - 1 else None
    if local is not None:
        advance(weights, local, comm.rank, 5)
    own = None if local is None else local.state()  # on all of their ranks: it waits for the sum in flight
    state, parameters = comm.bcast((own, weights) if comm.rank == 0 else None)
    again = np.ones(SIZE, np.float32)
    more = KINDS[kind](again, comm, delay=2)
    again[:] = weights if local is not None else parameters
    more.restore(state if own is None else own)
    assert (more.steps, more.sums) == (5, 0)
    advance(again, more, comm.rank, 6, 5)
    more.synchronize()
    assert len(set(comm.allgather(again.tobytes()))) == 1
    if local is not None:
        back = KINDS[kind](weights, fewer, delay=2)
        weights[:] = again
        back.restore(more.state())
        advance(weights, back, comm.rank, 5, 11)
        back.check_replicas()
    fewer.Free()


@each(kind=KINDS, error=[ValueError, KeyboardInterrupt], place=["read", "write"])
def case_what_fails_on_one_rank_about_a_sum_in_flight_is_raised_on_all(comm, kind, error, place):
    weights = np.ones(SIZE, np.float32)
    local = KINDS[kind](weights, comm, delay=2)
    advance(weights, local, comm.rank, 4 if place == "write" else 3)

    def fails(*_):
        delattr(local._vector, place)
        raise error("struck")

    if comm.rank == comm.size - 1:
        setattr(local._vector, place, fails)
    with pytest.raises((error, sar.SparseAllreduceError), match="struck"):
        advance(weights, local, comm.rank, 3, 4)
    before = weights.copy()
    for _ in range(2):
        try:
            local.synchronize()
            break
        except (sar.SparseAllreduceError, error):  # of ranks that had not heard of it
            np.testing.assert_allclose(weights, before, atol=1e-6)
    local.check_replicas()
    assert len(set(comm.allgather(weights.tobytes()))) == 1


def case_states_of_different_steps_are_an_error_on_all_ranks(comm):
    weights = np.ones(SIZE, np.float32)
    local = SparseLoCo(weights, H, comm=comm)
    early = local.state()
    advance(weights, local, comm.rank, 4)
    with pytest.raises(CheckpointError, match="different steps"):
        local.restore(early if comm.rank == 0 else local.state())


def case_settings_that_differ_are_an_error_on_all_ranks(comm):
    with pytest.raises(sar.MismatchError, match="the ranks differ: delay is 0 on rank 0, and 1 on rank 1"):
        LocalSGD(np.ones(SIZE), H, delay=min(comm.rank, 1), comm=comm)
    with pytest.raises(sar.MismatchError, match="elements of the parameters"):
        LocalSGD(np.ones(SIZE + comm.rank), H, comm=comm)
