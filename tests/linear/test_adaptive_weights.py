"""Adaptive weights: equal to FTRL-Proximal in dense float64 arithmetic, and changed only where gradients have entries."""

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

import sparseallreduce as sar
from sparseallreduce.errors import DivergenceError
from sparseallreduce.linear import MODELS, Constant, Options, SparseStrategy, Trainer
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.weights import AdaptiveWeights, Descent, Weights, new_weights
from sparseallreduce.runtime.threads import Threads

PENALTIES = [(0.0, 0.0), (0.03, 0.0), (0.0, 0.02), (0.004, 0.01)]


def ftrl(l2=0.0, l1=0.0, intercept=False, beta=0.0):
    return Descent(l2=l2, l1=l1, intercept=intercept, update="ftrl", beta=beta)


def in_dense_arithmetic(descent, gradients, rates, start=None):
    """FTRL-Proximal as the papers write it: weights from the sums ``z`` of gradients and of what they have held."""
    size = gradients.shape[1]
    weights = np.zeros(size) if start is None else np.array(start, float)
    z, norms, spent = np.zeros(size), np.zeros(size), 0.0
    penalised = np.arange(size) < size - descent.intercept
    for gradient, rate in zip(gradients.astype(float), rates, strict=True):
        before, norms = norms, np.sqrt(norms**2 + gradient**2)
        z += rate * gradient - (norms - before + descent.beta * ((before == 0) & (norms > 0))) * weights
        spent += rate
        touched = norms > 0
        l1, l2 = spent * descent.l1 * penalised, spent * descent.l2 * penalised
        drawn = np.sign(z) * np.maximum(np.abs(z) - l1, 0)
        weights = np.where(touched, -drawn / np.where(touched, norms + descent.beta + l2, 1), weights)
    return weights


def random_gradients(steps, size, density, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    often = rng.random(size) ** 3  # some features nearly always, some hardly ever
    present = rng.random((steps, size)) < density * often / often.mean()
    return np.where(present, rng.standard_normal((steps, size)), 0).astype(dtype)


def stream_of(gradient, dense=False):
    return sar.SparseStream.from_dense(gradient, switch_density=0.0 if dense else None)


@pytest.mark.parametrize("l1,l2", PENALTIES)
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize("beta", [0.0, 1.5])
def test_weights_are_those_of_the_papers(l1, l2, intercept, dense, falling, beta):
    gradients = random_gradients(300, 30, 0.08)
    rates = 0.3 / (1 + np.arange(300) / 100) if falling else np.full(300, 0.2)
    descent = ftrl(l2, l1, intercept, beta)
    weights = new_weights(30, descent, np.float64)
    assert isinstance(weights, AdaptiveWeights)
    features = 30 - intercept
    dataset = Dataset.from_scipy(scipy.sparse.csr_array(np.eye(features)), np.ones(features))
    dataset = replace(dataset, values=dataset.values.astype(np.float64))
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        weights.descend(stream_of(gradient, dense), rate)
        if step in (1, 150, 300):
            expected = in_dense_arithmetic(descent, gradients[:step], rates[:step])
            np.testing.assert_allclose(weights.to_array(), expected, rtol=1e-9, atol=1e-11)
            np.testing.assert_allclose(weights.at(np.arange(30)), expected, rtol=1e-9, atol=1e-11)
            some = np.array([0, 3, 7, features - 1], np.uint32)
            np.testing.assert_allclose(weights._gathered(some), expected[some], rtol=1e-9, atol=1e-11)
            scores = expected[:features] + (expected[-1] if intercept else 0.0)
            np.testing.assert_allclose(weights.scores(dataset, np.arange(features)), scores, rtol=1e-9, atol=1e-11)
            np.testing.assert_allclose(weights.final_scores(dataset), scores, rtol=1e-9, atol=1e-11)
    if l1:
        assert (expected[:features] == 0).sum() < features, "nothing is left to compare"
        assert ((weights.to_array()[:features] == 0) & gradients[:, :features].any(axis=0)).any(), "L1 has put no weight to zero"
    size = l2 / 2 * expected[:features] @ expected[:features] + l1 * np.abs(expected[:features]).sum()
    assert weights.penalty() == pytest.approx(size)


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**16),
    size=st.integers(1, 40),
    steps=st.integers(1, 12),
    l1=st.sampled_from([0.0, 0.01, 5.0]),
    l2=st.sampled_from([0.0, 0.1, 100.0]),
    intercept=st.booleans(),
    dtype=st.sampled_from([np.float32, np.float64]),
    threads=st.integers(1, 3),
    scale=st.sampled_from([1e-30, 1.0, 1e18]),
    beta=st.sampled_from([0.0, 0.3, 20.0]),
)
def test_any_steps_from_any_start_are_those_of_the_papers(seed, size, steps, l1, l2, intercept, dtype, threads, scale, beta):
    size += intercept
    rng = np.random.default_rng(seed)
    gradients = (random_gradients(steps, size, 0.4, seed) * scale).astype(dtype)
    rates, start = rng.random(steps), rng.standard_normal(size).astype(dtype)
    descent = ftrl(l2 * scale, l1 * scale, intercept, beta * scale)
    weights = new_weights(size, descent, dtype, Threads(threads))
    weights.assign(start)
    np.testing.assert_array_equal(weights.to_array(), start)
    for gradient, rate in zip(gradients, rates, strict=True):
        weights.descend(stream_of(gradient, dense=bool(rng.integers(2))), float(rate))
    expected = in_dense_arithmetic(descent, gradients, rates, start)
    close = {"rtol": 2e-5, "atol": 2e-5} if dtype == np.float32 else {"rtol": 1e-9, "atol": 1e-12}
    np.testing.assert_allclose(weights.to_array(), expected, **close)
    untouched = ~gradients.any(axis=0)
    np.testing.assert_array_equal(weights.to_array()[untouched], start[untouched])


@pytest.mark.parametrize("l1,l2", PENALTIES[:1])
def test_the_units_of_the_loss_do_not_matter(l1, l2):
    gradients = random_gradients(50, 20, 0.3, dtype=np.float32)
    ends = []
    for factor in (1.0, 2.0**-70, 2.0**60):
        weights = new_weights(20, ftrl(l2, l1))
        for gradient in gradients:
            weights.descend(stream_of(gradient * np.float32(factor)), 0.1)
        ends.append(weights.to_array())
    assert ends[0].any()
    np.testing.assert_array_equal(ends[0], ends[1])
    np.testing.assert_array_equal(ends[0], ends[2])


@pytest.mark.parametrize("l1,l2", PENALTIES[:3])
def test_loss_and_penalties_together_come_to_their_least(l1, l2):
    """Of the mean of ``(w - b)**2 / 2`` the least with penalties is at ``soft(b, l1) / (1 + l2)``."""
    goals = np.array([2.0, -1.0, 0.02, 0.5])
    weights = new_weights(4, ftrl(l2, l1), np.float64)
    for _ in range(4000):
        weights.descend(stream_of(weights.to_array() - goals, dense=True), 0.5)
    least = np.sign(goals) * np.maximum(np.abs(goals) - l1, 0) / (1 + l2)
    np.testing.assert_allclose(weights.to_array(), least, atol=2e-3)


@pytest.mark.parametrize("l1,l2", PENALTIES)
def test_dense_and_sparse_gradients_lead_to_the_same_bits(l1, l2):
    ends = []
    for dense in (False, True):
        weights = new_weights(50, ftrl(l2, l1, True))
        for gradient in random_gradients(60, 50, 0.3, dtype=np.float32):
            weights.descend(stream_of(gradient, dense), 0.1)
        ends.append(weights.to_array())
    np.testing.assert_array_equal(*ends)


@pytest.mark.parametrize("size", [50, 5000])
@pytest.mark.parametrize("l1,l2", PENALTIES[::3])
@pytest.mark.parametrize("dense", [False, True])
def test_threads_change_no_bit(size, l1, l2, dense):
    gradients = random_gradients(30, size, 0.5, dtype=np.float32)
    dataset = Dataset.from_scipy(scipy.sparse.random_array((20, size - 1), density=0.2, format="csr", dtype=np.float32, rng=0), np.ones(20))
    ends = []
    for threads in (1, 3):
        weights = new_weights(size, ftrl(l2, l1, True), threads=Threads(threads))
        for gradient in gradients:
            weights.descend(stream_of(gradient, dense), 0.1)
        ends.append(np.concatenate([weights.to_array(), weights.scores(dataset, np.arange(20))]))
    np.testing.assert_array_equal(*ends)


@pytest.mark.parametrize("dense", [False, True])
def test_ranks_that_share_a_replica_change_a_part_each(dense):
    gradients = random_gradients(20, 9000, 0.6, dtype=np.float32)
    alone = new_weights(9000, ftrl(0.01, 0.001, True))
    ranks = [new_weights(9000, ftrl(0.01, 0.001, True), threads=Threads(threads)) for threads in (1, 2)]
    for first, rank in zip((0, 1), ranks, strict=True):
        rank._first, rank._parts = first, 3
        rank.unscaled, rank._norms = ranks[0].unscaled, ranks[0]._norms
    for gradient in gradients:
        for weights in (alone, *ranks):
            weights.descend(stream_of(gradient, dense), 0.1)
    for rank in ranks:
        np.testing.assert_array_equal(rank.to_array(), alone.to_array())


def test_all_that_changes_is_shared():
    weights = new_weights(5, ftrl())
    before = {name: getattr(weights, name).copy() for name in weights._shared_names()}
    weights.descend(stream_of(np.float32([1, 0, 0, 2, 3])), 0.1)
    assert all((getattr(weights, name) != value).any() for name, value in before.items())
    blocks = [getattr(weights, name) for name in weights._blocks()]
    arrays = [value for value in vars(weights).values() if isinstance(value, np.ndarray)]
    assert all(any(np.shares_memory(array, block) for block in blocks) for array in arrays)


@pytest.mark.parametrize("columns", [None, 3])
def test_weights_go_on_in_the_memory_of_a_replica(columns):
    descent = Descent(update="ftrl", columns=columns)
    weights, alone = (new_weights(6, descent) for _ in range(2))
    gradient = stream_of(np.float32(range(6 * (columns or 1))).reshape((6,) if columns is None else (6, columns)))
    for each in (weights, alone):
        each.descend(gradient, 0.1)
    for name in weights._blocks():
        weights._keep(name, getattr(weights, name).copy())
    for each in (weights, alone):
        each.descend(gradient, 0.1)
    for name, value in alone.state().items():
        np.testing.assert_array_equal(weights.state()[name], value)


@pytest.mark.parametrize("l1,l2", PENALTIES)
def test_a_restored_state_goes_on_to_the_same_bits(l1, l2):
    descent = ftrl(l2, l1, True)
    whole, again = new_weights(40, descent), new_weights(40, descent)
    for step, gradient in enumerate(random_gradients(90, 40, 0.1, dtype=np.float32)):
        whole.descend(stream_of(gradient), 0.2)
        if step == 40:
            state = whole.state()
            arrays = {name: value.copy() for name, value in state.items() if isinstance(value, np.ndarray)}
            numbers = {name: value for name, value in state.items() if name not in arrays}
            again.restore(arrays | json.loads(json.dumps(numbers)))  # as from a checkpoint
        if step > 40:
            again.descend(stream_of(gradient), 0.2)
    np.testing.assert_array_equal(again.to_array(), whole.to_array())


@pytest.mark.parametrize("l1,l2", PENALTIES)
@pytest.mark.parametrize("stretch", [1.0, 4.0])
def test_a_run_goes_on_from_the_memory_of_another(l1, l2, stretch):
    """As estimators go on, with weights rounded by nothing but their dtype; and samples that have been divided by ``stretch`` since."""
    descent = ftrl(l2, l1, True)
    gradients = random_gradients(80, 30, 0.2)
    whole, first, second = (new_weights(30, descent, np.float64) for _ in range(3))
    factors = np.full(29, stretch)
    for gradient in gradients[:40]:
        whole.descend(stream_of(gradient), 0.2)
        first.descend(stream_of(gradient), 0.2)
    second.assign(np.append(first.to_array()[:-1] * factors, first.intercept))
    second.remember(first.memory(), factors)
    kept = second.to_array()
    if stretch == 1.0:
        np.testing.assert_allclose(kept, whole.to_array(), rtol=1e-12)
        for gradient in gradients[40:]:
            whole.descend(stream_of(gradient), 0.2)
            second.descend(stream_of(gradient), 0.2)
        np.testing.assert_allclose(second.to_array(), whole.to_array(), rtol=1e-12)
    elif not (l1 or l2):
        np.testing.assert_allclose(kept[:-1], whole.to_array()[:-1] * stretch, rtol=1e-12)
        gradient = gradients[40].copy()
        gradient[-1] = 0
        whole.descend(stream_of(gradient), 0.2)
        second.descend(stream_of(gradient / stretch), 0.2)
        moved, expected = second.to_array() - kept, whole.to_array() - kept / np.append(factors, 1)
        np.testing.assert_allclose(moved[:-1], expected[:-1], rtol=1e-9, atol=1e-15)


def test_a_memory_is_a_copy():
    weights = new_weights(3, ftrl(0.1))
    weights.descend(stream_of(np.float32([1, 2, 3])), 0.1)
    memory = {name: np.copy(value) for name, value in weights.memory().items()}
    kept = weights.memory()
    weights.descend(stream_of(np.float32([1, 2, 3])), 0.1)
    for name, value in memory.items():
        np.testing.assert_array_equal(kept[name], value)


def test_assigned_weights_begin_anew():
    gradients = random_gradients(10, 8, 0.5)
    used, fresh = new_weights(8, ftrl(0.1, 0.01, True), np.float64), new_weights(8, ftrl(0.1, 0.01, True), np.float64)
    for gradient in gradients:
        used.descend(stream_of(gradient), 0.3)
    for weights in (used, fresh):
        weights.assign(np.arange(8.0))
        for gradient in gradients:
            weights.descend(stream_of(gradient), 0.3)
    np.testing.assert_array_equal(used.to_array(), fresh.to_array())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [1, 2])  # a feature and the intercept
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("l1,l2", PENALTIES[::3])
def test_a_weight_that_is_no_number_is_named_with_its_step_and_rate(bad, place, dense, l1, l2):
    weights = new_weights(3, ftrl(l2, l1, True))
    weights.descend(stream_of(np.float32([0, 1, 1])), 0.5)
    gradient = np.float32([1, 0, 0])
    gradient[place] = bad
    with np.errstate(all="ignore"), pytest.raises(DivergenceError, match=r"after step 2: lower the learning rate \(0\.5 there\)"):
        weights.descend(stream_of(gradient, dense), 0.5)


def test_a_weight_that_is_no_number_stays_one_under_l1():
    weights = new_weights(3, ftrl(l1=0.1), np.float64)
    weights.assign(np.array([1.0, np.nan, 2.0]))
    weights.descend(stream_of(np.array([0.5, 0.0, 0.0])), 0.1)
    assert np.isnan(weights.to_array()).tolist() == [False, True, False]
    with pytest.raises(DivergenceError):
        weights.descend(stream_of(np.array([0.0, 1.0, 0.0])), 0.1)


def test_gradients_near_the_limits_of_the_dtype_are_nothing_special():
    weights = new_weights(2, ftrl())
    for _ in range(4):
        weights.descend(stream_of(np.float32([1e-44, 1e38])), 0.5)
    np.testing.assert_allclose(weights.to_array(), -0.5 * (1 + 2**-0.5 + 3**-0.5 + 0.5), rtol=0.2)


@pytest.mark.parametrize("wrong", [{"momentum": 0.9}, {"average_from": 0}, {"momentum": 0.5, "nesterov": True}])
def test_what_means_nothing_with_adaptive_steps_is_refused(wrong):
    with pytest.raises(ValueError, match="for the update sgd, not for ftrl"):
        Descent(update="ftrl", **wrong)
    with pytest.raises(ValueError, match="update must be one of sgd, ftrl, arow"):
        Descent(update="adam")


@pytest.mark.parametrize("update", ["sgd", "arow"])
def test_beta_is_of_ftrl(update):
    with pytest.raises(ValueError, match=f"beta is for the update ftrl, not for {update}"):
        Descent(update=update, beta=0.1)
    with pytest.raises(ValueError, match="beta must be at least 0"):
        Descent(update="ftrl", beta=-1.0)


@pytest.mark.parametrize("columns", [None, 3])
def test_with_a_large_beta_all_weights_and_intercepts_go_by_one_rate(columns):
    rng, width = np.random.default_rng(2), columns or 1
    adaptive = new_weights(20, Descent(update="ftrl", intercept=True, beta=1e6, columns=columns), np.float64)
    plain = new_weights(20, Descent(intercept=True, columns=columns), np.float64)
    for _ in range(30):
        gradient = rng.standard_normal((20, width)) * (rng.random((20, 1)) < 0.4)
        stream = sar.SparseStream.from_dense(gradient if columns else gradient[:, 0])
        adaptive.descend(stream, 0.1 * 1e6)
        plain.descend(stream, 0.1)
    np.testing.assert_allclose(adaptive.to_array(), plain.to_array(), rtol=1e-4, atol=1e-6)


def test_plain_steps_stay_plain():
    assert type(new_weights(3, Descent(0.1))) is Weights


def test_warming_up_leaves_the_weights():
    weights = new_weights(4, ftrl(0.1, 0.1, True))
    weights.descend(stream_of(np.float32([1, 0, 2, 3])), 0.5)
    before = weights.to_array()
    weights.warm_up(Dataset.from_scipy(scipy.sparse.csr_array(np.eye(3, dtype=np.float32)), np.ones(3)))
    np.testing.assert_array_equal(weights.to_array(), before)


@pytest.mark.parametrize("l1,l2", PENALTIES)
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("model", ["logistic", "svm"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_rank_alone_changes_weights_by_rows_to_the_bits_of_a_stream(l1, l2, intercept, dtype, model, beta):
    rng = np.random.default_rng(4)
    rows = scipy.sparse.random_array((150, 400), density=0.1, format="csr", dtype=np.float64, rng=5)
    rows.data = np.where(rng.random(rows.nnz) < 0.5, 1.0, rng.standard_normal(rows.nnz))
    labels = np.where(rng.random(150) < 0.5, 1.0, -1.0)
    dataset = Dataset.from_scipy(scipy.sparse.csr_array(rows), labels)
    dataset = replace(dataset, values=dataset.values.astype(dtype))
    ends = []
    for threads in (1, 2):  # of which two take the stream
        strategy = SparseStrategy(dataset, sar.SERIAL, ftrl(l2, l1, intercept, beta), threads=threads)
        assert (strategy._own_weights is not None) == (threads == 1 and not (l1 or l2))
        epochs = list(Trainer(MODELS[model](), strategy, Constant(0.1), Options(3, 16)).run(dataset))
        ends.append((strategy.weights.to_array(), [epoch.loss for epoch in epochs]))
    np.testing.assert_array_equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_rows_that_are_no_numbers_are_told():
    dataset = Dataset.from_scipy(scipy.sparse.csr_array(np.float32([[1.0, np.inf, 0.0]])), np.ones(1))
    weights = new_weights(4, ftrl(intercept=True))
    with np.errstate(all="ignore"), pytest.raises(DivergenceError, match="after step 1"):
        weights.descend_rows(dataset, np.array([0]), np.float32([1.0]), 0.5)


def numbered_strategy(seed=0, features=60):
    rows = scipy.sparse.random_array((40, features), density=0.3, format="csr", dtype=np.float32, rng=seed)
    return SparseStrategy(Dataset.from_scipy(rows, np.ones(40)), sar.SERIAL, ftrl(beta=0.1))


def test_norms_are_where_they_belong_whenever_they_are_read():
    strategy, other = numbered_strategy(), numbered_strategy()
    batches = [np.arange(first, first + 8) for first in range(0, 40, 8)]
    for step, rows in enumerate(batches):
        coefficients = np.linspace(-1, 1, 8, dtype=np.float32)
        other.weights.descend_rows(other.dataset, rows, coefficients, 0.1)
        scores = strategy.scores(rows)  # has the norms elsewhere
        np.testing.assert_array_equal(scores, strategy.weights.scores(strategy.dataset, rows))
        strategy.scores(batches[step - 1])
        if step % 2:
            strategy.scores(rows)
        strategy.step(rows, coefficients, 0.1)
        strategy.scores(rows)
        for name, value in other.state().items():
            np.testing.assert_array_equal(strategy.state()[name], value)


def test_changes_are_taken_back_after_scores_without_a_step():
    strategy, rows = numbered_strategy(), np.arange(16)
    strategy.scores(rows)
    strategy.step(rows, np.ones(16, np.float32), 0.1)
    before = strategy.state()
    strategy.scores(rows)
    strategy.weights.begin_journal()
    strategy.scores(rows)
    strategy.step(rows, np.ones(16, np.float32), 0.1)
    strategy.scores(rows)
    strategy.weights.put_back()
    for name, value in before.items():
        np.testing.assert_array_equal(strategy.state()[name], value)


@pytest.mark.parametrize("norm", [-np.float32(np.nan), -1.0, -0.0, np.inf])
def test_norms_that_are_none_lead_nowhere(norm):
    """As a file may hold them that was tampered with: a sign tells numbers of features from norms."""
    strategy, rows = numbered_strategy(), np.arange(16)
    room = np.full(1000, 7, np.float32)
    strategy.weights._keep("_pairs", room[400:520])
    room[400:520:2], room[401:520:2] = 0, norm
    strategy.scores(rows)
    with contextlib.suppress(DivergenceError):
        strategy.step(rows, np.ones(16, np.float32), 0.1)
    assert (room[:400] == 7).all() and (room[520:] == 7).all()
    assert not np.isfinite(norm) or np.isfinite(room).all()
