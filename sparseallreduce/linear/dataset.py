"""The samples of one rank, as compressed sparse rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from sparseallreduce.streams.stream import index_dtype

__all__ = ["Dataset", "Rows", "read_only"]

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
    those given, which may be a memory-mapped file: so compiled loops meet them in one form, wherever they come from.
    """

    indptr: Array  # int64, samples of this rank + 1: where each sample begins among the non-zeros
    indices: Array  # the feature of every non-zero, from 0, in order within a sample; uint32, or uint64 above 2**32 features
    values: Array  # float32, or float64 for training in that; one a non-zero
    labels: Array  # float64, one a sample
    features: int  # dimension N
    first: int = 0  # number of this rank's first sample among all
    total: int = -1  # samples of all ranks; those of this rank if not given
    source: str = "samples"  # what errors call them
    weights: Array | None = None  # float64, what each sample counts in loss and gradient, on average over all ranks 1; None if all alike

    def __post_init__(self) -> None:
        for name in ("indptr", "indices", "values", "labels"):
            object.__setattr__(self, name, read_only(np.asarray(getattr(self, name))))
        if self.total < 0:
            object.__setattr__(self, "total", self.rows)

    @property
    def rows(self) -> int:
        """Samples of this rank."""
        return len(self.labels)

    @property
    def nnz(self) -> int:
        """Non-zeros of this rank."""
        return len(self.values)

    def to_scipy(self) -> csr_array:
        """This rank's samples as a ``scipy.sparse.csr_array`` of shape (rows, features)."""
        return csr_array((self.values, self.indices.astype(np.int64), self.indptr), shape=(self.rows, self.features))

    @classmethod
    def from_scipy(cls, samples: Any, labels: Any, *, first: int = 0, total: int = -1) -> Dataset:
        """The data set of a ``scipy.sparse`` matrix or array with a row a sample, whose features are sorted if they are not.

        Examples
        --------
        >>> from scipy.sparse import csr_array
        >>> dataset = Dataset.from_scipy(csr_array([[0.0, 2.0], [3.0, 0.0]]), [1, -1])
        >>> dataset.indices, dataset.features, dataset.total
        (array([1, 0], dtype=uint32), 2, 2)
        """
        rows = samples.tocsr()
        if not rows.has_sorted_indices:
            rows = rows.sorted_indices()
        return cls(
            rows.indptr.astype(np.int64),
            rows.indices.astype(index_dtype(rows.shape[1])),
            rows.data.astype(np.float32),
            np.asarray(labels, dtype=np.float64),
            rows.shape[1],
            first,
            total,
        )


def read_only(array: Array) -> Array:
    """A view of an array through which it cannot be changed."""
    view = array.view()
    view.flags.writeable = False
    return view
