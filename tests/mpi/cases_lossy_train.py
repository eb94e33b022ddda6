"""Lossy strategies under MPI: the same weights on all ranks, nothing lost, and checkpoints that hold the residuals of all."""

import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from mpi_cases import each, skip

import sparseallreduce as sar
from sparseallreduce.linear import (
    LOSSY,
    MODELS,
    STRATEGIES,
    Checkpoints,
    Constant,
    DenseStrategy,
    Descent,
    Options,
    Trainer,
    generate,
    load,
    two_classes,
)

RANKS = (1, 3)
FEATURES = 600


@contextmanager
def samples(comm):
    """A folder that all ranks see, with samples in it."""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(comm.bcast(own))
        if comm.rank == 0:
            generate("url-like", folder / "samples.svm", samples=120, features=FEATURES, seed=3)
        comm.Barrier()
        try:
            yield folder
        finally:
            comm.Barrier()


def trainer(folder, comm, strategy, descent=None, epochs=3, kept=None):
    train, _ = two_classes(load(folder / "samples.svm", comm=comm, n_features=FEATURES)[0], comm)
    descent = descent or Descent(1e-3, True, 1e-5, 0.5)
    checkpoints = None if kept is None else Checkpoints(folder / kept, every_steps=4)
    options = Options(epochs, global_batch=12)
    return Trainer(MODELS["logistic"](), strategy(train, comm, descent), Constant(0.2), options, checkpoints=checkpoints)


def trained(*arguments, **options):
    made = trainer(*arguments, **options)
    list(made.run())
    return made


def alike(comm, array):
    return len(set(comm.allgather(array.tobytes()))) == 1


@each(name=[name for name in LOSSY if name != "gaussiank"])  # which never says how many it takes
def case_all_entries_end_where_dense_training_does(comm, name):
    with samples(comm) as folder:
        ours = trained(folder, comm, partial(STRATEGIES[name], density=1.0)).weights.to_array()
        expected = trained(folder, sar.SERIAL, DenseStrategy).weights.to_array()
    assert np.any(expected)
    assert alike(comm, ours), "replicas have drifted apart"
    np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-5)


@each(name=LOSSY)
def case_weights_and_residuals_hold_all_gradients(comm, name):
    with samples(comm) as folder:
        made = trainer(folder, comm, partial(STRATEGIES[name], density=0.02), Descent(0.0, True))
    came_in, update = np.zeros(FEATURES + 1), made.strategy.update

    def noting(gradient, rate):
        came_in[:] += rate * gradient.to_dense()
        update(gradient, rate)

    made.strategy.update = noting
    list(made.run())
    weights = made.weights.to_array()
    assert np.any(weights) and alike(comm, weights)
    waiting, given = comm.allreduce(made.strategy.residual.astype(np.float64)), comm.allreduce(came_in)
    assert np.any(waiting)
    np.testing.assert_allclose(waiting - weights, given, rtol=1e-4, atol=1e-5)
    assert len(set(comm.allgather(repr(made.history)))) == 1, "ranks report different epochs"


@each(name=LOSSY, resumed_by=["as many", "one"])
def case_a_run_goes_on_with_the_residuals_of_all_ranks(comm, name, resumed_by):
    if comm.size == 1 and resumed_by == "one":
        skip("needs two ranks")
    strategy = partial(STRATEGIES[name], density=0.02)
    with samples(comm) as folder:
        whole = trained(folder, comm, strategy)
        stopped = trainer(folder, comm, strategy, epochs=2, kept="checkpoints")
        stopped.checkpoints.prepare(comm, resume=False)
        list(stopped.run())
        waiting = comm.allreduce(stopped.strategy.residual.astype(np.float64))
        group = comm if resumed_by == "as many" else comm.Split(comm.rank)
        if resumed_by == "as many" or comm.rank == 0:
            again = trainer(folder, group, strategy, kept="checkpoints")
            found, remarks = again.checkpoints.prepare(group, resume=True)
            assert not remarks
            again.resume(found)
            assert again.step == 20
            here = again.strategy.residual.astype(np.float64)
            np.testing.assert_allclose(here if group is not comm else comm.allreduce(here), waiting, rtol=1e-5, atol=1e-7)
            list(again.run())
            if group is comm:
                np.testing.assert_array_equal(again.weights.to_array(), whole.weights.to_array())
                np.testing.assert_array_equal(again.strategy.residual, whole.strategy.residual)
            else:
                assert again.history[-1].loss < whole.history[0].loss


def case_another_density_on_one_rank_is_the_same_error_on_all(comm):
    if comm.size == 1:
        skip("needs two ranks")
    with samples(comm) as folder:
        made = trainer(folder, comm, partial(STRATEGIES["topka"], density=0.1 if comm.rank else 0.2))
    try:
        list(made.run())
        told = None
    except sar.MismatchError as error:
        told = str(error)
    assert told is not None and "disagree on the k" in told
    assert len(set(comm.allgather(told))) == 1
