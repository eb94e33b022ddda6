"""Steps that every rank takes by itself, and sums of what they have changed, under MPI."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import scipy.sparse
from mpi_cases import each, on_ranks, shared_folder, skip

from sparseallreduce.errors import DivergenceError, SparseAllreduceError, TrainingStopped
from sparseallreduce.linear import (
    MODELS,
    STRATEGIES,
    Checkpoints,
    Constant,
    Dataset,
    Descent,
    EarlyStopping,
    LinearRegression,
    LinearSVM,
    LocalStepsStrategy,
    LogisticRegression,
    Options,
    SparseStrategy,
    Trainer,
    load,
)
from sparseallreduce.linear.data.binary import reader
from sparseallreduce.linear.data.binary.writer import write_binary
from sparseallreduce.linear.data.occurring import only_occurring
from sparseallreduce.linear.multiclass import Multinomial

RANKS = (1, 2, 3, 5)
FEATURES, SAMPLES = 300, 400


def samples(comm, bounds=None, dtype=np.float32, features=FEATURES):
    """This rank's samples of a problem, by default about as many as each other's; the last features are rare."""
    rng = np.random.default_rng(5)
    chance = 4 / (4 + np.arange(FEATURES))
    X = scipy.sparse.csr_array((rng.random((SAMPLES, FEATURES)) < chance) * rng.standard_normal((SAMPLES, FEATURES)))
    y = np.where(X @ rng.standard_normal(FEATURES) > 0, 1.0, -1.0)
    bounds = np.linspace(0, SAMPLES, comm.size + 1).astype(int) if bounds is None else bounds
    low, high = int(bounds[comm.rank]), int(bounds[comm.rank + 1])
    data = Dataset.from_scipy(X[low:high], y[low:high], first_sample=low, total_samples=SAMPLES)
    scattered = data.indices.astype(np.uint32) * np.uint32(features // FEATURES)
    return replace(data, values=data.values.astype(dtype), indices=scattered, features=features)


def trainer(comm, data=None, descent=None, kind=LocalStepsStrategy, epochs=3, checkpoints=None, model="logistic", **options):
    data = samples(comm) if data is None else data
    strategy = kind(data, comm, descent or Descent(intercept=True, update="ftrl", beta=0.1), **options)
    return Trainer(MODELS[model](), strategy, Constant(0.3), Options(epochs, global_batch=10), checkpoints=checkpoints)


def alike(comm, array):
    return len({each.tobytes() for each in comm.allgather(np.asarray(array))}) == 1


@each(
    descent=[
        Descent(update="ftrl"),
        Descent(intercept=True, update="ftrl", beta=0.1),
        Descent(l1=1e-3, l2=1e-3, intercept=True, update="ftrl"),
    ],
    dtype=[np.float32, np.float64],
    sums=[None, 1, 7],
)
def case_all_ranks_end_at_the_same_weights_run_after_run(comm, descent, dtype, sums):
    ends = []
    for _ in range(2):
        made = trainer(comm, samples(comm, dtype=dtype), descent, sums=sums)
        epochs = list(made.run())
        ends.append(made.weights.to_array())
        assert alike(comm, ends[-1]) and alike(comm, made.weights._norms)
        assert made.weights.to_array().dtype == dtype
        assert epochs[-1].train_accuracy > 0.85 and epochs[-1].loss < epochs[0].loss
        if comm.size > 1:
            assert sums is None or [epoch.measures["sums"] for epoch in epochs] == [sums] * 3
            assert 0 < epochs[0].measures["shared_features"] < FEATURES
    np.testing.assert_array_equal(*ends)


@on_ranks(1)
@each(penalty=[0.0, 1e-3], intercept=[False, True], threads=[1, 2])
def case_one_rank_steps_as_with_the_sparse_strategy(comm, penalty, intercept, threads):
    descent = Descent(l1=penalty, l2=penalty, intercept=intercept, update="ftrl", beta=0.2)
    runs = [trainer(comm, descent=descent, kind=kind, threads=threads) for kind in (LocalStepsStrategy, SparseStrategy)]
    losses = [[epoch.loss for epoch in run.run()] for run in runs]
    assert losses[0] == losses[1]
    np.testing.assert_array_equal(*(run.weights.to_array() for run in runs))


@each(shape=["none but the first", "most on the last", "none in the middle"])
def case_ranks_may_have_any_part_of_the_samples(comm, shape):
    if comm.size == 1:
        skip("needs two ranks")
    last = comm.size - 1
    bounds = {
        "none but the first": [0] + [SAMPLES] * comm.size,
        "most on the last": [*range(comm.size), SAMPLES],
        "none in the middle": [0] + [SAMPLES // 2] * last + [SAMPLES],
    }[shape]
    made = trainer(comm, samples(comm, bounds))
    epochs = list(made.run())
    assert epochs[-1].train_accuracy > 0.85
    assert alike(comm, made.weights.to_array())


def case_a_feature_of_one_rank_alone_keeps_its_bits(comm):
    if comm.size == 1:
        skip("needs two ranks")
    made = trainer(comm, epochs=1)
    strategy, before = made.strategy, {}

    def drain():
        before.update({int(feature): strategy.weights.unscaled[feature].tobytes() for feature in strategy._private})
        LocalStepsStrategy.drain(strategy)

    strategy.warm_up()
    strategy.drain = drain
    list(made.run())
    everyones = {feature: bits for own in comm.allgather(before) for feature, bits in own.items()}
    assert 0 < len(everyones) == sum(map(len, comm.allgather(before)))
    weights = made.weights.to_array()
    assert all(weights[feature].tobytes() == bits for feature, bits in everyones.items())
    assert any(weights[feature] for feature in everyones)


@each(model=["logistic", "svm", "linear"], validation=[0.0, 0.2])
def case_few_sums_learn_as_well_as_one_rank(comm, model, validation):
    data = samples(comm)
    strategy = LocalStepsStrategy(data, comm, Descent(intercept=True, update="ftrl", beta=0.1))
    stopping = EarlyStopping("progressive_loss", 5)
    options = Options(5, global_batch=10, validation=validation)
    run = Trainer(MODELS[model](), strategy, Constant(0.3), options, stopping=stopping)
    epochs = list(run.run(data))
    assert epochs[-1].loss < epochs[0].loss
    assert model == "linear" or epochs[-1].test_accuracy > 0.85
    assert alike(comm, run.weights.to_array())
    assert (run.best is None) == (not validation)


def case_classes_are_told_apart_by_columns(comm):
    data = samples(comm)
    sums = abs(data.to_scipy()).sum(axis=1)
    data = replace(data, labels=np.digitize(sums, [5.0, 9.0]).astype(float))
    made = LocalStepsStrategy(data, comm, Descent(intercept=True, update="ftrl", columns=3))
    run = Trainer(Multinomial(3), made, Constant(0.3), Options(3, global_batch=10))
    epochs = list(run.run())
    assert epochs[-1].loss < epochs[0].loss
    assert alike(comm, run.weights.to_array())


@each(penalty=[0.0, 1e-3])
def case_a_stopped_run_goes_on_to_the_same_bits(comm, penalty):
    descent = Descent(l1=penalty, intercept=True, update="ftrl", beta=0.1)
    with shared_folder(comm) as folder:
        made = partial(trainer, comm, descent=descent, sums=5)
        whole = made()
        list(whole.run())
        stopped = made(checkpoints=Checkpoints(folder))
        stopped.checkpoints.prepare(comm, resume=False)
        last = comm.size - 1
        with pytest.raises(TrainingStopped):
            list(stopped.run(on_step=lambda: stopped.step == 51 and comm.rank == last and stopped.request_stop("SIGTERM")))
        again = made(checkpoints=Checkpoints(folder))
        found, _ = again.checkpoints.prepare(comm, resume=True)
        again.resume(found)
        assert 51 <= again.step < 120
        list(again.run())
        np.testing.assert_array_equal(again.weights.to_array(), whole.weights.to_array())
        group = comm.Split(comm.rank)
        if comm.rank == 0:  # fewer ranks go on, too
            alone = trainer(group, samples(group), descent, sums=5, checkpoints=Checkpoints(folder))
            found, _ = alone.checkpoints.prepare(group, resume=True)
            alone.resume(found)
            list(alone.run())
        comm.Barrier()


@each(error=[KeyboardInterrupt, OSError])
def case_what_ends_one_rank_ends_all(comm, error):
    made = trainer(comm, epochs=50)
    last = comm.size - 1

    def on_step():
        if made.step == 30 and comm.rank == last:
            raise error("here")

    with pytest.raises(error if comm.rank == last and error is KeyboardInterrupt else (SparseAllreduceError, error)):
        list(made.run(on_step=on_step))
    assert len(comm.allgather(None)) == comm.size


def case_a_weight_that_is_no_number_on_one_rank_ends_all(comm):
    data = samples(comm)
    if comm.rank == comm.size - 1:
        data = replace(data, values=np.where(np.arange(data.nnz) == 50, np.float32(3e38), data.values))
    made = trainer(comm, data, Descent(update="ftrl"), model="linear", epochs=20)
    with np.errstate(all="ignore"), pytest.raises(SparseAllreduceError) as told:
        list(made.run())
    assert alike(comm, np.frombuffer(str(told.value).encode(), np.uint8)) or isinstance(told.value, DivergenceError)


def case_steps_of_sgd_have_no_norms_to_go_by(comm):
    with pytest.raises(SparseAllreduceError, match="the strategy local does not support the update sgd"):
        STRATEGIES["local"](samples(comm), comm, Descent())


def case_a_file_larger_than_the_memory_is_learned_to_the_same_bits(comm):
    data, learned = samples(comm), []
    with shared_folder(comm) as folder, pytest.MonkeyPatch.context() as patch:
        write_binary(folder / "a.csr", data, comm)
        for left in (1e12, 1000.0):
            patch.setattr(reader, "memory_left", lambda left=left: left)
            found, _ = load(folder / "a.csr", comm=comm)
            assert (found.pages is None) == (left > 1e6)
            made = trainer(comm, found)
            list(made.run())
            learned.append(made.weights.to_array())
    np.testing.assert_array_equal(*learned)
    assert alike(comm, learned[0])


@each(bits=[20, 31, 40])
def case_weights_of_features_that_occur_are_numbered_by_all_ranks(comm, bits):
    data = samples(comm, features=FEATURES)
    step = 2**bits // FEATURES
    scattered = replace(data, indices=data.indices.astype(np.uint64 if bits > 32 else np.uint32) * step, features=2**bits)
    found = only_occurring(scattered, comm)
    assert len(found) == FEATURES and alike(comm, found.features)
    runs = [trainer(comm, each) for each in (data, found.renumbered(scattered))]
    for run in runs:
        list(run.run())
    np.testing.assert_array_equal(*(run.weights.to_array() for run in runs))


@each(warm=[False, True], estimator=[LogisticRegression, LinearSVM, LinearRegression])
def case_estimators_take_local_steps_where_they_fit_by_adaptive_ones(comm, warm, estimator):
    data = samples(comm)
    X, y = data.to_scipy(), data.labels
    model = estimator(update="ftrl", max_iter=6, tol=None, l2=0.0, warm_start=warm, comm=comm)
    for _ in range(2):
        model.fit(X, y)
        assert ("sums" in model.history_[0][-1].measures) == (comm.size > 1)
        assert alike(comm, model.coef_) and alike(comm, model.intercept_)
    assert model.score(X, y) > (0.2 if estimator is LinearRegression else 0.9)
    assert model.history_[0][-1].loss < model.history_[0][0].loss


def case_a_stream_of_samples_may_be_learned_by_local_steps(comm):
    data = samples(comm)
    X, y = data.to_scipy(), data.labels
    model = LogisticRegression(update="ftrl", strategy="local", l2=0.0, comm=comm)
    for _ in range(3):
        for low in range(0, X.shape[0], 20):
            model.partial_fit(X[low : low + 20], y[low : low + 20], classes=[-1.0, 1.0])
    assert model.score(X, y) > 0.85
    assert alike(comm, model.coef_) and alike(comm, model.intercept_)
