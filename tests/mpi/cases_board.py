"""What ranks of one host tell each other in shared memory: late ranks, failing ones, many in flight; and the same by messages.

All ranks of these tests are on one host, so that other cases take the board too.
"""

import time
from contextlib import contextmanager
from unittest import mock

from cases_faults import failing, needs_two, outcome_of
from mpi_cases import each, limit, on_ranks, skip
from mpi_inputs import Inputs, check_usable, same_everywhere

import sparseallreduce as sar
from sparseallreduce.algorithms import allreduce
from sparseallreduce.runtime import setup, shared
from sparseallreduce.runtime.board import SLOTS, Slot
from sparseallreduce.runtime.mpi import measured
from sparseallreduce.runtime.part_sum import PartSum
from sparseallreduce.streams import packed

RANKS = (2, 5)
# That travel with the agreement, are summed on the board where dense, and are too large for it where each rank has a core.
SIZES = (100, 5000, 60_000, 400_000)


@contextmanager
def duplicate(comm, board=True):
    """Of the communicator, whose ranks agree on a board or, as on several hosts, by messages."""

    def nothing(channel):
        return None
        yield

    made = comm.Dup()
    with mock.patch.object(setup, "made_board", setup.made_board if board else nothing):
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
@each(board=[True, False], kind=[*((size, "float32", None) for size in SIZES), *((size, "int64", 3) for size in SIZES[:-1])])
def case_results_with_and_without_a_board(comm, board, kind):
    size, dtype, width = kind
    with duplicate(comm, board) as ours:
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
def case_a_board_does_not_change_what_is_summed_in_one_order(comm, size):
    """Entries that travel with the agreement are summed alike however they travel; integers are summed alike in any order."""
    inputs = Inputs(comm.size, size, "int32", entries=size // 3)
    found = []
    for board in (True, False):
        with duplicate(comm, board) as ours:
            found.append(sar.allreduce(inputs.stream(comm.rank), ours))
    with_board, without = same_everywhere(comm, *found)
    assert with_board[-1] == without[-1] or size > SIZES[0]
    assert (found[0].to_dense() == found[1].to_dense()).all()


@limit(30)
@each(size=SIZES, board=[True, False])
def case_a_late_rank_is_waited_for(comm, size, board):
    """Longer than for what should be over at once: the others go the long way, to the same bits."""
    with duplicate(comm, board) as ours:
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
@each(method=["write", "join"])
def case_a_rank_that_is_late_with_its_part_is_waited_for(comm, method):
    if comm.size == 1:
        skip("nobody to wait for")
    with duplicate(comm) as ours:
        inputs = Inputs(comm.size, 5000, "float32", entries=5000)
        prompt = sar.allreduce(inputs.dense_form(comm.rank), ours)
        with slow(PartSum, method, 0.05, comm.rank == comm.size - 1):
            results = [sar.allreduce(inputs.dense_form(comm.rank), ours) for _ in range(5)]
        first, *others = same_everywhere(comm, prompt, *results)
        assert others == [first] * len(results)


@limit(30)
@each(method=["write", "join"])
def case_failure_in_a_sum_on_the_board_leaves_nobody_waiting(comm, method):
    _, culprit = needs_two(comm, 5000)
    with duplicate(comm) as ours:
        stream = Inputs(comm.size, 5000, "float32", entries=5000).dense_form(comm.rank)
        with failing(PartSum, method, MemoryError("no room for a sum"), comm.rank == culprit) as struck:
            outcome = outcome_of_blocking(stream, ours)
        assert comm.bcast(bool(struck and struck[0].called), culprit)
        if method != "join" or comm.rank == culprit:  # else the others have the sum
            assert str(outcome) == f"MemoryError: rank {culprit} gave up: no room for a sum"
        for _ in range(3):
            check_usable(ours)
            Inputs(comm.size, 5000, "float32", entries=5000).check(sar.allreduce(stream, ours))


@limit(30)
def case_where_a_rank_has_no_memory_left_nothing_is_summed_on_the_board(comm):
    _, culprit = needs_two(comm, 5000)
    inputs = Inputs(comm.size, 5000, "float32", entries=5000)
    with duplicate(comm) as ours, mock.patch.object(allreduce, "choose_beginning", return_value="dense"):
        left = 0 if comm.rank == culprit else 1 << 40
        written = mock.Mock(wraps=PartSum.join)
        with (
            mock.patch.object(shared, "memory_left", return_value=left),
            mock.patch.object(PartSum, "join", lambda *given: written(*given)),
        ):
            for _ in range(5):
                inputs.check(sar.allreduce(inputs.dense_form(comm.rank), ours))
            assert not written.called
            inputs = Inputs(comm.size, 4999, "float32", entries=4999)
            shared.memory_left.return_value = 1 << 40
            for _ in range(5):
                inputs.check(sar.allreduce(inputs.dense_form(comm.rank), ours))
            assert written.called


@on_ranks(2, 3)
@limit(30)
@each(size=SIZES[:2], where=["begins", "pack_into", "reduced"])
def case_failure_before_all_have_agreed_by_messages(comm, size, where):
    inputs, culprit = needs_two(comm, size)
    owner = {"begins": allreduce, "pack_into": packed, "reduced": packed.Rows}[where]
    with duplicate(comm, board=False) as ours:
        with failing(owner, where, MemoryError("no room"), comm.rank == culprit) as struck:
            outcome = outcome_of_blocking(inputs.stream(comm.rank), ours)
        called = comm.bcast(bool(struck and struck[0].called), culprit)
        if called and where != "reduced":
            assert str(outcome) == f"MemoryError: rank {culprit} gave up: no room"
        check_usable(ours)


@limit(30)
@each(board=[True, False])
def case_many_more_in_flight_than_the_board_has_slots(comm, board):
    """While one rank sleeps, the others start operations that find no slot, one of which gives up before it has told anyone."""
    inputs, culprit = needs_two(comm, 100)
    with duplicate(comm, board) as ours:
        if comm.rank == 0:
            time.sleep(0.1)
        stream = inputs.stream(comm.rank)
        before = [sar.iallreduce(stream, ours) for _ in range(2 * SLOTS)]
        with failing(allreduce, "begins", MemoryError("no room"), comm.rank == culprit):
            bad = sar.iallreduce(stream, ours)
            assert str(outcome_of(bad)) == f"MemoryError: rank {culprit} gave up: no room"
        after = [sar.iallreduce(stream, ours, algorithm="ssar_ring") for _ in range(2 * SLOTS)]
        for request in reversed(before + after):
            inputs.check(request.wait())
        check_usable(ours)


@limit(30)
@each(board=[True, False])
def case_ranks_that_disagree_are_told_by_either_way(comm, board):
    if comm.size == 1:
        skip("nobody to disagree with")
    with duplicate(comm, board) as ours:
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
    with duplicate(comm) as ours, slow(Slot, "take", 0.05, comm.rank == comm.size - 1):
        inputs = [Inputs(comm.size, 100, seed=seed) for seed in range(3 * SLOTS)]
        for request, given in [(sar.iallreduce(given.stream(comm.rank), ours), given) for given in inputs]:
            given.check(request.wait())


def outcome_of_blocking(stream, comm):
    """The result or the error."""
    try:
        return sar.allreduce(stream, comm)
    except sar.SparseAllreduceError as error:
        return error
