"""Whatever goes wrong on one rank, the others raise the same or have the right sum, and the next operations work (promise 3 of the design).

Thousands of faults are tried in one process by tests/world; here are those that have been met over MPI, or need more than one process.
"""

import contextlib
import functools
import gc
import importlib
import signal
import threading
import time
from unittest import mock

import numpy as np
import pytest
from cases_faults import failing, needs_two, outcome_of
from cases_handshake import duplicate, slow
from mpi4py import MPI
from mpi_cases import each, limit, on_ranks, skip
from mpi_inputs import Inputs, check_usable, hear_from, raise_what_is_owed, tell_the_others

import sparseallreduce as sar
from sparseallreduce.runtime import predictions, progress, request, setup, states
from sparseallreduce.runtime import work as work_of_operations
from sparseallreduce.runtime.communicators import known_channel
from sparseallreduce.runtime.handshake.base import PENDING
from sparseallreduce.runtime.handshake.messages import MessageHandshake
from sparseallreduce.runtime.handshake.shared import SharedHandshake
from sparseallreduce.runtime.hosts import this_place
from sparseallreduce.runtime.memory.dense import VectorSum
from sparseallreduce.runtime.shortcuts import mpi_sum
from sparseallreduce.runtime.shortcuts.sparse_shared import SparseShared
from sparseallreduce.streams import packed, wire
from sparseallreduce.streams.reduction import Reduction

RANKS = (2, 3)
ALGORITHMS = ("ssar_ring", "ssar_recursive_doubling", "dsar_split_allgather", "dense", "auto")
SIZES = (100, 5000, 200_000)


@limit(30)
@each(way=[*((name, size) for name in ALGORITHMS for size in SIZES[::2]), ("auto", SIZES[1])], blocking=[True, False])
def case_an_interrupt_inside_a_wait_ends_the_operation_on_all_ranks(comm, way, blocking):
    """By a signal, as Ctrl-C is: rank 0 raises KeyboardInterrupt, the others an error that names it, or they have the sum."""
    algorithm, size = way
    inputs, culprit = needs_two(comm, size)
    comm.Barrier()
    if comm.rank == culprit:
        outcome = interrupted(lambda: reduce(inputs.stream(comm.rank), comm, algorithm, blocking))
        assert isinstance(outcome, KeyboardInterrupt)
        assert not request.pending, "an operation that has failed bars the others from shared memory"
        tell_the_others(comm)
        time.sleep(0.02)
    else:
        hear_from(comm, culprit)  # that it was interrupted as it waited
        outcome = outcome_of_call(lambda: reduce(inputs.stream(comm.rank), comm, algorithm, blocking))
        if isinstance(outcome, sar.SparseStream):
            inputs.check(outcome)
        else:
            assert str(outcome) == f"KeyboardInterrupt: rank {culprit} gave up", outcome
    raise_what_is_owed(comm, outcome)
    the_next_work(comm)


@limit(30)
@each(algorithm=ALGORITHMS)
def case_a_request_whose_wait_was_interrupted_has_failed(comm, algorithm):
    inputs, culprit = needs_two(comm, 50_000)
    comm.Barrier()
    if comm.rank == culprit:
        request = sar.iallreduce(inputs.stream(comm.rank), comm, algorithm=algorithm)
        assert isinstance(interrupted(request.wait), KeyboardInterrupt)
        tell_the_others(comm)
        outcome = outcome_of(request)
        assert isinstance(outcome, sar.SparseAllreduceError), outcome
        assert outcome_of(request) is outcome
    else:
        hear_from(comm, culprit)
        outcome = outcome_of_call(lambda: sar.allreduce(inputs.stream(comm.rank), comm, algorithm=algorithm))
    if isinstance(outcome, Exception):
        assert str(outcome) == f"KeyboardInterrupt: rank {culprit} gave up"
    raise_what_is_owed(comm, outcome)
    the_next_work(comm)


@limit(60)
@each(shared=[True, False])
def case_a_rank_that_leaves_a_loop_is_waited_for_by_none(comm, shared):
    """Interrupted at a point that nobody chose, again and again; the others raise the same in the next operation, at the latest."""
    needs_two(comm, 100)
    if comm.size > 3:
        skip("two and three ranks are enough")
    with duplicate(comm, shared) as ours:
        for attempt in range(6):
            culprit, algorithm = attempt % comm.size, ("auto", "ssar_ring", "ssar_split_allgather")[attempt % 3]
            given = [Inputs(comm.size, size, "float32", entries=size // 20, seed=attempt) for size in (100, 3000, 60_000)]
            streams = [inputs.stream(comm.rank) for inputs in given]
            for stream in streams:  # numba may end the process if it is interrupted as it loads a kernel
                sar.allreduce(stream, ours, algorithm=algorithm)
            gc.collect()  # of what other cases have left, which may run Python as it goes, where an interrupt is lost
            comm.Barrier()
            if comm.rank == culprit:
                where = reduced_until_interrupted(ours, streams, algorithm, 0.003 + 0.004 * attempt)
                for _ in range(where == "outside"):  # of the library, which it told nothing of
                    with pytest.raises(sar.StreamTypeError):
                        sar.allreduce(None, ours)
            else:
                outcome = outcome_of_call(lambda: reduced_until_it_fails(ours, streams, given, algorithm))  # noqa: B023
                assert f"rank {culprit}" in str(outcome)
            raise_until_in_step(comm, ours)
            check_usable(ours)
        the_next_work(ours)


class Refusing:
    """A communicator that refuses one of its sends."""

    def __init__(self, comm, number, error):
        self.comm, self.left, self.error = comm, number, error

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def Isend(self, *args):
        self.left -= 1
        if self.left == 0:
            raise self.error("refused")
        return self.comm.Isend(*args)


@on_ranks(2, 3)
@each(number=[1, 2, 3, 4, 5], error=[KeyboardInterrupt, MemoryError], algorithm=["ssar_split_allgather", "ssar_recursive_doubling"])
def case_a_rank_that_is_struck_between_the_parts_of_a_message_is_waited_for_by_none(comm, number, error, algorithm):
    """Whoever has the envelope waits for indices and values, and must not take word of the failure for one of them."""
    inputs, culprit = needs_two(comm, 100_000)
    stream = inputs.stream(comm.rank)
    with duplicate(comm) as ours:
        sar.allreduce(stream, ours, algorithm=algorithm)
        mailbox, outcomes = known_channel(ours).mailbox, []
        refusing = Refusing(mailbox.comm, number if comm.rank == culprit else -1, error)
        with mock.patch.object(mailbox, "comm", refusing):
            for _ in range(2):
                try:
                    outcomes.append(outcome_of_call(lambda: sar.allreduce(stream, ours, algorithm=algorithm)))
                except KeyboardInterrupt as interrupt:
                    outcomes.append(interrupt)
            raise_until_in_step(comm, ours)
        assert refusing.left <= 0 and any(isinstance(outcome, BaseException) for outcome in outcomes)
        check_usable(ours)


def raise_until_in_step(comm, ours):
    """Of ranks that left a loop in two operations, those that left it in the first have the error of the second still to raise."""
    last = comm.allreduce(known_channel(ours).sequence, MPI.MAX)
    if known_channel(ours).sequence < last:
        with pytest.raises(sar.SparseAllreduceError, match=r"gave up|on rank"):
            check_usable(ours)
    assert known_channel(ours).sequence == last
    comm.Barrier()


def reduced_until_it_fails(ours, streams, given, algorithm):
    for number in range(100_000):
        result = sar.allreduce(streams[number % 3], ours, algorithm=algorithm)
        if number % 64 < 3:
            given[number % 3].check(result)


def reduced_until_interrupted(ours, streams, algorithm, seconds):
    """Return where an interrupt has hit this rank: "inside" of the library, or "outside"."""
    before = signal.signal(signal.SIGALRM, interrupting)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        for number in range(100_000):
            sar.allreduce(streams[number % 3], ours, algorithm=algorithm)
        raise AssertionError("the interrupt is lost")
    except KeyboardInterrupt as error:
        return "inside" if known_channel(ours).number in getattr(error, "_reported_on", ()) else "outside"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # after another error it would end this process
        signal.signal(signal.SIGALRM, before)


@each(many=[True, False], blocking=[True, False], where=["checked", "_terms"])
def case_an_interrupt_as_the_arguments_are_looked_at_is_raised(comm, many, blocking, where):
    """Also of a kind of streams that is seen for the first time, whose arguments are looked at on a way that may be given up."""
    inputs, culprit = needs_two(comm, 1234)
    module = importlib.import_module("sparseallreduce.algorithms." + ("many" if many else "allreduce"))
    stream = [inputs.stream(comm.rank)] * 2 if many else inputs.stream(comm.rank)
    with duplicate(comm) as ours:
        with failing(module, where, KeyboardInterrupt, comm.rank == culprit) as struck:
            try:
                outcome = outcome_of_call(lambda: reduce(stream, ours, "auto", blocking))
            except KeyboardInterrupt as error:
                outcome = error
        if comm.rank == culprit:
            assert struck[0].call_count == 1 and isinstance(outcome, KeyboardInterrupt)
        else:
            assert str(outcome) == f"KeyboardInterrupt: rank {culprit} gave up"
        the_next_work(ours)


@each(wrong=["machine", "memory", "operator"], blocking=[True, False])
def case_an_error_before_an_operation_begins_is_everyones(comm, wrong, blocking):
    """That is not one of the library's own: a constant that is no number, no memory for what a kind of streams needs."""
    inputs, culprit = needs_two(comm, 5000)
    stream = inputs.stream(comm.rank)
    here = comm.rank == culprit
    if wrong == "machine":
        options = {"machine": sar.Machine(alpha=[1])} if here else {"machine": sar.Machine()}
        outcome = outcome_of_call(lambda: reduce(stream, comm, "auto", blocking, **options))
    elif wrong == "operator":
        class Odd(sar.Operator):
            __hash__ = None

        operator = Odd("odd", np.add, 0) if here else "sum"
        outcome = outcome_of_call(lambda: reduce(stream, comm, "auto", blocking, op=operator))
    else:
        with duplicate(comm) as ours:
            with failing(packed.Layout, "of", MemoryError("no room"), here):
                outcome = outcome_of_call(lambda: reduce(stream, ours, "auto", blocking))
            assert str(outcome) == f"MemoryError: rank {culprit} gave up: no room"
            same_text(comm, outcome)
            the_next_work(ours)
        return
    assert isinstance(outcome, sar.SparseAllreduceError), outcome
    same_text(comm, outcome)
    the_next_work(comm)


@limit(30)
@each(algorithm=["ssar_ring", "dense", "auto"])
def case_operations_in_flight_on_a_freed_communicator_fail_and_concern_nobody_else(comm, algorithm):
    inputs, _ = needs_two(comm, 300_000)
    ours = comm.Dup()
    check_usable(ours)
    if comm.rank:
        comm.Barrier()  # rank 0 frees with its operation in flight
    request = sar.iallreduce(inputs.stream(comm.rank), ours, algorithm=algorithm)
    if comm.rank == 0:
        comm.Barrier()
    ours.Free()
    outcome = outcome_of(request)
    assert isinstance(outcome, sar.SparseStream) or "the communicator was freed" in str(outcome), outcome
    assert not [operation for operation in progress.operations if operation.channel.state == states.FREED]
    the_next_work(comm)


@limit(20)
def case_what_mpi_sums_is_there_before_the_others_are_told(comm):
    """A rank that finds no memory for its dense form keeps no other inside MPI."""
    _, culprit = needs_two(comm, 100)
    stream = sar.SparseStream.from_dense(np.ones(400_000, np.float32))
    with mock.patch.object(predictions, "_fastest", return_value="dense"), duplicate(comm, shared=False) as ours:
        sar.allreduce(stream, ours)
        for place in ("_arrays", "_fill"):
            with failing(mpi_sum, place, MemoryError("no room for a vector"), comm.rank == culprit) as struck:
                outcome = outcome_of_call(lambda: sar.allreduce(stream, ours))
            assert comm.bcast(bool(struck and struck[0].called), culprit)
            assert str(outcome) == f"MemoryError: rank {culprit} gave up: no room for a vector"
            same_text(comm, outcome)
            assert sar.allreduce(stream, ours).to_dense().tolist() == [comm.size] * 400_000


@limit(30)
@each(where=["measure", "made_slots_and_areas", "SparseMemory", "calibrated"], error=[MemoryError("no room"), KeyboardInterrupt()])
def case_a_preparation_that_fails_fails_on_all_ranks_and_is_made_again(comm, where, error):
    _, culprit = needs_two(comm, 100)
    ours = comm.Dup()
    inputs = Inputs(comm.size, 5000, "float32", entries=100)
    with mock.patch.dict(setup._remembered, clear=True), failing(setup, where, error, comm.rank == culprit):
        outcome = outcome_of_call(lambda: sar.allreduce(inputs.stream(comm.rank), ours), KeyboardInterrupt)
    if isinstance(outcome, sar.SparseStream):  # a rank that cannot have memory keeps all others from having it
        assert where == "SparseMemory"
        inputs.check(outcome)
        assert progress.channels[-1].sparse_memory is None
    elif comm.rank == culprit and isinstance(error, KeyboardInterrupt):
        assert isinstance(outcome, KeyboardInterrupt)
    else:
        assert f"rank {culprit} gave up" in str(outcome), outcome
    for _ in range(3):
        inputs.check(sar.allreduce(inputs.stream(comm.rank), ours))
    ours.Free()


@limit(40)
def case_two_threads_with_a_communicator_each_do_not_wait_for_each_other(comm):
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        skip("needs MPI_THREAD_MULTIPLE")
    if comm.size == 1:
        skip("nobody waits")
    pairs = [comm.Dup() for _ in range(2)]
    for ours in pairs:
        check_usable(ours)
    inputs = Inputs(comm.size, 60_000, "float32", entries=60_000)
    errors = []

    def work(ours, late):
        try:
            for number in range(20):
                if (comm.rank + number) % 2 == late:
                    time.sleep(0.002)
                inputs.check(sar.allreduce(inputs.dense_form(comm.rank), ours))
                inputs.check(sar.iallreduce(inputs.stream(comm.rank), ours, algorithm="dense").wait())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(ours, late)) for late, ours in enumerate(pairs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)
    for ours in pairs:
        ours.Free()


@limit(60)
@each(shared=[True, False])
def case_threads_take_turns_on_one_communicator(comm, shared):
    """From its first operation on, in blocking calls and requests; the order of the calls is theirs to agree on, so all sums are alike."""
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        skip("needs MPI_THREAD_MULTIPLE")
    needs_two(comm, 100)
    given = [Inputs(comm.size, size, "float32", entries=size // 20) for size in (100, 60_000)]
    ours, errors = comm.Dup(), []
    context = mock.patch.object(setup, "this_place", return_value=this_place()._replace(memory=bytes([comm.rank]) * 8))
    with contextlib.nullcontext() if shared else context:

        def work(inputs):
            try:
                for number in range(8):
                    stream = inputs.stream(comm.rank)
                    request = sar.iallreduce(stream, ours) if number % 2 else None
                    inputs.check(sar.allreduce(stream, ours) if request is None else request.wait())
            except BaseException as error:
                errors.append(error)

        for inputs in given:
            threads = [threading.Thread(target=work, args=(inputs,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert not errors, errors
    assert not progress.operations and not work_of_operations.waiting
    check_usable(ours)
    ours.Free()


@limit(20)
def case_two_threads_inside_mpis_own_sums_do_not_wait_for_each_other(comm):
    """Each rank enters the one first that the other enters last, from where no thread can be moved on by another."""
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        skip("needs MPI_THREAD_MULTIPLE")
    if comm.size != 2:
        skip("of two ranks each has an order of its own")
    stream = sar.SparseStream.from_dense(np.full(400_000, comm.rank + 1, np.float32))
    agree, meeting, seen, errors = MessageHandshake.agree, threading.Barrier(2, timeout=10), set(), []
    with (
        mock.patch.object(predictions, "_fastest", return_value="dense"),
        duplicate(comm, shared=False) as one,
        duplicate(comm, shared=False) as other,
    ):
        channels = progress.channels[-2:]

        def late(self, *arguments):
            """Both threads go the way of those that wait, and this rank's second one some time later."""
            number = channels.index(self._channel)
            if number in seen:
                return agree(self, *arguments)
            seen.add(number)
            meeting.wait()
            if number != comm.rank:
                time.sleep(0.05)
            return PENDING

        def work(ours):
            try:
                assert sar.allreduce(stream, ours).to_dense()[-1] == 3
            except BaseException as error:
                errors.append(error)

        for ours in (one, other):
            sar.allreduce(stream, ours)
        comm.Barrier()
        threads = [threading.Thread(target=work, args=(ours,)) for ours in (one, other)]
        with mock.patch.object(MessageHandshake, "agree", late):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert seen == {0, 1}
        assert not errors, errors


@limit(30)
@each(shared=[True, False])
def case_word_of_a_rank_that_gave_up_concerns_no_later_operation_of_that_tag(comm, shared):
    """Also where tags begin anew after few operations."""
    inputs, culprit = needs_two(comm, 5000)
    with duplicate(comm, shared) as ours:
        channel = progress.channels[-1]
        channel.tag_limit = 64
        channel.mailbox.boxes.clear()
        channel._alarms = channel.mailbox.box(2 * channel.tag_limit)
        for _ in range(5):
            with failing(packed.Rows, "reduced", MemoryError("no room"), comm.rank == culprit), failing(
                packed.Rows, "summed", MemoryError("no room"), comm.rank == culprit
            ):
                outcome = outcome_of_call(lambda: sar.allreduce(inputs.stream(comm.rank), ours))
            raise_what_is_owed(comm, outcome, ours)
            for number in range(70):
                algorithm = "ssar_ring" if number % 7 == 0 else "auto"
                inputs.check(sar.allreduce(inputs.stream(comm.rank), ours, algorithm=algorithm))
        assert len(channel.mailbox.boxes) <= 2
        assert len(channel.mailbox.leftovers) <= 2


@limit(20)
def case_a_thread_that_moves_operations_on_outlives_their_errors(comm):
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        skip("needs MPI_THREAD_MULTIPLE")
    inputs, culprit = needs_two(comm, 5000)
    with failing(wire, "enclose", MemoryError("no room"), comm.rank == culprit):
        bad = sar.iallreduce(inputs.stream(comm.rank), comm, algorithm="ssar_ring", progress="thread")
        outcome = outcome_of(bad)
    assert "no room" in str(outcome)
    comm.Barrier()
    waiting = sar.iallreduce(inputs.stream(comm.rank), comm, algorithm="ssar_ring", progress="thread") if comm.rank == 0 else None
    with mock.patch.object(progress, "advance", side_effect=RuntimeError("odd")) as advance:
        time.sleep(0.05)
        assert comm.rank or advance.called  # while an operation is in flight, which waits for the others
    comm.Barrier()
    waiting = waiting or sar.iallreduce(inputs.stream(comm.rank), comm, algorithm="ssar_ring", progress="thread")
    inputs.check(waiting.wait())
    request = sar.iallreduce(inputs.stream(comm.rank), comm, algorithm="ssar_ring", progress="thread")
    end = time.monotonic() + 10
    while not request._operation.done and time.monotonic() < end:
        time.sleep(0.005)  # and nobody calls the library
    assert request._operation.done
    inputs.check(request.wait())


@limit(30)
@each(where=["commit", "_add", "_result"], size=[100_000])
def case_a_row_is_not_overwritten_while_others_read_it(comm, where, size):
    """A rank fails between the agreement and the sum, and goes on at once, with other streams, while the others take their time."""
    from cases_sparse_shared import sharing

    needs_two(comm, size)
    with sharing(comm) as (ours, _):
        for seed in range(2 * comm.size):
            culprit = seed % comm.size  # the lowest waits for no other rank's word
            one, other = (Inputs(comm.size, size, "float32", entries=9000, seed=number) for number in (seed, seed + 50))
            sar.allreduce(one.stream(comm.rank), ours)
            stream = one.stream(comm.rank)
            with (
                failing(SparseShared, where, MemoryError("no room"), comm.rank == culprit) as struck,
                slow(SparseShared, "_add", 0.05, comm.rank != culprit),
            ):
                outcome = outcome_of_call(functools.partial(sar.allreduce, stream, ours))
            assert comm.rank != culprit or struck[0].called
            if isinstance(outcome, sar.SparseStream):
                one.check(outcome)
            raise_what_is_owed(comm, outcome, ours)
            other.check(sar.allreduce(other.stream(comm.rank), ours))


@limit(20)
@each(shared=[True, False], algorithm=["ssar_ring", "auto"], dense=[None, 1e-15, 1e-3])
def case_ranks_that_fail_at_once_raise_the_same(comm, shared, algorithm, dense):
    inputs, _ = needs_two(comm, 200_000)
    with duplicate(comm, shared) as ours:
        if dense is not None:  # seconds a byte of the dense sum, which "auto" then takes or avoids
            progress.channels[-1].machine = sar.Machine(beta_dense=dense, gamma_dense=dense)
        error = MemoryError(f"no room on rank {comm.rank}")
        with contextlib.ExitStack() as ways:  # whichever "auto" takes by this machine's constants
            places = (wire, "enclose"), (packed, "pack_into"), (VectorSum, "write"), (SparseShared, "commit"), (mpi_sum, "_fill")
            for where, name in places:
                ways.enter_context(failing(where, name, error, True))
            outcome = outcome_of_call(lambda: sar.allreduce(inputs.stream(comm.rank), ours, algorithm=algorithm))
        first = range(comm.size if algorithm == "auto" else 1)  # of recursive doubling, rank 0 may be told before it comes to fail
        assert any(f"rank {rank} gave up: no room on rank {rank}" in str(outcome) for rank in first)
        same_text(comm, outcome)
        the_next_work(ours)


@limit(20)
@each(shared=[True, False])
def case_a_reducer_on_one_rank_and_a_sum_on_another_is_a_mismatch(comm, shared):
    _, culprit = needs_two(comm, 5000)
    with duplicate(comm, shared) as ours:
        reducer = sar.OkTopk(5000, 50)
        stream = Inputs(comm.size, 5000, "float32", entries=100).stream(comm.rank)
        if comm.rank == culprit:
            outcome = outcome_of_call(lambda: reducer.allreduce(np.ones(5000, np.float32), ours))
        else:
            outcome = outcome_of_call(lambda: sar.allreduce(stream, ours))
        assert isinstance(outcome, sar.MismatchError), outcome
        same_text(comm, outcome)
        update, _ = reducer.allreduce(np.ones(5000, np.float32), ours)
        assert update.nnz


@limit(20)
def case_collectives_of_mpi_are_used_again_after_a_failure(comm):
    """By the first operation after it, in which all ranks learn of it."""
    inputs, culprit = needs_two(comm, 5000)
    with duplicate(comm) as ours:
        channel = progress.channels[-1]
        for _ in range(3):
            with failing(Reduction, "densify", MemoryError("no room for an array"), comm.rank == culprit):
                outcome_of_call(lambda: sar.allreduce(inputs.stream(comm.rank), ours, algorithm="dense"))
            assert not any(comm.allgather(channel.collectives.usable))
            inputs.check(sar.allreduce(inputs.stream(comm.rank), ours))
            assert all(comm.allgather(channel.collectives.usable))
            inputs.check(sar.allreduce(inputs.stream(comm.rank), ours, algorithm="dense"))
            inputs.check(sar.allreduce(inputs.stream(comm.rank), ours))
            assert not channel.collectives.unfinished


@limit(20)
@each(where=["publish", "agree", "release"])
def case_a_rank_that_fails_where_it_tells_of_mpis_own_sum(comm, where):
    """It takes back what it has said, or enters the sum with the others, if they have seen it."""
    _, culprit = needs_two(comm, 100)
    stream = sar.SparseStream.from_dense(np.full(400_000, comm.rank + 1, np.float32))
    with duplicate(comm) as ours:
        sar.allreduce(stream, ours)
        original, calls = getattr(SharedHandshake, where), []

        def fails_once(*arguments):
            calls.append(arguments)
            if len(calls) == 1:
                raise MemoryError("no room")
            return original(*arguments)

        with mock.patch.object(SharedHandshake, where, fails_once if comm.rank == culprit else original):
            outcome = outcome_of_call(lambda: sar.allreduce(stream, ours))
        if isinstance(outcome, sar.SparseStream):
            assert outcome.to_dense()[0] == sum(range(1, comm.size + 1))
        raise_what_is_owed(comm, outcome, ours)
        for _ in range(5):
            assert sar.allreduce(stream, ours).to_dense()[0] == sum(range(1, comm.size + 1))


def reduce(stream, comm, algorithm, blocking, **options):
    if blocking:
        return sar.allreduce(stream, comm, algorithm=algorithm, **options)
    return sar.iallreduce(stream, comm, algorithm=algorithm, **options).wait()


def interrupting(_number, _frame):
    raise KeyboardInterrupt


def interrupted(function):
    """Return the outcome of a call that a signal interrupts soon; called again if the signal comes before the library is."""
    while True:
        before = signal.signal(signal.SIGUSR2, interrupting)
        timer = threading.Timer(0.05, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2))
        timer.start()
        try:
            outcome = outcome_of_call(function, KeyboardInterrupt)
        finally:
            timer.join()
            signal.signal(signal.SIGUSR2, before)
        if not isinstance(outcome, KeyboardInterrupt) or getattr(outcome, "_reported_on", ()):
            return outcome


def outcome_of_call(function, *others):
    """The result or the error."""
    try:
        return function()
    except (sar.SparseAllreduceError, *others) as error:
        return error


def same_text(comm, outcome):
    """All ranks have a result, or all have raised the same."""
    said = comm.allgather("" if isinstance(outcome, sar.SparseStream) else f"{type(outcome).__name__}: {outcome}")
    assert len(set(said)) == 1, said


def the_next_work(comm):
    """Operations of every kind, each on streams of its own, are right."""
    for number, (size, dtype) in enumerate([(100, "float64"), (5000, "float32"), (60_000, "float32"), (200_000, "int64")]):
        for algorithm in ("auto", "ssar_ring", "dense"):
            inputs = Inputs(comm.size, size, dtype, entries=size // (3 + number), seed=number)
            result = sar.allreduce(inputs.stream(comm.rank), comm, algorithm=algorithm)
            inputs.check(result)
            inputs.check(sar.iallreduce(inputs.dense_form(comm.rank), comm, algorithm=algorithm).wait())
