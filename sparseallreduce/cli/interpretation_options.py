"""What `weights` and `explain` share: names of features, tables of numbers, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from sparseallreduce.atomic_file import atomic_file, naming
from sparseallreduce.cli.inputs import table_arguments
from sparseallreduce.cli.report import OUTPUT_FILE, check_output
from sparseallreduce.linear.data.feature_names import feature_names, read_names, write_names
from sparseallreduce.linear.data.parts import Data
from sparseallreduce.linear.data.reading import Reading, TableReading
from sparseallreduce.linear.interpretation import class_number, shown_label
from sparseallreduce.linear.model_file import FittedModel
from sparseallreduce.runtime.objects import agreed

__all__ = [
    "STANDARD_OUTPUT",
    "Names",
    "chosen_class",
    "display_options",
    "label_of",
    "names_option",
    "table",
    "write_dictionary",
    "write_text",
]

F = TypeVar("F", bound=Callable[..., Any])

#: Stands for the terminal in options that take a file.
STANDARD_OUTPUT = "-"
_LONGEST = 36  # characters of a name in a table, so that lines have at most 80


def display_options(command: F) -> F:
    """Add ``--class``, ``--names``, ``--json`` and ``--csv``, as ``label``, ``names``, ``json_path`` and ``csv_path``."""
    of_class = click.option("--class", "label", metavar="LABEL", help="Use the score of this class instead of the default one.")
    names = click.option(
        "--names",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Dictionary of hashed features, written by `train --names` or `vw --invert_hash`.",
    )
    both: dict[str, Any] = {"type": OUTPUT_FILE, "is_flag": False, "flag_value": STANDARD_OUTPUT, "metavar": "[FILE]"}
    as_json = click.option("--json", "json_path", **both, help="Write JSON to FILE, or without FILE to the terminal instead of the table.")
    as_csv = click.option("--csv", "csv_path", **both, help="Write CSV, in the same way.")
    return of_class(names(as_json(as_csv(command))))


def names_option(command: F) -> F:
    """Add ``--names``, as ``names``, for :func:`write_dictionary`."""
    text = "File for a dictionary of hashed features (formats vw and text), for `weights --names`. Reads DATA once more."
    return click.option("--names", type=OUTPUT_FILE, help=text)(command)


def write_dictionary(path: Path, data: Data, comm: Any, features: int, chosen: dict[str, Any]) -> str:
    """Write the names of hashed features to a file on rank 0, and return a line about it; collective."""
    columns = table_arguments(chosen)
    del columns["n_features"]
    names = feature_names(data, comm, features, Reading(chosen["format"], table=TableReading(**columns)))
    agreed(comm, lambda: write_names(path, names) if comm.rank == 0 else None)
    return f"{path}: the names of {len(set(names.values())):,} features"


class Names:
    """The names of features by index: from a dictionary file if one is given, else from the model."""

    def __init__(self, model: FittedModel, path: Path | None) -> None:
        self._model = model
        self._known = {} if path is None else read_names(path)

    def __getitem__(self, index: int) -> str:
        return self._known.get(index) or self._model.name_of(index)


def chosen_class(model: FittedModel, label: str | None) -> int | None:
    """Return the number of the class with this label, None for None; raise UsageError if the model has no such class."""
    try:
        return None if label is None else class_number(model, label)
    except ValueError as error:
        raise click.UsageError(f"--class: {error}") from None


def label_of(model: FittedModel, number: int) -> str:
    """Return the label of a class as text."""
    return shown_label(model.classes.tolist()[number])


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as text: columns of text are left-aligned and shortened, numbers right-aligned with six digits."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_text = [all(isinstance(row[place], str) for row in rows) for place in range(len(header))]
    lines = (
        "  ".join(cell.ljust(width) if left else cell.rjust(width) for cell, width, left in zip(line, widths, is_text, strict=True))
        for line in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    if not isinstance(value, str):
        return f"{value:.6g}"
    text = value if value.isprintable() else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def write_text(json_path: Path | None, csv_path: Path | None, found: Any, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> bool:
    """Write JSON and CSV as requested; return True if either went to the terminal, so that no table is printed."""
    check_output(*(path for path in (json_path, csv_path) if path is not None and str(path) != STANDARD_OUTPUT))
    sheet = io.StringIO(newline="")
    csv.writer(sheet, lineterminator="\n").writerows([header, *rows])
    texts = (json_path, json.dumps(found, indent=2, ensure_ascii=False) + "\n"), (csv_path, sheet.getvalue())
    for path, text in texts:
        if path is not None and str(path) == STANDARD_OUTPUT:
            with naming("standard output"):
                click.echo(text, nl=False)
        elif path is not None:
            with atomic_file(path, "w") as file:
                file.write(text)
    return STANDARD_OUTPUT in (str(json_path), str(csv_path))
