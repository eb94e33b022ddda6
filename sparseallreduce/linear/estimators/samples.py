"""Conversion of a call's samples to the trainer's data set."""

from __future__ import annotations

import zlib
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn.utils import check_array

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.runtime.objects import gather_results
from sparseallreduce.streams.stream import index_dtype

__all__ = ["Samples", "counts_of", "dataset_of", "digest_of", "mean_of"]

Array = NDArray[Any]

_ENDS = 1 << 14  # items at each end of an array that enter its digest


class Samples(NamedTuple):
    """Checked samples of a call, without those of weight zero."""

    rows: csr_array  # float32 or float64
    labels: Array
    counts: Array  # float64, weight of each sample


def counts_of(sample_weight: Any, samples: int) -> Array:
    """Return the weight of each sample."""
    if sample_weight is None:
        return np.ones(samples)
    if isinstance(sample_weight, Number):
        sample_weight = np.full(samples, sample_weight)
    counts = check_array(sample_weight, ensure_2d=False, ensure_min_samples=0, dtype=np.float64, input_name="sample_weight")
    if counts.shape != (samples,):
        raise ValueError(f"sample_weight has the shape {counts.shape}, but there are {samples} samples")
    if (counts < 0).any():
        raise ValueError(f"sample_weight must not be negative, but the lowest is {counts.min():g}")
    return np.asarray(counts)


def dataset_of(rows: csr_array, counts: Array, comm: Any, partial: bool) -> tuple[Dataset, float, int]:
    """Return the samples as a data set of all ranks, with weights of mean one unless the call is partial. Collective.

    Returns
    -------
    Dataset
    float
        Sum of the weights of all ranks' samples.
    int
        Number of non-zeros in all ranks' samples.
    """
    with np.errstate(over="ignore"):  # an infinite sum is an error below
        ranks = gather_results(comm, lambda: (len(counts), float(counts.sum()), int(rows.nnz), rows.dtype.char if len(counts) else "f"))
    total, overall = sum(share for share, *_ in ranks), sum(weight for _, weight, *_ in ranks)
    if not np.isfinite(overall):
        raise ValueError(f"the sum of all sample_weight is {overall:g}: divide them by a number, only their ratios matter")
    dataset = Dataset(
        indptr=rows.indptr.astype(np.int64, copy=False),
        indices=rows.indices.astype(index_dtype(rows.shape[1])),
        values=rows.data.astype(np.result_type(*(kind for *_, kind in ranks)), copy=False),
        labels=np.empty(len(counts)),
        features=rows.shape[1],
        first_sample=sum(share for share, *_ in ranks[: comm.rank]),
        total_samples=total,
        weights=counts if partial else counts * (total / overall),
    )
    return dataset, overall, sum(nonzeros for *_, nonzeros, _ in ranks)


def digest_of(samples: Samples) -> int:
    """Return a checksum of both ends of the samples' arrays, because reading all of them would take as long as a pass."""
    bits = zlib.crc32(repr((samples.rows.shape, samples.rows.nnz)).encode())
    labels = samples.labels if samples.labels.dtype.kind != "O" else samples.labels.astype(np.str_)
    for array in (samples.rows.data, samples.rows.indices, samples.rows.indptr, labels, samples.counts):
        for end in (array[:_ENDS], array[-_ENDS:]):
            bits = zlib.crc32(np.ascontiguousarray(end).view(np.uint8).data, bits)
    return bits


def mean_of(values: Array, dataset: Dataset, comm: Any) -> float:
    """Return the weighted mean of a value per sample, over all ranks. Collective."""
    counts = np.ones(dataset.rows) if dataset.weights is None else dataset.weights
    return float(sum(gather_results(comm, lambda: float(np.dot(values, counts))))) / dataset.total_samples
