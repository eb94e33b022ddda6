"""The gradient of a batch on a GPU, and the rule for which batches a GPU is worth using."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.dataset import Dataset, features_of
from sparseallreduce.linear.data.on_gpu import GpuSamples, TakenRows
from sparseallreduce.linear.models import LOSSES, LinearModel
from sparseallreduce.linear.multiclass import Multinomial, OneVsRest
from sparseallreduce.linear.weights import GpuWeights, Weights
from sparseallreduce.streams.kernels.backend import as_host
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["GpuBatch", "sparse_batch"]

Array = NDArray[Any]

#: Smallest number of non-zeros per rank and step for a GPU: a CPU processes fewer in the time of a step's kernel launches and waits.
LEAST_ENTRIES = 1 << 16
#: Smallest number of non-zeros per occurring feature for a GPU, if ranks exchange gradients: see :func:`sparse_batch`.
LEAST_REPEATS = 4


def sparse_batch(dataset: Dataset, samples: int, ranks: int) -> str | None:
    """Return the reason why batches of this many samples are too sparse for a GPU, or None if they are not.

    The rule compares bytes. The host reads a non-zero twice per step, for the score and for the gradient: 16 bytes in float32. On a GPU
    that costs next to nothing, but each gradient entry, 8 bytes, is copied to the host to be summed, and each entry of the sum is copied
    back, over a bus that is no faster than the host's memory. So a GPU is worth using if a batch has several non-zeros, at least four, for
    each feature that occurs in it; on one rank, which copies no gradients, at any ratio. A step also needs about 20 launches and 5 waits,
    some 0.2 to 0.5 ms, in which a CPU core processes tens of thousands of non-zeros.

    Parameters
    ----------
    dataset : Dataset
    samples : int
        Number of samples of this rank per step.
    ranks : int
        Number of ranks that sum their gradients.
    """
    if not dataset.rows:
        return None
    rows = np.unique(np.linspace(0, dataset.rows - 1, min(samples, dataset.rows)).astype(np.int64))
    found = features_of(dataset, rows)
    entries, features = len(found), len(np.unique(found))
    if entries < LEAST_ENTRIES:
        return f"a batch has about {entries:,} non-zeros on a rank, and a GPU is worth it from {LEAST_ENTRIES:,} on: use larger batches"
    if ranks > 1 and entries < LEAST_REPEATS * features:
        ratio = f"{entries / features:.1f} non-zeros for each of its {features:,} features"
        return f"a batch has about {ratio}, and a GPU is worth it from {LEAST_REPEATS} on, since gradients are summed on the host"
    return None


class GpuBatch:
    """Rows of a data set on a GPU; the counterpart of :class:`~sparseallreduce.linear.gradients.compact.CompactBatch` on the host.

    Parameters
    ----------
    samples : GpuSamples
    size : int
        Number of weights, or of rows of K weights, including the intercept.
    columns : int, optional
        Number of columns, K.
    xp : module
        CuPy.
    """

    def __init__(self, samples: GpuSamples, size: int, columns: int | None, xp: Any) -> None:
        self.samples = samples
        self.size = size
        self.columns = columns
        self._xp = xp
        self._rows = import_module("sparseallreduce.linear.kernels.cuda.rows")
        self._losses = import_module("sparseallreduce.linear.kernels.cuda.losses")
        self._taken: tuple[Array, TakenRows] | None = None

    def renew(self, dataset: Dataset) -> None:
        """Continue with other samples that have the same number of features and dtype."""
        self.samples.renew(dataset)
        self._taken = None

    def scores(self, rows: Array, weights: Weights) -> Any:
        """Return the scores of these rows, float64 on the GPU of shape (len(rows),) or (len(rows), K)."""
        assert isinstance(weights, GpuWeights)
        return weights.row_scores(self._take(rows, reload=True))

    def coefficients(self, model: LinearModel, rows: Array, scores: Any, count: int) -> Any:
        """Return the derivatives of the rows' losses with respect to their scores, times the sample weights, divided by ``count``.

        The result is on the GPU, with the shape of the scores and the dtype of the values. Losses defined by users are computed on the
        host.
        """
        taken, dtype = self._take(rows), self.samples.dataset.values.dtype
        of_classes = type(model) is OneVsRest
        base = model.base if isinstance(model, OneVsRest) and of_classes else model
        classes, flat = self.columns or 0, scores.reshape(-1)
        if type(model) is Multinomial:
            found = self._losses.softmax_coefficients(flat, taken.labels, taken.weights, classes, float(count), dtype, self._xp)
        elif type(base) is LOSSES.get(base.name, {}).get(base.loss_name) and of_classes == bool(classes):
            given = base.loss_name, flat, taken.labels, taken.weights, classes, base.parameter or 0.0
            found = self._losses.coefficients(*given, float(count), dtype, self._xp)
        else:
            dataset = self.samples.dataset
            derivatives = model.derivative(as_host(scores), dataset.labels[rows])
            if dataset.weights is not None:
                derivatives = (derivatives.T * dataset.weights[rows]).T
            found = self._xp.asarray((derivatives / count).astype(dtype))
        return found.reshape(scores.shape)

    def gradient(self, rows: Array, coefficients: Any) -> SparseStream:
        """Return the sum of ``coefficients[i]`` times row ``rows[i]``, with the entries of all rows whose coefficient is not 0."""
        taken, dataset = self._take(rows), self.samples.dataset
        self._taken = None
        intercept = dataset.features if self.size > dataset.features else None
        given = self._rows.Taken(*taken[:4]), coefficients.reshape(len(rows), -1), index_dtype(self.size), intercept
        indices, values, _ = self._rows.total(*given, self._xp)
        if self.columns is None:
            values = values.reshape(-1)
        gradient = SparseStream._sparse_form(indices, values, self.size)
        gradient._switch()
        return gradient

    def _take(self, rows: Array, reload: bool = False) -> TakenRows:
        if reload or self._taken is None or self._taken[0] is not rows:
            self._taken = rows, self.samples.take(rows)
        return self._taken[1]
