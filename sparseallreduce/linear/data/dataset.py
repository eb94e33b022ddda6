"""The samples of one rank as compressed sparse rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from sparseallreduce.errors import DatasetError, MismatchError
from sparseallreduce.linear.data.binary.pages import Pages
from sparseallreduce.linear.data.checks import check_rows
from sparseallreduce.linear.encoding import Encoding
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.objects import agreed, gather
from sparseallreduce.streams.stream import index_dtype

__all__ = ["Dataset", "Rows", "features_of", "read_only"]

Array = NDArray[Any]


class Rows(NamedTuple):
    """Compressed sparse rows of a batch, whose values may be stored elsewhere in any order. Read-only as in a :class:`Dataset`."""

    indptr: Array
    indices: Array
    values: Array
    starts: Array  # position of each row's first value


@dataclass(frozen=True)
class Dataset:
    """The samples of one rank as compressed sparse rows, and their position among those of all ranks.

    Samples are numbered over all ranks in the order of the file, for any number of ranks. The arrays are read-only views of
    those given, which may be a memory-mapped file, so that compiled loops see one form of array. The requirements
    below are checked on all ranks by the strategy that uses the data set.
    """

    indptr: Array  # int64, samples of this rank + 1: position of each sample's first non-zero
    indices: Array  # feature of every non-zero, from 0, ascending within a sample; uint32, or uint64 above 2**32 features
    values: Array  # float32, or float64 for training in float64; one per non-zero
    labels: Array  # float64, one per sample
    features: int  # number of features, N
    first_sample: int = 0  # number of this rank's first sample among all
    total_samples: int = -1  # number of samples of all ranks; by default that of this rank
    source: str = "samples"  # name of the samples in errors
    weights: Array | None = None  # float64, at least 0: factor of each sample's loss and gradient; None for 1
    zero_based: bool | None = None  # whether indices count from 0 in the svmlight text that was read; None for other formats
    names: tuple[str, ...] | None = None  # sorted names of the classes, which labels number from 0; None if labels are numbers
    pages: Pages | None = field(default=None, repr=False, compare=False)  # set for a mapped file that is larger than memory
    encoding: Encoding | None = field(default=None, repr=False)  # encoding of the columns of a table; None for other formats
    dimension: int = 0  # original N, if only the features that occur are numbered; 0 otherwise
    # The indptr, indices, values and features that have been found valid, or None.
    checked: tuple[Array, Array, Array, int] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("indptr", "indices", "values", "labels", "weights"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, read_only(np.asarray(getattr(self, name))))
        if self.total_samples < 0:
            object.__setattr__(self, "total_samples", self.rows)

    @property
    def rows(self) -> int:
        """The number of samples of this rank."""
        return len(self.indptr) - 1

    @property
    def nnz(self) -> int:
        """The number of non-zeros of this rank."""
        return len(self.values)

    @property
    def named_labels(self) -> Array:
        """The labels of this rank's samples as in the file: class names if there are any, otherwise numbers.

        Samples with class names must all have a label.
        """
        return self.labels if self.names is None else np.array(self.names)[self.labels.astype(np.int64)]

    def to_scipy(self) -> csr_array:
        """Return this rank's samples as a ``scipy.sparse.csr_array`` of shape (rows, features)."""
        return csr_array((self.values, self.indices.astype(np.int64), self.indptr), shape=(self.rows, self.features))

    @classmethod
    def from_scipy(cls, samples: Any, labels: Any, *, first_sample: int = 0, total_samples: int = -1) -> Dataset:
        """Return the data set of a ``scipy.sparse`` matrix or array, or a dense one, with one row per sample.

        By default these are all samples. If several ranks train, each of them
        passes the same, and takes its share; ranks with their own samples use :meth:`of_ranks`.

        Parameters
        ----------
        samples : scipy.sparse matrix or array, or ndarray, shape (samples, features)
            Numbers, which are converted to float32. The features of a row are sorted and duplicates are added, if necessary.
        labels : array-like, shape (samples,)
            Numbers.
        first_sample, total_samples : int, optional
            For ranks with their own samples: the number of this rank's first sample, and the number of samples of all ranks.

        Raises
        ------
        DatasetError
            If these are not numbers, or samples are not a matrix.

        Examples
        --------
        >>> from scipy.sparse import csr_array
        >>> dataset = Dataset.from_scipy(csr_array([[0.0, 2.0], [3.0, 0.0]]), [1, -1])
        >>> dataset.indices, dataset.features, dataset.total_samples
        (array([1, 0], dtype=uint32), 2, 2)
        """
        rows = _compressed(samples)
        with np.errstate(over="ignore"):  # later checks refuse infinite values
            values = rows.data.astype(np.float32)
        return cls(
            rows.indptr.astype(np.int64),
            rows.indices.astype(index_dtype(rows.shape[1])),
            values,
            _numbers(labels),
            rows.shape[1],
            first_sample,
            total_samples,
        )

    @classmethod
    def of_ranks(cls, samples: Any, labels: Any, comm: Any = None) -> Dataset:
        """Return the data set that consists of the samples of all ranks, rank by rank. Collective over ``comm``.

        Parameters
        ----------
        samples, labels
            Those of this rank, as for :meth:`from_scipy`, possibly none.
        comm : mpi4py.MPI.Intracomm or SERIAL, optional
            ``MPI.COMM_WORLD`` by default.

        Raises
        ------
        DatasetError
            On all ranks, if the samples or labels of any rank are invalid.
        MismatchError
            On all ranks, if two ranks with samples have different numbers of features.

        Examples
        --------
        >>> import sparseallreduce as sar
        >>> dataset = Dataset.of_ranks(csr_array([[0.0, 2.0], [3.0, 0.0]]), [1, -1], sar.SERIAL)
        >>> dataset.first_sample, dataset.rows, dataset.total_samples
        (0, 2, 2)
        """
        comm = resolve(comm)

        def checked() -> Dataset:
            dataset = cls.from_scipy(samples, labels)
            check_rows(dataset)
            return dataset

        mine = agreed(comm, checked)
        ranks = gather(comm, (mine.rows, mine.features))
        widths = {features for rows, features in ranks if rows} or {max(features for _, features in ranks)}
        if len(widths) > 1:
            listed = ", ".join(str(features) for _, features in ranks)
            raise MismatchError(f"all ranks must give as many features, but ranks 0 to {comm.size - 1} give {listed}")
        features, total = widths.pop(), sum(rows for rows, _ in ranks)
        indices = mine.indices.astype(index_dtype(features), copy=False)
        first = sum(rows for rows, _ in ranks[: comm.rank])
        return replace(mine, features=features, indices=indices, first_sample=first, total_samples=total)


def features_of(dataset: Dataset, rows: Array) -> Array:
    """Return the features of the non-zeros of some rows, one row after another.

    >>> features_of(Dataset(np.array([0, 2, 3]), np.uint32([1, 4, 2]), np.ones(3), np.ones(2), 5), np.array([1, 0]))
    array([2, 1, 4], dtype=uint32)
    """
    begins, ends = dataset.indptr[rows], dataset.indptr[rows + 1]
    places = np.cumsum(ends - begins)
    if not len(places):
        return dataset.indices[:0]
    return np.asarray(dataset.indices[np.arange(places[-1]) + np.repeat(ends - places, ends - begins)])


def _compressed(samples: Any) -> csr_array:
    """Return samples as rows with ascending features."""
    try:
        rows = csr_array(samples.tocsr() if hasattr(samples, "tocsr") else samples)
    except (TypeError, ValueError) as error:
        raise DatasetError(f"samples are not a matrix of numbers: {error}") from None
    if rows.ndim != 2 or rows.dtype.kind not in "biuf":
        raise DatasetError(f"samples must be a matrix of real numbers, not {rows.ndim}-dimensional of {rows.dtype}")
    if not rows.has_canonical_format:
        rows = rows.copy()
        rows.sum_duplicates()
    return rows


def _numbers(labels: Any) -> Array:
    """Return labels as float64."""
    try:
        given = np.asarray(labels)
        if given.dtype.kind in "USc":
            raise TypeError(f"they are {given.dtype}")
        return given.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DatasetError(f"labels must be real numbers ({error}): number the classes") from None


def read_only(array: Array) -> Array:
    """Return a read-only view of an array."""
    view = array.view()
    view.flags.writeable = False
    return view
