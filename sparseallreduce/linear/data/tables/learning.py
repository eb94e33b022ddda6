"""Determining the encoding of a table over all ranks, and encoding its rows.

Each rank reads its rows once, and stores numbers as they are and strings as positions in a list of words. Then the ranks agree on types
and categories. A column with numbers in some blocks and strings in others is read again, as strings.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.blocks import Block
from sparseallreduce.linear.data.line_blocks import NUMBER as NUMBER_TEXT
from sparseallreduce.linear.data.reading import TableReading
from sparseallreduce.linear.data.tables.batches import Batch, Chosen
from sparseallreduce.linear.data.tables.cells import NUMBER, cells_of
from sparseallreduce.linear.data.tables.columns import (
    Found,
    KnownColumn,
    LearnedColumn,
    Stored,
    TargetColumn,
    agreed_column,
    mixed,
)
from sparseallreduce.linear.data.tables.rows import block_of
from sparseallreduce.linear.encoding import CATEGORY, HASHED, Encoding
from sparseallreduce.runtime.objects import agreed, gather

__all__ = ["Learned", "learn", "remarks_on"]

Array = NDArray[Any]
#: A function that reads this rank's rows, the given columns as strings.
Reader = Callable[[frozenset[str]], Generator[Batch]]


class Learned(NamedTuple):
    """A table that all ranks have read."""

    encoding: Encoding
    names: list[str] | None  # sorted class names, if labels are names
    blocks: Generator[Block]  # this rank's rows; labels that are names are positions in ``names``


class _Pass(NamedTuple):
    """The result of a pass over this rank's rows."""

    columns: list[Any]  # LearnedColumn or KnownColumn
    target: TargetColumn | None
    kept: list[tuple[list[Stored], Array]]  # values and labels of each batch, in reverse order


def learn(
    read: Reader, chosen: Chosen, comm: Any, reading: TableReading, *, bits: int, unlabelled: bool, dtype: np.dtype[Any], keep: bool
) -> Learned:
    """Determine the encoding of a table, and encode it. Collective over ``comm``.

    Parameters
    ----------
    read : callable
    chosen : Chosen
        Columns in each batch.
    reading : TableReading
    bits : int
        Number of bits to which columns of too many categories are hashed.
    unlabelled : bool
        Whether labels may be missing; they are then NaN.
    dtype : dtype
        Data type of the values.
    keep : bool
        Whether to keep rows in memory; otherwise they are read again for the blocks.

    Raises
    ------
    DatasetError
        On every rank, with the row and the column of the fault. From the blocks, if they are read again, only on the rank that reads it.
    """
    known = reading.encoding
    texts = frozenset(reading.categorical)
    if known is not None:
        texts |= {column.name for column in known.columns if column.kind in (CATEGORY, HASHED)}
    while True:
        done = _go_over_all(read(texts), comm, chosen, reading, texts, bits, unlabelled, dtype, keep)
        own = [None if known is not None else [column.found() for column in done.columns], done.target and done.target.found()]
        ranks: Any = gather(comm, own)
        again = _of_several_kinds(chosen, ranks, texts)
        if not again:
            break
        texts |= again
    encoding = known or agreed(comm, lambda: _encoding(chosen, ranks, reading, bits))
    names = agreed(comm, lambda: _names(done.target, ranks, texts))
    if keep:
        return Learned(encoding, names, _from_kept(done, encoding, names, dtype))
    columns = [KnownColumn(column, dtype) for column in encoding.columns]
    texts |= {column.name for column in columns if column.is_text}
    target = None if chosen.target is None else TargetColumn(chosen.target, unlabelled)
    return Learned(encoding, names, _read_anew(read(texts), columns, target, encoding, names, texts, dtype))


def _go_over_all(batches: Generator[Batch], comm: Any, *given: Any) -> _Pass:
    """Process the rows of all ranks. Collective."""
    return agreed(comm, lambda: _go_over(batches, *given))


def _go_over(
    batches: Generator[Batch],
    chosen: Chosen,
    reading: TableReading,
    texts: frozenset[str],
    bits: int,
    unlabelled: bool,
    dtype: np.dtype[Any],
    keep: bool,
) -> _Pass:
    """Process this rank's rows."""
    columns: list[Any]
    if reading.encoding is None:
        columns = [LearnedColumn(name, reading.max_categories, bits, dtype) for name in chosen.features]
    else:
        columns = [KnownColumn(column, dtype) for column in reading.encoding.columns]
    target = None if chosen.target is None else TargetColumn(chosen.target, unlabelled)
    kept = []
    with closing(batches):
        for batch in batches:
            taken = _taken(batch, columns, target, texts)
            if keep:
                kept.append(taken)
    return _Pass(columns, target, kept[::-1])


def _taken(batch: Batch, columns: list[Any], target: TargetColumn | None, texts: frozenset[str]) -> tuple[list[Stored], Array]:
    stored = []
    for column, array in zip(columns, batch.columns):
        stored.append(column.take(cells_of(array, column.name, batch.where, column.name in texts), batch.where))
    if target is None:
        return stored, np.full(batch.rows, np.nan)
    cells = cells_of(batch.columns[-1], target.name, batch.where, target.name in texts)
    return stored, target.take(cells, batch.rows, batch.where)


def _of_several_kinds(chosen: Chosen, ranks: list[tuple[list[Found] | None, Found | None]], texts: frozenset[str]) -> frozenset[str]:
    """Return the columns that have to be read again as strings."""
    again = set()
    if ranks[0][0] is not None:
        again |= {name for place, name in enumerate(chosen.features) if mixed([features[place] for features, _ in ranks if features])}
    targets = [target for _, target in ranks if target is not None]
    if chosen.target is not None and mixed(targets) and not any(NUMBER in target.kinds for target in targets):
        again.add(chosen.target)
    return frozenset(again) - texts


def _encoding(chosen: Chosen, ranks: list[tuple[list[Found], Found | None]], reading: TableReading, bits: int) -> Encoding:
    columns = (
        agreed_column(name, [features[place] for features, _ in ranks], reading.max_categories, bits)
        for place, name in enumerate(chosen.features)
    )
    return Encoding(tuple(columns), chosen.target)


def _names(own: TargetColumn | None, ranks: list[tuple[Any, Found | None]], texts: frozenset[str]) -> list[str] | None:
    return None if own is None else own.names([target for _, target in ranks if target is not None], own.name in texts)


def _from_kept(done: _Pass, encoding: Encoding, names: list[str] | None, dtype: np.dtype[Any]) -> Generator[Block]:
    """Yield rows of stored values, which are released on the way."""
    while done.kept:
        values, labels = done.kept.pop()
        final = [column.final(stored, how) for column, stored, how in zip(done.columns, values, encoding.columns)]
        yield block_of(final, encoding, _final_labels(labels, done.target, names), dtype)


def _read_anew(
    batches: Generator[Batch],
    columns: list[Any],
    target: TargetColumn | None,
    encoding: Encoding,
    names: list[str] | None,
    texts: frozenset[str],
    dtype: np.dtype[Any],
) -> Generator[Block]:
    """Yield rows that are read again."""
    with closing(batches):
        for batch in batches:
            values, labels = _taken(batch, columns, target, texts)
            yield block_of(values, encoding, _final_labels(labels, target, names), dtype)


def _final_labels(labels: Array, target: TargetColumn | None, names: list[str] | None) -> Array:
    """Return labels as numbers, or as positions among the names of all ranks."""
    if target is None or names is None:
        return labels
    places = np.searchsorted(np.array(names, object), list(target.places)).astype(np.float64)
    named = ~np.isnan(labels)
    final = np.full(len(labels), np.nan)
    final[named] = places[labels[named].astype(np.int64)]
    return final


def remarks_on(encoding: Encoding, categorical: tuple[str, ...]) -> list[str]:
    """Return messages on columns of an encoding that may surprise: hashed ones, and those that are nearly all numbers."""
    remarks = []
    for column in encoding.columns:
        if column.kind == HASHED:
            size = f"{1 << column.bits:,} features"
            remarks.append(f"the column {column.name!r} has too many categories to name them, and is hashed to {size}")
        elif column.kind == CATEGORY and column.name not in categorical:
            others = [word for word in column.categories if not NUMBER_TEXT.fullmatch(word.encode())]
            if 0 < len(others) < len(column.categories) / 2:
                most = f"all but {len(others)} of its {len(column.categories):,} values are numbers: {others[0][:40]!r} is not"
                remarks.append(f"the column {column.name!r} is read as categories, although {most}")
    return remarks
