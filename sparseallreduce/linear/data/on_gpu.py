"""The samples of one rank in GPU memory: all of them, or one batch after another."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.dataset import Dataset

__all__ = ["BATCH_BYTES", "GpuSamples", "TakenRows", "room_for_samples"]

Array = NDArray[Any]

#: Bytes of working memory per non-zero of a batch: its feature twice, two positions, two orders and a mark.
BATCH_BYTES = 48
_SHARE = 2  # the fraction 1 / _SHARE of free memory is for samples and batches; the rest is for weights, residuals and sums


class TakenRows(NamedTuple):
    """Rows of a batch on the GPU, with their labels, and their weights unless these are 1."""

    indptr: Any
    indices: Any
    values: Any
    rows: Any  # numbers of the batch's rows among those in the arrays above
    labels: Any
    weights: Any | None


def room_for_samples(xp: Any, ranks_here: int) -> int:
    """Return the bytes of GPU memory that a rank may use for samples and batches: half of what is free, divided among ranks.

    Parameters
    ----------
    xp : module
        CuPy.
    ranks_here : int
        Number of ranks of this host, which share its GPUs equally.
    """
    sharing = -(-ranks_here // max(1, int(xp.cuda.runtime.getDeviceCount())))
    return int(xp.cuda.Device().mem_info[0]) // (_SHARE * sharing)


class GpuSamples:
    """The samples of a data set for a GPU.

    They are all copied there if they and the largest batch fit into ``room``; otherwise each batch is gathered on the host and copied.

    Parameters
    ----------
    dataset : Dataset
    xp : module
        CuPy.
    room : int
        Bytes of GPU memory to use.
    whole : bool
        Whether to copy all samples if they fit; not useful for samples that are read once.

    Attributes
    ----------
    resident : bool
        True if all samples are in GPU memory.
    """

    def __init__(self, dataset: Dataset, xp: Any, room: int, *, whole: bool = True) -> None:
        self._xp = xp
        self._room = room
        self._wanted = whole
        self.renew(dataset)

    def renew(self, dataset: Dataset) -> None:
        """Replace the samples."""
        self.dataset = dataset
        self._whole: TakenRows | None = None
        self.resident: bool = self._wanted and 2 * _nbytes(dataset) <= self._room  # the same amount again for batches
        if self.resident:
            try:
                self._whole = self._copied(dataset.indptr, dataset.indices, dataset.values, np.empty(0, np.int64), slice(None))
            except MemoryError:  # the base class of CuPy's OutOfMemoryError
                self.resident = False

    def take(self, rows: Array) -> TakenRows:
        """Return these rows in GPU memory.

        Raises
        ------
        DatasetError
            If a batch of them does not fit.
        """
        dataset, xp = self.dataset, self._xp
        begins, ends = dataset.indptr[rows], dataset.indptr[rows + 1]
        entries = int((ends - begins).sum())
        own = dataset.indices.itemsize + dataset.values.itemsize
        needed = entries * (BATCH_BYTES + (0 if self.resident else own))
        if needed > self._room:
            raise DatasetError(
                f"a batch of {len(rows):,} samples with {entries:,} non-zeros takes {needed:,} bytes on the GPU, but {self._room:,} are "
                "available: use fewer samples per step, or device='cpu'"
            )
        if self._whole is not None:
            at = xp.asarray(np.asarray(rows, np.int64))
            weights = None if self._whole.weights is None else self._whole.weights[at]
            return self._whole._replace(rows=at, labels=self._whole.labels[at], weights=weights)
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(ends - begins, out=starts[1:])
        places = np.arange(entries) + np.repeat(begins - starts[:-1], ends - begins)
        return self._copied(starts, dataset.indices[places], dataset.values[places], np.arange(len(rows)), rows)

    def parts(self) -> list[Array]:
        """Return all rows, divided into parts that fit."""
        dataset = self.dataset
        each = BATCH_BYTES + dataset.indices.itemsize + dataset.values.itemsize
        most = max(1, self._room // (_SHARE * each))  # non-zeros per part
        cuts, row = [0], 0
        while row < dataset.rows:
            row = max(row + 1, int(np.searchsorted(dataset.indptr, dataset.indptr[row] + most, "right")) - 1)
            cuts.append(min(row, dataset.rows))
        return [np.arange(low, high) for low, high in pairwise(cuts)]

    def _copied(self, indptr: Array, indices: Array, values: Array, rows: Array, own: Any) -> TakenRows:
        move, dataset = self._xp.asarray, self.dataset
        weights = None if dataset.weights is None else move(dataset.weights[own])
        return TakenRows(move(indptr), move(indices), move(values), move(rows), move(dataset.labels[own]), weights)


def _nbytes(dataset: Dataset) -> int:
    arrays = dataset.indptr, dataset.indices, dataset.values, dataset.labels, dataset.weights
    return sum(array.nbytes for array in arrays if array is not None)
