"""Messages between hosts, on one host: a communicator whose ranks take each other to be elsewhere, and messages in pieces of few bytes.

What is exact is the same to the bit as inside a host; and whatever a rank meets while it writes, sends or reads pieces is everyone's.
"""

from contextlib import contextmanager
from unittest import mock

import numpy as np
from cases_faults import MESSAGES, needs_two, outcome_of
from mpi_cases import each, limit, on_ranks, skip
from mpi_inputs import DTYPES, Inputs, check_usable, raise_what_is_owed, raise_what_may_be_owed, same_everywhere

import sparseallreduce as sar
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.runtime import outbox
from sparseallreduce.runtime.communicators import channel_of
from sparseallreduce.runtime.mailbox import Mailbox
from sparseallreduce.streams import merging, wire
from sparseallreduce.streams.wire import Assembly, frames

SLOW = Machine(alpha=1e-5, beta=8e-9)  # on which indices are worth to be written as gaps
LOSSY = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "qsgd8": 1 / 127, "qsgd4": 1 / 7}


@contextmanager
def between_hosts(comm, ranks_a_host=1, nbytes=600, grain=16):
    """Let this communicator's ranks take so many next to each other to be on one host, and the others to be elsewhere."""
    check_usable(comm)
    channel = channel_of(comm)
    host = comm.rank // ranks_a_host * ranks_a_host
    near = frozenset(range(host, min(host + ranks_a_host, comm.size)))
    comm.Barrier()
    with (
        mock.patch.multiple(channel, near=near, machine=SLOW),
        mock.patch.multiple(frames, _SHORTEST=nbytes // 2, _LONGEST=nbytes, _GRAIN=grain),
        mock.patch.object(merging, "_LEAST", 64),
    ):
        yield channel
        comm.Barrier()


def options_of(algorithm):
    return {"algorithm": algorithm, **({"machine": SLOW} if algorithm == "auto" else {})}


def all_inputs(ranks, dtypes):
    for dtype in dtypes:
        yield Inputs(ranks, 500, dtype)
    yield Inputs(ranks, 0)
    yield Inputs(ranks, 3)
    yield Inputs(ranks, 400, "float32", width=3, seed=1)
    yield Inputs(ranks, 6000, "float32", seed=2, entries=300)
    yield Inputs(ranks, 2000, seed=3)


@each(algorithm=sar.algorithms(), blocking=[True, False])
def case_result_is_that_of_one_host_to_the_bit(comm, algorithm, blocking):
    call = sar.allreduce if blocking else lambda *args, **options: sar.iallreduce(*args, **options).wait()
    for inputs in all_inputs(comm.size, DTYPES[blocking :: 2 if comm.size < 4 else 4]):
        whole = sar.allreduce(inputs.stream(comm.rank), comm, **options_of(algorithm))
        for ranks_a_host in (1, 2):
            with between_hosts(comm, ranks_a_host):
                result = call(inputs.stream(comm.rank), comm, **options_of(algorithm))
            inputs.check(result)
            ours = same_everywhere(comm, result, whole)
            assert algorithm in ("auto", "dense") or ours[0] == ours[1]  # these may go another way


@on_ranks(1, 2, 3, 5)
@each(algorithm=MESSAGES, op=["max", "prod", "mean"])
def case_other_operators_than_the_sum(comm, algorithm, op):
    inputs = Inputs(comm.size, 700, "float32", entries=200)
    whole = sar.allreduce(inputs.stream(comm.rank), comm, op, algorithm=algorithm)
    with between_hosts(comm):
        result = sar.allreduce(inputs.stream(comm.rank), comm, op, algorithm=algorithm)
    ours = same_everywhere(comm, result, whole)
    assert ours[0] == ours[1]


@on_ranks(1, 2, 3, 5)
@each(algorithm=sar.algorithms(), codec=["plain", "bitmap", "gaps", "auto"])
def case_codecs_of_positions_change_no_bit(comm, algorithm, codec):
    for inputs in (Inputs(comm.size, 3000, "float32", entries=40), Inputs(comm.size, 900, seed=1), Inputs(comm.size, 5000, entries=2000)):
        with between_hosts(comm):
            exact = sar.allreduce(inputs.stream(comm.rank), comm, **options_of(algorithm))
            result = sar.allreduce(inputs.stream(comm.rank), comm, index_codec=codec, **options_of(algorithm))
        inputs.check(result)
        ours = same_everywhere(comm, result, exact)
        assert algorithm == "auto" or ours[0] == ours[1]


@on_ranks(1, 2, 3, 5)
@each(algorithm=sar.algorithms(), codec=LOSSY)
def case_what_is_lost_is_bounded_and_the_same_on_all_ranks(comm, algorithm, codec):
    step, ranks = LOSSY[codec] + 1e-6, comm.size
    for inputs in (Inputs(ranks, 3000, "float32", entries=700), Inputs(ranks, 900, seed=1), Inputs(ranks, 2000, "float32", 3, seed=2)):
        dense = [inputs.dense_form(rank).to_dense().astype(np.float64) for rank in range(ranks)]
        largest = np.max(sum(map(np.abs, dense)), initial=0.0)
        for ranks_a_host in (1, 2, ranks):
            with between_hosts(comm, ranks_a_host, grain=512):
                result = sar.allreduce(inputs.stream(comm.rank), comm, value_codec=codec, seed=7, **options_of(algorithm))
            same_everywhere(comm, result)
            off = np.abs(result.to_dense() - sum(dense))
            assert (off <= (2 * ranks + 1) * (step * largest * (1 + step) ** (ranks + 2) + 2.0**-24)).all()


@each(algorithm=MESSAGES, ranks_a_host=[1, 2, 8])
def case_ranks_agree_on_what_was_drawn_where_others_have_nothing(comm, algorithm, ranks_a_host):
    """A sum with nothing is handed on as it came: a rank that had it decoded would draw anew."""
    inputs = Inputs(comm.size, 200_000, "float32", entries=(60_000, *[0] * (comm.size - 1)))
    with between_hosts(comm, ranks_a_host, nbytes=1 << 14, grain=512):
        for seed in range(3):
            same_everywhere(comm, sar.allreduce(inputs.stream(comm.rank), comm, algorithm=algorithm, value_codec="qsgd8", seed=seed))


def case_operations_in_flight_keep_apart(comm):
    """Of all algorithms and codecs, completed in another order on each rank."""
    ways = [{"algorithm": name} for name in MESSAGES] + [{"index_codec": "gaps"}, {"value_codec": "float16"}, {"op": "max"}]
    with between_hosts(comm, grain=512):
        started = []
        for number, way in enumerate(ways):
            inputs = Inputs(comm.size, 2000, "float32", seed=number, entries=600)
            options = {"algorithm": MESSAGES[number % len(MESSAGES)], **way}
            started.append((inputs, options, sar.iallreduce(inputs.stream(comm.rank), comm, **options)))
        order = np.random.default_rng(comm.rank).permutation(len(started))
        results = {number: started[number][2].wait() for number in order}
    for number, (inputs, options, _) in enumerate(started):
        same_everywhere(comm, results[number])
        if "value_codec" not in options:
            inputs.check(results[number], options.get("op", "sum"))


@on_ranks(1, 2, 3, 5)
@each(algorithm=MESSAGES, options=[{}, {"index_codec": "gaps"}, {"value_codec": "float16"}])
def case_lists_of_streams_travel_in_pieces(comm, algorithm, options):
    kinds = [("float32", None), ("float64", None), ("float32", 3), ("float32", None)]
    inputs = [Inputs(comm.size, 2000, dtype, width, seed=seed, entries=500) for seed, (dtype, width) in enumerate(kinds)]
    streams = [each.stream(comm.rank) for each in inputs]
    whole = sar.allreduce(streams, comm, algorithm=algorithm, **options)
    for ranks_a_host in (1, 2):
        with between_hosts(comm, ranks_a_host, grain=512):
            results = sar.allreduce(streams, comm, algorithm=algorithm, **options)
        ours = same_everywhere(comm, *results, *whole)
        assert ours[: len(streams)] == ours[len(streams) :]
        for given, result in zip(inputs, results):
            if not options.get("value_codec"):
                given.check(result)


@on_ranks(1, 2, 3, 5)
@each(algorithm=MESSAGES)
def case_a_thread_moves_pieces_on(comm, algorithm):
    with between_hosts(comm):
        for seed in range(3):
            inputs = Inputs(comm.size, 5000, "float32", seed=seed, entries=1500)
            requests = [sar.iallreduce(inputs.stream(comm.rank), comm, algorithm=algorithm, progress="thread") for _ in range(2)]
            for request in requests[:: -1 if comm.rank % 2 else 1]:
                inputs.check(request.wait())


@on_ranks(1, 2, 3, 5)
@each(algorithm=MESSAGES, options=[{}, {"value_codec": "qsgd8"}, {"index_codec": "gaps"}])
def case_as_many_bytes_arrive_as_are_sent(comm, algorithm, options):
    for ranks_a_host in (1, 2):
        with between_hosts(comm, ranks_a_host, grain=512):
            for inputs in (Inputs(comm.size, 5000, "float32", entries=1500), Inputs(comm.size, 900, "float32", seed=1)):
                with sar.trace() as counts:
                    sar.allreduce(inputs.stream(comm.rank), comm, algorithm=algorithm, **options)
                totals = np.array(comm.allgather([counts.bytes_sent, counts.bytes_received, counts.messages])).sum(axis=0)
                assert totals[0] == totals[1], totals
                assert bool(totals[2]) == (comm.size > 1)


@on_ranks(1, 2, 3, 5)
@each(algorithm=MESSAGES)
def case_no_more_than_a_few_pieces_of_a_message_are_in_flight(comm, algorithm):
    inputs, most = Inputs(comm.size, 60_000, "float32", entries=20_000), []

    def post(self, dest, tag, message, sends):
        original(self, dest, tag, message, sends)
        if message[:4].tobytes() == b"SARS":
            most.append((len(sends), len(message)))

    original = Mailbox.post
    with between_hosts(comm, nbytes=4000), mock.patch.object(Mailbox, "post", post):
        inputs.check(sar.allreduce(inputs.stream(comm.rank), comm, algorithm=algorithm))
    if comm.size > 1:
        assert max(pieces for pieces, _ in most) <= outbox.PIECES_IN_FLIGHT
        assert max(nbytes for _, nbytes in most) <= 1.1 * 4000 + wire.HEADER_BYTES  # about as many
        assert len(most) > 5


# What befalls a rank while it writes or reads pieces.


@contextmanager
def failing_at(owner, name, number, error, here):
    """Let the call of this number of a function of the library raise on this rank; gives the calls, counted in a list."""
    original, calls = getattr(owner, name), []

    def call(*args, **options):
        calls.append(name)
        if len(calls) == number:
            raise error
        return original(*args, **options)

    if not here:
        yield calls
        return
    with mock.patch.object(owner, name, call):
        yield calls


@on_ranks(2, 3, 5)
@limit(20)
@each(algorithm=MESSAGES, where=["write", "read", "merge"], number=[1, 2, 7])
def case_failure_amid_pieces_is_everyones(comm, algorithm, where, number):
    inputs, culprit = needs_two(comm, 3000)
    owner, name = {"write": (frames, "_frame"), "read": (Assembly, "take"), "merge": (merging.Merging, "advance")}[where]
    with between_hosts(comm):
        with failing_at(owner, name, number, MemoryError("no room for a piece"), comm.rank == culprit) as calls:
            request = sar.iallreduce(inputs.stream(comm.rank), comm, algorithm=algorithm)
            other = sar.iallreduce(inputs.stream(comm.rank), comm, algorithm="ssar_ring")
            outcomes = [outcome_of(request), outcome_of(other)]  # the piece may be one of the other's
        struck = comm.bcast(len(calls) >= number, culprit)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                assert str(outcome) == f"MemoryError: rank {culprit} gave up: no room for a piece", outcome
                assert outcome.on_all_ranks
            else:
                inputs.check(outcome)
        failed = [any(isinstance(outcome, Exception) for outcome in outcomes)]
        assert not struck or comm.rank != culprit or failed == [True]
        raise_what_may_be_owed(comm, outcomes)
        check_usable(comm, algorithm)


@limit(20)
@each(number=[2, 6, 12])
def case_failure_behind_the_result_is_everyones(comm, number):
    """A rank to which little was sent has the sum long before it has written its own pieces."""
    if comm.size == 1:
        skip("nobody waits")
    inputs = Inputs(comm.size, 50_000, "float32", seed=5, entries=(*[1] * (comm.size - 1), 20_000))
    culprit = comm.size - 1
    with between_hosts(comm, nbytes=4000), mock.patch.object(outbox, "PIECES_IN_FLIGHT", 1):
        with failing_at(frames, "_frame", number, MemoryError("no room for a piece"), comm.rank == culprit):
            outcome = outcome_of(sar.iallreduce(inputs.stream(comm.rank), comm, algorithm="allgather"))
        assert comm.size > 2 or isinstance(outcome, sar.SparseAllreduceError)
        if isinstance(outcome, Exception):
            assert str(outcome) == f"MemoryError: rank {culprit} gave up: no room for a piece", outcome
        check_usable(comm)


def waited_no_longer(comm, stream):
    """An operation of which this rank has the result, and has sent nothing yet, when its time is over."""
    with mock.patch.object(outbox, "PIECES_IN_FLIGHT", 0):
        request = sar.iallreduce(stream, comm, algorithm="allgather")
        while not request._operation.ended:
            request.test()
        return failure_of(lambda: request.wait(timeout=1e-9))


def failure_of(run):
    """The result, or what is raised."""
    try:
        return run()
    except (sar.SparseAllreduceError, KeyboardInterrupt) as error:
        return error


@on_ranks(2)
@limit(20)
def case_who_waits_no_longer_may_change_the_stream(comm):
    """What the others have still to get is the stream as it was."""
    inputs = Inputs(comm.size, 50_000, "float32", seed=5, entries=(*[1] * (comm.size - 1), 20_000))
    given = inputs.stream(comm.rank)
    indices, values = given.indices.copy(), given.values.copy()
    with between_hosts(comm, nbytes=4000):
        stream = sar.SparseStream(indices, values, given.size)
        if comm.rank == comm.size - 1:
            inputs.check(waited_no_longer(comm, stream))
            values[:], indices[:] = 99, 0
        else:
            inputs.check(sar.allreduce(stream, comm, algorithm="allgather"))
        check_usable(comm)


@on_ranks(2)
@limit(20)
@each(error=[MemoryError, KeyboardInterrupt], where=["write", "post"])
def case_failure_behind_a_wait_that_is_over_is_that_of_who_waits(comm, error, where):
    """A rank has the sum and waits no longer, and fails as it writes or sends what others need for theirs: they are told."""
    inputs = Inputs(comm.size, 50_000, "float32", seed=5, entries=(*[1] * (comm.size - 1), 20_000))
    stream, culprit = inputs.stream(comm.rank), comm.size - 1
    owner, name = {"write": (frames, "_frame"), "post": (Mailbox, "post")}[where]
    with between_hosts(comm):
        if comm.rank != culprit:
            outcome = outcome_of(sar.iallreduce(stream, comm, algorithm="allgather"))
            assert str(outcome) == f"{error.__name__}: rank {culprit} gave up: no room for a piece"
            outcome_of(sar.iallreduce(sar.SparseStream([1], [1.0], 9), comm, algorithm="ssar_ring"))
            check_usable(comm)
            return
        with failing_at(owner, name, 1, error("no room for a piece"), where == "write"):
            outcome = waited_no_longer(comm, stream)
        if where == "post":
            inputs.check(outcome)
        else:
            assert isinstance(outcome, KeyboardInterrupt) or str(outcome) == f"MemoryError: rank {culprit} gave up: no room for a piece"
            assert isinstance(outcome, KeyboardInterrupt) == (error is KeyboardInterrupt)
        with failing_at(owner, name, 1, error("no room for a piece"), where == "post"):
            outcome = failure_of(lambda: outcome_of(sar.iallreduce(sar.SparseStream([1], [1.0], 9), comm, algorithm="ssar_ring")))
            assert not isinstance(outcome, KeyboardInterrupt) or (error is KeyboardInterrupt and where == "post")
        check_usable(comm)


@on_ranks(2, 3, 5)
@limit(20)
@each(algorithm=MESSAGES, where=["write", "read"], number=[1, 3, 9])
def case_interrupt_amid_pieces_is_everyones(comm, algorithm, where, number):
    inputs, culprit = needs_two(comm, 3000)
    owner, name = {"write": (frames, "_frame"), "read": (Assembly, "take")}[where]
    with between_hosts(comm):
        with failing_at(owner, name, number, KeyboardInterrupt("now"), comm.rank == culprit) as calls:
            try:
                outcome = outcome_of(sar.iallreduce(inputs.stream(comm.rank), comm, algorithm=algorithm))
            except KeyboardInterrupt as interrupt:
                outcome = interrupt
        struck = comm.bcast(len(calls) >= number, culprit)
        if comm.rank == culprit and struck:
            assert isinstance(outcome, KeyboardInterrupt)
        elif isinstance(outcome, Exception):
            assert str(outcome) == f"KeyboardInterrupt: rank {culprit} gave up: now"
        else:
            inputs.check(outcome)
        raise_what_is_owed(comm, outcome)
        check_usable(comm, algorithm)


@on_ranks(2, 3, 5)
@limit(20)
@each(algorithm=MESSAGES, harm=["cut", "foreign", "altered", "repeated", "lost", "payload"], number=[1, 4])
def case_damaged_piece_is_named(comm, algorithm, harm, number):
    inputs, culprit = needs_two(comm, 4000)
    posted = []

    def post(self, dest, tag, message, sends):
        if message[:4].tobytes() != b"SARS":
            return original(self, dest, tag, message, sends)
        posted.append(len(message))
        if len(posted) == number and harm != "lost":
            message = message.copy()
            if harm == "cut":
                message = message[:-3]
            elif harm == "payload":
                message[-20:] = 255
            elif harm != "repeated":
                message[0 if harm == "foreign" else 20] ^= 255
        if len(posted) != number or harm != "lost":
            original(self, dest, tag, message, sends)
        if len(posted) == number and harm == "repeated":
            original(self, dest, tag, message, sends)

    original = Mailbox.post
    with between_hosts(comm):
        with mock.patch.object(Mailbox, "post", post if comm.rank == culprit else original):
            outcome = outcome_of(sar.iallreduce(inputs.stream(comm.rank), comm, algorithm=algorithm, index_codec="plain"))
        names = set(comm.allgather(type(outcome).__name__)) - {"SparseStream"}
        # Values may be altered without notice, and who has all it needs may not look at what is repeated.
        assert names == {"WireError"} or (harm in ("repeated", "payload") and not names), names
        if isinstance(outcome, Exception):
            assert outcome.on_all_ranks
        raise_what_is_owed(comm, outcome)
        check_usable(comm, algorithm)


@on_ranks(2, 3, 5)
@each(algorithm=MESSAGES)
def case_value_beyond_the_codec_is_everyones(comm, algorithm):
    _, culprit = needs_two(comm, 100)
    stream = sar.SparseStream([3, 60], [1.0, 1e5 if comm.rank == culprit else 2.0], 100)
    for ranks_a_host in (1, 2, comm.size):
        with between_hosts(comm, ranks_a_host):
            outcome = outcome_of(sar.iallreduce(stream, comm, algorithm=algorithm, value_codec="float16"))
            texts = set(comm.allgather(str(outcome)))
            assert isinstance(outcome, sar.SparseAllreduceError) and len(texts) == 1, texts
            assert "at index 60 is beyond what value_codec='float16' can hold: scale the values" in str(outcome)
            check_usable(comm)


@each(
    options=[
        {"value_codec": "qsgd8", "op": "max"},
        {"value_codec": "float8"},
        {"index_codec": "rice"},
        {"seed": -1},
    ]
)
def case_options_that_make_no_sense_are_refused_on_all_ranks(comm, options):
    for culprits in ({0}, set(range(comm.size))):
        stream, bad = sar.SparseStream([3], [1.0], 9), comm.rank in culprits
        outcome = None
        try:
            sar.allreduce(stream, comm, **(options if bad else {"op": options.get("op", "sum")}))
        except sar.SparseAllreduceError as error:
            outcome = error
        assert isinstance(outcome, sar.SparseAllreduceError)
        texts = set(comm.allgather(str(outcome)))
        assert len(texts) == 1, texts
    check_usable(comm)


@on_ranks(2, 3)
@each(name=["seed", "index_codec", "value_codec"])
def case_ranks_that_disagree_on_the_encoding_are_told(comm, name):
    values = {"seed": (0, 1), "index_codec": ("gaps", "plain"), "value_codec": ("exact", "qsgd8")}[name]
    stream = sar.SparseStream([3], [1.0], 9)
    outcome = outcome_of(sar.iallreduce(stream, comm, algorithm="allgather", **{name: values[comm.rank == 1]}))
    assert isinstance(outcome, sar.SparseAllreduceError) and name in str(outcome), outcome
    check_usable(comm)
