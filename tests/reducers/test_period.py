"""Periods of threshold evaluation that are found: least where the cost of evaluating and the drift say, the same on all ranks, kept."""

import json
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lossy import Vectors, vectors
from oracle import bits
from strategies import deliveries
from thoroughness import examples

import sparseallreduce as sar
from sparseallreduce.reducers.local import LocalSelection
from sparseallreduce.streams.selection import ThresholdReuse
from sparseallreduce.streams.selection.period import FIRST, LEAST, MOST, Drift

AUTO = {"threshold_period": "auto"}


def driven(drift, cost, share_at, evaluations):
    """The history after so many periods in which a threshold of an age is off by ``share_at(age)``."""
    for _ in range(evaluations):
        drift = drift.evaluated(cost)
        while not drift.is_due:
            drift = drift.seen(share_at(drift.age))
    return drift


@given(cost=st.floats(0.01, 20), start=st.floats(0, 0.2), slope=st.floats(1e-5, 0.02))
def test_it_comes_to_the_period_of_the_least_mean_cost(cost, start, slope):
    def mean_cost(period):
        return (cost + sum(start + slope * age for age in range(1, period))) / period

    found = driven(Drift(), cost, lambda age: start + slope * age, 12).period
    assert LEAST <= found <= MOST
    assert mean_cost(found) <= 1.05 * min(map(mean_cost, range(LEAST, MOST + 1))) + 1e-12


@given(shares=st.lists(st.floats(0, 3), max_size=40), cost=st.floats(0, 1e6), before=st.integers(LEAST, MOST))
def test_whatever_is_seen_it_stays_in_its_bounds_and_changes_by_no_more_than_a_factor_of_two(shares, cost, before):
    drift = Drift(before, 1)
    for share in shares:
        drift = drift.seen(share)
    after = drift.evaluated(cost)
    assert LEAST <= after.period <= MOST and before // 2 <= after.period <= 2 * before
    assert after.age == 1 and not after.is_due
    assert Drift.of(json.loads(json.dumps(after))) == after


def test_a_threshold_that_keeps_is_evaluated_seldom_and_one_that_does_not_often():
    assert driven(Drift(), 0.5, lambda age: 0.0, 8).period == MOST
    assert driven(Drift(), 0.5, lambda age: min(0.3 * age, 1.0), 8).period == LEAST
    assert driven(Drift(), 0.05, lambda age: 0.1, 8).period == LEAST  # off from the first step on, by more than an evaluation costs


@given(case=vectors(), delivery=deliveries(), growth=st.sampled_from([0.8, 1.0, 1.3]))
@settings(max_examples=examples(40))
def test_all_ranks_have_the_same_period_and_what_they_say_is_the_update(case, delivery, growth):
    reducers = case.reducers(sar.OkTopk, **AUTO)
    for step in range(8):
        accumulators = [vector * growth**step for vector in case.step(step)]
        out = sar.simulate(accumulators, reducers, sar.Network(gamma=1e-9), delivery=delivery)
        assert len({bits(reduced.update) for reduced in out.outputs}) == 1
        assert len({reducer._history.drift for reducer in reducers}) == 1
        assert out.outputs[0].update.nnz <= case.k
        total = np.zeros(case.size)
        for reduced, accumulator in zip(out.outputs, accumulators):
            total[reduced.contributed] += accumulator[reduced.contributed]
        np.testing.assert_allclose(out.outputs[0].update.to_dense(), total, rtol=1e-4, atol=1e-3)


def evaluations(growth, steps=160):
    """In which steps thresholds were evaluated, of gradients that grow so much a step, and the periods in turn."""
    ranks, size, k = 4, 20_000, 400
    reducers = [sar.OkTopk(size, k, **AUTO) for _ in range(ranks)]
    noise = np.random.default_rng(0).standard_normal((ranks, size + 1000))
    seen, periods = [], []
    for step in range(steps):
        sar.simulate([own[7 * step % 1000 :][:size] * growth(step) for own in noise], reducers, sar.Network(gamma=1e-9, gamma_dense=1e-10))
        drift = reducers[0]._history.drift
        seen.append(drift.age == 1)
        periods.append(drift.period)
    return np.flatnonzero(seen), periods


def test_it_grows_where_a_threshold_follows_the_gradients_and_shrinks_where_it_cannot():
    seldom, longer = evaluations(lambda step: 1.0)
    assert longer[-1] > FIRST and evaluations(lambda step: 1.02**step)[1] == longer
    often, shorter = evaluations(lambda step: 3.0 ** (step % 2))
    assert shorter[-1] < FIRST
    assert len(seldom) < len(often) / 3
    assert evaluations(lambda step: 3.0 ** (step % 2), 60)[1] == shorter[:60]  # again


def test_what_is_seen_is_by_which_share_of_k_the_number_of_values_is_off():
    ranks, size, k = 2, 2000, 50  # few enough that the threshold is not corrected
    reducers = [sar.OkTopk(size, k, **AUTO) for _ in range(ranks)]
    rng, shares = np.random.default_rng(0), []

    def seen(drift, share):
        shares.append(share)
        return drift._replace(age=drift.age + 1)

    with mock.patch.object(Drift, "seen", seen):
        for step in range(4):
            sar.simulate([1.02**step * rng.standard_normal(size) for _ in range(ranks)], reducers)
            assert len(shares) == ranks * step
    assert all(abs(share * k - round(share * k)) < 1e-9 for share in shares)
    assert 0 < max(shares) < 0.5, "as these gradients are alike"


@pytest.mark.parametrize("through_json", [False, True])
def test_a_state_goes_on_to_the_bit(through_json):
    case = Vectors(3, 2_000, 60, seed=4)
    first, second = ([sar.ErrorFeedback(reducer) for reducer in case.reducers(sar.OkTopk, **AUTO)] for _ in range(2))
    for step in range(40):
        sar.simulate(case.step(step), first)
    assert first[0].reducer._history.drift.period != FIRST
    for feedback, other in zip(first, second):
        state = feedback.state()
        if through_json:
            residual = state.pop("residual")
            state = json.loads(json.dumps(state)) | {"residual": residual}
        other.restore(state)
        assert other.reducer._history == feedback.reducer._history
    for step in range(40, 80):
        one, two = (sar.simulate(case.step(step), feedbacks).outputs[0] for feedbacks in (first, second))
        assert bits(one) == bits(two)


def test_a_state_of_an_earlier_version_begins_with_the_first_period():
    reducer = sar.OkTopk(100, 5, **AUTO)
    reducer.allreduce(np.arange(100.0), sar.SERIAL)
    state = reducer.state()
    del state["drift"]
    reducer.restore(state)
    assert reducer._history.drift == Drift()


def test_ranks_that_have_evaluated_at_different_steps_are_a_mismatch():
    """One would go on to evaluate, and wait for counts of the other."""
    reducers = [sar.OkTopk(50, 5, **AUTO) for _ in range(2)]
    for _ in range(2):
        sar.simulate([np.arange(50.0)] * 2, reducers)
    history = reducers[1]._history
    reducers[1]._history = history._replace(drift=history.drift._replace(age=3))
    with pytest.raises(sar.MismatchError, match="checksum"):
        sar.simulate([np.arange(50.0)] * 2, reducers)


def test_an_operation_that_is_given_up_is_not_counted():
    reducer = sar.OkTopk(50, 5, **AUTO)
    reducer.allreduce(np.arange(50.0), sar.SERIAL)
    before = reducer._history
    operation = reducer.planned(np.arange(50.0))
    schedule = operation.run(0, 2)
    next(schedule)
    schedule.close()
    assert reducer._history == before


@pytest.mark.parametrize("steps", [50, 400])
def test_threshold_reuse_alone_finds_its_period_and_keeps_it(steps):
    class Chosen(LocalSelection):
        name = "chosen"

        def reduce(self, accumulator, gradient, rank, ranks):
            raise NotImplementedError

    rng, k, size = np.random.default_rng(0), 50, 3_000
    own = Chosen(size, k, selector=lambda k: ThresholdReuse(k, "auto"))
    other = Chosen(size, k, selector=lambda k: ThresholdReuse(k, "auto"))
    for _ in range(steps):
        chosen = own.selector(rng.standard_normal(size))
        assert 0.9 * k <= chosen.nnz <= k
    assert Drift.of(own.selector.history).period > FIRST
    other.restore(own.state())
    for step in range(80):
        vector = rng.standard_normal(size) * 1.1**step
        np.testing.assert_array_equal(own.selector(vector).indices, other.selector(vector).indices)
    assert Drift.of(own.selector.history) == Drift.of(other.selector.history)


@pytest.mark.parametrize("period", [0, "always", -1])
def test_periods_that_make_no_sense_are_refused(period):
    with pytest.raises(sar.AlgorithmError, match="threshold_period is"):
        sar.OkTopk(10, 2, threshold_period=period)
    with pytest.raises(sar.StreamError, match="period is the number of steps"):
        ThresholdReuse(2, period)
