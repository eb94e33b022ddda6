"""reduce, reduce_scatter, allgather and bcast over MPI: results, errors on all ranks, plans, timeouts."""

from itertools import pairwise

import numpy as np
import pytest
from mpi4py import MPI
from mpi_cases import each, on_ranks
from mpi_inputs import Inputs, check_usable, raise_what_is_owed, same_everywhere
from oracle import bits

import sparseallreduce as sar

RANKS = (1, 2, 3, 5)
SIZES = ((61, 5), (5000, 300), (400_000, 30_000), (2000, 1900))  # with the record, by messages, in shared memory, nearly dense


def call(blocking, name, *args, **options):
    """An operation, blocking or not."""
    return getattr(sar, name)(*args, **options) if blocking else getattr(sar, "i" + name)(*args, **options).wait()


@each(algorithm=sar.algorithms("reduce"), blocking=[True, False])
def case_the_root_alone_gets_the_reduction(comm, algorithm, blocking):
    for number, (size, entries) in enumerate(SIZES):
        inputs, root = Inputs(comm.size, size, entries=entries, seed=number), number % comm.size
        for op in ("sum", "max"):
            result = call(blocking, "reduce", inputs.stream(comm.rank), comm, op, root, algorithm)
            if comm.rank != root:
                assert result is None
            else:
                inputs.check(result, op)


@each(algorithm=sar.algorithms("reduce_scatter"), blocking=[True, False])
def case_every_rank_gets_its_range(comm, algorithm, blocking):
    for number, (size, entries) in enumerate(SIZES):
        inputs = Inputs(comm.size, size, entries=entries, seed=number)
        uneven = [0, *[size // 7] * (comm.size - 1), size]
        for bounds in (None, uneven):
            for op in ("sum", "mean"):
                part = call(blocking, "reduce_scatter", inputs.stream(comm.rank), comm, op, bounds, algorithm)
                lo, hi = [*pairwise(bounds or [size * rank // comm.size for rank in range(comm.size + 1)])][comm.rank]
                whole = sar.allreduce(inputs.stream(comm.rank), comm, op)
                assert part.size == hi - lo and not part.values.flags.writeable
                np.testing.assert_allclose(part.to_dense(), whole.to_dense()[lo:hi], rtol=1e-5, atol=1e-5)


@each(algorithm=sar.algorithms("allgather"), blocking=[True, False])
def case_streams_are_joined(comm, algorithm, blocking):
    for number, (size, entries) in enumerate(SIZES):
        inputs = Inputs(comm.size, size, entries=entries, seed=number)
        mine = inputs.stream(comm.rank)
        added = call(blocking, "allgather", mine, comm, "sum", algorithm)
        inputs.check(added)
        own = sar.SparseStream(mine.indices[: comm.rank + 4], mine.values[: comm.rank + 4], size + comm.rank)
        joined = call(blocking, "allgather", own, comm, algorithm=algorithm)
        expected = np.concatenate(comm.allgather(own.to_dense()))
        np.testing.assert_array_equal(joined.to_dense(), expected)
        same_everywhere(comm, added, joined)


@each(algorithm=sar.algorithms("bcast"), blocking=[True, False])
def case_every_rank_gets_the_stream_of_the_root(comm, algorithm, blocking):
    for number, (size, entries) in enumerate(SIZES):
        root = number % comm.size
        stream = Inputs(comm.size, size, "float64", entries=entries, seed=number).stream(root)
        result = call(blocking, "bcast", stream if comm.rank == root else None, comm, root, algorithm)
        assert bits(result) == bits(stream)


@on_ranks(2, 3, 5)
@each(blocking=[True, False])
def case_streams_sent_with_the_records_are_the_same_as_by_messages(comm, blocking):
    """A rank whose stream is too long for its record makes all of them send messages, and only as long as it is."""
    rng, last = np.random.default_rng(comm.rank), comm.size - 1
    for number, (entries, of_last) in enumerate([(3, 3), (3, 300_000), (3, 300_000), (0, 3), (3, 3), (40_000, 40_000), (2, 0)]):
        for dtype, shape in (("float64", ()), ("float16", ()), ("complex128", (2,))):
            count, size = of_last if comm.rank == last else entries, 400_000 + number
            indices = np.sort(rng.choice(size, count, replace=False))
            mine = sar.SparseStream(indices, np.arange(1, count * max(1, *shape, 1) + 1).reshape(count, *shape).astype(dtype), size)
            mine = mine if number % 2 else sar.SparseStream(indices, mine.values, size + comm.rank)
            given = mine if comm.rank == last else None
            pairs = [
                (call(blocking, "bcast", given, comm, last), sar.bcast(given, comm, last, "tree")),
                (call(blocking, "allgather", mine, comm), sar.allgather(mine, comm, algorithm="doubling")),
            ]
            for sent, by_messages in pairs:
                assert bits(sent) == bits(by_messages) and not np.shares_memory(sent.values, mine.values)


@on_ranks(2, 3, 5)
def case_short_streams_are_joined_beyond_indices_of_four_bytes(comm):
    mine = sar.SparseStream([0, 2**32 - 2], [comm.rank, -1.0], 2**32 - 1)
    for _ in range(2):
        joined = sar.allgather(mine, comm)
        assert joined.size == comm.size * (2**32 - 1) and joined.indices.dtype == np.uint64
        assert bits(joined) == bits(sar.allgather(mine, comm, algorithm="ring"))
    long = sar.SparseStream(np.arange(200_000), np.ones(200_000), 2**32 - 1)  # which is ignored on all ranks but the root
    assert bits(sar.bcast(mine if comm.rank == 0 else long, comm)) == bits(sar.bcast(mine, comm, algorithm="tree"))


@on_ranks(2, 3, 5)
def case_dense_streams_with_absent_entries_are_sent_with_the_records(comm):
    vector = np.array([0.0, -0.0, 3.0, np.nan])
    dense = sar.SparseStream.from_dense(vector)
    assert sar.explain(dense, comm, collective="bcast").choice == sar.explain(dense, comm, collective="allgather").choice == "packed"
    for _ in range(2):
        assert bits(sar.bcast(dense if comm.rank == 0 else None, comm)) == bits(sar.bcast(dense, comm, algorithm="tree"))
        assert bits(sar.allgather(dense, comm)) == bits(sar.allgather(dense, comm, algorithm="ring"))


def case_what_is_scattered_and_gathered_is_the_allreduce(comm):
    stream = Inputs(comm.size, 999, "int64", entries=99).stream(comm.rank)
    assert sar.allgather(sar.reduce_scatter(stream, comm), comm) == sar.allreduce(stream, comm)


def case_several_are_in_flight_with_allreduces(comm):
    inputs = Inputs(comm.size, 5000, "int64", entries=400)
    stream, last = inputs.stream(comm.rank), comm.size - 1
    requests = [
        sar.ireduce(stream, comm, root=last),
        sar.iallreduce(stream, comm),
        sar.ireduce_scatter(stream, comm),
        sar.ibcast(stream if comm.rank == last else None, comm, last),
        sar.iallgather(stream, comm),
    ]
    reduced, whole, part, sent, joined = sar.Request.waitall(requests)
    assert (reduced is None) == (comm.rank != last) and (reduced is None or reduced == whole)
    np.testing.assert_array_equal(part.to_dense(), whole.to_dense()[5000 * comm.rank // comm.size : 5000 * (comm.rank + 1) // comm.size])
    assert sent == inputs.stream(last) and joined.size == 5000 * comm.size


@on_ranks(2, 3)
def case_wrong_arguments_of_one_rank_are_errors_of_all(comm):
    stream, odd = sar.SparseStream([1], [1.0], 40), comm.rank == comm.size - 1
    wrong = [
        (lambda: sar.reduce(stream, comm, root=comm.size if odd else 0), sar.AlgorithmError, f"on rank {comm.size - 1}: root is a rank"),
        (lambda: sar.reduce(stream, comm, root=int(odd)), sar.MismatchError, "disagree on the root: 0 on"),
        (lambda: sar.bcast(7 if odd else stream, comm), sar.StreamTypeError, "bcast takes a SparseStream, not int"),
        (lambda: sar.bcast(None, comm), sar.StreamTypeError, "on rank 0: bcast takes a SparseStream, not NoneType"),
        (lambda: sar.reduce_scatter(stream, comm, bounds=[0, 9] if odd else None), sar.AlgorithmError, "bounds are"),
        (lambda: sar.reduce_scatter(stream, comm, bounds=[0] * comm.size + [40] if odd else None), sar.MismatchError, "the bounds"),
        (lambda: sar.allgather(stream, comm, "sum" if odd else "ranges"), sar.MismatchError, "disagree on the join"),
        (lambda: sar.allgather(stream, comm, "disjoint"), sar.MismatchError, "ranks 0 and 1 both have an entry at position 1"),
        (lambda: sar.reduce(stream, comm) if odd else sar.reduce_scatter(stream, comm), sar.MismatchError, "disagree on the operation"),
        (lambda: sar.allreduce(stream, comm) if odd else sar.reduce(stream, comm), sar.MismatchError, "another operation on rank"),
        (lambda: sar.reduce(stream, comm) if odd else sar.allreduce(stream, comm), sar.MismatchError, "disagree on the operation"),
        (lambda: sar.ireduce(stream, comm, progress="no" if odd else "manual").wait(), sar.AlgorithmError, "progress is"),
    ]
    for attempt, kind, text in wrong:
        for _ in range(2):
            with pytest.raises(kind, match=text) as raised:
                attempt()
            assert len(set(comm.allgather(str(raised.value)))) == 1
        assert sar.allreduce(stream, comm).values[0] == comm.size


@on_ranks(2, 3)
@each(collective=["reduce", "reduce_scatter", "allgather", "bcast"])
def case_a_rank_that_stays_away_ends_the_wait_of_the_others(comm, collective):
    stream = sar.SparseStream([1], [1.0], 40)
    sar.allreduce(stream, comm)
    if comm.rank:
        with pytest.raises(sar.WaitTimeoutError, match="rank 0"):
            getattr(sar, collective)(stream, comm, timeout=0.2)
    comm.Barrier()
    if not comm.rank:
        with pytest.raises(sar.WaitTimeoutError):
            getattr(sar, collective)(stream, comm)
    assert sar.allreduce(stream, comm).values[0] == comm.size


@on_ranks(2)
def case_an_error_in_an_operator_is_one_of_all_ranks(comm):
    def failing(a, b, out=None):
        raise ZeroDivisionError("of this operator")

    op = sar.Operator("failing", failing, 0)
    stream = sar.SparseStream(np.arange(400), np.ones(400), 10_000)
    for attempt in (
        lambda: sar.reduce(stream, comm, op, algorithm="tree"),
        lambda: sar.reduce_scatter(stream, comm, op),
        lambda: sar.allgather(stream, comm, op),
    ):
        outcome = None
        try:
            attempt()
        except sar.SparseAllreduceError as error:
            outcome = error
        assert any("of this operator" in text for text in comm.allgather(str(outcome)))
        raise_what_is_owed(comm, outcome)  # by a rank that needs no sum, and is done
        check_usable(comm)


def case_a_trace_counts_what_is_moved(comm):
    stream = Inputs(comm.size, 5000, entries=400).stream(comm.rank)
    with sar.trace() as moved:
        sar.reduce(stream, comm, algorithm="tree")
        sar.allgather(stream, comm, algorithm="ring")
    assert moved.operations == 2 and moved.entries_in == 800
    sent = comm.allreduce(moved.bytes_sent)
    assert sent >= (comm.size - 1) * 400 * 8 * (1 + comm.size) and sent == comm.allreduce(moved.bytes_received)


@on_ranks(2)
def case_a_communicator_that_is_freed_ends_what_is_in_flight(comm):
    own = comm.Dup()
    stream = sar.SparseStream([1], [1.0], 40)
    sar.reduce(stream, own)
    request = sar.ireduce_scatter(stream, own)
    request.wait()
    own.Free()
    with pytest.raises(sar.StreamTypeError):
        sar.reduce(stream, own)


@on_ranks(2)
def case_a_thread_moves_them_on(comm):
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return
    stream = Inputs(comm.size, 5000, "int64", entries=400).stream(comm.rank)
    parts = [sar.ireduce_scatter(stream, comm, progress="thread") for _ in range(3)]
    assert all(request.wait().size == 2500 for request in parts)


def case_plans_are_started_again_and_again(comm):
    inputs = Inputs(comm.size, 5000, "int64", entries=400)
    stream, last, own = inputs.stream(comm.rank), comm.size - 1, inputs.stream(comm.size - 1)
    given = stream if comm.rank == last else None
    plans = [
        sar.reduce_init(stream, comm, root=last),
        sar.reduce_scatter_init(stream, comm, "max"),
        sar.allgather_init(stream, comm, "sum"),
        sar.allgather_init(stream, comm),
        sar.bcast_init(given, comm, last),
    ]
    for _ in range(2):
        for plan in plans:
            plan.start(given if plan is plans[-1] else stream)
        reduced, part, added, joined, sent = [plan.wait() for plan in plans]
        whole = sar.allreduce(stream, comm)
        assert (reduced is None) == (comm.rank != last) and (reduced is None or reduced == whole)
        assert part == sar.reduce_scatter(stream, comm, "max") and added == whole and joined == sar.allgather(stream, comm) and sent == own
    plans[0].start(sar.SparseStream([1], [1], 40))
    with pytest.raises(sar.StreamError, match="make another by reduce_init"):
        plans[0].wait()
    with pytest.raises(sar.AlgorithmError, match="root is a rank"):
        sar.reduce_init(stream, comm, root=-1 if comm.rank == last else 0)


@each(collective=["reduce", "reduce_scatter", "allgather", "bcast"])
def case_what_auto_takes_is_explained(comm, collective):
    last = comm.size - 1
    for size, entries in ((61, 5), (400_000, 30_000)):
        stream = Inputs(comm.size, size, entries=entries).stream(comm.rank)
        given = None if collective == "bcast" and comm.rank != last else stream
        found = sar.explain(given, comm, collective=collective, root=last, join="sum")
        assert len(set(comm.allgather(str(found)))) == 1
        assert found.size == size and sum(found.entries) == (entries if collective == "bcast" else entries * comm.size)
        if comm.size > 1:
            assert {*sar.algorithms(collective)} - {"auto"} <= {*found.predicted} == {*found.bytes} and found.choice in found.predicted
