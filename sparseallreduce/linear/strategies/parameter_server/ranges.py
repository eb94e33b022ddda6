"""Which server holds which indices: ranges that are asked for equally often."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.runtime.objects import gather

__all__ = ["balanced_bounds"]

Array = NDArray[Any]

_BLOCKS = 1 << 14  # of indices; a range ends between two
_BATCH = 100  # samples of the batch that a range's share of entries is estimated for
_SAMPLE = 1 << 22  # non-zeros of a rank, evenly spaced, that are counted


def balanced_bounds(dataset: Dataset, comm: Any, servers: int) -> list[int]:
    """The ``servers + 1`` bounds of ranges of the features that take equal shares of all pulls and pushes; collective over ``comm``.

    Ranges of equal length would not: few features occur in most samples, and most in few. However often a feature occurs in a batch,
    it is pulled once; one that a share p of the samples have is in a batch of B with probability 1 - (1 - p)^B. These are added up in
    blocks of the index space, over the samples of all ranks, and the blocks cut where the sum reaches each server's share. Every
    index counts for a little besides, so that no server's range is empty where there are features enough.

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
