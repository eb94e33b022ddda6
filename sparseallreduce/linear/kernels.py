"""The loops over non-zeros of the trainer, compiled by numba: scores, gradient of a batch, update of the weights.

The gradient of a batch touches few of the N features, in any order and many of them often. It is summed into a dense array, and a
bitmap in two levels records which entries were touched: one bit an entry, and above it one bit a word of 64 entries. Reading the
bitmap in order gives the touched entries sorted, without a sort and without a pass over N entries; the same reading clears it.
Measured at N = 3.2 million and 1,000 rows of 110 non-zeros, a non-zero takes 4.7 ns to add and collect, where a list of the
touched entries that is sorted takes 7.1 ns, and adding alone, without any record, 2.9 ns.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.cpython.unsafe.numbers import trailing_zeros
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.streams.kernels.compilation import compiled_entry, kernel

__all__ = [
    "NONZERO_CHARACTERS",
    "accumulate",
    "accumulate_marked",
    "bitmap",
    "collect",
    "collect_marked",
    "descend",
    "descend_dense",
    "format_svmlight",
    "mark",
    "scores",
    "warm_up",
]

#: The most characters that a non-zero takes in svmlight text: a space, ten digits, a colon, and "0." with six digits.
NONZERO_CHARACTERS = 20

Array = NDArray[Any]

_lowest_bit: Any = trailing_zeros
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_TWO = np.uint64(2)
_THREE = np.uint64(3)
_FOUR = np.uint64(4)
_LOW_SIX = np.uint64(63)
_SIX = np.uint64(6)
_TWELVE = np.uint64(12)
_LARGEST = np.finfo(np.float32).max


def bitmap(size: int) -> tuple[Array, Array]:
    """The two levels of a cleared bitmap over ``size`` entries: words of 64 entries, and words of 64 words."""
    words = -(-size // 64)
    return np.zeros(words, np.uint64), np.zeros(-(-words // 64), np.uint64)


def warm_up(index_dtype: DTypeLike, value_dtype: DTypeLike = np.float32) -> None:
    """Compile the training loops for dtypes, or load them from disk; of several processes at once, one compiles."""
    index, value = numba.from_dtype(np.dtype(index_dtype))[::1], numba.from_dtype(np.dtype(value_dtype))[::1]
    int64, uint64, float64 = types.int64[::1], types.uint64[::1], types.float64[::1]
    rows = (*(types.Array(array.dtype, 1, "C", readonly=True) for array in (int64, index, value)), int64)  # as in a Dataset
    given = tuple(types.Array(array.dtype, 1, "C", readonly=True) for array in (index, value))
    compiled_entry(scores, (*rows, value, float64))
    compiled_entry(accumulate, (*rows, value, value))
    compiled_entry(accumulate_marked, (*rows, value, value, uint64, uint64))
    compiled_entry(collect, (value, uint64, uint64, index, value))
    compiled_entry(mark, (rows[0], rows[1], int64, uint64, uint64))
    compiled_entry(collect_marked, (uint64, uint64, index))
    compiled_entry(descend, (value, *given, value.dtype))
    compiled_entry(descend_dense, (value, value, value.dtype))


@kernel
def scores(indptr: Array, indices: Array, values: Array, rows: Array, weights: Array, out: Array) -> None:
    """``out[i]`` becomes the inner product of row ``rows[i]`` with the weights."""
    for i in range(rows.size):
        entry = np.uint64(indptr[rows[i]])
        end = np.uint64(indptr[rows[i] + 1])
        # Four sums at once, because each addition of a single one would wait for the one before.
        first = second = third = fourth = np.float32(0)
        while entry + _FOUR <= end:
            first += values[entry] * weights[np.uint64(indices[entry])]
            second += values[entry + _ONE] * weights[np.uint64(indices[entry + _ONE])]
            third += values[entry + _TWO] * weights[np.uint64(indices[entry + _TWO])]
            fourth += values[entry + _THREE] * weights[np.uint64(indices[entry + _THREE])]
            entry += _FOUR
        while entry < end:
            first += values[entry] * weights[np.uint64(indices[entry])]
            entry += _ONE
        out[i] = np.float64(first + second) + np.float64(third + fourth)


@kernel
def accumulate(indptr: Array, indices: Array, values: Array, rows: Array, coefficients: Array, gradient: Array) -> None:
    """Add ``coefficients[i]`` times row ``rows[i]`` to the dense gradient, for all i; rows of coefficient zero cost nothing."""
    for i in range(rows.size):
        coefficient = coefficients[i]
        if coefficient == 0:
            continue
        row = rows[i]
        for entry in range(indptr[row], indptr[row + 1]):
            gradient[np.uint64(indices[entry])] += coefficient * values[entry]


@kernel
def accumulate_marked(
    indptr: Array, indices: Array, values: Array, rows: Array, coefficients: Array, gradient: Array, words: Array, summary: Array
) -> None:
    """As :func:`accumulate`, and mark every entry that was touched in the bitmap of ``words`` and ``summary``."""
    for i in range(rows.size):
        coefficient = coefficients[i]
        if coefficient == 0:
            continue
        row = rows[i]
        for entry in range(indptr[row], indptr[row + 1]):
            index = np.uint64(indices[entry])
            gradient[index] += coefficient * values[entry]
            words[index >> _SIX] |= _ONE << (index & _LOW_SIX)
            summary[index >> _TWELVE] |= _ONE << ((index >> _SIX) & _LOW_SIX)


@kernel
def collect(gradient: Array, words: Array, summary: Array, out_indices: Array, out_values: Array) -> int:
    """Move the marked entries, in order, to the output arrays; gradient and bitmap are zero afterwards. Returns their number."""
    count = 0
    for block in range(summary.size):
        marked_words = summary[block]
        if marked_words == _ZERO:
            continue
        summary[block] = _ZERO
        while marked_words != _ZERO:
            word = (np.uint64(block) << _SIX) + np.uint64(_lowest_bit(marked_words))
            marked_words &= marked_words - _ONE
            marked = words[word]
            words[word] = _ZERO
            while marked != _ZERO:
                index = (word << _SIX) + np.uint64(_lowest_bit(marked))
                marked &= marked - _ONE
                out_indices[count] = index
                out_values[count] = gradient[index]
                gradient[index] = 0
                count += 1
    return count


@kernel
def mark(indptr: Array, indices: Array, rows: Array, words: Array, summary: Array) -> None:
    """Mark every index that occurs in the rows in the bitmap of ``words`` and ``summary``."""
    for i in range(rows.size):
        row = rows[i]
        for entry in range(indptr[row], indptr[row + 1]):
            index = np.uint64(indices[entry])
            words[index >> _SIX] |= _ONE << (index & _LOW_SIX)
            summary[index >> _TWELVE] |= _ONE << ((index >> _SIX) & _LOW_SIX)


@kernel
def collect_marked(words: Array, summary: Array, out_indices: Array) -> int:
    """Move the marked indices, in order, to the output array; the bitmap is zero afterwards. Returns their number."""
    count = 0
    for block in range(summary.size):
        marked_words = summary[block]
        if marked_words == _ZERO:
            continue
        summary[block] = _ZERO
        while marked_words != _ZERO:
            word = (np.uint64(block) << _SIX) + np.uint64(_lowest_bit(marked_words))
            marked_words &= marked_words - _ONE
            marked = words[word]
            words[word] = _ZERO
            while marked != _ZERO:
                out_indices[count] = (word << _SIX) + np.uint64(_lowest_bit(marked))
                marked &= marked - _ONE
                count += 1
    return count


@kernel
def descend(weights: Array, indices: Array, values: Array, rate: float) -> bool:
    """``weights[indices] -= rate * values``; returns whether these weights are finite numbers."""
    finite = True
    for entry in range(indices.size):
        index = np.uint64(indices[entry])
        weight = weights[index] - rate * values[entry]
        weights[index] = weight
        finite &= abs(weight) <= _LARGEST
    return finite


@kernel
def descend_dense(weights: Array, gradient: Array, rate: float) -> bool:
    """``weights -= rate * gradient``, without an array in between; returns whether the weights are finite numbers."""
    finite = True
    for entry in range(weights.size):
        weights[entry] -= rate * gradient[entry]
        finite &= abs(weights[entry]) <= _LARGEST
    return finite


@kernel
def format_svmlight(positive: Array, ends: Array, indices: Array, micros: Array, text: Array) -> int:
    """Write a line for every sample to ``text``: label, then ``index:value`` with indices from 1. Returns the characters written.

    Sample i has the non-zeros ``ends[i - 1]`` to ``ends[i]``, whose values are given in whole millionths from 1 to 1,000,000.
    """
    at = 0
    begin = 0
    for sample in range(positive.size):
        text[at] = 43 if positive[sample] else 45  # plus or minus
        text[at + 1] = 49  # one
        at += 2
        for entry in range(begin, ends[sample]):
            text[at] = 32  # space
            index = np.uint64(indices[entry]) + _ONE
            power = np.uint64(10)
            digits = 1
            while index >= power:
                power *= np.uint64(10)
                digits += 1
            at += digits
            for place in range(digits):
                text[at - place] = 48 + index % np.uint64(10)
                index //= np.uint64(10)
            text[at + 1] = 58  # colon
            at += 2
            micro = np.uint32(micros[entry])
            if micro >= np.uint32(1_000_000):
                text[at] = 49
                at += 1
                continue
            text[at] = 48
            text[at + 1] = 46  # point
            digits = 6
            while micro % np.uint32(10) == 0:
                micro //= np.uint32(10)
                digits -= 1
            for place in range(digits):
                text[at + 1 + digits - place] = 48 + micro % np.uint32(10)
                micro //= np.uint32(10)
            at += 2 + digits
        begin = ends[sample]
        text[at] = 10  # newline
        at += 1
    return at
