"""The loops over non-zeros of the trainer, compiled by numba: scores, gradient of a batch, update of the weights.

A batch touches few of the N features, in any order and many of them often. Its rows are copied to one place and their features
renumbered: a bitmap records which of the N occur, one bit a feature, and one byte a block of 4,096 features that says whether any of
them does. Reading the bitmap in order gives the features sorted, without a sort and without a pass over N entries, and the number of
marks before each of its words, by which a feature's new number is found. Weights and sums in the new numbering are arrays of as many
entries as there are features in the batch, which stay in the cache where arrays of N entries do not. Those of a large batch do not
either: they are gone through in bands of features, each by all rows before the next. The values of long rows are used where they are;
and where a batch of long rows touches a good share of all features, so are the rows themselves, see :mod:`.band_kernels`.

Rows of a shuffled batch lie anywhere in memory, and so do the weights of a row, where no hardware foresees the next one: so while a
row is worked on, a later one is fetched, and what indices refer to some entries ahead. What lies in the cache anyway is not fetched,
since asking for it takes as long as using it.

Measured with two ranks on two cores, in nanoseconds a non-zero in the steps of a training, at N = 3.2 million and 1,000 rows of 116
non-zeros: copying and marking 3.6, of which 2.1 for reading the rows at all, sorted features 1.0, weights of the features 1.1,
renumbering 0.8, scores 0.7, sums 0.8, finding rows and clearing marks 0.3, and 2.1 for the update by the sum of both ranks; besides,
1.3 in the interpreter and 0.9 for the order of the samples. At N = 16.6 million and 1,000 rows of 3,730: 2.9 for copying and marking,
then 0.9, 1.5, 1.2, 1.7, 1.7, 0.2 and 1.6. Since then marks are made in pieces, by which copying and marking take 0.86 of the time, and
the order is computed, in 0.3. With that and a shared replica, each rank makes half of the update, at N = 3.2 million: 4.7 for all that
:func:`compact` does, 1.4 for the weights, 0.7 for the scores, 0.7 for the sums, 1.1 for the update, 0.1 for finding rows, 0.1 waiting
and 0.9 in the interpreter; and when others wanted the memory: 9.3, 2.9, 1.1, 1.1, 3.4, 0.2, 0.3 and 2.5. Of rows of 3,730 non-zeros,
copying and marking take 1.6 instead of 2.3 since their values are not copied; with rows of 116, gradient and update took 1.15 times as
long by that. Four places of a word written at once took 0.6 for sorted features where two took 0.8.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.linear.band_kernels import (
    FAR,
    NEAR,
    ROOM,
    add,
    add_in_bands,
    bands_in_place,
    collect,
    fetch,
    lines_of,
    product,
    products,
    scores_in_bands,
    width_in_place,
)
from sparseallreduce.streams.kernels.compilation import compiled_entry, inlined, kernel
from sparseallreduce.streams.kernels.intrinsics import count_bits, lowest_bit, prefetch, prefetch_to_write

__all__ = [
    "ROOM",
    "accumulate",
    "bitmap",
    "collect",
    "compact",
    "compact_accumulate",
    "compact_scores",
    "deal",
    "descend",
    "descend_dense",
    "extents",
    "fingerprint",
    "gather",
    "marked",
    "move_marks",
    "renumber",
    "scores",
    "take_rows",
    "unmark",
    "warm_up",
    "width_in_place",
]

Array = NDArray[Any]

_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_TWO = np.uint64(2)
_FOUR = np.uint64(4)
_LOW_SIX = np.uint64(63)
_SIX = np.uint64(6)
_SIXTEEN = np.uint64(16)
_TWELVE = np.uint64(12)
_THIRTY_TWO = np.uint64(32)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_LINES = np.uint64(4)  # of a row that are fetched
_MANY_LINES = np.uint64(16)  # where indices are looked at before their turn
_ROWS_AHEAD = 8  # that it is fetched where a row begins
_ROW_AHEAD = 3  # and its entries
_ROWS_FAR = 32  # where nothing but its beginning is asked for
_FAR = np.uint64(FAR)
_TOGETHER = 4096  # rows at most whose scores are computed in bands together
_PORTION = np.uint64(1024)  # entries of a sum that one of several threads or ranks takes from the weights at a time
_BAND = 1 << 19  # bytes that lie in the cache of a core beside rows that are gone through
_PART = 32  # entries of a row that lie in a band at least, on average
_PART_LINES = np.uint64(6)  # of the part of a row to fetch
_PART_AHEAD = 2  # rows before its turn
_PENDING = np.uint64(4096)  # entries that are copied before they are marked
_EVERY = np.uint64(2**64 - 1)  # above all indices


def bitmap(size: int) -> tuple[Array, Array]:
    """A cleared bitmap over ``size`` entries: words of 64 entries, and a byte for each block of 64 words."""
    words = -(-size // 64)
    return np.zeros(words, np.uint64), np.zeros(-(-words // 64), np.uint8)


def warm_up(index_dtype: DTypeLike, value_dtype: DTypeLike = np.float32) -> None:
    """Compile the training loops for dtypes, or load them from disk; of several processes at once, one compiles."""
    index, value = numba.from_dtype(np.dtype(index_dtype))[::1], numba.from_dtype(np.dtype(value_dtype))[::1]
    int64, uint64, uint8, float64 = types.int64[::1], types.uint64[::1], types.uint8[::1], types.float64[::1]
    rows = (*(types.Array(array.dtype, 1, "C", readonly=True) for array in (int64, index, value)), int64)  # as in a Dataset
    given = tuple(types.Array(array.dtype, 1, "C", readonly=True) for array in (index, value))
    compiled_entry(deal, (types.int64, types.int64, types.int64, uint64, int64, int64))
    compiled_entry(scores, (*rows, value, float64))
    compiled_entry(accumulate, (*rows, value, types.int64, types.int64, value))
    compiled_entry(compact_scores, (*rows[:3], rows[0], value, float64))
    compiled_entry(compact_accumulate, (*rows[:3], rows[0], value, types.int64, value))
    compiled_entry(collect, (*given, int64, int64, value, types.int64, types.int64, types.int64, index, value))
    compiled_entry(extents, (rows[0], int64, int64, int64))
    compiled_entry(take_rows, (*rows[1:3], int64, int64, uint64, uint8, index, value))
    compiled_entry(move_marks, (uint64, uint8, uint64, uint8))
    compiled_entry(marked, (uint64, uint8, index, index))
    compiled_entry(renumber, (int64, index, uint64, index))
    compiled_entry(unmark, (index, uint64))
    compiled_entry(compact, (*rows[1:3], int64, int64, uint64, uint8, index, index, value, index))
    compiled_entry(gather, (value, index, value))
    compiled_entry(gather, (types.Array(types.float64, 1, "C", readonly=True), int64, float64))
    compiled_entry(descend, (value, *given, value.dtype, types.int64, types.int64))
    compiled_entry(descend_dense, (value, value, value.dtype))


@kernel
def scores(indptr: Array, indices: Array, values: Array, rows: Array, weights: Array, out: Array) -> None:
    """``out[i]`` becomes the inner product of row ``rows[i]`` with the weights."""
    groups = -(-rows.size // _TOGETHER)
    for group in range(groups):
        first, last = rows.size * group // groups, rows.size * (group + 1) // groups
        some, found = rows[first:last], out[first:last]
        bands = bands_in_place(_entries(indptr, some), some.size, weights.size, weights.itemsize)
        if bands == 1:
            _scores_by_row(indptr, indices, values, some, weights, found)
        else:
            places, ends, shifts = np.empty(some.size, np.uint64), np.empty(some.size, np.uint64), np.zeros(some.size, np.uint64)
            for i in range(some.size):
                places[i], ends[i] = indptr[some[i]], indptr[some[i] + 1]
            sums = np.zeros((some.size, 4), weights.dtype)
            scores_in_bands(indices, values, shifts, places, ends, weights, bands, -(-weights.size // bands), sums, found)


@inlined
def _scores_by_row(indptr: Array, indices: Array, values: Array, rows: Array, weights: Array, out: Array) -> None:
    far = weights.size * weights.itemsize > NEAR
    zero = weights.dtype.type(0)
    for i in range(rows.size):
        _fetch_row(indptr, indices, values, rows, i + _ROW_AHEAD, _MANY_LINES)
        begin, end = np.uint64(indptr[rows[i]]), np.uint64(indptr[rows[i] + 1])
        sums = zero, zero, zero, zero
        if far:
            _fetch_first(indptr, indices, rows, i + 1, weights)
            begin, sums = products(indices, values, _ZERO, begin, end, weights, _EVERY, sums, True)
        else:
            begin, sums = products(indices, values, _ZERO, begin, end, weights, _EVERY, sums, False)
        out[i] = product(indices, values, _ZERO, begin, end, weights, sums)


@kernel
def compact_scores(indptr: Array, indices: Array, values: Array, starts: Array, weights: Array, out: Array) -> None:
    """As :func:`scores`, and the same to the bit, for all rows of a batch whose features are renumbered.

    The values of row i begin at ``starts[i]``.
    """
    bands, width = _bands(indptr, weights.size, weights.itemsize)
    places, ends, shifts = np.empty(out.size, np.uint64), np.empty(out.size, np.uint64), np.empty(out.size, np.uint64)
    _write_extents(indptr, starts, places, ends, shifts)
    scores_in_bands(indices, values, shifts, places, ends, weights, bands, width, np.zeros((out.size, 4), weights.dtype), out)


@kernel
def accumulate(
    indptr: Array, indices: Array, values: Array, rows: Array, coefficients: Array, features: int, low: int, total: Array
) -> None:
    """Add ``coefficients[i]`` times row ``rows[i]``, for all i, to the dense sum of some of the features, from ``low`` on.

    Features outside are left to others; rows of coefficient zero cost nothing.
    """
    counted = np.empty(rows.size, rows.dtype)
    factors = np.empty(rows.size, coefficients.dtype)
    count = 0
    for i in range(rows.size):
        if coefficients[i] != 0:
            counted[count], factors[count] = rows[i], coefficients[i]
            count += 1
    counted, factors = counted[:count], factors[:count]
    bands = bands_in_place(_entries(indptr, counted), count, features, total.itemsize)
    if bands > 1:
        width = -(-features // bands)
        shifts, places, ends = np.zeros(count, np.uint64), np.empty(count, np.uint64), np.empty(count, np.uint64)
        for i in range(count):
            places[i], ends[i] = indptr[counted[i]], indptr[counted[i] + 1]
        add_in_bands(indices, values, shifts, places, ends, factors, low, total, -(-total.size // width), width)
        return
    far = total.size * total.itemsize > NEAR
    for i in range(count):
        _fetch_row(indptr, indices, values, counted, i + _ROW_AHEAD, _MANY_LINES)
        begin, end = np.uint64(indptr[counted[i]]), np.uint64(indptr[counted[i] + 1])
        if far:
            add(indices, values, _ZERO, begin, end, factors[i], low, total, _EVERY, True)
        else:
            add(indices, values, _ZERO, begin, end, factors[i], low, total, _EVERY, False)


@kernel
def compact_accumulate(
    indptr: Array, indices: Array, values: Array, starts: Array, coefficients: Array, low: int, total: Array
) -> None:
    """As :func:`accumulate`, for all rows of a batch whose features are renumbered; the values of row i begin at ``starts[i]``."""
    bands, width = _bands(indptr, total.size, total.itemsize)
    rows = coefficients.size
    places, ends, shifts = np.empty(rows, np.uint64), np.empty(rows, np.uint64), np.empty(rows, np.uint64)
    _write_extents(indptr, starts, places, ends, shifts)
    add_in_bands(indices, values, shifts, places, ends, coefficients, low, total, bands, width)


@kernel
def extents(indptr: Array, rows: Array, starts: Array, out: Array) -> int:
    """Write where each of these rows begins, and where when they stand one behind the other, and the last ends; returns the latter."""
    total = out.dtype.type(0)
    for i in range(rows.size):
        if i + _ROWS_FAR < rows.size:
            prefetch(indptr, np.uint64(rows[i + _ROWS_FAR]))
        starts[i] = indptr[rows[i]]
        out[i] = total
        total += indptr[rows[i] + 1] - starts[i]
    out[rows.size] = total
    return int(total)


@kernel
def take_rows(
    indices: Array,
    values: Array,
    starts: Array,
    offsets: Array,
    words: Array,
    blocks: Array,
    out_indices: Array,
    out_values: Array,
) -> None:
    """Copy the entries of each row, which begin at ``starts[i]``, to the output arrays from ``offsets[i]`` on, and mark the indices.

    ``offsets`` also says where the last of the rows ends there. Values are not copied to an empty array.
    """
    both = out_values.size > 0
    rows, pending, last = starts.size, np.uint64(offsets[0]), np.uint64(offsets[starts.size])
    sparse = last - pending < np.uint64(words.size)
    if not sparse:  # hardly a block without a mark
        blocks[:] = 1
    for i in range(rows):
        if i + _ROW_AHEAD < rows:
            length = np.uint64(offsets[i + _ROW_AHEAD + 1] - offsets[i + _ROW_AHEAD])
            fetch(indices, np.uint64(starts[i + _ROW_AHEAD]), min(_LINES, lines_of(indices, length)))
            if both:
                fetch(values, np.uint64(starts[i + _ROW_AHEAD]), min(_LINES, lines_of(values, length)))
        begin, end = np.uint64(offsets[i]), np.uint64(offsets[i + 1])
        shift = np.uint64(starts[i]) - begin
        # Two loops, because each is vectorised; and marks afterwards, since then they do not wait for what is still to come.
        if both:
            for entry in range(begin, end):
                out_values[entry] = values[entry + shift]
        for entry in range(begin, end):
            out_indices[entry] = indices[entry + shift]
        if end - pending >= _PENDING or i + 1 == rows:
            _mark(out_indices, pending, end, words)
            if sparse:
                _mark_blocks(out_indices, pending, end, blocks)
            pending = end


@inlined
def _mark(indices: Array, begin: int, end: int, words: Array) -> None:
    """Mark the entries from ``begin`` to ``end``."""
    if words.size * words.itemsize > NEAR:
        for entry in range(begin, end):
            if entry + _FAR < end:
                prefetch(words, np.uint64(indices[entry + _FAR]) >> _SIX)
            words[np.uint64(indices[entry]) >> _SIX] |= _ONE << (np.uint64(indices[entry]) & _LOW_SIX)
    else:
        for entry in range(begin, end):
            words[np.uint64(indices[entry]) >> _SIX] |= _ONE << (np.uint64(indices[entry]) & _LOW_SIX)


@inlined
def _mark_blocks(indices: Array, begin: int, end: int, blocks: Array) -> None:
    """Mark the blocks of the entries from ``begin`` to ``end``."""
    for entry in range(begin, end):
        blocks[np.uint64(indices[entry]) >> _TWELVE] = 1


@kernel
def move_marks(words: Array, blocks: Array, out_words: Array, out_blocks: Array) -> None:
    """Add the marks of a bitmap to those of another, and clear it."""
    for block in range(np.uint64(blocks.size)):
        if blocks[block] == 0:
            continue
        blocks[block] = 0
        out_blocks[block] = 1
        for word in range(block << _SIX, min((block + _ONE) << _SIX, np.uint64(words.size))):
            out_words[word] |= words[word]
            words[word] = _ZERO


@kernel
def marked(words: Array, blocks: Array, before: Array, out: Array) -> int:
    """Write the places of all marks in order; returns their number. Of each word, ``before`` tells how many marks precede it.

    Of words without marks nothing is told. The output array has room for :data:`ROOM` places more. The blocks are cleared, and the words
    stay: see :func:`unmark`.
    """
    marked_words = np.empty(64, np.uint64)
    count = _ZERO
    for block in range(np.uint64(blocks.size)):
        if blocks[block] == 0:
            continue
        blocks[block] = 0
        found = _ZERO
        for word in range(block << _SIX, min((block + _ONE) << _SIX, np.uint64(words.size))):
            marked_words[found] = word
            found += np.uint64(words[word] != _ZERO)
        for number in range(found):
            word = marked_words[number]
            marks = words[word]
            before[word] = count
            end = count + count_bits(marks)
            while count < end:  # seldom more than once: how many marks a word has cannot be foreseen
                for place in range(_FOUR):
                    out[count + place] = (word << _SIX) + lowest_bit(marks)
                    marks &= marks - _ONE
                count += _FOUR
            count = end
    return int(count)


@kernel
def renumber(indptr: Array, indices: Array, words: Array, before: Array) -> None:
    """Replace each index of some rows, which is marked, by the number of marks before it."""
    rows = indptr.size - 1
    bands, width = _bands(indptr, words.size, words.itemsize + before.itemsize)
    places = np.empty(rows, np.uint64)
    for i in range(rows):
        places[i] = indptr[i]
    for band in range(bands):
        limit = _EVERY if band + 1 == bands else (np.uint64(band + 1) * width) << _SIX
        for i in range(rows):
            if bands > 1 and i + _PART_AHEAD < rows:
                fetch(indices, places[i + _PART_AHEAD], _PART_LINES)
            entry, end = places[i], np.uint64(indptr[i + 1])
            while entry + _SIXTEEN <= end and np.uint64(indices[entry + _SIXTEEN - _ONE]) < limit:
                for near in range(entry, entry + _SIXTEEN):  # a loop that is vectorised
                    indices[near] = _number(indices[near], words, before)
                entry += _SIXTEEN
            if band + 1 == bands:
                for near in range(entry, end):
                    indices[near] = _number(indices[near], words, before)
            places[i] = entry


@inlined
def _number(index: int, words: Array, before: Array) -> Any:
    """The number of marks before an index, which is marked."""
    word = np.uint64(index) >> _SIX
    return np.uint64(before[word]) + count_bits(words[word] & ((_ONE << (np.uint64(index) & _LOW_SIX)) - _ONE))


@kernel
def unmark(places: Array, words: Array) -> None:
    """Clear a bitmap in which these places are marked."""
    if places.size > words.size >> 2:
        words[:] = _ZERO
        return
    for entry in range(places.size):
        words[np.uint64(places[entry]) >> _SIX] = _ZERO


@kernel
def compact(
    indices: Array,
    values: Array,
    starts: Array,
    offsets: Array,
    words: Array,
    blocks: Array,
    before: Array,
    out_indices: Array,
    out_values: Array,
    out: Array,
) -> int:
    """All that makes a batch of rows: :func:`take_rows`, :func:`marked`, :func:`renumber` and :func:`unmark` in one call."""
    take_rows(indices, values, starts, offsets, words, blocks, out_indices, out_values)
    count = marked(words, blocks, before, out)
    renumber(offsets, out_indices, words, before)
    unmark(out[:count], words)
    return int(count)


@kernel
def gather(array: Array, indices: Array, out: Array) -> None:
    """``out = array[indices]``."""
    size = np.uint64(indices.size)
    for entry in range(size):
        if entry + _FAR < size:
            prefetch(array, np.uint64(indices[entry + _FAR]))
        out[entry] = array[np.uint64(indices[entry])]


@kernel
def fingerprint(indptr: Array, indices: Array, values: Array, labels: Array, first: int) -> int:
    """The sum, modulo 2**64, of a hash of every non-zero and label and its row, counted from ``first``; values as unsigned bits."""
    total = _ZERO
    for row in range(labels.size):
        number = np.uint64(first + row) * _MIX
        total += _mixed(number ^ np.uint64(labels[row]))
        for entry in range(indptr[row], indptr[row + 1]):
            total += _mixed(number ^ (np.uint64(indices[entry]) << _THIRTY_TWO) ^ (np.uint64(values[entry]) + _ONE))
    return total  # type: ignore[return-value]


@kernel
def deal(first: int, total: int, size: int, keys: Array, starts: Array, order: Array) -> None:
    """Deal the numbers below ``total`` to batches of ``size``, and list which of those from ``first`` on each batch gets.

    A number goes to batch p // size, where p is its place in a permutation of all: that of a Feistel network on pairs of numbers, which
    is gone through again where it leads beyond ``total`` (Black and Rogaway, 2002). So a rank only computes the places of its own.

    Parameters
    ----------
    first, total, size : int
    keys : ndarray
        uint64: random numbers, an even number of them, a round each.
    starts : ndarray
        int64 zeros, one more than there are batches. Afterwards batch i gets ``order[starts[i] : starts[i + 1]]``.
    order : ndarray
        int64, for as many numbers as are to be dealt; afterwards each less ``first``, increasing within a batch.
    """
    width = np.uint64(max(1, math.ceil(math.sqrt(total))))
    height = (np.uint64(total) + width - _ONE) // width
    batches = np.empty(order.size, np.uint64)
    for number in range(order.size):
        place = np.uint64(first + number)
        while True:
            left, right = place // height, place % height
            for turn in range(np.uint64(0), np.uint64(keys.size), _TWO):
                left = _moved(left, right ^ keys[turn], width)
                right = _moved(right, left ^ keys[turn + _ONE], height)
            place = left * height + right
            if place < np.uint64(total):
                break
        batches[number] = place // np.uint64(size)
        if batches[number] + _TWO < np.uint64(starts.size):
            starts[batches[number] + _TWO] += 1
    for batch in range(2, starts.size):
        starts[batch] += starts[batch - 1]
    # The beginning of each batch stands one place late, where it moves on to its end.
    for number in range(order.size):
        batch = batches[number] + _ONE
        order[starts[batch]] = number
        starts[batch] += 1


@inlined
def _moved(place: Any, key: Any, size: Any) -> Any:
    """A place of ``size``, at most 2**32, moved on around them by a distance that depends on the key."""
    key *= _MIX
    key = (key ^ (key >> _THIRTY_TWO)) * np.uint64(0xD6E8FEB86659FD93)
    place += ((key >> _THIRTY_TWO) * size) >> _THIRTY_TWO
    return place - size * np.uint64(place >= size)


@inlined
def _mixed(bits: Any) -> Any:
    """A permutation of 64-bit numbers without visible order: the finalizer of SplitMix64 (Steele et al., 2014)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@inlined
def _bands(indptr: Array, size: int, itemsize: int) -> Any:
    """In how many bands to go through the columns of some rows, and how many entries of an array of ``size`` a band has.

    What the array says of a band stays in the cache until all rows have used it. The part of a row that lies in a band must have some
    length, since its beginning has to be fetched.
    """
    rows = indptr.size - 1
    if rows == 0 or size * itemsize <= NEAR:
        return 1, np.uint64(size)
    bands = max(1, min(-(-size * itemsize // _BAND), (indptr[rows] - indptr[0]) // (rows * _PART)))
    return bands, np.uint64(-(-size // bands))


@inlined
def _write_extents(indptr: Array, starts: Array, places: Array, ends: Array, shifts: Array) -> None:
    """Where the indices of each row begin and end, and how much further on its values begin, which is at ``starts[i]``."""
    for i in range(places.size):
        places[i], ends[i] = indptr[i], indptr[i + 1]
        shifts[i] = starts[i] - indptr[i]


@inlined
def _entries(indptr: Array, rows: Array) -> Any:
    """How many entries some rows have."""
    total = 0
    for i in range(rows.size):
        if i + _ROWS_FAR < rows.size:
            prefetch(indptr, np.uint64(rows[i + _ROWS_FAR]))
        total += indptr[rows[i] + 1] - indptr[rows[i]]
    return total


@inlined
def _fetch_row(indptr: Array, indices: Array, values: Array, rows: Array, i: int, lines: int) -> None:
    """Ask for the beginning of row ``rows[i]``, if there is one."""
    if i + _ROWS_AHEAD < rows.size:  # where a row begins has to be fetched, too
        prefetch(indptr, np.uint64(rows[i + _ROWS_AHEAD]))
    if i >= rows.size:
        return
    begin, end = np.uint64(indptr[rows[i]]), np.uint64(indptr[rows[i] + 1])
    fetch(indices, begin, min(lines, lines_of(indices, end - begin)))
    fetch(values, begin, min(lines, lines_of(values, end - begin)))


@inlined
def _fetch_first(indptr: Array, indices: Array, rows: Array, i: int, weights: Array) -> None:
    """Ask for the weights of the first entries of row ``rows[i]``, if there is one."""
    if i < rows.size:
        begin, end = np.uint64(indptr[rows[i]]), np.uint64(indptr[rows[i] + 1])
        for entry in range(begin, min(begin + _FAR, end)):
            prefetch(weights, np.uint64(indices[entry]))


@kernel
def descend(weights: Array, indices: Array, values: Array, rate: float, part: int, parts: int) -> bool:
    """``weights[indices] -= rate * values`` for one of several parts of the indices; returns whether these weights are finite numbers.

    The parts are dealt by small portions: often those of low numbers lie in the cache, and those of high numbers do not.
    """
    finite, size = True, np.uint64(indices.size)
    portion = max(_ONE, size) if parts == 1 else _PORTION
    for begin in range(np.uint64(part) * portion, size, np.uint64(parts) * portion):
        end = min(begin + portion, size)
        for entry in range(begin, min(begin + _FAR, end)):
            prefetch_to_write(weights, np.uint64(indices[entry]))
        for entry in range(begin, end):
            if entry + _FAR < end:
                prefetch_to_write(weights, np.uint64(indices[entry + _FAR]))
            index = np.uint64(indices[entry])
            weight = weights[index] - rate * values[entry]
            weights[index] = weight
            finite &= np.isfinite(weight)
    return finite


@kernel
def descend_dense(weights: Array, gradient: Array, rate: float) -> bool:
    """``weights -= rate * gradient``, without an array in between; returns whether the weights are finite numbers."""
    finite = True
    for entry in range(weights.size):
        weights[entry] -= rate * gradient[entry]
        finite &= np.isfinite(weights[entry])
    return finite
