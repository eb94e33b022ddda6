"""Training under MPI: the same samples, batches and weights for any number of ranks, and errors that all ranks share."""

import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from mpi_cases import each

import sparseallreduce as sar
from sparseallreduce.linear import (
    MODELS,
    Constant,
    DatasetError,
    DenseStrategy,
    Descent,
    Options,
    SparseStrategy,
    Trainer,
    generate,
    load,
    two_classes,
)


@contextmanager
def shared_folder(comm):
    """A folder of rank 0 that all ranks see, until all are done with it."""
    with tempfile.TemporaryDirectory() as own:
        try:
            yield Path(comm.bcast(own))
        finally:
            comm.Barrier()


@contextmanager
def written(comm, text):
    """The path of a file with this text that all ranks see."""
    with shared_folder(comm) as folder:
        path = folder / "samples.svm"
        if comm.rank == 0:
            path.write_text(text)
        comm.Barrier()
        yield path


def trained(path, comm, strategy, model="logistic", batch_size=2, **options):
    """The weights and the epochs of a short run, and the training set."""
    train, _ = load(path, comm=comm, n_features=2000)
    train, _ = two_classes(train, comm)
    trainer = Trainer(MODELS[model](), strategy(train, comm, Descent(0.01)), Constant(0.2), Options(2, batch_size))
    epochs = list(trainer.run(train))
    return trainer.weights.to_array(), epochs, train


@each(strategy=[SparseStrategy, DenseStrategy], model=["logistic", "svm"])
def case_the_same_global_batch_ends_at_the_same_weights(comm, strategy, model):
    with shared_folder(comm) as folder:
        if comm.rank == 0:
            generate("url-like", folder / "samples.svm", samples=60, features=2000)
        comm.Barrier()
        ours, epochs, part = trained(folder / "samples.svm", comm, strategy, model, batch_size=2)
        alone, expected, _ = trained(folder / "samples.svm", sar.SERIAL, strategy, model, batch_size=2 * comm.size)
    assert comm.allreduce(part.rows) == 60
    assert np.any(ours)
    np.testing.assert_allclose(ours, alone, rtol=1e-3, atol=1e-5)
    assert len(set(comm.allgather(ours.tobytes()))) == 1, "replicas have drifted apart"
    for epoch, reference in zip(epochs, expected):
        np.testing.assert_allclose(epoch.loss, reference.loss, rtol=1e-4)
        assert epoch.steps == reference.steps
        assert epoch.test_accuracy == epoch.train_accuracy
    assert (epochs[-1].bytes_sent > 0) == (comm.size > 1)
    assert len(set(comm.allgather(repr(epochs)))) == 1, "ranks report different epochs"


@each(algorithm=["ssar_split_allgather", "dsar_split_allgather"])
def case_any_algorithm_sums_the_gradients(comm, algorithm):
    with shared_folder(comm) as folder:
        if comm.rank == 0:
            generate("uniform", folder / "samples.svm", samples=40, features=2000, density=0.01)
        comm.Barrier()
        ours, _, _ = trained(folder / "samples.svm", comm, partial(SparseStrategy, algorithm=algorithm))
        reference, _, _ = trained(folder / "samples.svm", comm, DenseStrategy)
    np.testing.assert_allclose(ours, reference, rtol=1e-3, atol=1e-6)


def case_ranks_without_samples_take_part(comm):
    with written(comm, "1 1:1 5:2\n-1 2:1 5:-1\n") as path:
        weights, epochs, part = trained(path, comm, SparseStrategy)
    assert comm.allreduce(part.rows) == 2
    assert epochs[-1].train_accuracy == 1.0
    assert np.flatnonzero(weights).tolist() == [0, 1, 4]


BAD = {"line": "1 1:1\n" * 50 + "-1 2:x\n" + "-1 1:1\n" * 50, "classes": "1 1:1\n2 1:1\n3 1:1\n", "empty": ""}


@each(what=BAD)
def case_bad_data_is_the_same_error_on_every_rank(comm, what):
    with written(comm, BAD[what]) as path:
        try:
            trained(path, comm, SparseStrategy)
            told = None
        except DatasetError as error:
            told = str(error)
    assert told is not None
    assert str(path) in told
    assert len(set(comm.allgather(told))) == 1
    assert comm.allreduce(1) == comm.size
