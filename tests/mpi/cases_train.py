"""Training under MPI: the same samples, batches and weights for any number of ranks, and errors that all ranks share."""

from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from mpi_cases import each, shared_folder, skip

import sparseallreduce as sar
from sparseallreduce.errors import CheckpointError, TrainingStopped
from sparseallreduce.linear import (
    MODELS,
    STRATEGIES,
    BoldDriver,
    Checkpoints,
    Constant,
    DatasetError,
    DenseStrategy,
    Descent,
    EarlyStopping,
    Options,
    OverlappedStrategy,
    SparseStrategy,
    SynchronousParameterServer,
    Trainer,
    generate,
    load,
    two_classes,
)
from sparseallreduce.linear.strategies import read_on_workers
from sparseallreduce.linear.training.checkpoint import Checkpoint

RANKS = (1, 2, 3, 4, 5)  # that eight reduce as they should is shown by the algorithms


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


@each(strategy=[SparseStrategy, DenseStrategy, OverlappedStrategy, SynchronousParameterServer])
def case_the_same_samples_are_held_out_and_the_same_model_is_best(comm, strategy):
    def run(group, kind, folder, batch):
        read = partial(load, folder / "samples.svm", n_features=2000)
        served = kind is SynchronousParameterServer
        parts = read_on_workers(group, 1, lambda workers: read(comm=workers)) if served else read(comm=group)
        train, _ = two_classes(parts[0], group)
        options = Options(4, global_batch=batch, validation=0.25, evaluate_every=3)
        made = kind(train, group, Descent(0.01))
        trainer = Trainer(MODELS["logistic"](), made, Constant(0.5), options, stopping=EarlyStopping("progressive_loss", 3))
        return list(trainer.run(None)), trainer

    with shared_folder(comm) as folder:
        if comm.rank == 0:
            generate("url-like", folder / "samples.svm", samples=80, features=2000)
        comm.Barrier()
        ours, trainer = run(comm, strategy, folder, 6)
        alone, expected = run(sar.SERIAL, strategy, folder, 6)
    for epoch, other in zip(ours, alone, strict=True):
        assert epoch.steps == other.steps == 10
        assert epoch.evaluated == (epoch.epoch >= 3)
        for name in ("loss", "progressive_loss", "progressive_accuracy", "validation_loss", "validation_accuracy", "validation_auc"):
            found, wanted = getattr(epoch, name), getattr(other, name)
            assert (found is None) == (wanted is None)
            assert found is None or found == pytest.approx(wanted, rel=1e-3)
    assert trainer.best.epoch == expected.best.epoch
    np.testing.assert_allclose(trainer.weights.to_array(), expected.weights.to_array(), rtol=1e-3, atol=1e-5)
    assert len(set(comm.allgather(trainer.weights.to_array().tobytes()))) == 1


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


def checkpointed(folder, comm, strategy, **options):
    """A trainer of a small problem with checkpoints, which all ranks read from the folder."""
    read = partial(load, folder / "samples.svm", n_features=500)
    parted = read_on_workers(comm, 1, lambda workers: read(comm=workers)) if strategy is SynchronousParameterServer else read(comm=comm)
    train, _ = two_classes(parted[0], comm)
    descent = Descent(1e-3, True, 1e-4, 0.5, average_from=10)
    checkpoints = Checkpoints(folder / "checkpoints", every_steps=4)
    return Trainer(
        MODELS["logistic"](), strategy(train, comm, descent), BoldDriver(0.2), Options(3, **options), checkpoints=checkpoints
    )


class EveryStep:
    """A consensus that is looked for after every step."""

    def __init__(self, comm, before):
        self.comm = comm

    def after_step(self, wish):
        return [other for other in self.comm.allgather(wish) if other is not None]


@each(strategy=[SparseStrategy, DenseStrategy, OverlappedStrategy, SynchronousParameterServer], resumed_by=["as many", "one"])
def case_one_rank_stops_all_and_they_go_on_where_they_were(comm, strategy, resumed_by):
    if comm.size == 1 and resumed_by == "one":
        skip("needs two ranks")
    fixed = partial(strategy, algorithm="ssar_recursive_doubling") if issubclass(strategy, SparseStrategy) else strategy
    with shared_folder(comm) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparseallreduce.linear.training.trainer.Consensus", EveryStep)
        if comm.rank == 0:
            generate("uniform", folder / "samples.svm", samples=100, features=500, density=0.05)
        comm.Barrier()
        whole = checkpointed(folder, comm, fixed, global_batch=12)
        whole.checkpoints = None
        list(whole.run())
        stopped = checkpointed(folder, comm, fixed, global_batch=12)
        stopped.checkpoints.prepare(comm, resume=False)
        first = min(1, stopped.strategy.workers - 1)  # a rank other than 0, where there is one that computes
        try:
            list(stopped.run(on_step=lambda: stopped.step == 14 and comm.rank == first and stopped.request_stop("SIGTERM")))
            told = None
        except TrainingStopped as error:
            told = str(error)
        assert told is not None and told.startswith("stopped by SIGTERM after step 14; a checkpoint is in")
        assert len(set(comm.allgather(told))) == 1
        group = comm if resumed_by == "as many" else comm.Split(comm.rank)
        if resumed_by == "as many" or comm.rank == 0:
            again = checkpointed(folder, group, fixed, global_batch=12)
            found, remarks = again.checkpoints.prepare(group, resume=True)
            assert not remarks
            again.resume(found)
            assert again.step == 14
            list(again.run())
            if resumed_by == "as many":
                np.testing.assert_array_equal(again.weights.to_array(), whole.weights.to_array())
            else:
                np.testing.assert_allclose(again.weights.to_array(), whole.weights.to_array(), rtol=1e-3, atol=1e-5)


def case_a_checkpoint_that_rank_0_cannot_write_is_an_error_on_all(comm):
    with shared_folder(comm) as folder:
        if comm.rank == 0:
            generate("uniform", folder / "samples.svm", samples=40, features=500, density=0.05)
        comm.Barrier()
        run = checkpointed(folder, comm, SparseStrategy)
        try:
            list(run.run())
            told = None
        except CheckpointError as error:
            told = str(error)
    assert told is not None and "cannot write a checkpoint" in told
    assert len(set(comm.allgather(told))) == 1


def case_a_checkpoint_of_many_pieces_is_the_same_on_all_ranks(comm):
    arrays = {"direction": np.arange(1001, dtype=np.float32), "last": np.zeros(0, np.uint16), "table": np.arange(6.0).reshape(2, 3)}
    state = arrays | {"scale": 0.1, "numbers": ((1.0, 2.0),)}
    with shared_folder(comm) as folder:
        kept = Checkpoints(folder)
        kept.prepare(comm, resume=False)
        kept.save(7, Checkpoint({"model": "svm"}, {"step": 7}, state), comm)
        found, remarks = kept.prepare(comm, resume=True)
    assert not remarks
    assert (found.identity, found.progress, found.state["scale"]) == ({"model": "svm"}, {"step": 7}, 0.1)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found.state[name], array, strict=True)


def case_the_communicator_carries_no_message_of_a_checkpoint(comm):
    """Whatever a user waits for on it, from anybody, of any tag."""
    with shared_folder(comm) as folder:
        if comm.rank == 0:
            generate("uniform", folder / "samples.svm", samples=40, features=500, density=0.05)
        comm.Barrier()
        train, _ = two_classes(load(folder / "samples.svm", comm=comm, n_features=500)[0], comm)
        request = comm.irecv() if comm.rank == 0 and comm.size > 1 else None
        checkpoints = Checkpoints(folder / "checkpoints")
        checkpoints.prepare(comm, resume=False)
        strategy = STRATEGIES["topka"](train, comm, density=0.05)
        list(Trainer(MODELS["logistic"](), strategy, Constant(0.2), Options(1, 4), checkpoints=checkpoints).run())
        assert request is None or not request.test()[0]
        comm.Barrier()  # a rank may be done with the training before rank 0 has looked
        if comm.rank == 1:
            comm.send("mine", 0)
        assert request is None or request.wait() == "mine"


@each(l1=[0.0, 1e-3], momentum=[0.0, 0.9])
def case_weights_that_no_gradient_touches_are_the_same_on_every_rank(comm, l1, momentum):
    with shared_folder(comm) as folder:
        if comm.rank == 0:
            generate("uniform", folder / "samples.svm", samples=60, features=2000, density=0.003)
        comm.Barrier()
        ends = []
        for group, strategy in ((comm, SparseStrategy), (comm, DenseStrategy), (sar.SERIAL, SparseStrategy)):
            train, _ = two_classes(load(folder / "samples.svm", comm=group, n_features=2000)[0], group)
            descent = Descent(1e-3, True, l1, momentum, average_from=8)
            trainer = Trainer(MODELS["logistic"](), strategy(train, group, descent), Constant(0.3), Options(3, global_batch=10))
            list(trainer.run())
            ends.append(trainer.weights.to_array())
    for end in ends[:2]:
        assert len(set(comm.allgather(end.tobytes()))) == 1, "replicas have drifted apart"
        np.testing.assert_allclose(end, ends[2], rtol=1e-3, atol=1e-5)


RANKS = (1, 3)
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
