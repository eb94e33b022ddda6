"""What solvers take the values of features for: columns that every sample has around their mean, and columns of different units in one."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.checks import check_squares, largest_of
from sparseallreduce.linear.data.dataset import Dataset, read_only
from sparseallreduce.linear.data.feature_scaling import units_differ
from sparseallreduce.linear.kernels.magnitudes import column_sums, raise_to_magnitudes
from sparseallreduce.linear.solvers.numbering import Numbering
from sparseallreduce.runtime.api import allreduce
from sparseallreduce.runtime.objects import agreed, gather
from sparseallreduce.streams.stream import SparseStream

__all__ = ["Frame", "frame_of", "frame_of_few"]

Array = NDArray[Any]

# Below this share of its square mean a variance is a rounding error, and the column says nothing.
_CONSTANT = 1e-12
# What a rank alone knows of the units of columns is close to what all know: below this share of the threshold there is no need to ask.
_FAR_BELOW = 0.5


class Frame(NamedTuple):
    """What is subtracted from the values of each feature that occurs on any rank, and what they are then multiplied by."""

    features: Array  # increasing
    shifts: Array  # float64
    factors: Array  # float64
    scales: bool  # whether units differ, so that factors are not one

    def by_place(self, numbering: Numbering) -> Array:
        """The pairs of the features of a rank, by place, one behind the other, for the kernels."""
        own = np.searchsorted(self.features, numbering.features)
        pairs = np.zeros((numbering.size, 2))
        pairs[numbering.places, 0], pairs[numbering.places, 1] = self.shifts[own], self.factors[own]
        return pairs.reshape(-1)

    def undo(self, weights: Array, intercept: bool) -> None:
        """Turn weights of these values, the intercept last, into those of the values as they are given; in place."""
        weights[self.features] *= self.factors
        if intercept:
            weights[-1] -= np.dot(weights[self.features], self.shifts)


def frame_of(dataset: Dataset, numbering: Numbering, comm: Any, centred: bool, scaled: bool | None) -> Frame | None:
    """Find out what values are best taken for; None for what they are. Collective.

    Parameters
    ----------
    dataset : Dataset
        This rank's samples.
    numbering : Numbering
        Of their features, arranged.
    comm : communicator
    centred : bool
        Whether columns that every sample has are taken around their mean: then the objective must not change by that, since there is an
        intercept that is not penalised.
    scaled : bool or None
        Whether values are divided by the deviation of such columns, and by the root mean square of the non-zeros of others; with None
        where columns have different units (:func:`~sparseallreduce.linear.data.feature_scaling.units_differ`).

    Raises
    ------
    DatasetError
        On all ranks alike, if squares of values are no finite numbers, and values are not to be scaled.

    Notes
    -----
    Ones alone have no units, and are left as they are. What is divided by is of the non-zeros of a feature, so that rare ones stay as
    weak as they are. Where squares are no finite numbers it is the largest magnitude of the feature.
    """
    if not (centred or scaled is None or scaled):
        return None
    begin, end = int(dataset.indptr[0]), int(dataset.indptr[-1])
    values = dataset.values[begin:end]
    if all(gather(comm, bool((values == 1).all()))):
        return None
    sums = np.zeros(4 * numbering.size)
    counts = np.empty(0) if dataset.weights is None else dataset.weights
    column_sums(dataset.indptr - begin, numbering.indices, values, counts, sums)
    features, table = numbering.features, sums.reshape(-1, 4)[numbering.places]
    if comm.size > 1:
        full = bool(dataset.rows) and bool((table[:, 1] == dataset.rows).any())
        needed = scaled or (centred and full) or (scaled is None and units_differ(table, _FAR_BELOW)) or not np.isfinite(table).all()
        if not any(gather(comm, needed)):
            return None
        whole = allreduce(SparseStream(features, table, dataset.features), comm)
        features, table = _rows_of(whole)
    scales, sizes = units_differ(table) if scaled is None else scaled, np.empty(0)
    if not np.isfinite(table).all():
        own = _sizes(dataset, numbering.indices, numbering.size, scales, comm)
        sizes = _largest(SparseStream(numbering.features, own[numbering.places], dataset.features), comm)[features]
    return _framed(features, table, sizes, dataset.total_samples, centred, scales)


def _sizes(dataset: Dataset, places: Array, count: int, scales: bool, comm: Any) -> Array:
    """The largest magnitude at each place on this rank; raises DatasetError if they are not to be scaled by. Collective."""
    values = dataset.values[int(dataset.indptr[0]) : int(dataset.indptr[-1])]
    with np.errstate(over="ignore"):
        total = 0.0 if scales else float(np.square(np.float64(largest_of(values))) * dataset.total_samples)
    agreed(comm, lambda: check_squares(dataset, "value", values, total))
    largest = np.zeros(count, values.dtype)
    raise_to_magnitudes(places, values, largest)
    return largest.astype(np.float64)


def _largest(own: SparseStream, comm: Any) -> Array:
    """The largest of all ranks, of every feature."""
    whole = allreduce(own, comm, op="max") if comm.size > 1 else own
    return np.asarray(whole.to_dense())


def _rows_of(stream: SparseStream) -> tuple[Array, Array]:
    """The positions of a stream that are not zero, and what is there."""
    if not stream.is_dense:
        return stream.indices, stream.values
    whole = stream.to_dense()
    present = np.flatnonzero(whole[:, 1])
    return present, whole[present]


def _framed(features: Array, table: Array, sizes: Array, samples: int, centred: bool, scales: bool) -> Frame | None:
    """The frame by sums of columns; where these are no finite numbers, by the ``sizes`` of the features."""
    counted, entries, totals, squares = np.ascontiguousarray(table.T)
    known = np.isfinite(squares) & np.isfinite(totals)
    totals, squares = np.where(known, totals, 0.0), np.where(known, squares, 1.0)
    there = np.maximum(counted, np.finfo(float).tiny)
    means, mean_squares = totals / there, squares / there
    full = ((entries == samples) & known) if centred else np.zeros(len(features), bool)
    if not (full.any() or scales):
        return None
    variances = np.where(full, mean_squares - means**2, mean_squares)
    variances[full & (variances <= _CONSTANT * mean_squares)] = 0.0
    factors = np.ones(len(features))
    if scales:
        with np.errstate(divide="ignore"):
            factors = np.where(variances > 0, 1 / np.sqrt(variances), 0.0)
        factors[~known] = 1 / sizes[~known] if len(sizes) else 0.0
    factors[variances == 0] = 0.0
    return Frame(features, np.where(full, means, 0.0), factors, scales)


def frame_of_few(dataset: Dataset, comm: Any, centred: bool, scaled: bool | None) -> tuple[Frame | None, Array]:
    """As :func:`frame_of` where features are few enough for a number each; also the pairs of all of them, for the kernels. Collective."""
    begin, end = int(dataset.indptr[0]), int(dataset.indptr[-1])
    sums = np.zeros(4 * dataset.features)
    counts = np.empty(0) if dataset.weights is None else dataset.weights
    column_sums(read_only(dataset.indptr - begin), dataset.indices[begin:end], dataset.values[begin:end], counts, sums)
    if comm.size > 1:
        sums = allreduce(SparseStream.from_dense(sums), comm).to_dense()
    table = sums.reshape(-1, 4)
    there = table[:, 1] > 0
    features, known = np.flatnonzero(there), table[there]
    scales, sizes = units_differ(known) if scaled is None else scaled, np.empty(0)
    if not np.isfinite(known).all():
        own = _sizes(dataset, dataset.indices[begin:end], dataset.features, scales, comm)
        sizes = _largest(SparseStream.from_dense(own), comm)[features]
    frame = _framed(features, known, sizes, dataset.total_samples, centred, scales)
    if frame is None:
        return None, np.empty(0)
    pairs = np.zeros((dataset.features, 2))
    pairs[features, 0], pairs[features, 1] = frame.shifts, frame.factors
    return frame, pairs.reshape(-1)
