"""Centring and scaling of features in the solvers: columns without zeros around their mean, and columns of different units to one scale."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.checks import check_squares, largest_of
from sparseallreduce.linear.data.dataset import Dataset, read_only
from sparseallreduce.linear.data.feature_scaling import FAR_BELOW, sampled_columns, units_differ
from sparseallreduce.linear.kernels.magnitudes import column_sums, raise_to_magnitudes
from sparseallreduce.linear.solvers.numbering import Numbering
from sparseallreduce.runtime.api import allreduce
from sparseallreduce.runtime.objects import agreed, gather
from sparseallreduce.streams.stream import SparseStream

__all__ = ["Frame", "frame_of", "frame_of_few"]

Array = NDArray[Any]

# A variance below this fraction of the mean square is a rounding error: the column is constant.
_CONSTANT = 1e-12


class Frame(NamedTuple):
    """A shift to subtract from the values of each feature that occurs on any rank, and a factor to multiply the result by."""

    features: Array  # ascending
    shifts: Array  # float64
    factors: Array  # float64
    scales: bool  # whether features are scaled; otherwise the factors of all but constant columns are 1

    def by_place(self, numbering: Numbering) -> Array:
        """Return shift and factor of each of a rank's features, by position, as one array for the kernels."""
        own = np.searchsorted(self.features, numbering.features)
        pairs = np.zeros((numbering.size, 2))
        pairs[numbering.places, 0], pairs[numbering.places, 1] = self.shifts[own], self.factors[own]
        return pairs.reshape(-1)

    def undo(self, weights: Array, intercept: bool) -> None:
        """Convert weights of the shifted and scaled values, intercept last, to weights of the original values, in place."""
        weights[self.features] *= self.factors
        if intercept:
            weights[-1] -= np.dot(weights[self.features], self.shifts)


def frame_of(dataset: Dataset, numbering: Numbering, comm: Any, centred: bool, scaled: bool | None, ones: bool) -> Frame | None:
    """Return how to shift and scale the features' values, or None if they should be used as they are. Collective.

    Parameters
    ----------
    dataset : Dataset
        This rank's samples.
    numbering : Numbering
        Numbering of their features, after :meth:`Numbering.arrange`.
    comm : communicator
    centred : bool
        Whether to centre columns without zeros. This requires an intercept that is not penalised, so that the objective does not change.
    scaled : bool or None
        Whether to divide values by the standard deviation of such columns, and by the root mean square of the non-zeros of others; None
        does so only if columns have different units (:func:`~sparseallreduce.linear.data.feature_scaling.units_differ`).
    ones : bool
        Whether all values of this rank are 1.

    Raises
    ------
    DatasetError
        On all ranks, if squares of values overflow, and values are not scaled.

    Notes
    -----
    Data sets of ones have no units, and are left as they are. The scale of a feature is that of its non-zeros, so that rare features are
    not amplified. If squares overflow, it is the largest magnitude of the feature.
    """
    if not (centred or scaled is None or scaled):
        return None
    begin, end = int(dataset.indptr[0]), int(dataset.indptr[-1])
    if all(gather(comm, ones)):
        return None
    if not (scaled or any(gather(comm, _may_have_frame(dataset, numbering, centred, scaled)))):
        return None
    values, sums = dataset.values[begin:end], np.zeros(4 * numbering.size)
    counts = np.empty(0) if dataset.weights is None else dataset.weights
    column_sums(dataset.indptr - begin, numbering.indices, values, counts, sums)
    features, table = numbering.features, sums.reshape(-1, 4)[numbering.places]
    if comm.size > 1:
        full = bool(dataset.rows) and bool((table[:, 1] == dataset.rows).any())
        needed = scaled or (centred and full) or (scaled is None and units_differ(table, FAR_BELOW)) or not np.isfinite(table).all()
        if not any(gather(comm, needed)):
            return None
        whole = allreduce(SparseStream(features, table, dataset.features), comm)
        features, table = _rows_of(whole)
    scales, sizes = units_differ(table) if scaled is None else scaled, np.empty(0)
    if not np.isfinite(table).all():
        own = _sizes(dataset, numbering.indices, numbering.size, scales, comm)
        sizes = _largest(SparseStream(numbering.features, own[numbering.places], dataset.features), comm)[features]
    return _framed(features, table, sizes, dataset.total_samples, centred, scales)


def _may_have_frame(dataset: Dataset, numbering: Numbering, centred: bool, scaled: bool | None) -> bool:
    """Return False if evenly spaced samples show that no column has all samples and that units do not differ.

    A column of a few samples has the size of their values, so units differ no less than in all samples.
    """
    found = sampled_columns(dataset, numbering.indices)
    if found is None:
        return True
    table, rows = found
    return (centred and bool((table[:, 1] == rows).any())) or (scaled is None and units_differ(table, FAR_BELOW))


def _sizes(dataset: Dataset, places: Array, count: int, scales: bool, comm: Any) -> Array:
    """Return the largest magnitude at each position on this rank; raise DatasetError if unscaled squares overflow. Collective."""
    values = dataset.values[int(dataset.indptr[0]) : int(dataset.indptr[-1])]
    with np.errstate(over="ignore"):
        total = 0.0 if scales else float(np.square(np.float64(largest_of(values))) * dataset.total_samples)
    agreed(comm, lambda: check_squares(dataset, "value", values, total))
    largest = np.zeros(count, values.dtype)
    raise_to_magnitudes(places, values, largest)
    return largest.astype(np.float64)


def _largest(own: SparseStream, comm: Any) -> Array:
    """Return the maximum over all ranks for every feature."""
    whole = allreduce(own, comm, op="max") if comm.size > 1 else own
    return np.asarray(whole.to_dense())


def _rows_of(stream: SparseStream) -> tuple[Array, Array]:
    """Return the non-zero positions of a stream, and their values."""
    if not stream.is_dense:
        return stream.indices, stream.values
    whole = stream.to_dense()
    present = np.flatnonzero(whole[:, 1])
    return present, whole[present]


def _framed(features: Array, table: Array, sizes: Array, samples: int, centred: bool, scales: bool) -> Frame | None:
    """Return the frame for the sums of columns; for columns whose sums overflowed, it uses the ``sizes`` of the features."""
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
    """Return the frame for few features, as :func:`frame_of` does, and all shifts and factors as arrays for the kernels. Collective."""
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
