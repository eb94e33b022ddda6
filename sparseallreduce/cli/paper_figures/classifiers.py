"""Training of linear classifiers: figures 5.8 to 5.12 of the sparse allreduce thesis (section 5.3)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce.cli.paper_figures.settings import GREINA, PIZ_DAINT, Figure, Settings, described, on_first
from sparseallreduce.cli.pictures.panels import AnyPanel, Bars, Line, Panel, Picture, Quantity
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.generate import KINDS, generate
from sparseallreduce.linear.data.load import load
from sparseallreduce.linear.models import model_of
from sparseallreduce.linear.strategies import DenseStrategy, SparseStrategy, Strategy
from sparseallreduce.runtime.simulator import Network

__all__ = ["FIGURES"]

Array = NDArray[Any]

_BATCH = 1000  # samples per rank and step
_SUMS = ("dense", "ssar_recursive_doubling", "ssar_split_allgather", "dsar_split_allgather", "auto")
_LARGEST = 1 << 23  # simulated values on all ranks together
_NAMES = {"url-like": "URL", "webspam-like": "Webspam"}
_CAPTION = (
    "Generated data like the thesis's sets, batches of {batch} samples per rank. Computing and updates are measured on a core here, "
    "communication is simulated: every s-th feature, on a network with 1 / s of the bandwidth, which takes the same time. "
)


class _Case(NamedTuple):
    """A panel: model, kind of data set, ranks and network."""

    model: str
    kind: str
    ranks: int
    network: Network
    title: str


class _Work(NamedTuple):
    """The work of a step, without communication."""

    gradients: list[sar.SparseStream]  # of all ranks, every s-th feature
    compute: dict[bool, float]  # seconds, with dense gradients and with sparse ones
    update: dict[bool, float]
    factor: int  # s


def _epochs(settings: Settings, title: str, cases: Sequence[tuple[str, str, int, Network, str]]) -> Picture:
    """Draw the time of an epoch by phase, a bar for each way to add gradients, and a panel for each case."""
    works: dict[Any, _Work] = {}
    panels: list[AnyPanel] = []
    for case in (_Case(*given) for given in cases):
        ranks = min(case.ranks, 4) if settings.small else case.ranks
        key = case.model, case.kind, ranks
        works[key] = works.get(key) or _work(settings, case.model, case.kind, ranks)
        panels.append(_bars(case, ranks, works[key], 20 if settings.small else _BATCH))
    batch = 20 if settings.small else _BATCH
    caption = _CAPTION.format(batch=f"{batch:,}") + f"Networks: {_networks(cases)}. `train --strategy --algorithm` measures epochs."
    return Picture(title, panels, caption)


def _networks(cases: Sequence[tuple[str, str, int, Network, str]]) -> str:
    found = dict.fromkeys(network for _, _, _, network, _ in cases)
    return "; ".join(("Piz Daint " if network == PIZ_DAINT else "Greina ") + described(network) for network in found)


def _bars(case: _Case, ranks: int, work: _Work, batch: int) -> Bars:
    steps = -(-KINDS[case.kind].samples // (batch * ranks))
    network, factor = case.network, work.factor
    scaled = network._replace(
        bandwidth=network.bandwidth / factor, gamma=network.gamma * factor, gamma_dense=(network.gamma_dense or 0.0) * factor
    )
    parts: dict[str, list[float]] = {"computing": [], "communication": [], "update": []}
    for name in _SUMS:
        dense = name == "dense"
        streams = [sar.SparseStream.from_dense(each.to_dense()) for each in work.gradients] if dense else work.gradients
        parts["computing"].append(steps * work.compute[dense])
        parts["communication"].append(steps * float(sar.simulate(streams, name, scaled).time))
        parts["update"].append(steps * work.update[dense])
    totals = [sum(each) for each in zip(*parts.values())]
    notes = [f"{totals[0] / total:.1f} times as fast" for total in totals]
    return Bars(f"{case.title}, P = {ranks}: less is better", Quantity("time of an epoch", "s", False), list(_SUMS), parts, notes)


def _work(settings: Settings, model: str, kind: str, ranks: int) -> _Work:
    """Compute the gradients of a step on all ranks, one after the other, and measure the time."""
    size = 2**12 if settings.small else KINDS[kind].features
    factor = max(1, -(-size * ranks // _LARGEST))
    streams: list[sar.SparseStream] = []
    seconds: dict[bool, list[float]] = {True: [], False: []}
    total: sar.SparseStream | None = None
    strategy: Strategy | None = None
    for data in _samples(settings, kind, size, ranks):
        strategy = SparseStrategy(data, sar.SERIAL)
        stream, spent = _timed(partial(_gradient, strategy, model))
        stream = stream.copy()
        seconds[False].append(spent)
        if len(seconds[True]) < 3:  # dense gradients take the same time on all ranks
            seconds[True].append(_timed(partial(_gradient, DenseStrategy(data, sar.SERIAL), model), 2)[1])
        total = stream if total is None else total + stream
        streams.append(_thinned(stream, factor))
    assert total is not None and strategy is not None
    dense = sar.SparseStream.from_dense(total.to_dense())
    dense_strategy = DenseStrategy(strategy.dataset, sar.SERIAL)
    compute = {way: float(np.median(times)) for way, times in seconds.items()}
    update = {False: _updating(strategy, total), True: _updating(dense_strategy, dense)}
    return _Work(streams, compute, update, factor)


def _samples(settings: Settings, kind: str, size: int, ranks: int) -> Iterator[Dataset]:
    """Yield the batch of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            path = Path(folder) / "batch.csr"
            generate(kind, path, samples=20 if settings.small else _BATCH, features=size, seed=settings.seed * 1000 + rank)
            yield load(path, comm=sar.SERIAL)[0]


def _gradient(strategy: Strategy, model: str) -> sar.SparseStream:
    rows = np.arange(strategy.dataset.rows)
    scores = strategy.scores(rows)
    return strategy.gradient(rows, strategy.coefficients(model_of(model), rows, scores, len(rows)))


def _updating(strategy: Strategy, total: sar.SparseStream) -> float:
    return _timed(lambda: strategy.update(total, 1e-6), 5)[1]


def _timed(call: Callable[[], Any], repeats: int = 3) -> tuple[Any, float]:
    """Return the result of a call, and the median of its seconds after a warm-up."""
    times, result = [], call()
    for _ in range(repeats):
        start = perf_counter()
        result = call()
        times.append(perf_counter() - start)
    return result, float(np.median(times))


def _thinned(stream: sar.SparseStream, factor: int) -> sar.SparseStream:
    """Return every ``factor``-th position of a stream, as a stream of a lower dimension."""
    indices = stream.indices
    kept = indices % factor == 0
    size = -(-stream.size // factor)
    return sar.SparseStream((indices[kept] // factor).astype(np.uint32), stream.values[kept], size)


def _occurrences(settings: Settings) -> Picture:
    """Draw figure 5.12: in how many steps of an epoch each feature occurs, most frequent features first."""
    panels: list[AnyPanel] = []
    x, y = Quantity("features, most frequent first", "count"), Quantity("steps in which a feature occurs", "count")
    samples, batch, counts = (200, 10, (2, 4)) if settings.small else (5_000, 10, (2, 8, 32))
    for kind, name in _NAMES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "samples.csr"
            generate(kind, path, samples=samples, features=2**12 if settings.small else KINDS[kind].features, seed=settings.seed)
            data = load(path, comm=sar.SERIAL)[0]
            lines = [_frequencies(data, ranks, batch) for ranks in counts]
        panels.append(Panel(f"{name}, N = {data.features:,}", x, y, lines))
    caption = (
        f"Measured on generated data like the thesis's sets, {samples:,} samples in batches of {batch} per rank. A feature that occurs in "
        "every step is sent in every step, however many ranks there are."
    )
    return Picture("Thesis 5.12: how often features occur in the steps of an epoch", panels, caption)


def _frequencies(data: Dataset, ranks: int, batch: int) -> Line:
    counts = np.zeros(data.features, np.int64)
    for begin in range(0, data.rows, batch * ranks):
        end = min(begin + batch * ranks, data.rows)
        counts[np.unique(data.indices[data.indptr[begin] : data.indptr[end]])] += 1
    found = np.sort(counts[counts > 0])[::-1]
    places = np.unique(np.geomspace(1, len(found), 60).astype(np.int64))
    return Line(f"P = {ranks}, {int(found[0])} steps at most", places.tolist(), found[places - 1].tolist())


def _figure(number: str, summary: str, title: str, cases: Sequence[tuple[str, str, int, Network, str]]) -> Figure:
    def make(settings: Settings) -> Picture:
        return on_first(settings, lambda: _epochs(settings, f"Thesis {number}: {title}", cases))

    return Figure(f"thesis-{number}", summary, make)


FIGURES = (
    _figure("5.8", "logistic regression on URL: time of an epoch", "logistic regression on URL",
            [("logistic", "url-like", ranks, PIZ_DAINT, "Piz Daint") for ranks in (32, 128)]),
    _figure("5.9", "logistic regression on Webspam: time of an epoch", "logistic regression on Webspam",
            [("logistic", "webspam-like", ranks, PIZ_DAINT, "Piz Daint") for ranks in (32, 128)]),
    _figure("5.10", "logistic regression on URL, two systems, 8 nodes", "logistic regression on URL on two systems",
            [("logistic", "url-like", 8, network, name) for name, network in (("Piz Daint", PIZ_DAINT), ("Greina", GREINA))]),
    _figure("5.11", "support vector machine on Webspam: time of an epoch", "a support vector machine on Webspam",
            [("svm", "webspam-like", ranks, PIZ_DAINT, "Piz Daint") for ranks in (32, 128)]),
    Figure("thesis-5.12", "how often features occur in the steps of an epoch",
           lambda settings: on_first(settings, lambda: _occurrences(settings))),
)  # fmt: skip
