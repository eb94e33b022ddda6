"""Encoding of the columns of a table as features, and the names of the features. It is stored in the model file.

A column has at most one non-zero in a sample. A number is a feature by itself; a string, a boolean or a category is a one in the feature of
that value; a missing value is a one in the column's last feature, if the column had missing values in training. Values that did not occur
in training are encoded as zeros.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

__all__ = ["BOOLEAN", "CATEGORY", "HASHED", "KINDS", "NUMBER", "Column", "Encoding"]

NUMBER, BOOLEAN, CATEGORY, HASHED = KINDS = ("number", "boolean", "category", "hashed")
_MOST_BITS = 30


@dataclass(frozen=True)
class Column:
    """The encoding of one column of a table.

    Examples
    --------
    >>> column = Column("color", CATEGORY, ("blue", "red"), missing=True)
    >>> [column.name_of(place) for place in range(column.width)]
    ['color=blue', 'color=red', 'color (missing)']
    """

    name: str
    kind: str = NUMBER
    categories: tuple[str, ...] = ()  # sorted; of booleans "false", "true" or one of them
    bits: int = 0  # a hashed column has 2**bits features
    missing: bool = False  # whether its last feature stands for a missing value

    def __post_init__(self) -> None:
        if self.kind not in KINDS or not 0 <= self.bits <= _MOST_BITS or (self.kind == HASHED) != (self.bits > 0):
            raise ValueError(f"there is no column of kind {self.kind!r} with {self.bits} bits")

    @property
    def width(self) -> int:
        """The number of features of the column."""
        values = 1 if self.kind == NUMBER else 1 << self.bits if self.kind == HASHED else len(self.categories)
        return values + self.missing

    def name_of(self, place: int) -> str:
        """Return the name of the column's feature number ``place``, counted from 0."""
        if self.missing and place == self.width - 1:
            return f"{self.name} (missing)"
        if self.kind == NUMBER:
            return self.name
        return f"{self.name}#{place}" if self.kind == HASHED else f"{self.name}={self.categories[place]}"


@dataclass(frozen=True)
class Encoding:
    """The encoding of all columns of a table, one :class:`Column` each.

    Parameters
    ----------
    columns : sequence of Column
        In the order of their features.
    target : str, optional
        Name of the column that holds the label.

    Examples
    --------
    >>> encoding = Encoding((Column("age", missing=True), Column("color", CATEGORY, ("blue", "red"))), target="bought")
    >>> encoding.features, encoding.name_of(3), encoding.column_of(3)
    (4, 'color=red', 'color')
    >>> list(encoding.names())
    ['age', 'age (missing)', 'color=blue', 'color=red']
    """

    columns: tuple[Column, ...]
    target: str | None = None
    #: The first feature of each column, followed by the total number of features.
    bounds: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "bounds", (0, *accumulate(column.width for column in self.columns)))

    @property
    def features(self) -> int:
        """The number of features, N."""
        return self.bounds[-1]

    def name_of(self, index: int) -> str:
        """Return the name of feature ``index``, counted from 0: ``age``, ``color=red``, ``age (missing)`` or, if hashed, ``user#123``.

        Raises
        ------
        IndexError
            If there is no such feature.
        """
        place = self._place(index)
        return self.columns[place].name_of(index - self.bounds[place])

    def column_of(self, index: int) -> str:
        """Return the name of the column that feature ``index`` belongs to. Raises the errors of :meth:`name_of`."""
        return self.columns[self._place(index)].name

    def names(self) -> Iterator[str]:
        """Yield the names of all features in order."""
        for column in self.columns:
            yield from map(column.name_of, range(column.width))

    def _place(self, index: int) -> int:
        if not 0 <= index < self.features:
            raise IndexError(f"there is no feature {index} among {self.features}")
        return int(np.searchsorted(self.bounds, index, "right")) - 1

    def to_json(self) -> str:
        """Return the encoding as JSON text, which :meth:`from_json` reads."""
        columns = [{name: value for name, value in vars(column).items() if value or name in ("name", "kind")} for column in self.columns]
        return json.dumps({"columns": columns, "target": self.target}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Encoding:
        """Return the encoding that :meth:`to_json` wrote as ``text``.

        Raises
        ------
        ValueError
            If the text is not such an encoding.
        """
        try:
            found = json.loads(text)
            return cls(tuple(map(_column, found["columns"])), _checked(found["target"], str, optional=True))
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"this is not an encoding of columns: {error}") from None


def _column(found: dict[str, Any]) -> Column:
    categories = tuple(_checked(each, str) for each in found.get("categories", ()))
    if list(categories) != sorted(set(categories)):
        raise ValueError(f"the categories of the column {found['name']!r} are not sorted")
    bits, missing = _checked(found.get("bits", 0), int), _checked(found.get("missing", False), bool)
    return Column(_checked(found["name"], str), _checked(found["kind"], str), categories, bits, missing)


def _checked(value: Any, kind: type, optional: bool = False) -> Any:
    if not isinstance(value, kind) and not (optional and value is None):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
