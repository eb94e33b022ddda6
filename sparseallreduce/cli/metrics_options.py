"""The option `--metrics`, and functions that format metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click
import numpy as np

from sparseallreduce.cli.parameter import Parameter
from sparseallreduce.linear.metrics import METRICS, TOP, chosen_metrics
from sparseallreduce.linear.model_file import FittedModel

__all__ = ["ALL", "asked_metrics", "metrics_lines", "metrics_option", "metrics_record"]

F = TypeVar("F", bound=Callable[..., Any])

#: Stands for all metrics of a model.
ALL = "all"

_WIDE = 12  # classes, the most whose confusion matrix fits a terminal


class MetricNames(Parameter):
    """Names of metrics separated by commas, or "all"; the command gets a tuple."""

    name = "NAME,NAME"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> tuple[str, ...]:
        names = tuple(name.strip() for name in value.split(",") if name.strip()) if isinstance(value, str) else tuple(value)
        if not names:
            self.fail(f"no metric given: use all, or some of {', '.join(METRICS)}", parameter, context)
        for name in names:
            if name != ALL and (name not in METRICS or name == "top_K_accuracy") and not TOP.fullmatch(name):
                listed = f"use all, or some of {', '.join(METRICS)}, with a number for K"
                self.fail(f"there is no metric {name!r}: {listed}", parameter, context)
        return names


def metrics_option(of: str) -> Callable[[F], F]:
    """Return the option ``--metrics``, as ``metrics``."""
    return click.option(
        "--metrics",
        type=MetricNames(),
        help=f"Show metrics of {of}: all, or some of {', '.join(METRICS)}, separated by commas. --json contains all of them by default.",
    )


def asked_metrics(model: FittedModel, asked: Sequence[str] | None) -> list[str]:
    """Return the names of the metrics to measure; by default all that the model has.

    Raises
    ------
    click.UsageError
        If the model does not have a metric.
    """
    try:
        return chosen_metrics(model, None if asked in (None, (ALL,)) else asked)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def metrics_lines(found: Mapping[str, Any], model: FittedModel) -> str:
    """Return metrics as lines of a name and a value, followed by the confusion matrix."""
    width = max(map(len, found), default=0)
    lines = [f"{name:{width}}  {_shown(value)}" for name, value in found.items() if name != "confusion_matrix"]
    if "confusion_matrix" in found:
        lines += _matrix_lines(found["confusion_matrix"], list(map(_label, model.classes.tolist())))
    return "\n".join(lines)


def metrics_record(found: Mapping[str, Any], model: FittedModel) -> dict[str, Any]:
    """Return metrics for --json, with the labels of the confusion matrix's rows."""
    labels = {"labels": model.classes.tolist()} if "confusion_matrix" in found else {}
    return dict(found) | labels


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _label(label: Any) -> str:
    return str(label).removesuffix(".0") if isinstance(label, float) else str(label)


def _matrix_lines(matrix: np.ndarray, labels: list[str]) -> list[str]:
    if len(labels) > _WIDE:
        return [f"confusion_matrix: of {len(labels)} classes, see --json"]
    cells = [["true \\ predicted", *labels], *([label, *map(_cell, row)] for label, row in zip(labels, matrix.tolist()))]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["confusion_matrix:", *("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in cells)]


def _cell(weight: float) -> str:
    return f"{weight:,}" if isinstance(weight, int) else f"{weight:.6g}"
