"""The content of pictures as plain values that JSON can represent: lines, stacked bars, dots with whiskers, and maps of categories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "BYTES",
    "COUNT",
    "RANKS",
    "SECONDS",
    "SHARE",
    "AnyPanel",
    "Bars",
    "Dots",
    "Grid",
    "Kind",
    "Line",
    "Panel",
    "Picture",
    "Quantity",
    "panel_of",
]

Unit = Literal["", "s", "B", "B/s", "share", "count", "ranks", "whole"]
Kind = Literal["measured", "simulated", "model"]
Number = float | None


@dataclass(frozen=True)
class Quantity:
    """The quantity on an axis. Ticks have the unit, so ``name`` does not."""

    name: str
    unit: Unit = ""
    log: bool = True


SECONDS = Quantity("time", "s")
BYTES = Quantity("bytes sent", "B")
SHARE = Quantity("density of each rank's entries", "share")
RANKS = Quantity("ranks, P", "ranks")
COUNT = Quantity("dimension, N", "count")


@dataclass
class Line:
    """A line. Lines with the same label have the same colour and marker in all panels of a picture.

    ``low`` and ``high`` are quartiles. ``kind`` sets the style: measured solid, simulated dashed, model thin. ``what`` distinguishes
    further lines of a label, such as training and test samples.
    """

    label: str
    x: Sequence[Number]
    y: Sequence[Number]
    low: Sequence[Number] | None = None
    high: Sequence[Number] | None = None
    kind: Kind = "measured"
    what: str = ""


@dataclass
class Panel:
    """Lines of one quantity over another."""

    title: str
    x: Quantity
    y: Quantity
    lines: list[Line]
    level: float | None = None  # a horizontal line
    type: str = "lines"


@dataclass
class Bars:
    """Stacked bars, one for each label; ``parts`` has the heights of all bars for each part, from the bottom up."""

    title: str
    y: Quantity
    labels: list[str]
    parts: dict[str, list[float]]
    notes: list[str] = field(default_factory=list)  # above each bar
    colours: dict[str, int] = field(default_factory=dict)  # of parts whose colour is the same in all pictures
    type: str = "bars"


@dataclass
class Dots:
    """A panel with one row for each label, which shows a dot and quartiles for each series."""

    title: str
    x: Quantity
    labels: list[str]
    series: list[Line]  # x has row numbers; y, low and high have values
    type: str = "dots"


@dataclass
class Grid:
    """The category at each pair of x and y: ``cells[row][column]`` for y[row] and x[column]."""

    title: str
    x: Quantity
    y: Quantity
    columns: list[float]
    rows: list[float]
    cells: list[list[str | None]]
    type: str = "grid"


AnyPanel = Panel | Bars | Dots | Grid


@dataclass
class Picture:
    """Panels under one title, with a caption that says how the values were obtained."""

    title: str
    panels: list[AnyPanel]
    caption: str = ""
    columns: int | None = None  # panels side by side


def panel_of(value: dict[str, Any]) -> AnyPanel:
    """Return the panel from which ``dataclasses.asdict`` has made ``value``.

    Raises
    ------
    KeyError, TypeError
        If no panel has these values.
    """
    given = dict(value)
    kind = {"lines": Panel, "bars": Bars, "dots": Dots, "grid": Grid}[given["type"]]
    for axis in ("x", "y"):
        if isinstance(given.get(axis), dict):
            given[axis] = Quantity(**given[axis])
    for name in ("lines", "series"):
        if name in given:
            given[name] = [Line(**line) for line in given[name]]
    return kind(**given)  # type: ignore[no-any-return]
