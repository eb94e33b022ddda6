"""Changes of steps that ranks take by themselves, and the weights that they sum up to: against dense sums in float64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseallreduce import SparseStream
from sparseallreduce.linear import Descent
from sparseallreduce.linear.weights import new_weights
from sparseallreduce.linear.weights.local_changes import LocalChanges

FEATURES = 40


def descent(**options):
    return Descent(update="ftrl", beta=0.5, **options)


def held(rng, ranks):
    """Which features each rank has: some all, some one alone, some none."""
    return rng.random((ranks, FEATURES)) < rng.random(FEATURES)


def ranks_of(has, **options):
    """Weights of every rank, their changes, and the numbers of the features that several have."""
    holders, intercept = has.sum(axis=0), options.get("intercept", False)
    shared = np.flatnonzero(holders > 1)
    made = []
    for own in has:
        weights = new_weights(FEATURES + intercept, descent(**options), np.float64)
        slots = np.flatnonzero(own[shared]).astype(np.uint32)
        made.append((weights, LocalChanges(weights, shared.astype(np.uint32), slots, holders[shared], len(has))))
    return made, shared


def step(weights, own, rng, scale=1.0, rate=0.3):
    touched = np.flatnonzero(own & (rng.random(FEATURES) < 0.5))
    width = weights.columns
    indices = np.append(touched, FEATURES) if weights.descent.intercept else touched
    values = scale * rng.standard_normal((len(indices),) if width is None else (len(indices), width))
    weights.descend(SparseStream(indices, values, weights.size), rate)


def summed(made, unit=1.0):
    total = np.zeros((made[0][1].size, 2))
    for _, changes in made:
        np.add.at(total, changes.slots.astype(int), changes.moves(unit))
    return total


def free(weights):
    return np.array(weights.unscaled), np.array(weights._norms)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.parametrize("penalties", [{}, {"l1": 1e-3, "l2": 0.1}])
@pytest.mark.parametrize("unit", [1.0, 2.0**-9])
def test_all_ranks_come_to_the_weights_of_dense_sums(intercept, columns, penalties, unit):
    rng = np.random.default_rng(3)
    has = held(rng, 3)
    made, shared = ranks_of(has, intercept=intercept, columns=columns, **penalties)
    width = columns or 1
    places = (shared[:, np.newaxis] * width + np.arange(width)).reshape(-1)
    for _ in range(3):
        before, norms = free(made[0][0])
        read = made[0][0].to_array()[:FEATURES].reshape(-1)
        for (weights, _), own in zip(made, has, strict=True):
            for _ in range(4):
                step(weights, own, rng)
        ends = [free(weights) for weights, _ in made]
        total = summed(made, unit)
        assert all(changes.take(total, unit) for _, changes in made)
        holders = np.repeat(has.sum(axis=0), width)
        norm = np.sqrt(norms**2 + sum(n**2 - norms**2 for _, n in ends))

        def pull(norm):
            return np.where(norm > 0, norm + 0.5, 0)

        base = pull(norms) * (before - read)
        move = sum(pull(n) * (v - read) - base for v, n in ends) / np.maximum(holders, 1)
        wanted = np.where(norm > 0, read + (base + move) / np.where(norm > 0, pull(norm), 1), before)
        for weights, _ in made:
            np.testing.assert_allclose(weights.unscaled[places], wanted[places], rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(weights._norms[places], norm[places], rtol=1e-9, atol=1e-12)
        assert len({weights.unscaled[places].tobytes() + weights._norms[places].tobytes() for weights, _ in made}) == 1
        assert len({np.asarray(weights.intercept).tobytes() for weights, _ in made}) == 1
        complete(made, has, width)


def complete(made, has, width):
    """Give every rank the features that it has not."""
    v, norms = np.zeros(FEATURES * width), np.zeros(FEATURES * width)
    for (weights, _), own in zip(made, np.repeat(has, width, axis=1), strict=True):
        v[own], norms[own] = weights.unscaled[own], weights._norms[own]
    for weights, changes in made:
        weights.unscaled[:], weights._norms[:] = v, norms
        changes.begin()


@given(st.integers(2, 5), st.integers(0, 2**32 - 1), st.sampled_from([1e-3, 1.0, 1e12]))
def test_a_feature_of_one_rank_alone_keeps_its_bits(ranks, seed, scale):
    rng = np.random.default_rng(seed)
    has = held(rng, ranks)
    made, _ = ranks_of(has, intercept=True)
    for weights, own in zip((weights for weights, _ in made), has, strict=True):
        for _ in range(3):
            step(weights, own, rng, scale)
    private = has & (has.sum(axis=0) == 1)
    before = [(weights.unscaled[mine].tobytes(), weights._norms[mine].tobytes()) for (weights, _), mine in zip(made, private, strict=True)]
    total = summed(made, 4.0)
    assert all(changes.take(total, 4.0) for _, changes in made)
    after = [(weights.unscaled[mine].tobytes(), weights._norms[mine].tobytes()) for (weights, _), mine in zip(made, private, strict=True)]
    assert before == after


def test_a_feature_of_several_ranks_that_one_alone_has_seen_keeps_the_progress_of_a_rank_alone():
    has = np.ones((2, FEATURES), bool)
    made, _ = ranks_of(has)
    alone = new_weights(FEATURES, descent(), np.float64)
    gradient = SparseStream([7], np.array([2.0]), FEATURES)
    for weights in (made[0][0], alone):
        weights.descend(gradient, 0.3)
    total = summed(made)
    for _, changes in made:
        changes.take(total, 1.0)
    for weights, _ in made:
        np.testing.assert_allclose(weights.to_array(), alone.to_array(), rtol=1e-12)
        np.testing.assert_allclose(weights._norms, alone._norms, rtol=1e-12)


def test_what_every_rank_finds_by_itself_is_not_added_up():
    has = np.ones((4, FEATURES), bool)
    made, _ = ranks_of(has)
    for weights, _ in made:  # a quadratic loss, least at 1
        for _ in range(200):
            weights.descend(SparseStream([7], weights.to_array()[[7]] - 1, FEATURES), 0.3)
    total = summed(made)
    for weights, changes in made:
        changes.take(total, 1.0)
        assert 0.5 < weights.to_array()[7] <= 1 + 1e-9


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_is_told(bad):
    made, _ = ranks_of(np.ones((2, FEATURES), bool))
    total = summed(made)
    total[3] = bad
    assert not any(changes.take(total, 1.0) for _, changes in made)


def test_norms_of_any_size_are_summed_in_their_unit():
    for size in (1e-30, 1e30):
        weights = [new_weights(2, Descent(update="ftrl"), np.float32) for _ in range(2)]
        slots = np.uint32([0, 1])
        changes = [LocalChanges(each, slots, slots, np.int32([2, 2]), 2) for each in weights]
        for each in weights:
            each.descend(SparseStream([0], np.float32([size]), 2), 0.5)
        unit = 2.0 ** np.frexp(max(each.largest() for each in changes))[1]
        total = sum(each.moves(unit) for each in changes)
        assert all(each.take(total, unit) for each in changes)
        np.testing.assert_allclose([each._norms[0] for each in weights], size * 2**0.5, rtol=1e-6)
        assert all(-1 < each.to_array()[0] < -0.5 for each in weights)
