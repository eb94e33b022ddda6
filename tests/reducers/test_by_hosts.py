"""Lossy sums on two levels: nothing is lost or there twice, whatever the ranks' places, and the volumes of CommLib's equations."""

import copy
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lossy import RANKS, Vectors, top, vectors
from oracle import bits
from strategies import deliveries
from thoroughness import examples

import sparseallreduce as sar
from sparseallreduce.optim import HiTopKSGD, simulated_step
from sparseallreduce.reducers import by_hosts
from sparseallreduce.streams.partition import boundaries
from sparseallreduce.streams.selection import ExactTopK

REDUCERS = {
    "hitopk": sar.HiTopK,
    "hitopk, exact": lambda size, k: sar.HiTopK(size, k, selector=ExactTopK),
    "oktopk": lambda size, k: sar.OkTopk(size, k, hosts=True),
    "gtopk": lambda size, k: sar.GTopk(size, k, hosts=True),
    "gtopk by allgather": lambda size, k: sar.GTopk(size, k, form="allgather", hosts=True),
    "topka": lambda size, k: sar.TopkA(size, k, hosts=True),
    "topka, 2 bits": lambda size, k: sar.TopkA(size, k, hosts=True, value_codec="qsgd2"),
    "topka, 8 bits": lambda size, k: sar.TopkA(size, k, hosts=True, value_codec="qsgd8"),
}
every_reducer = pytest.mark.parametrize("name", REDUCERS)


def places(ranks):
    return st.one_of(st.integers(1, 8), st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))


@every_reducer
@given(data=st.data(), case=vectors(), delivery=deliveries(), through_wire=st.booleans())
def test_update_and_what_is_returned_are_the_sum_of_all(name, data, case, delivery, through_wire):
    network = sar.Network(hosts=data.draw(places(case.ranks)))
    reducers = case.reducers(REDUCERS[name])
    before = [vector.copy() for vector in case.first]
    out = sar.simulate(case.first, reducers, network, delivery=delivery, through_wire=through_wire)
    for vector, old in zip(case.first, before):
        np.testing.assert_array_equal(vector, old)
    update = out.outputs[0].update
    assert {bits(reduced.update) for reduced in out.outputs} == {bits(update)}
    assert all(reduced.contributed == slice(None) for reduced in out.outputs)
    returned = sum(reducer.returned.to_dense().astype(np.float64) for reducer in reducers)
    total = np.sum(case.first, axis=0, dtype=np.float64)
    scale = np.abs(case.first).sum(axis=0).max(initial=1.0)
    np.testing.assert_allclose(update.to_dense() + returned, total, atol=1e-5 * scale, rtol=0)


@given(data=st.data(), case=vectors(contents=("small integers",)))
def test_hitopk_is_the_sum_of_the_hosts_parts(data, case):
    network = sar.Network(hosts=data.draw(places(case.ranks)))
    hosts = network.layout(case.ranks)
    out = sar.simulate(case.first, case.reducers(REDUCERS["hitopk, exact"]), network)
    bounds, expected = boundaries(case.size, hosts.lanes), np.zeros(case.size, case.dtype)
    for members in hosts.members:
        total = np.sum([case.first[rank] for rank in members], axis=0)
        for lo, hi in pairwise(bounds):
            expected[lo:hi] += top(total[lo:hi], min(hi - lo, -(-case.k // hosts.lanes)))
    np.testing.assert_array_equal(out.outputs[0].update.to_dense(), expected)


@every_reducer
@pytest.mark.parametrize("hosts", [2, 3, [0, 1, 0, 1, 1, 2]])
def test_error_feedback_loses_nothing_over_hundreds_of_steps(name, hosts):
    case = Vectors(6, 60, 6, "float64", seed=3)
    feedbacks = [sar.ErrorFeedback(reducer, np.float64) for reducer in case.reducers(REDUCERS[name])]
    gradients, updates = np.zeros((2, case.size))
    for step in range(examples(300)):
        given = case.step(step)
        gradients += np.sum(given, axis=0)
        updates += 6 * sar.simulate(given, feedbacks, sar.Network(hosts=hosts)).outputs[0].to_dense()
    left = np.sum([feedback.residual for feedback in feedbacks], axis=0)
    np.testing.assert_allclose(updates + left, gradients, atol=1e-8)
    assert np.abs(left).max() < 3000  # nothing waits for ever


@every_reducer
def test_a_state_is_gone_on_from_to_the_bit(name):
    case, network = Vectors(4, 80, 8, seed=1), sar.Network(hosts=2)
    feedbacks = [sar.ErrorFeedback(reducer) for reducer in case.reducers(REDUCERS[name])]
    for step in range(5):
        sar.simulate(case.step(step), feedbacks, network)
    again = [sar.ErrorFeedback(reducer) for reducer in case.reducers(REDUCERS[name])]
    for old, new in zip(feedbacks, again):
        new.restore(old.state())
        assert new.state().keys() == old.state().keys()
    copies = copy.deepcopy(feedbacks)
    for step in range(5, 10):
        one, two, three = (sar.simulate(case.step(step), each, network).outputs[0] for each in (feedbacks, again, copies))
        assert bits(one) == bits(two) == bits(three)


def test_an_operation_that_fails_leaves_no_trace():
    case, network = Vectors(4, 80, 8, seed=1), sar.Network(hosts=2)
    reducers, others = case.reducers(REDUCERS["oktopk"]), case.reducers(REDUCERS["oktopk"])
    for step in range(3):
        sar.simulate(case.step(step), reducers, network)
        sar.simulate(case.step(step), others, network)

    def fails(possibilities):
        raise ZeroDivisionError

    picks = iter([0] * 40)
    with pytest.raises(ZeroDivisionError):
        sar.simulate(case.step(3), reducers, network, delivery=lambda n: next(picks, None) or (0 if next(picks, None) == 0 else fails(n)))
    for step in (3, 4):
        ours, theirs = (sar.simulate(case.step(step), each, network).outputs[0].update for each in (reducers, others))
        assert bits(ours) == bits(theirs)


@given(ranks=RANKS)
def test_one_host_sends_nothing_far_and_one_rank_a_host_is_the_reducer_itself(ranks):
    case = Vectors(ranks, 200, 20, seed=9)
    alone = sar.simulate(case.first, case.reducers(REDUCERS["topka"]), sar.Network(hosts=1)).outputs[0].update
    assert bits(alone) == bits(sar.simulate(case.first, case.reducers(sar.TopkA)).outputs[0].update)


def test_volumes_are_those_of_the_equations():
    hosts, inside, size, k = 4, 4, 1 << 14, 1 << 8
    case = Vectors(hosts * inside, size, k, places="disjoint")
    out = sar.simulate(case.first, case.reducers(sar.HiTopK), sar.Network(hosts=inside))
    words = (out.bytes_received - out.header_bytes) / 4
    reduce_scatter = size * (inside - 1) / inside  # equation 7
    between = 2 * (hosts - 1) * k / inside  # equation 9, with indices
    gathered = 2 * (inside - 1) * hosts * k / inside  # equation 10, with indices
    assert words.max() <= 1.02 * (reduce_scatter + between + gathered)
    assert words.min() >= 0.9 * (reduce_scatter + between + gathered)


def test_ranks_that_differ_in_hosts_are_told():
    reducers = [sar.TopkA(8, 2, hosts=rank > 0) for rank in range(3)]
    with pytest.raises(sar.MismatchError, match="hosts first"):
        sar.simulate([np.ones(8, np.float32)] * 3, reducers)


def test_gaussiank_and_topkdsa_have_no_such_form():
    with pytest.raises(sar.AlgorithmError, match="hosts"):
        sar.TopkDSA(8, 2, hosts=True)
    with pytest.raises(TypeError):
        sar.GaussianK(8, 2, hosts=True)


def test_on_one_rank_it_is_the_top_k():
    update = sar.HiTopK(6, 2, selector=ExactTopK).allreduce(np.array([0.1, -3.0, 0.2, 0.1, 2.0, -0.1]), sar.SERIAL).update
    assert update.indices.tolist() == [1, 4]


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.release), {"momentum": 0.9}, {"momentum": 0.9, "momentum_correction": True}]
)
def test_an_optimiser_descends_by_it(options):
    weights = [np.full(40, 5.0) for _ in range(4)]
    optimizers = [HiTopKSGD(own, learning_rate=0.01, density=0.1, comm=sar.SERIAL, **options) for own in weights]
    for _ in range(1500):
        simulated_step(optimizers, [own - rank for rank, own in enumerate(weights)], network=sar.Network(hosts=2))
    assert all((own == weights[0]).all() for own in weights)
    np.testing.assert_allclose(weights[0], 1.5, atol=0.6)


def test_the_time_of_selection_is_that_before_the_first_step(monkeypatch):
    times = iter([1.0, 4.0, 9.0, 16.0, 25.0])
    monkeypatch.setattr(by_hosts, "perf_counter", lambda: next(times))
    owner = sar.HiTopK(8, 2)

    def schedule():
        yield from ("first step", "second step")

    assert list(by_hosts.timed(schedule(), owner)) == ["first step", "second step"]
    assert owner.select_seconds == 3.0


def test_what_a_codec_draws_differs_from_step_to_step():
    case, network = Vectors(4, 80, 8, seed=1), sar.Network(hosts=2)
    reducers = case.reducers(REDUCERS["topka, 8 bits"])
    updates = [bits(sar.simulate(case.first, reducers, network).outputs[0].update) for _ in range(3)]
    assert len(set(updates)) == 3
