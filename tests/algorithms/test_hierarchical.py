"""Sums on two levels, in the simulator: any ranks on any hosts, by any algorithm on each level, and what it saves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_reduction, bits
from strategies import cases, deliveries

import sparseallreduce as sar
from sparseallreduce.algorithms.hierarchical import Hosts

FLAT = [name for name in sar.algorithms() if name not in ("auto", "hierarchical", "dense_torus")]
NETWORK = sar.Network(1e-5, 1e8, local_latency=1e-6, local_bandwidth=1e10)


def hosts(ranks):
    """The host of each rank: as many on each, one's behind another's, or anything."""
    return st.one_of(st.integers(1, 8), st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))


def levels():
    chosen = {"inner": st.sampled_from(["auto", "split", *FLAT]), "outer": st.sampled_from(["auto", *FLAT])}
    return st.fixed_dictionaries({}, optional={**chosen, "switch_density": st.sampled_from([None, 0.0, 0.0625, 1.0])})


@given(data=st.data(), case=cases(), delivery=deliveries(), through_wire=st.booleans())
def test_every_rank_gets_the_dense_reduction_wherever_it_is(data, case, delivery, through_wire):
    network, chosen = NETWORK._replace(hosts=data.draw(hosts(case.ranks))), data.draw(levels())
    before = [bits(stream) for stream in case.streams]
    out = sar.simulate(
        case.streams, "hierarchical", network, op=case.operator, delivery=delivery, through_wire=through_wire, **chosen
    )
    assert_reduction(out.outputs[0], case.entries, case.size, case.operator, case.exact)
    assert all(bits(result) == bits(out.outputs[0]) for result in out.outputs)
    assert [bits(stream) for stream in case.streams] == before


@given(data=st.data(), case=cases(), delivery=deliveries())
def test_the_order_of_delivery_changes_no_bit(data, case, delivery):
    network, chosen = NETWORK._replace(hosts=data.draw(hosts(case.ranks))), data.draw(levels())
    by_time = sar.simulate(case.streams, "hierarchical", network, op=case.operator, **chosen)
    otherwise = sar.simulate(case.streams, "hierarchical", network, op=case.operator, delivery=delivery, through_wire=True, **chosen)
    assert {bits(result) for result in by_time.outputs} == {bits(result) for result in otherwise.outputs}
    np.testing.assert_array_equal(by_time.bytes_sent, otherwise.bytes_sent)


@given(data=st.data(), case=cases(), delivery=deliveries())
def test_a_list_is_summed_as_its_streams_are(data, case, delivery):
    network = NETWORK._replace(hosts=data.draw(hosts(case.ranks)))
    out = sar.simulate([[stream, stream] for stream in case.streams], "hierarchical", network, op=case.operator, delivery=delivery)
    assert_reduction(out.outputs[0][1], case.entries, case.size, case.operator, case.exact)
    assert all([bits(one) for one in result] == [bits(one) for one in out.outputs[0]] for result in out.outputs)


@pytest.mark.parametrize("codec", ["float16", "bfloat16", "qsgd8", "qsgd4"])
@pytest.mark.parametrize("outer", FLAT)
def test_lossy_values_are_the_same_on_all_ranks_and_exact_inside_a_host(codec, outer):
    streams = uniform(8, 4000, 200)
    network = NETWORK._replace(hosts=[0, 1, 1, 0, 2, 2, 0, 1])
    out = sar.simulate(streams, "hierarchical", network, outer=outer, value_codec=codec, through_wire=True)
    assert len({bits(result) for result in out.outputs}) == 1
    total = sum(stream.to_dense() for stream in streams)
    assert np.abs(out.outputs[0].to_dense() - total).max() <= (1.0 if "qsgd" in codec else 0.2) * np.abs(total).max()
    alone = sar.simulate(streams, "hierarchical", NETWORK._replace(hosts=8), outer=outer, value_codec=codec)
    np.testing.assert_allclose(alone.outputs[0].to_dense(), total, rtol=1e-5)


def test_hosts_are_in_the_order_of_their_first_ranks():
    found = Hosts.of([3, 1, 3, 1, 1])
    assert found.members == ((0, 2), (1, 3, 4)) and found.lanes == 2 and found.in_a_row == 1
    assert [found.place_of(rank) for rank in range(5)] == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2)]
    assert found.lane(1) == (2, 3)


def uniform(ranks, size, entries):
    rng = np.random.default_rng(7)
    chosen = (np.sort(rng.choice(size, entries, replace=False)) for _ in range(ranks))
    return [sar.SparseStream(places.astype(np.uint32), rng.standard_normal(entries).astype(np.float32), size) for places in chosen]


@pytest.mark.parametrize("order", ["blocks", "round-robin"])
def test_between_hosts_travel_the_sums_of_hosts_alone(order):
    ranks, size, entries = 16, 1 << 16, 400
    streams = uniform(1, size, entries) * ranks  # the same entries everywhere
    layout = [rank // 4 if order == "blocks" else rank % 4 for rank in range(ranks)]
    far = sar.Network(1e-9, 1e6, local_latency=1e-12, local_bandwidth=1e15, hosts=layout)
    ours = sar.simulate(streams, "hierarchical", far, outer="ssar_recursive_doubling", index_codec="plain")
    # The parts of each host together are one stream of so many entries, which it sends and receives twice.
    assert ours.time == pytest.approx(2 * entries * 8 / 1e6, rel=0.12)  # the headers of 24 messages besides
    flat = min(sar.simulate(streams, name, far, index_codec="plain").time for name in FLAT if name.startswith("ssar"))
    # Where the ranks of a host follow each other, a ring crosses between hosts as seldom.
    assert flat > (0.8 if order == "blocks" else 1.9) * ours.time


def test_auto_takes_two_levels_where_they_pay_and_is_never_much_slower_than_one():
    taken = set()
    for order in ("blocks", "round-robin"):
        for density in (1e-4, 1e-3, 1e-2, 0.1):
            layout = [rank // 4 if order == "blocks" else rank % 4 for rank in range(16)]
            network = sar.Network(5e-5, 1.25e8, 2e-9, hosts=layout, local_latency=1e-6, local_bandwidth=5e9)
            streams = uniform(16, 1 << 18, int(density * (1 << 18)))
            times = {name: sar.simulate(streams, name, network).time for name in sar.algorithms()}
            best = min(times, key=times.__getitem__)
            taken.add(best == "hierarchical")
            assert times["auto"] <= 1.1 * times[best] + 1e-9, (order, density, times)
    assert True in taken


@pytest.mark.parametrize("wrong", [{"inner": "hierarchical"}, {"outer": "split"}, {"outer": "hierarchical"}, {"group_size": 2}])
def test_options_that_it_does_not_take_are_refused(wrong):
    with pytest.raises(sar.AlgorithmError):
        sar.simulate(uniform(4, 100, 10), "hierarchical", **wrong)


@pytest.mark.parametrize("layout", [0, -2, [0, 0, 1]])
def test_hosts_of_other_ranks_are_refused(layout):
    with pytest.raises(sar.StreamError):
        sar.simulate(uniform(4, 100, 10), "hierarchical", sar.Network(hosts=layout))


@given(data=st.data(), case=cases(), delivery=deliveries(), through_wire=st.booleans())
def test_the_dense_torus_is_right_wherever_ranks_are(data, case, delivery, through_wire):
    network = NETWORK._replace(hosts=data.draw(hosts(case.ranks)))
    out = sar.simulate(case.streams, "dense_torus", network, op=case.operator, delivery=delivery, through_wire=through_wire)
    assert_reduction(out.outputs[0], case.entries, case.size, case.operator, case.exact)
    assert all(bits(result) == bits(out.outputs[0]) for result in out.outputs)


def test_a_torus_sends_between_hosts_what_rings_of_them_would():
    size, ranks = 1 << 12, 16
    out = sar.simulate(uniform(ranks, size, 200), "dense_torus", sar.Network(hosts=4), index_codec="plain")
    expected = 4 * size * (2 * 3 / 4 / 4 + 2 * 3 / 4)
    np.testing.assert_allclose(out.bytes_sent - out.header_bytes, expected, rtol=0.01)
