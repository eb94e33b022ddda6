"""Checkpoints: what is read is what was written, damage is noticed, and training goes on to the same bits."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.errors import CheckpointError, DivergenceError, TrainingStopped
from sparseallreduce.linear import (
    MODELS,
    Checkpoints,
    Constant,
    Dataset,
    DenseStrategy,
    Descent,
    EarlyStopping,
    Options,
    OverlappedStrategy,
    SparseStrategy,
    SynchronousParameterServer,
    Trainer,
)
from sparseallreduce.linear.training.checkpoint import Checkpoint, data_fingerprint, read_checkpoint, write_checkpoint
from sparseallreduce.linear.training.schedules import BoldDriver

SAMPLE = Checkpoint(
    {"model": "svm", "l2": 0.1},
    {"step": 3, "epochs": []},
    {
        "direction": np.arange(50, dtype=np.float32),
        "scale": 0.1 + 0.2,
        "last": np.arange(9, dtype=np.uint16),
        "table": ((1.5, np.inf), (2.0, 0.1)),
    },
)


def problem(rows=90, features=40, seed=1):
    rng = np.random.default_rng(seed)
    matrix = np.where(rng.random((rows, features)) < 0.3, rng.standard_normal((rows, features)), 0).astype(np.float32)
    return Dataset.from_scipy(scipy.sparse.csr_array(matrix), np.where(matrix @ rng.standard_normal(features) > 0, 1.0, -1.0))


def trainer(folder=None, strategy=SparseStrategy, descent=None, epochs=3, dataset=None, every_steps=None, rate=0.2, **options):
    descent = descent or Descent(1e-3, True, 1e-4, 0.5, False, 20)
    checkpoints = None if folder is None else Checkpoints(folder, every_steps)
    made = strategy(dataset or problem(), sar.SERIAL, descent)
    schedule, stopping = BoldDriver(rate), EarlyStopping("loss", 50)
    return Trainer(MODELS["logistic"](), made, schedule, Options(epochs, 7, **options), stopping=stopping, checkpoints=checkpoints)


def resumed(folder, **options):
    again = trainer(folder, **options)
    checkpoint, _ = again.checkpoints.prepare(sar.SERIAL, resume=True)
    again.resume(checkpoint)
    return again


def stopped_at(folder, step, **options):
    """A run that was asked to stop after so many steps."""
    run = trainer(folder, **options)
    with pytest.raises(TrainingStopped, match=rf"stopped by SIGTERM after step {step}; a checkpoint is in"):
        list(run.run(on_step=lambda: run.step == step and run.request_stop("SIGTERM")))
    return run


def test_what_is_read_is_what_was_written(tmp_path):
    write_checkpoint(tmp_path / "one.npz", SAMPLE)
    again = read_checkpoint(tmp_path / "one.npz")
    assert (again.identity, again.progress) == (SAMPLE.identity, SAMPLE.progress)
    for name, value in SAMPLE.state.items():
        np.testing.assert_array_equal(again.state[name], value)
    assert again.state["direction"].dtype == np.float32
    assert [path.name for path in tmp_path.iterdir()] == ["one.npz"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("written") / "one.npz"
    write_checkpoint(path, SAMPLE)
    return path


@given(st.data())
@settings(max_examples=examples(300))
def test_damage_is_noticed_or_is_outside_what_the_file_holds(written, data):
    content = bytearray(written.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    damaged = written.with_name("damaged.npz")
    damaged.write_bytes(content)
    try:
        again = read_checkpoint(damaged)
    except CheckpointError as error:
        told = str(error)
        assert told.startswith((f"{damaged} ", f"cannot read {damaged}"))
    else:
        assert again.progress == SAMPLE.progress
        for name, value in SAMPLE.state.items():
            np.testing.assert_array_equal(again.state[name], value)


@pytest.mark.parametrize(("left_out", "added"), [("state/last", None), (None, "state/more"), ("state/last", "state/more")])
def test_arrays_that_are_missing_or_more_than_there_were_are_damage(written, left_out, added):
    """Each member of the file is whole."""
    damaged = written.with_name("arrays.npz")
    with np.load(written) as file:
        members = {name: file[name] for name in file.files if name != left_out}
    assert (left_out is None) == ("state/last" in members)
    np.savez(damaged, **members, **({} if added is None else {added: np.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"arrays\.npz is damaged"):
        read_checkpoint(damaged)


@pytest.mark.parametrize("strategy", [SparseStrategy, DenseStrategy, OverlappedStrategy, SynchronousParameterServer])
@pytest.mark.parametrize("step", [1, 12, 13, 20, 39])
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, strategy, step, monkeypatch):
    monkeypatch.setattr("sparseallreduce.linear.training.trainer.Consensus", EveryStep)
    whole = trainer(strategy=strategy)
    epochs = list(whole.run())
    stopped_at(tmp_path, step, strategy=strategy)

    again = resumed(tmp_path, strategy=strategy)
    assert again.step == step
    list(again.run())

    np.testing.assert_array_equal(again.weights.to_array(), whole.weights.to_array())
    assert again.step == whole.step == 39
    figures = [(epoch.loss, epoch.train_accuracy, epoch.train_auc, epoch.learning_rate, epoch.progressive_accuracy) for epoch in epochs]
    assert figures == [
        (epoch.loss, epoch.train_accuracy, epoch.train_auc, epoch.learning_rate, epoch.progressive_accuracy) for epoch in again.history
    ]
    assert [epoch.progressive_loss for epoch in again.history] == pytest.approx([epoch.progressive_loss for epoch in epochs], rel=1e-12)


class EveryStep:
    """A consensus that is looked for after every step, so that a run stops where it is told to."""

    def __init__(self, comm, before):
        self._before = before

    def after_step(self, wish):
        self._before()
        return [] if wish is None else [wish]


def test_checkpoints_change_nothing(tmp_path):
    plain, often = trainer(), trainer(tmp_path, every_steps=5)
    for run in (plain, often):
        list(run.run())
    np.testing.assert_array_equal(plain.weights.to_array(), often.weights.to_array())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000000035.npz", "step-000000000039.npz"]


def test_a_finished_run_resumes_to_its_end_and_further(tmp_path):
    longer = trainer(epochs=5)
    list(longer.run())
    list(trainer(tmp_path).run())
    assert [epoch.epoch for epoch in resumed(tmp_path).run()] == [3]
    further = resumed(tmp_path, epochs=5)
    list(further.run())
    np.testing.assert_array_equal(further.weights.to_array(), longer.weights.to_array())


def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path):
    list(trainer(tmp_path).run())
    newest, before = sorted(tmp_path.iterdir(), reverse=True)
    newest.write_bytes(newest.read_bytes()[:-100])
    checkpoint, remarks = Checkpoints(tmp_path).prepare(sar.SERIAL, resume=True)
    assert checkpoint.progress["step"] == int(before.stem.split("-")[1])
    assert len(remarks) == 1 and f"{newest} is damaged" in remarks[0]
    before.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"all checkpoints in .* are damaged"):
        Checkpoints(tmp_path).prepare(sar.SERIAL, resume=True)


def test_a_damaged_checkpoint_takes_no_place_of_the_two(tmp_path):
    list(trainer(tmp_path, every_steps=5).run())
    newest, _ = sorted(tmp_path.iterdir(), reverse=True)
    newest.write_bytes(b"")
    again = Checkpoints(tmp_path)
    again.prepare(sar.SERIAL, resume=True)
    for step in (36, 37, 38):
        again.save(step, SAMPLE, sar.SERIAL)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*(f"step-{step:012}.npz" for step in (37, 38)), newest.name]
    for step in (40, 41, 42):
        again.save(step, SAMPLE, sar.SERIAL)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:012}.npz" for step in (41, 42)]


def test_a_checkpoint_of_another_layout_is_not_called_damaged(tmp_path, monkeypatch):
    list(trainer(tmp_path).run())
    with monkeypatch.context() as patch:
        patch.setattr("sparseallreduce.linear.training.checkpoint._LAYOUT", "sparseallreduce checkpoint 99")
        Checkpoints(tmp_path).save(1000, SAMPLE, sar.SERIAL)
    with pytest.raises(CheckpointError, match=r"has the layout 'sparseallreduce checkpoint 99', .*: continue with the version") as raised:
        Checkpoints(tmp_path).prepare(sar.SERIAL, resume=True)
    assert "damaged" not in str(raised.value)


def test_a_folder_is_taken_as_it_should_be(tmp_path):
    checkpoint, remarks = Checkpoints(tmp_path / "new").prepare(sar.SERIAL, resume=True)
    assert checkpoint is None and "starting from the beginning" in remarks[0]
    (tmp_path / "new" / ".step-000000000001.npz").write_bytes(b"half")  # left by a killed run
    assert Checkpoints(tmp_path / "new").prepare(sar.SERIAL, resume=False) == (None, [])
    assert list((tmp_path / "new").iterdir()) == []
    list(trainer(tmp_path).run())
    with pytest.raises(CheckpointError, match="use --resume to continue, or choose another folder"):
        Checkpoints(tmp_path).prepare(sar.SERIAL, resume=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot use .*file for checkpoints"):
        Checkpoints(tmp_path / "file").prepare(sar.SERIAL, resume=False)


@pytest.mark.parametrize(
    "difference,options",
    [
        ("its l2 is 0.001, and here it is 0.01", {"descent": Descent(0.01, True, 1e-4, 0.5, False, 20)}),
        ("its strategy is sparse, and here it is dense", {"strategy": DenseStrategy}),
        ("its seed is 0, and here it is 4", {"seed": 4}),
        ("its batch of all ranks is 7, and here it is 8", {"global_batch": 8}),
        (r"its schedule is BoldDriver\(rate=0.2", {"rate": 0.3}),
        ("its data is", {"dataset": problem(seed=2)}),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_the_difference(tmp_path, difference, options):
    list(trainer(tmp_path).run())
    with pytest.raises(CheckpointError, match=difference):
        resumed(tmp_path, **options)


def with_schedule(folder, schedule, epochs=3, test=None):
    made = SparseStrategy(problem(), sar.SERIAL)
    return Trainer(MODELS["logistic"](), made, schedule, Options(epochs, 7), checkpoints=Checkpoints(folder))


def falling(rate):
    """A schedule that is a function, another object at each call."""

    def at(step):
        return rate / (1 + step) if step else 0.5

    return at


class Falling:
    """A schedule that says nothing of itself but where it lies."""

    def __call__(self, step):
        return 0.5 / (1 + step)


@pytest.mark.parametrize("schedule", [lambda: falling(0.5), Falling])
def test_a_run_whose_schedule_is_a_function_is_resumed(tmp_path, schedule):
    list(with_schedule(tmp_path, schedule()).run())
    again = with_schedule(tmp_path, schedule(), epochs=4)
    again.resume(again.checkpoints.prepare(sar.SERIAL, resume=True)[0])
    assert [epoch.epoch for epoch in again.run()] == [3, 4]


def test_a_function_that_gives_other_rates_is_another_run(tmp_path):
    list(with_schedule(tmp_path, falling(0.5)).run())
    again = with_schedule(tmp_path, falling(0.7))
    checkpoint, _ = again.checkpoints.prepare(sar.SERIAL, resume=True)
    with pytest.raises(CheckpointError, match=r"its learning rate of the last step is 0\.01.*, and here it is 0\.01"):
        again.resume(checkpoint)


@pytest.mark.parametrize("before,now", [(None, 5), (5, None), (5, 6)])
def test_epochs_measured_on_another_test_set_are_no_history_of_this_run(tmp_path, before, now):
    sets = {None: None, 5: problem(20, seed=5), 6: problem(20, seed=6)}
    list(trainer(tmp_path).run(sets[before]))
    again = resumed(tmp_path, epochs=5)
    with pytest.raises(CheckpointError, match=r"its test set is .*, and here it is"):
        list(again.run(sets[now]))
    same = resumed(tmp_path, epochs=5)
    assert [epoch.epoch for epoch in same.run(sets[before])] == [3, 4, 5]


def test_a_run_that_was_stopped_in_its_first_epoch_may_take_another_test_set(tmp_path, monkeypatch):
    monkeypatch.setattr("sparseallreduce.linear.training.trainer.Consensus", EveryStep)
    stopped_at(tmp_path, 4)
    assert len(list(resumed(tmp_path).run(problem(20, seed=5)))) == 3


@pytest.mark.parametrize("step", [3, 24, 33])
def test_the_best_model_on_samples_held_out_is_kept_in_checkpoints(tmp_path, monkeypatch, step):
    monkeypatch.setattr("sparseallreduce.linear.training.trainer.Consensus", EveryStep)
    wild = {"rate": 20.0, "validation": 0.2}
    whole = trainer(**wild)
    list(whole.run())
    stopped_at(tmp_path, step, **wild)
    again = resumed(tmp_path, **wild)
    list(again.run())
    assert again.best.epoch == whole.best.epoch
    np.testing.assert_array_equal(again.weights.to_array(), whole.weights.to_array())
    with pytest.raises(CheckpointError, match=r"its share held out is 0\.2, and here it is 0"):
        resumed(tmp_path, rate=20.0)


@pytest.mark.parametrize("strategy", [SparseStrategy, OverlappedStrategy, SynchronousParameterServer])
@pytest.mark.parametrize("every", [None, 5])
def test_early_stopping_leaves_a_checkpoint_of_where_it_stopped(tmp_path, strategy, every):
    def run(epochs):
        made = strategy(problem(), sar.SERIAL, Descent(1e-3, True, 1e-4, 0.5))
        stopping = EarlyStopping("loss", 2, tolerance=100.0)
        checkpoints = Checkpoints(tmp_path, every)
        return Trainer(MODELS["logistic"](), made, Constant(0.2), Options(epochs, 7), stopping=stopping, checkpoints=checkpoints)

    first = run(50)
    assert len(list(first.run())) == 3
    again = run(80)
    checkpoint, remarks = again.checkpoints.prepare(sar.SERIAL, resume=True)
    again.resume(checkpoint)
    assert again.step == first.step == 39 and not remarks
    list(again.run())
    assert (len(again.history), again.step) == (3, 39), "it had stopped, and has gone on"
    np.testing.assert_array_equal(again.weights.to_array(), first.weights.to_array())


def test_the_last_good_checkpoint_outlives_a_divergence(tmp_path):
    dataset = problem()
    wild = replace(dataset, values=dataset.values * np.float32(1e4))
    run = Trainer(
        MODELS["linear"](), SparseStrategy(wild, sar.SERIAL), Constant(1e-3), Options(20, 7), checkpoints=Checkpoints(tmp_path, 2)
    )
    with np.errstate(all="ignore"), pytest.raises(DivergenceError, match=r"after step \d+: lower the learning rate \(0.001 there\)"):
        list(run.run())
    checkpoint, remarks = Checkpoints(tmp_path).prepare(sar.SERIAL, resume=True)
    assert not remarks
    assert np.isfinite(checkpoint.state["direction"]).all()


def test_a_checkpoint_that_cannot_be_written_names_the_reason(tmp_path):
    run = trainer(tmp_path / "gone")  # which nobody has made
    with pytest.raises(CheckpointError, match=r"cannot write a checkpoint to .*: No such file or directory"):
        list(run.run())


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_fingerprint_tells_data_apart_and_not_how_they_are_shared(ranks):
    dataset = problem()

    def part(comm, changed=dataset):
        bounds = [90 * rank // ranks for rank in range(ranks + 1)]
        first, last = bounds[comm.rank], bounds[comm.rank + 1]
        matrix = changed.to_scipy()[first:last]
        return data_fingerprint(Dataset.from_scipy(matrix, changed.labels[first:last], first_sample=first, total_samples=90), comm)

    known = data_fingerprint(dataset, sar.SERIAL)
    assert on_ranks(ranks, part) == [known] * ranks
    values, labels, indices = dataset.values.copy(), dataset.labels.copy(), dataset.indices.copy()
    values[7] *= 2
    labels[3] *= -1
    indices[5] += 1
    for other in (replace(dataset, values=values), replace(dataset, labels=labels), replace(dataset, indices=indices)):
        assert data_fingerprint(other, sar.SERIAL) != known
    weighted = replace(dataset, weights=np.linspace(0.5, 1.5, 90))
    assert data_fingerprint(weighted, sar.SERIAL) != known


def test_a_checkpoint_is_due_so_many_minutes_after_the_last(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("sparseallreduce.linear.training.checkpoint.time.monotonic", lambda: now)
    checkpoints = Checkpoints(tmp_path, every_minutes=2)
    assert not checkpoints.overdue()
    now += 119
    assert not checkpoints.overdue()
    now += 1
    assert checkpoints.overdue()
    checkpoints.save(3, SAMPLE, sar.SERIAL)
    assert not checkpoints.overdue()
    assert not Checkpoints(tmp_path, every_steps=2).overdue()
