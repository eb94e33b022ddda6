"""Global top-k values, selected by a threshold that is evaluated now and then and reused between (Ok-Topk section 3.1.3)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.steps import Share, Step
from sparseallreduce.reducers.oktopk.consensus import WORD, shared, total
from sparseallreduce.streams.kernels import magnitude
from sparseallreduce.streams.kernels import selection as loops
from sparseallreduce.streams.kernels.backend import as_host, on_device
from sparseallreduce.streams.selection import stream_at_least, top_of_stream
from sparseallreduce.streams.stream import SparseStream

__all__ = ["Selected", "select_global"]

COPIED = 2**15  # values on a GPU that are few enough to be copied to the host, rather than counts of them again and again
DRIFT = 0.2  # share of k by which a number of values may be off before the threshold is evaluated ahead of its time
LEVELS = 16  # magnitudes around a threshold at which the ranks count, at most
LEAST_LEVELS = 4
FEW = 64  # values of k below which counts take more than an evaluation now and then
STEPS = 4  # bits of a float's fraction that tell levels apart: 16 of them from one power of two to the next

Array = NDArray[Any]


class Selected(NamedTuple):
    """What a rank has chosen of the reduced values of its region."""

    chosen: SparseStream
    sizes: list[int]  # how many values each rank has chosen, together k at most
    threshold: float  # to be reused
    passed: int | None = None  # how many of all ranks there were by a reused threshold, at most 2 k a rank
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
    What the ranks have kept in their residuals lies just below the threshold, and grows. So a reused threshold alone lets through a fifth
    of k in one step, and more than k in the next. Therefore the ranks count how many of their values reach each of some magnitudes around
    the threshold. Taken is what reaches the lowest of these that fewer than k reach, and of the interval beneath, which is 3 to 6 % wide,
    the largest of each rank, in proportion, so that there are k. Few values are counted at the threshold alone, and each rank leaves out
    the smallest of its own.

    Where the number is far off all the same, the threshold is evaluated. Where there were no more than k values, it is zero, and stays so
    until there are.
    """
    if threshold is None:
        return (yield from _evaluate(region, k, rank, ranks))
    select = _by_levels if threshold > 0 and k >= FEW else _by_threshold
    selected = yield from select(region, k, threshold, rank, ranks)
    if selected.evaluated:
        return (yield from _evaluate(region, k, rank, ranks))._replace(passed=selected.passed)
    return selected


def _by_threshold(region: SparseStream, k: int, threshold: float, rank: int, ranks: int) -> Generator[Step, Any, Selected]:
    """What a reused threshold lets through; ``evaluated`` says that it has to be."""
    chosen = stream_at_least(region, threshold)
    sizes = yield from shared(min(chosen.stored, 2 * k), 2 * k, ranks)
    passed = sum(sizes)
    if passed > k if threshold == 0 else abs(passed - k) > DRIFT * k:
        return Selected(chosen, sizes, threshold, passed)
    sizes = _in_proportion(sizes, k)
    return Selected(top_of_stream(chosen, sizes[rank]), sizes, threshold * (1 + (passed - k) / (6 * k)), passed, False)


def _by_levels(region: SparseStream, k: int, threshold: float, rank: int, ranks: int) -> Generator[Step, Any, Selected]:
    """The k largest values, as far as levels tell them apart; ``evaluated`` says that it has to be, since k lies outside of the levels.

    Every rank tells its counts to all where that is an eighth of k words at most. Otherwise they are summed, and each tells what it takes.
    """
    dtype, width = region.dtype, np.min_scalar_type(2 * k)
    levels = min(LEVELS, k * WORD // (8 * ranks * width.itemsize))
    all_told = levels >= LEAST_LEVELS
    levels = levels if all_told else LEVELS
    shift = np.finfo(dtype).nmant - STEPS
    low = max(1, magnitude.key_of(threshold, dtype) - (3 * levels // 8 << shift))
    chosen = region if region.on_device else stream_at_least(region, magnitude.from_key(low, dtype))
    own = np.minimum(_reaching(chosen._entries()[1], low, shift, levels), 2 * k)
    if all_told:
        told = [own.astype(width).tobytes()] if ranks == 1 else (yield Share(own.astype(width).tobytes()))
        of_ranks = np.array([np.frombuffer(record, width) for record in told], np.int64)
        cut = _cut(of_ranks.sum(axis=0), k)
        sizes = [cut.taken(reaching) for reaching in of_ranks]
    else:
        counts = own - np.append(own[1:], 0)  # in each interval: they take fewer bytes
        cut = _cut(np.cumsum((yield from total(counts, k, rank, ranks))[::-1])[::-1], k)
        sizes = yield from shared(cut.taken(own), 2 * k, ranks)
    if abs(cut.found - k) > DRIFT * k:
        return Selected(chosen, sizes, threshold, cut.found)
    sizes = _in_proportion(sizes, k)
    key = min(low + int(cut.place * (1 << shift)), magnitude.nan(np.dtype(f"i{dtype.itemsize}")) - 1)
    return Selected(_largest(chosen, sizes[rank]), sizes, magnitude.from_key(key, dtype), cut.found, False)


def _reaching(values: Array, low: int, shift: int, levels: int) -> Array:
    """How many magnitudes have at least the keys ``low``, ``low + 2**shift`` and so on."""
    length = (magnitude.nan(np.dtype(f"i{values.itemsize}")) - low >> shift) + 1  # up to NaN
    counts = loops.key_counts(as_host(values) if len(values) <= COPIED else values, low, shift, max(length, levels))
    reaching: Array = counts.sum() - np.cumsum(counts[:levels]) + counts[:levels]
    return reaching


class Cut(NamedTuple):
    """Where among some levels the k-th largest magnitude of all ranks lies: in the interval above one of them.

    >>> cut = _cut(np.array([18, 8, 3]), 5)
    >>> cut, cut.place, cut.taken([9, 6, 2]), cut.taken([9, 2, 1])
    (Cut(level=1, wanted=2, present=5, found=5), 1.6, 4, 2)
    >>> _cut(np.array([4, 2]), 9), _cut(np.array([18, 12]), 6)
    (Cut(level=0, wanted=2, present=2, found=4), Cut(level=1, wanted=6, present=12, found=12))
    """

    level: int
    wanted: int  # how many values of the interval are among the k largest
    present: int  # how many are in it
    found: int  # k, or how many reach the lowest level if they are fewer, or the highest if they are more

    @property
    def place(self) -> float:
        """The level of the threshold, between two of them by the number of values that are wanted."""
        return self.level + 1 - self.wanted / max(self.present, 1)

    def taken(self, reaching: Sequence[int] | Array) -> int:
        """How many values a rank takes of which so many reach each level; of the interval in proportion, rounded up."""
        above = int(reaching[self.level + 1]) if self.level + 1 < len(reaching) else 0
        between = int(reaching[self.level]) - above
        return above + -(-between * self.wanted // max(self.present, 1))


def _cut(totals: Array, k: int) -> Cut:
    """The cut by how many values of all ranks reach each level."""
    reached = np.flatnonzero(totals >= k)
    level = int(reached[-1]) if len(reached) else 0
    above = int(totals[level + 1]) if level + 1 < len(totals) else 0
    present = int(totals[level]) - above
    if not len(reached):
        return Cut(level, present, present, int(totals[0]))
    return Cut(level, k - above, present, k if level + 1 < len(totals) else present)


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
    values = region._entries()[1]
    found = yield from _kth_key(as_host(values) if len(values) <= COPIED else values, k, rank, ranks)
    threshold, ties = magnitude.from_key(found.key, region.dtype), found.own
    if found.wanted < found.present:
        before = sum((yield from shared(min(ties, k), k, ranks))[:rank])
        ties = min(max(found.wanted - before, 0), ties)
    count = found.own_above + ties
    chosen = _largest(region if region.on_device else stream_at_least(region, threshold), count)
    sizes = yield from shared(count, k, ranks)
    return Selected(chosen, sizes, threshold)


def _largest(stream: SparseStream, count: int) -> SparseStream:
    """So many of the largest values; the host knows how many there are, and need not wait to hear it of a GPU."""
    if stream.on_device:
        stream = SparseStream._sparse_form(*stream._entries(), stream.size, stream.lo, stream.hi, stream.switch_density)
    return top_of_stream(stream, count)


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
