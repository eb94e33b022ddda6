"""Batches of rows from a reader of tables, and the choice of columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.reading import TableReading, naming_option

__all__ = ["CUSTOMARY", "Batch", "Chosen", "choose", "listed"]

_SHOWN = 12  # largest number of columns that an error lists
#: Names of the column of labels that are used by default.
CUSTOMARY = ("label", "target")


class Chosen(NamedTuple):
    """The columns of a table to use."""

    features: tuple[str, ...]
    target: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all columns, the target last."""
        return self.features if self.target is None else (*self.features, self.target)


class Batch(NamedTuple):
    """Consecutive rows of a table, column by column."""

    columns: list[Any]  # Arrow arrays of the chosen columns, in order
    rows: int
    where: Callable[[int], str]  # function that returns the location of a row, for errors


def choose(names: Sequence[str], reading: TableReading, source: object, unlabelled: bool) -> Chosen:
    """Return the columns of a table that are features, and the target.

    Parameters
    ----------
    names : sequence of str
        Names of all columns.
    reading : TableReading
    source
        Name of the table in errors.
    unlabelled : bool
        Whether the target may be missing.

    Raises
    ------
    DatasetError
        If a named column is missing or occurs twice, the target is unknown, or no features are left.
    """
    known = set(names)
    target = _target(names, reading, source, unlabelled)
    features = _features(names, reading, target)
    named = features if reading.encoding is not None else dict.fromkeys((*features, *reading.drop, *reading.categorical))
    missing = [name for name in named if name not in known]
    if missing:
        lacks = f"there is no column {listed(missing)}" if len(missing) == 1 else f"there are no columns {listed(missing)}"
        why = "which the model was trained on, " if reading.encoding is not None else ""
        raise DatasetError(f"{source}: {lacks}, {why}but {listed(names)}")
    if target is not None and target in features:
        raise DatasetError(f"{source}: the column {target!r} cannot be both the target and a feature")
    if not features and not unlabelled:
        raise DatasetError(f"{source}: no column is left to be a feature: there are {listed(names)}")
    counts = Counter(names)
    twice = next((name for name in Chosen(features, target).names if counts[name] > 1), None)
    if twice is not None:
        message = f"{source}: {counts[twice]} columns are called {twice!r}: rename them, or leave them out by {{option}}"
        raise naming_option(message, "drop", "--drop")
    return Chosen(features, target)


def _features(names: Sequence[str], reading: TableReading, target: str | None) -> tuple[str, ...]:
    """Return the names of the features, each once."""
    if reading.encoding is not None:
        return tuple(column.name for column in reading.encoding.columns)
    offered = [name for name in names if name != target] if reading.features is None else reading.features
    return tuple(dict.fromkeys(name for name in offered if name not in reading.drop))


def _target(names: Sequence[str], reading: TableReading, source: object, unlabelled: bool) -> str | None:
    encoded = None if reading.encoding is None else reading.encoding.target
    if reading.target is not None:
        if reading.target in names:
            return reading.target
        if unlabelled and reading.target == encoded:
            return None
        raise DatasetError(f"{source}: there is no column {reading.target!r} to be the target, but {listed(names)}")
    if encoded is not None and (encoded in names or unlabelled):
        return encoded if encoded in names else None
    found = [name for name in dict.fromkeys(names) if name.lower() in CUSTOMARY and name not in (*(reading.features or ()), *reading.drop)]
    if len(found) == 1 and reading.encoding is None:
        return found[0]
    if unlabelled:
        return None
    message = f"{source}: name the column of labels by {{option}}: there are {listed(names)}"
    raise naming_option(message, "target", "--target")


def listed(names: Sequence[str]) -> str:
    """Return a list of column names as text.

    >>> listed(["a", "b", "c"])
    "'a', 'b' and 'c'"
    """
    shown = [repr(name) for name in names[:_SHOWN]]
    if len(names) > _SHOWN:
        return f"{', '.join(shown)} and {len(names) - _SHOWN} more"
    return " and ".join([*filter(None, [", ".join(shown[:-1])]), *shown[-1:]])
