"""Record every message of a simulated operation, and draw them: a row for each rank, a line for each message, time to the right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from html import escape
from typing import Any, NamedTuple

import numpy as np

import sparseallreduce as sar
from sparseallreduce.runtime.simulator.delivery import ByTime
from sparseallreduce.runtime.simulator.message import Message

__all__ = ["PATTERNS", "Sent", "Trace", "described", "drawing", "recorded"]

RANKS, SIZE, ENTRIES = 8, 4096, 200  # of the pictures
HOSTS = 4  # ranks on each of the two hosts of two-level algorithms
NETWORK = {"latency": 1e-6, "bandwidth": 1e9}
NEAR = {"hosts": HOSTS, "local_latency": 2.5e-7, "local_bandwidth": 8e9}


class Sent(NamedTuple):
    """A message, with the seconds at which its latency begins and at which its last byte has been received."""

    source: int
    dest: int
    nbytes: int
    start: float
    end: float


class Trace(NamedTuple):
    """The messages of one operation."""

    messages: tuple[Sent, ...]
    ranks: int
    time: float  # seconds
    hosts: tuple[tuple[int, ...], ...]


class _Recorder(ByTime):
    """Delivery by time that notes when each message begins and ends."""

    def __init__(self, network: sar.Network, ranks: int) -> None:
        super().__init__(network, ranks)
        self._latency = lambda source, dest: self._ports._link(source, dest)[0]
        self._begun: dict[int, float] = {}  # by the id of a message that is in flight
        self.messages: list[Sent] = []

    def _first_leaves(self, source: int) -> None:
        if self._leaving[source]:
            _, ready, piece = self._leaving[source][0]
            message = piece.message
            if piece.is_first:
                self._begun[id(message)] = self._ports.leaves(source, message.dest, ready) - self._latency(source, message.dest)
        super()._first_leaves(source)

    def _at(self, time: float, event: Any, what: Any) -> None:
        if event.name == "TAIL":
            message: Message = what.message
            self.messages.append(Sent(message.source, message.dest, message.nbytes, self._begun.pop(id(message)), time))
        super()._at(time, event, what)


def recorded(streams: list[Any], algorithm: Any, network: sar.Network, **arguments: Any) -> Trace:
    """Simulate an operation, as :func:`sparseallreduce.simulate` does, and return its messages."""
    recorder = _Recorder(network, len(streams))
    out = sar.simulate(streams, algorithm, network, delivery=recorder, **arguments)
    assert int(out.messages.sum()) == len(recorder.messages)
    ranks = len(streams)
    hosts = network.layout(ranks).members if network.hosts else ()
    return Trace(tuple(sorted(recorder.messages, key=lambda sent: (sent.start, sent.source))), ranks, out.time, hosts)


def streams_of(ranks: int = RANKS, size: int = SIZE, entries: int = ENTRIES) -> list[sar.SparseStream]:
    """Return one stream for each rank, at uniformly random positions."""
    rng = np.random.default_rng(0)
    found = [np.sort(rng.choice(size, entries, replace=False)) for _ in range(ranks)]
    return [sar.SparseStream(positions, rng.standard_normal(entries).astype(np.float32), size) for positions in found]


def overlapping(entries: int, common: int, ranks: int = RANKS, size: int = 1 << 16) -> list[sar.SparseStream]:
    """Return one stream for each rank, with positions out of ``common`` that all ranks have in common."""
    rng = np.random.default_rng(0)
    known = rng.choice(size, common, replace=False)
    found = [np.sort(rng.choice(known, entries, replace=False)) for _ in range(ranks)]
    return [sar.SparseStream(positions, np.ones(entries, np.float32), size) for positions in found]


def _sum(algorithm: str, two_levels: bool = False, collective: str = "allreduce", **options: Any) -> Trace:
    streams: list[Any] = streams_of()
    if collective == "allgather":
        width = SIZE // RANKS
        streams = streams_of(RANKS, width, ENTRIES)
    return recorded(streams, algorithm, sar.Network(**NETWORK, **(NEAR if two_levels else {})), collective=collective, **options)


def _lossy(make: Callable[[], Any], two_levels: bool = False) -> Trace:
    """Return the messages of the second operation: the first also prepares thresholds and boundaries."""
    rng = np.random.default_rng(0)
    accumulators = [rng.standard_normal(SIZE).astype(np.float32) for _ in range(RANKS)]
    reducers, network = [make() for _ in range(RANKS)], sar.Network(**NETWORK, **(NEAR if two_levels else {}))
    sar.simulate(accumulators, reducers, network)
    return recorded(accumulators, reducers, network)


_EXACT = [name for name in sar.algorithms() if name not in ("auto", "hierarchical", "dense_torus")]
_COLLECTIVES = ("reduce", "reduce_scatter", "allgather", "bcast")
#: A function for each heading of docs/algorithms.md that describes an algorithm; it returns the algorithm's messages.
PATTERNS: dict[str, Callable[[], Trace]] = {
    **{name: partial(_sum, name) for name in _EXACT},
    "dsar_early_switch": partial(_sum, "dsar_early_switch", group_size=2),  # with the default, eight ranks would be one group
    **{name: partial(_sum, name, True) for name in ("hierarchical", "dense_torus")},
    **{f"{what}: {name}": partial(_sum, name, False, what) for what in _COLLECTIVES for name in sar.algorithms(what) if name != "auto"},
    **{name: partial(_lossy, partial(getattr(sar, name), SIZE, ENTRIES)) for name in ("OkTopk", "GTopk", "TopkA", "GaussianK", "TopkDSA")},
    "HiTopK": partial(_lossy, partial(sar.HiTopK, SIZE, ENTRIES), True),
}


def described(name: str, trace: Trace) -> str:
    """Return a sentence for readers who do not see the picture."""
    sizes = [sent.nbytes for sent in trace.messages]
    most = max(range(trace.ranks), key=lambda rank: sum(sent.source == rank for sent in trace.messages))
    partners = sorted({sent.dest for sent in trace.messages if sent.source == most})
    listed = ", ".join(map(str, partners[:-1])) + (" and " if partners[1:] else "") + str(partners[-1])
    return (
        f"{name} between {trace.ranks} ranks: {len(sizes)} messages of {min(sizes):,} to {max(sizes):,} bytes in "
        f"{1e6 * trace.time:.1f} microseconds; rank {most} sends to {'rank' if len(partners) == 1 else 'ranks'} {listed}."
    )


_LEFT, _RIGHT, _TOP, _ROW = 58, 392, 8, 22  # pixels


def drawing(name: str, trace: Trace, until: float | None = None, of: str = "") -> str:
    """Return the SVG of a trace, in colours of the page.

    ``until`` is the time in seconds at the right end, by default that of the trace. Every line has its beginning and its end, relative to
    ``until``, as variables of CSS, with which the page may draw them one after the other. ``of`` is added to the class of the picture.
    """
    until = trace.time if until is None else until
    bottom = _TOP + _ROW * trace.ranks
    most = max(sent.nbytes for sent in trace.messages)
    heights = [_TOP + _ROW * (rank + 0.5) for rank in range(trace.ranks)]

    def across(time: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * time / until

    parts = [
        f'<rect class="host" x="0" y="{_TOP + _ROW * members[0]}" width="{_RIGHT + 8}" height="{_ROW * len(members)}"/>'
        for members in trace.hosts[::2]
    ]
    for rank, y in enumerate(heights):
        parts.append(f'<text x="4" y="{y + 5:g}">rank {rank}</text><line class="rank" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:g}" y2="{y:g}"/>')
    for sent in trace.messages:
        width = 1 + 3 * (sent.nbytes / most) ** 0.5
        parts.append(
            f'<line class="message" pathLength="1" x1="{across(sent.start):.1f}" y1="{heights[sent.source]:g}" x2="{across(sent.end):.1f}" '
            f'y2="{heights[sent.dest]:g}" stroke-width="{width:.1f}" style="--from:{sent.start / until:.4f};--to:{sent.end / until:.4f}"/>'
        )
    parts.append(f'<line class="end" x1="{across(trace.time):.1f}" x2="{across(trace.time):.1f}" y1="{_TOP}" y2="{bottom}"/>')
    parts.append(f'<line class="now" x1="{_LEFT}" x2="{_LEFT}" y1="{_TOP}" y2="{bottom}"/>')
    anchor = "end" if across(trace.time) > 0.6 * _RIGHT else "start"
    parts.append(f'<text x="{across(trace.time):.1f}" y="{bottom + 18}" text-anchor="{anchor}">{1e6 * trace.time:.1f} µs</text>')
    parts.append(f'<text x="{_LEFT}" y="{bottom + 18}">0</text>')
    title = escape(described(name, trace), quote=True)
    return (
        f'<svg class="messages {of}" role="img" aria-label="{title}" viewBox="0 0 {_RIGHT + 8} {bottom + 26}" '
        f'style="--span:{_RIGHT - _LEFT}px">{"".join(parts)}</svg>'
    )
