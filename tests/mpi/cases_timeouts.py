"""Whoever waits no longer than it said fails the operation on all ranks, names who has not come, and the next operation works."""

import re
import time
from unittest import mock

import numpy as np
from cases_faults import outcome_of
from cases_handshake import duplicate
from cases_progress import need_threads
from mpi_cases import each, limit, skip
from mpi_inputs import Inputs, check_usable, hear_from, raise_what_is_owed

import sparseallreduce as sar
from sparseallreduce.runtime import mailbox
from sparseallreduce.runtime.shortcuts.sparse_shared import SparseShared

RANKS = (2, 3)
SECONDS, LATE = 0.2, 0.5
# By "auto": in the handshake, in shared memory, dense, and by messages or in shared memory; by an algorithm.
WAYS = [*((size, "auto") for size in (100, 5000, 60_000, 400_000)), (100, "ssar_ring"), (5000, "dense"), (5000, "dsar_split_allgather")]


@limit(30)
@each(way=WAYS, shared=[True, False])
def case_a_rank_that_comes_late_is_named_and_raises_the_same(comm, way, shared):
    size, algorithm = way
    how = ("wait", "blocking", "waitall")[(WAYS.index(way) + shared + comm.size) % 3]
    inputs, late = Inputs(comm.size, size, "float32", entries=size // 3), comm.size - 1
    with duplicate(comm, shared) as ours:
        sar.allreduce(inputs.stream(comm.rank), ours, algorithm=algorithm)
        ours.Barrier()
        limited = SECONDS if comm.rank != late else None
        outcome, seconds = once_the_others_gave_up(
            comm, late, lambda: within(limited, inputs.stream(comm.rank), ours, how, algorithm=algorithm)
        )
        check_alike(comm, outcome)
        assert type(outcome) is sar.WaitTimeoutError and isinstance(outcome, TimeoutError)
        assert outcome.on_all_ranks
        assert said_by_one(outcome).startswith("not done within 0.2 s: rank")
        assert is_missed(late, outcome), outcome
        assert seconds < 1.2 and (seconds >= SECONDS / 2 or comm.rank == late), seconds
        for _ in range(6):
            inputs.check(sar.allreduce(inputs.stream(comm.rank), ours, algorithm=algorithm))
        check_usable(ours)


@limit(30)
@each(shared=[True, False])
def case_only_one_rank_waits_no_longer(comm, shared):
    """The others wait for ever, and are told."""
    inputs, late = Inputs(comm.size, 100, "float32"), 0
    with duplicate(comm, shared) as ours:
        sar.allreduce(inputs.stream(comm.rank), ours)
        ours.Barrier()
        if comm.rank == late:
            time.sleep(LATE)
        outcome = failed(lambda: within(SECONDS if comm.rank == comm.size - 1 else None, inputs.stream(comm.rank), ours, "wait"))
        check_alike(comm, outcome)
        assert str(outcome) == f"rank {comm.size - 1} gave up: not done within 0.2 s: rank 0 has not started this operation"
        check_usable(ours)


@limit(30)
@each(shared=[True, False])
def case_a_rank_with_wrong_arguments_waits_no_longer_than_it_said(comm, shared):
    inputs, late = Inputs(comm.size, 100, "float32"), comm.size - 1
    with duplicate(comm, shared) as ours:
        for wrong, limited in ((None, SECONDS), ([inputs.stream(0), 3], SECONDS), (inputs.stream(0), -1)):
            ours.Barrier()
            if comm.rank == late:
                time.sleep(LATE)
            options = {"timeout": limited} if comm.rank == 0 else {}
            outcome = failed(lambda: sar.allreduce(inputs.stream(comm.rank) if comm.rank else wrong, ours, **options))  # noqa: B023
            check_alike(comm, outcome)
            assert type(outcome) is (sar.WaitTimeoutError if limited > 0 else sar.AlgorithmError), outcome
        check_usable(ours)


@limit(30)
@each(shared=[True, False])
def case_many_times_before_the_late_rank_comes(comm, shared):
    """More than there are slots in shared memory: then operations cannot even begin."""
    inputs, late = Inputs(comm.size, 100, "float32"), comm.size - 1
    with duplicate(comm, shared) as ours:
        sar.allreduce(inputs.stream(comm.rank), ours)
        ours.Barrier()
        if comm.rank == late:
            time.sleep(1.2)
        outcomes = [
            failed(lambda: within(0.1 if comm.rank != late else None, inputs.stream(comm.rank), ours, "wait")) for _ in range(6)
        ]
        for outcome in outcomes:
            check_alike(comm, outcome)
            assert type(outcome) is sar.WaitTimeoutError and re.search(rf"ranks? [\d, ]*\b{late} ", str(outcome)), outcome
        for _ in range(6):
            inputs.check(sar.allreduce(inputs.stream(comm.rank), ours))
        check_usable(ours)


@limit(30)
@each(shared=[True, False], algorithm=["ssar_ring", "ssar_recursive_doubling", "dsar_split_allgather", "dense"])
def case_a_rank_that_stops_amid_the_algorithm(comm, shared, algorithm):
    inputs, stops = Inputs(comm.size, 5000, "float32", entries=500), comm.size - 1
    with duplicate(comm, shared) as ours:
        sar.allreduce(inputs.stream(comm.rank), ours, algorithm=algorithm)
        ours.Barrier()
        request = sar.iallreduce(inputs.stream(comm.rank), ours, algorithm=algorithm)
        if comm.rank == stops:
            time.sleep(LATE)
            outcome = outcome_of(request)
        else:
            outcome = failed(lambda: request.wait(timeout=SECONDS), may_succeed=True)
        outcomes = comm.allgather(outcome if isinstance(outcome, Exception) else None)
        raised = {str(part) for part in outcomes if part is not None}
        assert len(raised) <= 1 and all(type(part) is sar.WaitTimeoutError for part in outcomes if part is not None), outcomes
        if isinstance(outcome, sar.SparseStream):
            inputs.check(outcome)
        for text in raised:
            assert re.match(r"rank \d gave up: not done within 0.2 s: ", text), text
            assert f"rank {stops} has" in text or "does not report the missing ranks" in text or comm.size > 2, text
        raise_what_is_owed(comm, outcome, ours)
        for _ in range(3):
            inputs.check(sar.allreduce(inputs.stream(comm.rank), ours, algorithm=algorithm))
        check_usable(ours)


@limit(30)
def case_a_rank_that_stops_amid_a_sum_in_shared_memory(comm):
    inputs, stops = Inputs(comm.size, 400_000, "float32", entries=20_000), comm.size - 1
    with duplicate(comm) as ours:
        sar.allreduce(inputs.stream(comm.rank), ours)
        add, stopped = SparseShared._add, []

        def stopping(self, spins):
            if comm.rank == stops and not stopped:
                stopped.append(True)
                time.sleep(LATE)
            return add(self, spins)

        with mock.patch.object(SparseShared, "_add", stopping):
            seconds = SECONDS if comm.rank != stops else None
            outcome = failed(lambda: within(seconds, inputs.stream(comm.rank), ours, "wait"), may_succeed=True)
        if isinstance(outcome, Exception):
            assert said_by_one(outcome) == f"not done within 0.2 s: rank {stops} has not finished its part", outcome
        else:
            inputs.check(outcome)
        comm.Barrier()
        for _ in range(3):
            inputs.check(sar.allreduce(inputs.stream(comm.rank), ours))
        check_usable(ours)


@limit(40)
@each(how=["wait", "blocking"])
def case_the_first_operation_on_a_communicator(comm, how):
    """The late rank is missed where the communicator is duplicated, and the preparation begins anew."""
    inputs, late = Inputs(comm.size, 100, "float32"), comm.size - 1
    ours = comm.Dup()
    if comm.rank == late:
        time.sleep(2.5)
        request = sar.iallreduce(inputs.stream(comm.rank), ours)
    else:
        start = time.perf_counter()
        outcome = failed(lambda: within(SECONDS, inputs.stream(comm.rank), ours, how))
        assert time.perf_counter() - start < 2.2
        assert type(outcome) is sar.WaitTimeoutError
        assert "have started the first operation on this communicator in time, and MPI does not report" in str(outcome)
    again = sar.iallreduce(inputs.stream(comm.rank), ours)
    if comm.rank == late:
        outcome = outcome_of(request)
    inputs.check(again.wait())  # in which the others tell the late rank
    check_alike(comm, outcome)
    for _ in range(3):
        inputs.check(sar.allreduce(inputs.stream(comm.rank), ours))
    check_usable(ours)
    ours.Free()


@limit(30)
@each(blocking=[True, False])
def case_lists_and_reducers_are_waited_for_no_longer(comm, blocking):
    late = comm.size - 1
    check_usable(comm)
    given = [Inputs(comm.size, size, dtype, seed=size, entries=size // 4) for size, dtype in ((100, "float32"), (40, "float64"))]
    streams = [part.stream(comm.rank) for part in given]
    limited = SECONDS if comm.rank != late else None
    comm.Barrier()
    outcome, _ = once_the_others_gave_up(comm, late, lambda: within(limited, streams, comm, "blocking" if blocking else "wait"))
    check_alike(comm, outcome)
    assert type(outcome) is sar.WaitTimeoutError and is_missed(late, outcome), outcome
    for part, result in zip(given, sar.allreduce(streams, comm), strict=True):
        part.check(result)
    reducer = sar.OkTopk(1000, 10)
    accumulator = np.random.default_rng(comm.rank).standard_normal(1000, np.float32)
    reducer.allreduce(accumulator, comm)
    before = reducer.state()
    comm.Barrier()
    outcome, _ = once_the_others_gave_up(comm, late, lambda: reducer.iallreduce(accumulator, comm).wait(timeout=limited))
    check_alike(comm, outcome)
    assert type(outcome) is sar.WaitTimeoutError and is_missed(late, outcome), outcome
    assert reducer.state()["steps"] == before["steps"]
    reducer.allreduce(accumulator, comm)
    check_usable(comm)


@limit(30)
@each(algorithm=["auto", "ssar_ring"])
def case_what_a_thread_moves_on_is_waited_for_no_longer(comm, algorithm):
    need_threads()
    inputs, late = Inputs(comm.size, 100, "float32"), comm.size - 1
    check_usable(comm)
    comm.Barrier()
    options = {"algorithm": algorithm, "progress": "thread"}
    limited = SECONDS if comm.rank != late else None
    outcome, _ = once_the_others_gave_up(comm, late, lambda: within(limited, inputs.stream(comm.rank), comm, "wait", **options))
    check_alike(comm, outcome)
    assert is_missed(late, outcome), outcome
    check_usable(comm)


@limit(30)
def case_waitall_gives_up_all_that_are_not_done(comm):
    inputs, late = Inputs(comm.size, 100, "float32"), comm.size - 1
    with duplicate(comm) as ours:
        sar.allreduce(inputs.stream(comm.rank), ours)
        done = sar.iallreduce(inputs.stream(comm.rank), ours)
        inputs.check(done.wait())
        ours.Barrier()
        if comm.rank == late:
            time.sleep(LATE)
        requests = [sar.iallreduce(inputs.stream(comm.rank), ours) for _ in range(7)]
        start = time.perf_counter()
        outcome = failed(lambda: sar.Request.waitall([done, *requests], timeout=SECONDS if comm.rank != late else None))
        assert time.perf_counter() - start < 1.2
        check_alike(comm, outcome)
        for request in requests:
            check_alike(comm, outcome_of(request))
        assert not sar.runtime.request.pending
        inputs.check(done.wait())
        check_usable(ours)


def case_what_is_done_in_time_is_as_ever(comm):
    inputs = Inputs(comm.size, 3000, "float32")
    stream = inputs.stream(comm.rank)
    for _ in range(3):
        inputs.check(sar.allreduce(stream, comm, timeout=30))
        inputs.check(sar.iallreduce(stream, comm).wait(timeout=30.0))
        for result in sar.Request.waitall([sar.iallreduce(stream, comm, algorithm="ssar_ring") for _ in range(3)], timeout=np.float32(30)):
            inputs.check(result)
        inputs.check(sar.allreduce([stream, stream], comm, timeout=30)[1])


@each(timeout=[0, -1, float("nan"), float("inf"), "soon", True])
def case_a_time_that_is_none_is_refused(comm, timeout):
    inputs = Inputs(comm.size, 300, "float32")
    request = sar.iallreduce(inputs.stream(comm.rank), comm)
    for wait in (lambda: request.wait(timeout=timeout), lambda: sar.Request.waitall([request], timeout=timeout)):
        outcome = failed(wait)
        assert type(outcome) is sar.AlgorithmError and f"not {timeout!r}" in str(outcome)
    inputs.check(request.wait())
    outcome = failed(lambda: sar.allreduce(inputs.stream(comm.rank), comm, timeout=timeout if comm.rank == 0 else 30))
    assert type(outcome) is sar.AlgorithmError and "on rank 0: timeout is a positive" in str(outcome)
    check_alike(comm, outcome)
    check_usable(comm)


def case_a_wrong_call_for_a_sum_of_a_plan_concerns_its_rank_alone(comm):
    """What `wait` and `test` refuse is told to no other rank, whose sum is right."""
    inputs = Inputs(comm.size, 300, "float32")
    plan = sar.allreduce_init(inputs.stream(comm.rank), comm)
    if comm.rank == 0:
        for call in (plan.wait, plan.test):
            assert "has not been started" in str(failed(call))
    plan.start(inputs.stream(comm.rank))
    if comm.rank == 0:
        assert "not -1" in str(failed(lambda: plan.wait(timeout=-1)))
    inputs.check(plan.wait())
    check_usable(comm)


@limit(30)
def case_a_result_is_not_lost_for_messages_that_are_still_under_way(comm):
    """The time is over when all has come, and the last large messages have not been taken."""
    if comm.size != 2:
        skip("of two ranks one is enough")
    inputs = Inputs(comm.size, 400_000, "float32", entries=100_000)
    check_usable(comm)
    with mock.patch.object(mailbox, "PIECE_BYTES", 1 << 18):
        request = sar.iallreduce(inputs.stream(comm.rank), comm, algorithm="ssar_recursive_doubling")
        while not request.test()[0] and comm.rank:
            pass
        inputs.check(request.wait(timeout=20))
    check_usable(comm)


def within(seconds, given, comm, how, **options):
    if how == "blocking":
        return sar.allreduce(given, comm, **options, **({} if seconds is None else {"timeout": seconds}))
    request = sar.iallreduce(given, comm, **options)
    return request.wait(timeout=seconds) if how == "wait" else sar.Request.waitall([request], timeout=seconds)[0]


def failed(run, may_succeed=False):
    try:
        result = run()
    except sar.SparseAllreduceError as error:
        return error
    assert may_succeed, result
    return result


def once_the_others_gave_up(comm, late, run):
    """Return the error of an operation and the seconds it took; the late rank begins it once all others have failed, however slow."""
    for rank in range(comm.size) if comm.rank == late else ():
        if rank != late:
            hear_from(comm, rank)
    start = time.perf_counter()
    outcome = failed(run)
    seconds = time.perf_counter() - start
    if comm.rank != late:
        comm.send(None, late)
    return outcome, seconds


def is_missed(rank, error):
    """Return whether the error says that this rank has not come; on a busy machine others may be missed with it."""
    return re.search(rf"ranks? [\d, ]*\b{rank}[\d, ]* ha(s|ve) not started", str(error)) is not None


def said_by_one(error):
    """Without the rank whose time was over first."""
    return re.fullmatch(r"rank \d gave up: (.*)", str(error))[1]


def check_alike(comm, outcome):
    said = [(type(part), str(part)) for part in comm.allgather(outcome)]
    assert len(set(said)) == 1, said
