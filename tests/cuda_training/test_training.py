"""Training on the device ends where that of the host does, but for rounding."""

import sys
import warnings

import numpy as np
import pytest
from scipy.sparse import csr_array

import sparseallreduce as sar
from sparseallreduce.errors import AlgorithmError, DivergenceError, StreamError
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.models import Hinge, Logistic, Poisson, Squared
from sparseallreduce.linear.multiclass import Multinomial, OneVsRest
from sparseallreduce.linear.strategies import STRATEGIES, OverlappedStrategy, SparseStrategy
from sparseallreduce.linear.training.checkpoint import Checkpoints
from sparseallreduce.linear.training.schedules import Constant, InverseTime
from sparseallreduce.linear.training.trainer import Options, SparseBatchWarning, Trainer
from sparseallreduce.linear.weights import Descent

pytestmark = pytest.mark.filterwarnings("ignore::sparseallreduce.linear.training.trainer.SparseBatchWarning")

FTRL = {"update": "ftrl", "beta": 0.5}
CASES = {
    "sparse, logistic": ("sparse", Logistic(), {"l2": 0.05}, {}),
    "dense, hinge": ("dense", Hinge(), {"l2": 0.05}, {}),
    "sparse, ftrl, penalties": ("sparse", Logistic(), FTRL | {"l1": 0.01, "l2": 0.05, "intercept_value": 0.5}, {}),
    "dense, multinomial": ("dense", Multinomial(3), {"l2": 0.05}, {}),
    "sparse, ftrl, one against the rest": ("sparse", OneVsRest(Hinge(), 3), FTRL, {}),
    "oktopk, squared": ("oktopk", Squared(), {"l2": 0.05}, {"density": 0.3}),
    "gtopk, multinomial": ("gtopk", Multinomial(3), {}, {"density": 0.2}),
    "topka, poisson": ("topka", Poisson(), {"intercept": False}, {"density": 0.3}),
    "topkdsa, ftrl": ("topkdsa", Logistic(), FTRL, {"density": 0.3}),
    "hitopk, logistic": ("hitopk", Logistic(), {}, {"density": 0.5}),
    "auto, logistic": ("auto", Logistic(), {}, {"density": 0.3}),
    "gaussiank, logistic": ("gaussiank", Logistic(), {}, {"density": 0.3}),
}


def dataset(model, rows=14, seed=0):
    rng = np.random.default_rng(seed)
    held = csr_array(np.where(rng.random((rows, 9)) < 0.4, rng.standard_normal((rows, 9)), 0))
    labels = rng.integers(0, 3, rows) if model.columns or not model.classifies else rng.choice([-1.0, 1.0], rows)
    plain = Dataset.from_scipy(held, labels)
    weights = np.linspace(0.5, 1.5, rows)
    return Dataset(plain.indptr, plain.indices, plain.values, plain.labels, 9, weights=weights)


def trainer(case, device, epochs=1, schedule=None, data=None, **others):
    name, model, descent, options = CASES[case]
    descent = Descent(**({"intercept": True, "columns": model.columns} | descent))
    strategy = STRATEGIES[name](data or dataset(model), sar.SERIAL, descent, device=device, **options)
    rate = InverseTime(0.3, halving=4)
    return Trainer(model, strategy, schedule or rate, Options(epochs, 5, validation=0.2 if model.columns is None else 0.0), **others)


def figures(history):
    named = ("loss", "train_accuracy", "test_loss", "test_auc", "validation_loss", "progressive_loss", "gradient_density", "total_density")
    return np.array([[getattr(epoch, name) or 0.0 for name in named] for epoch in history])


@pytest.mark.parametrize("case", CASES)
def test_weights_and_figures_are_those_of_the_host(case):
    test = dataset(CASES[case][1], 6, seed=1)
    ours, theirs = trainer(case, "gpu"), trainer(case, "cpu")
    np.testing.assert_allclose(figures(ours.run(test)), figures(theirs.run(test)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(ours.weights.to_array(), theirs.weights.to_array(), rtol=1e-3, atol=1e-5)
    assert type(ours.weights.to_array()) is np.ndarray


@pytest.mark.parametrize("case", ["sparse, logistic", "sparse, ftrl, penalties", "oktopk, squared", "gtopk, multinomial"])
def test_a_checkpoint_of_either_device_is_resumed_on_the_other(case, tmp_path):
    whole = trainer(case, "cpu", 3)
    list(whole.run())
    for place, (first, then) in enumerate([("gpu", "cpu"), ("cpu", "gpu")]):
        folder = tmp_path / str(place)
        checkpoints = Checkpoints(folder, every_steps=4)
        checkpoints.prepare(sar.SERIAL, False)
        stopped = trainer(case, first, 3, checkpoints=checkpoints)
        steps = iter(range(3))
        with pytest.raises(sar.errors.TrainingStopped):
            list(stopped.run(on_step=lambda stopped=stopped, steps=steps: next(steps, None) is None and stopped.request_stop("enough")))
        checkpoints = Checkpoints(folder, every_steps=4)
        found, _ = checkpoints.prepare(sar.SERIAL, True)
        resumed = trainer(case, then, 3, checkpoints=checkpoints)
        resumed.resume(found)
        list(resumed.run())
        np.testing.assert_allclose(resumed.weights.to_array(), whole.weights.to_array(), rtol=1e-3, atol=1e-5)


def test_two_runs_have_the_same_bits_and_samples_that_do_not_fit_too(monkeypatch, gpu):
    first = trainer("sparse, logistic", "gpu", 1)
    list(first.run())
    assert first.strategy._batch.samples.resident
    monkeypatch.setattr(gpu.cuda.Device, "mem_info", (2300, 1 << 30))
    second = trainer("sparse, logistic", "gpu", 1)
    assert not second.strategy._batch.samples.resident
    list(second.run())
    assert first.weights.to_array().tobytes() == second.weights.to_array().tobytes()


@pytest.mark.parametrize("case", ["sparse, logistic", "sparse, ftrl, penalties"])
def test_a_weight_that_is_no_number_ends_training_in_the_step_of_the_host(case):
    data, said = dataset(Logistic()), []
    large = Dataset(data.indptr, data.indices, data.values * np.float32(1e30), data.labels, 9, weights=data.weights * 1e20)
    for device in ("cpu", "gpu"):
        with pytest.raises(DivergenceError) as caught, np.errstate(all="ignore"):
            list(trainer(case, device, data=large, schedule=Constant(0.5)).run())
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_what_is_done_on_the_host_alone_is_refused(monkeypatch):
    data = dataset(Logistic())
    for descent in ({"momentum": 0.5}, {"average_from": 1}, {"l1": 0.1}, {"update": "arow"}):
        with pytest.raises(AlgorithmError, match=r"momentum|average|L1 penalty|arow"):
            SparseStrategy(data, sar.SERIAL, Descent(**descent), device="gpu")
    with pytest.raises(AlgorithmError, match="overlapped works on the host"):
        OverlappedStrategy(data, sar.SERIAL, device="gpu")
    with pytest.raises(AlgorithmError, match="threads"):
        SparseStrategy(data, sar.SERIAL, device="gpu", threads=2)
    with pytest.raises(ValueError, match="'tpu'"):
        SparseStrategy(data, sar.SERIAL, device="tpu")
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(StreamError, match="CuPy"):
        SparseStrategy(data, sar.SERIAL, device="gpu")


def test_batches_that_are_not_dense_enough_are_told():
    with pytest.warns(SparseBatchWarning, match="worth it from 65,536 on"):
        trainer("sparse, logistic", "gpu")
    with warnings.catch_warnings(action="error"):
        trainer("sparse, logistic", "cpu")


def test_weights_to_start_from_and_to_return_to_are_kept():
    start = np.linspace(-1, 1, 10).astype(np.float32)
    for case in ("sparse, logistic", "sparse, ftrl, penalties"):
        ours = trainer(case, "gpu")
        ours.strategy.assign(start)
        np.testing.assert_array_equal(ours.weights.to_array(), start)
        np.testing.assert_array_equal(ours.weights.at(np.uint32([0, 9])), start[[0, 9]])
        list(ours.run())
        ours.strategy.return_to(start)
        np.testing.assert_allclose(ours.weights.to_array(), start, rtol=1e-6)
