"""The overlapped strategy: one step stale whatever the number of ranks, and resumed to the bit."""

import numpy as np
from cases_parameter_server import samples
from mpi_cases import each

import sparseallreduce as sar
from sparseallreduce.linear import MODELS, Constant, Descent, Options, OverlappedStrategy, Trainer, batches, load, two_classes

RANKS = (1, 2, 3, 4, 5)  # as in cases_train
DESCENT = Descent(l2=0.01, intercept=True)


def loaded(path, comm):
    train, _ = load(path, comm=comm, n_features=2000)
    return two_classes(train, comm)[0]


def one_step_stale(path, batch, epochs, rate):
    """The weights that dense arithmetic comes to when every gradient is applied one step later, but for the end of an epoch."""
    train = loaded(path, sar.SERIAL)
    samples, w, late = train.to_scipy(), np.zeros(2001), []
    for epoch in range(1, epochs + 1):
        for rows, count in batches(train, batch, (0, epoch)):
            x, y = samples[rows], train.labels[rows]
            slopes = -y / (1 + np.exp(y * (x @ w[:-1] + w[-1]))) / count
            late.append(np.append(x.T @ slopes, slopes.sum()))
            if len(late) > 1:
                w = shrunk(w, rate) - rate * late.pop(0)
        w = shrunk(w, rate) - rate * late.pop()
    return w


def shrunk(w, rate):
    return w * np.append(np.full(2000, 1 - rate * DESCENT.l2), 1)


@each(algorithm=["auto", "ssar_split_allgather", "dense"])
def case_gradients_are_one_step_stale_on_any_number_of_ranks(comm, algorithm):
    with samples(comm) as path:
        strategy = OverlappedStrategy(loaded(path, comm), comm, DESCENT, algorithm=algorithm)
        epochs = list(Trainer(MODELS["logistic"](), strategy, Constant(0.2), Options(2, 4)).run())
        reference = one_step_stale(path, 4 * comm.size, 2, 0.2)
    ours = strategy.weights.to_array()
    np.testing.assert_allclose(ours, reference, rtol=1e-3, atol=1e-5)
    assert len(set(comm.allgather(ours.tobytes()))) == 1, "replicas have drifted apart"
    assert epochs[-1].measures == {"stale_steps": 1}


@each(algorithm=["ssar_recursive_doubling", "dense"])
def case_state_between_steps_changes_nothing_and_holds_what_is_in_flight(comm, algorithm):
    with samples(comm) as path:
        train = loaded(path, comm)
        undisturbed, asked = (OverlappedStrategy(train, comm, DESCENT, algorithm=algorithm) for _ in range(2))
        steps = list(batches(train, 4 * comm.size, (0, 1)))
        for rows, count in steps:
            step(undisturbed, rows, count)
        half = len(steps) // 2
        for rows, count in steps[:half]:
            step(asked, rows, count)
            state = {name: np.copy(value) for name, value in asked.state().items()}
        resumed = OverlappedStrategy(train, comm, DESCENT, algorithm=algorithm)
        resumed.restore(state)
        for rows, count in steps[half:]:
            step(asked, rows, count)
            step(resumed, rows, count)
        for strategy in (undisturbed, asked, resumed):
            strategy.drain()
    assert state["in_flight"]
    expected = undisturbed.weights.to_array().tobytes()
    assert asked.weights.to_array().tobytes() == expected
    assert resumed.weights.to_array().tobytes() == expected


def step(strategy, rows, count):
    labels = strategy.dataset.labels[rows]
    slopes = MODELS["logistic"]().derivative(strategy.scores(rows), labels) / count
    strategy.update(strategy.gradient(rows, slopes.astype(np.float32)), 0.2)
