"""`sparseallreduce bench --sweep`: run the benchmark at every point of a grid, on the ranks that were started or simulated."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

import sparseallreduce as sar
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.atomic_file import atomic_file
from sparseallreduce.cli.network import capacity_of, machine_of, taken_by_auto
from sparseallreduce.cli.simulated_point import network_of, predicted, simulated_point
from sparseallreduce.cli.sweep import Setting
from sparseallreduce.cli.synthetic import entries_of
from sparseallreduce.runtime import simulator
from sparseallreduce.runtime.objects import agreed
from sparseallreduce.streams.operator import as_operator

__all__ = ["point_header", "point_line", "refuse_wrong", "sample_rows", "swept", "write_csv"]

Measure = Callable[[Setting, Any], dict[str, Any]]


def swept(
    points: Sequence[Setting],
    comm: Any,
    measure: Measure,
    names: Sequence[str],
    *,
    dtype: str,
    op: str,
    seed: int,
    network: sar.Network | None,
    on_point: Callable[[dict[str, Any]], object],
    simulate: bool = False,
) -> dict[str, Any]:
    """Run all points and return rank 0's results; collective over ``comm``.

    Parameters
    ----------
    points : sequence of Setting
        A point with at most as many ranks as ``comm`` has is measured by the first ranks while the others wait; the other points are
        simulated.
    comm : communicator
    measure : callable
        Takes a setting and a communicator of its ranks, and returns the results of ``bench``.
    names : sequence of str
    dtype, op : str
    seed : int
    network : Network or None
        Network of the simulated ranks. None stands for the constants measured on ``comm``; if that has one rank, for the default network.
    simulate : bool
        Whether to simulate all points, whatever their number of ranks.
    on_point : callable
        Called on all ranks with the results of each point; with an empty dict on ranks that have none.

    Returns
    -------
    dict
        ``network``, with its ``source`` ("given", "measured" or "default"), and ``points``.
    """
    source = "given" if network is not None else "measured" if comm.size > 1 else "default"
    constants = machine_of(comm)
    chosen = network or (sar.Network() if constants is None else network_of(constants))
    machine = constants or simulator.machine_of(chosen)
    parts = {ranks: _first(comm, ranks) for ranks in sorted({point.ranks for point in points}) if ranks <= comm.size and not simulate}
    found = []
    for point in points:
        part = parts.get(point.ranks)
        if part is not None:
            one = agreed(comm, lambda: _measured(point, part, measure, dtype, op, machine), long_wait=True)  # noqa: B023
        else:
            one = agreed(comm, lambda: _simulated(comm, point, names, dtype, op, chosen, seed), long_wait=True)  # noqa: B023
        on_point(one)
        found.append(one)
    for ranks, part in parts.items():
        if part is not comm and part.size == ranks:
            part.Free()
    return {"network": {"source": source, **chosen._asdict()}, "points": found}


class _Waiting:
    """Stands for a communicator on ranks that do not take part."""

    size = 0


def _first(comm: Any, ranks: int) -> Any:
    """Return a communicator of the first ``ranks`` ranks; ``comm`` itself if that is all of them."""
    if ranks == comm.size:
        return comm
    from mpi4py import MPI

    part = comm.Split(0 if comm.rank < ranks else MPI.UNDEFINED, comm.rank)
    return _Waiting() if part == MPI.COMM_NULL else part


def _measured(point: Setting, part: Any, measure: Measure, dtype: str, op: str, machine: Machine) -> dict[str, Any]:
    if part.size == 0:
        return {}
    results = measure(point, part)
    for row in results["algorithms"]:
        row["predicted_time"] = predicted(row["algorithm"], point, dtype, op, machine)
    entries = entries_of(point.size, point.density)
    takes = str(taken_by_auto(machine, point.size, entries, point.ranks, dtype, as_operator(op), True, capacity_of(part)))
    return results | {"simulated": False, "auto_takes": takes}


def _simulated(comm: Any, point: Setting, names: Sequence[str], dtype: str, op: str, network: sar.Network, seed: int) -> dict[str, Any]:
    return simulated_point(point, names, dtype, op, network, seed) if comm.rank == 0 else {}


_COLUMNS = ("ranks", "size", "density", "entries", "dtype", "op", "simulated")
_OF_ALGORITHM = ("algorithm", "experiment", "repeat", "seconds", "predicted_seconds", "most_bytes_sent", "result_density", "chosen")


def sample_rows(points: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    """Yield a header, then one row for every timing of every algorithm (dense baselines included) at every point."""
    yield [*_COLUMNS, *_OF_ALGORITHM]
    for point in points:
        setting = [point.get(name, False) for name in _COLUMNS]
        dense = [point[name] for name in ("dense", "dense_with_densifying") if name in point]
        for row in [*dense, *point["algorithms"]]:
            about = [row.get("predicted_time"), max(row["bytes_sent"]) if row.get("bytes_sent") else None]
            about += [row.get("result_density"), row.get("chosen")]
            for experiment, times in enumerate(row["seconds"]):
                for repeat, seconds in enumerate(times):
                    yield [*setting, row["algorithm"], experiment, repeat, seconds, *about]


def write_csv(path: Path, points: Sequence[Mapping[str, Any]]) -> None:
    """Write every timing to a CSV file, atomically."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(sample_rows(points))
    with atomic_file(path, "w") as file:
        file.write(text.getvalue())


def point_line(point: Mapping[str, Any]) -> str:
    """Return the results of a point as one line of at most 79 characters."""
    best = min(point["algorithms"], key=lambda row: row["median"])
    dense = point.get("dense") or next((row for row in point["algorithms"] if row["algorithm"] == "dense"), None)
    ratio = f"{best['median'] / dense['median']:8.4f}" if dense and dense["median"] else f"{'-':>8}"
    how = "simulated" if point["simulated"] else "measured"
    setting = f"{point['ranks']:>5} {point['size']:>12,} {point['density']:>8.4g}"
    return f"{setting} {how:<9} {best['algorithm']:<23} {1e3 * best['median']:>8.3f} {ratio}"


def point_header() -> str:
    """Return the header of these lines."""
    return f"{'ranks':>5} {'N':>12} {'density':>8} {'':<9} {'fastest':<23} {'ms':>8} {'/ dense':>8}"


def refuse_wrong(points: Sequence[Mapping[str, Any]]) -> None:
    """Raise ClickException if any result was wrong."""
    wrong = dict.fromkeys(row["algorithm"] for point in points for row in point.get("algorithms", ()) if not row["correct"])
    if wrong:
        raise click.ClickException(f"wrong results: this is a bug in sparseallreduce, please report it: {', '.join(wrong)}")
