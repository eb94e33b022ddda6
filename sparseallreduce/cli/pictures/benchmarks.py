"""Pictures of benchmarks at one setting: time and bytes of every algorithm or reducer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparseallreduce.cli.pictures.panels import BYTES, SECONDS, AnyPanel, Dots, Kind, Line, Picture

__all__ = ["benchmark_picture", "benchmark_rows"]

Run = dict[str, Any]


def benchmark_picture(runs: Mapping[str, Run]) -> Picture:
    """Return the picture of reports of ``bench`` or ``simulate`` by the names of the runs: one row per algorithm, one colour per run."""
    rows = {name: benchmark_rows(run["results"]) for name, run in runs.items()}
    labels = list(dict.fromkeys(algorithm for by_name in rows.values() for algorithm in by_name))
    times = [line for name, by_name in rows.items() for line in _times(name, by_name, labels, _kind(runs[name]))]
    panels: list[AnyPanel] = [Dots("Time of the slowest rank, median and quartiles: less is better", SECONDS, labels, times)]
    sent = {name: {label: value for label, row in by_name.items() if (value := _most_sent(row))} for name, by_name in rows.items()}
    senders = [label for label in labels if any(label in by_name for by_name in sent.values())]
    if senders:  # one process sends nothing
        lines = [
            Line(name, [senders.index(label) for label in by_name], list(by_name.values()), kind=_kind(runs[name]))
            for name, by_name in sent.items()
        ]
        panels.append(Dots("Bytes of the rank that sends the most: less is better", BYTES, senders, lines))
    settings = "; ".join(_setting(name, run) for name, run in runs.items())
    return Picture("Allreduce by algorithm", panels, settings)


def _times(name: str, rows: Mapping[str, Run], labels: Sequence[str], kind: Kind) -> Iterator[Line]:
    """Yield the times of a run, of lossy reducers also those of the selection, at the places of its ``labels``."""
    places = [place for place, label in enumerate(labels) if label in rows]
    found = [rows[labels[place]] for place in places]
    low, high = ([row.get(f"{of}_quartile", _time(row)) for row in found] for of in ("lower", "upper"))
    selecting = [(place, row["select"]["median"]) for place, row in zip(places, found) if "select" in row]
    yield Line(name, places, [_time(row) for row in found], low, high, kind, "whole operation" if selecting else "")
    if selecting:
        yield Line(name, [place for place, _ in selecting], [time for _, time in selecting], kind=kind, what="selection only")


def _kind(run: Run) -> Kind:
    return "simulated" if run["command"] == "simulate" else "measured"


def benchmark_rows(results: Run) -> dict[str, Run]:
    """Return the rows of results by algorithm, the dense baselines first."""
    rows = [results[name] for name in ("dense", "dense_with_densifying") if name in results]  # with --lossy only the former
    return {row["algorithm"]: row for row in (*rows, *results["algorithms"])}


def _time(row: Run) -> float:
    return float(row["median"] if "median" in row else row["time"])


def _most_sent(row: Run) -> float | None:
    sent = row.get("bytes_sent")
    if isinstance(sent, dict):
        return float(sent["max"])
    return float(max(sent)) if sent else None


def _setting(name: str, run: Run) -> str:
    results, arguments = run["results"], run.get("arguments") or {}
    ranks, size = (results.get(of, arguments.get(of)) for of in ("ranks", "size"))
    density = results.get("density", arguments.get("density"))
    simulated = "simulated, " if run["command"] == "simulate" else ""
    return f"{name}: {simulated}{ranks} rank{'s' * (ranks > 1)}, N = {size:,}, density {100 * density:.4g} %"
