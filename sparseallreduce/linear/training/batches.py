"""The samples of an epoch, dealt to batches, and those held out: the same for any number of ranks (thesis algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear import kernels
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.runtime.objects import gather

__all__ = ["Division", "batches", "dealt", "divided", "held_out"]

Array = NDArray[Any]

# Of the permutation of samples. Six leave no visible trace in 70,000 samples, but prefer some orders of five to others.
_ROUNDS = 6
_FEW, _ROUNDS_OF_FEW = 1 << 16, 24


@dataclass(frozen=True)
class Division:
    """Which of the samples are trained on, and which are held out."""

    total: int  # that all ranks train on
    first: int  # the number, among those, of the first on this rank
    rows: Array | None = None  # of this rank, which are trained on, increasing; None for all
    held_out: Array | None = None  # the others; None if there are none on any rank


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
    starts, order = dealt(Division(dataset.total_samples, dataset.first_sample), dataset.rows, size, seed)
    for batch, (start, end) in enumerate(pairwise(starts)):
        yield order[start:end], min(size, dataset.total_samples - batch * size)


def dealt(division: Division, rows: int, size: int, seed: tuple[int, int]) -> tuple[list[int], Array]:
    """The rows of this rank, of which it has so many, that are trained on in an epoch: batch i has ``order[starts[i] : starts[i + 1]]``."""
    starts, order = _permuted(division.first, rows if division.rows is None else len(division.rows), division.total, size, seed)
    return starts, order if division.rows is None else division.rows[order]


def held_out(total: int, share: float) -> int:
    """How many of so many samples a share comes to: at least one, and not all.

    Raises
    ------
    DatasetError
        If there are too few.
    """
    if share and total < 2:
        raise DatasetError(f"of {total} sample{'s' * (total != 1)} none can be held out for validation: give more, or train on all")
    return min(total - 1, max(1, round(share * total))) if share else 0


def divided(dataset: Dataset, share: float, seed: int, comm: Any) -> Division:
    """Hold out a share of the samples, by a permutation of the numbers of all: the same ones for any number of ranks. Collective.

    Raises
    ------
    DatasetError
        On all ranks alike, if there are too few samples.
    """
    if not share:
        return Division(dataset.total_samples, dataset.first_sample)
    out = held_out(dataset.total_samples, share)
    starts, order = _permuted(dataset.first_sample, dataset.rows, dataset.total_samples, out, (seed, 0))  # epochs count from 1
    chosen = np.zeros(dataset.rows, bool)
    chosen[order[: starts[1]]] = True
    rows = np.flatnonzero(~chosen)
    before = sum(gather(comm, len(rows))[: comm.rank])
    return Division(dataset.total_samples - out, before, rows, np.flatnonzero(chosen))


def _permuted(first: int, count: int, total: int, size: int, seed: tuple[int, int]) -> tuple[list[int], Array]:
    """The numbers below ``count``, which stand for those from ``first`` on of all, dealt to batches of ``size``."""
    keys = np.random.SeedSequence(seed).generate_state(_ROUNDS if total > _FEW else _ROUNDS_OF_FEW, np.uint64)
    starts = np.zeros(-(-total // size) + 1, np.int64)
    order = np.empty(count, np.int64)
    kernels.deal(first, total, size, keys, starts, order)
    return starts.tolist(), order
