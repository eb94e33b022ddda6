"""Global top-k values, selected by a threshold that is evaluated now and then and reused between (Ok-Topk section 3.1.3)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.steps import Step
from sparseallreduce.reducers.oktopk.consensus import shared, total
from sparseallreduce.streams.kernels import magnitude
from sparseallreduce.streams.kernels.backend import array_module, as_host
from sparseallreduce.streams.selection import stream_at_least, top_of_stream
from sparseallreduce.streams.stream import SparseStream

__all__ = ["Selected", "select_global"]

DRIFT = 0.2  # share of k by which a number of values may be off before the threshold is evaluated ahead of its time

Array = NDArray[Any]


class Selected(NamedTuple):
    """What a rank has chosen of the reduced values of its region."""

    chosen: SparseStream
    sizes: list[int]  # how many values each rank has chosen, together k at most
    threshold: float  # to be reused
    passed: int | None = None  # how many of all ranks a reused threshold has let through, at most 2 k a rank
    evaluated: bool = True


def select_global(
    region: SparseStream, k: int, threshold: float | None, rank: int, ranks: int
) -> Generator[Step, Any, Selected]:
    """The global top-k values that lie in this rank's region.

    Parameters
    ----------
    region : SparseStream
        The reduced values.
    k : int
    threshold : float or None
        To reuse; None to evaluate, which gives the k largest of all regions, of equal ones those of lower index.
    rank, ranks : int

    Notes
    -----
    Where a reused threshold lets too many values pass, each rank leaves out the smallest of its own, in proportion. Where the number is
    far off, the threshold is evaluated all the same. Where there were no more than k values, the threshold is zero, and stays so until
    there are.
    """
    if threshold is not None:
        chosen = stream_at_least(region, threshold)
        sizes = yield from shared(min(chosen.stored, 2 * k), 2 * k, ranks)
        passed = sum(sizes)
        if passed <= k if threshold == 0 else abs(passed - k) <= DRIFT * k:
            sizes = _in_proportion(sizes, k)
            return Selected(top_of_stream(chosen, sizes[rank]), sizes, threshold * (1 + (passed - k) / (6 * k)), passed, False)
        return (yield from _evaluate(region, k, rank, ranks))._replace(passed=passed)
    return (yield from _evaluate(region, k, rank, ranks))


def _in_proportion(sizes: Sequence[int], k: int) -> list[int]:
    """``sizes`` if they sum up to at most k, else so much less that they sum up to k.

    >>> _in_proportion([6, 0, 3], 6), _in_proportion([2, 3], 6)
    ([4, 0, 2], [2, 3])
    """
    ends = np.cumsum(sizes, dtype=object)  # integers of any length: k times a sum of sizes
    if ends[-1] > k:
        ends = ends * k // ends[-1]
    return [int(size) for size in np.diff(ends, prepend=0)]


def _evaluate(region: SparseStream, k: int, rank: int, ranks: int) -> Generator[Step, Any, Selected]:
    """The selection by a new threshold."""
    keys = magnitude.keys(region._entries()[1])
    key, wanted, present = yield from _kth_key(keys[keys > 0], k, rank, ranks)
    threshold = magnitude.from_key(key, region.dtype)
    chosen = stream_at_least(region, threshold)
    if wanted < present:
        ties = int(array_module(keys).count_nonzero(keys == key))
        before = sum((yield from shared(min(ties, k), k, ranks))[:rank])
        chosen = top_of_stream(chosen, chosen.stored - ties + min(max(wanted - before, 0), ties))
    sizes = yield from shared(chosen.stored, k, ranks)
    return Selected(chosen, sizes, threshold)


def _kth_key(keys: Array, k: int, rank: int, ranks: int) -> Generator[Step, Any, tuple[int, int, int]]:
    """The key of the k-th largest magnitude of all ranks, or a lower one that none is between; or zero if they are no more than k.

    By a radix search from the highest bits down: the ranks add up how many of their values lie in each of some intervals, and go on
    with the interval of the k-th. That takes a few words where the paper gathers all reduced values, up to 2 k P words.

    Returns
    -------
    key : int
    wanted, present : int
        How many values in the interval of ``key``, which is a single magnitude if the two differ, are among the k largest; and how
        many are in it.
    """
    digits, all_k = _digits(k), k
    low, bits = 0, 8 * keys.itemsize - 1
    xp = array_module(keys)
    while True:
        shift = max(0, bits - digits)
        counts = xp.bincount((keys - keys.dtype.type(low)) >> shift, minlength=1 << (bits - shift))
        summed = yield from total(as_host(counts), all_k, rank, ranks)
        from_top = np.cumsum(summed[::-1])[::-1]  # in this interval and those above
        if from_top[0] <= k:
            return 0, int(from_top[0]), int(from_top[0])  # only where this is the first interval, of all values
        interval = int(np.flatnonzero(from_top >= k)[-1])
        wanted, present = k - int(from_top[interval] - summed[interval]), int(summed[interval])
        low, bits = low + (interval << shift), shift
        if wanted == present or bits == 0:
            return low, wanted, present
        keys = keys[(keys >= low) & (keys < low + (1 << bits))]
        k = wanted


def _digits(k: int) -> int:
    """Bits of a key that a round of the search settles: the words of all rounds stay below a tenth of 6 k."""
    return min(12, max(4, k.bit_length() - 7))
