"""Partition of the indices among servers into ranges that are requested equally often."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.runtime.objects import gather

__all__ = ["balanced_bounds"]

Array = NDArray[Any]

_BLOCKS = 1 << 14  # number of blocks of indices; ranges end at block boundaries
_BATCH = 100  # number of samples in a batch that the load is estimated for
_SAMPLE = 1 << 22  # number of evenly spaced non-zeros of a rank that are counted


def balanced_bounds(dataset: Dataset, comm: Any, servers: int) -> list[int]:
    """Return the ``servers + 1`` bounds of ranges of features with equal shares of all pulls and pushes. Collective over ``comm``.

    Ranges of equal length would not have equal shares, because few features occur in most samples, and most in few. However often a feature
    occurs in a batch, it is pulled once; one that occurs in a fraction p of the samples is in a batch of B with probability 1 - (1 - p)^B.
    These probabilities are summed in blocks of indices, over the samples of all ranks, and the blocks are divided where the sum reaches
    each server's share. Every block has a small additional load, so that no server's range is empty if there are enough features.

    Examples
    --------
    >>> from scipy.sparse import csr_array
    >>> from sparseallreduce import SERIAL
    >>> often_the_first = Dataset.from_scipy(csr_array([[1, 1, 1, 0, 0, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]]), [1, -1])
    >>> balanced_bounds(often_the_first, SERIAL, 2)
    [0, 3, 8]
    """
    features = dataset.features
    width = max(1, -(-features // _BLOCKS))
    load = np.zeros(-(-features // width))
    if dataset.rows:
        spacing = -(-dataset.nnz // _SAMPLE) or 1
        share = np.bincount(dataset.indices[::spacing], minlength=features).astype(np.float32) * np.float32(spacing / dataset.rows)
        touched = 1 - (1 - np.minimum(share, 1)) ** _BATCH
        load = np.add.reduceat(touched, np.arange(0, features, width), dtype=np.float64) * dataset.rows
    total = np.sum(gather(comm, load), axis=0)
    total += max(total.sum(), 1) * 1e-3 / len(total)
    reached = np.cumsum(total) / total.sum()
    cuts = np.searchsorted(reached, np.arange(1, servers) / servers) + 1
    return [0, *np.minimum(cuts * width, features).tolist(), features]
