"""Loops over characters of Vowpal Wabbit's text, compiled by numba, which convert lines to hashed features.

The grammar of a line, whose words are separated by blanks (space, tab, carriage return), is::

    line       = head {"|" namespace} newline
    namespace  = [name [":" number]] {blank feature}
    feature    = [name] [":" number] | name ":" text, which is not nan, inf or infinity

A name of digits only has their value as its hash, any other its MurmurHash3, as in Vowpal Wabbit by default. The hash of a namespace is
added to the former, and is the seed of the latter. Unnamed features are numbered starting from the hash of their namespace.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.svmlight.kernels import BAD, EXACT, HARD, number
from sparseallreduce.streams.kernels.compilation import inlined, kernel

__all__ = ["BAD_WEIGHT", "NOT_FINITE", "NO_BAR", "NO_VALUE", "SHORTEST_FEATURE", "murmur3", "parse_lines"]

Array = NDArray[Any]

#: Smallest number of characters of a feature: a blank and a character.
SHORTEST_FEATURE = 2

# Faults of a line.
NO_BAR, BAD_WEIGHT, NO_VALUE, NOT_FINITE = 1, 2, 3, 4

_BAR, _COLON, _NEWLINE = 124, 58, 10
_NAN, _INF, _INFINITY = (np.frombuffer(word, np.uint8).copy() for word in (b"nan", b"inf", b"infinity"))


@kernel
def murmur3(text: Array, begin: int, end: int, seed: Any) -> Any:
    """Return the 32-bit MurmurHash3 (x86) of some characters, as uint64."""
    mask = np.uint64(0xFFFFFFFF)
    first, second = np.uint64(0xCC9E2D51), np.uint64(0x1B873593)
    state = np.uint64(seed) & mask
    length = end - begin
    whole = begin + length // 4 * 4
    for at in range(begin, whole, 4):
        block = np.uint64(text[at]) | np.uint64(text[at + 1]) << np.uint64(8)
        block |= np.uint64(text[at + 2]) << np.uint64(16) | np.uint64(text[at + 3]) << np.uint64(24)
        state ^= _rotated(block * first & mask, 15) * second & mask
        state = (_rotated(state, 13) * np.uint64(5) + np.uint64(0xE6546B64)) & mask
    if whole < end:
        block = np.uint64(0)
        for at in range(end - 1, whole - 1, -1):
            block = block << np.uint64(8) | np.uint64(text[at])
        state ^= _rotated(block * first & mask, 15) * second & mask
    state ^= np.uint64(length)
    state ^= state >> np.uint64(16)
    state = state * np.uint64(0x85EBCA6B) & mask
    state ^= state >> np.uint64(13)
    state = state * np.uint64(0xC2B2AE35) & mask
    return state ^ state >> np.uint64(16)


@inlined
def _rotated(word: Any, by: int) -> Any:
    return (word << np.uint64(by) | word >> np.uint64(32 - by)) & np.uint64(0xFFFFFFFF)


@kernel
def _hashed(text: Array, begin: int, end: int, seed: Any) -> Any:
    """Return the value of a name of digits plus the seed, or the hash of any other name."""
    digits = np.uint64(0)
    for at in range(begin, end):
        if not 48 <= text[at] <= 57:
            return murmur3(text, begin, end, seed)
        digits = digits * np.uint64(10) + np.uint64(text[at] - 48)
    return digits + np.uint64(seed)


@kernel
def parse_lines(
    text: Array, mask: int, indptr: Array, indices: Array, values: Array, heads: Array, hard: Array
) -> tuple[int, int, int, int]:
    """Parse whole lines, except the part before the first bar.

    Parameters
    ----------
    text : uint8
    mask : uint64
        Mask of the bits of a hash that form an index.
    indptr, indices, values
        Outputs, with room for all samples and features of the text. ``indptr[0]`` is zero. Features are in the order of the text.
    heads : int64, shape (samples, 2)
        Output: start and end of the part of each line before the first bar.
    hard : int64, shape (any, 5)
        Output: values that the caller has to convert, each as its position in ``values``, and the start and end in the text of the number
        and of the weight of its namespace. Either may be empty, which means 1.

    Returns
    -------
    samples, hard values, fault, place
        The fault is 0, or the kind of fault in the part of a line that starts at this position.
    """
    at = samples = entries = hards = 0
    size = text.size
    while True:
        while at < size and (_blank(text[at]) or text[at] == _NEWLINE):
            at += 1
        if at == size:
            return samples, hards, 0, at
        start = at
        while at < size and text[at] != _BAR and text[at] != _NEWLINE:
            at += 1
        if at == size or text[at] == _NEWLINE:
            return samples, hards, NO_BAR, start
        heads[samples] = start, at
        seed = unnamed = np.uint64(0)
        weight, weight_from, weight_to, weight_is_hard = 1.0, 0, 0, False
        while at < size and text[at] != _NEWLINE:
            if _blank(text[at]):
                at += 1
                continue
            opens = text[at] == _BAR
            at += opens
            begin = at
            at = _past(text, at, True)
            name_end = at
            colon = at < size and text[at] == _COLON
            at += colon
            value_from = at
            if colon:
                at = _past(text, at, False)
            value, stop, what = number(text[value_from:at], 0) if colon else (1.0, 0, EXACT)
            if colon and what != BAD and stop != at - value_from:
                what = BAD
            if opens:
                if what == BAD:
                    return samples, hards, BAD_WEIGHT, begin
                seed = _hashed(text, begin, name_end, 0) if name_end > begin else np.uint64(0)
                weight, weight_from, weight_to, weight_is_hard = value, value_from, at, what == HARD
                unnamed = np.uint64(0)
                continue
            if colon and value_from == at:
                return samples, hards, NO_VALUE, begin
            if what == BAD:
                if name_end == begin:
                    return samples, hards, NO_VALUE, begin
                if _not_finite(text, value_from, at):
                    return samples, hards, NOT_FINITE, begin
                indices[entries] = _hashed(text, value_from, at, _hashed(text, begin, name_end, seed)) & mask
                values[entries] = 1.0  # whatever the weight of the namespace is
                entries += 1
                continue
            if name_end > begin:
                index = _hashed(text, begin, name_end, seed)
            else:
                index = seed + unnamed
                unnamed += np.uint64(1)
            is_hard = what == HARD or weight_is_hard
            if not is_hard and value * weight == 0:
                continue
            if is_hard:
                hard[hards] = entries, value_from, at, weight_from, weight_to
                hards += 1
            indices[entries] = index & mask
            values[entries] = value * weight
            entries += 1
        samples += 1
        indptr[samples] = entries


@kernel
def _not_finite(text: Array, begin: int, end: int) -> bool:
    """Return True if these characters are nan, inf or infinity in any case, with or without a sign."""
    if begin < end and (text[begin] == 43 or text[begin] == 45):  # plus or minus
        begin += 1
    found: bool = _says(text, begin, end, _NAN) or _says(text, begin, end, _INF) or _says(text, begin, end, _INFINITY)
    return found


@kernel
def _says(text: Array, begin: int, end: int, word: Array) -> bool:
    """Return True if these characters are a lower-case word, in any case."""
    same = end - begin == word.size
    for place in range(word.size):
        same = same and text[begin + place] | 32 == word[place]
    return same


@inlined
def _blank(character: int) -> bool:
    return character == 32 or character == 9 or character == 13


@kernel
def _past(text: Array, at: int, named: bool) -> int:
    """Return the end of a name, or of a value, that starts here."""
    while at < text.size and not (_blank(text[at]) or text[at] == _NEWLINE or text[at] == _BAR or (named and text[at] == _COLON)):
        at += 1
    return at
