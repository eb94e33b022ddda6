"""Pictures of sweeps: time and bytes over density, ranks and dimension, the choices of "auto", and the fill-in of sums."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sparseallreduce.algorithms.cost import expected_size
from sparseallreduce.cli.pictures.benchmarks import benchmark_rows
from sparseallreduce.cli.pictures.panels import (
    BYTES,
    COUNT,
    RANKS,
    SECONDS,
    SHARE,
    AnyPanel,
    Grid,
    Kind,
    Line,
    Panel,
    Picture,
    Quantity,
)

__all__ = ["curves_over", "points_of", "sweep_picture", "with_dense_bytes"]

Run = dict[str, Any]

_AXES = {"density": SHARE, "ranks": RANKS, "size": COUNT}
_KINDS: tuple[Kind, ...] = ("measured", "simulated")
_PANELS = 3  # maximum number of one kind
_DENSE = ("dense", "dense_torus", "MPI Allreduce", "and making it dense", "auto")
_CROSSING = "from here dense sends less"


def points_of(runs: Mapping[str, Run]) -> list[Run]:
    """Return the points of reports of ``bench --sweep``, ``bench`` and ``simulate``, in one format."""
    found: list[Run] = []
    for run in runs.values():
        results = run["results"]
        if "points" in results:
            found += results["points"]
        elif run["command"] == "simulate":
            arguments = {name: run["arguments"][name] for name in ("ranks", "size", "density", "dtype")}
            found.append({**arguments, **results, "simulated": True})
        else:
            found.append({**results, "simulated": False})
    return found


def sweep_picture(runs: Mapping[str, Run]) -> Picture:
    """Return the picture of points that differ in density, ranks or dimension."""
    points = points_of(runs)
    varied = [name for name in _AXES if len({point[name] for point in points}) > 1]
    panels: list[AnyPanel] = []
    for name in varied:
        panels += curves_over(points, name)
    if "density" in varied:
        panels += _bytes_over_density(points)
    if "density" in varied and "size" in varied:
        panels += _maps(points)
    if "ranks" in varied:
        panels += _fill_in(points)
    simulated = sorted({point["ranks"] for point in points if point["simulated"]})
    fixed = ", ".join(_in_words(name, points[0][name]) for name in _AXES if name not in varied)
    caption = f"{points[0].get('dtype', 'float32')}, uniformly random positions" + (f", {fixed}" if fixed else "") + "."
    if simulated:
        caption += f" Simulated: {', '.join(map(str, simulated))} ranks{_network(runs)}."
    return Picture("Allreduce over " + " and ".join(_AXES[name].name.partition(" of")[0] for name in varied), panels, caption)


def _network(runs: Mapping[str, Run]) -> str:
    for run in runs.values():
        network = run["results"].get("network") or run["arguments"]
        if network.get("latency") is not None:
            return f", {1e6 * network['latency']:.3g} µs per message, {network['bandwidth'] / 1e9:.3g} GB/s"
    return ""


def curves_over(points: Sequence[Run], name: str) -> Iterator[Panel]:
    """Yield panels of time over density, ranks or size: one line per algorithm, and a thin one for the cost model."""
    for others, group in _groups(points, name):
        lines: list[Line] = []
        for kind in _KINDS:
            lines += _lines(group, name, kind)
        lines += _model(group, name)
        yield Panel(f"Time of a sum{others}: less is better", _AXES[name], SECONDS, lines)


def _groups(points: Sequence[Run], name: str) -> Iterator[tuple[str, list[Run]]]:
    """Yield a description and the points of each group that differs only in ``name``; if there are many, a few evenly spaced ones."""
    others = [other for other in _AXES if other != name]
    varied = [other for other in others if len({point[other] for point in points}) > 1]
    by_others: dict[tuple[Any, ...], list[Run]] = {}
    for point in sorted(points, key=lambda point: tuple(point[each] for each in (*others, name))):
        by_others.setdefault(tuple(point[other] for other in others), []).append(point)
    groups = [group for group in by_others.values() if len({point[name] for point in group}) > 1]
    groups = [group for group in groups if any(point["ranks"] > 1 for point in group)] or groups
    kept = sorted({round(place) for place in np.linspace(0, len(groups) - 1, min(_PANELS, len(groups)))})
    for group in (groups[place] for place in kept):
        yield "".join(f", {_in_words(other, group[0][other])}" for other in varied), group


def _in_words(name: str, value: Any) -> str:
    if name == "density":
        return f"density {100 * value:.3g} %"
    return f"P = {value:,}" if name == "ranks" else f"N = {value:,}"


def _algorithms(group: Sequence[Run]) -> list[str]:
    names = dict.fromkeys(name for point in group for name in benchmark_rows(point))
    return [name for name in names if name != "and making it dense"]


def _time(row: Run) -> float:
    return float(row["median"] if "median" in row else row["time"])


def _lines(group: Sequence[Run], name: str, kind: Kind) -> Iterator[Line]:
    for algorithm in _algorithms(group):
        found = [
            (point[name], rows[algorithm])
            for point in group
            if point["simulated"] == (kind == "simulated") and algorithm in (rows := benchmark_rows(point))
        ]
        if found:
            low, high = ([row.get(f"{of}_quartile", _time(row)) for _, row in found] for of in ("lower", "upper"))
            bands = (low, high) if kind == "measured" else (None, None)
            times = [_time(row) for _, row in found]
            yield Line(algorithm, [x for x, _ in found], times, bands[0], bands[1], kind)


def _model(group: Sequence[Run], name: str) -> Iterator[Line]:
    for algorithm in _algorithms(group):
        found = [(point[name], benchmark_rows(point).get(algorithm, {}).get("predicted_time")) for point in group]
        known = [(x, y) for x, y in found if y]
        if known:
            yield _line(algorithm, known, "model")


def _line(label: str, points: Sequence[tuple[float, float]], kind: Kind) -> Line:
    return Line(label, [x for x, _ in points], [y for _, y in points], kind=kind)


def _most_sent(row: Run) -> float | None:
    sent = row.get("bytes_sent")
    if isinstance(sent, dict):
        return float(sent["max"])
    return float(max(sent)) if sent else None


def with_dense_bytes(point: Run) -> dict[str, float]:
    """Return by algorithm the bytes of the rank that sends the most; "dense" has its own, or else 2 (P - 1) / P N values."""
    found = {name: sent for name, row in benchmark_rows(point).items() if (sent := _most_sent(row))}
    itemsize = np.dtype(point.get("dtype", "float32")).itemsize
    found.setdefault("dense", 2 * (point["ranks"] - 1) / point["ranks"] * point["size"] * itemsize)
    return found


def _bytes_over_density(points: Sequence[Run]) -> Iterator[Panel]:
    for others, group in _groups([point for point in points if point["ranks"] > 1], "density"):
        sent = [(point["density"], point["simulated"], with_dense_bytes(point)) for point in group]
        lines = []
        for algorithm in dict.fromkeys(name for _, _, row in sent for name in row):
            for kind in _KINDS:
                known = [
                    (float(x), row[algorithm]) for x, simulated, row in sent if simulated == (kind == "simulated") and algorithm in row
                ]
                if known:
                    lines.append(_line(algorithm, known, kind))
        crossing = _crossing([(x, row) for x, _, row in sent])
        if crossing:
            lines.append(Line(_CROSSING, [crossing[0]], [crossing[1]]))
        where = f", dense wins from {100 * crossing[0]:.2g} %" if crossing else ""
        yield Panel(f"Bytes of the rank that sends the most{others}{where}: less is better", SHARE, BYTES, lines)


def _crossing(sent: Sequence[tuple[float, Mapping[str, float]]]) -> tuple[float, float] | None:
    """Return the lowest density at which no sparse algorithm sends less than the dense one, interpolated linearly, and the bytes there."""
    before: tuple[float, float] | None = None
    for density, row in sent:
        sparse = [value for name, value in row.items() if name not in _DENSE]
        if not sparse:
            return None
        excess = np.log(min(sparse) / row["dense"])
        if excess >= -1e-3:
            if before is None or before[1] >= 0 or density <= 0 or before[0] <= 0:
                return density, row["dense"]
            fraction = before[1] / (before[1] - max(float(excess), 0.0)) if excess > 0 else 1.0
            return float(before[0] * (density / before[0]) ** fraction), row["dense"]
        before = density, float(excess)
    return None


def _maps(points: Sequence[Run]) -> Iterator[Grid]:
    every = sorted({point["ranks"] for point in points if point["ranks"] > 1})
    kept = sorted({round(place) for place in np.linspace(0, len(every) - 1, min(2, len(every)))})
    for ranks in (every[place] for place in kept):
        found = {
            (point["size"], point["density"]): point.get("auto_takes") or _chosen(point) for point in points if point["ranks"] == ranks
        }
        sizes, densities = (sorted({key[place] for key in found}) for place in (0, 1))
        if len(sizes) > 1 and len(densities) > 1 and any(found.values()):
            cells = [[found.get(pair) for pair in itertools.product([size], densities)] for size in sizes]
            yield Grid(f'Choice of "auto", P = {ranks:,}', SHARE, COUNT, densities, sizes, cells)


def _chosen(point: Run) -> str | None:
    return benchmark_rows(point).get("auto", {}).get("chosen")


def _fill_in(points: Sequence[Run]) -> Iterator[Panel]:
    """Yield entries of the sum per entry of a rank over the number of ranks, with the expectation for random positions."""
    lines = []
    size = max(point["size"] for point in points)
    densities = sorted({point["density"] for point in points if point["density"] > 0})
    kept = sorted({round(place) for place in np.linspace(0, len(densities) - 1, min(4, len(densities)))})
    for density in (densities[place] for place in kept):
        label = f"density {100 * density:.3g} %"
        group = sorted((p for p in points if p["density"] == density and p["size"] == size and p["entries"]), key=lambda p: p["ranks"])
        for kind in _KINDS:
            chosen = [point for point in group if point["simulated"] == (kind == "simulated")]
            known = [(p["ranks"], share * size / p["entries"]) for p in chosen if (share := _result_density(p))]
            if known:
                lines.append(_line(label, known, kind))
        expected = [(p["ranks"], expected_size(p["entries"], size, p["ranks"]) / p["entries"]) for p in group]
        if len(expected) > 1:
            lines.append(_line(label, expected, "model"))
    if lines:
        yield Panel(f"Fill-in, N = {size:,}: less is cheaper", RANKS, Quantity("entries of the sum / entries of a rank"), lines)


def _result_density(point: Run) -> float | None:
    rows = [row for row in point["algorithms"] if row.get("result_density")]
    return float(rows[0]["result_density"]) if rows else None
