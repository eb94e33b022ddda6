"""Scores and sums of rows in bands of features: all rows for one band before the next, so that its weights or sums stay in the cache.

Rows are sorted, so a row's entries in a band are contiguous and start where those of the previous band ended. If these parts are long
enough, that is faster than reading weights from all over memory; and if a batch of long rows touches a large fraction of the features, it
is also faster than renumbering the features that occur. The sums of a band are then computed in an array that the next band reuses, and a
bitmap of the band records which features occur.

Measured with two ranks on two cores, N = 16.6 million and 1,000 rows of 3,730 non-zeros, in nanoseconds per non-zero: scores 3.2, of which
reading the rows at all takes 1.0 and reading the weights at all 1.25; sums and features 3.3, of which extracting features and sums from the
bitmap takes 1.0. With features renumbered first: 3.3 for scores and 5.4 for the rest. Bands took 0.67 to 0.98 of the time for parts
of 8 entries and batches with one entry for every 17 features, at N = 0.5 to 16.6 million, 200 to 4,000 rows of 150 to 3,730; for parts of 4
entries 1.0 to 1.33, with one entry for every 36 features 1.14.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels.rows import FAR, NEAR, fetch, stride_of
from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.intrinsics import LINE, count_bits, lowest_bit, prefetch

__all__ = [
    "ROOM",
    "add",
    "add_in_bands",
    "bands_in_place",
    "collect",
    "product",
    "products",
    "scores_in_bands",
    "width_in_place",
]

Array = NDArray[Any]

ROOM = 8  # extra entries that output arrays of features need

_ZERO, _ONE, _TWO, _THREE, _FOUR = (np.uint64(number) for number in range(5))
_FAR, _LOW_SIX, _SIX, _EIGHT = np.uint64(FAR), np.uint64(63), np.uint64(6), np.uint64(ROOM)
_EVERY = np.uint64(2**64 - 1)  # larger than any index
_BAND = 1 << 18  # bytes of a band for rows scattered over memory: the best of 2**17 to 2**21 for scores and for sums
_WIDEST = 1 << 19
_SHORTEST = 8  # smallest mean number of entries of a row in a band
_SPARSEST = 16  # largest number of features per entry of the batch
_PART_LINES = np.uint64(6)  # largest number of cache lines to prefetch of a row's part
_PART_AHEAD = 4  # number of rows by which a part is prefetched ahead


def _bands_in_place(entries: int, rows: int, size: int, itemsize: int) -> int:
    """Return the number of bands for rows scattered over memory with this many entries, and an array of ``size``; 1 means no bands."""
    fitting = entries // (max(rows, 1) * _SHORTEST)
    if size * itemsize <= NEAR or fitting * _WIDEST < size * itemsize or entries * _SPARSEST < size:
        return 1
    return int(min(fitting, -(-size * itemsize // _BAND)))


bands_in_place: Any = inlined(_bands_in_place)


def width_in_place(entries: int, rows: int, size: int, itemsize: int) -> int:
    """Return the number of features per band for :func:`collect`, or 0 if bands do not pay off."""
    bands = _bands_in_place(entries, rows, size, itemsize)
    return 0 if bands == 1 else -(-size // (bands * FAR)) * FAR


@kernel
def collect(
    indices: Array,
    values: Array,
    starts: Array,
    offsets: Array,
    coefficients: Array,
    low: int,
    high: int,
    width: int,
    out_indices: Array,
    out_values: Array,
) -> int:
    """Write the features from ``low`` to ``high`` that occur in some rows, in order, and the sum of coefficients times entries of each.

    Parameters
    ----------
    indices, values : ndarray
        Entries of a data set.
    starts, offsets : ndarray
        int64, of shape (rows,) and (rows + 1,): row i starts at ``starts[i]`` and has ``offsets[i + 1] - offsets[i]`` entries.
    coefficients : ndarray
        Shape (rows,), in the dtype of the values.
    low, high : int
    width : int
        Features per band, a multiple of 64.
    out_indices, out_values : ndarray
        Outputs with room for :data:`ROOM` more entries than features may occur.

    Returns
    -------
    int
        Number of features that occur, including those whose sum is zero.
    """
    places, ends = np.empty(starts.size, np.uint64), np.empty(starts.size, np.uint64)
    for i in range(starts.size):
        places[i], ends[i] = starts[i], starts[i] + (offsets[i + 1] - offsets[i])
    _begin_from(indices, places, ends, low)
    bands = -(-(high - low) // width)
    lines = _part_lines(offsets[starts.size] - offsets[0], starts.size * max(bands, 1), indices.itemsize)
    sums, words = np.zeros(width, out_values.dtype), np.zeros(width // FAR, np.uint64)
    count = _ZERO
    for band in range(bands):
        begin = np.uint64(low) + np.uint64(band) * np.uint64(width)
        size = min(np.uint64(width), np.uint64(high) - begin)
        for i in range(places.size):
            if i + _PART_AHEAD < places.size:
                _fetch_part(indices, values, _ZERO, places, i + _PART_AHEAD, lines)
            places[i] = _add_and_mark(indices, values, places[i], ends[i], coefficients[i], begin, size, sums, words)
        count = _read_off(words, sums, begin, count, out_indices, out_values)
    return int(count)


@inlined
def _add_and_mark(
    indices: Array, values: Array, entry: Any, end: int, coefficient: float, low: Any, size: int, sums: Array, words: Array
) -> Any:
    """Add a row's entries in a band of ``size`` features from ``low`` on, times the coefficient; return the next entry."""
    while entry < end:
        place = np.uint64(indices[entry]) - low
        if place >= size:
            break
        sums[place] += coefficient * values[entry]
        words[place >> _SIX] |= _ONE << (place & _LOW_SIX)
        entry += _ONE
    return entry


@inlined
def _read_off(words: Array, sums: Array, low: Any, count: Any, out_indices: Array, out_values: Array) -> Any:
    """Append the marked features and their sums to ``count`` earlier ones, and clear both; return the new count."""
    first = count
    for word in range(np.uint64(words.size)):
        marks = words[word]
        words[word] = _ZERO
        end, base = count + count_bits(marks), low + (word << _SIX)
        while count < end:  # rarely more than one iteration, as a loop over the unpredictable number of marks mispredicts branches
            for place in range(_EIGHT):
                out_indices[count + place] = base + lowest_bit(marks)
                marks &= marks - _ONE
            count += _EIGHT
        count = end
    for entry in range(first, count):
        place = np.uint64(out_indices[entry]) - low
        out_values[entry] = sums[place]
        sums[place] = 0
    return count


@inlined
def scores_in_bands(
    indices: Array,
    values: Array,
    shifts: Array,
    places: Array,
    ends: Array,
    weights: Array,
    bands: int,
    width: int,
    sums: Array,
    out: Array,
) -> None:
    """Write the inner product of the weights with the entries from ``places[i]`` to ``ends[i]`` to ``out[i]``.

    The value of an entry is at its index's position plus ``shifts[i]``. ``sums`` are four zeros per row; the order of the additions does
    not depend on the bands.
    """
    rows = places.size
    step = max(LINE // stride_of(weights), 1)
    lines_a_row = -(-np.int64(width) // (step * max(rows, 1)))  # cache lines of the next band's weights to prefetch per row
    lines = _part_lines(_entries(places, ends), rows * bands, indices.itemsize)
    for band in range(bands):
        following = np.uint64(band + 1) * np.uint64(width)
        limit, stop = _EVERY if band + 1 == bands else following, min(following + np.uint64(width), np.uint64(weights.size))
        for i in range(rows):
            if bands > 1:
                if i + _PART_AHEAD < rows:
                    _fetch_part(indices, values, shifts[i + _PART_AHEAD], places, i + _PART_AHEAD, lines)
                for _ in range(lines_a_row):
                    if following < stop:
                        prefetch(weights, following)
                    following += np.uint64(step)
            before = sums[i, 0], sums[i, 1], sums[i, 2], sums[i, 3]
            place, after = products(indices, values, shifts[i], places[i], ends[i], weights, limit, before, False)
            sums[i, 0], sums[i, 1], sums[i, 2], sums[i, 3] = after
            places[i] = place
    for i in range(rows):
        last = sums[i, 0], sums[i, 1], sums[i, 2], sums[i, 3]
        out[i] = product(indices, values, shifts[i], places[i], ends[i], weights, last)


@inlined
def add_in_bands(
    indices: Array,
    values: Array,
    shifts: Array,
    places: Array,
    ends: Array,
    coefficients: Array,
    low: int,
    total: Array,
    bands: int,
    width: int,
) -> None:
    """Add ``coefficients[i]`` times the entries from ``places[i]`` to ``ends[i]`` to the sums of the features from ``low`` on.

    ``shifts`` are as in :func:`scores_in_bands`. Features outside the range of the sums are skipped.
    """
    rows = places.size
    _begin_from(indices, places, ends, low)
    lines = _part_lines(_entries(places, ends), rows * bands, indices.itemsize)
    for band in range(bands):
        limit = np.uint64(low) + min(np.uint64(band + 1) * np.uint64(width), np.uint64(total.size))
        for i in range(rows):
            if bands > 1 and i + _PART_AHEAD < rows:
                _fetch_part(indices, values, shifts[i + _PART_AHEAD], places, i + _PART_AHEAD, lines)
            places[i] = add(indices, values, shifts[i], places[i], ends[i], coefficients[i], low, total, limit, False)


@inlined
def products(indices: Array, values: Array, shift: int, entry: Any, end: int, weights: Array, limit: int, sums: Any, far: bool) -> Any:
    """Add the products of entries and weights to four sums in turn, until fewer than four entries below ``limit`` are left.

    The value of an entry is at its index's position plus ``shift``. With a single sum, each addition would wait for the previous one.
    ``far``, a compile-time constant, says whether the weights exceed the cache, so that they are prefetched. Returns the next entry and the
    sums.
    """
    first, second, third, fourth = sums
    while entry + _FOUR <= end and np.uint64(indices[entry + _THREE]) < limit:
        if far and entry + _FAR + _FOUR <= end:
            prefetch(weights, np.uint64(indices[entry + _FAR]))
            prefetch(weights, np.uint64(indices[entry + _FAR + _ONE]))
            prefetch(weights, np.uint64(indices[entry + _FAR + _TWO]))
            prefetch(weights, np.uint64(indices[entry + _FAR + _THREE]))
        value = entry + shift
        first += values[value] * weights[np.uint64(indices[entry])]
        second += values[value + _ONE] * weights[np.uint64(indices[entry + _ONE])]
        third += values[value + _TWO] * weights[np.uint64(indices[entry + _TWO])]
        fourth += values[value + _THREE] * weights[np.uint64(indices[entry + _THREE])]
        entry += _FOUR
    return entry, (first, second, third, fourth)


@inlined
def product(indices: Array, values: Array, shift: int, entry: Any, end: int, weights: Array, sums: Any) -> float:
    """Add the remaining entries, at most three, and return the total of the four sums."""
    first, second, third, fourth = sums
    while entry < end:
        first += values[entry + shift] * weights[np.uint64(indices[entry])]
        entry += _ONE
    return np.float64(first + second) + np.float64(third + fourth)


@inlined
def add(
    indices: Array, values: Array, shift: int, entry: Any, end: int, coefficient: float, low: int, total: Array, limit: int, far: bool
) -> Any:
    """Add the entries below ``limit``, times the coefficient; return the next entry. ``shift`` and ``far`` are as in :func:`products`."""
    while entry < end:
        feature = np.uint64(indices[entry])
        if feature >= limit:
            break
        if far and entry + _FAR < end:
            prefetch(total, np.uint64(indices[entry + _FAR]) - np.uint64(low))  # prefetching outside the array is harmless
        place = feature - np.uint64(low)
        if place < np.uint64(total.size):
            total[place] += coefficient * values[entry + shift]
        entry += _ONE
    return entry


@inlined
def _begin_from(indices: Array, places: Array, ends: Array, low: int) -> None:
    """Move the start of each row to its first entry whose index is at least ``low``."""
    if low <= 0:
        return
    for i in range(places.size):
        first, last = places[i], ends[i]
        while first < last:
            middle = (first + last) >> _ONE
            if np.uint64(indices[middle]) < np.uint64(low):
                first = middle + _ONE
            else:
                last = middle
        places[i] = first


@inlined
def _entries(places: Array, ends: Array) -> Any:
    total = _ZERO
    for i in range(places.size):
        total += ends[i] - places[i]
    return total


@inlined
def _part_lines(entries: Any, parts: int, itemsize: int) -> Any:
    """Return the number of cache lines to prefetch of each part of the rows, given their total number of entries and parts."""
    nbytes = np.uint64(entries) * np.uint64(itemsize) // np.uint64(max(parts, 1))
    return min(_PART_LINES, nbytes // np.uint64(LINE) + _THREE)


@inlined
def _fetch_part(indices: Array, values: Array, shift: int, places: Array, i: int, lines: int) -> None:
    """Prefetch the part of row i that lies in a band."""
    fetch(indices, places[i], lines)
    fetch(values, places[i] + shift, lines)
