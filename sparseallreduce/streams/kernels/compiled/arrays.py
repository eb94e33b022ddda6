"""Building blocks of kernels: contiguity checks, operators on two values, binary search, and copies."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparseallreduce.streams.kernels.compilation import inlined
from sparseallreduce.streams.kernels.contract import Indices, Values
from sparseallreduce.streams.kernels.intrinsics import load_word, move, select

__all__ = [
    "ADD",
    "MAXIMUM",
    "MINIMUM",
    "MULTIPLY",
    "REPLACE",
    "U",
    "combine",
    "copy_rows",
    "is_list",
    "is_table",
    "lower_bound",
    "split_mix",
    "word_at",
]

ADD, MULTIPLY, MINIMUM, MAXIMUM, REPLACE = range(5)  # REPLACE keeps the second value: a copy, or a place for the caller to fill
U: Any = np.uint64


@inlined
def combine(op: int, a: Any, b: Any) -> Any:
    """Apply the operator ``op``, a literal at compile time, so that one line of this remains; NaNs propagate as in NumPy.

    All lines must compile for complex numbers, which have no order; hence the real parts, which for a real number are the number itself.
    """
    if op == ADD:
        return a + b
    if op == MULTIPLY:
        return a * b
    if op == MINIMUM:
        return select((a.real < b.real) | (a != a), a, b)
    if op == MAXIMUM:
        return select((a.real > b.real) | (a != a), a, b)
    return b


@inlined
def is_list(array: Values) -> bool:
    """Return True if a 1-D array is contiguous, which its declared type only promises."""
    return array.shape[0] <= 1 or array.strides[0] == array.itemsize


@inlined
def is_table(array: Values) -> bool:
    """Return True if a 2-D array is contiguous."""
    rows, width = array.shape
    together = rows <= 1 or array.strides[0] == array.itemsize * width  # the stride of a single row or column means nothing
    return array.size == 0 or (together and (width <= 1 or array.strides[1] == array.itemsize))


@inlined
def lower_bound(indices: Indices, lo: Any, hi: Any, index: Any) -> Any:
    while lo < hi:
        middle = (lo + hi) >> U(1)
        if indices[middle] < index:
            lo = middle + U(1)
        else:
            hi = middle
    return lo


@inlined
def copy_rows(indices: Indices, values: Values, start: Any, end: Any, iout: Indices, vout: Values, n: Any, width: Any) -> Any:
    move(iout, n, indices, start, end - start)
    move(vout, n * width, values, start * width, (end - start) * width)
    return n + (end - start)


@inlined
def word_at(octets: Values, at: Any, length: Any) -> Any:
    """Return eight bytes as a word, padded with zeros beyond the end of the array."""
    if at + U(8) <= length:
        return load_word(octets, at)
    word = U(0)
    for i in range(at, length):
        word |= U(octets[i]) << ((i - at) << U(3))
    return word


@inlined
def split_mix(number: Any) -> Any:
    """Return a 64-bit hash (SplitMix64)."""
    number = (number + U(1)) * U(0x9E3779B97F4A7C15)
    number = (number ^ (number >> U(30))) * U(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> U(27))) * U(0x94D049BB133111EB)
    return number ^ (number >> U(31))
