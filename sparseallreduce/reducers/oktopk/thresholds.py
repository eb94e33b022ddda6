"""Global top-k values, selected by a threshold that is evaluated periodically and reused in between (Ok-Topk section 3.1.3)."""

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

COPIED = 2**15  # up to this many values on a GPU are copied to the host once, instead of counts repeatedly
DRIFT = 0.2  # fraction of k by which the number of values may be off before the threshold is evaluated early
LEVELS = 16  # largest number of magnitudes around a threshold at which the ranks count
LEAST_LEVELS = 4
FEW = 64  # below this k, counts take more than periodic evaluations
STEPS = 4  # bits of a float's fraction that distinguish levels: 16 levels per power of two

Array = NDArray[Any]


class Selected(NamedTuple):
    """The values that a rank has selected from the reduced values of its region."""

    chosen: SparseStream
    sizes: list[int]  # how many values each rank has chosen, together k at most
    threshold: float  # threshold to be reused
    passed: int | None = None  # number of values of all ranks by a reused threshold, at most 2 k per rank
    evaluated: bool = True


def select_global(region: SparseStream, k: int, threshold: float | None, rank: int, ranks: int) -> Generator[Step, Any, Selected]:
    """Select the global top-k values in this rank's region.

    Parameters
    ----------
    region : SparseStream
        The reduced values.
    k : int
    threshold : float or None
        Threshold to reuse; None evaluates it, which selects the k largest of all regions, those of lower index among equals.
    rank, ranks : int

    Notes
    -----
    Values that the ranks have kept in their residuals are just below the threshold, and grow. A reused threshold alone would therefore
    select
    a fifth of k in one step, and more than k in the next. The ranks count how many of their values reach each of several magnitudes
    (levels)
    around the threshold. Selected are the values that reach the lowest level that fewer than k reach, and, of the interval below it, which
    is
    3 to 6 % wide, the largest of each rank in proportion, so that there are k in total. If k is small, values are counted at the threshold
    only, and each rank drops its smallest ones.

    If the number is far off nevertheless, the threshold is evaluated. If there were at most k values, it is zero, and stays so until there
    are
    more.
    """
    if threshold is None:
        return (yield from _evaluate(region, k, rank, ranks))
    select = _by_levels if threshold > 0 and k >= FEW else _by_threshold
    selected = yield from select(region, k, threshold, rank, ranks)
    if selected.evaluated:
        return (yield from _evaluate(region, k, rank, ranks))._replace(passed=selected.passed)
    return selected


def _by_threshold(region: SparseStream, k: int, threshold: float, rank: int, ranks: int) -> Generator[Step, Any, Selected]:
    """Select the values that a reused threshold admits; ``evaluated`` is True if the threshold must be evaluated instead."""
    chosen = stream_at_least(region, threshold)
    sizes = yield from shared(min(chosen.stored, 2 * k), 2 * k, ranks)
    passed = sum(sizes)
    if passed > k if threshold == 0 else abs(passed - k) > DRIFT * k:
        return Selected(chosen, sizes, threshold, passed)
    sizes = _in_proportion(sizes, k)
    return Selected(top_of_stream(chosen, sizes[rank]), sizes, threshold * (1 + (passed - k) / (6 * k)), passed, False)


def _by_levels(region: SparseStream, k: int, threshold: float, rank: int, ranks: int) -> Generator[Step, Any, Selected]:
    """Select the k largest values, as far as levels distinguish them; ``evaluated`` is True if the threshold must be evaluated instead.

    Every rank sends its counts to all if that takes at most k / 8 words. Otherwise the counts are summed, and each rank sends how many it
    selects.
    """
    dtype, width = region.dtype, np.min_scalar_type(2 * k)
    levels = min(LEVELS, k * WORD // (8 * ranks * width.itemsize))
    all_levels = levels >= LEAST_LEVELS
    levels = levels if all_levels else LEVELS
    shift = np.finfo(dtype).nmant - STEPS
    low = max(1, magnitude.key_of(threshold, dtype) - (3 * levels // 8 << shift))
    chosen = region if region.on_device else stream_at_least(region, magnitude.from_key(low, dtype))
    own = np.minimum(_reaching(chosen._entries()[1], low, shift, levels), 2 * k)
    if all_levels:
        records = [own.astype(width).tobytes()] if ranks == 1 else (yield Share(own.astype(width).tobytes()))
        of_ranks = np.array([np.frombuffer(record, width) for record in records], np.int64)
        cut = _cut(of_ranks.sum(axis=0), k)
        sizes = [cut.taken(reaching) for reaching in of_ranks]
    else:
        counts = own - np.append(own[1:], 0)  # counts of intervals, which take fewer bytes
        cut = _cut(np.cumsum((yield from total(counts, k, rank, ranks))[::-1])[::-1], k)
        sizes = yield from shared(cut.taken(own), 2 * k, ranks)
    if abs(cut.found - k) > DRIFT * k:
        return Selected(chosen, sizes, threshold, cut.found)
    sizes = _in_proportion(sizes, k)
    key = min(low + int(cut.place * (1 << shift)), magnitude.nan(np.dtype(f"i{dtype.itemsize}")) - 1)
    return Selected(_largest(chosen, sizes[rank]), sizes, magnitude.from_key(key, dtype), cut.found, False)


def _reaching(values: Array, low: int, shift: int, levels: int) -> Array:
    """Return how many magnitudes have at least the keys ``low``, ``low + 2**shift`` and so on."""
    length = (magnitude.nan(np.dtype(f"i{values.itemsize}")) - low >> shift) + 1  # up to NaN
    counts = loops.key_counts(as_host(values) if len(values) <= COPIED else values, low, shift, max(length, levels))
    reaching: Array = counts.sum() - np.cumsum(counts[:levels]) + counts[:levels]
    return reaching


class Cut(NamedTuple):
    """The position of the k-th largest magnitude of all ranks among some levels: in the interval above one of them.

    Examples
    --------
    >>> cut = _cut(np.array([18, 8, 3]), 5)
    >>> cut, cut.place, cut.taken([9, 6, 2]), cut.taken([9, 2, 1])
    (Cut(level=1, wanted=2, present=5, found=5), 1.6, 4, 2)
    >>> _cut(np.array([4, 2]), 9), _cut(np.array([18, 12]), 6)
    (Cut(level=0, wanted=2, present=2, found=4), Cut(level=1, wanted=6, present=12, found=12))
    """

    level: int
    wanted: int  # how many values of the interval are among the k largest
    present: int  # how many values are in the interval
    found: int  # k, or the number that reaches the lowest level if fewer, or the highest if more

    @property
    def place(self) -> float:
        """The threshold as a fractional level, interpolated by the number of wanted values."""
        return self.level + 1 - self.wanted / max(self.present, 1)

    def taken(self, reaching: Sequence[int] | Array) -> int:
        """Return how many values a rank selects, given how many of its values reach each level; rounded up in the interval."""
        above = int(reaching[self.level + 1]) if self.level + 1 < len(reaching) else 0
        between = int(reaching[self.level]) - above
        return above + -(-between * self.wanted // max(self.present, 1))


def _cut(totals: Array, k: int) -> Cut:
    """Return the cut, given how many values of all ranks reach each level."""
    reached = np.flatnonzero(totals >= k)
    level = int(reached[-1]) if len(reached) else 0
    above = int(totals[level + 1]) if level + 1 < len(totals) else 0
    present = int(totals[level]) - above
    if not len(reached):
        return Cut(level, present, present, int(totals[0]))
    return Cut(level, k - above, present, k if level + 1 < len(totals) else present)


def _in_proportion(sizes: Sequence[int], k: int) -> list[int]:
    """Return ``sizes``, scaled down to a sum of k if their sum exceeds k.

    Examples
    --------
    >>> _in_proportion([6, 0, 3], 6), _in_proportion([2, 3], 6)
    ([4, 0, 2], [2, 3])
    """
    ends = np.cumsum(sizes, dtype=object)  # Python integers: k times a sum of sizes may overflow
    if ends[-1] > k:
        ends = ends * k // ends[-1]
    return [int(size) for size in np.diff(ends, prepend=0)]


def _evaluate(region: SparseStream, k: int, rank: int, ranks: int) -> Generator[Step, Any, Selected]:
    """Select by a new, exact threshold."""
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
    """Return the ``count`` largest values; the number is known on the host, which need not wait for a GPU."""
    if stream.on_device:
        stream = SparseStream._sparse_form(*stream._entries(), stream.size, stream.lo, stream.hi, stream.switch_density)
    return top_of_stream(stream, count)


class Found(NamedTuple):
    """The position of the k-th largest magnitude of all ranks."""

    key: int  # its key, or a lower one with no value in between; zero if there are at most k values
    wanted: int  # how many values in the interval of the key are among the k largest
    present: int  # how many values are in the interval
    own_above: int  # number of this rank's values above the interval
    own: int  # number of this rank's values in the interval


def _kth_key(values: Array, k: int, rank: int, ranks: int) -> Generator[Step, Any, Found]:
    """Find the k-th largest non-zero magnitude of all ranks.

    This is a radix search from the highest bits down: the ranks add the counts of their values in each of several intervals, and continue
    with the interval of the k-th. It takes a few words, where the paper gathers all reduced values, up to 2 k P words. For values on a GPU,
    counts are copied to the host once per interval.
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
        from_top = np.cumsum(summed[::-1])[::-1]  # counts of this interval and those above
        if from_top[0] <= k:  # possible only in the first round
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
    """Return the bits of a key that a round of the search determines: all rounds together send less than a tenth of 6 k words."""
    return min(12, max(4, k.bit_length() - 7))
