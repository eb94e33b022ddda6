"""Loops that find the starts of CSV records, whose quoted fields may contain newlines, compiled by numba.

Quotes have pyarrow's meaning: a field that starts with a quote ends at the next quote that is not doubled; elsewhere a quote is an ordinary
character.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.compilation import inlined, kernel

__all__ = ["IN_QUOTES", "NOT_QUOTED", "characters", "end_of_quotes", "record_start"]

Array = NDArray[Any]

_FIELD_START, _IN_FIELD, _IN_QUOTES, _QUOTE_SEEN = 0, 1, 2, 3
#: States at the start of a line: a new record, or inside a quoted field.
NOT_QUOTED, IN_QUOTES = _FIELD_START, _IN_QUOTES

_QUOTE, _NEWLINE, _RETURN = 34, 10, 13


@inlined
def _after(state: int, character: int, delimiter: int) -> int:
    if state == _IN_QUOTES:
        return _QUOTE_SEEN if character == _QUOTE else _IN_QUOTES
    if character in (delimiter, _NEWLINE, _RETURN):
        return _FIELD_START
    if character == _QUOTE and (state in (_FIELD_START, _QUOTE_SEEN)):
        return _IN_QUOTES
    return _IN_FIELD


@kernel
def end_of_quotes(text: Array, delimiter: int, state: int) -> tuple[int, int, int]:
    """Scan lines of text, the first of which starts in ``state``.

    Returns
    -------
    state : int
        State at the end.
    first : int
        Start of the first record after a newline; -1 if there is none.
    opened : int
        Start of the quoted field that contains the end, if it starts in this text; otherwise -1.
    """
    first, opened, at = -1, -1, 0
    while at < text.size:
        if state == _IN_QUOTES:
            while at < text.size and text[at] != _QUOTE:
                at += 1
            if at == text.size:
                break
        elif first >= 0:  # outside quotes the state follows from the previous character
            begin = at
            while at < text.size and text[at] != _QUOTE:
                at += 1
            if at > begin:
                state = _after(_IN_FIELD, text[at - 1], delimiter)
            if at == text.size:
                break
        before = state
        state = _after(state, text[at], delimiter)
        if state == _IN_QUOTES and before == _FIELD_START:
            opened = at
        elif state == _FIELD_START and first < 0 and text[at] == _NEWLINE:
            first = at + 1
        at += 1
    return state, first, opened


@kernel
def record_start(text: Array, delimiter: int, number: int, least: int) -> int:
    """Return the start of record ``number``, counted from 0, or of the first record at ``least`` or after it if that is not -1.

    Empty lines are not records. Returns the end of the text if there is no such record.
    """
    state, found, start = _FIELD_START, 0, True
    for at in range(text.size):
        newline = text[at] == _NEWLINE or text[at] == _RETURN
        if start and least >= 0 and at >= least and (at == 0 or text[at - 1] == _NEWLINE):
            return at
        if start and not newline:
            if least < 0 and found == number:
                return at
            found, start = found + 1, False
        state = _after(state, text[at], delimiter)
        if newline and state == _FIELD_START:
            start = True
    return int(text.size)


def characters(text: bytes) -> Array:
    """Return the bytes of a text as an array for the loops."""
    return np.frombuffer(text, np.uint8)
