"""Division of the samples of an epoch into batches, and samples held out: the same for any number of ranks (thesis algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear import kernels
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.runtime.objects import gather

__all__ = ["Division", "Fold", "batches", "check_held_out", "class_counts", "epoch_order", "divided", "held_out"]

Array = NDArray[Any]

# Rounds of the permutation. Six show no structure for 70,000 samples, but for five samples some orders are more frequent than others.
_ROUNDS = 6
_FEW, _ROUNDS_OF_FEW = 1 << 16, 24


class Fold(NamedTuple):
    """One of the equal parts of the samples in cross-validation: it is held out, and the others are for training."""

    number: int  # from 0
    folds: int  # number of parts, each with about the same number of samples of every class


@dataclass(frozen=True)
class Division:
    """The division of the samples into those for training and those held out."""

    total: int  # number of training samples of all ranks
    first: int  # number, among these, of this rank's first one
    rows: Array | None = None  # this rank's rows for training, ascending; None for all
    held_out: Array | None = None  # this rank's other rows; None if no rank has any


def batches(dataset: Dataset, size: int, seed: tuple[int, int]) -> Iterator[tuple[Array, int]]:
    """Yield the batches of one epoch: the rows of each that this rank holds, and the number of its samples on all ranks.

    All samples are shuffled by their numbers over all ranks, so that the batches are the same for any number of ranks: thesis
    algorithm 1 lines 3 to 6, except that each sample of a batch is processed by the rank that has read it. A rank's rows of a
    batch are in memory order.

    Parameters
    ----------
    dataset : Dataset
    size : int
        Number of samples in a batch, over all ranks; the last batch of an epoch may have fewer.
    seed : (int, int)
        Seed of the run, and number of the epoch.

    Examples
    --------
    >>> halves = [Dataset(np.zeros(4, int), np.empty(0), np.empty(0), np.zeros(3), 1, first, 6) for first in (0, 3)]
    >>> for first, second in zip(*(batches(half, 4, (0, 3)) for half in halves)):
    ...     print(first, second)
    (array([1, 2]), 4) (array([0, 2]), 4)
    (array([0]), 2) (array([1]), 2)
    """
    starts, order = epoch_order(Division(dataset.total_samples, dataset.first_sample), dataset.rows, size, seed)
    for batch, (start, end) in enumerate(pairwise(starts)):
        yield order[start:end], min(size, dataset.total_samples - batch * size)


def epoch_order(division: Division, rows: int, size: int, seed: tuple[int, int]) -> tuple[list[int], Array]:
    """Return the rows of this rank for an epoch: batch i has ``order[starts[i] : starts[i + 1]]``."""
    starts, order = _permuted(division.first, rows if division.rows is None else len(division.rows), division.total, size, seed)
    return starts, order if division.rows is None else division.rows[order]


def check_held_out(validation: float | Fold, evaluates: bool) -> None:
    """Raise ValueError if ``validation`` is neither a fraction nor a fold, or samples are held out without evaluations."""
    if isinstance(validation, Fold):
        if not 0 <= validation.number < validation.folds or validation.folds < 2:
            raise ValueError(f"a fold is one of at least 2, not number {validation.number} of {validation.folds}")
    elif not 0 <= validation < 1:
        raise ValueError(f"validation must be at least 0 and below 1, not {validation}")
    if validation and not evaluates:
        raise ValueError("held-out samples need evaluations to find the best model: evaluate_every must be above 0")


def held_out(total: int, share: float | Fold) -> int:
    """Return the number of samples to hold out of ``total``: at least one and not all for a fraction, or the size of a fold.

    Raises
    ------
    DatasetError
        If there are too few.

    Examples
    --------
    >>> held_out(11, 0.2), [held_out(11, Fold(number, 3)) for number in range(3)]
    (2, [4, 4, 3])
    """
    if isinstance(share, Fold):
        return total // share.folds + (share.number < total % share.folds)
    if share and total < 2:
        raise DatasetError(f"of {total} sample{'s' * (total != 1)} none can be held out for validation: give more, or train on all")
    return min(total - 1, max(1, round(share * total))) if share else 0


def divided(dataset: Dataset, share: float | Fold, seed: int, comm: Any, classes: Array | None = None) -> Division:
    """Hold out a fraction of the samples, or a fold, chosen by a permutation of all sample numbers. Collective.

    The same samples are held out for any number of ranks. A fold has its share of each of the ``classes``, which are labels.

    Raises
    ------
    DatasetError
        On all ranks, if there are too few samples, or fewer of a class than there are folds.
    """
    if not share:
        return Division(dataset.total_samples, dataset.first_sample)
    out = held_out(dataset.total_samples, share)
    chosen = np.zeros(dataset.rows, bool)
    if isinstance(share, Fold):
        chosen[_folds(dataset, share.folds, seed, comm, classes) == share.number] = True
    else:
        starts, order = _permuted(dataset.first_sample, dataset.rows, dataset.total_samples, out, (seed, 0))  # epochs count from 1
        chosen[order[: starts[1]]] = True
    rows = np.flatnonzero(~chosen)
    before = sum(gather(comm, len(rows))[: comm.rank])
    return Division(dataset.total_samples - out, before, rows, np.flatnonzero(chosen))


def class_counts(dataset: Dataset, classes: Array, comm: Any) -> Array:
    """Return the number of samples of each class on every rank, of shape (ranks, classes). Collective."""
    return np.array(gather(comm, [int(np.count_nonzero(dataset.labels == label)) for label in classes]))


def _folds(dataset: Dataset, folds: int, seed: int, comm: Any, classes: Array | None) -> Array:
    """Return the fold of each of this rank's samples. Sizes of folds, in total and per class, differ by at most one.

    The samples of a class are numbered over all ranks and permuted. Equal parts of them are folds; the remaining ones, fewer than there
    are folds, are assigned to the folds in turn, continuing where the previous class ended.
    """
    if classes is None:
        strata, counts = [np.arange(dataset.rows)], np.array(gather(comm, [dataset.rows]))
    else:
        strata, counts = [np.flatnonzero(dataset.labels == label) for label in classes], class_counts(dataset, classes, comm)
    totals, before = counts.sum(axis=0), counts[: comm.rank].sum(axis=0)
    if totals.min() < folds:
        raise DatasetError(f"{folds} folds need as many samples of each class, but one has {totals.min()}: use fewer folds")
    fold = np.empty(dataset.rows, np.int64)
    left: list[tuple[int, int, int]] = []  # of each remaining sample: class, number in the class, and row
    for stratum, rows in enumerate(strata):
        size = int(totals[stratum]) // folds
        starts, order = _permuted(int(before[stratum]), len(rows), int(totals[stratum]), size, (seed, 0))
        parts = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        fold[rows[order]] = parts
        over = np.flatnonzero(parts >= folds)
        left += [(stratum, int(before[stratum] + order[place]), int(rows[order[place]])) for place in over]
    remaining = [own for ranks in gather(comm, [(stratum, number) for stratum, number, _ in left]) for own in ranks]
    assigned = {each: position % folds for position, each in enumerate(sorted(remaining))}
    for stratum, number, row in left:
        fold[row] = assigned[stratum, number]
    return fold


def _permuted(first: int, count: int, total: int, size: int, seed: tuple[int, int]) -> tuple[list[int], Array]:
    """Assign ``count`` consecutive numbers from ``first`` on, of ``total``, to batches of ``size`` by a permutation of all.

    Returned numbers are relative to ``first``.
    """
    keys = np.random.SeedSequence(seed).generate_state(_ROUNDS if total > _FEW else _ROUNDS_OF_FEW, np.uint64)
    starts = np.zeros(-(-total // size) + 1, np.int64)
    order = np.empty(count, np.int64)
    kernels.deal(first, total, size, keys, starts, order)
    return starts.tolist(), order
