"""Sphinx extension for the pages of the papers: directive ``paper-figure`` shows a figure that `make figures` has drawn, with its command,
and ``published`` draws a paper's numbers beside those of this library.
"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from sparseallreduce.cli.paper_figures import FIGURES

__all__ = ["Published", "read_published", "setup"]

DRAWN = Path(__file__).resolve().parents[2] / "build" / "figures"  # by `make figures`


class PaperFigure(SphinxDirective):
    """A figure of a paper: its command, and the picture if there is one."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        if name not in FIGURES:
            raise self.error(f"there is no figure {name!r}")
        command = nodes.literal_block("", f"sparseallreduce figures {name}", language="sh")
        picture, report = DRAWN / f"{name}.svg", DRAWN / f"{name}.json"
        self.env.note_dependency(str(report))
        if not picture.exists() or not report.exists():
            return [command]
        found = json.loads(report.read_text())
        drawn, size = (
            found["results"]["picture"],
            "A preview (--small); the text is about the full size. " if found["arguments"]["small"] else "",
        )
        where = Path(self.env.doc2path(self.env.docname)).parent
        image = nodes.image(uri=_relative(picture, where), alt=f"{drawn['title']}. {drawn['caption']}", classes=["plot"])
        caption = nodes.caption("", f"{size}{drawn['caption']}")
        return [command, nodes.figure("", image, caption)]


def _relative(path: Path, folder: Path) -> str:
    return str(Path(*[".."] * len(folder.resolve().relative_to(path.parents[2]).parts)) / path.relative_to(path.parents[2]))


class Published(NamedTuple):
    """A row: what the numbers are, and the low and high ends of the paper's and of ours; None if there is no such number."""

    label: str
    paper: tuple[float, float] | None
    here: tuple[float, float] | None


def read_published(lines: list[str]) -> list[Published]:
    """Return the rows of ``label | paper | here``, with numbers, ranges such as ``1.5 to 8.8``, or ``-`` for none.

    >>> read_published(["VGG-16 | 1.5 to 8 | -"])
    [Published(label='VGG-16', paper=(1.5, 8.0), here=None)]
    """
    rows = []
    for line in filter(None, map(str.strip, lines)):
        label, paper, here = (part.strip() for part in line.split("|"))
        rows.append(Published(label, _range(paper), _range(here)))
    return rows


def _range(text: str) -> tuple[float, float] | None:
    if text == "-":
        return None
    found = re.fullmatch(r"(-?[\d.,]+)(?: to (-?[\d.,]+))?", text)
    if found is None:
        raise ValueError(f"neither a number nor a range: {text!r}")
    low = float(found[1].replace(",", ""))
    return low, float((found[2] or found[1]).replace(",", ""))


class PublishedNumbers(SphinxDirective):
    """Bars of the paper's numbers and of ours."""

    has_content = True
    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[Any] = {"unit": str}

    def run(self) -> list[nodes.Node]:
        try:
            rows = read_published(list(self.content))
        except ValueError as error:
            raise self.error(f"a row is `label | paper | here`: {error}") from error
        return [nodes.raw("", table(self.arguments[0], rows, self.options.get("unit", "")), format="html")]


def table(title: str, rows: list[Published], unit: str = "") -> str:
    """Return the HTML of the bars, in a table, so that they can be read without seeing them."""
    most = max(values[1] for row in rows for values in (row.paper, row.here) if values)

    def cell(values: tuple[float, float] | None, kind: str) -> str:
        if values is None:
            return "<td>not given</td>" if kind == "paper" else "<td>not repeated</td>"
        low, high = values
        number = f"{high:,g}" if low == high else f"{low:,g} to {high:,g}"
        begin = 0.0 if low == high else 100 * low / most  # a number below zero has no bar
        bar = f'<div class="bar {kind}" style="margin-left:{begin:.1f}%;width:{max(100 * high / most - begin, 0.5):.1f}%"></div>'
        return f"<td>{bar}<span>{number}{unit and ' ' + unit}</span></td>"

    body = "".join(f'<tr><th scope="row">{escape(row.label)}</th>{cell(row.paper, "paper")}{cell(row.here, "here")}</tr>' for row in rows)
    return (
        f'<table class="published"><caption>{escape(title)}</caption><thead><tr><td></td><th scope="col">the paper</th>'
        f'<th scope="col">here</th></tr></thead><tbody>{body}</tbody></table>'
    )


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("paper-figure", PaperFigure)
    app.add_directive("published", PublishedNumbers)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
