"""Sparse streams that the ranks of a host add up in memory that they share: what is the same as by messages, late ranks, failing ones."""

import threading
from contextlib import contextmanager, nullcontext
from unittest import mock

import numpy as np
from cases_faults import failing, needs_two
from cases_handshake import duplicate, outcome_of_blocking, slow
from mpi_cases import each, limit, on_ranks, skip
from mpi_inputs import Inputs, check_usable, raise_what_is_owed, same_everywhere

import sparseallreduce as sar
from sparseallreduce.runtime import predictions, progress, setup
from sparseallreduce.runtime.memory import mapping, sparse
from sparseallreduce.runtime.memory.sparse import KEPT, SparseMemory
from sparseallreduce.runtime.shortcuts.sparse_shared import SparseShared

RANKS = (2, 5)
KINDS = [("float32", None), ("float64", 3), ("float16", None), ("int64", None)]
SIZE, FEW, MANY = 100_000, 9000, 40_000  # entries of a rank whose sum is sparse, and dense


@contextmanager
def sharing(comm, cores=2):
    """A duplicate whose ranks add up in shared memory whatever they can, and the list of the sums that came to a result.

    Of two parts each lies in its place at once; of more, as many as there are ``cores`` and ranks, each is written there later.
    """

    class WithCores(SparseMemory):
        def __init__(self, memory, rank, ranks, oversubscribed, _cores):
            super().__init__(memory, rank, ranks, oversubscribed, cores)

    def chosen(_problem, _machine, _fits, writes, _share):
        return "sparse_shared" if writes else "ssar_recursive_doubling"

    made, original = [], SparseShared._result

    def noted(self):
        made.append(self)
        return original(self)

    with (
        mock.patch.object(setup, "SparseMemory", WithCores),
        duplicate(comm) as ours,
        mock.patch.object(predictions, "_fastest", chosen),
        mock.patch.object(SparseShared, "_result", noted),
    ):
        yield ours, made


@contextmanager
def in_another_thread(lock):
    """The lock is held by a thread."""
    taken, over = threading.Event(), threading.Event()

    def hold():
        with lock:
            taken.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


@limit(30)
@each(kind=KINDS, entries=[FEW, MANY], cores=[2, 8])
def case_results_are_those_of_messages(comm, kind, entries, cores):
    """Blocking, non-blocking and traced; sparse results to the bit those of the algorithm that is carried out."""
    inputs = Inputs(comm.size, SIZE, *kind, entries=entries)
    stream = inputs.stream(comm.rank)
    with sharing(comm, cores) as (ours, made):
        with sar.trace():
            traced = sar.allreduce(stream, ours)
        results = [sar.allreduce(stream, ours), sar.iallreduce(stream, ours).wait(), traced]
        assert len(made) == 3 * (comm.size > 1)
        results.append(sar.allreduce(stream, ours, algorithm="ssar_split_allgather"))
        for result in results:
            inputs.check(result)
        *shared, by_messages = same_everywhere(comm, *results)
        assert shared == [shared[0]] * 3
        assert shared[0] == by_messages or results[-1].is_dense
        assert comm.size == 1 or not results[0]._stored.flags.writeable


@limit(30)
@each(entries=[FEW, MANY])
def case_results_that_are_kept_stay_as_they_are(comm, entries):
    """More than there is room for, by some of the ranks; what they need not is used again."""
    with sharing(comm) as (ours, made):
        kept = []
        for seed in range(3 * KEPT):
            inputs = Inputs(comm.size, SIZE, "float32", entries=entries, seed=seed)
            result = sar.allreduce(inputs.stream(comm.rank), ours)
            if seed % comm.size == comm.rank or seed % 2:
                kept.append((inputs, result))
            del result
        for inputs, result in kept:
            inputs.check(result)
        assert len(made) == 3 * KEPT * (comm.size > 1)


@limit(30)
def case_ranks_with_little_and_with_all(comm):
    """One travels with the agreement, one is dense; what one rank cannot put there, nobody does."""
    for entries in ((10, FEW, MANY, SIZE, 0), (FEW, 0, SIZE // 4, FEW, FEW), (SIZE, FEW, FEW, 0, FEW)):
        inputs = Inputs(comm.size, SIZE, "float32", entries=tuple(entries[: comm.size]))
        with sharing(comm) as (ours, _):
            for _ in range(2):
                result = sar.allreduce(inputs.stream(comm.rank), ours)
                inputs.check(result)
                same_everywhere(comm, result)


@limit(30)
def case_streams_that_do_not_fit_go_by_messages(comm):
    if comm.size == 1:
        skip("no messages")
    with sharing(comm) as (ours, made):
        inputs = Inputs(comm.size, SIZE, "float32", entries=FEW)
        channel = progress.channels[-1]
        for capacity in (8 * FEW, 8 * FEW - 1):
            channel.sparse_memory.capacity = capacity
            channel.signatures.clear()
            inputs.check(sar.allreduce(inputs.stream(comm.rank), ours))
        assert len(made) == 1


@limit(30)
@each(where=["write", "_add", "_write", "_result"], cores=[2, 8])
def case_a_late_rank_is_waited_for(comm, where, cores):
    with sharing(comm, cores) as (ours, _):
        inputs = Inputs(comm.size, SIZE, "float32", entries=FEW)
        prompt = sar.allreduce(inputs.stream(comm.rank), ours)
        with slow(SparseMemory if where == "write" else SparseShared, where, 0.05, comm.rank == comm.size - 1):
            results = [sar.allreduce(inputs.stream(comm.rank), ours) for _ in range(4)]
        first, *others = same_everywhere(comm, prompt, *results)
        assert others == [first] * len(results)
        inputs.check(prompt)


@on_ranks(2, 3)
@limit(30)
@each(where=["write", "commit", "_add", "_sum_part", "_write", "_result"], blocking=[True, False], cores=[2, 8])
def case_failure_leaves_nobody_waiting(comm, where, blocking, cores):
    """Nor does anybody write to what another still reads, or lose the memory for good. Those who do not need the rank have the sum."""
    _, culprit = needs_two(comm, SIZE)
    if where in ("_sum_part", "_write") and min(cores, comm.size) == 2:
        skip("two parts are added up in one call, where they are to lie")
    inputs = Inputs(comm.size, SIZE, "float32", entries=FEW)
    with sharing(comm, cores) as (ours, made):
        stream = inputs.stream(comm.rank)
        sar.allreduce(stream, ours)
        owner = SparseMemory if where == "write" else SparseShared
        with failing(owner, where, MemoryError("no room for a sum"), comm.rank == culprit) as struck:
            outcome = outcome_of_blocking(stream, ours) if blocking else outcome_of_other(stream, ours)
        called = comm.bcast(bool(struck and struck[0].called), culprit)
        assert called or where == "_sum_part"  # for which others may have come first
        if isinstance(outcome, sar.SparseStream):
            assert where in ("commit", "_add", "_write", "_result") or not called
            assert comm.rank != culprit or not called
            inputs.check(outcome)
        else:
            assert called
            assert str(outcome) == f"MemoryError: rank {culprit} gave up: no room for a sum"
        raise_what_is_owed(comm, outcome, ours)
        for _ in range(3):
            check_usable(ours)
            inputs.check(sar.allreduce(stream, ours))
        before = len(made)
        inputs.check(sar.allreduce(stream, ours))
        assert len(made) == before + 1


@limit(30)
@each(held=[True, False])
def case_operations_that_start_after_later_ones_were_called(comm, held):
    """Because the channel was not ready, or a thread was at it: they start in the order of the calls, each with its own number."""
    inputs = [Inputs(comm.size, SIZE, "float32", entries=FEW, seed=seed) for seed in range(4)]
    for attempt in range(4):
        with sharing(comm) as (ready, made):
            ours = ready if held else ready.Dup()
            started = []
            late = held and comm.rank == attempt % comm.size
            with in_another_thread(progress.channels[-1].lock) if late else nullcontext():
                for number, given in enumerate(inputs):
                    started.append((given, sar.iallreduce(given.stream(comm.rank), ours)))
                    if comm.rank == number and not held:  # the others may have made more calls before the channel is ready
                        given.check(started[-1][1].wait())
            started.append((inputs[0], sar.iallreduce(inputs[0].stream(comm.rank), ours)))  # free to start, but for those before it
            for given, request in started:
                given.check(request.wait())
            assert made or comm.size == 1
            if not held:
                ours.Free()


@limit(30)
def case_the_first_of_many_in_flight_takes_the_memory(comm):
    """The others go by messages, whenever they come to it, so that all runs give the same bits."""
    inputs = [Inputs(comm.size, SIZE, "float32", entries=FEW, seed=seed) for seed in range(4)]
    with sharing(comm) as (ours, made):
        found = []
        for _ in range(3):
            requests = [sar.iallreduce(given.stream(comm.rank), ours) for given in inputs]
            results = [request.wait() for request in reversed(requests)][::-1]
            for given, result in zip(inputs, results):
                given.check(result)
            found.append(same_everywhere(comm, *results))
        assert found == [found[0]] * 3
        assert len(made) == 3 * (comm.size > 1)


@limit(30)
def case_what_is_summed_there_is_counted_as_by_messages(comm):
    if comm.size == 1:
        skip("nothing moves")
    inputs = Inputs(comm.size, SIZE, "float32", entries=FEW)
    with sharing(comm) as (ours, made):
        counts = []
        for algorithm in ("auto", "ssar_split_allgather"):
            with sar.trace() as traffic:
                sar.allreduce(inputs.stream(comm.rank), ours, algorithm=algorithm)
            moved = np.array([traffic.bytes_sent - traffic.header_bytes, traffic.bytes_received])
            counts.append(comm.allreduce(moved))
        assert len(made) == 1
        shared, sent = counts
        assert shared[0] == shared[1] or abs(shared[0] - shared[1]) <= 2 * comm.size
        assert abs(shared[0] - sent[0]) < 0.05 * sent[0]


@limit(30)
@each(entries=[20, FEW, MANY, SIZE])
def case_an_operation_counts_the_same_whichever_way_it_takes(comm, entries):
    """A blocking one, and one that is waited for later."""
    inputs = Inputs(comm.size, SIZE, "float32", entries=entries)
    stream = inputs.stream(comm.rank)
    with sharing(comm) as (ours, _):
        sar.allreduce(stream, ours)
        counts = []
        for call in (lambda: sar.allreduce(stream, ours), lambda: sar.iallreduce(stream, ours).wait()):
            with sar.trace() as traffic:
                call()
            counts.append({name: value for name, value in vars(traffic).items() if name not in ("seconds", "_start")})
        assert counts[0] == counts[1]
        assert counts[0]["operations"] == 1
        assert (counts[0]["bytes_sent"] > 0) == (comm.size > 1)


@limit(30)
@each(blocking=[True, False], entries=[FEW, MANY])
def case_where_a_rank_has_no_memory_left_sums_go_by_messages(comm, blocking, entries):
    """And do not as soon as it has some again."""
    if comm.size == 1:
        skip("no memory to share")
    inputs = Inputs(comm.size, SIZE, "float32", entries=entries)
    stream = inputs.stream(comm.rank)
    with sharing(comm) as (ours, made), mock.patch.object(sparse, "_LATER", 3):
        left = 0 if comm.rank == comm.size - 1 else 1 << 40
        with mock.patch.object(mapping, "memory_left", return_value=left):
            for _ in range(3):
                inputs.check(sar.allreduce(stream, ours) if blocking else sar.iallreduce(stream, ours).wait())
        assert not made
        for _ in range(3):
            inputs.check(sar.allreduce(stream, ours))
        assert made


@limit(30)
def case_without_memory_to_share_sums_go_by_messages(comm):
    def nothing(_channel):
        return None
        yield

    with mock.patch.object(setup, "made_sparse_memory", nothing), sharing(comm) as (ours, made):
        inputs = Inputs(comm.size, SIZE, "float32", entries=FEW)
        inputs.check(sar.allreduce(inputs.stream(comm.rank), ours))
        assert not made


def outcome_of_other(stream, comm):
    """The result or the error of a non-blocking operation."""
    try:
        return sar.iallreduce(stream, comm).wait()
    except sar.SparseAllreduceError as error:
        return error


@on_ranks(2, 3)
@each(entries=[(SIZE, 0), (70_000, 100), (30_000, 0), (9_000, 10)])
def case_lopsided_sums_are_made_in_shared_memory_from_the_second_on(comm, entries):
    """Each rank begins by its own number of entries, before it knows those of others: then no way is that of all."""
    most, few = entries
    inputs = Inputs(comm.size, SIZE, "float32", entries=tuple(most if rank == comm.size - 1 else few for rank in range(comm.size)))
    turned = Inputs(comm.size, SIZE, "float32", entries=tuple(few if rank else most for rank in range(comm.size)))
    even = Inputs(comm.size, SIZE, "float32", entries=10)
    original, made = SparseShared._result, []

    def chosen(problem, _machine, fits, writes, _share):
        assert writes
        return "sparse_shared" if problem.entries > 2000 else "packed"

    def noted(self):
        made.append(self)
        return original(self)

    with (
        duplicate(comm) as ours,
        mock.patch.object(predictions, "_fastest", chosen),
        mock.patch.object(SparseShared, "_result", noted),
    ):
        for number, each_inputs in enumerate([inputs, inputs, turned, inputs, even, even, even]):
            each_inputs.check(result := sar.allreduce(each_inputs.stream(comm.rank), ours))
            same_everywhere(comm, result)
            assert len(made) == (0, 1, 2, 3, 4, 4, 4)[number]
            del result
        assert sar.explain(inputs.stream(comm.rank), ours).choice == "sparse_shared"
