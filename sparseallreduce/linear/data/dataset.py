"""The samples of one rank, as compressed sparse rows."""

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
    """Compressed sparse rows whose values may lie elsewhere, in any order: a batch. Read-only as in a :class:`Dataset`."""

    indptr: Array
    indices: Array
    values: Array
    starts: Array  # where among the values those of each row begin


@dataclass(frozen=True)
class Dataset:
    """The samples of one rank as compressed sparse rows, and where they stand among those of all ranks.

    Samples are numbered over all ranks as they stand in the file, whatever the number of ranks. The arrays are read-only views of
    those given, which may be a memory-mapped file: so compiled loops meet them in one form, wherever they come from. What is said
    here of the arrays is checked, on all ranks at once, by the strategy that is made of them.
    """

    indptr: Array  # int64, samples of this rank + 1: where each sample begins among the non-zeros
    indices: Array  # the feature of every non-zero, from 0, increasing within a sample; uint32, or uint64 above 2**32 features
    values: Array  # float32, or float64 for training in that; one a non-zero
    labels: Array  # float64, one a sample
    features: int  # dimension N
    first_sample: int = 0  # number of this rank's first sample among all
    total_samples: int = -1  # samples of all ranks; those of this rank if not given
    source: str = "samples"  # what errors call them
    weights: Array | None = None  # float64, what each sample's loss and gradient are multiplied by, at least 0; None for 1
    zero_based: bool | None = None  # whether indices count from 0 in the text that it was read from; None if it was no svmlight text
    names: tuple[str, ...] | None = None  # sorted, of the classes whose numbers labels are then, from 0; None if labels are what they are
    pages: Pages | None = field(default=None, repr=False, compare=False)  # of a mapped file that is larger than the memory
    encoding: Encoding | None = field(default=None, repr=False)  # how the columns of a table became features; None if it was none
    dimension: int = 0  # N of the samples as they were given, where features are numbers of those that occur; 0 where they are not

    def __post_init__(self) -> None:
        for name in ("indptr", "indices", "values", "labels", "weights"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, read_only(np.asarray(getattr(self, name))))
        if self.total_samples < 0:
            object.__setattr__(self, "total_samples", self.rows)

    @property
    def rows(self) -> int:
        """Samples of this rank."""
        return len(self.indptr) - 1

    @property
    def nnz(self) -> int:
        """Non-zeros of this rank."""
        return len(self.values)

    @property
    def named_labels(self) -> Array:
        """The labels of this rank's samples as they stand in the file: names of classes, if it has such, or numbers.

        There must not be a sample without a label among named ones.
        """
        return self.labels if self.names is None else np.array(self.names)[self.labels.astype(np.int64)]

    def to_scipy(self) -> csr_array:
        """This rank's samples as a ``scipy.sparse.csr_array`` of shape (rows, features)."""
        return csr_array((self.values, self.indices.astype(np.int64), self.indptr), shape=(self.rows, self.features))

    @classmethod
    def from_scipy(cls, samples: Any, labels: Any, *, first_sample: int = 0, total_samples: int = -1) -> Dataset:
        """The data set of a ``scipy.sparse`` matrix or array, or a dense one, with a row a sample.

        Without ``first_sample`` and ``total_samples`` these are all samples there are. Where several ranks train, every one of them
        gives the same, and takes its share of them: ranks that have samples of their own give them to :meth:`of_ranks`.

        Parameters
        ----------
        samples : scipy.sparse matrix or array, or ndarray, shape (samples, features)
            Of numbers, which are taken as float32. Features of a row are sorted, and duplicates added up, where they have to be.
        labels : array-like, shape (samples,)
            Numbers.
        first_sample, total_samples : int, optional
            Where ranks count their samples themselves: the number of this one's first, and the samples of all ranks.

        Raises
        ------
        DatasetError
            If these are no numbers, or samples no matrix.

        Examples
        --------
        >>> from scipy.sparse import csr_array
        >>> dataset = Dataset.from_scipy(csr_array([[0.0, 2.0], [3.0, 0.0]]), [1, -1])
        >>> dataset.indices, dataset.features, dataset.total_samples
        (array([1, 0], dtype=uint32), 2, 2)
        """
        rows = _compressed(samples)
        with np.errstate(over="ignore"):  # what becomes infinite is refused where it is checked
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
        """The data set that the samples of all ranks make up together, rank by rank; collective over ``comm``.

        Parameters
        ----------
        samples, labels
            This rank's, as for :meth:`from_scipy`; there may be none.
        comm : mpi4py.MPI.Intracomm or SERIAL, optional
            ``MPI.COMM_WORLD`` by default.

        Raises
        ------
        DatasetError
            On all ranks alike, if the samples or labels of any rank cannot be trained on.
        MismatchError
            On all ranks alike, if two ranks that have samples give different numbers of features.

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
    """The features of the non-zeros of some rows, one row after the other.

    >>> features_of(Dataset(np.array([0, 2, 3]), np.uint32([1, 4, 2]), np.ones(3), np.ones(2), 5), np.array([1, 0]))
    array([2, 1, 4], dtype=uint32)
    """
    begins, ends = dataset.indptr[rows], dataset.indptr[rows + 1]
    places = np.cumsum(ends - begins)
    if not len(places):
        return dataset.indices[:0]
    return np.asarray(dataset.indices[np.arange(places[-1]) + np.repeat(ends - places, ends - begins)])


def _compressed(samples: Any) -> csr_array:
    """Samples as rows whose features increase."""
    try:
        rows = csr_array(samples.tocsr() if hasattr(samples, "tocsr") else samples)
    except (TypeError, ValueError) as error:
        raise DatasetError(f"samples are no matrix of numbers: {error}") from None
    if rows.ndim != 2 or rows.dtype.kind not in "biuf":
        raise DatasetError(f"samples must be a matrix of real numbers, not {rows.ndim}-dimensional of {rows.dtype}")
    if not rows.has_canonical_format:
        rows = rows.copy()
        rows.sum_duplicates()
    return rows


def _numbers(labels: Any) -> Array:
    """Labels as float64."""
    try:
        given = np.asarray(labels)
        if given.dtype.kind in "USc":
            raise TypeError(f"they are {given.dtype}")
        return given.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DatasetError(f"labels must be real numbers ({error}): number the classes") from None


def read_only(array: Array) -> Array:
    """A view of an array through which it cannot be changed."""
    view = array.view()
    view.flags.writeable = False
    return view
