"""Charts of tables in docs/performance.md, as SVG: a line for each row of the table, on which marks stand at the values of its columns.

The axis is logarithmic. Limits, such as the time of the bytes on the wire, are vertical strokes. Colours come from
docs/_static/site.css, so that charts suit light and dark pages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "performance.md"
WIDTH, MARGIN, ROW, TOP = 460, 14, 38, 26  # units of the SVG's coordinates
SHAPES = ("circle", "square", "diamond", "triangle", "ring", "cross")

Row = dict[str, str]  # a cell of text by the name of its column


@dataclass(frozen=True)
class Chart:
    """What a chart shows of one table."""

    section: str  # heading of the section
    table: int  # number of the table in this section, from 0
    title: str
    labels: tuple[str, ...]  # columns that name a row
    series: dict[str, str]  # name in the legend, by column
    unit: str = ""
    limits: dict[str, str] | None = None  # columns that are drawn as strokes
    bound: Callable[[Row], float | None] | None = None  # a limit that follows from the row
    bound_name: str = ""
    line: tuple[float, str] | None = None  # a value at which a line crosses all rows, and its name


def numbers(cell: str) -> list[float]:
    """Return the values of a cell: none, one, or the ends of a range; what stands in parentheses is left out.

    >>> numbers("11.4 to 14.8"), numbers("1,169"), numbers("1/30"), numbers("0.088 (0.9991)"), numbers("not (0.81)")
    ([11.4, 14.8], [1169.0], [0.03333333333333333], [0.088], [])
    """
    text = re.sub(r"\(.*?\)", "", cell).replace(",", "")
    if fraction := re.fullmatch(r"\s*1/(\d+)\s*", text):
        return [1 / int(fraction[1])]
    return [float(found) for found in re.findall(r"(?<![\w.])\d*\.?\d+(?![\w.]|\s*%)", text)]


@cache
def tables() -> dict[str, list[list[Row]]]:
    """Return the tables of each section of the page by its heading; a cell without text in a column of labels repeats the one above."""
    found: dict[str, list[list[Row]]] = {}
    heading, lines = "", PAGE.read_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif re.fullmatch(r"\|[-:| ]+\|", line):
            names = _cells(lines[number - 1])
            rows: list[Row] = []
            for each in lines[number + 1 :]:
                if not each.startswith("|"):
                    break
                rows.append(dict(zip(_distinct(names), _cells(each))))
                if len(rows) > 1 and not rows[-1][names[0]]:
                    rows[-1][names[0]] = rows[-2][names[0]]
            found.setdefault(heading, []).append(rows)
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("`", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _distinct(names: list[str]) -> list[str]:
    """Number columns that have one name: `by messages`, `by messages 2`, ..."""
    return [name if name not in names[:place] else f"{name} {names[:place].count(name) + 1}" for place, name in enumerate(names)]


def _entropy_limit(row: Row) -> float | None:
    """Return the milliseconds that two hosts need at 1 Gbit/s for the entropy of the positions, and the values, of N = 2^24."""
    if row["hosts, wire"] != "2, 1 Gbit/s":
        return None
    density = float(row["density"].removesuffix(" %")) / 100
    bits = -math.log2(density) - (1 - density) / density * math.log2(1 - density)
    return float(1e3 * 2**24 * density * (bits / 8 + 4) / 125e6)


CHARTS = (
    Chart(
        "Exact sums on one host", 0, "Time of a sum on one host, divided by that of a dense allreduce", ("density",),
        {"P = 2": "auto, P = 2", "P = 4": "auto, P = 4", "P = 8": "auto, P = 8", "by messages": "by messages, P = 2",
         "by messages 2": "by messages, P = 4", "by messages 3": "by messages, P = 8"}, line=(1.0, "dense"),
    ),
    Chart(
        "Exact sums between hosts", 0, "Time of a sum between hosts, in ms", ("hosts, wire", "density"),
        {"\"auto\"": "auto", "plain": "auto, no codec", "C++": "the thesis's C++", "gloo, sparse": "gloo, sparse",
         "allgather and NumPy": "allgather and NumPy"}, " ms", {"pairs of 8 bytes at wire speed": "pairs of 8 bytes at wire speed"},
        _entropy_limit, "entropy of positions, and values",
    ),
    Chart(
        "Time to accuracy", 0, "Seconds to within .001 of the best accuracy (reviews: .01); no mark where it is not reached", ("",),
        {"phishing, svm": "phishing, svm", "phishing, logistic": "phishing, logistic", "reviews, svm": "reviews, svm",
         "reviews, logistic": "reviews, logistic"}, " s",
    ),
    Chart(
        "Non-zeros a second", 0, "Millions of non-zeros per second and rank, through gradient and update", ("data", "loss"),
        {"trainer": "trainer", "SGDClassifier": "scikit-learn's SGDClassifier"}, " million",
    ),
    Chart(
        "Lossy sums", 0, "Time of a lossy step, selection included, in copies of the array", ("reducer",), {"copies": "step"},
        " copies", line=(1.0, "a copy"),
    ),
    Chart(
        "Local steps", 0, "Bytes of a step, relative to dense sums", ("method", "H"), {"bytes relative to dense": "bytes"},
        line=(1.0, "dense"),
    ),
    Chart(
        "Local steps", 0, "Simulated communication per step, in ms", ("method", "H"),
        {"2 hosts, 1 Gbit/s": "2 hosts, 1 Gbit/s", "8 hosts, 100 Mbit/s": "8 hosts, 100 Mbit/s"}, " ms",
    ),
    Chart("Embedding tables", 0, "Embedding tables of a million rows: ms per step", ("method",), {"ms per step": "step"}, " ms"),
)  # fmt: skip


def draw(chart: Chart) -> str:
    """Return the chart as an SVG element."""
    rows = [row for row in tables()[chart.section][chart.table] if any(numbers(row[column]) for column in chart.series)]
    values = [value for row in rows for column in (*chart.series, *(chart.limits or {})) for value in numbers(row[column])]
    values += [bound for row in rows if chart.bound and (bound := chart.bound(row))] + ([chart.line[0]] if chart.line else [])
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def place(value: float) -> float:
        return MARGIN + (math.log10(value) - low) / (high - low) * (WIDTH - 2 * MARGIN)

    legend = _legend(chart)
    start = TOP * len(legend) + 10
    bottom = start + ROW * len(rows)
    parts = [part for number, entries in enumerate(legend) for part in _legend_line(entries, TOP * number + 14)]
    for power in range(low, high + 1):
        x = place(10.0**power)
        parts.append(f'<path class="grid" d="M{x:.1f} {start}V{bottom}"/>')
        anchor = "start" if power == low else "end" if power == high else "middle"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="{anchor}">{10.0**power:,g}</text>')
    if chart.line:
        x = place(chart.line[0])
        parts.append(f'<path class="limit" d="M{x:.1f} {start}V{bottom}"/>')
    for number, row in enumerate(rows):
        parts += _row(chart, row, start + ROW * number, place)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {bottom + 26}" role="img" aria-label="{escape(chart.title)}; the table has the values">'
        f"{''.join(parts)}</svg>"
    )


def _row(chart: Chart, row: Row, top: float, place: Callable[[float], float]) -> list[str]:
    """Return the label of a row, the line below it, and its marks, each with its value as a tooltip."""
    label = ", ".join(_named(name, row[name]) for name in chart.labels if row[name])
    y = top + 26
    parts = [f'<text x="{MARGIN}" y="{top + 13}">{escape(label)}</text>', f'<path class="track" d="M{MARGIN} {y}H{WIDTH - MARGIN}"/>']
    strokes = [(value, name) for column, name in (chart.limits or {}).items() for value in numbers(row[column])]
    bound = chart.bound(row) if chart.bound else None
    drawn = [("limit", *stroke) for stroke in strokes] + ([("bound", bound, chart.bound_name)] if bound else [])
    for kind, value, name in drawn:
        tooltip = f"<title>{escape(name)}: {value:.3g}{chart.unit}</title>"
        parts.append(f'<path class="{kind}" d="M{place(value):.1f} {y - 9}v18">{tooltip}</path>')
    for shape, (column, name) in zip(SHAPES, chart.series.items()):
        found = numbers(row[column])
        if len(found) > 1:
            parts.append(f'<path class="range {shape}" d="M{place(found[0]):.1f} {y}H{place(found[-1]):.1f}"/>')
        for value in found:
            parts.append(_mark(shape, place(value), y, f"{name}: {row[column]}{chart.unit}"))
    return parts


def _named(column: str, cell: str) -> str:
    """Return the words for a cell in the label of a row."""
    if column == "hosts, wire":
        return cell.replace(",", " hosts,", 1)
    return f"{column} {cell}" if column in ("H", "density") else cell


def _mark(shape: str, x: float, y: float, tooltip: str) -> str:
    outlines = {
        "square": "M-4.5 -4.5h9v9h-9z",
        "diamond": "M0 -6.5L6.5 0L0 6.5L-6.5 0z",
        "triangle": "M0 -6L6 5H-6z",
        "cross": "M-5 -5L5 5M5 -5L-5 5",
    }
    title = f"<title>{escape(tooltip)}</title>"
    if shape in outlines:
        return f'<path class="mark {shape}" transform="translate({x:.1f} {y})" d="{outlines[shape]}">{title}</path>'
    return f'<circle class="mark {shape}" cx="{x:.1f}" cy="{y}" r="5">{title}</circle>'


def _legend(chart: Chart) -> list[list[tuple[str, str]]]:
    """Return the shapes and names of the legend, by lines that fit the width."""
    entries = list(zip(SHAPES, chart.series.values())) + [("limit", name) for name in (chart.limits or {}).values()]
    entries += [("bound", chart.bound_name)] * bool(chart.bound) + ([("limit", chart.line[1])] if chart.line else [])
    lines: list[list[tuple[str, str]]] = [[]]
    for entry in entries:
        if sum(_width(name) for _, name in [*lines[-1], entry]) > WIDTH - MARGIN:
            lines.append([])
        lines[-1].append(entry)
    return lines


def _width(name: str) -> float:
    return 7.2 * len(name) + 32


def _legend_line(entries: list[tuple[str, str]], y: float) -> list[str]:
    parts, x = [], float(MARGIN)
    for shape, name in entries:
        if shape in ("limit", "bound"):
            parts.append(f'<path class="{shape}" d="M{x:.1f} {y - 9}v18"/>')
        else:
            parts.append(_mark(shape, x, y, name))
        parts.append(f'<text x="{x + 11:.1f}" y="{y + 4.5}">{escape(name)}</text>')
        x += _width(name)
    return parts
