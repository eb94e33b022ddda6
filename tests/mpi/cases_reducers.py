"""Reducers and error feedback over MPI: what the simulator gives, in any order of completion; one rank's mistake is everyone's."""

import signal
from contextlib import contextmanager
from functools import partial
from unittest import mock

import numpy as np
import pytest
from cases_errors import check_same_everywhere, raised
from cases_faults import failing
from lossy import REDUCERS, Vectors
from mpi4py import MPI
from mpi_cases import each, on_ranks, skip
from mpi_inputs import check_usable, hear_from, same_everywhere, simulated_once, tell_the_others
from oracle import bits

import sparseallreduce as sar
from sparseallreduce.reducers import base as reducers_base
from sparseallreduce.streams.selection import ChunkTopK

RANKS = (1, 2, 3, 4, 8)
# Fewer elements than ranks; streams that fit into one message, and that take several. Size, k, dtype, steps.
SIZES = ((3, 1, "float64", 2), (500, 20, "float32", 2), (30_000, 900, "float32", 1))


@each(name=REDUCERS, blocking=[True, False])
def case_sums_are_those_of_the_simulator(comm, name, blocking):
    for size, k, dtype, steps in SIZES:
        case = Vectors(comm.size, size, k, dtype, seed=size)
        simulated, (reducer, *_) = case.reducers(REDUCERS[name]), case.reducers(REDUCERS[name])
        for step in range(steps):
            accumulators = case.step(step)
            ours = accumulators[comm.rank].copy()
            update, contributed, returned = simulated_once(comm, partial(results, accumulators, simulated))
            reduced = reducer.allreduce(ours, comm) if blocking else reducer.iallreduce(ours, comm).wait()
            assert bits(reduced.update) == update
            np.testing.assert_array_equal(reduced.contributed, contributed)
            np.testing.assert_array_equal(reducer.returned.to_dense(), returned)
            np.testing.assert_array_equal(ours, accumulators[comm.rank])
            same_everywhere(comm, reduced.update)


@each(codec=["qsgd2", "qsgd8"], blocking=[True, False])
def case_coded_means_are_those_of_the_simulator(comm, codec, blocking):
    def feedback(size, k):
        reducer = sar.TopkA(size, k, selector=partial(ChunkTopK, chunk=100), value_codec=codec)
        return sar.ErrorFeedback(reducer, decay=0.9)

    case = Vectors(comm.size, 30_000, 900, "float32", seed=1)
    group, ours = [feedback(case.size, case.k) for _ in range(comm.size)], feedback(case.size, case.k)
    for step in range(2):
        gradients = case.step(step)
        mean = simulated_once(comm, lambda gradients=gradients: [bits(each) for each in sar.simulate(gradients, group).outputs])
        found = ours.step(gradients[comm.rank], comm) if blocking else ours.istep(gradients[comm.rank], comm).wait()
        assert bits(found) == mean
        same_everywhere(comm, found)


@each(make=[sar.HiTopK, partial(sar.OkTopk, hosts=True), partial(sar.GTopk, hosts=True)], blocking=[True, False])
def case_sums_on_one_host_are_those_of_the_simulator(comm, make, blocking):
    for size, k, dtype, steps in SIZES:
        case = Vectors(comm.size, size, k, dtype, seed=size)
        simulated, (reducer, *_) = case.reducers(make), case.reducers(make)
        for step in range(steps):
            accumulators = case.step(step)
            network = sar.Network(hosts=comm.size)
            update, _, returned = simulated_once(comm, partial(results, accumulators, simulated, network))
            ours = accumulators[comm.rank]
            reduced = reducer.allreduce(ours, comm) if blocking else reducer.iallreduce(ours, comm).wait()
            assert bits(reduced.update) == update
            np.testing.assert_array_equal(reducer.returned.to_dense(), returned)
            same_everywhere(comm, reduced.update)


def results(accumulators, reducers, network=None):
    """Of each simulated rank: the bits of the update, what contributed, and what was returned."""
    outputs = sar.simulate(accumulators, reducers, network).outputs
    return [(bits(out.update), out.contributed, reducer.returned.to_dense()) for out, reducer in zip(outputs, reducers)]


@each(name=REDUCERS, blocking=[True, False])
def case_nothing_is_lost(comm, name, blocking):
    case = Vectors(comm.size, 300, 6, "float64", seed=1)
    (reducer, *_) = case.reducers(REDUCERS[name])
    feedback = sar.ErrorFeedback(reducer, "float64")
    applied, came_in = np.zeros((2, case.size))
    for step in range(8):
        gradients = case.step(step)
        ours = gradients[comm.rank]
        mean = feedback.step(ours, comm) if blocking else feedback.istep(ours, comm).wait()
        applied += comm.size * mean.to_dense()
        came_in += np.sum(gradients, axis=0)
    np.testing.assert_allclose(applied + comm.allreduce(feedback.residual), came_in, rtol=0, atol=1e-10)
    same_everywhere(comm, mean)


@on_ranks(2, 3)
@each(order=["reverse", "another on each rank", "waitall", "test"])
def case_steps_of_several_tensors_in_flight(comm, order):
    """As an optimiser starts them, a layer at a time, with all kinds of reducers."""
    cases = [Vectors(comm.size, 1000 * (number + 1), 30, seed=number) for number in range(len(REDUCERS))]
    simulated = [[sar.ErrorFeedback(reducer) for reducer in case.reducers(make)] for case, make in zip(cases, REDUCERS.values())]
    feedbacks = [sar.ErrorFeedback(case.reducers(make)[0]) for case, make in zip(cases, REDUCERS.values())]
    for step in range(2):
        gradients = [case.step(step) for case in cases]
        requests = [feedback.istep(vectors[comm.rank], comm) for feedback, vectors in zip(feedbacks, gradients)]
        means = completed(requests, order, comm.rank)
        expected = simulated_once(comm, partial(descended, gradients, simulated))
        for mean, feedback, (of_simulation, residual) in zip(means, feedbacks, expected):
            assert bits(mean) == of_simulation
            np.testing.assert_array_equal(feedback.residual, residual)


def descended(gradients, groups):
    """Of each simulated rank and each tensor: the bits of the mean, and the residual."""
    means = [[bits(mean) for mean in sar.simulate(vectors, group).outputs] for vectors, group in zip(gradients, groups)]
    residuals = [[feedback.residual.copy() for feedback in group] for group in groups]
    return [list(zip(of_rank, kept)) for of_rank, kept in zip(zip(*means), zip(*residuals))]


def completed(requests, order, rank):
    if order == "waitall":
        return sar.Request.waitall(requests)
    results = {}
    if order == "test":
        while len(results) < len(requests):
            for number, request in enumerate(requests):
                done, result = request.test()
                if done:
                    results[number] = result
    else:
        turn = 0 if order == "reverse" else rank
        for number in reversed(range(len(requests))):
            number = (number + turn) % len(requests)
            results[number] = requests[number].wait()
    return [results[number] for number in range(len(requests))]


def case_a_step_beside_other_operations(comm):
    case = Vectors(comm.size, 2000, 50)
    reducer = sar.GTopk(2000, 50)
    first = reducer.iallreduce(case.first[comm.rank], comm)
    check_usable(comm)
    expected = sar.simulate(case.first, case.reducers(sar.GTopk)).outputs[comm.rank]
    assert bits(first.wait().update) == bits(expected.update)


def case_a_thread_moves_a_step_on(comm):
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        skip("needs MPI_THREAD_MULTIPLE")
    case = Vectors(comm.size, 5000, 50, seed=3)
    feedback = sar.ErrorFeedback(sar.GTopk(5000, 50))
    mean = feedback.istep(case.first[comm.rank], comm, progress="thread").wait()
    group = [sar.ErrorFeedback(reducer) for reducer in case.reducers(sar.GTopk)]
    assert bits(mean) == bits(sar.simulate(case.first, group).outputs[comm.rank])
    np.testing.assert_array_equal(feedback.residual, group[comm.rank].residual)


# What one rank has in place of a GTopk(10, 2) or of ten float32; the class of the error; what its text has to say.
MISTAKES = {
    "no array": (None, [1.0] * 10, sar.StreamTypeError, "not list"),
    "integers": (None, np.ones(10, int), sar.StreamTypeError, "int64"),
    "length": (None, np.ones(11, np.float32), sar.StreamError, "(10,), not (11,)"),
    "gaps": (None, np.ones(20, np.float32)[::2], sar.StreamError, "contiguous"),
    "dtype": (None, np.ones(10), sar.MismatchError, "dtype: float32 on rank"),
    "k": (lambda: sar.GTopk(10, 3), np.ones(10, np.float32), sar.MismatchError, "k: 2 on rank"),
    "size": (lambda: sar.GTopk(11, 2), np.ones(11, np.float32), sar.MismatchError, "size: 10 on rank"),
    "reducer": (lambda: sar.TopkA(10, 2), np.ones(10, np.float32), sar.MismatchError, "reducer: gtopk on rank"),
    "form": (lambda: sar.GTopk(10, 2, form="allgather"), np.ones(10, np.float32), sar.MismatchError, "form: tree on rank"),
}


@each(mistake=MISTAKES, how=["blocking", "wait", "test"])
def case_mistake_on_one_rank_is_raised_on_all(comm, mistake, how):
    make, array, kind, text = MISTAKES[mistake]
    if comm.size == 1 and kind is sar.MismatchError:
        skip("one rank agrees with itself")
    culprit = comm.size // 2
    wrong = comm.rank == culprit
    reducer = make() if wrong and make is not None else sar.GTopk(10, 2)
    error = raised(lambda: call(reducer, array if wrong else np.ones(10, np.float32), comm, how))
    assert type(error) is kind, repr(error)
    assert text in str(error)
    check_same_everywhere(comm, error)
    check_usable(comm)
    assert sar.GTopk(10, 2).allreduce(np.ones(10, np.float32), comm).update.values.tolist() == [comm.size] * 2
    assert reducer.steps == 0
    reducer.reset()  # not taken for busy


def call(reducer, array, comm, how):
    if how == "blocking":
        return reducer.allreduce(array, comm)
    request = reducer.iallreduce(array, comm)
    while how == "test":
        done, result = request.test()
        if done:
            return result
    return request.wait()


@each(how=["step", "istep"])
def case_a_bad_gradient_on_one_rank_changes_no_residual(comm, how):
    feedback = sar.ErrorFeedback(sar.GTopk(10, 2))
    good = np.arange(10, dtype=np.float32)
    feedback.step(good, comm)
    before = feedback.residual.copy()
    gradient = good if comm.rank else good.astype(np.float64)
    error = raised(lambda: feedback.step(gradient, comm) if how == "step" else feedback.istep(gradient, comm).wait())
    assert "float64" in str(error)
    check_same_everywhere(comm, error)
    np.testing.assert_array_equal(feedback.residual, before)
    assert feedback.gradients == 1
    feedback.step(good, comm)
    assert feedback.gradients == 2


def case_one_rank_is_a_step_ahead(comm):
    if comm.size == 1:
        skip("one rank agrees with itself")
    reducer = sar.TopkA(10, 2)
    if comm.rank == 0:
        reducer.allreduce(np.ones(10), sar.SERIAL)
    error = raised(lambda: reducer.allreduce(np.ones(10), comm))
    assert isinstance(error, sar.MismatchError)
    assert "operations before this one: 1 on rank 0" in str(error)
    check_same_everywhere(comm, error)


def case_two_operations_on_one_reducer(comm):
    if comm.size == 1:
        skip("the first is done when the second starts")
    case = Vectors(comm.size, 5000, 50, seed=4)
    reducer = sar.GTopk(5000, 50)
    first = reducer.iallreduce(case.first[comm.rank], comm)
    second = reducer.iallreduce(case.first[comm.rank], comm)
    error = raised(second.wait)
    assert isinstance(error, sar.AlgorithmError)
    assert "in flight" in str(error)
    check_same_everywhere(comm, error)
    expected = sar.simulate(case.first, case.reducers(sar.GTopk)).outputs[comm.rank]
    assert bits(first.wait().update) == bits(expected.update)
    check_usable(comm)


def case_what_is_no_communicator(comm):
    reducer = sar.GTopk(10, 2)
    for wrong in ("world", MPI.COMM_NULL):
        error = raised(lambda wrong=wrong: reducer.iallreduce(np.ones(10), wrong))
        assert isinstance(error, sar.StreamTypeError)
    reducer.allreduce(np.ones(10), comm)


def case_progress_of_another_kind(comm):
    reducer = sar.GTopk(10, 2)
    if comm.size == 1:
        skip("nothing to move on")
    error = raised(lambda: reducer.iallreduce(np.ones(10), comm, progress="magic" if comm.rank == 0 else "manual").wait())
    assert isinstance(error, sar.AlgorithmError)
    check_same_everywhere(comm, error)
    reducer.allreduce(np.ones(10), comm)


@each(blocking=[True, False])
def case_a_rank_that_fails_on_its_way_loses_nothing(comm, blocking):
    """Rank 0 of the tree has no memory for a sum: all others wait for it, and are told."""
    if comm.size == 1:
        skip("nothing to add up")
    case = Vectors(comm.size, 400, 10, seed=5)
    feedback = sar.ErrorFeedback(sar.GTopk(400, 10))
    feedback.step(case.first[comm.rank], comm)
    before, gradient = feedback.residual.copy(), case.step(1)[comm.rank]
    with mock.patch.object(feedback.reduction, "pair", side_effect=MemoryError("no room")):
        error = raised(lambda: feedback.step(gradient, comm) if blocking else feedback.istep(gradient, comm).wait())
    assert "no room" in str(error)
    np.testing.assert_array_equal(feedback.residual, before + gradient)
    assert (feedback.gradients, feedback.reducer.steps) == (2, 1)
    check_usable(comm)
    feedback.step(case.step(2)[comm.rank], comm)


@on_ranks(2, 3)
@each(name=["oktopk", "gtopk"])
def case_an_interrupted_wait_leaves_reducers_usable(comm, name):
    """One rank waits for the others, and is interrupted before they begin; they hear of it when it calls the library again."""
    if comm.size == 1:
        skip("nobody to wait for")
    culprit, case = comm.size - 1, Vectors(comm.size, 400, 10, seed=6)
    simulated, (reducer, *_) = case.reducers(REDUCERS[name]), case.reducers(REDUCERS[name])
    expected = [simulated_once(comm, partial(updates, case.step(step), simulated)) for step in range(3)]
    reducer.allreduce(case.step(0)[comm.rank], comm)
    before = reducer.state()
    if comm.rank == culprit:
        with interrupted(), pytest.raises(KeyboardInterrupt):
            reducer.allreduce(case.step(1)[culprit], comm)
        tell_the_others(comm)
    else:
        hear_from(comm, culprit)
        error = raised(lambda: reducer.allreduce(case.step(1)[comm.rank], comm))
        assert isinstance(error, sar.SparseAllreduceError)
    assert reducer.state() == before
    for step in (1, 2):
        assert bits(reducer.allreduce(case.step(step)[comm.rank], comm).update) == expected[step]
    check_usable(comm)


@on_ranks(2, 3)
@each(name=["oktopk", "gtopk"], blocking=[True, False])
def case_an_interrupt_as_a_reducer_looks_at_its_arguments_is_told(comm, name, blocking):
    culprit, case = comm.size - 1, Vectors(comm.size, 400, 10, seed=6)
    reducer = case.reducers(REDUCERS[name])[0]
    before, accumulator = reducer.state(), case.step(0)[comm.rank]
    with failing(reducers_base, "as_vector", KeyboardInterrupt, comm.rank == culprit):
        if comm.rank == culprit:
            with pytest.raises(KeyboardInterrupt):
                reducer.allreduce(accumulator, comm) if blocking else reducer.iallreduce(accumulator, comm).wait()
        else:
            error = raised(lambda: reducer.allreduce(accumulator, comm))
            assert str(error) == f"KeyboardInterrupt: rank {culprit} gave up"
    assert reducer.state() == before
    reducer.allreduce(accumulator, comm)
    check_usable(comm)


def updates(accumulators, reducers):
    """Of each simulated rank: the bits of the update."""
    return [bits(reduced.update) for reduced in sar.simulate(accumulators, reducers).outputs]


@contextmanager
def interrupted():
    """Ctrl-C, while this rank waits for others."""

    def strike(*_):
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGVTALRM, strike)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.2)  # of this process's time, of which polls take some
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, former)
