"""Labels in text that are more than a number: class names, and labels with a sample weight after a colon.

Labels are either all numbers or all names, and either all of them have weights or none has: the first label of a data set decides. So a
damaged line is an error, and not a new class.

``label:weight`` is how XGBoost writes sample weights in svmlight text. A sample without a label looks the same, because its first
feature is an index and a value. So at least one of the first lines must be unambiguous.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.line_blocks import BYTE_ORDER_MARK, NUMBER, LineBlock, LineFault, first_lines, quoted
from sparseallreduce.linear.data.parts import Source
from sparseallreduce.runtime.objects import agreed, gather

__all__ = ["PLAIN", "LabelReader", "Labels", "expected", "is_name", "svmlight_labels", "tabbed_labels"]

Array = NDArray[Any]

_BEGIN = re.compile(rb"[A-Za-z_\x80-\xff]")
_INDEX = re.compile(rb"[0-9]{1,20}")
_NOT_FINITE = (b"nan", b"inf", b"infinity")


class Labels:
    """The form of the labels of a data set, and the names that this rank has found, in order of appearance.

    Parameters
    ----------
    example : bytes
        First label.
    named : bool
        Whether labels are names.
    weighted : bool
        Whether labels are followed by weights.
    """

    example: bytes
    named: bool
    weighted: bool

    def __init__(self, example: bytes = b"0", named: bool = False, weighted: bool = False) -> None:
        self.example, self.named, self.weighted = example, named, weighted
        self._numbers: dict[bytes, float] = {}

    @classmethod
    def of_names(cls, names: list[str]) -> Labels:
        """Return labels that are positions among these names."""
        labels = cls(names[0].encode() if names else b"", named=True)
        labels._numbers = {name.encode(): float(place) for place, name in enumerate(names)}
        return labels

    @property
    def plain(self) -> bool:
        """True if all labels are numbers without weights."""
        return not (self.named or self.weighted)

    @property
    def names(self) -> list[str]:
        """The names that were found; the label of a sample is the position of its name here."""
        return [name.decode() for name in self._numbers]

    def number(self, word: bytes, place: int) -> float:
        """Return the number of a label: its value, or the position of its name.

        Raises
        ------
        LineFault
            If it is not a label.
        """
        known = self._numbers.get(word)
        if known is not None:
            return known
        if not self.named:
            if not NUMBER.fullmatch(word):
                raise LineFault(f"the label {quoted(word)} is not {expected(word)}", place)
            if not math.isfinite(float(word)):
                raise LineFault(f"the label {word.decode()} is too large for float64", place)
            return float(word)
        if not is_name(word):
            what = "a number" if NUMBER.fullmatch(word) else "not a name"
            both = f"the label {quoted(word)} is {what}, but the first one, {quoted(self.example)}, is a name"
            raise LineFault(f"{both}: labels are all numbers or all names", place)
        self._numbers[word] = float(len(self._numbers))
        return self._numbers[word]


PLAIN = Labels()


class LabelReader:
    """Reads the labels of lines of svmlight text, given their positions in it."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels

    def read(self, text: bytes, words: list[list[int]]) -> tuple[Array, Array | None]:
        """Return the labels, and the weights if there are any.

        Raises
        ------
        LineFault
            With the first invalid label.
        """
        numbers, weights = np.empty(len(words)), np.ones(len(words)) if self._labels.weighted else None
        for sample, (begin, end) in enumerate(words):
            word = text[begin:end]
            if weights is not None:
                word, colon, weight = word.rpartition(b":")
                if not colon:
                    first = quoted(self._labels.example)
                    raise LineFault(f"the label {quoted(weight)} has no weight, but the first one, {first}, has", begin)
                weights[sample] = _weight(weight, begin)
            elif b":" in word:
                raise LineFault(f"the label {quoted(word)} is not {'a name' if self._labels.named else 'a number'}", begin)
            numbers[sample] = self._labels.number(word, begin)
        return numbers, weights


def _weight(word: bytes, place: int) -> float:
    if not NUMBER.fullmatch(word) or not math.isfinite(float(word)):
        raise LineFault(f"the weight {quoted(word)} of the label is not a finite number", place)
    if float(word) < 0:
        raise LineFault(f"the weight {quoted(word)} of the label is below 0", place)
    return float(word)


def is_name(word: bytes) -> bool:
    """Return True if a label is a class name: printable UTF-8 that starts with a letter, and not NaN, infinity, or a list.

    >>> is_name(b"spam"), is_name(b"1,2"), is_name(b"nan"), is_name(b"label,f1,f2")
    (True, False, False, False)
    """
    if not _BEGIN.match(word) or word.lower() in _NOT_FINITE or b"," in word or word.startswith(BYTE_ORDER_MARK):
        return False
    try:
        return word.decode().isprintable()
    except UnicodeDecodeError:
        return False


def expected(word: bytes) -> str:
    """Return what an invalid number should have been, for an error message."""
    return "finite" if word.lower().lstrip(b"+-") in _NOT_FINITE else "a number"


class _Line(NamedTuple):
    label: bytes
    rest: bytes


def svmlight_labels(source: Source, comm: Any) -> Labels:
    """Return the form of the labels of svmlight text, from its first lines. Collective over ``comm``.

    Raises
    ------
    DatasetError
        On every rank, if they may be either labels with weights, or first features of samples without labels.
    """
    return _found(source, comm, _of_svmlight)


def tabbed_labels(source: Source, comm: Any) -> Labels:
    """Return the form of the labels before tabs, from the first lines. Collective over ``comm``."""
    return _found(source, comm, _of_tabbed)


def _found(source: Source, comm: Any, look: Callable[[Source, LineBlock], Labels | None]) -> Labels:
    """Return, on all ranks, the result for the first block that has samples."""

    def own() -> tuple[bytes, bool, bool]:
        found = None
        if comm.rank == 0:
            with closing(first_lines(source)) as blocks:
                found = next(filter(None, (look(source, block) for block in blocks)), None)
        found = found or PLAIN
        return found.example, found.named, found.weighted

    return Labels(*gather(comm, agreed(comm, own))[0])


def _of_svmlight(source: Source, block: LineBlock) -> Labels | None:
    head = b""
    for line in block.text.split(b"\n"):
        words = line.split(b"#", 1)[0].split(None, 1)
        if words:
            head = words[0]
            break
    if not head:
        return None
    label, colon, weight = head.rpartition(b":")
    if not colon:
        return Labels(head, named=is_name(head))
    if not NUMBER.fullmatch(weight) or label == b"qid" or not (NUMBER.fullmatch(label) or is_name(label)):
        return PLAIN  # the reader of plain labels reports the fault
    contents = filter(None, (line.split(b"#", 1)[0].split(None, 1) for line in block.text.split(b"\n")))
    lines = [_Line(*(*words, b"")[:2]) for words in contents]
    if not all(b":" in line.label for line in lines):
        return PLAIN
    if not any(_must_be_label(line) for line in lines):
        several = f"{quoted(head)} may be a label and its weight, or the first feature of a sample without a label"
        remedy = "put a label, such as 0, before every line, or write labels with a sign or a point, such as +1:0.5"
        raise DatasetError(f"{source.parts[block.part]}: {several}: {remedy}")
    return Labels(label, named=is_name(label), weighted=True)


def _must_be_label(line: _Line) -> bool:
    """Return True if the first word of a line, which has a colon, must be a label, because it cannot be the line's first feature."""
    label = line.label.rpartition(b":")[0]
    if not _INDEX.fullmatch(label):
        return True
    first, colon, _ = line.rest.lstrip().partition(b":")
    return bool(colon) and (first == b"qid" or (_INDEX.fullmatch(first) is not None and int(first) <= int(label)))


def _of_tabbed(source: Source, block: LineBlock) -> Labels | None:
    for line in block.text.split(b"\n"):
        word, tab, _ = line.partition(b"\t")
        if tab and word.strip():
            return Labels(word.strip(), named=is_name(word.strip()))
    return None
