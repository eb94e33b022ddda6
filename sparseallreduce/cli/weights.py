"""`sparseallreduce weights`: show the largest weights of a model file, by the names of their features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sparseallreduce.cli.interpretation_options import Names, chosen_class, display_options, label_of, table, write_text
from sparseallreduce.cli.numbers import Whole
from sparseallreduce.linear.interpretation import largest_weights
from sparseallreduce.linear.model_file import FittedModel, load_model


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--top", type=Whole(min=0), default=20, show_default=True, help="Number of weights; 0 for all that are not zero.")
@display_options
def weights(model: Path, top: int, label: str | None, names: Path | None, json_path: Path | None, csv_path: Path | None) -> None:
    """Show the weights of MODEL by the names of their features, the largest magnitude first.

    Features are named after the columns of the training table, by a dictionary of words (--names), or by the indices of the svmlight text;
    otherwise by numbers from 0. A positive weight is evidence for a class: with two classes for the second, with more for the one in the
    same row. Weights of features in different units cannot be compared.
    """
    fitted = load_model(model)
    number = chosen_class(fitted, label)
    called = Names(fitted, names)
    found = largest_weights(fitted, top or None, number)
    several = len(fitted.classes) > 2
    header = ["feature", *(["class"] if several else []), "weight"]
    rows: list[list[Any]] = [[called[each.feature], *([label_of(fitted, each.number)] if several else []), each.weight] for each in found]
    shown = [
        {"feature": called[each.feature], "index": each.feature, "weight": each.weight}
        | ({"class": label_of(fitted, each.number)} if len(fitted.classes) else {})
        for each in found
    ]
    report = {
        "schema": 1,
        "command": "weights",
        "model": fitted.model,
        "features": fitted.n_features,
        "classes": fitted.classes.tolist(),
        "intercept": _intercepts(fitted, number),
        "weights": shown,
    }
    if not write_text(json_path, csv_path, report, header, rows):
        click.echo(_heading(fitted, number))
        click.echo(table(header, rows) if rows else "all weights are zero")


def _heading(model: FittedModel, number: int | None) -> str:
    """Return the heading: the model, the class if there is one, and the intercept."""
    kind = f"{model.model}, {model.n_features:,} features"
    intercepts = _intercepts(model, number)
    if len(model.classes) == 2:
        favours = label_of(model, 1 if number is None else number)
        return f"{kind}; the score of class {favours}, intercept {intercepts:.6g}"
    if len(model.classes) > 2 and number is not None:
        return f"{kind}; the score of class {label_of(model, number)}, intercept {intercepts:.6g}"
    return f"{kind}, {len(model.classes)} classes" if len(model.classes) else f"{kind}; intercept {intercepts:.6g}"


def _intercepts(model: FittedModel, number: int | None) -> Any:
    """Return the intercept of the score; those of all scores if there are several and no class is chosen."""
    intercept: Any = model.intercept
    if intercept.ndim:
        return intercept.tolist() if number is None else float(intercept[number])
    return -float(intercept) if number == 0 and len(model.classes) == 2 else float(intercept)
