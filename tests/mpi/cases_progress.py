"""Several operations in flight, completed in any order, moved on by a thread if wanted, and never in the way of the user's own messages."""

import random
import time
from unittest import mock

import numpy as np
from mpi4py import MPI
from mpi_cases import each, limit, skip
from mpi_inputs import Inputs

import sparseallreduce as sar
from sparseallreduce.runtime import collectives


@each(algorithm=sar.algorithms())
def case_four_in_flight_completed_in_reverse(comm, algorithm):
    started = start(comm, [(algorithm, 1000 + 500 * number) for number in range(4)])
    for inputs, request in reversed(started):
        inputs.check(request.wait())


@each(algorithm=sar.algorithms())
def case_four_in_flight_completed_in_another_order_on_each_rank(comm, algorithm):
    started = start(comm, [(algorithm, 100 + 300 * number) for number in range(4)])
    random.Random(comm.rank).shuffle(started)
    for inputs, request in started:
        inputs.check(request.wait())


def case_different_algorithms_and_sizes_in_flight_at_once(comm):
    sizes = (10, 50_000, 1000, 0, 200_000)
    names = [name for name in sar.algorithms() for _ in range(2)]
    started = start(comm, [(name, sizes[number % 5]) for number, name in enumerate(names)])
    random.Random(comm.rank).shuffle(started)
    for inputs, request in started:
        inputs.check(request.wait())


def case_fifty_in_flight(comm):
    names = [name for name in sar.algorithms() if name != "auto"]
    started = start(comm, [(names[number % len(names)], 20 + number) for number in range(50)])
    for (inputs, _), result in zip(started, sar.Request.waitall([request for _, request in started]), strict=True):
        inputs.check(result)


def case_polling_with_test_completes_all(comm):
    pending = start(comm, [(name, 500) for name in sar.algorithms()])
    random.Random(comm.rank).shuffle(pending)
    while pending:
        still = []
        for inputs, request in pending:
            done, result = request.test()
            if done:
                inputs.check(result)
                assert request.test()[0] and request.wait() is result, "a request that is done stays so"
            else:
                assert result is None
                still.append((inputs, request))
        pending = still


@each(algorithm=sar.algorithms(), size=[100, 100_000])
def case_blocking_on_some_ranks_only(comm, algorithm, size):
    """Which may take a shorter way there, and with nothing else in flight."""
    for turn in range(4):
        inputs = Inputs(comm.size, size, seed=turn, entries=size // 10 if turn % 2 else None)
        if (comm.rank + turn) % 2:
            inputs.check(sar.allreduce(inputs.stream(comm.rank), comm, algorithm=algorithm))
        else:
            inputs.check(sar.iallreduce(inputs.stream(comm.rank), comm, algorithm=algorithm).wait())


@each(algorithm=sar.algorithms())
def case_blocking_while_others_are_in_flight(comm, algorithm):
    before = start(comm, [(algorithm, 3000), ("ssar_ring", 200), ("dsar_split_allgather", 100)])
    inputs = Inputs(comm.size, 2000, "float32", seed=9)
    inputs.check(sar.allreduce(inputs.stream(comm.rank), comm, algorithm=algorithm))
    for inputs, request in reversed(before):
        inputs.check(request.wait())


def case_blocking_on_some_ranks_meets_non_blocking_on_others(comm):
    for algorithm in sar.algorithms():
        inputs = Inputs(comm.size, 300)
        function = sar.allreduce if comm.rank % 2 else lambda *arguments, **options: sar.iallreduce(*arguments, **options).wait()
        inputs.check(function(inputs.stream(comm.rank), comm, algorithm=algorithm))


def case_two_communicators_in_opposite_order(comm):
    """Operations on two communicators, started in the opposite order on odd ranks, and completed in another order yet."""
    other = comm.Dup()
    communicators = [comm, other]
    for mine in communicators:  # the first operation on a communicator waits for all ranks
        sar.allreduce(sar.SparseStream([], [], 0), mine)
    started = {}
    for number in (0, 1) if comm.rank % 2 else (1, 0):
        names = ("ssar_split_allgather", "dense", "dsar_early_switch", "ssar_ring")
        started[number] = start(communicators[number], [(name, 400) for name in names])
    for number in (1, 0) if comm.rank % 3 else (0, 1):
        for inputs, request in reversed(started[number]):
            inputs.check(request.wait())
    other.Free()


@limit(20)
def case_collectives_of_mpi_start_in_the_order_of_the_calls(comm):
    """Also where those of a later operation could start first, because one rank is late with its messages of the earlier one."""
    start(comm, [("ssar_ring", 0)])[0][1].wait()
    for _ in range(5):
        with mock.patch.object(collectives, "DIRECT_RANKS", 0):
            started = start(comm, [(name, 1000) for name in ("dsar_split_allgather", "dense", "dsar_early_switch", "dense")])
            time.sleep(0.03 if comm.rank == comm.size - 1 else 0)
            for inputs, request in started:
                inputs.check(request.wait())


def case_large_messages_in_flight_both_ways(comm):
    """Above what MPI sends without the receiver."""
    started = start(comm, [(name, 300_000) for name in ("ssar_recursive_doubling", "allgather", "ssar_ring", "dense")], "float64")
    for inputs, request in reversed(started):
        inputs.check(request.wait())


@each(algorithm=sar.algorithms())
def case_thread_completes_while_the_program_sleeps(comm, algorithm):
    need_threads()
    inputs = Inputs(comm.size, 2000)
    request = sar.iallreduce(inputs.stream(comm.rank), comm, algorithm=algorithm, progress="thread")
    assert completes_by_itself(request, lambda: time.sleep(0.005))
    inputs.check(request.wait())


def case_thread_completes_while_the_program_computes(comm):
    need_threads()
    inputs = Inputs(comm.size, 100_000)
    request = sar.iallreduce(inputs.stream(comm.rank), comm, algorithm="ssar_ring", progress="thread")
    assert completes_by_itself(request, lambda: sum(number * number for number in range(1000)))
    inputs.check(request.wait())


def case_thread_and_tests_at_once(comm):
    need_threads()
    names = [name for name in sar.algorithms() for _ in range(2)]
    started = []
    for number, name in enumerate(names):
        inputs = Inputs(comm.size, 100 * number, seed=number)
        progress = "thread" if number % 2 else "manual"
        started.append((inputs, sar.iallreduce(inputs.stream(comm.rank), comm, algorithm=name, progress=progress)))
    inputs = Inputs(comm.size, 100)
    inputs.check(sar.allreduce(inputs.stream(comm.rank), comm))
    for inputs, request in reversed(started):
        inputs.check(request.wait())


@each(progress=["manual", "thread"])
def case_user_traffic_is_undisturbed(comm, progress):
    if progress == "thread":
        need_threads()
    partner = comm.rank ^ 1
    paired = partner < comm.size
    sent, received = np.full(1000, comm.rank), np.empty(1000, int)
    waiting = comm.Irecv(received, MPI.ANY_SOURCE, MPI.ANY_TAG) if paired else None
    started = start(comm, [(name, 700) for name in sar.algorithms()], progress=progress)
    everyone = np.empty(comm.size, int)
    gathering = comm.Iallgather(np.array([comm.rank]), everyone)
    assert comm.allreduce(1) == comm.size
    assert comm.bcast(comm.rank) == 0
    for inputs, request in started[:4]:
        inputs.check(request.wait())
    assert not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
    assert waiting is None or not waiting.Test()
    comm.Barrier()
    if paired:
        comm.Send(sent, partner, tag=7)
        waiting.Wait()
        assert received.tolist() == [partner] * 1000
    gathering.Wait()
    assert everyone.tolist() == list(range(comm.size))
    for inputs, request in started[4:]:
        inputs.check(request.wait())
    comm.Barrier()
    assert not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)


def start(comm, what, dtype="float32", **options):
    """An operation for each (algorithm, size), all in flight."""
    started = []
    for number, (algorithm, size) in enumerate(what):
        inputs = Inputs(comm.size, size, dtype, seed=number)
        started.append((inputs, sar.iallreduce(inputs.stream(comm.rank), comm, algorithm=algorithm, **options)))
    return started


def completes_by_itself(request, meanwhile):
    """Whether the operation completes while this thread never calls the library, nor MPI."""
    end = time.monotonic() + 20
    while request._operation is not None and not request._operation.done and time.monotonic() < end:
        meanwhile()
    return request._operation is None or request._operation.done


def need_threads():
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        skip("needs MPI_THREAD_MULTIPLE")
