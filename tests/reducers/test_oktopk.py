"""Ok-Topk: the exact top k where thresholds are new, at most k values in between, and no rank sends or receives more than its share."""

from itertools import product
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lossy import INTEGERS, Vectors, top, vectors
from oracle import bits
from strategies import deliveries
from thoroughness import examples

import sparseallreduce as sar
from sparseallreduce.algorithms.exchange import gather_parts
from sparseallreduce.reducers.oktopk import consensus, gather, reducer, regions, thresholds
from sparseallreduce.runtime.simulator import run
from sparseallreduce.streams import wire

WORD = 4  # bytes, of a float32 or of an index


def assert_top_k_of_sum(update, accumulators, k):
    """``update`` is the top k of the sum of the ranks' top k, whichever of equal magnitudes it has; zeros may be missing."""
    total = np.sum([top(accumulator.astype(np.float64), k) for accumulator in accumulators], axis=0)
    got = update.to_dense().astype(np.float64)
    chosen = np.flatnonzero(got)
    np.testing.assert_allclose(got[chosen], total[chosen], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.sort(np.abs(got)), np.sort(np.abs(top(total, k))), rtol=1e-5, atol=1e-5)
    assert len(chosen) <= k


def assert_consistent(outputs, accumulators, k):
    """Every rank has the same update, and it is the sum of what the ranks say that they have contributed."""
    update = outputs[0].update
    assert len({bits(reduced.update) for reduced in outputs}) == 1
    assert update.nnz <= k
    total = np.zeros(update.size)
    for reduced, accumulator in zip(outputs, accumulators):
        assert (np.diff(reduced.contributed.astype(np.int64)) > 0).all()
        assert len(reduced.contributed) <= k
        total[reduced.contributed] += accumulator[reduced.contributed]
    np.testing.assert_allclose(update.to_dense(), total, rtol=1e-4, atol=1e-4)


@given(case=vectors(), delivery=deliveries(), through_wire=st.booleans(), bucket=st.integers(1, 5))
@settings(max_examples=examples(60))
def test_with_new_thresholds_it_is_the_top_k_of_the_sum_of_top_k(case, delivery, through_wire, bucket):
    reducers = case.reducers(sar.OkTopk, threshold_period=1, boundary_period=1, bucket=bucket)
    for step in range(2):
        accumulators = case.step(step)
        out = sar.simulate(accumulators, reducers, delivery=delivery, through_wire=through_wire)
        assert_top_k_of_sum(out.outputs[0].update, accumulators, case.k)
        assert_consistent(out.outputs, accumulators, case.k)


@given(
    case=vectors(contents=(INTEGERS,)),
    delivery=deliveries(),
    balance=st.booleans(),
    imbalance=st.sampled_from([None, 1.0, 4.0]),
    periods=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
@settings(max_examples=examples(60))
def test_what_the_ranks_say_they_have_contributed_is_the_update(case, delivery, balance, imbalance, periods):
    options = {"threshold_period": periods[0], "boundary_period": periods[1], "balance_boundaries": balance, "max_imbalance": imbalance}
    reducers = case.reducers(sar.OkTopk, **options)
    for step in range(5):
        accumulators = [vector * (1 + step) for vector in case.step(step)]
        out = sar.simulate(accumulators, reducers, delivery=delivery)
        assert_consistent(out.outputs, accumulators, case.k)
        if step % periods[0] == 0:
            assert_top_k_of_sum(out.outputs[0].update, accumulators, case.k)


@given(case=vectors(contents=(INTEGERS,)), cut=st.integers(1, 3))
def test_a_contribution_is_whatever_of_the_local_top_k_was_chosen(case, cut):
    out = sar.simulate(case.first, case.reducers(sar.OkTopk, threshold_period=cut))
    chosen = set(out.outputs[0].update.indices.tolist())
    for reduced, accumulator in zip(out.outputs, case.first):
        local = set(np.flatnonzero(top(accumulator, case.k)).tolist())
        assert local & chosen <= set(reduced.contributed.tolist()) <= chosen


def test_what_is_not_finite_reaches_all_ranks():
    accumulators = [np.zeros(50, np.float32) for _ in range(3)]
    accumulators[0][7], accumulators[1][30], accumulators[2][31] = np.nan, -np.inf, 2
    reducers = [sar.OkTopk(50, 2) for _ in range(3)]
    for _ in range(3):
        update = sar.simulate(accumulators, reducers).outputs[0].update
        assert update.indices.tolist() == [7, 30]
        assert np.isnan(update.values[0]) and update.values[1] == -np.inf


# Where the large values of each rank lie, and which of them are by far the largest.
def _spread(k, size, rank):
    return np.arange(k) * (size // k) + rank % (size // k)


PLACES = {
    "anywhere": lambda rng, k, size, rank, ranks: rng.choice(size, k, replace=False),
    "the same region on all ranks": lambda rng, k, size, rank, ranks: rng.choice(2 * k, k, replace=False) + size // 2,
    "a region of its own": lambda rng, k, size, rank, ranks: (rank * size // ranks + rng.choice(size // ranks, k, replace=False)) % size,
    "its neighbour's region": lambda rng, k, size, rank, ranks: ((rank + 1) * size // ranks + np.arange(k)) % size,
    "in the manner of layers": lambda rng, k, size, rank, ranks: np.unique((size * rng.random(8 * k) ** 6).astype(int))[:k],
    "sums on one rank": lambda rng, k, size, rank, ranks: _spread(k, size, rank),
    "sums on a few ranks": lambda rng, k, size, rank, ranks: _spread(k, size, rank),
}


def accumulators_of(places, ranks, k, size, seed):
    rng = np.random.default_rng([seed, ranks])
    accumulators = []
    for rank in range(ranks):
        accumulator = (0.01 * rng.standard_normal(size)).astype(np.float32)
        indices = PLACES[places](rng, k, size, rank, ranks)
        accumulator[indices] = np.sign(accumulator[indices]) * (1 + rng.random(len(indices)))
        if places == "sums on one rank":
            accumulator[indices[: k // ranks]] *= 100
        if places == "sums on a few ranks":
            accumulator[indices[k // 2 : k // 2 + k // 4]] *= 100
        accumulators.append(accumulator)
    return accumulators


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("ranks,k", [(4, 64), (16, 64), (64, 256)])
def test_no_rank_sends_or_receives_more_than_six_k_words(monkeypatch, ranks, k, places):
    """Counts, thresholds and bounds included, both where they are evaluated and in between, from k = 4 P and 64 values on."""
    monkeypatch.setattr(wire.message, "HEADER_BYTES", 0)  # headers are counted apart
    size = 64 * k
    reducers = [sar.OkTopk(size, k) for _ in range(ranks)]
    bound = 6 * k * (ranks - 1) / ranks * WORD
    for step in range(2):
        accumulators = accumulators_of(places, ranks, k, size, step)
        out = sar.simulate(accumulators, reducers)
        assert out.bytes_sent.max() <= bound
        assert out.bytes_received.max() <= bound
        if step == 0:
            assert_top_k_of_sum(out.outputs[0].update, accumulators, k)


@pytest.mark.release
@pytest.mark.parametrize("places", ["sums on one rank"])
def test_no_rank_of_256_sends_or_receives_more_than_six_k_words(monkeypatch, places):
    test_no_rank_sends_or_receives_more_than_six_k_words(monkeypatch, 256, 1024, places)


def test_a_distribution_that_changes_is_balanced_at_once():
    """Between evaluations, too: regions that one rank would have to reduce alone are cut anew."""
    ranks, k, size = 8, 400, 40_000
    reducers = [sar.OkTopk(size, k, boundary_period=1000) for _ in range(ranks)]
    fullest = []
    for step in range(4):
        place = "anywhere" if step < 2 else "the same region on all ranks"
        accumulators = accumulators_of(place, ranks, k, size, step)
        sar.simulate(accumulators, reducers)
        bounds = reducers[0]._history.bounds
        places = np.concatenate([np.flatnonzero(np.abs(accumulator) >= 1) for accumulator in accumulators])
        fullest.append(np.histogram(places, np.unique(bounds))[0].max())
    assert max(fullest) <= regions.tolerance(k, ranks)


def test_the_number_of_values_follows_k_while_gradients_drift():
    """Ok-Topk figure 6: on average less than 11 % off k; ours are never above."""
    ranks, k, size, steps = 4, 200, 20_000, 120
    feedbacks = [sar.ErrorFeedback(sar.OkTopk(size, k)) for _ in range(ranks)]
    rng = np.random.default_rng(3)
    scale = np.exp(rng.normal(0, 1, size))
    chosen = []
    for step in range(steps):
        size_of_step = (1 - 0.5 * step / steps) * (1 + 0.3 * np.sin(step / 5))
        gradients = [(size_of_step * scale * rng.standard_normal(size)).astype(np.float32) for _ in range(ranks)]
        chosen.append(sar.simulate(gradients, feedbacks).outputs[0].nnz)
    assert max(chosen) <= k
    assert np.mean(np.abs(np.array(chosen) - k)) <= 0.11 * k


@pytest.mark.parametrize("ranks,k,dtype", [(4, 300, np.float32), (4, 300, np.float64), (16, 100, np.float32)])
def test_a_reused_threshold_follows_residuals_that_grow(monkeypatch, ranks, k, dtype):
    """What is left in them lies just below it. All that is more than a level above the k-th magnitude is chosen, and k values in all."""
    size, steps = 10_000, 70
    evaluated = mock.Mock(wraps=thresholds._evaluate)
    monkeypatch.setattr(thresholds, "_evaluate", evaluated)
    rng = np.random.default_rng(5)
    always = rng.standard_normal(size)
    reducers, residuals = [sar.OkTopk(size, k) for _ in range(ranks)], [np.zeros(size, dtype) for _ in range(ranks)]
    for step in range(steps):
        for residual in residuals:
            residual += 0.3 * always + rng.standard_normal(size)
        before = evaluated.call_count
        outputs = sar.simulate(residuals, reducers).outputs
        summed = np.abs(np.sum([top(residual, k) for residual in residuals], axis=0))
        least = np.sort(summed)[-k]
        update = outputs[0].update
        assert update.nnz == k
        if step > 8:  # when a step adds less to the residuals than levels span
            assert evaluated.call_count == before + ranks * (step % 32 == 0), step
            missing = np.setdiff1d(np.flatnonzero(summed > 1.15 * least), update.indices)  # local thresholds are reused as well
            assert len(missing) <= 0.02 * k, step
        for residual, output in zip(residuals, outputs):
            residual[output.contributed] = 0


@pytest.mark.parametrize("case", ["infinite", "tiny", "equal", "negative zeros"])
def test_levels_are_around_any_threshold(case):
    """The largest finite magnitudes, subnormal ones, and values of which k are not told from the others."""
    size, k, ranks = 3_000, 600, 2
    rng = np.random.default_rng(1)
    scale = {"infinite": 1e38, "tiny": 1e-44, "equal": 0.0, "negative zeros": 1.0}[case]
    reducers = [sar.OkTopk(size, k) for _ in range(ranks)]
    for step in range(4):
        with np.errstate(over="ignore", under="ignore"):
            vectors = [(scale * rng.standard_normal(size) * 2**step).astype(np.float32) + (case == "equal") for _ in range(ranks)]
        if case == "negative zeros":
            for vector in vectors:
                vector[rng.choice(size, size - 700, replace=False)] = -0.0
        with np.errstate(over="ignore", invalid="ignore"):
            outputs = sar.simulate(vectors, reducers).outputs
        assert 0.8 * k <= outputs[0].update.nnz <= k and len({bits(output.update) for output in outputs}) == 1


@given(seed=st.integers(0, 2**32 - 1), changes=st.lists(st.integers(1, 6), min_size=2, max_size=4))
@settings(max_examples=examples(25))
def test_the_number_of_ranks_may_change(seed, changes):
    """The first operation with another number of ranks evaluates everything."""
    case = Vectors(max(changes), 200, 10, seed=seed)
    reducers = case.reducers(sar.OkTopk)
    for step, ranks in enumerate(changes):
        accumulators = case.step(step)[:ranks]
        for used in reducers[ranks:]:
            used.steps += 1  # as if it had taken part: all ranks have made as many operations
        out = sar.simulate(accumulators, reducers[:ranks])
        assert_consistent(out.outputs, accumulators, case.k)
        for used in reducers[ranks:]:
            used._history = reducers[0]._history
        if step == 0 or changes[step - 1] != ranks:
            assert_top_k_of_sum(out.outputs[0].update, accumulators, case.k)


def test_reducers_that_come_from_different_groups_are_a_mismatch():
    groups = [[sar.OkTopk(100, 5) for _ in range(2)] for _ in range(2)]
    for seed, group in enumerate(groups):
        sar.simulate(Vectors(2, 100, 5, seed=seed).first, group)
    with pytest.raises(sar.MismatchError, match="regions"):
        sar.simulate(Vectors(2, 100, 5).first, [groups[0][0], groups[1][0]])


def test_thresholds_that_come_from_different_groups_are_a_mismatch():
    """Where regions are of one length, only these tell: one is zero, and one rank would count at it alone."""
    groups = [[sar.OkTopk(1000, 100, balance_boundaries=False) for _ in range(2)] for _ in range(2)]
    few = np.zeros(1000, np.float32)
    few[:5] = 1
    sar.simulate(Vectors(2, 1000, 100).first, groups[0])
    sar.simulate([few, few], groups[1])
    with pytest.raises(sar.MismatchError, match="threshold"):
        sar.simulate(Vectors(2, 1000, 100).first, [groups[0][0], groups[1][1]])


@pytest.mark.parametrize("step", ["split_and_reduce", "select_global", "balance_and_gather"])
def test_an_operation_that_fails_leaves_the_state_as_it_was(monkeypatch, step):
    case = Vectors(4, 300, 12)
    reducers, others = case.reducers(sar.OkTopk, threshold_period=2), case.reducers(sar.OkTopk, threshold_period=2)
    for group in (reducers, others):
        sar.simulate(case.step(0), group)
    before = [one.state() for one in reducers]
    with monkeypatch.context() as patch:
        patch.setattr(reducer, step, _out_of_memory)
        with pytest.raises(MemoryError):
            sar.simulate(case.step(1), reducers)
    assert [one.state() for one in reducers] == before
    for number in (1, 2, 3):
        first, second = (sar.simulate(case.step(number), group).outputs for group in (reducers, others))
        assert [bits(reduced.update) for reduced in first] == [bits(reduced.update) for reduced in second]


def _out_of_memory(*_):
    raise MemoryError("for the test")
    yield


@pytest.mark.parametrize("size", [2**32 - 1, 2**32, 2**32 + 1])
@pytest.mark.parametrize("places", ["at the end", "at both ends", "anywhere"])
def test_vectors_of_four_billion_elements_are_cut_into_regions(monkeypatch, size, places):
    """Bounds up to 2**32, which is one more than an index can be; what a rank chooses of its accumulator is given."""
    ranks, k = 5, 60
    rng, chosen = np.random.default_rng(7), {}
    for rank in range(ranks):
        near = rng.choice(4 * k, k, replace=False)
        spread = near * (size // (4 * k - 1) - 1)
        drawn = {"at the end": size - 1 - near, "at both ends": spread, "anywhere": rng.integers(0, size, k)}[places]
        chosen[rank] = np.unique(drawn).astype(np.uint32 if size <= 2**32 else np.uint64)
    own = {rank: np.full(0, rank, np.float32) for rank in chosen}  # in place of accumulators

    def choose(accumulator, _gradient, _k, reuse):
        (rank,) = (rank for rank, array in own.items() if array is accumulator)
        return chosen[rank], np.ones(len(chosen[rank]), np.float32), reuse

    monkeypatch.setattr(reducer, "choose_reusing", choose)
    reducers = [sar.OkTopk(size, k, boundary_period=2) for _ in range(ranks)]
    for _ in range(3):
        out = run([one.reduce(own[rank], None, rank, ranks) for rank, one in enumerate(reducers)], through_wire=True)
        update = out.outputs[0].update
        assert 0 < update.nnz <= k
        assert all(bits(reduced.update) == bits(update) for reduced in out.outputs)
        total = sum(reduced.contributed.tolist().count(update.indices[0]) for reduced in out.outputs)
        assert update.values[0] == total
        bounds = reducers[0]._history.bounds
        assert (bounds[0], bounds[-1]) == (0, size) and list(bounds) == sorted(bounds)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("nonzeros", [0, 1, 20])
def test_a_threshold_that_lets_everything_pass_is_reused(monkeypatch, ranks, nonzeros):
    """With fewer sums than k there is nothing to evaluate until there are more."""
    evaluated = mock.Mock(wraps=thresholds._evaluate)
    monkeypatch.setattr(thresholds, "_evaluate", evaluated)
    reducers, rng = [sar.OkTopk(1000, 100) for _ in range(ranks)], np.random.default_rng(1)

    def operate(count):
        vectors = [np.zeros(1000, np.float32) for _ in range(ranks)]
        for vector in vectors:
            vector[rng.choice(1000, count, replace=False)] = rng.normal(size=count)
        update = sar.simulate(vectors, reducers).outputs[0].update
        return update.to_dense(), np.sum(vectors, axis=0)

    for _ in range(5):
        update, total = operate(nonzeros)
        np.testing.assert_allclose(update, total, rtol=1e-5, atol=1e-6)
    assert evaluated.call_count == ranks
    for step in range(3):
        update, total = operate(400)
        assert 80 <= np.count_nonzero(update) <= 100
        if step == 0:  # evaluated ahead of its time where there are more sums than k, of which one rank alone makes no more
            assert evaluated.call_count == (2 * ranks if ranks > 1 else 1) and np.count_nonzero(update) == 100


def test_regions_are_balanced_anew_when_their_period_is_over():
    """Those of a reducer that begins with these values; in between, regions that hold what they may stay."""
    ranks, k, size, period = 4, 200, 20_000, 3
    reducers = [sar.OkTopk(size, k, threshold_period=1, boundary_period=period) for _ in range(ranks)]
    seen = []
    for step in range(2 * period + 1):
        accumulators = accumulators_of("anywhere", ranks, k, size, step)
        sar.simulate(accumulators, reducers)
        fresh = [sar.OkTopk(size, k) for _ in range(ranks)]
        sar.simulate(accumulators, fresh)
        seen.append(reducers[0]._history.bounds)
        expected = fresh[0]._history.bounds if step % period == 0 else seen[step - 1]
        assert seen[step] == expected
    assert len(set(seen)) == 3


@given(ranks=st.integers(1, 20), length=st.integers(1, 40), most=st.sampled_from([0, 1, 255, 2**16, 2**40]), k=st.sampled_from([9, 10**6]))
@settings(max_examples=examples(50))
def test_counts_add_up_whatever_their_size(ranks, length, most, k):
    counts = np.random.default_rng(length).integers(0, most, (ranks, length), endpoint=True)
    schedules = [consensus.total(own.copy(), k, rank, ranks) for rank, own in enumerate(counts)]
    for summed in run(schedules, through_wire=True).outputs:
        np.testing.assert_array_equal(summed, counts.sum(axis=0))


def test_counts_take_no_more_bytes_than_their_values(monkeypatch_headers):
    """Of 1024 counts that stay below 256, each rank of 16 sends 15/16 on the way to the sum, and as many on the way back."""
    counts = np.random.default_rng(1).integers(0, 16, (16, 1024))
    out = run([consensus.total(own, 1, rank, 16) for rank, own in enumerate(counts)])
    assert out.bytes_sent.max() == 2 * 1024 * 15 / 16
    assert out.messages.max() == 8


SIZES = st.one_of(
    st.lists(st.integers(0, 20), min_size=1, max_size=20),
    st.tuples(st.integers(1, 33), st.integers(0, 32), st.integers(1, 200)).map(
        lambda drawn: [drawn[2] if rank == drawn[1] % drawn[0] else 0 for rank in range(drawn[0])]
    ),
)


@given(sizes=SIZES)
def test_the_loads_of_the_allgatherv_are_what_it_sends(monkeypatch_headers, sizes):
    streams = [sar.SparseStream(np.arange(size), np.ones(size, np.float32), 1000) for size in sizes]
    out = run([gather_parts(stream, rank, len(sizes), near_first=True) for rank, stream in enumerate(streams)])
    assert (gather.gather_loads(sizes) * 2 * WORD).tolist() == out.bytes_sent.tolist()


@pytest.fixture(scope="module")
def monkeypatch_headers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire.message, "HEADER_BYTES", 0)
        yield


@given(sizes=SIZES, imbalance=st.sampled_from([None, 1.0, 2.0, 4.0]), delivery=deliveries())
def test_balancing_brings_all_values_to_all_ranks(sizes, imbalance, delivery):
    ranks, ends = len(sizes), np.cumsum([0, *sizes])
    everything = sar.SparseStream(np.arange(ends[-1]) * 3, np.arange(ends[-1]) + 1.0, 3 * ends[-1] + 9)
    chosen = [gather._cut(everything, ends[rank], ends[rank + 1]) for rank in range(ranks)]
    schedules = [gather.balance_and_gather(stream, sizes, sum(sizes), rank, ranks, imbalance) for rank, stream in enumerate(chosen)]
    for joined in run(schedules, delivery=delivery).outputs:
        np.testing.assert_array_equal(joined.indices, everything.indices)
        np.testing.assert_array_equal(joined.values, everything.values)


@given(sizes=SIZES)
def test_only_what_is_too_much_is_moved(sizes):
    moved = gather.plan(sizes, sum(sizes), 1.0)
    kept = np.array(sizes)
    for (source, start, stop), dest in moved:
        assert source != dest and 0 <= start < stop <= sizes[source]
        kept[source] -= stop - start
        kept[dest] += stop - start
    assert len(moved) < len(sizes) or not moved
    assert kept.sum() == sum(sizes) and (kept >= 0).all()
    if len(sizes) > 2 and max(sizes) <= sum(sizes) / 3 and moved:
        assert kept.max() - kept.min() <= 1


@pytest.mark.parametrize("ranks", [4, 8, 16, 64, 256, 1024])
def test_a_rank_that_holds_all_sends_less_than_the_bound_leaves(ranks):
    """Its part of the split, what it gives away, and the allgatherv come to less than 3 k (P - 1)/P values."""
    sizes = [0] * ranks
    sizes[ranks // 3] = 30_000
    kept, sent = np.array(sizes), np.zeros(ranks)
    for (source, start, stop), dest in gather.plan(sizes, 30_000, 4.0):
        kept[[source, dest]] += [start - stop, stop - start]
        sent[source] += stop - start
    worst = 30_000 + sent + gather.gather_loads(kept.tolist())
    assert worst.max() < 3 * 30_000 * (ranks - 1) / ranks


def test_values_move_from_four_times_the_mean_on_or_where_neighbours_hold_all():
    assert gather.plan([4, 1, 3, 1, 2, 2, 0, 3], 16, 4.0) == []
    assert gather.plan([9, 1, 1, 1, 1, 1, 1, 1], 16, 4.0) != []
    assert gather.plan([9, 1, 1, 1, 1, 1, 1, 1], 16, None) == []
    assert gather.plan([9, 9, 9, 9] + 12 * [0], 36, 4.0) != [], "ranks 0 to 3 would send nearly all values three times"


@pytest.mark.parametrize("ranks", [4, 8, 13, 32])
def test_values_move_where_a_rank_would_send_more_than_its_share_and_only_there(ranks):
    """3 k (P - 1)/P values, less k of the split and about 5 P words of counts; or, if that is less, what moving them costs."""
    moves = 0
    for holders, each, times in product(range(1, ranks + 1), (4, 20, 500), (1, 1.3, 2, 4)):
        sizes = [each] * holders + [0] * (ranks - holders)
        entries = holders * each
        k = int(times * entries)
        share = (2 - 3 / ranks) * k - 2.5 * ranks
        moving = 4 * (ranks - 1) / (3 * ranks - 2) * entries
        load, moved = gather.gather_loads(sizes).max(), gather.plan(sizes, k, float("inf"))
        assert moved or load <= max(share, moving)
        assert not moved or load > 0.75 * share
        moves += bool(moved)
    assert moves


@given(k=st.integers(0, 10_000), ranks=st.integers(4, 300), sums=st.integers(1, 20))
def test_what_a_region_may_hold_leaves_room_for_what_is_gathered_and_counted(k, ranks, sums):
    allowed = regions.tolerance(k, ranks, sums)
    assert allowed <= k + ranks / 2 or allowed + k + (sums + 2) * ranks / 2 <= 3 * k * (ranks - 1) / ranks


def test_what_lies_below_places_is_counted_over_all_ranks():
    indices = [np.array(own, np.uint32) for own in ([0, 1, 7], [7, 8], [])]
    counted = run([regions._counted(own, [0, 1, 8, 10], 3, rank, 3) for rank, own in enumerate(indices)]).outputs
    assert counted == [{0: 0, 1: 1, 8: 4, 10: 5}] * 3


def test_two_ranks_have_regions_of_their_own_where_all_lies_in_one():
    k, size = 400, 40_000
    reducers = [sar.OkTopk(size, k) for _ in range(2)]
    accumulators = accumulators_of("the same region on all ranks", 2, k, size, 0)
    sar.simulate(accumulators, reducers)
    places = np.concatenate([np.flatnonzero(np.abs(accumulator) >= 1) for accumulator in accumulators])
    inside = np.histogram(places, reducers[0]._history.bounds)[0]
    assert len(inside) == 2 and inside.max() <= regions.tolerance(k, 2)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("ranks,k", [(4, 500), (13, 300), (32, 400)])
def test_no_region_holds_much_more_than_others(places, ranks, k):
    size = 64 * k
    indices = [np.flatnonzero(np.abs(vector) >= 1).astype(np.uint32) for vector in accumulators_of(places, ranks, k, size, 5)]

    def bounds(rank):
        averages = yield from regions.averaged(indices[rank], size, k, rank, ranks)
        return (yield from regions.rebalanced(indices[rank], averages, False, k, rank, ranks))

    found = run([bounds(rank) for rank in range(ranks)]).outputs
    assert all(ours == found[0] for ours in found)
    assert (found[0][0], found[0][-1], len(found[0])) == (0, size, ranks + 1)
    assert found[0] == sorted(found[0])
    inside = sum(np.diff(np.searchsorted(ours, found[0])) for ours in indices)
    assert inside.max() <= regions.tolerance(k, ranks)


@pytest.mark.parametrize(
    "options,text",
    [
        ({"threshold_period": 0}, "threshold_period is at least 1"),
        ({"boundary_period": -1}, "boundary_period is at least 1"),
        ({"bucket": 0}, "bucket is at least 1"),
        ({"max_imbalance": 0.5}, "max_imbalance is a multiple of the mean"),
        ({"max_imbalance": float("nan")}, "max_imbalance is a multiple of the mean"),
    ],
)
def test_options_without_sense_are_refused(options, text):
    with pytest.raises(sar.AlgorithmError, match=text):
        sar.OkTopk(10, 2, **options)
