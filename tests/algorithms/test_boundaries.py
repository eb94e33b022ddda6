"""The index space is cut where the ranks' entries lie, into parts that cost about as much; and sums are right wherever it is cut."""

from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_reduction, bits, comparable
from strategies import cases, deliveries
from thoroughness import examples

import sparseallreduce as sar
from sparseallreduce.algorithms import exchange
from sparseallreduce.algorithms.boundaries import QUANTILES, UNIT, Parts, Spread, quantile_places
from sparseallreduce.algorithms.overlap import Overlap, estimated, sample_of
from sparseallreduce.runtime import overlaps
from sparseallreduce.runtime.overlaps import Overlaps
from sparseallreduce.runtime.simulator import api
from sparseallreduce.streams.reduction import Reduction

CUTTING = ["ssar_split_allgather", "ssar_ring", "dsar_split_allgather", "dsar_early_switch", "hierarchical"]
IN_STEP = ["ssar_split_allgather", "dsar_split_allgather", "dsar_early_switch"]
SIZE = 1 << 18


class Cuts:
    """Cuts a range at given shares of it, and some positions beside."""

    occupancy, most, total = (1.0, 1.0), 1, 1

    def __init__(self, shares, beside):
        self._shares, self._beside = shares, beside

    def cutter(self, dense_bits=0):
        return lambda *given: self.parts(*given).bounds

    def parts(self, lo, hi, parts, dense_bits=0, group=0):
        places = [lo + int(share * (hi - lo)) + beside for share, beside in zip(self._shares, self._beside, strict=True)]
        inner = [min(max(place, lo), hi) for place in places] * parts
        return Parts((lo, *sorted(inner[: parts - 1]), hi))


CUTS = st.lists(st.sampled_from([0.0, 0.5, 0.5, 1.0, 0.25, 0.999]), min_size=16, max_size=16)
BESIDE = st.lists(st.integers(-1, 1), min_size=16, max_size=16)


@pytest.mark.parametrize("algorithm", CUTTING)
@settings(max_examples=examples(25))
@given(case=cases(), delivery=deliveries(), shares=CUTS, beside=BESIDE, few=st.sampled_from([2, 32]))
def test_sums_are_right_wherever_the_index_space_is_cut(algorithm, case, delivery, shares, beside, few):
    """With empty parts, all in one, and bounds that lie a position apart; gathered in step and not."""
    with mock.patch.object(exchange, "_FEW", few):
        check_cut(algorithm, case, delivery, shares, beside)


@pytest.mark.parametrize("algorithm", IN_STEP)
@settings(max_examples=examples(3))
@given(case=cases(st.sampled_from([32, 33])), delivery=deliveries(), shares=CUTS, beside=BESIDE)
def test_sums_of_many_ranks_are_right_wherever_the_index_space_is_cut(algorithm, case, delivery, shares, beside):
    check_cut(algorithm, case, delivery, shares, beside)


def check_cut(algorithm, case, delivery, shares, beside):
    network = sar.Network(hosts=3 if algorithm == "hierarchical" else None)
    options = {"hierarchical": {"outer": "ssar_split_allgather"}, "dsar_early_switch": {"group_size": 2}}.get(algorithm, {})
    even = sar.simulate(case.streams, algorithm, network, op=case.operator)
    with mock.patch.object(api, "overlap_of", return_value=Overlap(((1, 1.0), (case.ranks, 1.0)), Cuts(shares, beside))):
        out = sar.simulate(case.streams, algorithm, network, op=case.operator, delivery=delivery, **options)
    assert_reduction(out.outputs[0], case.entries, case.size, case.operator, case.exact)
    assert all(bits(result) == bits(out.outputs[0]) for result in out.outputs)
    if algorithm == "ssar_split_allgather":  # whose order of addition is that of the ranks, whoever adds up
        np.testing.assert_array_equal(comparable(out.outputs[0].to_dense()), comparable(even.outputs[0].to_dense()))


def zipf(rank, exponent=1.2, draws=20_000):
    shares = np.arange(1, SIZE + 1) ** -exponent
    chance = -np.expm1(-draws * shares / shares.sum())
    return np.flatnonzero(np.random.default_rng(rank).random(SIZE) < chance)


KINDS = {
    "zipf": zipf,
    "uniform": lambda rank: np.flatnonzero(np.random.default_rng(rank).random(SIZE) < 0.02),
    "cluster": lambda rank: 70_000 + np.flatnonzero(np.random.default_rng(rank).random(9000) < 0.3),
    "clusters of their own": lambda rank: 6_123 * rank + np.arange(3000 + 50 * rank),
    "one place": lambda rank: np.array([SIZE // 3]),
    "the ends": lambda rank: np.array([0, SIZE - 1]),
}


def streams_of(kind, ranks):
    return [sar.SparseStream(found, np.ones(len(found), np.float32), SIZE) for found in map(KINDS[kind], range(ranks))]


def overlap_of(streams):
    return estimated([sample_of(stream, rank, len(streams)) for rank, stream in enumerate(streams)], SIZE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 16, 40])
def test_parts_cover_the_range_and_what_is_expected_of_them_comes_true(kind, ranks):
    streams = streams_of(kind, ranks)
    spread = overlap_of(streams).spread
    positions = np.concatenate([stream.indices for stream in streams])
    union = np.unique(positions)
    for lo, hi in ((0, SIZE), (5000, 90_001), (SIZE // 3, SIZE // 3 + 1), (7, 7)):
        for dense_bits in (0, 32):
            bounds, figures = spread.parts(lo, hi, ranks, dense_bits)
            assert (bounds[0], bounds[-1], len(bounds)) == (lo, hi, ranks + 1)
            assert all(low <= high for low, high in pairwise(bounds))
            assert min(figures[:4]) >= 1.0
            assert spread.cutter(dense_bits)(lo, hi, ranks, ranks) is bounds
    if kind not in ("one place", "the ends"):
        bounds, figures = spread.parts(0, SIZE, ranks)
        fullest = np.histogram(positions, bounds)[0].max() * ranks / len(positions)
        assert figures.entries == pytest.approx(fullest, rel=0.15)
        assert spread.union == pytest.approx(len(union), rel=0.15)
        even = np.histogram(positions, np.linspace(0, SIZE, ranks + 1))[0].max() * ranks / len(positions)
        assert fullest <= 1.1 * even


def test_parts_of_a_sum_are_equal_in_bits():
    """Half of it lies at positions next to each other, which take a bit each, and half at positions far apart, which take 32."""
    size, dense, parts = 1 << 23, 1 << 15, 8
    places = np.concatenate([np.arange(32, dense, 64), np.linspace(dense, size - 1, 512).astype(np.int64)])
    spread = Spread(size, places, np.full(1024, 64 * QUANTILES), np.full(1024, UNIT), 2 * dense)
    bounds = np.array(spread.parts(0, size, parts).bounds)
    below = np.interp(bounds, [0, dense, size], [0, 33 * dense, (33 + 64) * dense])
    assert np.diff(below).max() <= 1.1 * below[-1] / parts


def test_uniform_sets_are_cut_in_equal_widths():
    for ranks in (2, 5, 16, 33):
        bounds = overlap_of(streams_of("uniform", ranks)).spread.parts(0, SIZE, ranks).bounds
        assert bounds == tuple(SIZE * part // ranks for part in range(ranks + 1))


def test_skewed_sets_take_as_long_as_if_they_were_permuted():
    numbers = np.random.default_rng(0).permutation(SIZE)
    network = sar.Network(latency=1e-6, bandwidth=1.25e8)
    for kind in ("zipf", "cluster"):
        streams = streams_of(kind, 8)
        permuted = [sar.SparseStream(np.sort(numbers[stream.indices]), stream.values, SIZE) for stream in streams]
        times = [sar.simulate(given, "ssar_split_allgather", network).time for given in (streams, permuted)]
        assert times[0] <= 1.15 * times[1]
        auto, *fixed = (sar.simulate(streams, name, network).time for name in ("auto", "ssar_split_allgather", "ssar_recursive_doubling"))
        assert auto <= 1.1 * min(fixed)


def test_early_switching_takes_as_long_for_skewed_sets_as_if_they_were_permuted():
    """Whose sections then have every eighth part."""
    numbers = np.random.default_rng(0).permutation(SIZE)
    network = sar.Network(latency=1e-6, bandwidth=1.25e8)
    streams = streams_of("zipf", 32)
    permuted = [sar.SparseStream(np.sort(numbers[stream.indices]), stream.values, SIZE) for stream in streams]
    skewed, uniform = (sar.simulate(given, "dsar_early_switch", network).time for given in (streams, permuted))
    assert skewed <= 1.15 * uniform


@pytest.mark.parametrize("codec", ["float16", "qsgd8"])
def test_ranks_agree_where_parts_are_interleaved_and_values_travel_with_loss(codec):
    streams = [sar.SparseStream(found, np.linspace(1, 2, len(found), dtype=np.float32), SIZE) for found in map(zipf, range(32))]
    network = sar.Network(latency=1e-6, bandwidth=1.25e8)
    out = sar.simulate(streams, "dsar_early_switch", network, value_codec=codec, through_wire=True)
    exact = sum(stream.to_dense().astype(np.float64) for stream in streams)
    assert all(bits(result) == bits(out.outputs[0]) for result in out.outputs)
    np.testing.assert_allclose(out.outputs[0].to_dense(), exact, atol=64 * 0.02)
    assert np.array_equal(out.outputs[0].to_dense() != 0, exact != 0)


def test_a_group_whose_ranks_have_their_entries_in_one_section_is_known_to_take_longer():
    shifted = overlap_of([sar.SparseStream(4096 * rank + np.arange(0, 4096, 4), np.ones(1024), SIZE) for rank in range(64)]).spread
    assert shifted.parts(0, SIZE, 64, 32, 8).figures.grouped > 4
    assert overlap_of(streams_of("uniform", 64)).spread.parts(0, SIZE, 64, 32, 8).figures.grouped < 1.3


@pytest.mark.parametrize("algorithm", ["auto", "ssar_split_allgather"])
def test_lists_are_cut_where_entries_lie(algorithm):
    network = sar.Network(latency=1e-6, bandwidth=2e6)
    lists = [[stream, sar.SparseStream(stream.indices, stream.values.astype(np.float64), SIZE)] for stream in streams_of("cluster", 4)]
    out = sar.simulate(lists, algorithm, network)
    alone = [sar.simulate([given[place] for given in lists], algorithm, network) for place in (0, 1)]
    sampled = 4 * 2 * 4000  # bytes of samples, at most
    assert out.bytes_received.max() < sum(each.bytes_received.max() for each in alone) + sampled
    for place in (0, 1):
        assert bits(out.outputs[3][place]) == bits(alone[place].outputs[0])


@given(count=st.integers(0, 1 << 41), ranks=st.integers(1, 1000), data=st.data())
def test_quantiles_of_any_number_of_entries_are_entries(count, ranks, data):
    places = quantile_places(count, data.draw(st.integers(0, ranks - 1)), ranks)
    assert len(places) == QUANTILES and (np.diff(places) >= 0).all()
    assert places[0] >= 0 and places[-1] < max(count, 1)


@given(
    places=st.lists(st.integers(0, (1 << 40) - 1), min_size=1, max_size=20),
    weight=st.integers(1, 1 << 50),
    share=st.integers(1, UNIT),
    parts=st.integers(1, 20),
    dense_bits=st.sampled_from([0, 16, 4096]),
)
def test_any_spread_is_cut_without_overflow(places, weight, share, parts, dense_bits):
    size, count = 1 << 40, len(places)
    weights, shares = np.arange(1, count + 1) * weight, np.full(count, share)
    with np.errstate(all="raise"):
        spread = Spread(size, np.array(places), weights, shares, weight)
        bounds, figures = spread.parts(0, size, parts, dense_bits)
        assert all(0.0 < share <= 1.0 for share in spread.occupancy)
    assert (bounds[0], bounds[-1]) == (0, size) and all(low <= high for low, high in pairwise(bounds))
    assert max(figures[:4]) <= parts * 1.01
    assert Spread(size, np.array(places), weights, shares, weight) == spread


def test_what_is_remembered_is_renewed_when_a_part_of_the_result_is_another_by_a_third():
    ranks = 4
    sets = [zipf(rank) for rank in range(ranks)]
    streams = [sar.SparseStream(found, np.ones(len(found), np.float32), SIZE) for found in sets]
    moved = [sar.SparseStream(SIZE - 1 - found[::-1], np.ones(len(found), np.float32), SIZE) for found in sets]
    for dense in (False, True):
        remembering = [Overlaps(rank, ranks) for rank in range(ranks)]
        first = [each.note(7, stream) for each, stream in zip(remembering, streams, strict=True)]
        learned = {each.update(7, first, SIZE) for each in remembering}
        assert len(learned) == 1
        for summed in (streams, streams, streams, moved):
            notes = [each.note(7, stream) for each, stream in zip(remembering, summed, strict=True)]
            assert len(set(notes)) == 1 and len(notes[0]) == 9
            assert {each.update(7, notes, SIZE) for each in remembering} == learned
            result = Reduction().many(summed)
            for each in remembering:
                each.review(7, Reduction().densify(result) if dense else result)
        assert all(len(each.note(7, stream)) > 9 for each, stream in zip(remembering, moved, strict=True))


def test_what_the_ranks_do_not_all_remember_they_do_without_and_soon_tell_anew():
    streams = streams_of("zipf", 3)
    remembering = [Overlaps(rank, 3) for rank in range(3)]

    def told():
        return [each.note(7, stream) for each, stream in zip(remembering, streams, strict=True)]

    notes = told()
    for each in remembering[:2]:  # the third fails before it is updated
        each.update(7, notes, SIZE)
    found = []
    for _ in range(8):
        notes = told()
        found.append({each.update(7, notes, SIZE) for each in remembering})
        assert len(found[-1]) == 1
    assert found[0] == {None} and None not in found[-1]


def test_what_holds_is_remembered_for_twice_as_long():
    streams, overlaps = streams_of("zipf", 2), Overlaps(0, 2)
    lengths = []
    for _ in range(16 + 32 + 64 + 4):
        note = overlaps.note(7, streams[0])
        lengths.append(len(note))
        overlaps.update(7, [note, note], SIZE)
    assert [number for number, length in enumerate(lengths) if length > 9] == [0, 17, 17 + 33, 17 + 33 + 65]


def test_what_others_have_displaced_is_told_anew(monkeypatch):
    """One kind of operation is renewed again and again, between two of another kind."""
    monkeypatch.setattr(overlaps, "_KINDS", 2)
    streams, remembering = streams_of("zipf", 8), Overlaps(0, 2)
    first = remembering.note(7, streams[0])
    learned = remembering.update(7, [first, first], SIZE)
    for stream in streams[1:]:
        note = remembering.sample(stream)
        remembering.update(8, [note, note], SIZE)
    again = remembering.note(7, streams[0])
    assert len(again) > 9
    assert remembering.update(7, [again, again], SIZE) == learned
