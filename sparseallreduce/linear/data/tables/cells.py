"""The values of a column by Arrow type: numbers, booleans, strings, dates, or only missing values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.reading import naming_option
from sparseallreduce.linear.data.tables.extra import arrow
from sparseallreduce.linear.encoding import BOOLEAN, NUMBER

__all__ = [
    "BOOLEAN",
    "BOOLEANS",
    "DATE",
    "MISSING",
    "NOTHING",
    "NUMBER",
    "TEXT",
    "Cells",
    "cells_of",
    "first_missing",
    "numbers_of",
    "words_of",
]

Array = NDArray[Any]

TEXT, DATE, NOTHING = "text", "date", "nothing"
MISSING = -1  # code of a missing value
BOOLEANS = ("false", "true")


class Cells(NamedTuple):
    """The values of a column in some rows, as numbers or as words."""

    kind: str
    numbers: Array | None = None  # float64, NaN if missing
    codes: Array | None = None  # int64, position of each value's word; MISSING if it has none
    words: Any = None  # Arrow array of strings, all of which occur
    is_missing: bool = False  # whether a value is missing
    fault: str = ""  # the fault if the column is numeric; no fault if other values of the column are strings


def cells_of(array: Any, name: str, where: Callable[[int], str], as_text: bool = False) -> Cells:
    """Return the values of a column.

    Parameters
    ----------
    array : pyarrow.Array
    name : str
        Name of the column.
    where : callable
        Function that returns the location of a row, for errors.
    as_text : bool
        Whether to treat values as strings, whatever their type.

    Raises
    ------
    DatasetError
        If values of the type cannot be features.
    """
    pyarrow = arrow()
    types, kind = pyarrow.types, array.type
    if array.null_count == len(array):
        return Cells(NOTHING, is_missing=len(array) > 0)
    if types.is_dictionary(kind):
        return _words(array.indices, _as_text(array.dictionary, name))
    if as_text or _is_text(types, kind):
        encoded = _as_text(array, name).dictionary_encode()
        return _words(encoded.indices, encoded.dictionary)
    if types.is_boolean(kind):
        codes = array.cast(pyarrow.int64()).fill_null(MISSING).to_numpy(zero_copy_only=False)
        return _used(BOOLEAN, codes, pyarrow.array(BOOLEANS))
    if types.is_temporal(kind):
        return Cells(DATE, is_missing=array.null_count > 0)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return _numbers(numbers_of(array), name, where)
    message = f"{where(0)}: the column {name!r} holds {kind}, which is not a number, string or boolean: leave it out by {{option}}"
    raise naming_option(message, "drop", "--drop")


def numbers_of(array: Any) -> Array:
    """Return the numbers of an Arrow array as float64, NaN if missing."""
    numbers: Array = array.cast(arrow().float64(), safe=False).to_numpy(zero_copy_only=False)
    return numbers


def _numbers(numbers: Array, name: str, where: Callable[[int], str]) -> Cells:
    infinite, fault = np.isinf(numbers), ""
    if infinite.any():
        row = int(infinite.argmax())
        fault = f"{where(row)}: the column {name!r} is {numbers[row]}, which is not finite"
    missing = np.isnan(numbers)
    return Cells(NOTHING if missing.all() else NUMBER, numbers, is_missing=bool(missing.any()), fault=fault)


def _is_text(types: Any, kind: Any) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _as_text(array: Any, name: str) -> Any:
    """Return an array as strings; if all floats are whole, as integers with missing values become, without a fraction."""
    pyarrow = arrow()
    types, kind = pyarrow.types, array.type
    if types.is_floating(kind):
        whole = pyarrow.compute.all(pyarrow.compute.equal(pyarrow.compute.trunc(array), array)).as_py()
        if whole and pyarrow.compute.max(pyarrow.compute.abs(array)).as_py() < 2**53:
            array = array.cast(pyarrow.int64())
    try:
        return array.cast(pyarrow.string())
    except (pyarrow.ArrowException, ValueError):
        message = f"the column {name!r} holds {kind}, of which there is no text: leave it out by {{option}}"
        raise naming_option(message, "drop", "--drop") from None


def _words(indices: Any, words: Any) -> Cells:
    """Return cells for positions among words; missing and empty words are missing values."""
    pyarrow = arrow()
    codes = indices.cast(pyarrow.int64()).fill_null(MISSING).to_numpy(zero_copy_only=False)
    empty = pyarrow.compute.equal(pyarrow.compute.fill_null(words, ""), "").to_numpy(zero_copy_only=False)
    if empty.any():
        codes = np.where(np.append(empty, False)[codes], MISSING, codes)
    return _used(TEXT, codes, words)


def _used(kind: str, codes: Array, words: Any) -> Cells:
    """Return cells with only those words that occur."""
    occurs = np.zeros(len(words) + 1, bool)
    occurs[codes] = True
    missing = bool(occurs[-1])
    if occurs[:-1].all():
        return Cells(kind, codes=codes, words=words, is_missing=missing)
    kept = np.flatnonzero(occurs[:-1])
    if not len(kept):
        return Cells(NOTHING, is_missing=True)
    places = np.full(len(words) + 1, MISSING)
    places[kept] = np.arange(len(kept))
    return Cells(kind, codes=places[codes], words=words.take(arrow().array(kept)), is_missing=missing)


def words_of(cells: Cells, name: str, where: Callable[[int], str]) -> list[str]:
    """Return the words of cells; raise DatasetError if one is not UTF-8, as in a damaged file."""
    try:
        return list(cells.words.to_pylist())
    except UnicodeDecodeError as error:
        raise DatasetError(f"{where(0)} or one after it: the column {name!r} is not UTF-8: {error.reason}") from None


def first_missing(cells: Cells) -> int:
    """Return the first row with a missing value."""
    if cells.numbers is not None:
        return int(np.isnan(cells.numbers).argmax())
    return 0 if cells.codes is None else int((cells.codes == MISSING).argmax())
