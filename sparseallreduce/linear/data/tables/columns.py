"""Type and categories of a column, found on one rank while reading, and combined over all ranks.

The values of a column of strings are stored as positions in a list of words, in the order in which this rank has found them. At the end the
ranks merge their words, sort them, and renumber; a column with too many words is hashed instead. So the encoding depends only on
the table.
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

UNSEEN = -2  # code of a word that is not a known category
_INFINITE = "infinite"  # kind of labels all of which are infinite


class Stored(NamedTuple):
    """Values of a column in the form in which they are kept until all of it has been read."""

    numbers: Array | None = None  # NaN if missing
    codes: Array | None = None  # int32 or int64, MISSING, or UNSEEN
    hashed: bool = False  # whether codes are hashes instead of positions of words


class Found(NamedTuple):
    """Type and categories of a column found by one rank."""

    kinds: dict[str, str]  # the types; for dates with the location of the first row, for errors
    missing: bool
    words: list[str] | None  # None if there are too many
    fault: str = ""  # the fault if the column is numeric


class LearnedColumn:
    """A column whose type and categories are to be determined.

    Parameters
    ----------
    name : str
    limit : int
        Largest number of categories; with more it is hashed.
    bits : int
        Number of bits of the hashes.
    dtype : dtype
        Data type of its numbers.
    """

    name: str
    bits: int

    def __init__(self, name: str, limit: int, bits: int, dtype: np.dtype[Any]) -> None:
        self.name, self.bits = name, bits
        self._limit, self._dtype = limit, dtype
        self._kinds: dict[str, str] = {}
        self._missing = False
        self._places: dict[str, int] = {}
        self._too_many = False
        self._fault = ""

    def take(self, cells: Cells, where: Callable[[int], str]) -> Stored:
        """Record type and categories of some cells, and return the cells in stored form."""
        self._missing |= cells.is_missing
        if cells.kind != NOTHING and cells.kind not in self._kinds:
            self._kinds[cells.kind] = where(0) if cells.kind == DATE else ""  # computing a location reads all lines before it
        if cells.numbers is not None:
            try:
                return Stored(numbers=_of_dtype(cells, self._dtype, self.name, where))
            except DatasetError as error:  # other rows of the column may be strings
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
        """Return type and categories of all cells."""
        return Found(self._kinds, self._missing, None if self._too_many else sorted(self._places), self._fault)

    def final(self, stored: Stored, column: Column) -> Stored:
        """Return stored values with the codes of the common encoding."""
        if stored.codes is None or stored.hashed:
            return stored
        return Stored(codes=self._finals(column)[stored.codes])

    def _finals(self, column: Column) -> Array:
        """Return the position of each word of this rank in the column, followed by MISSING."""
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
    """A column with a known encoding."""

    name: str

    def __init__(self, column: Column, dtype: np.dtype[Any]) -> None:
        self.name, self._column, self._dtype = column.name, column, dtype
        self._places = {category: place for place, category in enumerate(column.categories)}

    @property
    def is_text(self) -> bool:
        """True if its values are strings, whatever they look like."""
        return self._column.kind in (CATEGORY, HASHED)

    def take(self, cells: Cells, where: Callable[[int], str]) -> Stored:
        """Return cells in encoded form; raise DatasetError if they should be numbers but are not."""
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
        """Return stored values unchanged."""
        return stored


@dataclass
class _Kinds:
    """Types of a column on all ranks."""

    first: dict[str, str]
    missing: bool


def _merged(ranks: list[Found]) -> _Kinds:
    kinds: dict[str, str] = {}
    for found in ranks:
        for kind, where in found.kinds.items():
            kinds.setdefault(kind, where)
    return _Kinds(kinds, any(found.missing for found in ranks))


def mixed(ranks: list[Found]) -> bool:
    """Return True if a column has several types, so that it must be read as strings."""
    return len(_merged(ranks).first) > 1


def agreed_column(name: str, ranks: list[Found], limit: int, bits: int) -> Column:
    """Return the encoding of a column, given what each rank has found, which must be of one type.

    Raises
    ------
    DatasetError
        If it holds dates.
    """
    merged = _merged(ranks)
    kind = next(iter(merged.first), NOTHING)
    if kind == DATE:
        message = f"{merged.first[kind]}: the column {name!r} holds dates or times, which cannot be features"
        remedy = "convert them to numbers, such as days since a date; or leave them out, or make each a category, by {option}"
        raise naming_option(f"{message}: {remedy}", f"drop=[{name!r}] or categorical=[{name!r}]", f"--drop {name} or --categorical {name}")
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
    """The labels of a table: numbers, or class names.

    Parameters
    ----------
    name : str
    unlabelled : bool
        Whether labels may be missing.
    """

    name: str

    def __init__(self, name: str, unlabelled: bool) -> None:
        self.name, self._unlabelled = name, unlabelled
        self._kinds: dict[str, str] = {}
        self.places: dict[str, int] = {}
        self._example = self._fault = ""
        self._where: Callable[[], str] = str  # function that returns the location of the example, for errors

    def take(self, cells: Cells, rows: int, where: Callable[[int], str]) -> Array:
        """Return the labels of cells as float64: numbers, or positions among the names so far; NaN if missing."""
        if cells.is_missing and not self._unlabelled:
            raise DatasetError(f"{where(first_missing(cells))}: the target {self.name!r} is missing")
        if cells.kind == DATE:
            raise DatasetError(f"{where(0)}: the target {self.name!r} holds dates or times, but must be numbers or names of classes")
        self._fault = self._fault or cells.fault
        if cells.numbers is not None:
            if np.isfinite(cells.numbers).any():
                self._kinds[NUMBER] = ""
            elif cells.fault:  # a name, if other labels are names
                self._kinds[_INFINITE] = ""
            return cells.numbers
        if cells.kind != NOTHING:
            self._kinds[cells.kind] = ""
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
        """Return type and names of all labels."""
        return Found(self._kinds, False, list(self.places), self._fault)

    def names(self, ranks: list[Found], as_text: bool) -> list[str] | None:
        """Return the sorted class names, given what each rank has found; None if labels are numbers.

        Raises
        ------
        DatasetError
            If some are numbers and some are names, on a rank that has such a name; if a number is not finite.
        """
        merged = _merged(ranks)
        if not set(merged.first) - {NUMBER, _INFINITE}:
            if fault := next((found.fault for found in ranks if found.fault), ""):
                raise DatasetError(fault)
            return None
        words = set().union(*(found.words or () for found in ranks))
        numbers = NUMBER in merged.first or any(NUMBER_TEXT.fullmatch(word.encode()) for word in words)
        if numbers and self._example and not as_text:
            message = f"{self._where()}: the target {self.name!r} is {self._example!r}, but others are numbers: labels are all numbers or"
            raise naming_option(message + " all names; {option} reads all as names", "categorical", "--categorical")
        return sorted(words)


def _of_dtype(cells: Cells, dtype: np.dtype[Any], name: str, where: Callable[[int], str]) -> Array:
    """Return the numbers of cells; raise DatasetError if one is not finite."""
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
    """Return the numbers in strings, for a column that had numbers in training."""
    if cells.codes is None:
        raise DatasetError(f"{where(0)}: the column {name!r} holds dates or times, but held numbers in training")
    numbers = np.full(len(cells.words) + 1, np.nan)
    for code, word in enumerate(words_of(cells, name, where)):
        if word.strip() in arrow().csv.ConvertOptions().null_values:
            continue
        if not NUMBER_TEXT.fullmatch(word.strip().encode()):
            row = int((cells.codes == code).argmax())
            raise DatasetError(f"{where(row)}: the column {name!r} is {word[:60]!r}, which is not a number, as it was in training")
        numbers[code] = float(word)
    found: Array = numbers[cells.codes]
    if np.isinf(found).any():
        raise DatasetError(f"{where(int(np.isinf(found).argmax()))}: the column {name!r} is too large for float64")
    return found


def _hashed(words: Any, bits: int) -> Array:
    """Return the hashes of words, followed by MISSING."""
    return np.append(hashes_of(words).astype(np.int64) & ((1 << bits) - 1), MISSING)
