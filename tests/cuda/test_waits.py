"""How often the host waits for a number from the device: what the documentation lists, counted by what stands for CuPy."""

import device_arrays as xp
import numpy as np
import pytest
from simulated import stand_in

import sparseallreduce as sar
from sparseallreduce.reducers.oktopk import thresholds
from sparseallreduce.streams.kernels import selection as loops
from sparseallreduce.streams.reduction import Reduction, Tree

pytestmark = stand_in
SIZE, K, RANKS = 400, 20, 4
MESSAGE = 1  # for the copies of its indices and values together


def accumulators(step=0, ranks=RANKS):
    return [xp.asarray(np.random.default_rng((step, rank)).standard_normal(SIZE).astype(np.float32)) for rank in range(ranks)]


def counted(reducers, given):
    with xp.waits() as waits:
        sar.simulate(given, reducers)
    return len(waits)


def test_gtopk_waits_for_what_is_not_zero_and_once_for_the_counts_of_all_levels():
    reducers = [sar.GTopk(SIZE, K) for _ in range(RANKS)]
    messages = 2 * (RANKS - 1)  # up the tree and down
    for step in range(2):
        assert counted(reducers, accumulators(step)) <= 2 * RANKS + MESSAGE * messages + 1  # one, if two levels dropped something


def test_gtopk_waits_for_lengths_where_there_are_fewer_than_k():
    few = [xp.asarray(np.float32([1, 0, 2, 0, 0, 3] + 60 * [0])) for _ in range(2)]
    reducers = [sar.GTopk(66, 5) for _ in range(2)]
    assert counted(reducers, few) == 2 * 2 + MESSAGE * 2 + 1  # the length of the one sum
    assert reducers[0].steps == 1


@pytest.mark.parametrize("period", [1, 32])
@pytest.mark.parametrize("ranks", [2, 4])
def test_oktopk_waits_for_one_copy_of_what_it_chose_and_for_few_counts(period, ranks):
    reducers = [sar.OkTopk(SIZE, K, threshold_period=period) for _ in range(ranks)]
    gathering = MESSAGE * (ranks - 1).bit_length()
    # What was chosen, how many sums a region has, these themselves, which of ours the result has; and before, how many reach a threshold.
    evaluating, reusing = 4, 5
    assert ranks * evaluating < counted(reducers, accumulators(0, ranks)) <= ranks * (evaluating + gathering)  # copies may be done before
    again = counted(reducers, accumulators(0, ranks))  # the same: its threshold is as good
    wanted = evaluating if period == 1 else reusing
    assert ranks * wanted < again <= ranks * (wanted + gathering)


def test_oktopk_waits_once_a_digit_where_sums_are_too_many_to_be_copied(monkeypatch):
    few = [sar.OkTopk(SIZE, K, threshold_period=1) for _ in range(RANKS)]
    many = [sar.OkTopk(SIZE, K, threshold_period=1) for _ in range(RANKS)]
    copied = counted(few, accumulators())
    monkeypatch.setattr(thresholds, "COPIED", 0)
    digits = []
    right = loops.key_counts
    monkeypatch.setattr(loops, "key_counts", lambda *given: digits.append(1) or right(*given))
    assert abs(counted(many, accumulators()) - (copied - RANKS + len(digits))) <= RANKS * MESSAGE  # of which some may be done before
    assert RANKS < len(digits) <= 8 * RANKS


def test_a_sum_of_many_sparse_streams_waits_once_for_its_length():
    rng = np.random.default_rng(3)
    streams = [sar.SparseStream(np.sort(rng.choice(900, 9, replace=False)), np.ones(9), 900).to_device(xp) for _ in range(7)]
    reduction, host = Reduction(), Reduction()
    tree = Tree(reduction, 7)
    with xp.waits() as waits:
        for place in (3, 0, 6, 1, 2, 5, 4):
            tree.add(place, streams[place])
        total = tree.result()
    assert waits == ["tolist"]
    wanted = host.many([stream.to_host() for stream in streams])
    np.testing.assert_array_equal(total.indices.get(), wanted.indices)
    np.testing.assert_array_equal(total.values.get(), wanted.values)
    assert reduction.work == host.work


def test_the_exact_top_k_waits_for_nothing_and_a_check_of_indices_once():
    (vector,) = accumulators(ranks=1)
    with xp.waits() as waits:
        indices, _ = sar.streams.selection.ExactTopK(K).choose(vector, None, True)
    assert waits == []
    with xp.waits() as waits:
        sar.SparseStream(indices, xp.zeros(K, np.float32), SIZE)
    assert len(waits) == 1
