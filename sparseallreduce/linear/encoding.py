"""How columns of a table become features, and what the features are called: it travels with a model, so that others are encoded alike.

A column has at most one non-zero in a sample. A number is a feature itself; a string, a boolean or a category is a one in the feature
that stands for it; a missing value is a one in the column's last feature, if the column had such in training. What training has not
seen is zero.
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
    """How one column of a table is encoded.

    Examples
    --------
    >>> column = Column("color", CATEGORY, ("blue", "red"), missing=True)
    >>> [column.name_of(place) for place in range(column.width)]
    ['color=blue', 'color=red', 'color (missing)']
    """

    name: str
    kind: str = NUMBER
    categories: tuple[str, ...] = ()  # sorted; of booleans "false", "true" or one of them
    bits: int = 0  # of a hashed column: it has two to the power of it features
    missing: bool = False  # whether its last feature says that the value is missing

    def __post_init__(self) -> None:
        if self.kind not in KINDS or not 0 <= self.bits <= _MOST_BITS or (self.kind == HASHED) != (self.bits > 0):
            raise ValueError(f"there is no column of kind {self.kind!r} with {self.bits} bits")

    @property
    def width(self) -> int:
        """Number of its features."""
        values = 1 if self.kind == NUMBER else 1 << self.bits if self.kind == HASHED else len(self.categories)
        return values + self.missing

    def name_of(self, place: int) -> str:
        """Return the name of one of its features, counted from 0."""
        if self.missing and place == self.width - 1:
            return f"{self.name} (missing)"
        if self.kind == NUMBER:
            return self.name
        return f"{self.name}#{place}" if self.kind == HASHED else f"{self.name}={self.categories[place]}"


@dataclass(frozen=True)
class Encoding:
    """How the columns of a table become features, column by column.

    Parameters
    ----------
    columns : sequence of Column
        In the order of their features.
    target : str, optional
        The column that was the label.

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
    #: The first feature of each column, and behind them the number of all.
    bounds: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "bounds", (0, *accumulate(column.width for column in self.columns)))

    @property
    def features(self) -> int:
        """Dimension N."""
        return self.bounds[-1]

    def name_of(self, index: int) -> str:
        """Return the name of a feature, counted from 0, such as ``age``, ``color=red``, ``age (missing)`` or, hashed, ``user#123``.

        Raises
        ------
        IndexError
            If there is no such feature.
        """
        place = self._place(index)
        return self.columns[place].name_of(index - self.bounds[place])

    def column_of(self, index: int) -> str:
        """Return the name of the column that a feature belongs to; raises as :meth:`name_of`."""
        return self.columns[self._place(index)].name

    def names(self) -> Iterator[str]:
        """Yield the names of all features in their order."""
        for column in self.columns:
            yield from map(column.name_of, range(column.width))

    def _place(self, index: int) -> int:
        if not 0 <= index < self.features:
            raise IndexError(f"there is no feature {index} among {self.features}")
        return int(np.searchsorted(self.bounds, index, "right")) - 1

    def to_json(self) -> str:
        """Return a text of which :meth:`from_json` makes the same again."""
        columns = [
            {name: value for name, value in vars(column).items() if value or name in ("name", "kind")} for column in self.columns
        ]
        return json.dumps({"columns": columns, "target": self.target}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Encoding:
        """Return the encoding that :meth:`to_json` has written.

        Raises
        ------
        ValueError
            If the text is no such.
        """
        try:
            found = json.loads(text)
            return cls(tuple(map(_column, found["columns"])), _checked(found["target"], str, optional=True))
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"this is no encoding of columns: {error}") from None


def _column(found: dict[str, Any]) -> Column:
    categories = tuple(_checked(each, str) for each in found.get("categories", ()))
    if list(categories) != sorted(set(categories)):
        raise ValueError(f"the categories of the column {found['name']!r} are not sorted")
    bits, missing = _checked(found.get("bits", 0), int), _checked(found.get("missing", False), bool)
    return Column(_checked(found["name"], str), _checked(found["kind"], str), categories, bits, missing)


def _checked(value: Any, kind: type, optional: bool = False) -> Any:
    if not isinstance(value, kind) and not (optional and value is None):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
