"""Copying the rows of a batch to one place and renumbering their features, see :mod:`sparseallreduce.linear.kernels`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.kernels.rows import FAR, NEAR, ROW_AHEAD, bands_of, fetch, lines_of
from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.intrinsics import count_bits, lowest_bit, prefetch

__all__ = ["bitmap", "compact", "marked", "move_marks", "renumber", "take_rows", "unmark"]

Array = NDArray[Any]

_ZERO, _ONE, _FOUR, _SIX, _TWELVE, _SIXTEEN, _LOW_SIX, _SIXTY_FOUR = (np.uint64(number) for number in (0, 1, 4, 6, 12, 16, 63, 64))
_LINES = np.uint64(4)  # cache lines prefetched of a row
_FAR = np.uint64(FAR)
_PART_LINES = np.uint64(6)  # cache lines prefetched of a row's part in a band
_PART_AHEAD = 2  # number of rows by which a part is prefetched ahead
_PENDING = np.uint64(4096)  # entries that are copied before they are marked
_EVERY = np.uint64(2**64 - 1)  # larger than any index; also all bits of a word


def bitmap(size: int) -> tuple[Array, Array]:
    """Return a cleared bitmap over ``size`` entries: words of 64 entries, and a bitmap of the words that have bits set."""
    words = -(-size // 64)
    return np.zeros(words, np.uint64), np.zeros(-(-words // 64), np.uint64)


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
    """Copy the entries of each row, from ``starts[i]`` on, to the output arrays from ``offsets[i]`` on, and mark the indices.

    ``offsets`` ends with the end of the last row in the output. Values are not copied if their output array is empty.
    """
    both = out_values.size > 0
    rows, pending, last = starts.size, np.uint64(offsets[0]), np.uint64(offsets[starts.size])
    sparse = last - pending < np.uint64(words.size)
    if not sparse:  # nearly all blocks have marks
        blocks[:] = _EVERY
    for i in range(rows):
        if i + ROW_AHEAD < rows:
            length = np.uint64(offsets[i + ROW_AHEAD + 1] - offsets[i + ROW_AHEAD])
            fetch(indices, np.uint64(starts[i + ROW_AHEAD]), min(_LINES, lines_of(indices, length)))
            if both:
                fetch(values, np.uint64(starts[i + ROW_AHEAD]), min(_LINES, lines_of(values, length)))
        begin, end = np.uint64(offsets[i]), np.uint64(offsets[i + 1])
        shift = np.uint64(starts[i]) - begin
        # Two loops, because each is vectorised; marks follow later, when they do not wait for the loads of the copy.
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
    """Mark the words of the entries from ``begin`` to ``end``."""
    for entry in range(begin, end):
        blocks[np.uint64(indices[entry]) >> _TWELVE] |= _ONE << ((np.uint64(indices[entry]) >> _SIX) & _LOW_SIX)


@kernel
def move_marks(words: Array, blocks: Array, out_words: Array, out_blocks: Array) -> None:
    """Add the marks of one bitmap to another, and clear the first."""
    for block in range(np.uint64(blocks.size)):
        if blocks[block] == _ZERO:
            continue
        out_blocks[block] |= blocks[block]
        blocks[block] = _ZERO
        for word in range(block << _SIX, min((block + _ONE) << _SIX, np.uint64(words.size))):
            out_words[word] |= words[word]
            words[word] = _ZERO


@kernel
def marked(words: Array, blocks: Array, before: Array, out: Array) -> int:
    """Write the positions of all marks in order, and the number of marks before each word to ``before``; return their number.

    Words without marks get no entry in ``before``. The output array needs room for :data:`.bands.ROOM` more positions. The blocks are
    cleared, and the words are kept: see :func:`unmark`.
    """
    marked_words = np.empty(64, np.uint64)
    count = _ZERO
    for block in range(np.uint64(blocks.size)):
        present, found, first = blocks[block], _ZERO, block << _SIX
        blocks[block] = _ZERO
        if present == _EVERY:  # all words may have marks
            for word in range(first, min(first + _SIXTY_FOUR, np.uint64(words.size))):
                marked_words[found] = word
                found += np.uint64(words[word] != _ZERO)
        while present != _ZERO and present != _EVERY:
            marked_words[found] = first + lowest_bit(present)
            present &= present - _ONE
            found += _ONE
        for number in range(found):
            word = marked_words[number]
            marks = words[word]
            before[word] = count
            end = count + count_bits(marks)
            while count < end:  # rarely more than one iteration, as a loop over the unpredictable number of marks mispredicts branches
                for place in range(_FOUR):
                    out[count + place] = (word << _SIX) + lowest_bit(marks)
                    marks &= marks - _ONE
                count += _FOUR
            count = end
    return int(count)


@kernel
def renumber(indptr: Array, indices: Array, words: Array, before: Array) -> None:
    """Replace each index of some rows, all of them marked, by the number of marks before it."""
    rows = indptr.size - 1
    bands, width = bands_of(indptr, words.size, words.itemsize + before.itemsize)
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
                for near in range(entry, entry + _SIXTEEN):  # this loop is vectorised
                    indices[near] = _number(indices[near], words, before)
                entry += _SIXTEEN
            if band + 1 == bands:
                for near in range(entry, end):
                    indices[near] = _number(indices[near], words, before)
            places[i] = entry


@inlined
def _number(index: int, words: Array, before: Array) -> Any:
    """Return the number of marks before an index."""
    word = np.uint64(index) >> _SIX
    return np.uint64(before[word]) + count_bits(words[word] & ((_ONE << (np.uint64(index) & _LOW_SIX)) - _ONE))


@kernel
def unmark(places: Array, words: Array) -> None:
    """Clear a bitmap whose marks are at ``places``."""
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
    """Prepare a batch of rows: :func:`take_rows`, :func:`marked`, :func:`renumber` and :func:`unmark` in one call."""
    take_rows(indices, values, starts, offsets, words, blocks, out_indices, out_values)
    count = marked(words, blocks, before, out)
    renumber(offsets, out_indices, words, before)
    unmark(out[:count], words)
    return int(count)
