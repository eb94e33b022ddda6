"""Figures 5.1 to 5.7 of the sparse allreduce thesis (section 5.2): micro-benchmarks on synthetic uniform data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

import sparseallreduce as sar
from sparseallreduce.cli.paper_figures.settings import GREINA, PIZ_DAINT, Figure, Settings, described
from sparseallreduce.cli.pictures.panels import SECONDS, AnyPanel, Line, Panel, Picture, Quantity
from sparseallreduce.cli.pictures.sweeps import curves_over
from sparseallreduce.cli.sweep import Setting
from sparseallreduce.cli.synthetic import draw_positions, draw_values
from sparseallreduce.runtime.objects import agreed

__all__ = ["FIGURES"]

_SSAR = ("ssar_recursive_doubling", "ssar_split_allgather")
_DSAR = ("dsar_split_allgather", "dsar_early_switch")
_ALL = (*_SSAR, "ssar_ring", *_DSAR, "allgather", "dense")
_DENSITIES = np.geomspace(1e-4, 0.25, 8).tolist()
_ITEMS = Quantity("items, 4 bytes each", "count")


def _points(
    settings: Settings, ranks: Sequence[int], sizes: Sequence[int], densities: Sequence[float], names: Sequence[str], network: Any
) -> Any:
    points = [Setting(*point) for point in itertools.product(ranks, sizes, densities)]
    return settings.measure(points, names, None if settings.comm.size > 1 else network)


def _caption(results: dict[str, Any], network: sar.Network) -> str:
    """Return a caption that says which numbers of ranks were measured, which were simulated, and on which network."""
    points = [point for point in results["points"] if point]
    if not points:  # on other ranks than the first
        return ""
    simulated, measured = (sorted({point["ranks"] for point in points if point["simulated"] == wanted}) for wanted in (True, False))
    sentences = []
    if measured:
        sentences.append(f"Measured here on {', '.join(map(str, measured))} ranks: medians, and quartiles as bands.")
    if simulated:
        source = results["network"]["source"]
        which = "as measured here" if source == "measured" else described(network)
        sentences.append(f"Simulated, because fewer ranks were started: {', '.join(map(str, simulated))} ranks, {which}.")
    return " ".join([*sentences, "Uniformly random positions, float32; thin lines are the cost model's."])


def _by_ranks_and_density(
    settings: Settings,
    title: str,
    names: Sequence[str],
    ranks: Sequence[int],
    density: Sequence[float],
    at: int | None = None,
) -> Picture:
    """Draw one panel over the number of ranks for each density and, with ``at`` ranks, also one over density."""
    size = 2**12 if settings.small else 2**24
    over = settings.sizes((2, 4, 8), ranks)
    results = _points(settings, over, [size], density, names, PIZ_DAINT)
    panels: list[AnyPanel] = list(_curves(results, "ranks"))
    if at is not None:
        more = _points(settings, [4 if settings.small else at], [size], settings.sizes((1e-3, 0.05), _DENSITIES), names, PIZ_DAINT)
        panels += _curves(more, "density")
        results = results | {"points": results["points"] + more["points"]}
    return Picture(f"{title}, N = {size:,}", panels, _caption(results, PIZ_DAINT))


def _curves(results: dict[str, Any], name: str) -> list[Panel]:
    points = [point for point in results["points"] if point]
    if not points:
        return []
    return [
        Panel(f"{panel.title.removesuffix(': less is better')}{_fixed(points, name)}: less is better", panel.x, panel.y, panel.lines)
        for panel in curves_over(points, name)
    ]


def _fixed(points: Sequence[dict[str, Any]], name: str) -> str:
    """Return the number of ranks or the density that all points share, as text for a title; empty if there is none."""
    ranks, densities = {point["ranks"] for point in points}, {point["density"] for point in points}
    if name == "density" and len(ranks) == 1:
        return f", P = {ranks.pop()}"
    return f", density {100 * densities.pop():.3g} %" if name == "ranks" and len(densities) == 1 else ""


def _figure_4(settings: Settings) -> Picture:
    size = 2**12 if settings.small else 2**24
    densities = settings.sizes((1e-3, 1e-2, 0.1), _DENSITIES)
    results = [_points(settings, [ranks], [size], densities, _ALL, PIZ_DAINT) for ranks in settings.sizes((2, 4), (4, 32))]
    together = results[0] | {"points": [point for each in results for point in each["points"]]}
    panels: list[AnyPanel] = [panel for each in results for panel in _curves(each, "density")]
    return Picture(f"Thesis 5.4: all sparse allreduce algorithms, N = {size:,}", panels, _caption(together, PIZ_DAINT))


def _figure_5(settings: Settings) -> Picture:
    """Draw two systems, which are always simulated."""
    size, ranks = (2**12, 4) if settings.small else (2**24, 8)
    densities = settings.sizes((1e-3, 1e-2, 0.1), _DENSITIES)
    panels: list[AnyPanel] = []
    for name, network in (("Piz Daint", PIZ_DAINT), ("Greina", GREINA)):
        points = [Setting(ranks, size, density) for density in densities]
        for panel in _curves(settings.measure(points, _ALL, network, simulate=True), "density"):
            panels.append(Panel(f"{name}, {described(network)}: less is better", panel.x, panel.y, panel.lines))
    caption = "Simulated: networks like those two, whose constants the thesis does not give. Thin lines are the cost model's."
    return Picture(f"Thesis 5.5: two systems, N = {size:,}, P = {ranks}", panels, caption)


def _figure_6(settings: Settings) -> Picture:
    """Draw the time of the sum of two vectors, measured by the first rank alone."""
    sizes = settings.sizes((2**12,), (2**16, 2**20, 2**24))
    densities = settings.sizes((0.01, 0.1), np.geomspace(1e-3, 0.25, 9).tolist())

    def panels() -> list[AnyPanel]:
        if settings.comm.rank:
            return []
        return [_sums(settings, size, densities) for size in sizes]

    caption = "Measured here on one core: two streams of different uniformly random positions, float32; medians of 9, and quartiles."
    title = "Thesis 5.6: the sum of two sparse vectors, and of two dense ones"
    return Picture(title, agreed(settings.comm, panels, long_wait=True), caption)


def _sums(settings: Settings, size: int, densities: Sequence[float]) -> Panel:
    rng = np.random.default_rng(settings.seed)
    first, second = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    total = np.empty_like(first)
    rows, flat = [], _quartiles(lambda: np.add(first, second, out=total))
    for density in densities:
        count = round(density * size)
        pair = [sar.SparseStream(draw_positions(rng, size, count), draw_values(rng, count, "float32"), size) for _ in range(2)]
        rows.append(_quartiles(lambda pair=pair: pair[0] + pair[1]))
    low, median, high = map(list, zip(*rows))
    lines = [Line("sparse + sparse", densities, median, low, high)]
    level = [[value] * len(rows) for value in flat]
    lines.append(Line("dense + dense", densities, level[1], level[0], level[2]))
    equal = next((density for density, value in zip(densities, median) if value >= flat[1]), None)
    title = f"N = {size:,}, " + ("sparse is faster everywhere" if equal is None else f"dense is as fast from {100 * equal:.2g} %")
    return Panel(f"{title}: less is better", Quantity("density of each vector", "share"), SECONDS, lines)


def _quartiles(call: Any, repeats: int = 9) -> tuple[float, float, float]:
    call()
    times = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    low, median, high = np.quantile(times, [0.25, 0.5, 0.75]).tolist()
    return low, median, high


def _figure_7(settings: Settings) -> Picture:
    """Draw lower bounds: a dense allreduce of as many items as the sparse input has, as if all ranks' indices were the same."""
    items = settings.sizes((2**6, 2**10), [2**power for power in range(6, 25, 2)])
    ranks = settings.sizes((2, 4), (2, 4, 8, 16, 32))
    results = _points(settings, ranks, items, [1.0], ["dense"], PIZ_DAINT)
    points = [point for point in results["points"] if point]
    times, rates = [], []
    for count in ranks:
        found = sorted((point for point in points if point["ranks"] == count), key=lambda point: point["size"])
        if not found:
            continue
        seconds = [(point.get("dense") or point["algorithms"][0])["median"] for point in found]
        sizes, kind = [point["size"] for point in found], "simulated" if found[0]["simulated"] else "measured"
        times.append(Line(f"P = {count}", sizes, seconds, kind=kind))  # type: ignore[arg-type]
        rates.append(Line(f"P = {count}", sizes, [4 * size / time for size, time in zip(sizes, seconds)], kind=kind))  # type: ignore[arg-type]
    panels: list[AnyPanel] = [
        Panel("Time of a dense allreduce: less is better", _ITEMS, SECONDS, times),
        Panel("Throughput, vector bytes per second: more is better", _ITEMS, Quantity("throughput", "B/s"), rates),
    ]
    return Picture(
        "Thesis 5.7: lower bounds, fully overlapping indices",
        panels,
        _caption(results, PIZ_DAINT).replace("; thin lines are the cost model's", ""),
    )


def _named(number: str, title: str, names: Sequence[str], ranks: Sequence[int], density: Sequence[float], at: int | None = None) -> Figure:
    make = partial(_by_ranks_and_density, title=f"Thesis {number}: {title}", names=names, ranks=ranks, density=density, at=at)
    return Figure(f"thesis-{number}", f"{title}" + (", also by density" if at else ""), make)


FIGURES = (
    _named("5.1", "SSAR by recursive doubling, by split and allgather", _SSAR, (2, 4, 8, 16, 32, 64), (1e-4, 8e-3)),
    _named("5.2", "static (SSAR) and dynamic (DSAR)", (*_SSAR, _DSAR[0], "dense"), (2, 4, 8, 16, 32, 64), (0.016,), 8),
    _named("5.3", "early switching DSAR, groups of 8", (*_DSAR, "dense"), (8, 16, 32, 64, 128), (0.05,), 64),
    Figure("thesis-5.4", "all algorithms: time over density, few ranks and many", _figure_4),
    Figure("thesis-5.5", "two systems: time over density, 8 ranks", _figure_5),
    Figure("thesis-5.6", "the sum of two sparse vectors compared with two dense ones", _figure_6),
    Figure("thesis-5.7", "lower bounds: time and throughput of a dense allreduce", _figure_7),
)
