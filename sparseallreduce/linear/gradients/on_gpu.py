"""The gradient of a batch on a GPU, and which batches it is worth it for."""

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

#: Non-zeros of a rank in a step from which on a GPU is worth it: what a processor treats in the time of the launches and waits of a step.
LEAST_ENTRIES = 1 << 16
#: Non-zeros for each feature of a batch from which on it is, where gradients travel: see :func:`sparse_batch`.
LEAST_REPEATS = 4


def sparse_batch(dataset: Dataset, samples: int, ranks: int) -> str | None:
    """Why batches of so many of this rank's samples are not dense enough for a GPU, None if they are.

    The rule is of bytes. The host reads a non-zero twice in a step, for the score and for the gradient: 16 bytes in float32. On a GPU that
    costs next to nothing, but an entry of the gradient, 8 bytes, travels to the host to be summed, and one of the sum back, by a bus that
    is no faster than the host's memory. So it is worth it where a batch has several non-zeros for each feature that occurs in it, four at
    least; alone, where nothing travels, at any ratio. And a step takes about 20 launches and 5 waits, some 0.2 to 0.5 ms, in which a core
    treats tens of thousands of non-zeros.

    Parameters
    ----------
    dataset : Dataset
    samples : int
        Of a step, of this rank.
    ranks : int
        That sum their gradients.
    """
    if not dataset.rows:
        return None
    rows = np.unique(np.linspace(0, dataset.rows - 1, min(samples, dataset.rows)).astype(np.int64))
    found = features_of(dataset, rows)
    entries, features = len(found), len(np.unique(found))
    if entries < LEAST_ENTRIES:
        return f"a batch has about {entries:,} non-zeros on a rank, and a GPU is worth it from {LEAST_ENTRIES:,} on: take larger batches"
    if ranks > 1 and entries < LEAST_REPEATS * features:
        ratio = f"{entries / features:.1f} non-zeros for each of its {features:,} features"
        return f"a batch has about {ratio}, and a GPU is worth it from {LEAST_REPEATS} on, since gradients travel by the host"
    return None


class GpuBatch:
    """Rows of a data set on a GPU, as :class:`~sparseallreduce.linear.gradients.compact.CompactBatch` has those on the host.

    Parameters
    ----------
    samples : GpuSamples
    size : int
        Entries of the weights, or rows of K, the intercept included.
    columns : int, optional
        K.
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
        """Go on with other samples, of as many features and the same dtype."""
        self.samples.renew(dataset)
        self._taken = None

    def scores(self, rows: Array, weights: Weights) -> Any:
        """The scores of these rows, float64 on the GPU of shape (len(rows),), or (len(rows), K)."""
        assert isinstance(weights, GpuWeights)
        return weights.row_scores(self._take(rows, anew=True))

    def coefficients(self, model: LinearModel, rows: Array, scores: Any, count: int) -> Any:
        """The derivatives of the losses of these rows by their scores, times what they count, divided by ``count``.

        On the GPU, in the shape of the scores and the dtype of the values; of losses of the user's own by way of the host.
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
        """The sum of ``coefficients[i]`` times row ``rows[i]``: of exactly the entries of rows that count."""
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

    def _take(self, rows: Array, anew: bool = False) -> TakenRows:
        if anew or self._taken is None or self._taken[0] is not rows:
            self._taken = rows, self.samples.take(rows)
        return self._taken[1]
