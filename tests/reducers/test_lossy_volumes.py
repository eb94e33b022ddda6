"""Words and messages of the reducers, counted in the simulator, beside Ok-Topk's table 1."""

from math import ceil, log2

import numpy as np
import pytest
from lossy import Vectors

import sparseallreduce as sar

WORD = 4  # bytes, of a float32 or of an index
RANKS = (1, 2, 3, 4, 7, 16, 33, 64)
every_number_of_ranks = pytest.mark.parametrize("ranks", RANKS)
every_place = pytest.mark.parametrize("places", ["anywhere", "same", "disjoint", "region"])


def simulated(make, ranks, places, size=8192, k=82, **options):
    """Words that each rank has sent, without headers, and what the simulation gave."""
    case = Vectors(ranks, size, k, places=places)
    out = sar.simulate(case.first, case.reducers(make, **options))
    return (out.bytes_sent - out.header_bytes) / WORD, out


@every_number_of_ranks
@every_place
def test_gtopk_takes_four_k_log_p_words(ranks, places):
    """Rank 0, which takes part in every round, sends and receives 2 k log2 P each; no rank has more than 4 k log2 P in all."""
    k, rounds = 82, ceil(log2(ranks))
    sent, out = simulated(sar.GTopk, ranks, places)
    received = (out.bytes_received - out.header_bytes) / WORD  # what a rank sends up a way comes down that way, and the reverse
    assert sent[0] == received[0] == 2 * k * rounds
    assert (sent + received <= 4 * k * rounds).all()
    assert out.messages[0] == rounds
    assert out.messages.sum() == 2 * (ranks - 1)


@every_number_of_ranks
@every_place
def test_gtopk_by_allgather_takes_those_of_topka(ranks, places):
    sent, out = simulated(sar.GTopk, ranks, places, form="allgather")
    assert (sent == 2 * 82 * (ranks - 1)).all()
    assert out.outputs[0].update.nnz <= 82


@every_number_of_ranks
@every_place
def test_topka_takes_two_k_words_of_every_other_rank(ranks, places):
    sent, out = simulated(sar.TopkA, ranks, places)
    assert (sent == 2 * 82 * (ranks - 1)).all()
    assert (out.messages == ceil(log2(ranks))).all()


@every_number_of_ranks
@pytest.mark.parametrize("places,k", [("anywhere", 82), ("same", 82), ("disjoint", 82), ("anywhere", 1000), ("disjoint", 1000)])
def test_topkdsa_is_within_its_interval(ranks, places, k):
    """From 4 k (P - 1)/P words, the same indices everywhere, to (2 k + N)(P - 1)/P, on the mean over the ranks."""
    sent, _ = simulated(sar.TopkDSA, ranks, places, k=k)
    share = (ranks - 1) / ranks
    assert 4 * k * share * 0.99 <= sent.mean() <= (2 * k + 8192) * share * 1.01
    if places == "same" and ranks > 1:
        assert sent.mean() == pytest.approx(4 * k * share, rel=0.02)


def test_topkdsa_turns_dense_before_indices_cost_more():
    k, ranks = 1000, 16  # the sum has most of the 8192 elements
    sent, out = simulated(sar.TopkDSA, ranks, "disjoint", k=k)
    assert out.outputs[0].update.is_dense
    assert sent.mean() <= 1.01 * (2 * k + 8192) * (ranks - 1) / ranks
    gathered, _ = simulated(sar.TopkA, ranks, "disjoint", k=k)
    assert sent.mean() < gathered.mean() / 2


def test_volumes_do_not_depend_on_the_values():
    for make in (sar.GTopk, sar.TopkA):
        first, second = (sar.simulate(Vectors(8, 500, 20, seed=seed).first, [make(500, 20) for _ in range(8)]) for seed in (1, 2))
        np.testing.assert_array_equal(first.bytes_sent, second.bytes_sent)
