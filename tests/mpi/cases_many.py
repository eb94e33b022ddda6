"""A list of streams is reduced as each of them would be: one agreement, one error, results in the order of the list."""

import contextlib
import time
from unittest import mock

import numpy as np
from cases_faults import failing
from cases_handshake import duplicate
from cases_promises import interrupted
from mpi_cases import each, limit, on_ranks, skip
from mpi_inputs import Inputs, check_usable, hear_from, raise_what_is_owed, same_everywhere, tell_the_others

import sparseallreduce as sar
from sparseallreduce.algorithms import many as algorithms_many
from sparseallreduce.runtime import fast, many, request
from sparseallreduce.runtime.communicators import channel_of
from sparseallreduce.streams import fusion

# Size, dtype, width and entries of each stream of a list.
ALIKE = [(size, "float32", None, entries) for size, entries in ((1000, 50), (0, 0), (3, 1), (70_000, 900), (1, 0), (500, 500))]
MIXED = [*ALIKE[:3], (40, "float64", None, 12), (300, "float32", 4, 20), (2000, "int64", None, 100), (40, "float64", None, 40), ALIKE[3]]
LISTS = {"alike": ALIKE, "mixed": MIXED, "one": ALIKE[:1], "empty streams": [(0, "float32", None, 0)] * 3}


@limit(40)
@each(what=LISTS, shared=[True, False], how=["blocking", "wait", "test"])
def case_every_result_is_that_of_its_stream(comm, what, shared, how):
    with duplicate(comm, shared) if comm.size > 1 else contextlib.nullcontext(comm) as ours:
        inputs = inputs_of(comm, what)
        for op in ("sum", "max") if how == "blocking" else ("sum",):
            for _ in range(3):
                results = reduced([given.stream(comm.rank) for given in inputs], ours, how, op=op)
                assert type(results) is list
                for given, result in zip(inputs, results, strict=True):
                    given.check(result, op)
                    assert result.indices.dtype == np.uint32
                    assert not result.values.flags.writeable and not result.indices.flags.writeable
                same_everywhere(comm, *results)
        check_usable(ours)


@limit(90)
@each(algorithm=sar.algorithms(), what=["alike", "mixed"])
def case_by_every_algorithm(comm, algorithm, what):
    inputs = inputs_of(comm, what)
    for op in ("sum", "min"):
        results = sar.allreduce(tuple(given.stream(comm.rank) for given in inputs), comm, op, algorithm)
        for given, result in zip(inputs, results, strict=True):
            given.check(result, op)
        same_everywhere(comm, *results)


@limit(40)
@each(forms=["dense", "mixed", "differ"], op=["sum", "max"])
def case_dense_and_sparse_streams_in_one_list(comm, forms, op):
    inputs = [Inputs(comm.size, size, "float32", seed=seed, entries=size // 3) for seed, size in enumerate((90, 3000, 12, 60_000))]
    dense = {"dense": lambda place: True, "mixed": lambda place: place % 2 == 0, "differ": lambda place: (place + comm.rank) % 2}[forms]
    streams = [given.dense_form(comm.rank) if dense(place) else given.stream(comm.rank) for place, given in enumerate(inputs)]
    for results in (sar.allreduce(streams, comm, op), sar.iallreduce(streams, comm, op).wait()):
        for given, result in zip(inputs, results, strict=True):
            given.check(result, op)
            assert result.is_dense == (result.nnz > sar.SparseStream([], np.empty(0, np.float32), given.size).switch_point)
        same_everywhere(comm, *results)


@limit(30)
def case_mean_divides_every_result(comm):
    kinds = (100, "float32"), (400, "float64"), (20, "float32")
    inputs = [Inputs(comm.size, size, dtype, seed=size, entries=size // 4) for size, dtype in kinds]
    streams = [given.stream(comm.rank) for given in inputs]
    for results in (sar.allreduce(streams, comm, "mean"), sar.iallreduce(streams[::2], comm, "mean").wait()):
        singles = [sar.allreduce(stream, comm, "mean") for stream in (streams if len(results) == 3 else streams[::2])]
        for result, single in zip(results, singles, strict=True):
            np.testing.assert_allclose(result.to_dense(), single.to_dense(), rtol=1e-5)


@limit(30)
def case_switch_density_holds_for_every_result(comm):
    inputs = [Inputs(comm.size, 1000, "float32", seed=1, entries=400), Inputs(comm.size, 9000, "float32", seed=2, entries=10)]
    results = sar.allreduce([given.stream(comm.rank) for given in inputs], comm, switch_density=0.25)
    assert [result.is_dense for result in results] == [True, False]
    assert [result.switch_density for result in results] == [0.25, 0.25]


@limit(30)
@each(dtype=["float32", "float16"])
def case_indices_beyond_32_bits(comm, dtype):
    """Of a list of streams each of which has short ones."""
    size = 2**32 - 5
    streams = [sar.SparseStream([comm.rank, size - 1], np.ones(2, dtype), size)]
    streams += [sar.SparseStream([0, 7 + comm.rank], np.ones(2, dtype), 64)]
    streams += [sar.SparseStream([2**40 + comm.rank], np.ones(1, dtype), 2**41), sar.SparseStream([], np.ones(0, dtype), 0)]
    first, second, third, last = sar.allreduce(streams, comm)
    assert first.indices.tolist() == [*range(comm.size), size - 1] and first.indices.dtype == np.uint32
    assert first.values.tolist() == [1.0] * comm.size + [comm.size]
    assert second.indices.tolist() == [0, *range(7, 7 + comm.size)]
    assert third.indices.tolist() == [2**40 + rank for rank in range(comm.size)] and third.indices.dtype == np.uint64
    assert last.size == 0


def case_the_same_stream_twice_and_inputs_left_alone(comm):
    inputs = Inputs(comm.size, 500, "float32", entries=40)
    stream = inputs.stream(comm.rank)
    before = stream.indices.tobytes(), stream.values.tobytes()
    given = [stream, stream, stream]
    request = sar.iallreduce(given, comm)
    given.clear()
    results = request.wait()
    assert len(results) == 3 and request.wait() is results
    for result in results:
        inputs.check(result)
        assert not result.overlaps(stream)
    assert (stream.indices.tobytes(), stream.values.tobytes()) == before
    assert not any(one.overlaps(other) for place, one in enumerate(results) for other in results[:place])


@each(how=["blocking", "wait", "test"])
def case_an_empty_list_is_empty(comm, how):
    for _ in range(3):
        assert reduced([], comm, how) == []
        assert reduced((), comm, how, algorithm="ssar_ring") == []
    check_usable(comm)


GOOD = [sar.SparseStream([1, 5], np.float32([1, 2]), 10), sar.SparseStream([2], np.float32([1]), 7), sar.SparseStream([0], [1.0], 3)]
# What one rank passes instead of GOOD; the class of the error; what its text has to say.
MISTAKES = {
    "not a stream": ([GOOD[0], np.ones(7), GOOD[2]], sar.StreamTypeError, "element 1 of the list is no SparseStream, but of type ndarray"),
    "a list in it": ([GOOD[0], GOOD[1], [GOOD[2]]], sar.StreamTypeError, "element 2 of the list is no SparseStream, but of type list"),
    "size": ([GOOD[0], sar.SparseStream([2], np.float32([1]), 8), GOOD[2]], sar.MismatchError, "size of stream 1 of the list: 7 on rank"),
    "dtype": ([GOOD[0], GOOD[1], GOOD[1]], sar.MismatchError, "size of stream 2 of the list: 3 on rank"),
    "another dtype": ([GOOD[0], sar.SparseStream([2], [1.0], 7), GOOD[2]], sar.MismatchError, "dtype of stream 1 of the list: float32 on"),
    "width": ([GOOD[0], GOOD[1], sar.SparseStream([0], [[1.0]], 3)], sar.MismatchError, "row width of stream 2 of the list: None on rank"),
    "fewer": (GOOD[:2], sar.MismatchError, "the size: a list of 3 streams on rank"),
    "none": ([], sar.MismatchError, "the size: a list of 3 streams on rank"),
    "one stream": (GOOD[0], sar.MismatchError, "a list of 3 streams on rank"),
    "a generator": ((stream for stream in GOOD), sar.StreamTypeError, "not generator"),
    "order": ([GOOD[1], GOOD[0], GOOD[2]], sar.MismatchError, "size of stream 0 of the list: 10 on rank"),
}


@limit(30)
@each(mistake=MISTAKES, how=["blocking", "wait"], culprit=["first", "last"])
def case_a_mistake_on_one_rank_is_raised_on_all_and_names_its_place(comm, mistake, how, culprit):
    wrong, kind, text = MISTAKES[mistake]
    if comm.size == 1 and kind is sar.MismatchError:
        skip("one rank agrees with itself")
    check_usable(comm)
    ours = wrong if comm.rank == (0 if culprit == "first" else comm.size - 1) else GOOD
    outcome = error_of(lambda: reduced(ours, comm, how))
    assert type(outcome) is kind, repr(outcome)
    if culprit == "last" or kind is sar.StreamTypeError:
        assert text in str(outcome), str(outcome)
    assert len({(type(given), given.args) for given in comm.allgather(outcome)}) == 1
    check_usable(comm)
    assert len(sar.allreduce(GOOD, comm)) == 3


def case_the_mean_of_integers_names_its_place(comm):
    given = [GOOD[0], sar.SparseStream([1], np.int32([1]), 9)]
    outcome = error_of(lambda: sar.allreduce(given, comm, "mean"))
    assert type(outcome) is sar.StreamTypeError and "element 1 of the list: the mean of int32" in str(outcome)
    check_usable(comm)


@on_ranks(2, 3)
def case_of_a_long_list_the_stream_that_differs_is_found(comm):
    given = [sar.SparseStream([1], np.ones(1, np.float32), 10 + place) for place in range(2000)]
    if comm.rank:
        given[1234] = sar.SparseStream([1], np.ones(1, np.float32), 7)
    outcome = error_of(lambda: sar.allreduce(given, comm))
    assert "the size of stream 1234 of the list: 1244 on rank 0; 7 on rank" in str(outcome), outcome
    check_usable(comm)


@on_ranks(1, 2, 3)
def case_a_trace_counts_a_list_as_one_operation(comm):
    inputs = inputs_of(comm, "mixed")
    streams = [given.stream(comm.rank) for given in inputs]
    sar.allreduce(streams, comm)
    for given in (streams, streams[:3]):
        with sar.trace() as counts:
            results = sar.allreduce(given, comm)
        assert counts.operations == 1
        assert counts.entries_in == sum(stream.stored for stream in given)
        assert counts.entries_out >= sum(result.nnz for result in results)  # of a dense whole, all values count
        assert (counts.bytes_received > 0) == (comm.size > 1)


@on_ranks(2, 3)
@limit(30)
def case_lists_in_flight_among_others(comm):
    inputs = [inputs_of(comm, what) for what in ("alike", "mixed", "one")]
    single = Inputs(comm.size, 3000, "float32", seed=3)
    requests = [sar.iallreduce([given.stream(comm.rank) for given in group], comm) for group in inputs]
    between = sar.iallreduce(single.stream(comm.rank), comm)
    *lists, last = sar.Request.waitall([*requests[::-1], between])
    single.check(last)
    for group, results in zip(inputs[::-1], lists, strict=True):
        for given, result in zip(group, results, strict=True):
            given.check(result)


@on_ranks(2, 3)
@limit(30)
@each(what=["alike", "mixed"], where=["fuse", "fusion_of"], how=["blocking", "wait"])
def case_what_befalls_a_rank_that_puts_its_list_together_is_everyones(comm, what, where, how):
    inputs, culprit = inputs_of(comm, what), comm.size // 2
    check_usable(comm)
    owner = fusion.Fusion if where == "fuse" else algorithms_many
    no_fast_way = mock.patch.object(many, "fused_alike", return_value=None)
    with failing(owner, where, MemoryError("no room"), comm.rank == culprit), no_fast_way:
        outcome = error_of(lambda: reduced([given.stream(comm.rank) for given in inputs], comm, how))
    assert type(outcome) is sar.SparseAllreduceError
    assert str(outcome) == f"on rank {culprit}: MemoryError: no room", outcome
    check_usable(comm)


@on_ranks(2, 3)
@limit(30)
@each(error=[MemoryError, KeyboardInterrupt], how=["blocking", "wait"])
def case_what_befalls_a_rank_on_the_fast_way_is_everyones(comm, error, how):
    inputs, culprit = inputs_of(comm, "alike"), comm.size // 2
    streams = [given.stream(comm.rank) for given in inputs]
    sar.allreduce(streams, comm)
    while not all(comm.allgather(fast.is_idle(channel_of(comm)))):  # for a while after a failure, it is not taken
        check_usable(comm)
    with failing(many, "fused_alike", error("no room"), comm.rank == culprit):
        try:
            outcome = error_of(lambda: reduced(streams, comm, how))
        except KeyboardInterrupt:
            outcome = None
    if error is MemoryError:
        assert str(outcome) == f"on rank {culprit}: MemoryError: no room", outcome
    else:
        assert (outcome is None) == (comm.rank == culprit)
        assert outcome is None or str(outcome) == f"KeyboardInterrupt: rank {culprit} gave up: no room", outcome
    check_usable(comm)
    for given, result in zip(inputs, sar.allreduce(streams, comm), strict=True):
        given.check(result)


@on_ranks(2, 3)
@limit(30)
@each(what=["alike", "mixed"], blocking=[True, False])
def case_an_interrupt_inside_a_wait_ends_it_on_all_ranks(comm, what, blocking):
    inputs, culprit = inputs_of(comm, what), comm.size // 2
    check_usable(comm)
    streams = [given.stream(comm.rank) for given in inputs]
    comm.Barrier()
    if comm.rank == culprit:
        outcome = interrupted(lambda: reduced(streams, comm, "blocking" if blocking else "wait"))
        assert isinstance(outcome, KeyboardInterrupt)
        assert not request.pending
        tell_the_others(comm)
        time.sleep(0.02)
    else:
        hear_from(comm, culprit)
        outcome = error_of(lambda: reduced(streams, comm, "blocking" if blocking else "wait"))
        if isinstance(outcome, sar.SparseAllreduceError):
            assert str(outcome) == f"KeyboardInterrupt: rank {culprit} gave up", outcome
        else:
            for given, result in zip(inputs, outcome, strict=True):
                given.check(result)
    raise_what_is_owed(comm, outcome)
    check_usable(comm)
    for given, result in zip(inputs, sar.allreduce(streams, comm), strict=True):
        given.check(result)


def inputs_of(comm, what):
    return [Inputs(comm.size, *kind[:3], seed=place, entries=kind[3]) for place, kind in enumerate(LISTS[what])]


def reduced(streams, comm, how, **options):
    if how == "blocking":
        return sar.allreduce(streams, comm, **options)
    pending = sar.iallreduce(streams, comm, **options)
    if how == "wait":
        return pending.wait()
    while not (found := pending.test())[0]:
        time.sleep(0)
    return found[1]


def error_of(run):
    try:
        return run()
    except sar.SparseAllreduceError as error:
        return error
