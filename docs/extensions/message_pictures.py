"""Sphinx extension: draw the messages of every algorithm in its card, and of two algorithms as an animation (directive ``race``)."""

from __future__ import annotations

from functools import cache
from html import escape
from typing import Any

from docutils import nodes
from messages import NETWORK, PATTERNS, RANKS, Trace, drawing, overlapping, recorded
from sphinx.util.docutils import SphinxDirective

import sparseallreduce as sar

__all__ = ["setup"]

_RACERS = ("ssar_recursive_doubling", "ssar_split_allgather")
_MANY, _FEW = (6000, 10_000), (60, 100)  # entries of each rank, and positions that they have in common


@cache
def _pattern(name: str) -> str:
    return f'<figure class="messages">{drawing(name, PATTERNS[name]())}</figure>'


def _illustrate(app: Any, doctree: nodes.document) -> None:
    """Insert the picture of each algorithm behind the list of its steps and bytes."""
    if app.env.docname != "algorithms" or app.builder.format != "html":
        return
    missing = set(PATTERNS)
    for section in doctree.findall(nodes.section):
        name = section.next_node(nodes.title).astext()
        if name in missing:
            missing.remove(name)
            place = next(number for number, child in enumerate(section.children) if isinstance(child, nodes.bullet_list))
            section.insert(place + 1, nodes.raw("", _pattern(name), format="html"))
    if missing:
        raise ValueError(f"docs/algorithms.md has no card of {', '.join(sorted(missing))}")


def _raced(entries: int, common: int) -> list[Trace]:
    return [recorded(overlapping(entries, common), name, sar.Network(**NETWORK)) for name in _RACERS]


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:.3g}"


def race() -> str:
    """Return the HTML of both algorithms' messages on one clock, which CSS moves."""
    many, few = _raced(*_MANY), _raced(*_FEW)
    until = max(trace.time for trace in many)
    panels = "".join(
        f'<figure class="messages"><figcaption><code>{name}</code>, {_micro(trace.time)} µs</figcaption>'
        f"{drawing(name, trace, until)}</figure>"
        for name, trace in zip(_RACERS, many)
    )
    network = f"{_micro(NETWORK['latency'])} µs per message, {NETWORK['bandwidth'] / 1e9:g} GB/s"
    caption = (
        f"{RANKS} simulated ranks ({network}) each have {_MANY[0]:,} entries at positions out of {_MANY[1]:,} common ones. Recursive "
        f"doubling sends the growing sum in few messages, and takes {_micro(many[0].time)} µs; split and allgather sends every part to the "
        f"rank that adds it, and takes {_micro(many[1].time)} µs. With a hundredth of the entries the messages' latency decides: "
        f"{_micro(few[0].time)} and {_micro(few[1].time)} µs. The default, “auto”, predicts these times and takes the faster way."
    )
    return (
        f'<div class="race"><label class="pause"><input type="checkbox"> Pause</label><div class="panels">{panels}</div>'
        f"<p>{escape(caption)}</p></div>"
    )


class Race(SphinxDirective):
    """Two algorithms sum the same streams."""

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", race(), format="html")]


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("race", Race)
    app.connect("doctree-read", _illustrate)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
