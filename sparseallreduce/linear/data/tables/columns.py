"""What is found out of a column while it is read, on one rank and by all: its kind and its categories.

A column of strings keeps its values as places in a list of words, in the order in which this rank has met them. When all is read the
ranks put their words together, sort them, and number them anew; a column with too many is hashed instead. So the encoding depends on
nothing but the table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.line_blocks import NUMBER as NUMBER_TEXT
from sparseallreduce.linear.data.reading import naming_option
from sparseallreduce.linear.data.tables.cells import BOOLEAN, DATE, MISSING, NOTHING, NUMBER, Cells, first_missing, words_of
from sparseallreduce.linear.data.tables.extra import arrow
from sparseallreduce.linear.data.tables.hashing import hashes_of
from sparseallreduce.linear.encoding import CATEGORY, HASHED, Column

__all__ = ["UNSEEN", "Found", "KnownColumn", "LearnedColumn", "Stored", "TargetColumn", "agreed_column", "mixed"]

Array = NDArray[Any]

UNSEEN = -2  # in the place of a code


class Stored(NamedTuple):
    """Values of a column as they are kept until all of it has been read."""

    numbers: Array | None = None  # NaN where missing
    codes: Array | None = None  # int32 or int64, MISSING, or UNSEEN
    hashed: bool = False  # whether codes are hashes rather than places of words


class Found(NamedTuple):
    """What one rank has found of a column."""

    kinds: dict[str, str]  # each with how the first row that has it is named, if an error may name it: of dates
    missing: bool
    words: list[str] | None  # None if there are too many
    fault: str = ""  # what is wrong if it is a column of numbers


class LearnedColumn:
    """A column whose kind and categories are to be found out.

    Parameters
    ----------
    name : str
    limit : int
        Categories that it may have before it is hashed.
    bits : int
        To which it is hashed then.
    dtype : dtype
        Of its numbers.
    """

    def __init__(self, name: str, limit: int, bits: int, dtype: np.dtype[Any]) -> None:
        self.name, self.bits = name, bits
        self._limit, self._dtype = limit, dtype
        self._kinds: dict[str, str] = {}
        self._missing = False
        self._places: dict[str, int] = {}
        self._too_many = False
        self._fault = ""

    def take(self, cells: Cells, where: Callable[[int], str]) -> Stored:
        """Note what cells say of the column, and return them as they are kept."""
        self._missing |= cells.is_missing
        if cells.kind != NOTHING and cells.kind not in self._kinds:
            self._kinds[cells.kind] = where(0) if cells.kind == DATE else ""  # it takes a reading of all lines before
        if cells.numbers is not None:
            try:
                return Stored(numbers=_of_dtype(cells, self._dtype, self.name, where))
            except DatasetError as error:  # in other rows the column may be of strings
                self._fault = self._fault or str(error)
                return Stored()
        if cells.codes is None:
            return Stored()
        if not self._too_many:
            places = [self._places.setdefault(word, len(self._places)) for word in words_of(cells, self.name, where)]
            if len(self._places) <= self._limit:
                return Stored(codes=np.array([*places, MISSING], np.int32)[cells.codes])
            self._too_many = True
        return Stored(codes=_hashed(cells.words, self.bits)[cells.codes], hashed=True)

    def found(self) -> Found:
        """What all of it was."""
        return Found(self._kinds, self._missing, None if self._too_many else sorted(self._places), self._fault)

    def final(self, stored: Stored, column: Column) -> Stored:
        """Kept values by the encoding that the ranks have agreed on."""
        if stored.codes is None or stored.hashed:
            return stored
        return Stored(codes=self._finals(column)[stored.codes])

    def _finals(self, column: Column) -> Array:
        """Of each word of this rank its place in the column, and behind them MISSING."""
        known = getattr(self, "_known", None)
        if known is None:
            words = arrow().array(list(self._places), arrow().string())
            if column.kind == HASHED:
                known = _hashed(words, column.bits)
            else:
                known = np.append(np.searchsorted(np.array(column.categories, object), list(self._places)), MISSING).astype(np.int32)
            self._known = known
        return known


class KnownColumn:
    """A column whose encoding is known."""

    def __init__(self, column: Column, dtype: np.dtype[Any]) -> None:
        self.name, self._column, self._dtype = column.name, column, dtype
        self._places = {category: place for place, category in enumerate(column.categories)}

    @property
    def is_text(self) -> bool:
        """Whether it is of strings, whatever it looks like."""
        return self._column.kind in (CATEGORY, HASHED)

    def take(self, cells: Cells, where: Callable[[int], str]) -> Stored:
        """Cells as they are encoded; raises DatasetError if they should be numbers and are none."""
        if self._column.kind == NUMBER:
            if cells.kind not in (NUMBER, NOTHING):
                cells = Cells(NUMBER, _read_numbers(cells, self.name, where))
            if cells.numbers is None:
                return Stored()
            return Stored(numbers=_of_dtype(cells, self._dtype, self.name, where))
        if cells.codes is None:
            return Stored()
        if self._column.kind == HASHED:
            return Stored(codes=_hashed(cells.words, self._column.bits)[cells.codes], hashed=True)
        words = words_of(cells, self.name, where)
        if self._column.kind == BOOLEAN:
            words = [word.lower() for word in words]
        places = [self._places.get(word, UNSEEN) for word in words]
        return Stored(codes=np.array([*places, MISSING], np.int32)[cells.codes])

    def final(self, stored: Stored, column: Column) -> Stored:
        return stored


@dataclass
class _Kinds:
    """Kinds of a column on all ranks."""

    first: dict[str, str]
    missing: bool


def _merged(ranks: list[Found]) -> _Kinds:
    kinds: dict[str, str] = {}
    for found in ranks:
        for kind, where in found.kinds.items():
            kinds.setdefault(kind, where)
    return _Kinds(kinds, any(found.missing for found in ranks))


def mixed(ranks: list[Found]) -> bool:
    """Return True if a column is of several kinds, so that it must be read as strings."""
    return len(_merged(ranks).first) > 1


def agreed_column(name: str, ranks: list[Found], limit: int, bits: int) -> Column:
    """Return how a column is encoded, of what each rank has found, which is of one kind at most.

    Raises
    ------
    DatasetError
        If it holds dates.
    """
    merged = _merged(ranks)
    kind = next(iter(merged.first), NOTHING)
    if kind == DATE:
        said = f"{merged.first[kind]}: the column {name!r} holds dates or times, which are no feature by themselves"
        remedy = "write numbers of them, as days since a day, month or weekday; leave it out; or have each be a category, by {option}"
        raise naming_option(f"{said}: {remedy}", f"drop=[{name!r}] or categorical=[{name!r}]", f"--drop {name} or --categorical {name}")
    if kind == NUMBER:
        fault = next((found.fault for found in ranks if found.fault), "")
        if fault:
            raise DatasetError(fault)
        return Column(name, NUMBER, missing=merged.missing)
    words: set[str] = set()
    for found in ranks:
        if found.words is None or len(words | set(found.words)) > limit:
            return Column(name, HASHED, bits=bits, missing=merged.missing)
        words |= set(found.words)
    return Column(name, BOOLEAN if kind == BOOLEAN else CATEGORY, tuple(sorted(words)), missing=merged.missing)


class TargetColumn:
    """The labels of a table: numbers, or names of classes.

    Parameters
    ----------
    name : str
    unlabelled : bool
        Whether labels may be missing.
    """

    def __init__(self, name: str, unlabelled: bool) -> None:
        self.name, self._unlabelled = name, unlabelled
        self._kinds: dict[str, str] = {}
        self.places: dict[str, int] = {}
        self._example = ""
        self._where: Callable[[], str] = str  # how an error names the row of the example

    def take(self, cells: Cells, rows: int, where: Callable[[int], str]) -> Array:
        """The labels of cells as float64: numbers, or places among the names so far; NaN where they are missing."""
        if cells.is_missing and not self._unlabelled:
            raise DatasetError(f"{where(first_missing(cells))}: the target {self.name!r} is missing")
        if cells.kind == DATE:
            raise DatasetError(f"{where(0)}: the target {self.name!r} holds dates or times, and must be numbers or names of classes")
        if cells.kind != NOTHING:
            self._kinds[cells.kind] = ""
        if cells.fault:
            raise DatasetError(cells.fault)
        if cells.numbers is not None:
            return cells.numbers
        if cells.codes is None:
            return np.full(rows, np.nan)
        places = []
        for code, word in enumerate(words_of(cells, self.name, where)):
            if not self._example and not NUMBER_TEXT.fullmatch(word.encode()):
                self._example = word
                self._where = functools.partial(where, int((cells.codes == code).argmax()))
            places.append(self.places.setdefault(word, len(self.places)))
        return np.array([*places, np.nan])[cells.codes]

    def found(self) -> Found:
        return Found(self._kinds, False, list(self.places))

    def names(self, ranks: list[Found], as_text: bool) -> list[str] | None:
        """Return the names of the classes, sorted, of what each rank has found of the target; None if they are numbers.

        Raises
        ------
        DatasetError
            If some are numbers and some are names, on a rank that has met such a name.
        """
        merged = _merged(ranks)
        if not set(merged.first) - {NUMBER}:
            return None
        words = set().union(*(found.words or () for found in ranks))
        numbers = NUMBER in merged.first or any(NUMBER_TEXT.fullmatch(word.encode()) for word in words)
        if numbers and self._example and not as_text:
            said = f"{self._where()}: the target {self.name!r} is {self._example!r}, and others are numbers: labels are all numbers or"
            raise naming_option(said + " all names; {option} takes all as names", "categorical", "--categorical")
        return sorted(words)


def _of_dtype(cells: Cells, dtype: np.dtype[Any], name: str, where: Callable[[int], str]) -> Array:
    """The numbers of cells; raises DatasetError if one is not finite."""
    if cells.fault:
        raise DatasetError(cells.fault)
    numbers = np.empty(0) if cells.numbers is None else cells.numbers
    with np.errstate(over="ignore"):
        taken = numbers.astype(dtype, copy=False)
    if dtype != np.float64 and np.isinf(taken).any():
        row = int(np.isinf(taken).argmax())
        raise DatasetError(f"{where(row)}: the column {name!r} is {numbers[row]:g}, too large for {dtype}")
    return taken


def _read_numbers(cells: Cells, name: str, where: Callable[[int], str]) -> Array:
    """The numbers that strings stand for, where training has met numbers."""
    if cells.codes is None:
        raise DatasetError(f"{where(0)}: the column {name!r} holds dates or times, and held numbers in training")
    numbers = np.full(len(cells.words) + 1, np.nan)
    for code, word in enumerate(words_of(cells, name, where)):
        if word.strip() in arrow().csv.ConvertOptions().null_values:
            continue
        if not NUMBER_TEXT.fullmatch(word.strip().encode()):
            row = int((cells.codes == code).argmax())
            raise DatasetError(f"{where(row)}: the column {name!r} is {word[:60]!r}, which is no number, as it was in training")
        numbers[code] = float(word)
    found: Array = numbers[cells.codes]
    if np.isinf(found).any():
        raise DatasetError(f"{where(int(np.isinf(found).argmax()))}: the column {name!r} is too large for float64")
    return found


def _hashed(words: Any, bits: int) -> Array:
    """The hashes of words, and behind them MISSING."""
    return np.append(hashes_of(words).astype(np.int64) & ((1 << bits) - 1), MISSING)
