"""SGD: the order of samples, the gradient of a batch, and where training ends."""

import math
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.errors import AlgorithmError
from sparseallreduce.linear import (
    LOSSY,
    MODELS,
    STRATEGIES,
    BoldDriver,
    Checkpoints,
    Constant,
    Dataset,
    DenseStrategy,
    Descent,
    DivergenceError,
    InverseTime,
    LargeBatch,
    Options,
    SparseStrategy,
    Trainer,
    load,
    two_classes,
)
from sparseallreduce.linear.training.batches import batches
from sparseallreduce.linear.training.trainer import PHASES

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def problem(rows=60, features=30, seed=1):
    """Samples and labels -1 and +1 that a plane parts, but for some noise."""
    rng = np.random.default_rng(seed)
    matrix = np.where(rng.random((rows, features)) < 0.3, rng.standard_normal((rows, features)), 0).astype(np.float32)
    labels = np.where(matrix @ rng.standard_normal(features) + 0.1 * rng.standard_normal(rows) > 0, 1.0, -1.0)
    return matrix, labels


def parted(matrix, labels, ranks):
    """The data set of every rank, in blocks of different sizes."""
    bounds = [0, *sorted(np.random.default_rng(ranks).integers(0, len(labels) + 1, ranks - 1)), len(labels)]
    return [
        Dataset.from_scipy(scipy.sparse.csr_array(matrix[first:last]), labels[first:last], first_sample=first, total_samples=len(labels))
        for first, last in pairwise(bounds)
    ]


def plain_sgd(model, matrix, labels, batch_size, rate, l2, epochs, seed=0):
    """Thesis algorithm 1 on one rank, in dense float64."""
    weights = np.zeros(matrix.shape[1])
    for epoch in range(1, epochs + 1):
        for batch, _ in batches(parted(matrix, labels, 1)[0], batch_size, (seed, epoch)):
            derivatives = model.derivative(matrix[batch] @ weights, labels[batch])
            gradient = derivatives @ matrix[batch] / len(batch) + l2 * weights
            weights -= rate * gradient
    return weights


@given(total=st.integers(1, 60), size=st.integers(1, 20), ranks=st.integers(1, 7), epoch=st.integers(1, 3))
def test_the_batches_of_all_ranks_are_those_of_one(total, size, ranks, epoch):
    def numbers(dataset):
        return [(dataset.first_sample + rows, count) for rows, count in batches(dataset, size, (4, epoch))]

    def dataset(first, last):
        nothing = np.empty(0, np.uint32), np.empty(0, np.float32)
        return Dataset(np.zeros(last - first + 1, np.int64), *nothing, np.zeros(last - first), 1, first, total)

    bounds = [total * rank // ranks for rank in range(ranks + 1)]
    whole = numbers(dataset(0, total))
    parts = [numbers(dataset(first, last)) for first, last in pairwise(bounds)]

    assert sorted(np.concatenate([rows for rows, _ in whole])) == list(range(total))
    assert [count for _, count in whole] == [len(rows) for rows, _ in whole]
    for batch, (rows, count) in enumerate(whole):
        assert sorted(np.concatenate([part[batch][0] for part in parts])) == sorted(rows)
        assert {part[batch][1] for part in parts} == {count}


def test_epochs_and_seeds_shuffle_differently():
    dataset = parted(*problem(), 1)[0]
    orders = {tuple(np.concatenate([rows for rows, _ in batches(dataset, 7, seed)])) for seed in [(0, 1), (0, 2), (1, 1), (1, 2)]}
    assert len(orders) == 4


def shuffled(total, size, seed):
    """The batch of every sample."""
    nothing = np.empty(0, np.uint32), np.empty(0, np.float32)
    dealt = [rows for rows, _ in batches(Dataset(np.zeros(total + 1, np.int64), *nothing, np.zeros(total), 1), size, (seed, 1))]
    found = np.empty(total, np.int64)
    found[np.concatenate(dealt)] = np.repeat(np.arange(len(dealt)), list(map(len, dealt)))
    return found


@pytest.mark.parametrize("total", [2, 3, 4])
def test_every_order_of_few_samples_is_as_likely(total):
    counts = Counter(tuple(shuffled(total, 1, seed)) for seed in range(2400))
    expected = 2400 / math.factorial(total)
    assert len(counts) == math.factorial(total)
    # Five standard deviations of the chi-squared statistic.
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < len(counts) + 5 * math.sqrt(2 * len(counts))


@pytest.mark.parametrize("total", [1_000, 70_000])  # on both sides of where fewer rounds do
def test_whether_samples_share_a_batch_does_not_depend_on_how_far_apart_they_stand(total):
    size, seeds, side = 50, 50, math.isqrt(total)
    for lag in (1, 2, side, side + 1, 2 * side):
        together = sum(int(np.sum((batch := shuffled(total, size, seed))[lag:] == batch[:-lag])) for seed in range(seeds))
        expected = seeds * (total - lag) * (size - 1) / (total - 1)
        assert abs(together - expected) < 5 * math.sqrt(expected)


@pytest.mark.parametrize("strategy", [SparseStrategy, DenseStrategy])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_ranks_gradients_add_up_to_that_of_the_batch(strategy, ranks):
    matrix, labels = problem()
    coefficients = np.random.default_rng(0).standard_normal(60).astype(np.float32)
    total = np.zeros(30)
    for part in parted(matrix, labels, ranks):
        rows = np.random.default_rng(1).permutation(part.rows)[: part.rows // 2]
        part_strategy = strategy(part, sar.SERIAL)
        for _ in range(2):  # what one batch leaves behind would show in the next
            gradient = part_strategy.gradient(rows, coefficients[part.first_sample + rows])
        mine = part.first_sample + rows
        np.testing.assert_allclose(gradient.to_dense(), coefficients[mine] @ matrix[mine], rtol=1e-4, atol=1e-5)
        total += gradient.to_dense()
    assert np.any(total)


@pytest.mark.parametrize("strategy", [SparseStrategy, DenseStrategy])
@pytest.mark.parametrize("intercept", [False, True])
def test_the_number_of_threads_changes_no_bit(strategy, intercept):
    dataset = parted(*problem(rows=300, features=1000), 1)[0]
    ends = []
    for threads in (1, 2, 3, 5):
        ours = strategy(dataset, sar.SERIAL, Descent(1e-3, intercept), threads=threads)
        list(Trainer(MODELS["logistic"](), ours, Constant(0.3), Options(2, 20)).run())
        ends.append(ours.weights.to_array())
    assert np.count_nonzero(ends[0]) > 900
    for end in ends[1:]:
        np.testing.assert_array_equal(end, ends[0])


@given(st.data())
def test_a_sparse_gradient_holds_exactly_what_the_batch_touches(data):
    features = data.draw(st.sampled_from([1, 63, 64, 65, 4096, 4097, 300_000]))
    rows = data.draw(st.lists(st.sets(st.integers(0, features - 1), max_size=8), min_size=1, max_size=6))
    indptr = np.cumsum([0, *map(len, rows)])
    indices = np.array([index for row in rows for index in sorted(row)], np.uint32)
    dataset = Dataset(indptr, indices, np.ones(len(indices), np.float32), np.zeros(len(rows)), features)
    coefficients = np.array(data.draw(st.lists(st.sampled_from([0.0, 1.0, -1.0]), min_size=len(rows), max_size=len(rows))), np.float32)

    gradient = SparseStrategy(dataset, sar.SERIAL).gradient(np.arange(len(rows)), coefficients)

    expected = np.zeros(features, np.float32)
    for row, coefficient in zip(rows, coefficients):
        expected[sorted(row)] += coefficient
    touched = set().union(*(row for row, coefficient in zip(rows, coefficients) if coefficient))
    np.testing.assert_array_equal(gradient.to_dense(), expected)
    if not gradient.is_dense:
        assert gradient.indices.tolist() == sorted(touched)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", [SparseStrategy, DenseStrategy])
@pytest.mark.parametrize("l2", [0.0, 0.05])
def test_training_is_algorithm_1(model, strategy, l2):
    matrix, labels = problem()
    trainer = Trainer(MODELS[model](), strategy(parted(matrix, labels, 1)[0], sar.SERIAL, Descent(l2)), Constant(0.1), Options(3, 7, 5))

    epochs = list(trainer.run())

    expected = plain_sgd(MODELS[model](), matrix.astype(float), labels, 7, 0.1, l2, 3, 5)
    np.testing.assert_allclose(trainer.weights.to_array(), expected, rtol=1e-3, atol=1e-5)
    loss = MODELS[model]().loss(matrix @ expected, labels).mean() + l2 / 2 * expected @ expected
    assert epochs[-1].loss == pytest.approx(loss, rel=1e-4)
    assert epochs[-1].train_accuracy == pytest.approx(((matrix @ expected > 0) == (labels > 0)).mean())
    assert [epoch.epoch for epoch in epochs] == [1, 2, 3]
    assert epochs[-1].steps == 9


def test_dense_and_sparse_end_at_the_same_weights():
    dataset = parted(*problem(rows=300, features=100), 1)[0]
    ends = []
    for strategy in (SparseStrategy, DenseStrategy):
        trainer = Trainer(MODELS["logistic"](), strategy(dataset, sar.SERIAL, Descent(1e-3)), Constant(0.3), Options(2, 8))
        list(trainer.run())
        ends.append(trainer.weights.to_array())
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-5, atol=1e-7)


def test_the_schedule_sets_the_rate_of_every_step():
    dataset = parted(*problem(), 1)[0]
    asked = []

    def schedule(step):
        asked.append(step)
        return 0.1

    trainer = Trainer(MODELS["svm"](), SparseStrategy(dataset, sar.SERIAL), schedule, Options(2, 25))
    asked.clear()
    list(trainer.run())
    assert list(dict.fromkeys(asked)) == list(range(6))
    assert [InverseTime(1.0, halving=2)(step) for step in (0, 2, 6)] == [1.0, 0.5, 0.25]


def test_an_epoch_reports_its_phases_and_densities():
    dataset = parted(*problem(features=2000), 1)[0]
    for strategy, density in ((SparseStrategy, np.diff(dataset.indptr).mean() / 2000), (DenseStrategy, 1.0)):
        ticks = []
        trainer = Trainer(MODELS["logistic"](), strategy(dataset, sar.SERIAL), Constant(1e-4), Options(2, 1))
        epoch = list(trainer.run(dataset, partial(ticks.append, 1)))[-1]
        assert set(epoch.seconds) == {*PHASES, "total"}
        assert epoch.seconds["total"] == pytest.approx(sum(epoch.seconds.values()) - epoch.seconds["total"])
        assert len(ticks) == 2 * epoch.steps == 120
        assert epoch.test_accuracy == epoch.train_accuracy
        assert epoch.gradient_density == epoch.total_density == pytest.approx(density)


def test_accuracy_of_a_regression_is_by_the_nearer_of_two_labels():
    matrix, _ = problem()
    labels = np.where(matrix[:, 0] > 0, 4.0, 3.0)
    for targets, known in ((labels, True), (np.arange(60.0), False)):
        dataset = Dataset.from_scipy(scipy.sparse.csr_array(matrix), targets)
        trainer = Trainer(MODELS["linear"](), SparseStrategy(dataset, sar.SERIAL), Constant(0.05), Options(1, 10))
        epoch = next(trainer.run())
        assert (epoch.train_accuracy is not None) == known
        if known:
            scores = matrix @ trainer.weights.to_array()
            assert epoch.train_accuracy == pytest.approx(((scores > 3.5) == (labels > 3.5)).mean())


def test_a_divergent_run_stops_with_the_remedy():
    matrix, labels = problem()
    dataset = Dataset.from_scipy(scipy.sparse.csr_array(100 * matrix), labels)
    trainer = Trainer(MODELS["linear"](), SparseStrategy(dataset, sar.SERIAL), Constant(1e3), Options(20, 5))
    with np.errstate(all="ignore"), pytest.raises(DivergenceError, match="lower the learning rate"):
        list(trainer.run())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("descent", [Descent(), Descent(l1=1e-3), Descent(l1=1e-3, momentum=0.5, average_from=0)], ids=repr)
def test_a_gradient_that_is_no_number_ends_every_run(strategy, descent):
    if strategy == "ps-async" and descent.momentum:
        pytest.skip("does without")
    if strategy == "local":
        descent = Descent(l1=descent.l1, update="ftrl")
    dataset = Dataset.from_scipy(scipy.sparse.csr_array([[1e20, -1e20], [1e20, 1e20]]), [1.0, 1.0])
    trainer = Trainer(MODELS["linear"](), STRATEGIES[strategy](dataset, sar.SERIAL, descent), Constant(0.5), Options(4, 1))
    with np.errstate(all="ignore"), pytest.raises(DivergenceError, match="lower the learning rate"):
        list(trainer.run())


@pytest.mark.parametrize("strategy", LOSSY)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_no_residual_hides_what_is_no_number(strategy, checkpoints, tmp_path):
    matrix, labels = problem(features=2000)
    made = STRATEGIES[strategy](Dataset.from_scipy(scipy.sparse.csr_array(matrix), labels), sar.SERIAL, density=0.01)
    kept = Checkpoints(tmp_path, every_steps=4) if checkpoints else None
    trainer = Trainer(MODELS["linear"](), made, Constant(0.01), Options(1, 10), checkpoints=kept)

    def spoil():
        if trainer.step == 3:
            made.residual[1234] = np.nan  # which no threshold of the steps before selects

    with np.errstate(all="ignore"), pytest.raises(DivergenceError, match="lower the learning rate"):
        list(trainer.run(on_step=spoil))
    assert not list(tmp_path.iterdir())


def test_options_out_of_range_are_refused():
    for options in ({"epochs": -1}, {"batch_size": 0}, {"seed": -1}):
        with pytest.raises(ValueError, match="must be at least"):
            Options(**options)
    for l2 in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="must be at least"):
            Descent(l2)
    strategy = SparseStrategy(parted(*problem(), 1)[0], sar.SERIAL, Descent(0.1))
    with pytest.raises(ValueError, match="must be below 1"):
        Trainer(MODELS["svm"](), strategy, Constant(10.0), Options())


def ramp(step):
    """A schedule of a user's own that rises."""
    return 0.5 + 0.1 * step


@pytest.mark.parametrize("strategy", ["sparse", "ps-sync", "oktopk"])
@pytest.mark.parametrize("schedule,step", [(ramp, 16), (LargeBatch(Constant(0.5), 8, 10), 11), (lambda t: np.nan if t == 4 else 0.5, 5)])
def test_a_rate_that_l2_does_not_bear_is_refused_wherever_it_comes(strategy, schedule, step):
    made = STRATEGIES[strategy](parted(*problem(), 1)[0], sar.SERIAL, Descent(0.25, momentum=0.5))
    with pytest.raises(AlgorithmError, match=rf"in step {step}\b"):
        list(Trainer(MODELS["logistic"](), made, schedule, Options(9, 10)).run())
    assert np.isfinite(made.weights.to_array()).all()


@pytest.mark.parametrize(
    "wrapped", [BoldDriver, lambda rate: LargeBatch(BoldDriver(rate / 2), 2), lambda rate: LargeBatch(BoldDriver(rate), 0.5)]
)
def test_a_bold_driver_is_held_below_what_l2_bears(wrapped):
    strategy = SparseStrategy(parted(*problem(), 1)[0], sar.SERIAL, Descent(0.02, momentum=0.9))
    schedule = wrapped(4.5)
    trainer = Trainer(MODELS["logistic"](), strategy, schedule, Options(60, 60))
    rates = []
    for _ in trainer.run():
        schedule.react(-len(rates))  # the loss falls
        rates.append(schedule(0))
    assert 4.5 * (0.5 if rates[0] < 4 else 1) < max(rates) < 5
    assert schedule.state().keys() == wrapped(1.0).state().keys()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_rate_of_zero_or_next_to_it_leaves_the_weights(strategy, momentum):
    if strategy == "ps-async" and momentum:
        pytest.skip("does without")
    matrix, labels = problem()
    descent = Descent(1e-3, True, 1e-3, update="ftrl") if strategy == "local" else Descent(1e-3, True, 1e-3, momentum)
    made = STRATEGIES[strategy](parted(matrix, labels, 1)[0], sar.SERIAL, descent)
    start = np.linspace(-1, 1, 31, dtype=np.float32)
    made.assign(start)
    trainer = Trainer(MODELS["logistic"](), made, lambda step: (0.0, 1e-41, 1e-320)[step % 3], Options(2, 7))
    epochs = list(trainer.run())
    np.testing.assert_allclose(trainer.weights.to_array(), start, atol=1e-30)
    assert epochs[0].loss == epochs[1].loss > 0


@pytest.fixture(scope="module")
def phishing():
    """Training and test samples of the real data set."""
    if not SHARED.is_dir():
        pytest.skip("the real data set is not here")
    train, test = load(SHARED / "phishing_url.svm.bz2", SHARED / "phishing_url.t.svm.bz2", comm=sar.SERIAL, n_features=3_231_961)
    train, classes = two_classes(train, sar.SERIAL)
    return train, two_classes(test, sar.SERIAL, classes)[0]


@pytest.mark.release
@pytest.mark.parametrize("model", ["logistic", "svm"])
def test_real_urls_are_told_from_phishing(phishing, model):
    train, test = phishing
    trainer = Trainer(MODELS[model](), SparseStrategy(train, sar.SERIAL), Constant(0.5), Options(epochs=4))
    assert list(trainer.run(test))[-1].test_accuracy >= 0.995


def test_ranks_as_threads_agree_on_errors():
    """The stand-in for a communicator that the tests of this folder use does gather."""
    assert on_ranks(3, lambda comm: comm.allgather(comm.rank)) == [[0, 1, 2]] * 3
