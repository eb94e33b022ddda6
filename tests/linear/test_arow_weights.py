"""AROW: the paper's algorithm for single samples, the same weights however ranks, threads and forms share a batch, and what it refuses."""

import json
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse

import sparseallreduce as sar
from sparseallreduce.errors import AlgorithmError, DivergenceError
from sparseallreduce.linear import MODELS, STRATEGIES, Constant, DenseStrategy, Hinge, Options, SparseStrategy, SquaredHinge, Trainer
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.feature_scaling import rate_unit
from sparseallreduce.linear.weights import ArowWeights, Descent, batch_sums, new_weights, with_sums
from sparseallreduce.runtime.threads import Threads

PENALTIES = [(0.0, 0.0), (0.03, 0.0), (0.0, 0.02), (0.004, 0.01)]


def arow(l2=0.0, l1=0.0, intercept=False):
    return Descent(l2=l2, l1=l1, intercept=intercept, update="arow")


def samples(rows=120, features=60, seed=3, dtype=np.float64):
    rng = np.random.default_rng(seed)
    entries = scipy.sparse.random_array((rows, features), density=0.12, format="csr", dtype=np.float64, rng=rng)
    entries.data = rng.standard_normal(entries.nnz)
    labels = np.where(entries @ rng.standard_normal(features) + 0.3 * rng.standard_normal(rows) > 0, 1.0, -1.0)
    dataset = Dataset.from_scipy(scipy.sparse.csr_array(entries), labels)
    return replace(dataset, values=dataset.values.astype(dtype))


def rows_of(dataset):
    entries = scipy.sparse.csr_array((dataset.values, dataset.indices, dataset.indptr), shape=(dataset.rows, dataset.features))
    return entries.toarray().astype(np.float64)


def as_the_paper_has_it(rows, labels, order, r):
    """Figure 1 of the paper with a diagonal covariance: the inverse covariance of equation 8 keeps its diagonal."""
    mu, sigma = np.zeros(rows.shape[1]), np.ones(rows.shape[1])
    for i in order:
        x, y = rows[i], labels[i]
        margin, confidence = mu @ x, x @ (sigma * x)
        if margin * y < 1:
            beta = 1 / (confidence + r)
            alpha = max(0.0, 1 - y * margin) * beta
            mu = mu + alpha * sigma * y * x
            sigma = 1 / (1 / sigma + x * x / r)
    return mu, sigma


def in_dense_arithmetic(dataset, batches, r, descent):
    """The steps of the docstring, with weights from natural parameters ``z = A v``."""
    bias = np.ones((dataset.rows, int(descent.intercept)))
    rows = np.hstack([rows_of(dataset), bias])
    penalised = np.arange(rows.shape[1]) < dataset.features
    w, z, precisions, touched, seen = (np.zeros(rows.shape[1]), np.zeros(rows.shape[1]), np.ones(rows.shape[1]), penalised < 0, 0)
    for batch in batches:
        x, y = rows[batch], dataset.labels[batch]
        violations = np.maximum(0, 1 - y * (x @ w))
        gradient, squares = -(violations * y) @ x, violations @ violations
        seen += len(batch)
        if squares > 0:
            moved = w - gradient / precisions / (np.sum(gradient**2 / precisions) / squares + r)
            after = precisions + gradient**2 * np.count_nonzero(violations) / squares / r
            z += after * moved - precisions * w
            precisions, touched = after, touched | (gradient != 0)
        drawn = np.sign(z) * np.maximum(np.abs(z) - descent.l1 * seen / r * penalised, 0)
        w = np.where(touched, drawn / (precisions + descent.l2 * seen / r * penalised), z)
    return w, precisions


def order_of(dataset, batch, epochs=1, seed=0):
    """The rows of the batches that a trainer takes, as it takes them."""
    taken = []

    class Watching(SparseStrategy):
        def scores(self, rows):
            taken.append(rows.copy())
            return super().scores(rows)

    strategy = Watching(dataset, sar.SERIAL, arow())
    list(Trainer(Hinge(), strategy, Constant(0.1), Options(epochs, batch, seed, evaluate_every=0)).run())
    return [rows for rows in taken if len(rows)]


@pytest.mark.parametrize("kind", [SparseStrategy, DenseStrategy])
@pytest.mark.parametrize("loss", [Hinge, SquaredHinge])
@pytest.mark.parametrize("r", [0.1, 1.0, 30.0])
def test_sample_by_sample_it_is_the_papers_algorithm(kind, loss, r):
    dataset = samples()
    order = np.concatenate(order_of(dataset, 1, epochs=3))
    assert len(order) == 3 * dataset.rows
    strategy = kind(dataset, sar.SERIAL, arow())
    list(Trainer(loss(), strategy, Constant(1 / r), Options(3, 1)).run())
    mu, sigma = as_the_paper_has_it(rows_of(dataset), dataset.labels, order, r)
    assert isinstance(strategy.weights, ArowWeights)
    np.testing.assert_allclose(strategy.weights.to_array(), mu, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(1 / np.maximum(strategy.weights._norms, 1), sigma, rtol=1e-9)


@pytest.mark.parametrize("l1,l2", PENALTIES)
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", [SparseStrategy, DenseStrategy])
def test_batches_are_those_of_the_docstring(l1, l2, intercept, dtype, kind):
    dataset, descent, r = samples(dtype=dtype), arow(l2, l1, intercept), 2.0
    strategy = kind(dataset, sar.SERIAL, descent)
    list(Trainer(Hinge(), strategy, Constant(1 / r), Options(4, 16)).run(dataset))
    expected, precisions = in_dense_arithmetic(dataset, order_of(dataset, 16, epochs=4), r, descent)
    close = {"rtol": 2e-4, "atol": 2e-5} if dtype == np.float32 else {"rtol": 1e-8, "atol": 1e-11}
    np.testing.assert_allclose(strategy.weights.to_array(), expected, **close)
    np.testing.assert_allclose(np.maximum(strategy.weights._norms, 1), precisions[: dataset.features], **close)
    if l1:
        zeros = (expected[: dataset.features] == 0) & (precisions[: dataset.features] > 1)
        assert zeros.any(), "L1 has put no weight to zero"


def gradients_of(dataset, batch=10, steps=40, seed=1, intercept=False):
    """Gradients with sums, of violations that no weights have led to."""
    rng = np.random.default_rng(seed)
    rows = np.hstack([rows_of(dataset), np.ones((dataset.rows, int(intercept)))])
    for _ in range(steps):
        chosen = rng.integers(0, dataset.rows, batch)
        coefficients = (np.maximum(0, rng.standard_normal(batch)) * -dataset.labels[chosen]).astype(np.float32)
        yield (coefficients @ rows[chosen]).astype(np.float32), batch_sums(coefficients, None)


def stream_of(gradient, sums, dense=False):
    return with_sums(sar.SparseStream.from_dense(gradient, switch_density=0.0 if dense else None), sums)


def descended(weights, rate=0.3, dense=False, **given):
    dataset = samples()
    for gradient, sums in gradients_of(dataset, intercept=weights.descent.intercept, **given):
        weights.descend(stream_of(gradient, sums, dense), rate)
    return weights.to_array()


@pytest.mark.parametrize("l1,l2", PENALTIES)
def test_forms_and_threads_change_no_bit(l1, l2):
    ends = [
        descended(new_weights(61, arow(l2, l1, True), np.float32, Threads(threads)), dense=dense)
        for threads in (1, 3)
        for dense in (False, True)
    ]
    assert ends[0].any()
    for end in ends[1:]:
        np.testing.assert_array_equal(end, ends[0])


def test_nothing_changes_where_the_gradient_has_no_entry_or_no_sample_violates():
    weights = new_weights(4, arow(0.1, 0.01), np.float32)
    weights.assign(np.float32([1, 2, 3, 4]))
    weights.descend(stream_of(np.float32([0, 5, 0, 0]), np.float32([1, 1, 3])), 0.5)
    np.testing.assert_array_equal(weights.to_array()[[0, 2, 3]], np.float32([1, 3, 4]))
    np.testing.assert_array_equal(weights._norms != 0, [False, True, False, False])
    kept = weights.unscaled.copy(), weights._norms.copy()
    weights.descend(stream_of(np.zeros(4, np.float32), np.float32([0, 0, 3])), 0.5)
    np.testing.assert_array_equal((weights.unscaled, weights._norms), kept)


def test_a_rate_of_zero_moves_nothing():
    weights = new_weights(60, arow(), np.float32)
    np.testing.assert_array_equal(descended(weights, rate=0.0), np.zeros(60))


def test_units_of_the_features_do_not_matter():
    ends = []
    for factor in (1.0, 2.0**-12, 2.0**9):
        dataset = samples()
        dataset = replace(dataset, values=dataset.values * factor)
        unit = rate_unit("arow", np.array([dataset.rows, np.square(dataset.values).sum(), 0, dataset.rows]), False, False)
        strategy = SparseStrategy(dataset, sar.SERIAL, arow())
        list(Trainer(Hinge(), strategy, Constant(1.0), Options(3, 8), rate_unit=unit).run())
        ends.append(strategy.weights.to_array() * factor)
    # The unit has six digits.
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(ends[2], ends[0], rtol=1e-3, atol=1e-5)


def test_samples_that_count_twice_are_two_samples():
    dataset = samples()
    twice = np.concatenate([np.arange(dataset.rows), np.arange(dataset.rows)])
    doubled = Dataset.from_scipy(scipy.sparse.csr_array(rows_of(dataset)[twice]), dataset.labels[twice])
    doubled = replace(doubled, values=doubled.values.astype(np.float64))
    ends = []
    for given, counts in ((doubled, None), (dataset, np.full(dataset.rows, 2.0))):
        strategy = SparseStrategy(replace(given, weights=counts), sar.SERIAL, arow(0.01))
        for _ in range(5):
            rows = np.arange(given.rows)
            slopes = Hinge().violation(strategy.scores(rows), given.labels)
            strategy.step(rows, slopes if counts is None else slopes * counts, 0.2)
        ends.append(strategy.weights.to_array())
    # The features of from_scipy are rounded to float32.
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("l1,l2", PENALTIES[1:])
def test_violations_and_penalties_together_come_to_their_least(l1, l2):
    dataset = samples(40, 12)
    rows, y = rows_of(dataset), dataset.labels
    strategy = SparseStrategy(dataset, sar.SERIAL, arow(l2, l1))
    every = np.arange(dataset.rows)
    for _ in range(6000):
        strategy.step(every, Hinge().violation(strategy.scores(every), y), 1.0)
    w = strategy.weights.to_array()
    slopes = -(np.maximum(0, 1 - y * (rows @ w)) * y) @ rows / dataset.rows + l2 * w
    left = np.where(np.abs(w) > 1e-6, np.abs(slopes + l1 * np.sign(w)), np.maximum(np.abs(slopes) - l1, 0))
    assert left.max() < 2e-3


@pytest.mark.parametrize("dense", [False, True])
def test_ranks_that_share_a_replica_change_a_part_each(dense):
    rng = np.random.default_rng(0)
    alone = new_weights(9000, arow(0.01, 0.001, True))
    ranks = [new_weights(9000, arow(0.01, 0.001, True), threads=Threads(threads)) for threads in (1, 2)]
    for first, rank in zip((0, 1), ranks, strict=True):
        rank._first, rank._parts = first, 3
        rank.unscaled, rank._norms = ranks[0].unscaled, ranks[0]._norms
    for _ in range(20):
        gradient = np.where(rng.random(9000) < 0.6, rng.standard_normal(9000), 0).astype(np.float32)
        stream = stream_of(gradient, np.float32([5, 3, 8]), dense)
        alone.descend(stream, 0.1)
        # Both ranks add up before one of them changes anything, which they meet for.
        spreads = [rank._spread(*rank._taken_apart(stream)[:2], 0.0) for rank in ranks]
        assert spreads[0] == spreads[1]
        for rank in ranks:
            rank._spread = lambda *given, spread=spreads[0] + float(gradient[-1]) ** 2 / (float(rank._intercept_norm) or 1.0): spread
            rank.descend(stream, 0.1)
            del rank._spread
    for rank in ranks:
        np.testing.assert_array_equal(rank.to_array(), alone.to_array())


def test_all_that_changes_is_shared():
    weights = new_weights(5, arow())
    before = {name: getattr(weights, name).copy() for name in weights._shared_names()}
    weights.descend(stream_of(np.float32([1, 0, 0, 2, 3]), np.float32([1, 1, 1])), 0.1)
    assert all((getattr(weights, name) != value).any() for name, value in before.items())
    arrays = [value for value in vars(weights).values() if isinstance(value, np.ndarray)]
    assert all(np.shares_memory(array, weights._pairs) for array in arrays)


@pytest.mark.parametrize("l1,l2", PENALTIES)
def test_a_restored_state_goes_on_to_the_same_bits(l1, l2):
    whole, again = (new_weights(61, arow(l2, l1, True)) for _ in range(2))
    for step, (gradient, sums) in enumerate(gradients_of(samples(), intercept=True)):
        whole.descend(stream_of(gradient, sums), 0.2)
        if step == 20:
            state = whole.state()
            arrays = {name: value.copy() for name, value in state.items() if isinstance(value, np.ndarray)}
            numbers = {name: value for name, value in state.items() if name not in arrays}
            again.restore(arrays | json.loads(json.dumps(numbers)))  # as from a checkpoint
        if step > 20:
            again.descend(stream_of(gradient, sums), 0.2)
    np.testing.assert_array_equal(again.to_array(), whole.to_array())


@pytest.mark.parametrize("l1,l2", PENALTIES)
def test_a_run_goes_on_from_the_memory_of_another(l1, l2):
    whole, first, second = (new_weights(61, arow(l2, l1, True), np.float64) for _ in range(3))
    for step, (gradient, sums) in enumerate(gradients_of(samples(), intercept=True)):
        if step == 20:
            second.assign(first.to_array())
            second.remember(first.memory())
        stream = stream_of(gradient.astype(np.float64), sums)
        whole.descend(stream, 0.2)
        (first if step < 20 else second).descend(stream, 0.2)
    np.testing.assert_allclose(second.to_array(), whole.to_array(), rtol=1e-9, atol=1e-12)


def test_what_weights_of_another_update_remember_is_no_precision():
    adaptive, precise = new_weights(3, Descent(update="ftrl")), new_weights(3, arow())
    adaptive.descend(sar.SparseStream.from_dense(np.float32([1, 2, 3])), 0.1)
    precise.descend(stream_of(np.float32([1, 2, 3]), np.float32([1, 1, 1])), 0.1)
    for new, old in ((new_weights(3, arow()), adaptive), (new_weights(3, Descent(update="ftrl")), precise)):
        new.remember(old.memory())
        assert not new._norms.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", range(1, 6))  # a feature, the intercept and the sums
@pytest.mark.parametrize("dense", [False, True])
def test_a_weight_that_is_no_number_is_named_with_its_step_and_rate(bad, place, dense):
    weights = new_weights(3, arow(0.1, 0.1, True))
    weights.descend(stream_of(np.float32([0, 1, 1]), np.float32([1, 1, 1])), 0.5)
    given = np.float32([1, 0, 0, 1, 1, 1])
    given[place] = bad
    with np.errstate(all="ignore"), pytest.raises(DivergenceError, match=r"after step 2: lower the learning rate \(0\.5 there\)"):
        weights.descend(stream_of(given[:3], given[3:], dense), 0.5)


def test_what_means_nothing_is_refused():
    for wrong in ({"momentum": 0.9}, {"average_from": 0}):
        with pytest.raises(ValueError, match="for the update sgd, not for arow"):
            Descent(update="arow", **wrong)
    with pytest.raises(ValueError, match="one score per sample, for two classes"):
        Descent(update="arow", columns=3)
    for name in ("logistic", "linear"):
        with pytest.raises(ValueError, match=f"arow is for the model svm, not for {name}"):
            Trainer(MODELS[name](), SparseStrategy(samples(), sar.SERIAL, arow()), Constant(0.1), Options(1, 8))


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in ("sparse", "dense")])
def test_strategies_whose_messages_have_no_place_for_sums_refuse_it(name):
    with pytest.raises(AlgorithmError, match=f"the strategy {name} (does not support the update arow|stores only weights)"):
        STRATEGIES[name](samples(), sar.SERIAL, arow())
