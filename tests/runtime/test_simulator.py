"""The simulator: its clock is the alpha-beta model, its runs repeat, and a wrong schedule does not end in silence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import bits
from strategies import Delivery, cases, deliveries

import sparseallreduce as sar
from sparseallreduce import AlgorithmError, DeadlockError, MismatchError, Network, SparseStream, StreamError, StreamTypeError
from sparseallreduce.algorithms.steps import Clock, Exchange, Recv, RecvAny, Send, Share, Shift
from sparseallreduce.runtime.simulator import run
from sparseallreduce.streams.reduction import Reduction

ALPHA, BETA = 1e-6, 1e-9
NETWORK = Network(latency=ALPHA, bandwidth=1 / BETA)
K, SIZE = 1024, 2**16
HEADER = 80


def stream(entries=K):
    return SparseStream(np.arange(entries) * (SIZE // K), np.ones(entries, np.float32), SIZE)


def cost(entries=K, frames=1):
    """Seconds for one message: alpha + L beta."""
    return ALPHA + (frames * HEADER + 8 * entries) * BETA


def same_on(ranks):
    return [stream() for _ in range(ranks)]


def approx(seconds):
    return pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 64])
def test_recursive_doubling_takes_log_p_messages_of_time(ranks):
    rounds = ranks.bit_length() - 1
    out = sar.simulate(same_on(ranks), "ssar_recursive_doubling", NETWORK)
    assert out.time == approx(rounds * cost())
    np.testing.assert_allclose(out.times, out.time)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_the_split_takes_p_minus_one_messages_of_time_and_the_gathering_log_p(ranks):
    part, rounds = K // ranks, ranks.bit_length() - 1
    out = sar.simulate(same_on(ranks), "ssar_split_allgather", NETWORK)
    gathering = sum(cost(part * 2**i, frames=2**i) for i in range(rounds))
    assert out.time == approx((ranks - 1) * cost(part) + gathering)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_the_ring_takes_two_rounds_of_p_minus_one(ranks):
    streams = [SparseStream(np.arange(16 * ranks) * 8, np.ones(16 * ranks, np.float32), 128 * ranks) for _ in range(ranks)]
    assert sar.simulate(streams, "ssar_ring", NETWORK, index_codec="plain").time == approx(2 * (ranks - 1) * cost(16))


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_the_dense_baseline_is_rabenseifners(ranks):
    out = sar.simulate(same_on(ranks), "dense", NETWORK)
    rounds = range(1, ranks.bit_length())
    halving = sum(ALPHA + (HEADER + 4 * SIZE / 2**i) * BETA for i in rounds)
    doubling = sum(ALPHA + 2 ** (i - 1) * (HEADER + 4 * SIZE / ranks) * BETA for i in rounds)
    assert out.time == approx(halving + doubling)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 21])
def test_gathering_takes_ceil_log_p_messages_of_time(ranks):
    held, seconds = 1, 0.0
    while held < ranks:
        sent = min(held, ranks - held)
        seconds += cost(sent * K, frames=sent)
        held += sent
    assert sar.simulate(same_on(ranks), "allgather", NETWORK).time == approx(seconds)


def test_ranks_in_excess_cost_a_message_at_each_end():
    out = sar.simulate(same_on(5), "ssar_recursive_doubling", NETWORK)
    transfer = cost() - ALPHA  # rank 1's first message keeps the port of rank 0 busy when that of rank 4 arrives
    assert out.time == approx(4 * cost() + transfer)
    assert out.times[4] == out.time > out.times[:4].max()


def test_gamma_turns_the_entries_read_into_time():
    gamma = 1e-7
    quick, slow = (sar.simulate(same_on(8), "ssar_recursive_doubling", NETWORK._replace(gamma=g)) for g in (0.0, gamma))
    assert slow.time - quick.time == approx(3 * 2 * K * gamma)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_gamma_dense_turns_passes_over_dense_arrays_into_time(ranks):
    """To fill the block and add to it, to copy all blocks into the result; and by default at an eighth of gamma."""
    gamma, streams = 1e-6, same_on(ranks)
    free, slow = (sar.simulate(streams, "dsar_split_allgather", NETWORK._replace(gamma_dense=g), index_codec="plain") for g in (0.0, gamma))
    added = min(16 * K, SIZE)  # an entry takes a cache line
    blocks = SIZE / ranks + added + SIZE * (ranks > 1)
    assert slow.time - free.time == pytest.approx(blocks * gamma, rel=0.05)
    eighth, same = (sar.simulate(streams, "dsar_split_allgather", NETWORK._replace(gamma=8 * gamma, gamma_dense=g)) for g in (None, gamma))
    assert eighth.time == same.time


def test_blocks_that_are_written_as_bitmaps_take_two_passes_each():
    gamma, size = 1e-6, 1 << 10
    streams = [sar.SparseStream([rank, 600 + rank], np.ones(2, np.float32), size) for rank in range(2)]
    slow = NETWORK._replace(gamma_dense=gamma)
    plain, coded = (
        [sar.simulate(streams, "dsar_split_allgather", network, index_codec=codec).time for network in (NETWORK, slow)]
        for codec in ("plain", "bitmap")
    )
    assert (coded[1] - coded[0]) - (plain[1] - plain[0]) == approx(2 * size / 2 * gamma)  # of one short piece, so none while it travels


def clocked(*steps):
    """A schedule that returns the time of the end."""
    for step in steps:  # noqa: UP028  "yield from" would send the results to the tuple
        yield step
    return (yield Clock())


def test_a_message_takes_alpha_and_beta():
    out = run([clocked(Send(1, stream())), clocked(Recv(0))], NETWORK)
    assert out.outputs == [0.0, approx(cost())]


def test_a_rank_sends_one_message_at_a_time():
    out = run([clocked(Send(1, stream()), Send(2, stream())), clocked(Recv(0)), clocked(Recv(0))], NETWORK)
    assert out.outputs == [0.0, approx(cost()), approx(2 * cost())]


def test_a_rank_receives_one_message_at_a_time():
    out = run([clocked(Recv(1), Recv(2)), clocked(Send(0, stream())), clocked(Send(0, stream()))], NETWORK)
    assert out.outputs[0] == approx(2 * cost() - ALPHA)  # the second has set out as early as the first


def test_sending_and_receiving_overlap():
    assert run([clocked(Exchange(1 - rank, stream())) for rank in range(2)], NETWORK).time == approx(cost())
    assert run([clocked(Shift((rank + 1) % 3, stream(), (rank - 1) % 3)) for rank in range(3)], NETWORK).time == approx(cost())


def test_ranks_of_a_host_share_its_link_and_wait_for_their_latencies_side_by_side():
    nbytes, hosts = cost() - ALPHA, NETWORK._replace(hosts="aabb")
    senders = [clocked(Send(2, stream())), clocked(Send(3, stream()))]
    assert run([*senders, clocked(Recv(0)), clocked(Recv(1))], hosts).time == approx(ALPHA + 2 * nbytes)
    # A rank that will send more later keeps nobody waiting until then.
    small, many = ALPHA + (HEADER + 8) * BETA, 50
    first = clocked(*[Send(2, stream(1))] * many)
    out = run([first, clocked(Send(3, stream(1))), clocked(*[Recv(0)] * many), clocked(Recv(1))], hosts)
    assert out.outputs[3] == approx(small + (HEADER + 8) * BETA)
    assert out.outputs[2] == approx(many * small)  # the other's bytes pass within a latency


def test_what_stays_on_a_host_takes_nothing_of_its_link():
    near = NETWORK._replace(hosts="aabb", local_latency=0.0, local_bandwidth=1e30)
    out = run([clocked(Send(1, stream()), Send(2, stream())), clocked(Recv(0)), clocked(Recv(0)), clocked()], near)
    assert out.outputs == [0.0, approx(0.0), approx(cost()), 0.0]


def receiving(*sources):
    """A schedule that returns from whom messages came, by RecvAny."""
    seen, missing = [], set(sources)
    while missing:
        source, _ = yield RecvAny(frozenset(missing))
        seen.append(source)
        missing.remove(source)
    return seen


def test_whatever_arrives_first_is_taken_first():
    far = [Exchange(3, stream()), Send(0, stream())]
    out = run([receiving(1, 2), clocked(*far), clocked(Send(0, stream())), clocked(Exchange(1, stream()))], NETWORK)
    assert out.outputs[0] == [2, 1]


def test_every_order_of_arrival_can_be_had():
    orders = set()
    for seed in range(40):
        out = run([receiving(1, 2, 3), *(clocked(Send(0, stream())) for _ in range(3))], NETWORK, delivery=seed)
        orders.add(tuple(out.outputs[0]))
    assert len(orders) == 6


@pytest.mark.parametrize("delivery", [None, 1, 2, 3, Delivery("last"), Delivery("starving", (1,))])
def test_messages_between_two_ranks_stay_in_their_order(delivery):
    def receiver():
        return [(yield Recv(0)).nnz, (yield Recv(0)).nnz, (yield Recv(0)).nnz]

    assert run([clocked(*(Send(1, stream(n)) for n in (1, 2, 3))), receiver()], delivery=delivery).outputs[1] == [1, 2, 3]


def test_shared_records_reach_all_ranks():
    def sharing(rank):
        return (yield Share(bytes([rank, 7])))

    for ranks in (1, 2, 3, 4, 7, 16):
        for delivery in (None, 5):
            out = run([sharing(rank) for rank in range(ranks)], delivery=delivery)
            assert out.outputs == [[bytes([rank, 7]) for rank in range(ranks)]] * ranks
            assert (out.messages == (ranks - 1).bit_length()).all()
            assert (out.bytes_sent == 2 * (ranks - 1)).all()


@given(case=cases(ranks=st.integers(1, 12)), delivery=deliveries())
def test_a_run_repeats_to_the_bit(case, delivery):
    def once():
        out = sar.simulate(case.streams, "ssar_split_allgather", op=case.operator, delivery=delivery_again(delivery))
        counts = (out.time, out.times, out.bytes_sent, out.bytes_received, out.messages, out.header_bytes)
        return [bits(result) for result in out.outputs], [np.asarray(count).tobytes() for count in counts]

    assert once() == once()


def delivery_again(delivery):
    """A chooser remembers what it was asked: each run gets one of its own."""
    return Delivery(delivery.name, delivery.picks) if isinstance(delivery, Delivery) else delivery


@pytest.mark.parametrize("delivery", [None, 4])
def test_a_deadlock_says_who_waits_for_what(delivery):
    with pytest.raises(DeadlockError) as raised:
        run([clocked(Recv(1)), clocked(Recv(0))], delivery=delivery)
    assert str(raised.value) == "no message is in transit, but rank 0 waits in Recv(source=1); rank 1 waits in Recv(source=0)"
    with pytest.raises(DeadlockError) as raised:
        run(
            [clocked(Exchange(1, stream())), clocked(RecvAny(frozenset({2, 0})), Recv(2)), clocked(Shift(0, stream(), 1))],
            delivery=delivery,
        )
    assert str(raised.value) == (
        "no message is in transit, but rank 0 waits in Exchange(partner=1); rank 1 waits in Recv(source=2); rank 2 waits in Shift(source=1)"
    )
    with pytest.raises(DeadlockError) as raised:
        run([clocked(RecvAny(frozenset({2, 1}))), clocked(), clocked()], delivery=delivery)
    assert str(raised.value) == "no message is in transit, but rank 0 waits in RecvAny(sources=[1, 2])"


def test_a_deadlock_of_many_ranks_is_summed_up():
    with pytest.raises(DeadlockError, match=r"rank 15 waits in Recv\(source=16\); \.\.\. \(40 ranks in all\)$"):
        run([clocked(Recv((rank + 1) % 40)) for rank in range(40)])


@pytest.mark.parametrize("delivery", [None, 4])
def test_messages_that_nobody_received_are_reported(delivery):
    with pytest.raises(DeadlockError) as raised:
        run([clocked(Send(1, stream()), Send(1, stream())), clocked(), clocked(Send(0, stream()))], delivery=delivery)
    assert str(raised.value) == "messages were sent that nobody received: 1 from rank 2 to rank 0; 2 from rank 0 to rank 1"


def test_a_message_through_the_wire_shares_no_memory():
    def receiver():
        return (yield Recv(0))

    sent = stream()
    direct, copied = (run([clocked(Send(1, sent)), receiver()], through_wire=through).outputs[1] for through in (False, True))
    assert np.shares_memory(direct.values, sent.values) and not np.shares_memory(copied.values, sent.values)
    assert bits(direct) == bits(copied)


def test_what_was_sent_is_not_reused_by_its_sender():
    def sender():
        reduction = Reduction()
        dense = reduction.densify(stream())
        yield Send(1, dense)
        return reduction.pair(dense, stream())

    def receiver():
        return (yield Recv(0))

    assert run([sender(), receiver()]).outputs[1].to_dense().tobytes() == stream().to_dense().tobytes()


def test_an_exception_in_a_schedule_is_the_callers():
    def failing():
        yield Recv(1)
        raise ZeroDivisionError("on rank 0")

    with pytest.raises(ZeroDivisionError, match="on rank 0"):
        run([failing(), clocked(Send(0, stream()))])


REFUSED = {
    "no ranks": (lambda: sar.simulate([]), StreamError, "simulate takes a stream for each rank, but there is none"),
    "no stream on one rank": (
        lambda: sar.simulate([stream(), 5]),
        StreamTypeError,
        "on rank 1: allreduce takes a SparseStream, not int: make one, as with SparseStream.from_dense",
    ),
    "another size": (
        lambda: sar.simulate([stream(), stream(), SparseStream([1], np.float32([1]), 7)]),
        MismatchError,
        "the ranks disagree on the size: 65536 on ranks 0, 1; 7 on rank 2. All ranks must pass the same",
    ),
    "another dtype": (
        lambda: sar.simulate([SparseStream([1], [1.0], SIZE), stream()]),
        MismatchError,
        "the ranks disagree on the dtype: float64 on rank 0; float32 on rank 1. All ranks must pass the same",
    ),
    "unknown algorithm": (
        lambda: sar.simulate([stream()] * 3, "fast"),
        AlgorithmError,
        f"unknown algorithm 'fast': use one of {', '.join(sar.algorithms())}, or a schedule function",
    ),
    "unknown operator": (
        lambda: sar.simulate([stream()] * 3, op="median"),
        AlgorithmError,
        "unknown operator 'median': use one of max, mean, min, prod, sum, or an Operator(name, ufunc, neutral)",
    ),
    "unknown option": (
        lambda: sar.simulate([stream()] * 3, "ssar_ring", group_size=3),
        AlgorithmError,
        "unknown option 'group_size' of algorithm 'ssar_ring': it takes none",
    ),
    "unknown option where there are some": (
        lambda: sar.simulate([stream()] * 3, "dsar_early_switch", group=3),
        AlgorithmError,
        "unknown option 'group' of algorithm 'dsar_early_switch': it takes group_size",
    ),
    "option out of range": (
        lambda: sar.simulate([stream()] * 3, "dsar_early_switch", group_size=0),
        AlgorithmError,
        "option group_size=0 of algorithm 'dsar_early_switch' is out of range: see its docstring",
    ),
    "density out of range": (
        lambda: sar.simulate([stream()] * 3, switch_density=2),
        AlgorithmError,
        "switch_density is a fraction of the size, from 0 to 1, not 2",
    ),
    "machine that is none": (
        lambda: sar.simulate([stream()] * 3, machine="fast"),
        AlgorithmError,
        "machine must be a sparseallreduce.Machine, not str",
    ),
}


@pytest.mark.parametrize("simulate, kind, text", REFUSED.values(), ids=REFUSED.keys())
def test_bad_arguments_say_what_is_wrong(simulate, kind, text):
    with pytest.raises(kind) as raised:
        simulate()
    assert type(raised.value) is kind
    assert str(raised.value) == text


@pytest.mark.parametrize("algorithm", sar.algorithms())
@pytest.mark.parametrize("delivery", [None, 3])
def test_lists_are_reduced_stream_by_stream_in_one_operation(algorithm, delivery):
    rng = np.random.default_rng(7)
    kinds = [(40, np.float32), (300, np.float64), (0, np.float32), (90, np.float32), (300, np.float64)]
    lists = [
        [sar.SparseStream(np.sort(rng.choice(size, size // 5, False)), np.ones(size // 5, dtype), size) for size, dtype in kinds]
        for _ in range(5)
    ]
    for op in ("sum", "max", "mean"):
        out = sar.simulate(lists, algorithm, op=op, delivery=delivery, through_wire=delivery is not None)
        assert len(out.outputs) == 5
        for place, (size, dtype) in enumerate(kinds):
            dense = [streams[place].to_dense() for streams in lists]
            expected = {"sum": sum(dense), "max": np.maximum.reduce(dense), "mean": sum(dense) / dtype(5)}[op]
            for results in out.outputs:
                assert results[place].dtype == dtype and results[place].size == size
                np.testing.assert_allclose(results[place].to_dense(), expected, rtol=1e-6)
    assert (out.bytes_sent > 0).all()


def test_lists_that_differ_name_the_stream():
    given = [sar.SparseStream([1], [1.0], 10), sar.SparseStream([1], [1.0], 20)]
    with pytest.raises(sar.MismatchError, match="size of stream 1 of the list: 20 on ranks 0, 2; 10 on rank 1"):
        sar.simulate([given, [given[0], given[0]], given])
    with pytest.raises(sar.MismatchError, match="the size: a list of 2 streams on rank 0; 10 on rank 1"):
        sar.simulate([given, given[0]])
    with pytest.raises(sar.StreamTypeError, match="on rank 1: element 0 of the list is no SparseStream"):
        sar.simulate([given, [None, given[1]]])
    assert sar.simulate([[], [], []]).outputs == [[], [], []]
