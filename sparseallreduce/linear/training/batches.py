"""The batches of an epoch: the same for any number of ranks (thesis algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear import kernels
from sparseallreduce.linear.data.dataset import Dataset

__all__ = ["batches"]

Array = NDArray[Any]

# Of the permutation of samples. Six leave no visible trace in 70,000 samples, but prefer some orders of five to others.
_ROUNDS = 6
_FEW, _ROUNDS_OF_FEW = 1 << 16, 24


def batches(dataset: Dataset, size: int, seed: tuple[int, int]) -> Iterator[tuple[Array, int]]:
    """The batches of one epoch: of each, the rows that this rank holds, and how many samples all ranks hold of it.

    All samples are shuffled by their numbers over all ranks, so that the batches are the same for any number of ranks; thesis
    algorithm 1 lines 3 to 6, but for the division of a batch among the ranks, which is by who has read the sample. A rank's rows of a
    batch come in the order in which they stand in memory.

    Parameters
    ----------
    dataset : Dataset
    size : int
        Samples of a batch, over all ranks; the last batch of an epoch may have fewer.
    seed : (int, int)
        Of the run, and the number of the epoch.

    Examples
    --------
    >>> halves = [Dataset(np.zeros(4, int), np.empty(0), np.empty(0), np.zeros(3), 1, first, 6) for first in (0, 3)]
    >>> for first, second in zip(*(batches(half, 4, (0, 3)) for half in halves)):
    ...     print(first, second)
    (array([1, 2]), 4) (array([0, 2]), 4)
    (array([0]), 2) (array([1]), 2)
    """
    keys = np.random.SeedSequence(seed).generate_state(_ROUNDS if dataset.total_samples > _FEW else _ROUNDS_OF_FEW, np.uint64)
    starts = np.zeros(-(-dataset.total_samples // size) + 1, np.int64)
    order = np.empty(dataset.rows, np.int64)
    kernels.deal(dataset.first_sample, dataset.total_samples, size, keys, starts, order)
    for batch, (start, end) in enumerate(pairwise(starts.tolist())):
        yield order[start:end], min(size, dataset.total_samples - batch * size)
