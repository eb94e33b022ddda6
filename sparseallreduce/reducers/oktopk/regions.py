"""Regions of the index space, one for each rank, balanced so that no rank reduces much more than others (Ok-Topk 3.1.1)."""

from __future__ import annotations

from collections.abc import Generator
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.boundaries import nearest_cut
from sparseallreduce.algorithms.steps import Step
from sparseallreduce.reducers.oktopk.consensus import total
from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels.backend import array_module, as_host
from sparseallreduce.streams.partition import boundaries

__all__ = ["averaged", "equal", "rebalanced", "tolerance"]

UNITS = 2**14  # units of the index space in which averaged bounds are sent
NEAR = 16  # a known place is near another if at most 1/16 of a region's entries are between them

Gap = tuple[tuple[int, int], tuple[int, int]]  # two known places, with the entries below each
Bounds = list[int]  # P + 1 of them, from 0 to N, not decreasing: region j is [bounds[j], bounds[j + 1])


def equal(size: int, ranks: int) -> Bounds:
    """Return regions of equal length."""
    return boundaries(size, ranks)


def averaged(indices: NDArray[Any], size: int, k: int, rank: int, ranks: int) -> Generator[Step, Any, Bounds]:
    """Return bounds by the paper's consensus: each rank cuts its entries into equal numbers, and the bounds are averaged over the ranks.

    They are sent as lengths of regions in units of N / 16384, which take a byte or two each. The ranks round at different offsets, so that
    rounding errors average out.
    """
    unit = max(1, size // UNITS)
    local = np.array(equal(size, ranks)[1:-1], np.int64)
    if len(indices):
        at = array_module(indices).asarray(np.arange(1, ranks) * len(indices) // ranks)
        local = as_host(indices[at]).astype(np.int64)
    rounded = (local + unit * (2 * rank + 1) // (2 * ranks)) // unit
    summed = yield from total(np.diff(rounded, prepend=0), k, rank, ranks)
    return [0, *np.minimum(np.cumsum(summed) * unit // ranks, size).tolist(), size]


def tolerance(k: int, ranks: int, sums: int = 2) -> int:
    """Return the number of entries of all ranks that a region may hold; the mean is k.

    A rank then receives few enough entries in the split to stay below 3 k (P - 1)/P entries together with the k gathered entries and the
    counts: 1.2 k for 4 ranks, 1.8 k for very many, and less if k is small. For two and three ranks, even equal regions would not achieve
    that, and are not worth the counts.

    Parameters
    ----------
    k, ranks : int
    sums : int
        Number of sums of P counts so far: each takes about as many words as there are ranks.
    """
    evenly = k * max(1.2, 1.8 - 2.4 / ranks)
    left = k * (2 - 3 / ranks) - (sums + 2) * ranks / 2 if ranks > 3 else evenly
    return int(max(min(evenly, left), k + ranks / 2))


def rebalanced(indices: NDArray[Any], bounds: Bounds, average: bool, k: int, rank: int, ranks: int) -> Generator[Step, Any, Bounds]:
    """Return ``bounds``, or better ones if one of their regions holds too much.

    The averages of the paper are balanced if the ranks' indices have the same distribution. If not, the ranks count what is below further
    places, those where the cuts are expected and some where the uncertainty is largest, and cut at places that have been counted.

    Parameters
    ----------
    indices : ndarray
        Indices of this rank's entries.
    bounds : list of int
    average : bool
        Whether the averages have not been tried yet, since ``bounds`` are others.
    k : int
    rank, ranks : int
    """
    known = yield from _counted(indices, bounds, k, rank, ranks)
    sums = 1 if average else 2  # so far
    if average and _fullest(known, bounds) > tolerance(k, ranks, sums):
        bounds = yield from averaged(indices, bounds[-1], k, rank, ranks)
        known |= yield from _counted(indices, bounds, k, rank, ranks)
        sums += 2
    last = sums + _attempts(k, ranks)
    while sums < last and _fullest(known, bounds) > tolerance(k, ranks, sums):
        places = _places(known, ranks)
        if known.keys() >= set(places):
            break
        known |= yield from _counted(indices, places, k, rank, ranks)
        bounds = nearest_cut(known, ranks)
        sums += 1
    return bounds


def _attempts(k: int, ranks: int) -> int:
    """Return how often further places may be counted: each time takes about P words."""
    return max(3, min(16, k // (8 * ranks)))


def _counted(indices: NDArray[Any], places: Bounds, k: int, rank: int, ranks: int) -> Generator[Step, Any, dict[int, int]]:
    """Return the number of indices of all ranks below each of the places."""
    below = kernels.cuts(indices, places[1:-1], 0, places[-1])
    summed = yield from total(np.diff(below, prepend=0, append=len(indices)), k, rank, ranks)
    return dict(zip(places, [0, *np.cumsum(summed).tolist()]))


def _fullest(known: dict[int, int], bounds: Bounds) -> int:
    """Return the largest number of entries of a region."""
    return max(known[hi] - known[lo] for lo, hi in pairwise(bounds))


def _places(known: dict[int, int], parts: int) -> Bounds:
    """Return the places to count next.

    These are the expected positions of the cuts by interpolation, unless a known place is near. The rest are distributed evenly between
    known places, preferring gaps with more entries than a region should hold. Integers are used throughout, so that all ranks find the
    same.

    Examples
    --------
    >>> _places({0: 0, 10: 90, 100: 110}, 4)
    [0, 3, 6, 9, 100]
    >>> _places({0: 0, 10: 27, 20: 110, 100: 110}, 4)
    [0, 14, 16, 100]
    """
    gaps = list(pairwise(sorted(known.items())))
    guesses = _guesses(gaps, parts)
    places = {0, *guesses, *_spread(gaps, parts, parts - len(guesses)), gaps[-1][1][0]}
    return sorted(places)


def _guesses(gaps: list[Gap], parts: int) -> Bounds:
    """Return the interpolated positions of the cuts, without those near a known place."""
    entries, at, guesses = gaps[-1][1][1], 0, []
    for part in range(1, parts):
        wanted = part * entries // parts
        while gaps[at][1][1] < wanted:
            at += 1
        (lo, below), (hi, upto) = gaps[at]
        if hi - lo > 1 and min(wanted - below, upto - wanted) * parts * NEAR > entries:
            guesses.append(min(hi - 1, lo + 1 + (hi - lo - 1) * (wanted - below) // (upto - below)))
    return guesses


def _spread(gaps: list[Gap], parts: int, count: int) -> Bounds:
    """Return ``count - 1`` places, most of them in the gaps with most entries."""
    enough = 3 * gaps[-1][1][1] // (4 * parts)  # entries in a gap that need no further places
    weights = [max(0, upto - below - enough) ** 3 if hi - lo > 1 else 0 for (lo, below), (hi, upto) in gaps]
    ends, places, at = [0, *accumulate(weights)], [], 0
    for part in range(1, count):
        wanted = part * ends[-1] // count
        while ends[at + 1] < wanted:
            at += 1
        (lo, _), (hi, _) = gaps[at]
        places.append(lo + (hi - lo) * (wanted - ends[at]) // max(1, weights[at]))
    return places
