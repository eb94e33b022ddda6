"""Bytes and messages lie where thesis table 3.1 puts them; `bench/volumes.py` goes on to P = 1024."""

import numpy as np
import pytest
import volumes

import sparseallreduce as sar

RANKS = (4, 16, 64)


@pytest.fixture(scope="module")
def rows():
    return {(row.ranks, row.index_sets, row.algorithm): row for ranks in RANKS for row in volumes.measure(ranks)}


every_row = pytest.mark.parametrize("algorithm", volumes.ALGORITHMS)


@every_row
@pytest.mark.parametrize("sets", volumes.SETS)
@pytest.mark.parametrize("ranks", RANKS)
def test_messages_and_bytes_are_those_of_the_table(rows, ranks, sets, algorithm):
    row = rows[ranks, sets, algorithm]
    assert row.messages == row.messages_thesis
    if sets == "uniform":
        assert row.sent == pytest.approx(row.high, rel=0.02)
    else:
        assert row.low <= row.sent <= row.high


@pytest.mark.parametrize("sets", ["full overlap", "disjoint"])
@pytest.mark.parametrize("ranks", RANKS)
def test_no_rank_sends_more_than_the_bound(rows, ranks, sets):
    # Where the parts are of one size, what holds for the mean holds for each rank.
    for algorithm in volumes.ALGORITHMS:
        row = rows[ranks, sets, algorithm]
        assert row.most == row.sent


@pytest.mark.parametrize("ranks", RANKS)
def test_the_split_sends_no_more_than_it_must(rows, ranks):
    k = volumes.entries_of("full overlap", ranks)
    optimum = 2 * (ranks - 1) / ranks * k * volumes.ENTRY
    assert rows[ranks, "full overlap", "ssar_split_allgather"].sent == rows[ranks, "full overlap", "ssar_ring"].sent == optimum
    k = volumes.entries_of("disjoint", ranks)
    for algorithm in ("allgather", "ssar_recursive_doubling"):
        assert rows[ranks, "disjoint", algorithm].sent == (ranks - 1) * k * volumes.ENTRY


@pytest.mark.parametrize("ranks", RANKS)
def test_the_result_has_the_size_that_the_thesis_expects(rows, ranks):
    for algorithm in volumes.ALGORITHMS:
        assert rows[ranks, "uniform", algorithm].result == pytest.approx(rows[ranks, "uniform", algorithm].expected_result, rel=0.02)
        assert rows[ranks, "full overlap", algorithm].result == volumes.entries_of("full overlap", ranks)
        assert rows[ranks, "disjoint", algorithm].result == ranks * volumes.entries_of("disjoint", ranks)


@pytest.mark.parametrize("k, ranks", [(16, 2), (16, 8), (64, 4), (4, 64), (128, 3)])
def test_the_size_follows_f_where_sets_are_small(k, ranks):
    # Thesis figure 3.4, N = 512: the mean of many draws, of which one may be several percent off.
    rng = np.random.default_rng(5)
    size, sizes = 512, []
    for _ in range(1000 // (ranks + 3)):
        drawn = [rng.choice(size, k, replace=False) for _ in range(ranks)]
        streams = [sar.SparseStream(np.sort(indices), np.ones(k, np.float32), size) for indices in drawn]
        sizes.append(sar.simulate(streams, "ssar_recursive_doubling").outputs[0].nnz)
    assert np.mean(sizes) == pytest.approx(volumes.f(k, size, ranks), rel=0.02)


@pytest.mark.parametrize("group_size", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("ranks", [16, 64])
def test_early_switch_sends_what_its_group_size_says(ranks, group_size):
    streams, k = volumes.make_streams("full overlap", ranks), volumes.entries_of("full overlap", ranks)
    out = sar.simulate(streams, "dsar_early_switch", group_size=group_size)
    group, rounds = min(group_size, ranks), ranks.bit_length() - 1
    dense = (1 / group - 1 / ranks + (ranks - 1) / ranks) * volumes.SIZE * volumes.VALUE
    split = (group - 1) / group * k * volumes.ENTRY
    assert (out.bytes_sent - out.header_bytes == split + dense).all()
    assert (out.messages == (group - 1) + (ranks // group).bit_length() - 1 + rounds).all()


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 12, 63])
def test_ranks_in_excess_of_a_power_of_two_add_a_message_at_each_end(ranks):
    k, core = 512, 1 << (ranks.bit_length() - 1)
    streams = [sar.SparseStream(np.arange(k) * 64, np.ones(k, np.float32), volumes.SIZE) for _ in range(ranks)]
    out = sar.simulate(streams, "ssar_recursive_doubling")
    rounds = core.bit_length() - 1
    expected = [rounds + (rank + core < ranks) for rank in range(core)] + [1] * (ranks - core)
    assert out.messages.tolist() == expected
    np.testing.assert_array_equal(out.bytes_sent - out.header_bytes, out.messages * k * volumes.ENTRY)


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 12, 63])
def test_gathering_takes_as_few_messages_for_any_number_of_ranks(ranks):
    k = 512
    streams = [sar.SparseStream(np.arange(k) * 64, np.ones(k, np.float32), volumes.SIZE) for _ in range(ranks)]
    out = sar.simulate(streams, "allgather")
    assert (out.messages == (ranks - 1).bit_length()).all()
    assert (out.bytes_sent - out.header_bytes == (ranks - 1) * k * volumes.ENTRY).all()


def test_headers_are_counted_apart():
    streams = volumes.make_streams("full overlap", 4)
    out = sar.simulate(streams, "allgather")
    assert (out.header_bytes == 3 * volumes.HEADER).all()  # one a stream, and three streams leave every rank
    assert out.bytes_sent.sum() == out.bytes_received.sum()
