"""Global top-k values, selected by a threshold that is evaluated now and then and reused between (Ok-Topk section 3.1.3)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.steps import Step
from sparseallreduce.reducers.oktopk.consensus import shared, total
from sparseallreduce.streams.kernels import magnitude
from sparseallreduce.streams.kernels import selection as loops
from sparseallreduce.streams.kernels.backend import as_host, on_device
from sparseallreduce.streams.selection import stream_at_least, top_of_stream
from sparseallreduce.streams.stream import SparseStream

__all__ = ["Selected", "select_global"]

COPIED = 2**15  # values on a GPU that are few enough to be copied to the host, rather than counts of them again and again
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
    indices, values = region._entries()
    found = yield from _kth_key(as_host(values) if len(values) <= COPIED else values, k, rank, ranks)
    threshold, ties = magnitude.from_key(found.key, region.dtype), found.own
    if found.wanted < found.present:
        before = sum((yield from shared(min(ties, k), k, ranks))[:rank])
        ties = min(max(found.wanted - before, 0), ties)
    count = found.own_above + ties
    if region.on_device:  # where the host knows how many there are, and need not wait to hear it
        region = SparseStream._sparse_form(indices, values, region.size, region.lo, region.hi, region.switch_density)
        chosen = top_of_stream(region, count)
    else:
        chosen = top_of_stream(stream_at_least(region, threshold), count)
    sizes = yield from shared(count, k, ranks)
    return Selected(chosen, sizes, threshold)


class Found(NamedTuple):
    """Where the k-th largest magnitude of all ranks lies."""

    key: int  # of it, or a lower one that none is between; zero if they are no more than k
    wanted: int  # how many values in the interval of the key, a single magnitude if that is not all, are among the k largest
    present: int  # how many are in it
    own_above: int  # how many of this rank are above the interval
    own: int  # and in it


def _kth_key(values: Array, k: int, rank: int, ranks: int) -> Generator[Step, Any, Found]:
    """Find the k-th largest magnitude of all ranks, zeros left out.

    By a radix search from the highest bits down: the ranks add up how many of their values lie in each of some intervals, and go on
    with the interval of the k-th. That takes a few words where the paper gathers all reduced values, up to 2 k P words. Of values on a GPU
    the counts are copied to the host, once for each interval.
    """
    digits, all_k, own_above = _digits(k), k, 0
    low, bits = 0, 8 * values.itemsize - 1
    keys = None if on_device(values) else magnitude.keys(values[values != 0])
    while True:
        shift = max(0, bits - digits)
        if keys is None:
            counts = loops.key_counts(values, low, shift, 1 << (bits - shift))
        else:
            counts = np.bincount((keys - keys.dtype.type(low)) >> shift, minlength=1 << (bits - shift))
        summed = yield from total(counts, all_k, rank, ranks)
        from_top = np.cumsum(summed[::-1])[::-1]  # in this interval and those above
        if from_top[0] <= k:  # only where this is the first interval, of all values
            return Found(0, int(from_top[0]), int(from_top[0]), 0, int(counts.sum()))
        interval = int(np.flatnonzero(from_top >= k)[-1])
        wanted, present = k - int(from_top[interval] - summed[interval]), int(summed[interval])
        low, bits, own_above = low + (interval << shift), shift, own_above + int(counts[interval + 1 :].sum())
        if wanted == present or bits == 0:
            return Found(low, wanted, present, own_above, int(counts[interval]))
        if keys is not None:
            keys = keys[(keys >= low) & (keys < low + (1 << bits))]
        k = wanted


def _digits(k: int) -> int:
    """Bits of a key that a round of the search settles: the words of all rounds stay below a tenth of 6 k."""
    return min(12, max(4, k.bit_length() - 7))
