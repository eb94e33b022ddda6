"""Sphinx extension: put a chart above each table of the page on performance that has one."""

from __future__ import annotations

from html import escape
from typing import Any

from charts import CHARTS, PAGE, draw
from docutils import nodes

__all__ = ["setup"]


def _illustrate(app: Any, doctree: nodes.document) -> None:
    """Insert the charts above their tables, in the order in which they are listed."""
    if app.env.docname != PAGE.stem or app.builder.format != "html":
        return
    sections = {section.next_node(nodes.title).astext(): section for section in doctree.findall(nodes.section)}
    for chart in CHARTS:
        section = sections[chart.section]
        tables = [child for child in section.children if isinstance(child, nodes.table)]
        drawn = f'<figure class="chart"><figcaption>{escape(chart.title)}</figcaption>{draw(chart)}</figure>'
        section.insert(section.index(tables[chart.table]), nodes.raw("", drawn, format="html"))


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-read", _illustrate)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
