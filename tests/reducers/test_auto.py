"""The reducer that is chosen by the cost model: the same on all ranks, right where the network is the model's, and kept in the state."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lossy import Vectors, vectors
from oracle import bits
from strategies import deliveries

import sparseallreduce as sar
from sparseallreduce.algorithms import Hosts
from sparseallreduce.errors import CheckpointError
from sparseallreduce.reducers import auto
from sparseallreduce.reducers.cost import CANDIDATES, EXACT, Case, evaluation_seconds, fastest, predicted
from sparseallreduce.reducers.dense import Dense
from sparseallreduce.runtime.simulator.network import machine_of

MAKE = {
    "dense": lambda size, k: Dense(size, size),
    "topka": sar.TopkA,
    "topkdsa": sar.TopkDSA,
    "gtopk": sar.GTopk,
    "oktopk": sar.OkTopk,
    "hitopk": sar.HiTopK,
}
NAMES = st.lists(st.sampled_from(CANDIDATES), min_size=1, unique=True)


@given(case=vectors(), names=NAMES, hosts=st.integers(1, 4), delivery=deliveries(), slow=st.booleans())
def test_it_is_the_reducer_that_it_takes_and_nothing_is_lost(case, names, hosts, delivery, slow):
    network = sar.Network(hosts=hosts, bandwidth=1e7 if slow else 1e10, gamma=1e-9)
    ours = [sar.ErrorFeedback(sar.Auto(case.size, case.k, candidates=names), case.dtype) for _ in range(case.ranks)]
    gradients, means = np.zeros(case.size), np.zeros(case.size)
    others = None
    for step in range(3):
        vectors_of = case.step(step)
        out = sar.simulate(vectors_of, ours, network, delivery=delivery)
        (name,) = {feedback.reducer.chosen.name for feedback in ours}
        assert name in names
        if others is None:
            algorithm = {"algorithm": ours[0].reducer.chosen.algorithm} if name == "topkdsa" else {}
            others = [sar.ErrorFeedback(MAKE[name](case.size, case.k, **algorithm), case.dtype) for _ in range(case.ranks)]
        expected = sar.simulate(vectors_of, others, network, delivery=delivery)
        assert {bits(mean) for mean in out.outputs} == {bits(expected.outputs[0])}
        for feedback, other in zip(ours, others):
            np.testing.assert_array_equal(feedback.residual, other.residual)
        gradients += np.sum(vectors_of, axis=0, dtype=np.float64)
        means += out.outputs[0].to_dense()
    residuals = np.sum([feedback.residual for feedback in ours], axis=0, dtype=np.float64)
    np.testing.assert_allclose(case.ranks * means + residuals, gradients, rtol=0, atol=2e-5 * max(1, np.abs(gradients).max(initial=0)))


@pytest.mark.parametrize("hosts", [None, 4])
@pytest.mark.parametrize("latency,bandwidth", [(2e-5, 1e8), (1e-5, 1e9), (2e-6, 1e10)])
@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_where_messages_alone_take_time_it_takes_no_more_than_a_quarter_beyond_the_best(monkeypatch, ranks, latency, bandwidth, hosts):
    monkeypatch.setattr("sparseallreduce.reducers.cost._ONCE", dict.fromkeys(CANDIDATES, 0.0))  # the simulator has no fixed times
    local = {} if hosts is None else {"local_latency": latency / 20, "local_bandwidth": 20 * bandwidth}
    network = sar.Network(latency, bandwidth, hosts=hosts, **local)
    size, k = 20_000, 400
    predicted.cache_clear()
    gradients = Vectors(ranks, size, k, seed=ranks).step(0)
    times = {}
    for name, make in MAKE.items():
        reducers = [make(size, k) for _ in range(ranks)]
        for _ in range(2):  # the first has no thresholds
            times[name] = sar.simulate(gradients, reducers, network).time
    reducers = [sar.Auto(size, k) for _ in range(ranks)]
    for _ in range(2):
        taken = sar.simulate(gradients, reducers, network).time
    predicted.cache_clear()
    assert taken <= 1.25 * min(times.values()), (reducers[0].chosen.name, times)


@pytest.mark.parametrize("hosts", [None, 4])
def test_bytes_and_times_are_about_those_of_the_simulator(monkeypatch, hosts):
    monkeypatch.setattr("sparseallreduce.reducers.cost._ONCE", dict.fromkeys(CANDIDATES, 0.0))
    local = {} if hosts is None else {"local_latency": 5e-7, "local_bandwidth": 2e10}
    network, ranks, size, k = sar.Network(1e-5, 1e9, hosts=hosts, **local), 16, 20_000, 400
    layout = network.layout(ranks)
    predicted.cache_clear()
    parts = predicted(Case(size, k, 4, layout, machine_of(network)))
    predicted.cache_clear()
    gradients = Vectors(ranks, size, k, seed=3).step(0)
    for name, make in MAKE.items():
        reducers = [make(size, k) for _ in range(ranks)]
        for _ in range(2):
            out = sar.simulate(gradients, reducers, network)
        assert 1 / 2.5 <= parts[name].bytes / out.bytes_received.max() <= 2.5, name
        assert 1 / 2.5 <= parts[name].seconds / out.time <= 2.5, name


def test_the_exact_algorithm_is_the_fastest_by_the_model():
    machine = machine_of(sar.Network(1e-5, 1e8))
    hosts = Hosts(tuple((rank,) for rank in range(16)))
    chosen = {predicted(Case(10**6, k, 4, hosts, machine), ("topkdsa",))["topkdsa"].algorithm for k in (10, 10_000, 400_000)}
    assert len(chosen) > 1 and chosen <= set(EXACT)


@given(
    size=st.sampled_from([0, 1, 7, 10**4, 2**32, 2**33]),
    share=st.floats(0, 1),
    ranks=st.integers(1, 300),
    hosts=st.integers(1, 9),
    machine=st.sampled_from([sar.Machine(), sar.Machine(*[0.0] * len(sar.Machine._fields)), machine_of(sar.Network())]),
    on_device=st.booleans(),
)
def test_times_of_any_case_are_numbers_and_made_of_their_parts(size, share, ranks, hosts, machine, on_device):
    k = min(size, max(1, int(share * size)))
    case = Case(size, k, 4, Hosts.of([rank % hosts for rank in range(ranks)]), machine, on_device)
    times = predicted(case)
    assert tuple(times) == CANDIDATES and fastest(times) in times
    for parts in times.values():
        assert all(np.isfinite(part) and part >= 0 for part in parts[:5]) and np.isfinite(parts.bytes)
        assert parts.seconds >= (parts.select + parts.latency + parts.wire + parts.copies) * (1 - 1e-9)
        assert on_device or parts.copies == 0
    assert evaluation_seconds(case) >= 0


def test_faster_links_inside_hosts_bring_their_sums_first():
    far = {"latency": 1e-4, "bandwidth": 1e7}
    near = sar.Network(**far, hosts=8, local_latency=1e-7, local_bandwidth=1e11)
    gradients = Vectors(16, 40_000, 2_000, seed=1).step(0)
    chosen = []
    for network in (sar.Network(**far), near):
        reducers = [sar.Auto(40_000, 2_000, candidates=["topka", "hitopk"]) for _ in range(16)]
        sar.simulate(gradients, reducers, network)
        chosen.append(reducers[0].chosen.name)
    assert chosen == ["topka", "hitopk"]


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_state_keeps_the_choice_and_what_follows_has_the_same_bits_on_another_network(name):
    case = Vectors(4, 300, 20, seed=5)
    networks = sar.Network(hosts=2), sar.Network(latency=1e-3, bandwidth=1e12, hosts=2)

    def fresh(names=CANDIDATES):
        return [sar.ErrorFeedback(sar.Auto(case.size, case.k, candidates=names)) for _ in range(case.ranks)]

    first, second = fresh([name]), fresh()
    before = [feedback.state() for feedback in fresh()]
    for feedback, state in zip(second, before):
        feedback.restore(state)  # of none that has chosen
    for step in range(3):
        sar.simulate(case.step(step), first, networks[0])
    for feedback, other in zip(first, second):
        state = feedback.state()
        residual = state.pop("residual")
        other.restore(json.loads(json.dumps(state, default=float)) | {"residual": residual})
        assert other.reducer.chosen.name == name
    for feedback in second:
        feedback.reducer.candidates = (name,)  # which the ranks compare
    for step in range(3, 6):
        results = [sar.simulate(case.step(step), feedbacks, network) for feedbacks, network in zip((first, second), networks)]
        assert bits(results[0].outputs[0]) == bits(results[1].outputs[0])
    for feedback, other in zip(first, second):
        np.testing.assert_array_equal(feedback.residual, other.residual)
    if name != "dense":
        with pytest.raises(CheckpointError, match=f"of the chosen reducer {name}, but the candidates here are dense"):
            sar.Auto(case.size, case.k, candidates="dense").restore(first[0].reducer.state())


def test_other_ranks_and_a_reset_have_it_chosen_anew():
    slow, fast = sar.Network(latency=1e-9, bandwidth=1e6), sar.Network(latency=1.0, bandwidth=1e12)
    reducers = [sar.Auto(2_000, 20, candidates=["dense", "oktopk"]) for _ in range(3)]
    gradients = Vectors(3, 2_000, 20, seed=2).step(0)
    sar.simulate(gradients, reducers, slow)
    sar.simulate(gradients, reducers, fast)
    assert {reducer.chosen.name for reducer in reducers} == {"oktopk"}
    sar.simulate(gradients[:2], reducers[:2], fast)
    assert {reducer.chosen.name for reducer in reducers[:2]} == {"dense"}
    reducers[2].reset()
    assert (reducers[2].chosen, reducers[2].state()["choice"], reducers[2].hosts) == (None, "", False)


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize("before", [0, 2])
def test_an_operation_that_is_given_up_has_chosen_nothing_and_changed_nothing(name, before):
    reducer = sar.Auto(60, 6, candidates=name)
    vector = np.random.default_rng(3).standard_normal(60)
    for _ in range(before):
        reducer.allreduce(vector, sar.SERIAL)
    state = json.dumps(reducer.state(), default=float)
    operation = reducer.planned(vector)
    schedule = operation.run(0, 2)
    step = next(schedule)
    while type(step).__name__ in ("Layout", "Constants"):
        step = schedule.send(Hosts(((0, 1),)) if type(step).__name__ == "Layout" else sar.Machine())
    schedule.close()
    assert json.dumps(reducer.state(), default=float) == state
    reducer.allreduce(vector, sar.SERIAL)


def test_choices_that_differ_are_a_mismatch():
    reducers = [sar.Auto(50, 5, candidates=names) for names in (["dense", "topka"], ["dense", "gtopk"])]
    with pytest.raises(sar.MismatchError, match="candidates"):
        sar.simulate([np.ones(50)] * 2, reducers)
    one, other = (sar.Auto(50, 5) for _ in range(2))
    for reducer, name in ((one, "topka"), (other, "gtopk")):
        reducer._take(name, "", 2)
    with pytest.raises(sar.MismatchError, match="choice: topka on rank 0; gtopk on rank 1"):
        sar.simulate([np.ones(50)] * 2, [one, other])


@pytest.mark.parametrize(
    "options, match",
    [
        ({"candidates": ["topka", "best"]}, "there is no candidate 'best': name some of dense, topka"),
        ({"candidates": []}, "no candidate is named"),
        ({"threshold_period": 0}, "threshold_period is at least 1"),
        ({"selector": 3}, "selector must return a Selector"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, match):
    with pytest.raises(sar.AlgorithmError, match=match):
        sar.Auto(10, 2, **options)


def test_an_explanation_shows_each_candidate_and_the_choice():
    choice = sar.explain_reducer(1000, 10, sar.SERIAL)
    assert choice.choice == "dense" and tuple(choice.predicted) == CANDIDATES
    shown = str(choice)
    assert shown.startswith("auto takes dense: 10 of 1,000 values on 1 rank(s) of 1 host(s)") and "\n* dense " in shown
    assert all(f" {name}" in shown for name in CANDIDATES)
    with pytest.raises(sar.AlgorithmError, match="k is the number of elements"):
        auto.explain_reducer(10, 11, sar.SERIAL)
