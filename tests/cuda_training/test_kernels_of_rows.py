"""Scores, derivatives and sums of rows on the device, against NumPy in double precision."""

import device_arrays as xp
import numpy as np
import pytest
from scipy.sparse import csr_array

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.on_gpu import GpuSamples
from sparseallreduce.linear.gradients.on_gpu import GpuBatch, sparse_batch
from sparseallreduce.linear.kernels.cuda import rows as kernels
from sparseallreduce.linear.models import LOSSES, LinearModel, model_of
from sparseallreduce.linear.multiclass import Multinomial, OneVsRest

MODELS = [model_of(name, loss) for name, losses in LOSSES.items() for loss in losses]


class LogCosh(LinearModel):
    """A loss that the kernels do not know."""

    name = "logistic"
    loss_name = "log"

    def loss(self, scores, labels):
        return np.logaddexp(scores - labels, labels - scores)

    def derivative(self, scores, labels):
        return np.tanh(scores - labels)


def samples(rows=9, features=11, dtype=np.float32, seed=0, weights=None, share=0.4):
    rng = np.random.default_rng(seed)
    held = csr_array(np.where(rng.random((rows, features)) < share, rng.standard_normal((rows, features)), 0))
    plain = Dataset.from_scipy(held, rng.integers(0, 3, rows))
    return Dataset(plain.indptr, plain.indices, plain.values.astype(dtype), plain.labels, features, weights=weights)


@pytest.mark.parametrize("room", [1 << 20, 2000], ids=["resident", "by batch"])
@pytest.mark.parametrize("columns, dtype", [(1, np.float32), (3, np.float64)])
def test_scores_and_sums_are_those_of_matrices(room, columns, dtype):
    dataset = samples(30, dtype=dtype)
    held = GpuSamples(dataset, xp, room)
    assert held.resident == (room > 2000)
    matrix, rng = dataset.to_scipy().toarray(), np.random.default_rng(1)
    weights, shifts = rng.standard_normal((11, columns)).astype(dtype), rng.standard_normal(columns)
    for chosen in ([5, 0, 7, 3], [2], []):
        taken = kernels.Taken(*held.take(np.array(chosen, np.int64))[:4])
        found = kernels.scores(taken, xp.asarray(weights.reshape(-1)), xp.asarray(shifts), 0.5, xp)
        np.testing.assert_allclose(found.get().reshape(-1, columns), matrix[chosen] @ weights * 0.5 + shifts, rtol=1e-6, atol=1e-6)

        factors = rng.standard_normal((len(chosen), columns)).astype(dtype)
        factors[1:2] = 0
        indices, values, entries = kernels.total(taken, xp.asarray(factors), np.uint32, 11, xp)
        counted = [row for row, factor in zip(chosen, factors) if factor.any()]
        present = np.flatnonzero((matrix[counted] != 0).any(axis=0))
        wanted = np.vstack([(matrix[chosen].T @ factors)[present], factors.sum(axis=0)])
        np.testing.assert_array_equal(indices.get(), [*present, *([11] if chosen else [])])
        np.testing.assert_allclose(values.get(), wanted[: len(indices)], rtol=1e-6, atol=1e-6)
        assert (values.dtype, entries) == (dtype, np.count_nonzero(matrix[counted]))


def test_the_order_of_blocks_changes_no_bit(monkeypatch):
    held, chosen = GpuSamples(samples(20, 5), xp, 1 << 20), np.arange(20)
    taken = kernels.Taken(*held.take(chosen)[:4])
    factors = xp.asarray(np.random.default_rng(2).standard_normal((20, 1)).astype(np.float32))
    once = kernels.total(taken, factors, np.uint32, None, xp)
    monkeypatch.setattr(kernels, "BLOCK", 3)
    again = kernels.total(taken, factors, np.uint32, None, xp)
    for one, other in zip(once[:2], again[:2], strict=True):
        assert one.get().tobytes() == other.get().tobytes()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("model", [*MODELS, LogCosh()], ids=lambda model: f"{model.title} {type(model).__name__}")
def test_derivatives_are_those_of_the_models(model, weighted):
    scores = np.array([0.0, 1.0, -1.0, 3.5, -3.5, 800.0, -800.0, 85.0, np.inf, -np.inf, np.nan, 1e-3])
    labels = np.resize([1.0, -1.0, -1.0], 12) if model.classifies else np.resize([0.0, 1.0, 3.0], 12)
    counts = np.linspace(0, 3, 12) if weighted else None
    dataset = Dataset(np.zeros(13, int), np.empty(0, np.uint32), np.empty(0, np.float32), labels, 4, weights=counts)
    batch, rows = GpuBatch(GpuSamples(dataset, xp, 1 << 20), 4, None, xp), np.arange(12)[::-1]
    found = batch.coefficients(model, rows, xp.asarray(scores[rows]), 7)
    with np.errstate(all="ignore"):
        wanted = model.derivative(scores[rows], labels[rows]) * (1 if counts is None else counts[rows]) / 7
        np.testing.assert_allclose(found.get(), wanted.astype(np.float32), rtol=1e-6)


OF_CLASSES = [Multinomial(3), OneVsRest(model_of("svm"), 3), OneVsRest(model_of("logistic"), 3)]


@pytest.mark.parametrize("model", OF_CLASSES, ids=lambda model: model.name)
def test_derivatives_of_classes_are_those_of_the_models(model):
    scores = np.vstack([np.random.default_rng(3).standard_normal((6, 3)) * 3, [[900.0, 0, 1]], [[np.nan, 0, 1]]])
    dataset = samples(8, weights=np.arange(8.0))
    batch, rows = GpuBatch(GpuSamples(dataset, xp, 1 << 20), 11, 3, xp), np.arange(8)
    with np.errstate(invalid="ignore"):
        wanted = (model.derivative(scores, dataset.labels).T * dataset.weights).T / 4
    found = batch.coefficients(model, rows, xp.asarray(scores), 4).get()
    np.testing.assert_allclose(found, wanted.astype(np.float32), rtol=1e-6, atol=1e-30)


def test_a_batch_without_room_is_an_error_that_says_what_to_do():
    held = GpuSamples(samples(), xp, 500)
    assert not held.resident
    held.take(np.arange(1))
    with pytest.raises(DatasetError, match="use fewer samples per step"):
        held.take(np.arange(9))
    assert np.concatenate(held.parts()).tolist() == list(range(9)) and len(held.parts()) > 1


def test_which_batches_are_dense_enough():
    many = samples(2000, 40, share=0.9)
    wide = Dataset(many.indptr, np.arange(many.nnz, dtype=np.uint32), many.values, many.labels, many.nnz)
    assert sparse_batch(many, 2000, 8) is None
    assert "non-zeros on a rank" in sparse_batch(many, 20, 8)
    assert "1.0 non-zeros for each" in sparse_batch(wide, 2000, 2)
    assert sparse_batch(wide, 2000, 1) is None
    assert sparse_batch(samples(0), 10, 2) is None
