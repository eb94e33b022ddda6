"""The cost model: the paper's f(k, N, P), the terms of table 3.1, and predictions that the simulator bears out."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest
import volumes
from hypothesis import given
from hypothesis import strategies as st

import sparseallreduce as sar
from sparseallreduce import Machine, Network
from sparseallreduce.algorithms.cost import PCIE4_X16, Problem, copy_time, expected_size, predicted_time, sent_bytes, without_copies

BYTES_ONLY = Machine(alpha=0.0, beta=1.0, gamma=0.0, gamma_dense=0.0, beta_dense=1.0)
MESSAGES_ONLY = Machine(alpha=1.0, beta=0.0, gamma=0.0, gamma_dense=0.0, beta_dense=0.0)


@pytest.mark.parametrize("k, size, ranks", [(1, 512, 2), (16, 512, 2), (16, 512, 64), (100, 512, 8), (512, 512, 5), (3, 7, 40), (0, 9, 3)])
def test_the_expected_size_is_the_papers_alternating_sum(k, size, ranks):
    share = Fraction(k, size)
    alternating = size * sum((-1) ** (i - 1) * comb(ranks, i) * share**i for i in range(1, ranks + 1))
    assert expected_size(k, size, ranks) == pytest.approx(float(alternating), rel=1e-12)


@given(k=st.integers(0, 10**6), size=st.integers(1, 10**6), ranks=st.integers(1, 5000))
def test_the_expected_size_lies_between_the_two_extremes(k, size, ranks):
    k = min(k, size)
    expected = expected_size(k, size, ranks)
    assert k * (1 - 1e-9) <= expected <= min(size, ranks * k) * (1 + 1e-9)
    assert expected <= expected_size(k, size, ranks + 1)


def test_the_expected_size_of_one_rank_and_of_nothing():
    assert expected_size(16, 512, 1) == 16
    assert expected_size(0, 512, 9) == 0
    assert expected_size(512, 512, 9) == 512
    assert expected_size(0, 0, 9) == 0


@pytest.mark.parametrize("k, size, ranks", [(50, 1000, 2), (50, 1000, 16), (300, 1000, 4)])
def test_the_expected_size_is_that_of_random_sets(k, size, ranks):
    rng = np.random.default_rng(7)
    sizes = [len(set().union(*(rng.choice(size, k, replace=False) for _ in range(ranks)))) for _ in range(300)]
    deviation = np.std(sizes) / np.sqrt(len(sizes))
    assert abs(np.mean(sizes) - expected_size(k, size, ranks)) < 4 * deviation + 1e-9


def test_the_expected_size_has_the_same_bits_everywhere():
    # Ranks on different machines choose by it: these are IEEE 754's, whatever the C library.
    assert expected_size(12345.0, 2**24, 7).hex() == "0x1.50d079ed97900p+16"
    assert expected_size(167772.16, 2**24, 1000).hex() == "0x1.fffa5769cef90p+23"


@pytest.mark.parametrize("algorithm", volumes.ALGORITHMS)
@pytest.mark.parametrize("ranks", [4, 16, 64, 256, 1024])
def test_predictions_are_the_terms_of_the_table(algorithm, ranks):
    problem = Problem(volumes.entries_of("uniform", ranks), volumes.SIZE, ranks)
    bound = volumes.thesis(algorithm, "uniform", ranks)
    assert predicted_time(algorithm, problem, BYTES_ONLY) == pytest.approx(bound.high, rel=1e-9)
    assert predicted_time(algorithm, problem, MESSAGES_ONLY) == bound.messages


@pytest.mark.parametrize("algorithm", volumes.ALGORITHMS)
@pytest.mark.parametrize("network", [Network(1e-6, 1e9), Network(1e-4, 1e9), Network(1e-6, 1e10)], ids=["even", "far", "wide"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 16, 64])
def test_predictions_are_the_simulated_times(algorithm, network, ranks):
    streams, k = volumes.make_streams("uniform", ranks), volumes.entries_of("uniform", ranks)
    machine = Machine(network.latency, 1 / network.bandwidth, 0.0, 0.0, 1 / network.bandwidth)
    predicted = predicted_time(algorithm, Problem(k, volumes.SIZE, ranks), machine)
    # Headers are not predicted, nor that the largest of the parts that move at one time holds up the rest, at each hop of the ring.
    simulated = sar.simulate(streams, algorithm, network, index_codec="plain").time
    assert simulated == pytest.approx(predicted, rel=0.1 if algorithm == "ssar_ring" else 0.05)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_the_additions_of_recursive_doubling_are_predicted(ranks):
    network = Network(0.0, 1e30, gamma=1e-9)
    streams, k = volumes.make_streams("uniform", ranks), volumes.entries_of("uniform", ranks)
    predicted = predicted_time("ssar_recursive_doubling", Problem(k, volumes.SIZE, ranks), Machine(0.0, 0.0, 1e-9, 0.0, 0.0))
    assert sar.simulate(streams, "ssar_recursive_doubling", network).time == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("algorithm", ["dsar_split_allgather", "dsar_early_switch"])
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_the_dense_passes_of_blocks_are_predicted(algorithm, ranks):
    """Without a network, so that none of them passes while messages travel."""
    network = Network(0.0, 1e30, gamma=1e-9, gamma_dense=1e-9)
    streams, k = volumes.make_streams("uniform", ranks), volumes.entries_of("uniform", ranks)
    predicted = predicted_time(algorithm, Problem(k, volumes.SIZE, ranks, index_codec="plain"), Machine(0.0, 0.0, 1e-9, 1e-9, 0.0))
    assert sar.simulate(streams, algorithm, network, index_codec="plain").time == pytest.approx(predicted, rel=0.1)


def test_an_array_beyond_the_caches_takes_gamma_far():
    machine = Machine(gamma_dense=1.0, gamma_far=9.0)
    assert [machine.dense_pass(8, nbytes) for nbytes in (0, 1 << 22, 1 << 23, 1 << 24)] == [8.0, 8.0, 40.0, 56.0]
    assert machine._replace(gamma_far=None).dense_pass(8, 1 << 30) == 8.0


@pytest.mark.parametrize("ranks", [3, 5, 7, 12, 33])
def test_ranks_in_excess_are_predicted_as_two_messages_more(ranks):
    core = 1 << (ranks.bit_length() - 1)
    problem = Problem(1000, 2**20, ranks)
    doubling = [predicted_time("ssar_recursive_doubling", problem._replace(ranks=number), MESSAGES_ONLY) for number in (core, ranks)]
    assert doubling[1] == doubling[0] + 2
    for algorithm in ("allgather", "ssar_ring", "ssar_split_allgather"):
        streams = [sar.SparseStream(np.arange(rank, 4096, ranks), np.ones(len(range(rank, 4096, ranks))), 2**20) for rank in range(ranks)]
        assert predicted_time(algorithm, problem, MESSAGES_ONLY) == sar.simulate(streams, algorithm).messages.max()


def test_a_problem_counts_bytes_in_the_smaller_form():
    problem = Problem(entries=10, size=100, ranks=4)
    assert problem.limit(100) == 50
    assert (problem.bytes(10, 100), problem.bytes(50, 100), problem.bytes(51, 100)) == (80, 400, 400)
    assert problem._replace(switch_density=0.0625).limit(100) == 6.25
    assert problem._replace(value_bytes=8).limit(99) == 66


@pytest.mark.parametrize("algorithm", volumes.ALGORITHMS)
@pytest.mark.parametrize("problem", [Problem(0, 0, 1), Problem(0, 0, 7), Problem(0, 5, 64), Problem(5, 5, 64), Problem(1, 1, 1)])
def test_any_problem_has_a_time(algorithm, problem):
    assert 0 <= predicted_time(algorithm, problem, Machine()) < 1


@pytest.mark.parametrize("algorithm", [name for name in sar.algorithms() if name != "auto"])
def test_streams_on_a_gpu_are_copied_as_they_are_sent_and_nothing_else_changes(algorithm):
    host = Problem(1000, 2**20, 8, hosts=2, lanes=4, local=4)
    problem, machine = host._replace(on_device=True), Machine(codec=1e-9)
    assert copy_time(algorithm, host, machine) == 0
    copied = copy_time(algorithm, problem, machine)
    assert 2 * machine.alpha_to_host < copied < predicted_time(algorithm, problem, machine)
    of_host = {"gamma_device": machine.gamma, "gamma_dense_device": machine.gamma_dense, "alpha_device": 0.0}
    as_fast = without_copies(machine)._replace(**of_host)
    assert predicted_time(algorithm, problem, as_fast) == pytest.approx(predicted_time(algorithm, host, as_fast), rel=1e-9)
    assert sent_bytes(algorithm, problem, machine) == sent_bytes(algorithm, host, machine)
    slower = machine._replace(beta_to_host=10 / PCIE4_X16)
    assert copy_time(algorithm, problem, slower) > copied


def test_a_dense_vector_is_copied_once_each_way():
    problem, machine = Problem(1000, 2**20, 2, on_device=True), Machine(alpha_to_host=1.0, alpha_to_device=2.0)
    assert copy_time("dense", problem, machine) == pytest.approx(3.0 + 2 * 4 * 2**20 / PCIE4_X16)
