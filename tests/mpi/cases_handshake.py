"""What ranks of one host publish in shared memory: late ranks, failing ones, many in flight; and the same by messages.

All ranks of these tests are on one host, so that other cases share memory too.
"""

import time
from contextlib import contextmanager
from unittest import mock

from cases_faults import failing, needs_two, outcome_of
from mpi_cases import each, limit, on_ranks, skip
from mpi_inputs import Inputs, check_usable, raise_what_is_owed, same_everywhere

import sparseallreduce as sar
from sparseallreduce.runtime import predictions, setup, signature
from sparseallreduce.runtime.communicators import measured
from sparseallreduce.runtime.handshake.shared import SLOTS, SharedHandshake
from sparseallreduce.runtime.memory import mapping
from sparseallreduce.runtime.memory.dense import VectorSum
from sparseallreduce.streams import packed

RANKS = (2, 5)
# That travel with the agreement, are summed in shared memory where dense, and are too large for that where each rank has a core.
SIZES = (100, 5000, 60_000, 400_000)


@contextmanager
def duplicate(comm, shared=True):
    """Of the communicator, whose ranks agree in shared memory or, as on several hosts, by messages."""

    def nothing(channel):
        return None
        yield

    made = comm.Dup()
    with mock.patch.object(setup, "made_slots_and_areas", setup.made_slots_and_areas if shared else nothing):
        measured(made)
    yield made
    made.Free()


@contextmanager
def slow(owner, name, seconds, strikes):
    """Before its first call, a function takes a while."""
    original, called = getattr(owner, name), []

    def sleeps(*args, **kwargs):
        if strikes and not called:
            called.append(True)
            time.sleep(seconds)
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, sleeps):
        yield


@on_ranks(2, 3)
@limit(30)
@each(shared=[True, False], kind=[*((size, "float32", None) for size in SIZES), *((size, "int64", 3) for size in SIZES[:-1])])
def case_results_with_and_without_shared_memory(comm, shared, kind):
    size, dtype, width = kind
    with duplicate(comm, shared) as ours:
        for entries in (size // 50, size):
            inputs = Inputs(comm.size, size, dtype, width, entries=entries)
            for make in (inputs.stream, inputs.dense_form):
                results = [sar.allreduce(make(comm.rank), ours) for _ in range(3)]
                inputs.check(results[0])
                first, *others = same_everywhere(comm, *results)
                assert others == [first, first]
            results = [sar.allreduce(inputs.stream(comm.rank), ours, op="max"), sar.iallreduce(inputs.stream(comm.rank), ours).wait()]
            inputs.check(results[0], "max")
            inputs.check(results[1])


@limit(20)
@each(size=SIZES)
def case_shared_memory_does_not_change_what_is_summed_in_one_order(comm, size):
    """Entries that travel with the agreement are summed alike however they travel; integers are summed alike in any order."""
    inputs = Inputs(comm.size, size, "int32", entries=size // 3)
    found = []
    for shared in (True, False):
        with duplicate(comm, shared) as ours:
            found.append(sar.allreduce(inputs.stream(comm.rank), ours))
    with_memory, without = same_everywhere(comm, *found)
    assert with_memory[-1] == without[-1] or size > SIZES[0]
    assert (found[0].to_dense() == found[1].to_dense()).all()


@limit(30)
@each(size=SIZES, shared=[True, False])
def case_a_late_rank_is_waited_for(comm, size, shared):
    """Longer than for what should be over at once: the others go the long way, to the same bits."""
    with duplicate(comm, shared) as ours:
        inputs = Inputs(comm.size, size, "float32", entries=size)
        prompt = sar.allreduce(inputs.dense_form(comm.rank), ours)
        results = []
        for late in range(min(comm.size, 3)):
            ours.Barrier()
            if comm.rank == late:
                time.sleep(0.05)
            results.append(sar.allreduce(inputs.dense_form(comm.rank), ours))
        first, *others = same_everywhere(comm, prompt, *results)
        assert others == [first] * len(results)
        inputs.check(prompt)


@limit(30)
@each(method=["write", "sum_into"])
def case_a_rank_that_is_late_with_its_part_is_waited_for(comm, method):
    if comm.size == 1:
        skip("nobody to wait for")
    with duplicate(comm) as ours:
        inputs = Inputs(comm.size, 5000, "float32", entries=5000)
        prompt = sar.allreduce(inputs.dense_form(comm.rank), ours)
        with slow(VectorSum, method, 0.05, comm.rank == comm.size - 1):
            results = [sar.allreduce(inputs.dense_form(comm.rank), ours) for _ in range(5)]
        first, *others = same_everywhere(comm, prompt, *results)
        assert others == [first] * len(results)


@limit(30)
@each(method=["write", "sum_into"])
def case_failure_in_a_dense_sum_in_shared_memory_leaves_nobody_waiting(comm, method):
    _, culprit = needs_two(comm, 5000)
    with duplicate(comm) as ours, mock.patch.object(predictions, "_fastest", return_value="dense"):
        stream = Inputs(comm.size, 5000, "float32", entries=5000).dense_form(comm.rank)
        with failing(VectorSum, method, MemoryError("no room for a sum"), comm.rank == culprit) as struck:
            outcome = outcome_of_blocking(stream, ours)
        assert comm.bcast(bool(struck and struck[0].called), culprit)
        if method != "sum_into" or comm.rank == culprit:  # else the others have the sum
            assert str(outcome) == f"MemoryError: rank {culprit} gave up: no room for a sum"
        raise_what_is_owed(comm, outcome, ours)
        for _ in range(3):
            check_usable(ours)
            Inputs(comm.size, 5000, "float32", entries=5000).check(sar.allreduce(stream, ours))


@limit(30)
def case_where_a_rank_has_no_memory_left_nothing_is_summed_in_shared_memory(comm):
    _, culprit = needs_two(comm, 5000)
    inputs = Inputs(comm.size, 5000, "float32", entries=5000)
    with duplicate(comm) as ours, mock.patch.object(predictions, "_fastest", return_value="dense"):
        left = 0 if comm.rank == culprit else 1 << 40
        written = mock.Mock(wraps=VectorSum.sum_into)
        with (
            mock.patch.object(mapping, "memory_left", return_value=left),
            mock.patch.object(VectorSum, "sum_into", lambda *given: written(*given)),
        ):
            for _ in range(5):
                inputs.check(sar.allreduce(inputs.dense_form(comm.rank), ours))
            assert not written.called
            inputs = Inputs(comm.size, 4999, "float32", entries=4999)
            mapping.memory_left.return_value = 1 << 40
            for _ in range(5):
                inputs.check(sar.allreduce(inputs.dense_form(comm.rank), ours))
            assert written.called


@on_ranks(2, 3)
@limit(30)
@each(size=SIZES[:2], where=["expected_beginning", "pack_into", "reduced"])
def case_failure_before_all_have_agreed_by_messages(comm, size, where):
    inputs, culprit = needs_two(comm, size)
    owner = {"expected_beginning": signature, "pack_into": packed, "reduced": packed.Rows}[where]
    with duplicate(comm, shared=False) as ours:
        with failing(owner, where, MemoryError("no room"), comm.rank == culprit) as struck:
            outcome = outcome_of_blocking(inputs.stream(comm.rank), ours)
        called = comm.bcast(bool(struck and struck[0].called), culprit)
        if called and where != "reduced":
            assert str(outcome) == f"MemoryError: rank {culprit} gave up: no room"
        raise_what_is_owed(comm, outcome, ours)
        check_usable(ours)


@limit(30)
@each(shared=[True, False])
def case_many_more_in_flight_than_there_are_slots(comm, shared):
    """While one rank sleeps, the others start operations that find no slot, one of which gives up before it has told anyone."""
    inputs, culprit = needs_two(comm, 100)
    with duplicate(comm, shared) as ours:
        if comm.rank == 0:
            time.sleep(0.1)
        stream, marked = inputs.stream(comm.rank), inputs.stream(comm.rank)
        choose = signature.Signature.choose

        def fails(self, given, level):
            if given is marked and comm.rank == culprit:
                raise MemoryError("no room")
            return choose(self, given, level)

        before = [sar.iallreduce(stream, ours) for _ in range(2 * SLOTS)]
        with mock.patch.object(signature.Signature, "choose", fails):
            bad = sar.iallreduce(marked, ours)
            assert str(outcome_of(bad)) == f"MemoryError: rank {culprit} gave up: no room"
        after = [sar.iallreduce(stream, ours, algorithm="ssar_ring") for _ in range(2 * SLOTS)]
        for request in reversed(before + after):
            inputs.check(request.wait())
        check_usable(ours)


@limit(30)
@each(shared=[True, False])
def case_ranks_that_disagree_are_told_by_either_way(comm, shared):
    if comm.size == 1:
        skip("nobody to disagree with")
    with duplicate(comm, shared) as ours:
        for size in (100, 5000):
            right = Inputs(comm.size, size, entries=size)
            sar.allreduce(right.stream(comm.rank), ours)
            stream = right.stream(comm.rank) if comm.rank else sar.SparseStream([1], [1.0], 77)
            outcome = outcome_of_blocking(stream, ours)
            others = f"ranks {', '.join(map(str, range(1, comm.size)))}" if comm.size > 2 else "rank 1"
            assert str(outcome) == f"the ranks disagree on the size: 77 on rank 0; {size} on {others}. All ranks must pass the same"
            right.check(sar.allreduce(right.stream(comm.rank), ours))


@limit(20)
def case_a_slot_is_not_written_to_before_all_have_read_it(comm):
    """One rank takes its time to read what the others have said."""
    if comm.size == 1:
        skip("nobody to wait for")
    with duplicate(comm) as ours, slow(SharedHandshake, "release", 0.05, comm.rank == comm.size - 1):
        inputs = [Inputs(comm.size, 100, seed=seed) for seed in range(3 * SLOTS)]
        for request, given in [(sar.iallreduce(given.stream(comm.rank), ours), given) for given in inputs]:
            given.check(request.wait())


def outcome_of_blocking(stream, comm):
    """The result or the error."""
    try:
        return sar.allreduce(stream, comm)
    except sar.SparseAllreduceError as error:
        return error
