"""Scaling of features and learning rates, so that SGD works on unscaled samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from sparseallreduce.linear.data.checks import check_squares, largest_of
from sparseallreduce.linear.data.dataset import Dataset, read_only
from sparseallreduce.linear.kernels import feature_numbers
from sparseallreduce.linear.kernels.magnitudes import column_sums, raise_to_magnitudes, sum_of_squares
from sparseallreduce.runtime.api import allreduce
from sparseallreduce.runtime.objects import agreed, gather, gather_results
from sparseallreduce.streams.stream import SparseStream

__all__ = [
    "FAR_BELOW",
    "adaptive_rate_unit",
    "feature_magnitudes",
    "feature_scales",
    "gradient_unit",
    "in_one_unit",
    "largest_eigenvalue",
    "raised",
    "rate_unit",
    "sample_moments",
    "sampled_columns",
    "scaled",
    "scaled_by_entry",
    "typical_value",
    "units_differ",
    "units_differ_in",
]

Array = NDArray[Any]

_APART = 1.0  # standard deviation of the logarithms of typical values above which columns have different units
_LARGE = 1e18  # squares of smaller numbers are finite in float32; a larger value may have a unit of its own
#: A rank's own samples nearly show whether units differ: ranks that are all below this fraction of the threshold need not ask each other.
FAR_BELOW = 0.5
_SAMPLED = 1 << 17  # non-zeros of a rank from which to judge whether units may differ; below four times as many all are used
_ROWS = 1024  # number of rows per rank from which the largest eigenvalue is estimated
_ITERATIONS = 30  # of the power method; its error decreases by the squared ratio of the two largest eigenvalues in each


def feature_magnitudes(dataset: Dataset, comm: Any, before: Array | None = None) -> Array:
    """Return the largest magnitude of every feature on any rank, and in ``before``; zero if it does not occur. Collective."""
    largest = np.zeros(dataset.features, dataset.values.dtype) if before is None else before.astype(dataset.values.dtype)
    raise_to_magnitudes(dataset.indices, dataset.values, largest)
    return allreduce(SparseStream.from_dense(largest), comm, op="max").to_dense() if comm.size > 1 else largest


def feature_scales(magnitudes: Array) -> Array:
    """Return the power of two at or above every magnitude, by which division is exact; 1 for features that do not occur.

    It is the largest power of two of the dtype for magnitudes above that.

    >>> feature_scales(np.array([1.0, 5.0, 0.0, 0.3]))
    array([1. , 8. , 1. , 0.5])
    """
    fractions, exponents = np.frexp(magnitudes)
    largest = np.finfo(magnitudes.dtype).maxexp - 1
    scales = np.ldexp(magnitudes.dtype.type(1), np.minimum(exponents - (fractions == 0.5), largest))
    return np.asarray(np.where(magnitudes > 0, scales, magnitudes.dtype.type(1)))


def scaled(dataset: Dataset, scales: Array) -> Dataset:
    """Return the data set with every feature divided by its scale, or the data set itself if all scales are 1."""
    if (scales == 1).all():
        return dataset
    return replace(dataset, values=dataset.values / scales[dataset.indices])


def raised(dataset: Dataset, magnitudes: Array, comm: Any) -> tuple[Array, Array]:
    """Return the features, ascending, with larger values than the magnitudes so far on any rank, and their new magnitudes.

    Collective over ``comm``; all ranks pass the same magnitudes. The cost depends on the non-zeros of the samples, not on the number of
    features.
    """

    def own() -> SparseStream:
        sizes = np.abs(dataset.values)
        above = sizes > magnitudes[dataset.indices]
        features, places = np.unique(dataset.indices[above], return_inverse=True)
        largest = np.zeros(len(features), magnitudes.dtype)
        np.maximum.at(largest, places, sizes[above])
        return SparseStream(features, largest, dataset.features)

    stream = agreed(comm, own)
    if comm.size > 1:
        stream = allreduce(stream, comm, op="max")
    if not stream.is_dense:
        return stream.indices, stream.values
    largest = stream.to_dense()
    features = np.flatnonzero(largest > 0).astype(dataset.indices.dtype)
    return features, largest[features]


def in_one_unit(dataset: Dataset, comm: Any) -> Array | None:
    """Return scales by which to divide features whose units differ, or None if they do not differ. Collective.

    Penalties apply to the weights of the divided features: a feature in a small unit needs a large weight, whatever it is worth.
    """
    return feature_scales(feature_magnitudes(dataset, comm)) if units_differ_in(dataset, comm) else None


def scaled_by_entry(dataset: Dataset, magnitudes: Array) -> Dataset:
    """Compute the same as :func:`scaled` for these magnitudes, computing scales only for the features of the samples."""
    scales = feature_scales(magnitudes[dataset.indices])
    return dataset if (scales == 1).all() else replace(dataset, values=dataset.values / scales)


def sample_moments(dataset: Dataset, comm: Any) -> Array:
    """Return weighted sums over the samples of all ranks: their weight, squared values, label, and squared label.

    Collective over ``comm``; float64 of shape (4,). Results for different samples can be added.

    Raises
    ------
    DatasetError
        On all ranks, if a sum of squares is not finite.
    """

    def own() -> list[float]:
        counts = np.ones(dataset.rows) if dataset.weights is None else dataset.weights.astype(np.float64, copy=False)
        labels = dataset.labels.astype(np.float64, copy=False)
        with np.errstate(over="ignore", invalid="ignore"):
            squares = float(sum_of_squares(dataset.indptr, dataset.values, np.empty(0) if dataset.weights is None else counts))
            label_squares = float(np.dot(counts, np.square(labels)))
        check_squares(dataset, "value", dataset.values, squares)
        check_squares(dataset, "label", dataset.labels, label_squares)
        return [float(counts.sum()), squares, float(np.dot(counts, labels)), label_squares]

    return np.asarray(np.sum(gather_results(comm, own), axis=0))


def adaptive_rate_unit(moments: Array, intercept: float, in_units_of_labels: bool) -> float:
    """Return a factor for learning rates of adaptive weights, so that the same rates suit any samples.

    A first step of rate r changes each weight of a sample by r, whatever the gradient. With this factor it changes a typical sample's score
    by up to r; if scores have the units of the labels, by up to r times the spread of the labels. Rounded to six digits, so that it does
    not depend on the distribution of the samples.

    Parameters
    ----------
    moments : ndarray
        The result of :func:`sample_moments`.
    intercept : float
        Value of the constant feature of the intercept; 0 if there is none.
    in_units_of_labels : bool
        Whether scores have the units of the labels.

    Examples
    --------
    >>> adaptive_rate_unit(np.array([2.0, 32.0, 0.0, 2.0]), False, False)  # two samples of length 4
    0.25
    """
    count, squares, total, label_squares = moments
    if count == 0:
        return 1.0
    length = float(np.sqrt(squares / count + intercept**2))
    centre = total / count if intercept else 0.0
    spread = 1.0 if not in_units_of_labels else float(np.sqrt(max(label_squares / count - centre**2, 0.0)))
    return float(f"{(spread or 1.0) / (length or 1.0):.6g}")


def rate_unit(update: str, moments: Array, intercept: float, in_units_of_labels: bool) -> float:
    """Return a factor for the learning rates of "ftrl", :func:`adaptive_rate_unit`, or of "arow", its square.

    So a rate of one means that AROW's r is the mean squared length of the samples: 1, as in the paper, if they have unit length.
    """
    unit = adaptive_rate_unit(moments, intercept, in_units_of_labels)
    return float(f"{unit**2:.6g}") if update == "arow" else unit


def typical_value(moments: Array, nonzeros: int) -> float:
    """Return the root mean square of the non-zero values, rounded to six digits; 1 if there are none.

    Parameters
    ----------
    moments : ndarray
        The result of :func:`sample_moments`.
    nonzeros : int
        Number of non-zeros in the samples of all ranks.

    Examples
    --------
    >>> typical_value(np.array([2.0, 32.0, 0.0, 2.0]), 8)
    2.0
    """
    return float(f"{np.sqrt(moments[1] / max(nonzeros, 1)):.6g}") or 1.0


def gradient_unit(moments: Array, nonzeros: int, batch: int) -> float:
    """Return the size of a single sample's contribution to an entry of a batch's mean gradient, for a typical value and a slope of 1.

    Rounded to six digits.

    Parameters
    ----------
    moments : ndarray
        The result of :func:`sample_moments`.
    nonzeros : int
        Number of non-zeros in the samples of all ranks.
    batch : int
        Number of samples of all ranks per step.

    Examples
    --------
    >>> gradient_unit(np.array([2.0, 32.0, 0.0, 2.0]), 8, 10)
    0.2
    """
    return float(f"{np.sqrt(moments[1] / max(nonzeros, 1)) / batch:.6g}")


def units_differ(table: Array, share: float = 1.0) -> bool:
    """Return True if the typical values of columns differ so much that their units must differ.

    The root mean squares of the non-zeros of the columns are compared: units differ if the standard deviation of their logarithms, weighted
    by the number of non-zeros, is above one. It is 0.4 for the pixels of digits, 0.5 for word counts or tf-idf, 0 for zeros and ones, and 2
    to 6 for statistics and measurements. Columns with a typical value above 1e18, or one that is not finite, always have a unit of their
    own.

    Parameters
    ----------
    table : ndarray, shape (columns, 4)
        Weight and number of the non-zeros of each column, and the sums of their values and squared values.
    share : float
        Factor of the required deviation.

    Examples
    --------
    >>> units_differ(np.array([[10, 10, 10, 10.0], [10, 10, 1e4, 1e7]]))
    True
    >>> units_differ(np.array([[10, 10, 10, 10.0], [10, 10, 20, 40.0]]))
    False
    """
    counted, entries, _, squares = table.T
    known = (counted > 0) & (squares > 0)
    entries, sizes = entries[known], np.log(squares[known] / counted[known]) / 2
    if not len(sizes):
        return False
    if not sizes.max() < np.log(_LARGE):
        return True
    mean = np.average(sizes, weights=entries)
    return float(np.average(np.square(sizes - mean), weights=entries)) > (share * _APART) ** 2


def units_differ_in(dataset: Dataset, comm: Any) -> bool:
    """Return True if the columns of all ranks' samples have different units, see :func:`units_differ`. Collective over ``comm``."""
    begin, end = int(dataset.indptr[0]), int(dataset.indptr[-1])
    values = dataset.values[begin:end]
    constant = float(values[0]) if len(values) and (values == values[0]).all() else None
    ranks = gather(comm, (not len(values) or constant == 1, constant, constant is None and _may_differ_in(dataset)))
    if all(ones for ones, _, _ in ranks) or (comm.size == 1 and constant is not None):
        return False
    if not any(may or constant is not None for _, constant, may in ranks):
        return False
    features, table = _columns(dataset, values)
    if comm.size > 1:
        whole = allreduce(SparseStream(features, table, dataset.features), comm)
        table = whole.to_dense() if whole.is_dense else whole.values
    return units_differ(table)


def _may_differ_in(dataset: Dataset) -> bool:
    """Return False if evenly spaced samples show that units do not differ."""
    found = sampled_columns(dataset, dataset.indices[int(dataset.indptr[0]) : int(dataset.indptr[-1])])
    return found is None or units_differ(found[0], FAR_BELOW)


def sampled_columns(dataset: Dataset, indices: Array) -> tuple[Array, int] | None:
    """Return the table for :func:`units_differ` of some evenly spaced samples, and their number; None if all samples should be used.

    A column of a few samples has the size of their values, so units differ no less than in all samples.

    Parameters
    ----------
    dataset : Dataset
    indices : ndarray
        Numbers of the features of the non-zeros, which may differ from those of the data set.
    """
    begin, end = int(dataset.indptr[0]), int(dataset.indptr[-1])
    values = dataset.values[begin:end]
    if end - begin < 4 * _SAMPLED or max(values.max(), -values.min()) > _LARGE:
        return None
    rows = np.arange(0, dataset.rows, (end - begin) // _SAMPLED)
    lengths = dataset.indptr[rows + 1] - dataset.indptr[rows]
    indptr = np.append(0, np.cumsum(lengths))
    entries = np.arange(indptr[-1]) + np.repeat(dataset.indptr[rows] - begin - indptr[:-1], lengths)
    occurring, places = np.unique(indices[entries], return_inverse=True)
    sums, counts = np.zeros(4 * len(occurring)), np.empty(0) if dataset.weights is None else dataset.weights[rows]
    column_sums(read_only(indptr), read_only(places.astype(indices.dtype)), read_only(values[entries]), counts, sums)
    return sums.reshape(-1, 4), len(rows)


def _columns(dataset: Dataset, values: Array) -> tuple[Array, Array]:
    """Return the features that occur in this rank's samples, and their rows of the table for :func:`units_differ`."""
    begin, end = int(dataset.indptr[0]), int(dataset.indptr[-1])
    indices, size, features = read_only(dataset.indices[begin:end]), dataset.features, np.empty(0, dataset.indices.dtype)
    if size > len(values):
        features, indices = _numbered(dataset)
        size = len(features)
    sums = np.zeros(4 * size)
    column_sums(read_only(dataset.indptr - begin), indices, values, np.empty(0) if dataset.weights is None else dataset.weights, sums)
    table = sums.reshape(-1, 4)
    if size == dataset.features and not len(features):
        features = np.flatnonzero(table[:, 1]).astype(dataset.indices.dtype)
        table = table[features]
    return features, table


def _numbered(dataset: Dataset) -> tuple[Array, Array]:
    """Return the features that occur in this rank's samples, ascending, and the number among them of each non-zero's."""
    begin, end, kind = int(dataset.indptr[0]), int(dataset.indptr[-1]), dataset.indices.dtype
    if dataset.features > 64 * (end - begin):  # sorting takes less than a bitmap
        features, places = np.unique(dataset.indices[begin:end], return_inverse=True)
        return features, read_only(places.astype(kind))
    words, numbers = np.zeros(-(-dataset.features // 64), np.uint64), np.empty(end - begin, kind)
    before, features = np.empty(len(words), np.int64), np.empty(feature_numbers.mark(dataset.indices, begin, end, words), kind)
    feature_numbers.marked(words, before, features)
    feature_numbers.number(dataset.indices, begin, end, words, before, numbers)
    return features, read_only(numbers)


def largest_eigenvalue(dataset: Dataset, intercept: bool, comm: Any) -> float:
    """Return an estimate of the largest eigenvalue of the mean of ``x x^T``, from some samples of every rank. Collective over ``comm``.

    If the second derivative of a loss with respect to the score is at most c, the curvature in any direction is at most c times the
    eigenvalue, and gradient descent is stable for rates up to twice the inverse.

    Parameters
    ----------
    dataset : Dataset
    intercept : bool
        Whether every sample has an additional feature of value one.

    Raises
    ------
    DatasetError
        On all ranks, if the squares of values are not finite.
    """
    rows = np.unique(np.linspace(0, dataset.rows - 1, min(dataset.rows, _ROWS)).astype(np.int64))
    counts = np.ones(len(rows)) if dataset.weights is None else dataset.weights[rows]

    def own() -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            found = _by_power_method(_rows(dataset, rows), counts, intercept) if len(rows) else 0.0
            squares = float(np.square(largest_of(dataset.values), dtype=np.float64)) * dataset.features
        check_squares(dataset, "value", dataset.values, found if np.isfinite(squares) else np.inf)
        return found

    return max(gather_results(comm, own))


def _rows(dataset: Dataset, rows: Array) -> csr_array:
    """Return some rows, without columns that none of them has."""
    lengths = dataset.indptr[rows + 1] - dataset.indptr[rows]
    ends = np.cumsum(lengths)
    entries = np.arange(ends[-1]) + np.repeat(dataset.indptr[rows] - (ends - lengths), lengths)
    columns, places = np.unique(dataset.indices[entries], return_inverse=True)
    return csr_array((dataset.values[entries].astype(np.float64), places, np.append(0, ends)), shape=(len(rows), max(1, len(columns))))


def _by_power_method(samples: csr_array, counts: Array, intercept: bool) -> float:
    share, columns = counts / counts.sum(), samples.T
    # All entries differ, so that no symmetry of the data makes it orthogonal to the eigenvector.
    direction = 1 + np.random.default_rng(0).random(samples.shape[1] + 1)
    direction[-1] *= intercept
    length = float(np.linalg.norm(direction))
    for _ in range(_ITERATIONS):
        if length == 0:
            return 0.0
        direction /= length
        scores = share * (samples @ direction[:-1] + direction[-1])
        direction = np.concatenate((columns @ scores, [scores.sum() * intercept]))
        length = float(np.linalg.norm(direction))
    return length
