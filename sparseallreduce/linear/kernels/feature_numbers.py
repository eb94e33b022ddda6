"""Loops that number the features occurring in a rank's samples by how many samples each occurs in."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.intrinsics import count_bits, leading_zeros, lowest_bit

__all__ = [
    "common",
    "count",
    "count_some",
    "drop",
    "held_by_several",
    "mark",
    "marked",
    "number",
    "number_marked",
    "number_sorted",
    "order_by_count",
    "renumber",
]

Array = NDArray[Any]

_ZERO, _ONE, _SIX, _LOW_SIX = np.uint64(0), np.uint64(1), np.uint64(6), np.uint64(63)
_BLOCK = 4096  # entries


@kernel
def mark(indices: Array, begin: int, end: int, words: Array) -> int:
    """Set the bit of every index from ``begin`` to ``end`` in a bitmap; return the number of bits set."""
    for entry in range(begin, end):
        index = np.uint64(indices[entry])
        words[index >> _SIX] |= _ONE << (index & _LOW_SIX)
    count = _ZERO
    for word in range(words.size):
        count += count_bits(words[word])
    return int(count)


@kernel
def marked(words: Array, before: Array, out: Array) -> None:
    """Write the marked indices in order, and the number of marks before each word. ``out`` must have room for all."""
    count = _ZERO
    for word in range(words.size):
        before[word] = count
        left = words[word]
        while left != _ZERO:
            out[count] = (np.uint64(word) << _SIX) + lowest_bit(left)
            left &= left - _ONE
            count += _ONE


@kernel
def held_by_several(indices: Array, values: Array, bits: int, features: Array, holders: Array, counts: Array) -> int:
    """Write the features that several ranks have, and their numbers of ranks and occurrences; return how many there are.

    A value holds the number of ranks, followed by ``bits`` bits of the number of occurrences. Without ``indices``, there is a value for
    every feature. Outputs that are empty are not written.
    """
    found = 0
    for entry in range(values.size):
        ranks = values[entry] >> bits
        if ranks > 1:
            if features.size:
                features[found] = indices[entry] if indices.size else entry
                holders[found], counts[found] = ranks, values[entry] & ((1 << bits) - 1)
            found += 1
    return found


@kernel
def common(features: Array, slots: Array, words: Array, before: Array, out: Array, numbers: Array) -> int:
    """Write the slots of the marked ones among some features, and their numbers among all marks; return how many there are."""
    count = 0
    for place in range(features.size):
        feature = np.uint64(features[place])
        word, bit = feature >> _SIX, _ONE << (feature & _LOW_SIX)
        if words[word] & bit:
            out[count] = slots[place]
            numbers[count] = np.uint64(before[word]) + count_bits(words[word] & (bit - _ONE))
            count += 1
    return count


@kernel
def count(indices: Array, begin: int, end: int, counts: Array) -> None:
    """Count the occurrences of each index from ``begin`` to ``end``."""
    for entry in range(begin, end):
        counts[np.uint64(indices[entry])] += counts.dtype.type(1)


@kernel
def count_some(numbers: Array, counts: Array) -> None:
    """Count the occurrences of each number in every fourth block of entries, which is enough to order numbers by them."""
    for begin in range(0, numbers.size, 4 * _BLOCK):
        for entry in range(begin, min(begin + _BLOCK, numbers.size)):
            counts[np.uint64(numbers[entry])] += counts.dtype.type(1)


@kernel
def number(indices: Array, begin: int, end: int, words: Array, before: Array, out: Array) -> None:
    """Write the number of every index among the marked ones, all of which are marked."""
    for entry in range(begin, end):
        index = np.uint64(indices[entry])
        word = index >> _SIX
        out[entry - begin] = np.uint64(before[word]) + count_bits(words[word] & ((_ONE << (index & _LOW_SIX)) - _ONE))


@kernel
def order_by_count(counts: Array, but: Array, first: int, places: Array) -> None:
    """Write each feature's new position, by descending power of two of its count; within a power of two the order is kept.

    Features in ``but``, in ascending order, are left out; the others get the positions from ``first`` on.
    """
    starts = np.zeros(66, np.int64)
    left_out = 0
    for feature in range(counts.size):
        if left_out < but.size and but[left_out] == feature:
            left_out += 1
        else:
            starts[_class_of(counts[feature]) + _ONE] += 1
    starts[0] = first
    for each in range(1, 66):
        starts[each] += starts[each - 1]
    left_out = 0
    for feature in range(counts.size):
        if left_out < but.size and but[left_out] == feature:
            left_out += 1
        else:
            own = _class_of(counts[feature])
            places[feature] = starts[own]
            starts[own] += 1


@inlined
def _class_of(count: int) -> Any:
    return leading_zeros(np.uint64(count))


@kernel
def renumber(numbers: Array, places: Array) -> None:
    """Replace each number by its new position."""
    for entry in range(numbers.size):
        numbers[entry] = places[np.uint64(numbers[entry])]


@kernel
def number_marked(indices: Array, begin: int, end: int, words: Array, before: Array, missing: int, out: Array) -> int:
    """Write the number of every index among the marked ones, or ``missing`` if it is not marked; return how many are not."""
    count = _ZERO
    for entry in range(begin, end):
        index = np.uint64(indices[entry])
        word, bit = index >> _SIX, _ONE << (index & _LOW_SIX)
        known = (words[word] & bit) != _ZERO
        number = np.uint64(before[word]) + count_bits(words[word] & (bit - _ONE))
        out[entry - begin] = number if known else np.uint64(missing)
        count += np.uint64(not known)
    return int(count)


@kernel
def number_sorted(indices: Array, begin: int, end: int, features: Array, out: Array) -> int:
    """Compute the same as :func:`number_marked` by searching the ascending ``features``; indices not among them get ``features.size``."""
    count, missing = _ZERO, np.uint64(features.size)
    for entry in range(begin, end):
        index, low, high = np.uint64(indices[entry]), _ZERO, missing
        while low < high:
            middle = (low + high) >> _ONE
            if np.uint64(features[middle]) < index:
                low = middle + _ONE
            else:
                high = middle
        known = low < missing and np.uint64(features[low]) == index
        out[entry - begin] = low if known else missing
        count += np.uint64(not known)
    return int(count)


@kernel
def drop(indptr: Array, indices: Array, values: Array, missing: int) -> None:
    """Remove the entries of feature ``missing`` in place."""
    count, begin = 0, indptr[0]
    for row in range(indptr.size - 1):
        end = indptr[row + 1]
        for entry in range(begin, end):
            if np.uint64(indices[entry]) != np.uint64(missing):
                indices[count], values[count] = indices[entry], values[entry]
                count += 1
        begin = end
        indptr[row + 1] = count
