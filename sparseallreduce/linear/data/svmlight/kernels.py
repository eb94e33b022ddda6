"""Loops over characters of svmlight text, compiled by numba: parsing and formatting.

The grammar of a line, whose parts are separated by blanks (space, tab, carriage return, vertical tab, form feed), is::

    line    = [label ["qid:" text] {index ":" {blank} number}] ["#" text] newline
    label   = number, or a word that the caller interprets
    number  = ["+" | "-"] (digits ["." [digits]] | "." digits) [("e" | "E") ["+" | "-"] digits]
    index   = digits, ascending within a line

A number of at most 53 bits and a power of ten up to 22 is converted exactly with one multiplication or division of float64 (Clinger,
"How to read floating point numbers accurately", 1990). For other numbers, which are rare, the caller gets their positions in the text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.compilation import inlined, kernel

__all__ = [
    "ABOVE",
    "BAD",
    "BAD_INDEX",
    "BAD_LABEL",
    "BAD_VALUE",
    "BELOW",
    "EXACT",
    "HARD",
    "NONZERO_CHARACTERS",
    "NO_COLON",
    "REPEATED",
    "SHORTEST_NONZERO",
    "UNSORTED",
    "format_svmlight",
    "number",
    "parse_svmlight",
]

Array = NDArray[Any]

#: Largest number of characters of a non-zero in written text: a space, ten digits, a colon, and "0." with six digits.
NONZERO_CHARACTERS = 20
#: Smallest number of characters of a non-zero in any text: a blank, a digit, a colon, a digit.
SHORTEST_NONZERO = 4

# Faults of a line.
BAD_LABEL, NO_COLON, BAD_INDEX, BELOW, UNSORTED, REPEATED, ABOVE, BAD_VALUE = range(1, 9)

EXACT, HARD, BAD = 0, 1, 2  # results of parsing a number
_POWERS = 10.0 ** np.arange(23)
_EXACT_MANTISSA = np.uint64(2**53)
_FULL = np.uint64(10**18)  # a number from here on has no room for another digit
_TOP = np.uint64(2**64 - 1)  # represents an index of too many digits
_ZERO = np.uint64(0)
_TEN = np.uint64(10)
_HASH, _COLON, _NEWLINE, _PLUS, _MINUS, _POINT = 35, 58, 10, 43, 45, 46


@kernel
def parse_svmlight(
    text: Array,
    base: int,
    features: int,
    plain: bool,
    indptr: Array,
    indices: Array,
    values: Array,
    labels: Array,
    words: Array,
    hard: Array,
) -> tuple[int, int, int, int]:
    """Parse whole lines.

    Parameters
    ----------
    text : uint8
    base : int
        Lowest index, 0 or 1.
    features : uint64
        Indices must be below ``features + base``.
    plain : bool
        Whether labels are numbers. If not, the caller gets their positions, and they may be any words.
    indptr, indices, values, labels
        Outputs, with room for all samples and non-zeros of the text. ``indptr[0]`` is zero; indices count from 0.
    words : int64, shape (samples, 2), or empty if labels are plain
        Output: start and end of each label in the text.
    hard : int64, shape (any, 3)
        Output: numbers that the caller has to convert, each as its position in ``values``, or -1 - its position in ``labels``, and its
        start and end in the text.

    Returns
    -------
    samples, hard numbers, fault, place
        The fault is 0, or the kind of fault in the part of a line that starts at this position.
    """
    at = samples = entries = hards = 0
    size = text.size
    while True:
        while at < size and (_blank(text[at]) or text[at] == _NEWLINE):
            at += 1
        if at == size:
            return samples, hards, 0, at
        if text[at] != _HASH:
            start = at
            if plain:
                value, at, what = number(text, at)
                if what == BAD:
                    return samples, hards, BAD_LABEL, start
                labels[samples] = value
                if what == HARD:
                    hard[hards] = -1 - samples, start, at
                    hards += 1
            else:
                at = _past_word(text, at)
                words[samples] = start, at
            at = _past_query(text, at)
            previous = np.int64(-1)
            while True:
                while at < size and _blank(text[at]):
                    at += 1
                if at == size or text[at] == _NEWLINE or text[at] == _HASH:
                    break
                start = at
                index = _ZERO
                while at < size and 48 <= text[at] <= 57:
                    index = index * _TEN + np.uint64(text[at] - 48) if index < _FULL else _TOP
                    at += 1
                if at == size or text[at] != _COLON:
                    return samples, hards, BAD_INDEX if _has_colon(text, start) else NO_COLON, start
                if at == start:
                    return samples, hards, BAD_INDEX, start
                if index < np.uint64(base):
                    return samples, hards, BELOW, start
                index -= np.uint64(base)
                if index >= np.uint64(features):
                    return samples, hards, ABOVE, start
                if np.int64(index) <= previous:
                    return samples, hards, REPEATED if np.int64(index) == previous else UNSORTED, start
                previous = np.int64(index)
                indices[entries] = index
                at += 1
                if at < size and text[at] <= 32:  # cheaper than a test for blanks, which are rare here
                    while at < size and _blank(text[at]):
                        at += 1
                digits = at
                value, at, what = number(text, at)
                if what == BAD:
                    return samples, hards, BAD_VALUE, start
                values[entries] = value
                if what == HARD:
                    hard[hards] = entries, digits, at
                    hards += 1
                entries += 1
            samples += 1
            indptr[samples] = entries
        while at < size and text[at] != _NEWLINE:  # a comment
            at += 1


@kernel
def number(text: Array, at: int) -> tuple[float, int, int]:
    """Return the number that starts here, its end, and EXACT, HARD, or BAD if the word is not a number."""
    size = text.size
    negative = False
    if at < size and (text[at] == _MINUS or text[at] == _PLUS):
        negative = text[at] == _MINUS
        at += 1
    mantissa = _ZERO
    exponent = digits = 0
    cut = point = False
    while at < size:
        character = text[at]
        if 48 <= character <= 57:
            digits += 1
            if mantissa < _FULL:
                mantissa = mantissa * _TEN + np.uint64(character - 48)
                exponent -= point
            else:
                cut = True
                exponent += not point
        elif character == _POINT and not point:
            point = True
        else:
            break
        at += 1
    if digits == 0:
        return 0.0, at, BAD
    if at < size and (text[at] == 101 or text[at] == 69):  # e, E
        at += 1
        falling = False
        if at < size and (text[at] == _MINUS or text[at] == _PLUS):
            falling = text[at] == _MINUS
            at += 1
        power = digits = 0
        while at < size and 48 <= text[at] <= 57:
            if power < 100_000:
                power = power * 10 + text[at] - 48
            digits += 1
            at += 1
        if digits == 0:
            return 0.0, at, BAD
        exponent += -power if falling else power
    if at < size and not (_blank(text[at]) or text[at] == _NEWLINE or text[at] == _HASH):
        return 0.0, at, BAD
    if cut or mantissa > _EXACT_MANTISSA or exponent < -22 or exponent > 22:
        return 0.0, at, HARD
    value = np.float64(mantissa)
    value = value * _POWERS[exponent] if exponent >= 0 else value / _POWERS[-exponent]
    return -value if negative else value, at, EXACT


@inlined
def _blank(character: int) -> bool:
    return character == 32 or (9 <= character <= 13 and character != _NEWLINE)


@inlined
def _past_query(text: Array, at: int) -> int:
    """Return the end of a query identifier after a label, which is skipped as in scikit-learn, or ``at`` if there is none."""
    begin = at
    while begin < text.size and _blank(text[begin]):
        begin += 1
    if text.size - begin < 4 or text[begin] != 113 or text[begin + 1] != 105 or text[begin + 2] != 100 or text[begin + 3] != _COLON:
        return at
    end: int = _past_word(text, begin)
    return end


@inlined
def _past_word(text: Array, at: int) -> int:
    """Return the end of the word that starts here."""
    while at < text.size and not (_blank(text[at]) or text[at] == _NEWLINE or text[at] == _HASH):
        at += 1
    return at


@kernel
def _has_colon(text: Array, at: int) -> bool:
    """Return True if the word that starts here contains a colon."""
    while at < text.size and not (_blank(text[at]) or text[at] == _NEWLINE or text[at] == _HASH):
        if text[at] == _COLON:
            return True
        at += 1
    return False


@kernel
def format_svmlight(positive: Array, ends: Array, indices: Array, micros: Array, text: Array) -> int:
    """Write a line per sample to ``text``: label, then ``index:value`` with indices from 1. Return the number of characters.

    Sample i has the non-zeros ``ends[i - 1]`` to ``ends[i]``, whose values are given in millionths from 1 to 1,000,000.
    """
    at = 0
    begin = 0
    for sample in range(positive.size):
        text[at] = 43 if positive[sample] else 45  # plus or minus
        text[at + 1] = 49  # one
        at += 2
        for entry in range(begin, ends[sample]):
            text[at] = 32  # space
            index = np.uint64(indices[entry]) + np.uint64(1)
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
