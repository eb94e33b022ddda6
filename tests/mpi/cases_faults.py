"""A rank that fails in the middle of an operation tells the others: nobody waits for it, and the communicator stays usable.

An error that a rank meets before it has sent anything is everybody's error, because nobody can have the result without that rank. One
that it meets later may find other ranks done already: they keep their result, which is right.
"""

from contextlib import contextmanager
from unittest import mock

from mpi_cases import each, limit, on_ranks, skip
from mpi_inputs import Inputs, check_usable, raise_what_is_owed, raise_what_may_be_owed

import sparseallreduce as sar
from sparseallreduce.runtime import collectives, signature
from sparseallreduce.runtime.handshake import base
from sparseallreduce.streams import packed, wire
from sparseallreduce.streams.reduction import Reduction

MESSAGES = ("allgather", "ssar_recursive_doubling", "ssar_split_allgather", "ssar_ring", "dsar_split_allgather", "dsar_early_switch")
SIZES = (100, 200_000)  # whose messages MPI sends without, and with, waiting for the receiver


@limit(20)
@each(algorithm=MESSAGES, size=SIZES)
def case_failure_before_the_first_message_is_everyones(comm, algorithm, size):
    inputs, culprit = needs_two(comm, size)
    with failing(wire, "enclose", MemoryError("no room for a message"), comm.rank == culprit):
        outcome = outcome_of(sar.iallreduce(inputs.stream(comm.rank), comm, algorithm=algorithm))
    assert type(outcome) is sar.SparseAllreduceError
    assert str(outcome) == f"MemoryError: rank {culprit} gave up: no room for a message"
    assert outcome.on_all_ranks
    assert isinstance(outcome.__cause__, MemoryError) == (comm.rank == culprit)
    check_usable(comm, algorithm)


@on_ranks(2, 3)
@limit(20)
@each(algorithm=MESSAGES, where=["join", "pair"], size=SIZES)
def case_failure_later_on_leaves_nobody_waiting(comm, algorithm, where, size):
    inputs, culprit = needs_two(comm, size)
    owner = wire if where == "join" else Reduction
    with failing(owner, where, MemoryError("no room for a sum"), comm.rank == culprit) as struck:
        request = sar.iallreduce(inputs.stream(comm.rank), comm, algorithm=algorithm)
        other = sar.iallreduce(inputs.stream(comm.rank), comm, algorithm="dense")
        outcome = outcome_of(request)
        rest = outcome_of(other)
    if struck and struck[0].called:
        assert isinstance(outcome, sar.SparseAllreduceError)
    if isinstance(outcome, Exception):
        assert str(outcome) == f"MemoryError: rank {culprit} gave up: no room for a sum"
        assert outcome.on_all_ranks
    else:
        inputs.check(outcome)
    if isinstance(rest, Exception):  # where the request failed on some ranks, and others had completed it
        assert str(rest) == f"MemoryError: rank {culprit} gave up: no room for a sum"
    else:
        inputs.check(rest)
    raise_what_may_be_owed(comm, [outcome, rest])
    check_usable(comm, algorithm)


@limit(20)
@each(algorithm=MESSAGES, harm=["truncated", "foreign", "altered"], size=SIZES)
def case_damaged_message_is_named(comm, algorithm, harm, size):
    inputs, culprit = needs_two(comm, size)

    def damaged(streams):
        envelope, parts = enclose(streams)
        if harm == "truncated":
            longest = max(range(len(parts)), key=lambda number: len(parts[number]))
            parts[longest] = parts[longest][:-8]
        else:
            envelope = envelope.copy()
            envelope[0 if harm == "foreign" else 20] ^= 255
        return envelope, parts

    enclose = wire.enclose
    with mock.patch.object(wire, "enclose", damaged if comm.rank == culprit else enclose):
        outcome = outcome_of(sar.iallreduce(inputs.stream(comm.rank), comm, algorithm=algorithm))
    wrong = [name for name in comm.allgather(type(outcome).__name__) if name != "SparseStream"]
    assert wrong and set(wrong) == {"WireError"}, wrong
    if isinstance(outcome, Exception):
        says = {"truncated": "truncated", "foreign": "does not come from this library", "altered": "does not match its checksum"}
        assert says[harm] in str(outcome)
        assert outcome.on_all_ranks
    raise_what_is_owed(comm, outcome)
    check_usable(comm, algorithm)


@on_ranks(2, 3)
@limit(20)
@each(size=[*SIZES, 1_000_000], where=["expected_beginning", "pack_into", "reduced"])
def case_failure_of_a_rank_that_does_nothing_else_is_everyones(comm, size, where):
    """In the first step of a blocking operation, whether the stream travels with it or not."""
    inputs, culprit = needs_two(comm, size)
    owner = {"expected_beginning": signature, "pack_into": packed, "reduced": packed.Rows}[where]
    with failing(owner, where, MemoryError("no room"), comm.rank == culprit) as struck:
        try:
            outcome = sar.allreduce(inputs.stream(comm.rank), comm)
        except sar.SparseAllreduceError as error:
            outcome = error
    called = comm.bcast(bool(struck and struck[0].called), culprit)
    if called and where != "reduced":  # by then the others know all they need
        assert str(outcome) == f"MemoryError: rank {culprit} gave up: no room"
    if not called:
        inputs.check(outcome)
    check_usable(comm)


@limit(20)
def case_failure_before_many_ranks_have_agreed_is_everyones(comm):
    """They agree by a collective of MPI, more than 16 of them; a rank that kept away from it would take part in the next one instead."""
    from cases_handshake import duplicate

    inputs, culprit = needs_two(comm, 5000)
    with mock.patch.object(collectives, "DIRECT_RANKS", 0), mock.patch.object(base, "_RANKS", 0), duplicate(comm, shared=False) as ours:
        with failing(signature.Signature, "choose", MemoryError("no room"), comm.rank == culprit):
            bad, other = (sar.iallreduce(inputs.stream(comm.rank), ours) for _ in range(2))
            outcomes = [outcome_of(bad), outcome_of(other)]
        assert [str(outcome) for outcome in outcomes] == [f"MemoryError: rank {culprit} gave up: no room"] * 2
        inputs.check(sar.allreduce(inputs.stream(comm.rank), ours))
        check_usable(ours)


@limit(20)
def case_failure_before_a_collective_of_mpi_is_everyones(comm):
    """The others are inside MPI's allreduce by then, which cannot be called off: later operations do without it."""
    inputs, culprit = needs_two(comm, 5000)
    with failing(Reduction, "densify", MemoryError("no room for an array"), comm.rank == culprit):
        bad, other = (sar.iallreduce(inputs.stream(comm.rank), comm, algorithm="dense") for _ in range(2))
        outcomes = [outcome_of(bad), outcome_of(other)]
    assert all(type(outcome) is sar.SparseAllreduceError for outcome in outcomes)
    assert "no room for an array" in str(outcomes[0]), outcomes
    check_usable(comm, "dense")
    check_usable(comm, "dsar_split_allgather")


@limit(20)
@each(algorithm=["ssar_split_allgather", "ssar_ring"])
def case_failure_of_one_of_several_in_flight(comm, algorithm):
    inputs, culprit = needs_two(comm, 5000)
    stream = inputs.stream(comm.rank)
    before = [sar.iallreduce(stream, comm, algorithm=algorithm) for _ in range(3)]
    for request in before[:2]:
        request.wait()
    with failing(wire, "enclose", MemoryError("no room"), comm.rank == culprit):
        bad = outcome_of(sar.iallreduce(stream, comm, algorithm="allgather"))
    after = sar.iallreduce(stream, comm, algorithm="dsar_split_allgather")
    assert isinstance(bad, sar.SparseAllreduceError)
    for request in (after, *before):
        outcome = outcome_of(request)  # one that was in flight may have met the same lack of room
        if not isinstance(outcome, Exception):
            inputs.check(outcome)
    inputs.check(after.wait())
    check_usable(comm)


@limit(20)
def case_operator_that_raises_fails_everywhere_alike(comm):
    inputs, _ = needs_two(comm, 100)

    def broken(a, b, out=None):
        raise ZeroDivisionError("the operator is broken")

    for algorithm in MESSAGES:
        outcome = outcome_of(sar.iallreduce(inputs.stream(comm.rank), comm, sar.Operator("broken", broken, 0), algorithm))
        assert isinstance(outcome, sar.SparseAllreduceError)
        assert "ZeroDivisionError" in str(outcome) and "the operator is broken" in str(outcome)
        check_usable(comm)


def needs_two(comm, size):
    """The streams of a case, and the rank on which something fails."""
    if comm.size == 1:
        skip("nobody waits")
    check_usable(comm)  # the first operation on a communicator measures the machine, and is none of these cases
    return Inputs(comm.size, size, seed=4, entries=size // 4), comm.size // 2


@contextmanager
def failing(owner, name, error, here):
    """Let a function of the library raise on this rank; gives the mock, in a list, or an empty list elsewhere."""
    if not here:
        yield []
        return
    with mock.patch.object(owner, name, side_effect=error) as struck:
        yield [struck]


def outcome_of(request):
    """The result or the error."""
    try:
        return request.wait()
    except sar.SparseAllreduceError as error:
        return error
