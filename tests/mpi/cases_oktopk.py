"""Ok-Topk over MPI: what the simulator gives to the bit, over many steps, among other ranks, several in flight, after a failure."""

from functools import partial
from unittest import mock

import numpy as np
from cases_errors import raised
from lossy import Vectors, top
from mpi_cases import each, on_ranks, skip
from mpi_inputs import check_usable, same_everywhere, simulated_once
from oracle import bits

import sparseallreduce as sar
from sparseallreduce.reducers.oktopk import reducer as oktopk

RANKS = (1, 2, 3, 4, 8)


@on_ranks(1, 2, 3, 4)
@each(blocking=[True, False], period=[1, 3])
def case_steps_are_those_of_the_simulator(comm, blocking, period):
    for size, k, dtype, steps in ((7, 2, "float64", 2), (900, 40, "float32", 5), (60_000, 9_000, "float32", 2)):
        case = Vectors(comm.size, size, k, dtype, seed=size, places="region")
        options = {"threshold_period": period, "boundary_period": 2 * period}
        simulated = [sar.ErrorFeedback(reducer, dtype) for reducer in case.reducers(sar.OkTopk, **options)]
        feedback = sar.ErrorFeedback(sar.OkTopk(size, k, **options), dtype)
        for step in range(steps):
            gradients = case.step(step)
            expected, residual = simulated_once(comm, partial(descended, gradients, simulated))
            mean = feedback.step(gradients[comm.rank], comm) if blocking else feedback.istep(gradients[comm.rank], comm).wait()
            assert bits(mean) == expected
            np.testing.assert_array_equal(feedback.residual, residual)
        same_everywhere(comm, mean)


def descended(gradients, feedbacks):
    """Of each simulated rank: the bits of the mean, and the residual."""
    means = sar.simulate(gradients, feedbacks).outputs
    return [(bits(mean), feedback.residual.copy()) for mean, feedback in zip(means, feedbacks)]


@each(blocking=[True, False])
def case_the_first_operation_gives_the_top_k_of_the_sum_of_top_k(comm, blocking):
    case = Vectors(comm.size, 5_000, 100, "float64", seed=4)
    reducer = sar.OkTopk(case.size, case.k)
    ours = case.first[comm.rank]
    reduced = reducer.allreduce(ours, comm) if blocking else reducer.iallreduce(ours, comm).wait()
    expected = top(np.sum([top(accumulator, case.k) for accumulator in case.first], axis=0), case.k)
    np.testing.assert_allclose(reduced.update.to_dense(), expected, rtol=1e-12, atol=1e-12)
    same_everywhere(comm, reduced.update)


def case_all_values_on_one_rank_move_to_others(comm):
    """The plan of the transfers, over MPI."""
    size = 4_000
    accumulator = np.zeros(size)
    accumulator[comm.rank :: comm.size] = 1
    accumulator[comm.rank : size // comm.size : comm.size] = 100 + comm.rank
    k = size // comm.size
    with mock.patch.object(oktopk, "balance_and_gather", wraps=oktopk.balance_and_gather) as gathered:
        update, _ = sar.OkTopk(size, k, balance_boundaries=False).allreduce(accumulator, comm)
    sizes = gathered.call_args.args[1]
    assert max(sizes) == sum(sizes) == k
    assert update.indices.tolist() == list(range(k))
    same_everywhere(comm, update)


def case_several_tensors_in_flight(comm):
    cases = [Vectors(comm.size, 2_000, 60, seed=seed) for seed in range(4)]
    simulated = [case.reducers(sar.OkTopk) for case in cases]
    reducers = [case.reducers(sar.OkTopk)[0] for case in cases]
    for step in range(2):
        gradients = [case.step(step) for case in cases]
        requests = [reducer.iallreduce(vectors[comm.rank], comm) for vectors, reducer in zip(gradients, reducers)]
        updates = {number: requests[number].wait().update for number in (reversed(range(4)) if comm.rank % 2 else range(4))}
        for number, vectors in enumerate(gradients):
            expected = simulated_once(comm, partial(updated, vectors, simulated[number]))
            assert bits(updates[number]) == expected


def updated(accumulators, reducers):
    """Of each simulated rank: the bits of the update."""
    return [bits(reduced.update) for reduced in sar.simulate(accumulators, reducers).outputs]


def case_other_ranks_begin_anew(comm):
    if comm.size < 3:
        skip("needs three ranks")
    case = Vectors(comm.size, 500, 20, seed=9)
    reducer = sar.OkTopk(case.size, case.k)
    reducer.allreduce(case.step(0)[comm.rank], comm)
    some = comm.Split(comm.rank == 0)
    members = [0] if comm.rank == 0 else list(range(1, comm.size))
    update, _ = reducer.allreduce(case.step(1)[comm.rank], some)
    expected = sar.simulate([case.step(1)[rank] for rank in members], [sar.OkTopk(case.size, case.k) for _ in members])
    assert bits(update) == bits(expected.outputs[0].update)
    some.Free()
    mismatch = raised(lambda: reducer.allreduce(case.step(2)[comm.rank], comm))
    assert isinstance(mismatch, sar.MismatchError), "rank 0 comes from another group than the others"
    assert "regions" in str(mismatch)
    reducer.reset()
    same_everywhere(comm, reducer.allreduce(case.step(2)[comm.rank], comm).update)


@each(step=["split_and_reduce", "balance_and_gather"])
def case_a_failure_on_one_rank_leaves_the_state_of_all(comm, step):
    if comm.size < 2:
        skip("needs two ranks")
    case = Vectors(comm.size, 1_000, 50, seed=2)
    simulated, reducer = case.reducers(sar.OkTopk), sar.OkTopk(case.size, case.k)
    sar.simulate(case.step(0), simulated)
    reducer.allreduce(case.step(0)[comm.rank], comm)
    before = reducer.state()
    with mock.patch.object(oktopk, step, _out_of_memory) if comm.rank == comm.size - 1 else mock.MagicMock():
        failure = raised(lambda: reducer.allreduce(case.step(1)[comm.rank], comm))
    assert "for the test" in str(failure), "the failure of one rank is that of all"
    assert reducer.state() == before
    for number in (1, 2):
        expected = sar.simulate(case.step(number), simulated).outputs[comm.rank]
        assert bits(reducer.allreduce(case.step(number)[comm.rank], comm).update) == bits(expected.update)
    check_usable(comm)


def _out_of_memory(*_):
    raise MemoryError("for the test")
    yield
