"""`algorithm="auto"`: sensible at the extremes, near the best in between, the same on all ranks; and the machine it is chosen for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import bits

import sparseallreduce as sar
from sparseallreduce import Machine, Network, SparseStream
from sparseallreduce.algorithms.choose import choose, problem_of
from sparseallreduce.algorithms.cost import Problem, predicted_time
from sparseallreduce.algorithms.measuring import measure
from sparseallreduce.runtime.predictions import dense_share, expected_beginning
from sparseallreduce.runtime.simulator import run
from sparseallreduce.streams.operator import as_operator
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.wire import HEADER_BYTES


def chosen(entries, size, ranks, machine=None, dtype="float32", density=None):
    stream = SparseStream([], np.empty(0, dtype), size)
    each = list(entries) if np.iterable(entries) else [entries] * ranks
    problem = problem_of(stream, sum(each) / len(each), len(each), Reduction(switch_density=density))
    return choose(problem, machine or Machine())


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64, 1000])
def test_few_entries_are_summed_by_recursive_doubling(ranks):
    for entries in (0, 1, 10):
        assert chosen(entries, 2**24, ranks) in ("ssar_recursive_doubling", "allgather")
    assert chosen(10, 2**24, 8) == "ssar_recursive_doubling"


def beginning(entries, size, ranks, machine, **shared):
    stream = SparseStream(np.arange(entries), np.ones(entries, np.float32), size)
    return expected_beginning(stream, ranks, Reduction(), machine, **shared)


@pytest.mark.parametrize("ranks", [2, 8])
def test_what_travels_with_the_records_is_what_takes_less_time_than_a_sum(ranks):
    """On a host of the figures that were measured; and nothing does that does not fit."""
    host = Machine(alpha=7e-5, beta=1.5e-10, gamma=2.5e-9, gamma_dense=1.4e-10, beta_dense=2.5e-10, alpha_dense=1e-5, trust=0.7)
    assert beginning(100, 2**24, ranks, host) == beginning(2000, 2**18, ranks, host) == "packed"
    assert beginning(2**15, 2**17, ranks, host) == "dense"
    assert beginning(2**15, 2**24, ranks, host) not in ("packed", "dense")


def test_the_shortest_streams_always_travel_with_the_records():
    fast_sums = Machine(alpha=1.0, beta=1.0, beta_dense=0.0, gamma_dense=0.0, alpha_dense=0.0)
    for entries, shares_memory, packed in ((500, False, True), (501, False, False), (1024, True, True), (1025, True, False)):
        assert (beginning(entries, 2**24, 2, fast_sums, shares_memory=shares_memory) == "packed") == packed
    assert beginning(1, 2**24, 17, fast_sums) != "packed"  # of many ranks none does


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_dense_sums_beyond_the_caches_are_left_earlier(ranks):
    """Vectors of 16 MiB, whose bytes take twice as long as those of 4 MiB, which were measured; 8 MiB do not yet."""
    host = Machine(alpha=3e-5, beta=4e-10, gamma=1.2e-9, gamma_dense=1.2e-10, beta_dense=1e-10, alpha_dense=5e-6, trust=0.7)
    assert beginning(2**20, 2**22, ranks, host, capacity=1 << 30) == "sparse_shared"
    assert beginning(2**19, 2**21, ranks, host, capacity=1 << 30) == beginning(2**20, 2**22, ranks, host) == "dense"


def test_dense_sums_in_shared_memory_take_a_share_of_the_time_where_ranks_share_cores():
    assert [dense_share(nbytes, oversubscribed=True) for nbytes in (1 << 18, (1 << 18) + 4)] == [0.35, 0.7]
    assert dense_share(1 << 18, oversubscribed=False) == 1


def test_a_dense_stream_that_is_not_summed_begins_with_nothing():
    stream = SparseStream.from_dense(np.ones(10_000, np.float32))
    assert expected_beginning(stream, 2, Reduction(as_operator("max")), Machine()) == ""


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
def test_dense_streams_are_summed_densely(ranks):
    even = Machine(beta_dense=Machine().beta)  # MPI moves a byte as fast as we do, and adds on the way
    assert chosen(2**24, 2**24, ranks, even) == "dense"


def test_many_entries_on_many_ranks_are_split():
    assert chosen(2**16, 2**30, 64, Machine(alpha=1e-6, beta=1e-9)) == "ssar_split_allgather"


def test_a_sum_that_fills_up_is_gathered_densely():
    slow_dense = Machine(alpha=1e-6, beta=1e-9, beta_dense=1e-9)
    assert chosen(2**20, 2**24, 64, slow_dense) in ("dsar_split_allgather", "dsar_early_switch")


@given(
    entries=st.integers(0, 2**24),
    ranks=st.integers(1, 2000),
    size=st.integers(0, 2**30),
    alpha=st.floats(1e-7, 1e-3),
    beta=st.floats(1e-11, 1e-7),
    density=st.sampled_from([None, 0.0625]),
)
def test_no_choice_is_predicted_to_be_slower_than_dense(entries, ranks, size, alpha, beta, density):
    entries, machine = min(entries, size), Machine(alpha, beta, beta_dense=beta)
    name = chosen(entries, size, ranks, machine, density=density)
    problem = Problem(entries, size, ranks, switch_density=density)
    assert predicted_time(name, problem, machine) <= predicted_time("dense", problem, machine)


@given(entries=st.lists(st.integers(0, 10**5), min_size=1, max_size=64), seed=st.randoms())
def test_the_choice_depends_on_nothing_but_what_all_ranks_know(entries, seed):
    shuffled = list(entries)
    seed.shuffle(shuffled)
    names = {chosen(order, 10**6, len(entries)) for order in (entries, shuffled, entries)}
    assert len(names) == 1 and names < set(sar.algorithms())


def random_streams(entries, size, ranks):
    rng = np.random.default_rng(3)
    return [SparseStream(np.sort(rng.choice(size, entries, replace=False)), np.ones(entries, np.float32), size) for _ in range(ranks)]


@pytest.mark.parametrize("latency", [1e-7, pytest.param(1e-5, marks=pytest.mark.release), 1e-3])
@pytest.mark.parametrize("ranks", [2, 5, pytest.param(8, marks=pytest.mark.release), 32])
@pytest.mark.parametrize("entries", [1, 100, 3000, 30000])
def test_the_choice_is_nearly_the_fastest_in_the_simulator(entries, ranks, latency):
    streams, network = random_streams(entries, 2**16, ranks), Network(latency, 1e9)
    times = {name: sar.simulate(streams, name, network).time for name in sar.algorithms()}
    assert times["auto"] <= 1.25 * min(times.values())


def test_auto_runs_what_it_chooses_and_takes_a_machine_for_an_argument():
    streams = random_streams(500, 2**16, 8)
    for machine in (Machine(alpha=1.0), Machine(alpha=0.0), Machine(beta_dense=0.0, gamma_dense=0.0)):
        name = choose(problem_of(streams[0], 500, 8, Reduction()), machine)
        auto, named = sar.simulate(streams, "auto", machine=machine), sar.simulate(streams, name)
        assert auto.messages.tolist() == named.messages.tolist()
        assert auto.bytes_sent.tolist() == named.bytes_sent.tolist()
        assert bits(auto.outputs[0]) == bits(named.outputs[0])
    assert choose(problem_of(streams[0], 500, 8, Reduction()), Machine(beta_dense=0.0, gamma_dense=0.0, gamma=1.0)) == "dense"


@pytest.mark.parametrize("network", [Network(1e-6, 1e9), Network(5e-5, 1.25e8)])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_measured_machine_is_the_network(network, ranks):
    out = run([measure(rank, ranks) for rank in range(ranks)], network)
    machine = out.outputs[0]
    assert out.outputs == [machine] * ranks
    assert machine.alpha == pytest.approx(network.latency + HEADER_BYTES / network.bandwidth)
    assert machine.beta == pytest.approx(1 / network.bandwidth, rel=0.01)
    volume, messages = 2 * (ranks - 1) / ranks * 2**22, 2 * (ranks.bit_length() - 1)
    if ranks == 1 << (ranks.bit_length() - 1):
        assert machine.beta_dense == pytest.approx(1 / network.bandwidth + messages * network.latency / volume, rel=0.01)


def test_where_ranks_share_cores_latency_is_shared_and_a_byte_costs_what_it_does_when_all_take_part():
    network = Network(latency=1e-5, bandwidth=1e10)
    alone, shared = (run([measure(rank, 4, sharing) for rank in range(4)], network).outputs[0] for sharing in (1.0, 2.0))
    assert shared.alpha == pytest.approx(2 * alone.alpha)
    assert shared.beta == pytest.approx(1 / network.bandwidth + 2 * network.latency / (3 / 4 * 2**22), rel=0.01)
    assert shared.beta_dense == shared.beta_blocking == pytest.approx(alone.beta_dense)


@pytest.mark.parametrize("faster", [True, False])
def test_a_blocking_sum_is_taken_for_the_faster_one_only_where_it_may_be(faster):
    network = Network(latency=1e-5, bandwidth=1e10)
    machine = run([measure(rank, 4, 1.0, faster) for rank in range(4)], network).outputs[0]
    assert machine.beta < machine.beta_dense
    assert machine.beta_blocking == (machine.beta if faster else machine.beta_dense)


def test_a_rank_alone_measures_its_additions_only():
    machine = run([measure(0, 1)]).outputs[0]
    assert (machine.beta, machine.beta_dense) == (0.0, 0.0)
