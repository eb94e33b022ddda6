"""What a server does with pulls and pushes, and what it is given to keep; in memory, without messages."""

import numpy as np
import pytest
from scipy.sparse import csr_array, random_array

import sparseallreduce as sar
from sparseallreduce.errors import AlgorithmError, DivergenceError
from sparseallreduce.linear import (
    AsynchronousParameterServer,
    Constant,
    Dataset,
    DenseStrategy,
    Descent,
    Logistic,
    Options,
    SynchronousParameterServer,
    Trainer,
    Weights,
)
from sparseallreduce.linear.strategies.parameter_server.core import AsynchronousServer, SynchronousServer
from sparseallreduce.linear.strategies.parameter_server.ranges import balanced_bounds
from sparseallreduce.linear.strategies.parameter_server.state import state_of_range

SIZE = 100


def gradient(entries, size=SIZE):
    return sar.SparseStream(sorted(entries), np.float32([entries[index] for index in sorted(entries)]), size)


def at(answers):
    return [(worker, weights.tolist()) for worker, weights in answers]


def random_samples(rows=50, features=SIZE, seed=0):
    generator = np.random.default_rng(seed)
    samples = random_array((rows, features), density=0.1, rng=generator, format="csr")
    return Dataset.from_scipy(samples, generator.choice([-1.0, 1.0], rows))


def test_nobody_who_has_given_is_answered_before_all_have():
    server = SynchronousServer(Weights(SIZE), 3)
    for worker in (2, 0):
        assert server.push(worker, gradient({worker: 1.0}), 1.0) == []
        assert server.pull(worker, np.uint32([0, 1, 2])) == []
    assert at(server.pull(1, np.uint32([0, 2]))) == [(1, [0, 0])]
    assert at(server.push(1, gradient({1: 1.0, 2: 1.0}), 1.0)) == [(2, [-1, -1, -2]), (0, [-1, -1, -2])]


def test_gradients_are_summed_in_the_order_of_workers_whatever_the_order_of_arrival():
    values = np.random.default_rng(1).standard_normal((5, SIZE)).astype(np.float32)
    ends = set()
    for arrival in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [1, 0, 4, 3, 2]):
        server = SynchronousServer(Weights(SIZE), 5)
        for worker in arrival:
            server.push(worker, gradient(dict(enumerate(values[worker]))), 0.1)
        ends.add(server.weights.to_array().tobytes())
    assert len(ends) == 1


def test_staleness_counts_the_updates_since_the_pull():
    server = AsynchronousServer(Weights(SIZE), 2)
    for worker in (0, 1):
        server.pull(worker, np.uint32([0]))
    for _ in range(3):
        server.push(0, gradient({0: 1.0}), 1.0)
        server.pull(0, np.uint32([0]))
    server.push(1, gradient({0: 1.0}), 1.0)
    assert server.staleness == [{0: 3}, {3: 1}]
    assert at(server.pull(1, np.uint32([0]))) == [(1, [-4])]


@pytest.mark.parametrize("kind", [SynchronousServer, AsynchronousServer])
def test_weights_that_are_not_finite_are_an_error(kind):
    server = kind(Weights(SIZE), 1)
    with pytest.raises(DivergenceError, match="lower the learning rate"):
        server.push(0, gradient({3: np.inf}), 0.5)


@pytest.mark.parametrize("kind", [SynchronousParameterServer, AsynchronousParameterServer])
@pytest.mark.parametrize("threads", [1, 3])
def test_rank_alone_is_worker_and_server(kind, threads):
    dataset, descent = random_samples(), Descent(l2=0.01, intercept=True)
    ours, theirs = kind(dataset, sar.SERIAL, descent, threads=threads), DenseStrategy(dataset, sar.SERIAL, descent)
    for strategy in (ours, theirs):
        epochs = list(Trainer(Logistic(), strategy, Constant(0.5), Options(3, 7)).run())
    np.testing.assert_allclose(ours.weights.to_array(), theirs.weights.to_array(), rtol=1e-4, atol=1e-6)
    assert epochs[-1].steps == 8


@pytest.mark.parametrize("servers", [0, 2, -1])
def test_rank_alone_has_one_server(servers):
    with pytest.raises(AlgorithmError, match="server"):
        SynchronousParameterServer(random_samples(), sar.SERIAL, servers=servers)


def test_ranges_take_equal_shares_of_what_batches_touch():
    """Of features whose frequencies follow a power law; what a batch touches is counted, not estimated."""
    generator, features = np.random.default_rng(2), 20_000
    columns = np.minimum(generator.zipf(1.3, 60_000) - 1, features - 1)
    samples = csr_array((np.ones(len(columns)), (np.arange(len(columns)) % 2000, columns)), shape=(2000, features))
    samples.sum_duplicates()
    bounds = balanced_bounds(Dataset.from_scipy(samples, np.ones(2000)), sar.SERIAL, 4)
    assert bounds[0] == 0 and bounds[-1] == features
    counts = np.zeros(4)
    for batch in range(0, 2000, 100):
        touched = np.unique(samples[batch : batch + 100].indices)
        counts += np.histogram(touched, bounds)[0]
    assert counts.max() < 1.15 * counts.min(), counts
    even = np.histogram(columns, np.linspace(0, features, 5))[0]
    assert even.max() > 3 * even.min(), "ranges of equal length would have done"


@pytest.mark.parametrize("features,servers", [(1, 1), (1, 5), (3, 8), (100, 100)])
def test_ranges_cover_all_features_however_few(features, servers):
    dataset = Dataset.from_scipy(csr_array(np.ones((2, features))), [1, -1])
    bounds = balanced_bounds(dataset, sar.SERIAL, servers)
    assert len(bounds) == servers + 1
    assert bounds == sorted(bounds) and bounds[0] == 0 and bounds[-1] == features


def test_state_is_cut_where_it_has_an_entry_for_each_weight():
    state = {"steps": 3, "scale": 0.5, "direction": np.arange(6), "table": ((1.0, 2.0),)}
    part = state_of_range(state, 2, 4)
    assert part["direction"].tolist() == [2, 3]
    assert (part["steps"], part["scale"], part["table"]) == (3, 0.5, ((1.0, 2.0),))
