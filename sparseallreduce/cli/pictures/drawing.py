"""Draw pictures: legends beside the axes, colours that the colour-blind can distinguish, and no empty cells."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from sparseallreduce.cli.pictures.panels import AnyPanel, Bars, Dots, Grid, Line, Panel, Picture
from sparseallreduce.cli.pictures.ticks import scale, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "shortened"]

# Okabe and Ito's colours, which the colour-blind can distinguish, without yellow, which is hard to see on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
_MARKERS = "osD^vP*X<>ph"
_FURTHER = ("-", "--", ":", "-.")  # styles by ``Line.what``, such as training and test samples
_HATCHES = ("", "///", "...", "xxx")
_PANEL_WIDTH, _PANEL_HEIGHT = 5.0, 3.7  # inches
_LEGEND_WIDTH = 0.085  # inches per character
_LABEL_WIDTH, _NOTE_WIDTH = 0.085, 0.068  # inches per character beside bars and behind them
_TEXT_WIDTH = 11.5  # characters per inch in a title
_LONGEST_LABEL = 44
# The number of each algorithm's style, which does not depend on the other algorithms in a picture.
_KNOWN = {
    name: number
    for number, name in enumerate(
        (
            "auto", "ssar_recursive_doubling", "ssar_split_allgather", "dsar_split_allgather", "dsar_early_switch", "ssar_ring", "dense",
            "allgather", "hierarchical", "dense_torus",
        )
    )
}  # fmt: skip


def draw(picture: Picture) -> Figure:
    """Return the figure of a picture.

    Raises
    ------
    click.ClickException
        If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise click.ClickException("pictures need matplotlib: pip install 'sparseallreduce[plot]'") from None
    panels = picture.panels
    columns = picture.columns or (1 if len(panels) == 1 else 2 if len(panels) in (2, 4) else 3)
    rows = -(-len(panels) // columns)
    styles = _Styles(panels)
    handles = styles.handles()
    legend = styles.width if handles else 0.0
    width = columns * _PANEL_WIDTH + legend
    caption = _wrapped(picture.caption, width, 14)
    height = rows * max(map(_height, panels)) + 0.6 + 0.18 * len(caption.splitlines())
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    FigureCanvasAgg(figure)  # needs no display and no global state
    last = len(panels) % columns or columns
    for number, (axes, panel) in enumerate(zip(_axes(figure, len(panels), columns), panels)):
        side_by_side = last if number >= len(panels) - last else columns
        room = (width - legend) / side_by_side - 0.9
        _DRAW[type(panel)](axes, panel, styles, room)
        _clean(axes)
    figure.suptitle(_wrapped(picture.title, width - legend, _TEXT_WIDTH * 0.8), fontweight="bold", x=0.01, ha="left")
    if caption:
        figure.supxlabel(caption, fontsize="small", x=0.01, ha="left")
    if handles:
        figure.legend(handles=handles, loc="outside right upper", frameon=False)
    return figure


def shortened(label: str, longest: int = _LONGEST_LABEL) -> str:
    """Return a label shortened to at most ``longest`` characters by leaving out its middle.

    >>> shortened("a" * 30 + "b" * 30, 11)
    'aaaaa…bbbbb'
    """
    if len(label) <= longest:
        return label
    half = (longest - 1) // 2
    return f"{label[: longest - 1 - half]}…{label[-half:]}"


def _height(panel: AnyPanel) -> float:
    if isinstance(panel, Dots):
        return max(_PANEL_HEIGHT, 0.24 * len(panel.labels) + 1.2)
    if isinstance(panel, Grid):
        return max(_PANEL_HEIGHT, 0.3 * len(panel.rows) + 1.2)
    return _PANEL_HEIGHT


def _axes(figure: Figure, count: int, columns: int) -> list[Axes]:
    """Return axes row by row; those of the last row share its whole width, so that no cell is empty."""
    last = count % columns or columns
    fine = math.lcm(columns, last)
    grid = figure.add_gridspec(-(-count // columns), fine)
    found = []
    for number in range(count):
        row, column = divmod(number, columns)
        each = fine // (last if number >= count - last else columns)
        found.append(figure.add_subplot(grid[row, column * each : (column + 1) * each]))
    return found


def _wrapped(text: str, width: float, per_inch: float) -> str:
    return "\n".join(chain.from_iterable(textwrap.wrap(line, max(20, int(width * per_inch))) or [""] for line in text.split("\n")))


def _balanced(text: str, width: float) -> str:
    """Return the title of a panel, wrapped into lines of about the same length, which do not end within "N = 1,000"."""
    text = text.replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")
    most = max(20, int(width * _TEXT_WIDTH * 0.9))
    count = len(textwrap.wrap(text, most))
    fits = (room for room in range(most // 2, most + 1) if len(textwrap.wrap(text, room)) <= count)
    return "\n".join(textwrap.wrap(text, next(fits, most)))


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def _lines(panel: AnyPanel) -> Sequence[Line]:
    if isinstance(panel, Panel):
        return panel.lines
    return panel.series if isinstance(panel, Dots) else ()


def _numbered(labels: Collection[str]) -> dict[str, int]:
    """Return the number of each label's colour and marker: a fixed one for a known label, and a free one for any other."""
    known = {label: _KNOWN[label] for label in labels if label in _KNOWN}
    free = (number for number in count() if number not in known.values())
    return known | {label: next(free) for label in labels if label not in known}


class _Styles:
    """The colour and marker of every label, and the line style of every ``what``."""

    def __init__(self, panels: Sequence[AnyPanel]) -> None:
        lines = [line for panel in panels for line in _lines(panel)]
        labels = dict.fromkeys(line.label for line in lines)
        self._numbers = _numbered(labels)
        self._labels = [label for label in labels if label]
        self._what = list(dict.fromkeys(line.what for line in lines if line.what))
        self._kinds = {line.kind for line in lines}
        self._dots = all(isinstance(panel, Dots) for panel in panels if isinstance(panel, Panel | Dots))
        self.parts: dict[str, dict[str, Any]] = {}  # matplotlib's properties of the parts of bars
        for bars in (panel for panel in panels if isinstance(panel, Bars)):
            for place, part in enumerate(bars.parts):
                self.parts.setdefault(part, _filling(bars.colours.get(part, place)))
        self.cells = self._of_cells([panel for panel in panels if isinstance(panel, Grid)])
        self.parts |= {name: look for name, look in self.cells.items() if name not in labels}
        further = [*self._what, *self.parts, "cost model"]
        self.width = 0.7 + _LEGEND_WIDTH * max((len(shortened(label)) for label in [*self._labels, *further]), default=0)

    def _of_cells(self, grids: Sequence[Grid]) -> dict[str, dict[str, Any]]:
        """Return matplotlib's properties for each category of a map, by name; algorithms have the colours of their lines."""
        names = dict.fromkeys(cell for grid in grids for row in grid.cells for cell in row if cell is not None)
        numbers = {name: self._numbers.get(name, _KNOWN.get(name)) for name in names}
        for name in names:
            base = _KNOWN.get(name.removesuffix(" in shared memory"))
            if numbers[name] is None:
                taken = [number for number in numbers.values() if number is not None]
                numbers[name] = base + len(_COLOURS) if base is not None else max(taken, default=-1) + 1
        return {name: _filling(number or 0) for name, number in numbers.items()}

    def of(self, line: Line) -> dict[str, Any]:
        """Return matplotlib's properties of a line."""
        number = self._numbers[line.label]
        look: dict[str, Any] = {"color": _COLOURS[number % len(_COLOURS)], "linestyle": "-", "linewidth": 1.6}
        if line.kind == "model":
            return look | {"linewidth": 0.7, "alpha": 0.8}
        few = len(line.x) <= 40
        look |= {"marker": _MARKERS[number % len(_MARKERS)] if few else "", "markersize": 5}
        if line.kind == "simulated":
            look |= {"linestyle": "--", "markerfacecolor": "white"}
        if line.what:
            look |= self.look_of(line.what)
        return look | {"linestyle": ""} if self._dots else look

    def handles(self) -> list[Any]:
        """Return the entries of the legend: labels, then line styles."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        found: list[Any] = [Line2D([], [], label=shortened(label), **self.of(Line(label, [], []))) for label in self._labels]
        grey: dict[str, Any] = {"color": "#404040"}
        found += [
            Line2D([], [], label=what, **grey, **({"marker": "o", **self.look_of(what)} if self._dots else self.look_of(what)))
            for what in self._what
        ]
        if "simulated" in self._kinds and not self._dots:
            found.append(Line2D([], [], label="simulated", linestyle="--", marker="o", markerfacecolor="white", **grey))
        if "measured" in self._kinds and "simulated" in self._kinds and not self._dots:
            found.append(Line2D([], [], label="measured", marker="o", **grey))
        if "model" in self._kinds:
            found.append(Line2D([], [], label="cost model", linewidth=0.7, **grey))
        found += [Patch(edgecolor="white", label=part, **look) for part, look in self.parts.items()]
        return found if len(found) > 1 else []

    def look_of(self, what: str) -> dict[str, Any]:
        """Return matplotlib's properties for a value of ``what``."""
        number = self._what.index(what)
        if self._dots:
            return {"linestyle": "", "markerfacecolor": "white"} if number else {"linestyle": ""}
        return {"linestyle": _FURTHER[number % len(_FURTHER)]}


def _draw_lines(axes: Axes, panel: Panel, styles: _Styles, width: float) -> None:
    for line in panel.lines:
        x, y = _numbers(line.x), _numbers(line.y)
        axes.plot(x, y, **styles.of(line))
        if line.low is not None and line.high is not None:
            axes.fill_between(x, _numbers(line.low), _numbers(line.high), color=styles.of(line)["color"], alpha=0.18, linewidth=0)
    shown = [list(chain.from_iterable(getattr(line, of) for line in panel.lines)) for of in ("x", "y")]
    shown[1] += chain.from_iterable([*(line.low or ()), *(line.high or ())] for line in panel.lines)
    if panel.level is not None:
        axes.axhline(panel.level, color="#404040", linestyle=":", linewidth=1)
        shown[1].append(panel.level)
    scale(axes.xaxis, panel.x, shown[0])
    scale(axes.yaxis, panel.y, shown[1])
    axes.set_title(_balanced(panel.title, width), fontsize="medium")
    axes.grid(alpha=0.3)


def _draw_bars(axes: Axes, panel: Bars, styles: _Styles, width: float) -> None:
    """Draw horizontal bars, which leave room for names."""
    places = np.arange(len(panel.labels))[::-1]
    ends = np.zeros(len(panel.labels))
    for part, lengths in panel.parts.items():
        axes.barh(places, lengths, left=ends, height=0.65, edgecolor="white", linewidth=0.4, **styles.parts[part])
        ends += lengths
    axes.set_yticks(places, [shortened(label, 30) for label in panel.labels])
    axes.set_ylim(-0.6, len(panel.labels) - 0.4)
    most = float(ends.max(initial=0.0)) or 1.0
    notes = panel.notes or [written(panel.y)(float(f"{end:.3g}")) for end in ends]
    for place, end, note in zip(places, ends, notes):
        axes.annotate(note, (end, place), (4, 0), textcoords="offset points", va="center", fontsize="small")
    # The notes stand to the right of the bars, inside the frame.
    inside = width - _LABEL_WIDTH * max((len(shortened(label, 30)) for label in panel.labels), default=0)
    share = min(0.6, (_NOTE_WIDTH * max(map(len, notes), default=0) + 0.15) / inside)
    scale(axes.xaxis, panel.y, [0.0, most / (1 - share)])
    axes.set_title(_balanced(panel.title, width), fontsize="medium")
    axes.grid(axis="x", alpha=0.3)


def _draw_dots(axes: Axes, panel: Dots, styles: _Styles, width: float) -> None:
    count = len(panel.series)
    shown: list[Any] = []
    for number, line in enumerate(panel.series):
        shift = ((number + 0.5) / count - 0.5) * 0.6
        rows = -_numbers(line.x) - shift
        look = styles.of(line) | {"linestyle": ""}
        if line.low is not None and line.high is not None:
            axes.hlines(rows, _numbers(line.low), _numbers(line.high), color=look["color"], linewidth=1.2)
            shown += [*line.low, *line.high]
        axes.plot(_numbers(line.y), rows, **look)
        shown += line.y
    axes.set_yticks([-place for place in range(len(panel.labels))], [shortened(label, 30) for label in panel.labels])
    axes.set_ylim(0.5 - len(panel.labels), 0.5)
    scale(axes.xaxis, panel.x, shown)
    axes.set_title(_balanced(panel.title, width), fontsize="medium")
    axes.grid(alpha=0.3)


def _draw_grid(axes: Axes, panel: Grid, styles: _Styles, width: float) -> None:
    for row, cells in enumerate(panel.cells):
        for column, cell in enumerate(cells):
            if cell is not None:
                axes.add_patch(_rectangle(column, row, styles.cells[cell]))
    for axis, quantity, values in ((axes.xaxis, panel.x, panel.columns), (axes.yaxis, panel.y, panel.rows)):
        every = -(-len(values) // 6)
        axis.set_ticks(range(0, len(values), every), [written(quantity)(float(f"{value:.3g}")) for value in values[::every]])
        axis.set_label_text(quantity.name)
    axes.set_xlim(-0.5, len(panel.columns) - 0.5)
    axes.set_ylim(-0.5, len(panel.rows) - 0.5)
    axes.set_title(_balanced(panel.title, width), fontsize="medium")


def _filling(number: int) -> dict[str, Any]:
    return {"facecolor": _COLOURS[number % len(_COLOURS)], "hatch": _HATCHES[number // len(_COLOURS) % len(_HATCHES)]}


def _rectangle(column: int, row: int, look: dict[str, Any]) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, row - 0.5), 1, 1, edgecolor="white", linewidth=0.6, **look)


def _numbers(values: Sequence[Any]) -> Any:
    """Return an array in which None is NaN."""
    return np.array([np.nan if value is None else value for value in values], np.float64)


_DRAW: dict[type, Any] = {Panel: _draw_lines, Bars: _draw_bars, Dots: _draw_dots, Grid: _draw_grid}
