"""Properties of the terminal, and tables that fit it by leaving out the least important columns."""

from __future__ import annotations

import itertools
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sparseallreduce.runtime.launchers import launched_ranks

__all__ = ["Column", "columns_of_terminal", "fitting", "has_terminal", "row_of", "table_lines", "titles_of", "wrapped"]


class Column(NamedTuple):
    """A column of a table."""

    key: str
    title: str
    width: int  # in characters; :func:`table_lines` finds it
    rank: int  # importance: 0 is never left out, the highest is left out first
    left: bool = False  # whether text is left-aligned
    spaced: bool = False  # whether two more blanks precede the column


def columns_of_terminal() -> int | None:
    """Return the width of the output in characters, None if it does not go to a terminal.

    Under mpiexec, where output is a pipe, the variable COLUMNS or the process's controlling terminal gives the width.
    """
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    if sys.stdout.isatty():
        return _size(sys.stdout.fileno())
    if launched_ranks() is not None and _is_pipe():
        try:
            terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        except OSError:
            return None
        try:
            return _size(terminal)
        finally:
            os.close(terminal)
    return None


def wrapped(text: str, indent: int = 0) -> str:
    """Return a text wrapped to the width of the terminal, with continuation lines indented. Long words, as paths, stay whole."""
    room = columns_of_terminal()
    if room is None:
        return text
    options: dict[str, Any] = {"subsequent_indent": " " * indent, "break_long_words": False, "break_on_hyphens": False}
    lines = ([line] if len(line) <= room else textwrap.wrap(line, max(20, room), **options) for line in text.split("\n"))
    return "\n".join(itertools.chain.from_iterable(lines))


def has_terminal() -> bool:
    """Return True if the standard error goes to a terminal, or under mpiexec to one that COLUMNS and LINES describe."""
    if sys.stderr.isatty():
        return True
    sizes = (os.environ.get(name, "") for name in ("COLUMNS", "LINES"))
    return launched_ranks() is not None and all(size.isdecimal() and int(size) > 0 for size in sizes)


def _is_pipe() -> bool:
    try:
        return not os.path.isfile(f"/dev/fd/{sys.stdout.fileno()}")
    except (OSError, ValueError):
        return False


def _size(descriptor: int) -> int | None:
    try:
        return os.get_terminal_size(descriptor).columns or None
    except OSError:
        return None


def fitting(columns: Sequence[Column], room: int | None) -> list[Column]:
    """Return the most important columns that fit into ``room`` characters, in their order; all if ``room`` is None.

    Columns of the same rank are kept or left out together.

    >>> [column.key for column in fitting([Column("a", "a", 8, 0), Column("b", "b", 8, 2), Column("c", "c", 8, 1)], 20)]
    ['a', 'c']
    """
    kept = list(columns)
    while room is not None and _width(kept) > room and any(column.rank for column in kept):
        least = max(column.rank for column in kept)
        kept = [column for column in kept if column.rank < least]
    return kept


def table_lines(columns: Sequence[Column], rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines of a table, titles first. Columns are as wide as their content; those that do not fit the terminal are left out.

    A column that is empty in all rows is left out.
    """
    held = [column for column in columns if any(row.get(column.key) for row in rows)]
    widths = [max(len(column.title), *(len(row.get(column.key, "")) for row in rows)) for column in held]
    kept = fitting([column._replace(width=width) for column, width in zip(held, widths)], columns_of_terminal())
    return [line.rstrip() for line in (titles_of(kept), *(row_of(kept, row) for row in rows))]


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width + 1 + 2 * column.spaced for column in columns) - 1


def row_of(columns: Sequence[Column], cells: Mapping[str, str]) -> str:
    """Return a line of a table, from cells by the keys of the columns; missing cells are empty."""
    texts = []
    for column in columns:
        text = cells.get(column.key, "")
        texts.append("  " * column.spaced + (f"{text:<{column.width}}" if column.left else f"{text:>{column.width}}"))
    return " ".join(texts)


def titles_of(columns: Sequence[Column]) -> str:
    """Return the header line of a table."""
    return row_of(columns, {column.key: column.title for column in columns})
