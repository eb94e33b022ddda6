"""Parameter servers under MPI: the steps of an allreduce, in or out of step, and errors that end on all ranks."""

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from cases_train import written
from mpi_cases import each, limit, shared_folder, skip

import sparseallreduce as sar
from sparseallreduce.errors import AlgorithmError, DivergenceError, TrainingStopped
from sparseallreduce.linear import (
    MODELS,
    AsynchronousParameterServer,
    Checkpoints,
    Constant,
    DatasetError,
    DenseStrategy,
    Descent,
    Logistic,
    Options,
    SynchronousParameterServer,
    Trainer,
    generate,
    load,
    read_on_workers,
    two_classes,
)

RANKS = (1, 4)
FEATURES = 2000
BOTH = (SynchronousParameterServer, AsynchronousParameterServer)
DESCENT = Descent(l2=0.01, intercept=True)


def samples_on_workers(path, comm, servers, features=FEATURES):
    """The training set of a rank."""
    train, _ = read_on_workers(comm, servers, lambda workers: load(path, comm=workers, n_features=features))
    return two_classes(train, comm)[0]


def trainer_on(path, comm, kind, servers=1, model="logistic", batch=4, rate=0.2, epochs=2, descent=DESCENT, checkpoints=None):
    """A trainer whose global batches have `batch` samples a worker."""
    strategy = kind(samples_on_workers(path, comm, servers), comm, descent, servers=servers)
    chosen = model if not isinstance(model, str) else MODELS[model]()
    return Trainer(chosen, strategy, Constant(rate), Options(epochs, batch), checkpoints=checkpoints)


def trained_alone(path, batch, model="logistic", epochs=2, descent=DESCENT, rate=0.2):
    """The weights that the dense strategy comes to on one rank, with the same global batches."""
    train, _ = load(path, comm=sar.SERIAL, n_features=FEATURES)
    train, _ = two_classes(train, sar.SERIAL)
    trainer = Trainer(MODELS[model](), DenseStrategy(train, sar.SERIAL, descent), Constant(rate), Options(epochs, batch))
    return trainer, list(trainer.run(train))


@contextmanager
def samples(comm, count=60):
    """A file of generated samples that all ranks see."""
    with shared_folder(comm) as folder:
        if comm.rank == 0:
            generate("url-like", folder / "samples.svm", samples=count, features=FEATURES)
        comm.Barrier()
        yield folder / "samples.svm"


def possible(comm, servers):
    if servers >= max(comm.size, 2):
        skip("no rank is left to compute")
    return comm.size - servers if comm.size > 1 else 1


@each(servers=[1, 2, 3], model=["logistic", "svm", "linear"])
def case_synchronous_servers_take_the_steps_of_an_allreduce(comm, servers, model):
    workers = possible(comm, servers)
    with samples(comm) as path:
        trainer = trainer_on(path, comm, SynchronousParameterServer, servers, model)
        epochs = list(trainer.run())
        reference, expected = trained_alone(path, 4 * workers, model)
    ours, theirs = trainer.weights.to_array(), reference.weights.to_array()
    assert np.any(theirs)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    assert len(set(comm.allgather(ours.tobytes()))) == 1, "replicas have drifted apart"
    for epoch, other in zip(epochs, expected, strict=True):
        np.testing.assert_allclose(epoch.loss, other.loss, rtol=1e-4)
        assert epoch.steps == other.steps
    assert (epochs[-1].bytes_sent > 0) == (comm.size > 1)
    assert len(set(comm.allgather(repr(epochs)))) == 1, "ranks report different epochs"


@each(servers=[1, 2])
def case_servers_regularise_speed_up_and_average_as_replicas_do(comm, servers):
    workers = possible(comm, servers)
    descent = Descent(l1=0.002, l2=0.01, momentum=0.8, average_from=5, intercept=True)
    with samples(comm) as path:
        trainer = trainer_on(path, comm, SynchronousParameterServer, servers, descent=descent)
        list(trainer.run())
        reference, _ = trained_alone(path, 4 * workers, descent=descent)
    ours, theirs = trainer.weights.to_array(), reference.weights.to_array()
    assert 0 < np.count_nonzero(theirs) < FEATURES
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    assert len(set(comm.allgather(ours.tobytes()))) == 1


@each(descent=["momentum", "averaging"])
def case_asynchronous_servers_refuse_what_counts_steps(comm, descent):
    chosen = Descent(momentum=0.9) if descent == "momentum" else Descent(average_from=0)
    with samples(comm) as path, pytest.raises(AlgorithmError, match="ps-sync"):
        trainer_on(path, comm, AsynchronousParameterServer, descent=chosen)


@each(servers=[1, 2])
def case_asynchronous_servers_draw_weights_to_zero(comm, servers):
    workers = possible(comm, servers)
    descent = Descent(l1=0.02, l2=0.01)
    rate = 0.05  # at four times that, gradients that are stale by some steps end at a loss one eighth higher
    with samples(comm, 400) as path:
        trainer = trainer_on(path, comm, AsynchronousParameterServer, servers, descent=descent, epochs=8, rate=rate)
        epochs = list(trainer.run())
        # Each gradient is a step of its own, by a share of the rate. Fewer weights than after steps of all workers are zero then:
        # a single sample moves a weight further from it than the L1 term of such a step reaches.
        reference, expected = trained_alone(path, 4, descent=descent, epochs=8, rate=rate / workers)
    np.testing.assert_allclose(epochs[-1].loss, expected[-1].loss, rtol=0.05)
    ours, theirs = (np.count_nonzero(each_trainer.weights.to_array()) for each_trainer in (trainer, reference))
    assert ours < 1.5 * theirs + 20 < FEATURES


def case_synchronous_servers_end_at_the_same_bits_in_every_run(comm):
    with samples(comm) as path:
        runs = []
        for _ in range(2):
            trainer = trainer_on(path, comm, SynchronousParameterServer)
            assert len(list(trainer.run())) == 2
            runs.append(trainer.weights.to_array().tobytes())
    assert runs[0] == runs[1]


@each(servers=[1, 2])
def case_asynchronous_servers_learn_as_much(comm, servers):
    workers = possible(comm, servers)
    with samples(comm, 400) as path:
        trainer = trainer_on(path, comm, AsynchronousParameterServer, servers, epochs=20)
        epochs = list(trainer.run())
        _, expected = trained_alone(path, 4 * workers, epochs=20)
    np.testing.assert_allclose(epochs[-1].loss, expected[-1].loss, rtol=0.1)
    assert epochs[-1].train_accuracy > expected[-1].train_accuracy - 0.005
    assert len(set(comm.allgather(trainer.weights.to_array().tobytes()))) == 1


@each(kind=BOTH)
def case_staleness_and_speed_of_each_worker_are_reported(comm, kind):
    workers = possible(comm, 1)
    with samples(comm) as path:
        trainer = trainer_on(path, comm, kind, epochs=1)
        (epoch,) = trainer.run()
    records = epoch.measures["workers"]
    assert [record["rank"] for record in records] == list(range(workers))
    assert sum(record["samples"] for record in records) == 60
    for record in records:
        assert record["samples_per_second"] > 0
        assert sum(record["staleness"]["histogram"].values()) == epoch.steps
        if kind is SynchronousParameterServer or workers == 1:
            assert record["staleness"]["max"] == 0
    assert len(set(comm.allgather(repr(records)))) == 1


@each(kind=BOTH)
def case_a_slow_worker_makes_the_gradients_of_the_asynchronous_kind_stale(comm, kind):
    """Its own are, and the others go on meanwhile."""
    if possible(comm, 1) < 2:
        skip("needs two workers")
    with samples(comm, 40 * (comm.size - 1)) as path:
        trainer = trainer_on(path, comm, kind, model=Slowed(comm.rank == 0, 0.1), epochs=1)
        (epoch,) = trainer.run()
    slow, *others = epoch.measures["workers"]
    if kind is SynchronousParameterServer:
        assert slow["staleness"]["max"] == 0
        assert min(record["seconds"] for record in others) > 0.8
    else:
        assert slow["staleness"]["max"] > 0
        assert max(record["seconds"] for record in others) < slow["seconds"]


class Slowed(Logistic):
    """Takes so many seconds longer, if it is told to."""

    def __init__(self, slow, seconds):
        self.slow, self.seconds = slow, seconds

    def derivative(self, scores, labels):
        if self.slow:
            time.sleep(self.seconds)
        return super().derivative(scores, labels)


@limit(30)
@each(kind=BOTH, asked=["first", "worker", "server"], servers=[1, 2])
def case_a_wish_to_stop_is_heard_within_an_epoch(comm, kind, asked, servers):
    """From a worker or a server, by workers of different speeds; and the run goes on from there."""
    workers = possible(comm, servers)
    if comm.size == 1 and asked != "first":
        skip("there is one rank")
    if asked == "worker" and workers == 1:
        skip("there is one worker")
    rank = {"first": 0, "worker": workers - 1, "server": comm.size - 1}[asked]
    with samples(comm, 4 * 200 * workers) as path, shared_folder(comm) as folder:
        checkpoints = Checkpoints(folder / "checkpoints")
        checkpoints.prepare(comm, resume=False)
        slow = Slowed(True, 0.02 * (1 + (comm.rank == 0)))
        trainer = trainer_on(path, comm, kind, servers, model=slow, epochs=1, checkpoints=checkpoints)
        timer = threading.Timer(0.2, lambda: trainer.request_stop("SIGTERM"))
        if comm.rank == rank:
            timer.start()
        with pytest.raises(TrainingStopped, match="stopped by SIGTERM after step") as raised:
            list(trainer.run())
        timer.cancel()
        assert len(set(comm.allgather(str(raised.value)))) == 1
        again = trainer_on(path, comm, kind, servers, epochs=1, checkpoints=checkpoints)
        checkpoint, _ = checkpoints.prepare(comm, resume=True)
        again.resume(checkpoint)
        assert 0 < again.step < 150, "it went on to the end of the epoch"
        (epoch,) = again.run()
    assert epoch.train_accuracy > 0.5


@limit(30)
@each(text=["é" * 2000, "\U0001f600" * 2000, "a" * 5000])
def case_a_long_error_of_a_worker_is_cut_between_characters(comm, text):
    workers = possible(comm, 1)
    with samples(comm) as path:
        trainer = trainer_on(path, comm, SynchronousParameterServer, model=Failing(comm.rank == workers - 1, text=text))
        with pytest.raises(Exception, match=text[:50]) as raised:
            list(trainer.run())
    assert len(set(comm.allgather(str(raised.value)))) == 1
    assert comm.size == 1 or str(raised.value).endswith(text[:50] + "...")


@each(kind=BOTH)
def case_workers_without_samples_take_part(comm, kind):
    with written(comm, "1 1:1 5:2\n-1 2:1 5:-1\n") as path:
        trainer = trainer_on(path, comm, kind, batch=1)
        epochs = list(trainer.run())
    assert comm.allreduce(trainer.dataset.rows) == 2
    assert epochs[-1].train_accuracy == 1.0
    assert np.flatnonzero(trainer.weights.to_array()[:-1]).tolist() == [0, 1, 4]


@each(kind=BOTH)
def case_more_servers_than_features_leave_some_idle(comm, kind):
    servers = max(1, comm.size - 1)
    with written(comm, "1 1:1 2:2\n-1 2:-1\n") as path:
        train = samples_on_workers(path, comm, servers, features=None)
        strategy = kind(train, comm, DESCENT, servers=servers)
        list(Trainer(Logistic(), strategy, Constant(0.5), Options(3, 1)).run())
    assert np.count_nonzero(strategy.weights.to_array()[:2]) == 2


@each(servers=[0, 1, 1000])
def case_servers_that_leave_no_worker_are_refused(comm, servers):
    if servers == 1:
        servers = comm.size if comm.size > 1 else 2
    with written(comm, "1 1:1\n-1 2:1\n") as path, pytest.raises(AlgorithmError, match="server"):
        samples_on_workers(path, comm, servers)
    assert comm.allreduce(1) == comm.size


def case_bad_data_is_an_error_of_the_servers_too(comm):
    with written(comm, "1 1:x\n") as path, pytest.raises(DatasetError, match=r"samples\.svm"):
        samples_on_workers(path, comm, 1)
    assert comm.allreduce(1) == comm.size


@limit(90)
@each(kind=BOTH, servers=[1, 2])
def case_run_resumed_from_a_checkpoint_ends_where_an_undisturbed_one_does(comm, kind, servers):
    """To the same bits with the synchronous kind, which may go on from within an epoch."""
    possible(comm, servers)
    with samples(comm) as path, shared_folder(comm) as folder:
        undisturbed = trainer_on(path, comm, kind, servers, epochs=3)
        list(undisturbed.run())
        checkpoints = Checkpoints(folder / "checkpoints", every_steps=2)
        checkpoints.prepare(comm, resume=False)
        failing = Failing(comm.rank == 0, batch=2 * undisturbed.steps)
        broken = trainer_on(path, comm, kind, servers, model=failing, epochs=3, checkpoints=checkpoints)
        with pytest.raises(Exception, match="no luck here"):
            list(broken.run())
        resumed = trainer_on(path, comm, kind, servers, epochs=3, checkpoints=checkpoints)
        checkpoint, _ = checkpoints.prepare(comm, resume=True)
        resumed.resume(checkpoint)
        assert resumed.step > 0
        list(resumed.run())
    ours, theirs = resumed.weights.to_array(), undisturbed.weights.to_array()
    if kind is SynchronousParameterServer:
        assert resumed.step == undisturbed.step
        assert ours.tobytes() == theirs.tobytes()
    np.testing.assert_allclose(ours, theirs, atol=0.3 * np.abs(theirs).max())


class Failing(Logistic):
    """Raises at one of its batches, if it is told to."""

    def __init__(self, fails, batch=3, text="no luck here"):
        self.fails, self.batch, self.batches, self.text = fails, batch, 0, text

    def derivative(self, scores, labels):
        self.batches += 1
        if self.fails and self.batches == self.batch:
            raise ZeroDivisionError(self.text)
        return super().derivative(scores, labels)


@limit(30)
@each(kind=BOTH, where=["first", "last"])
def case_exception_on_one_worker_is_the_error_of_all_ranks(comm, kind, where):
    workers = possible(comm, 1)
    fails = comm.rank == (0 if where == "first" else workers - 1)
    with samples(comm) as path:
        trainer = trainer_on(path, comm, kind, model=Failing(fails))
        with pytest.raises(Exception, match="no luck here") as raised:
            list(trainer.run())
        assert isinstance(raised.value, ZeroDivisionError if comm.size == 1 else sar.SparseAllreduceError)
        assert len(set(comm.allgather(str(raised.value)))) == 1
        trainer = trainer_on(path, comm, kind, epochs=1)  # the communicator is fit for another run
        assert len(list(trainer.run())) == 1


@limit(30)
@each(kind=BOTH, servers=[1, 2])
def case_diverging_weights_are_the_error_of_all_ranks(comm, kind, servers):
    possible(comm, servers)
    with samples(comm) as path:
        trainer = trainer_on(path, comm, kind, servers, model="linear", rate=90.0, epochs=60)
        with pytest.raises(DivergenceError, match="lower the learning rate") as raised:
            list(trainer.run())
    assert len(set(comm.allgather(str(raised.value)))) == 1
