"""Several classes at once under MPI: the same weights for any number of ranks, every strategy, and errors that all ranks share."""

from functools import partial

import numpy as np
from cases_replica import sharing
from mpi_cases import each, limit, on_ranks, shared_folder

import sparseallreduce as sar
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear import (
    Checkpoints,
    Constant,
    DenseStrategy,
    Descent,
    Hinge,
    LogisticRegression,
    Multinomial,
    OneVsRest,
    Options,
    OverlappedStrategy,
    SparseStrategy,
    SynchronousParameterServer,
    Trainer,
    load,
    numbered_classes,
)
from sparseallreduce.linear.strategies import AsynchronousParameterServer, read_on_workers
from sparseallreduce.linear.strategies.lossy import GTopkStrategy, OkTopkStrategy

RANKS = (1, 2, 4)
FEATURES, CLASSES, SAMPLES = 500, 5, 90
MODELS = {"multinomial": partial(Multinomial, CLASSES), "ovr": lambda: OneVsRest(Hinge(), CLASSES)}


def text(classes=CLASSES, samples=SAMPLES):
    """Samples in the order of their classes, so that no rank but one has the last."""
    rng = np.random.default_rng(8)
    lines = []
    for label in np.sort(np.arange(samples) % classes):
        features = np.unique(np.r_[rng.choice(FEATURES, 6), 20 * label + rng.choice(20, 4)]) + 1
        lines.append(f"{label + 3} " + " ".join(f"{feature}:1" for feature in features) + "\n")
    return "".join(lines)


def trainer(path, comm, strategy, model="multinomial", descent=None, checkpoints=None, **options):
    """A trainer on a file, with servers that have read nothing where there are any."""

    def read(workers):
        return load(path, comm=workers, n_features=FEATURES)

    serving = strategy in (SynchronousParameterServer, AsynchronousParameterServer)
    train, _ = read_on_workers(comm, 1, read) if serving else read(comm)
    train, _ = numbered_classes(train, comm)
    kept = strategy(train, comm, descent or Descent(1e-3, True, columns=CLASSES))
    return Trainer(MODELS[model](), kept, Constant(0.5), Options(3, global_batch=12, **options), checkpoints=checkpoints)


def written(comm, folder, **given):
    if comm.rank == 0:
        (folder / "samples.svm").write_text(text(**given))
    comm.Barrier()
    return folder / "samples.svm"


EXACT = [SparseStrategy, DenseStrategy, SynchronousParameterServer]
DESCENTS = {
    "plain": Descent(1e-3, True, columns=CLASSES),
    "lazy": Descent(1e-3, True, 1e-4, 0.5, average_from=4, columns=CLASSES),
    "adaptive": Descent(1e-3, True, 1e-4, columns=CLASSES, update="ftrl"),
}


@limit(120)
@each(strategy=EXACT, model=MODELS, descent=DESCENTS)
def case_any_number_of_ranks_ends_at_the_same_weights(comm, strategy, model, descent):
    with shared_folder(comm) as folder:
        path = written(comm, folder)
        ours = trainer(path, comm, strategy, model, DESCENTS[descent])
        epochs = list(ours.run(ours.dataset))
        alone = trainer(path, sar.SERIAL, SparseStrategy, model, DESCENTS[descent])
        expected = list(alone.run(alone.dataset))
    weights = ours.weights.to_array()
    assert weights.shape == (FEATURES + 1, CLASSES) and np.count_nonzero(weights) > 100
    assert len(set(comm.allgather(weights.tobytes()))) == 1, "replicas have drifted apart"
    np.testing.assert_allclose(weights, alone.weights.to_array(), rtol=1e-3, atol=1e-5)
    assert [(epoch.train_accuracy, epoch.test_accuracy) for epoch in epochs] == [(e.train_accuracy, e.test_accuracy) for e in expected]
    np.testing.assert_allclose([epoch.loss for epoch in epochs], [epoch.loss for epoch in expected], rtol=1e-4)
    assert epochs[-1].train_accuracy > 0.9 and epochs[-1].train_auc is None


@limit(120)
@each(strategy=[OverlappedStrategy, AsynchronousParameterServer, OkTopkStrategy, GTopkStrategy], model=MODELS)
def case_strategies_of_other_steps_learn_too(comm, strategy, model):
    with shared_folder(comm) as folder:
        ours = trainer(written(comm, folder), comm, partial(strategy, density=0.2) if "Topk" in strategy.__name__ else strategy, model)
        epochs = list(ours.run())
    weights = ours.weights.to_array()
    assert len(set(comm.allgather(weights.tobytes()))) == 1, "replicas have drifted apart"
    assert epochs[-1].loss < epochs[0].loss and epochs[-1].train_accuracy > 0.6


@on_ranks(2, 4)
@limit(120)
@each(descent=DESCENTS, strategy=[SparseStrategy, DenseStrategy, OkTopkStrategy])
def case_a_shared_replica_changes_no_bit(comm, descent, strategy):
    fixed = partial(strategy, algorithm="ssar_recursive_doubling") if strategy is SparseStrategy else strategy
    ends = []
    with shared_folder(comm) as folder:
        path = written(comm, folder)
        for shared in (False, True):
            with sharing(shared):
                ours = trainer(path, comm, fixed, descent=DESCENTS[descent])
                list(ours.run())
            assert (ours.weights._replica is not None) == shared
            ends.append(ours.weights.to_array())
    np.testing.assert_array_equal(ends[1].view(np.uint32), ends[0].view(np.uint32))


@limit(120)
@each(strategy=[*EXACT, OverlappedStrategy, OkTopkStrategy], descent=DESCENTS)
def case_a_resumed_run_ends_at_the_same_bits(comm, strategy, descent):
    fixed = partial(strategy, algorithm="ssar_recursive_doubling") if issubclass(strategy, SparseStrategy) else strategy
    with shared_folder(comm) as folder:
        path = written(comm, folder)
        whole = trainer(path, comm, fixed, descent=DESCENTS[descent], checkpoints=Checkpoints(folder / "kept", every_steps=5))
        whole.checkpoints.prepare(comm, resume=False)
        list(whole.run())
        comm.Barrier()
        if comm.rank == 0:  # what is left is the checkpoint of an earlier step
            max((folder / "kept").glob("*.npz")).unlink()
        comm.Barrier()
        again = trainer(path, comm, fixed, descent=DESCENTS[descent], checkpoints=Checkpoints(folder / "kept", every_steps=5))
        found, _ = again.checkpoints.prepare(comm, resume=True)
        again.resume(found)
        assert 0 < again.step < whole.step
        list(again.run())
    np.testing.assert_array_equal(again.weights.to_array(), whole.weights.to_array())


def case_ranks_without_samples_and_a_batch_of_one(comm):
    with shared_folder(comm) as folder:
        path = written(comm, folder, classes=CLASSES, samples=CLASSES)
        with_few = trainer(path, comm, SparseStrategy)
        epochs = list(with_few.run())
    assert with_few.weights.to_array()[-1].any() and epochs[-1].steps == 1
    assert len(set(comm.allgather(with_few.weights.to_array().tobytes()))) == 1


def told(comm, action):
    """The message of the error that all ranks raise."""
    try:
        action()
        message = None
    except (DatasetError, ValueError) as error:
        message = str(error)
    assert message is not None and len(set(comm.allgather(message))) == 1
    return message


def case_what_is_wrong_on_one_rank_is_the_same_error_on_all(comm):
    with shared_folder(comm) as folder:
        path = written(comm, folder)
        train, _ = numbered_classes(load(path, comm=comm, n_features=FEATURES)[0], comm)
        columns = CLASSES + (comm.rank == comm.size - 1)
        strategy = SparseStrategy(train, comm, Descent(columns=columns)) if comm.size == 1 else None
        if strategy is None:
            kept = SparseStrategy(train, comm, Descent(columns=CLASSES))
            model = Multinomial(columns)
            assert "has 6 scores, and the strategy 5" in told(comm, lambda: Trainer(model, kept, Constant(0.1), Options(1)))
        else:
            message = told(comm, lambda: Trainer(Multinomial(CLASSES), strategy, Constant(0.1), Options(1)))
            assert "has 5 scores, and the strategy 6" in message
        last = load(path, comm=comm, n_features=FEATURES)[0]
        labels = last.labels.copy()
        if comm.rank == comm.size - 1:
            labels[-1] = np.nan
        strange = type(last)(last.indptr, last.indices, last.values, labels, FEATURES, last.first_sample, last.total_samples)
        assert "the label of sample 89 is nan, which is not a class" in told(comm, lambda: numbered_classes(strange, comm))


@each(choice=["auto", "ovr"])
def case_estimators_learn_classes_that_one_rank_alone_has(comm, choice):
    rng = np.random.default_rng(3)
    X, y = rng.standard_normal((80, 6)), np.sort(np.arange(80) % 4)
    X[np.arange(80), y] += 3
    own = np.array_split(np.arange(80), comm.size)[comm.rank]
    settings = {"multi_class": choice, "max_iter": 10, "tol": None, "learning_rate": 0.2}
    ours = LogisticRegression(comm=comm, batch_size=5, **settings).fit(X[own], y[own])
    alone = LogisticRegression(comm=sar.SERIAL, batch_size=5 * comm.size, **settings).fit(X, y)
    assert ours.coef_.shape == (4, 6) and len(set(comm.allgather(ours.coef_.tobytes()))) == 1
    np.testing.assert_allclose(ours.coef_, alone.coef_, rtol=1e-6, atol=1e-9)
    assert ours.score(X[own], y[own]) == alone.score(X, y)
