"""The regions of the index space, one a rank, balanced so that no rank has to reduce much more than others (Ok-Topk section 3.1.1)."""

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

UNITS = 2**14  # that the index space is divided into where bounds are averaged
NEAR = 16  # a known place is near a wanted one if no more than this part of a region, a sixteenth, lies between

Gap = tuple[tuple[int, int], tuple[int, int]]  # two known places, with what lies below each
Bounds = list[int]  # P + 1 of them, from 0 to N, not decreasing: region j is [bounds[j], bounds[j + 1])


def equal(size: int, ranks: int) -> Bounds:
    """Regions of one length."""
    return boundaries(size, ranks)


def averaged(indices: NDArray[Any], size: int, k: int, rank: int, ranks: int) -> Generator[Step, Any, Bounds]:
    """The consensus of the paper: each rank cuts its own entries into equal numbers, and the bounds are averaged over the ranks.

    They travel as lengths of regions in units of N / 16384, which take a byte or two each. What one rank's bounds lose by that is made
    up for by the others', which round at other places.
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
    """The entries of all ranks that a region may hold, k on average.

    A rank then receives so little in the split that with the k entries which it gathers, and the counts that the ranks tell each other,
    it stays below 3 k (P - 1)/P entries: a share of 1.2 for 4 ranks, of 1.8 for very many, and less where k is small. For two and three
    ranks, equal regions would not do for that, and are not worth the counts.

    Parameters
    ----------
    k, ranks : int
    sums : int
        Of P counts, so far: each takes about as many words as there are ranks.
    """
    evenly = k * max(1.2, 1.8 - 2.4 / ranks)
    left = k * (2 - 3 / ranks) - (sums + 2) * ranks / 2 if ranks > 3 else evenly
    return int(max(min(evenly, left), k + ranks / 2))


def rebalanced(
    indices: NDArray[Any], bounds: Bounds, average: bool, k: int, rank: int, ranks: int
) -> Generator[Step, Any, Bounds]:
    """``bounds``, or others if one of their regions holds too much.

    The averages of the paper are balanced where the ranks' indices are distributed alike. Where they are not, the ranks count what lies
    below some more places, those where the cuts are expected and some where most is unknown, and cut at places that they have counted.

    Parameters
    ----------
    indices : ndarray
        Of this rank's entries.
    bounds : list of int
    average : bool
        Whether the averages are still to be tried, since ``bounds`` are others.
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
    """How often more places are counted: each time takes about P words, and the more, the more words there are to lose."""
    return max(3, min(16, k // (8 * ranks)))


def _counted(indices: NDArray[Any], places: Bounds, k: int, rank: int, ranks: int) -> Generator[Step, Any, dict[int, int]]:
    """How many indices of all ranks lie below each of the places."""
    below = kernels.cuts(indices, places[1:-1], 0, places[-1])
    summed = yield from total(np.diff(below, prepend=0, append=len(indices)), k, rank, ranks)
    return dict(zip(places, [0, *np.cumsum(summed).tolist()]))


def _fullest(known: dict[int, int], bounds: Bounds) -> int:
    """The most entries that a region has."""
    return max(known[hi] - known[lo] for lo, hi in pairwise(bounds))


def _places(known: dict[int, int], parts: int) -> Bounds:
    """Where to count next: where the cuts would be if entries lay evenly between known places, unless one is known near by; and the rest
    evenly between two known places, the more, the more lies between beyond what one region takes.

    Integers throughout, so that all ranks find the same.

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
    """The places of the cuts, by interpolation, without those near a known place."""
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
    """``count - 1`` places, most of them in the gaps that hold most."""
    enough = 3 * gaps[-1][1][1] // (4 * parts)  # of entries in one gap, which need not be told apart
    weights = [max(0, upto - below - enough) ** 3 if hi - lo > 1 else 0 for (lo, below), (hi, upto) in gaps]
    ends, places, at = [0, *accumulate(weights)], [], 0
    for part in range(1, count):
        wanted = part * ends[-1] // count
        while ends[at + 1] < wanted:
            at += 1
        (lo, _), (hi, _) = gaps[at]
        places.append(lo + (hi - lo) * (wanted - ends[at]) // max(1, weights[at]))
    return places
