"""`sparseallreduce bench --lossy`: run every reducer on dense gradients, and time selection and communication separately."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from sparseallreduce.cli.lossy_options import WORD, lossy_density, refuse_lossless
from sparseallreduce.cli.lossy_steps import LossySetting, MeasuredReducer, measure
from sparseallreduce.cli.progress import progress_bar
from sparseallreduce.cli.report import check_output, environment, on_rank_0, write_report
from sparseallreduce.cli.terminal import Column, table_lines, wrapped
from sparseallreduce.cli.timing import spread
from sparseallreduce.reducers import REDUCERS
from sparseallreduce.runtime.communicators import world

__all__ = ["run"]

Array = NDArray[Any]

_COLUMNS = (
    Column("name", "reducer", 0, 0, left=True),
    Column("select", "select", 0, 1),
    Column("communicate", "communicate", 0, 1),
    Column("median", "total", 0, 0),
    Column("lower_quartile", "25 %", 0, 8),
    Column("upper_quartile", "75 %", 0, 8),
    Column("slowest", "slowest", 0, 7),
    Column("copies", "/ copy", 0, 2),
    Column("ratio", "/ dense", 0, 0),
    Column("words", "words / k", 0, 3),
    Column("messages", "messages", 0, 6),
    Column("chosen", "chosen", 0, 5),
    Column("result", "result", 0, 4),
    Column("fault", "", 0, 0, left=True),
)


def run(context: click.Context, names: list[str] | None, json_path: Path | None, chosen: dict[str, Any], xp: Any = None) -> None:
    """Measure reducers with the options of bench (on a GPU if ``xp`` is given), print a table and write a report."""
    lossless = {"names": "--algorithms", "op": "--op", "cold_caches": "--cold-caches", "index_codec": "--index-codec"}
    refuse_lossless(context, lossless, chosen["dtype"])
    density = lossy_density(chosen["density"])
    setting = LossySetting(**{name: chosen[name] for name in LossySetting._fields} | {"density": density})
    names = names or list(REDUCERS)
    comm = world()
    on_rank_0(comm, lambda: check_output(json_path))
    steps = setting.experiments * (1 + len(names)) * (1 + setting.repeats)
    with progress_bar(comm, total=steps, desc="measuring") as bar:
        copies, dense, measured = measure(setting, names, comm, bar.update, xp)
    surroundings = environment(comm)
    results = _results(setting, copies, dense, measured, comm.size)
    if comm.rank == 0:
        click.echo(_table(setting, results, surroundings))
    if json_path is not None:
        on_rank_0(comm, lambda: write_report(json_path, "bench", context.params, surroundings, results))
    faults = dict.fromkeys(f"{name}: {fault}" for name, each in measured.items() for fault in each.faults)
    if faults:
        raise click.ClickException(f"wrong results: this is a bug in sparseallreduce, please report it: {'; '.join(faults)}")


def _results(
    setting: LossySetting, copies: list[float], dense: list[float], measured: dict[str, MeasuredReducer], ranks: int
) -> dict[str, Any]:
    baseline, copy = {"algorithm": "MPI Allreduce", **spread(dense)}, {"algorithm": "array copy", **spread(copies)}
    for row, seconds in ((baseline, dense), (copy, copies)):
        row |= {"ratio": _ratio(row, baseline), "copies": _ratio(row, copy), "seconds": seconds}
    return {
        **setting._asdict(),
        "lossy": True,
        "ranks": ranks,
        "entries": setting.k,
        "copy": copy,
        "dense": baseline,
        "algorithms": [_row(name, each, setting, baseline, copy) for name, each in measured.items()],
    }


def _ratio(row: dict[str, Any], reference: dict[str, Any]) -> float | None:
    return row["median"] / reference["median"] if reference["median"] else None


def _row(name: str, measured: MeasuredReducer, setting: LossySetting, baseline: dict[str, Any], copy: dict[str, Any]) -> dict[str, Any]:
    total, select = np.array(measured.seconds), np.array(measured.select_seconds)
    row = {"algorithm": name, **spread(total)}
    steps, size = setting.experiments, max(1, setting.size)
    return row | {
        "ratio": _ratio(row, baseline),
        "copies": _ratio(row, copy),
        "select": spread(select),
        "communicate": spread(total - select),
        "bytes_sent": _mean(measured.bytes_sent, steps),
        "header_bytes": _mean(measured.header_bytes, steps),
        "words": _mean((measured.bytes_sent - measured.header_bytes) // WORD, steps),
        "messages": _mean(measured.messages, steps),
        "contributed": measured.contributed / steps / size,
        "result_density": measured.entries / steps / size,
        "correct": not measured.faults,
        "seconds": measured.seconds,
        "select_seconds": measured.select_seconds,
    }


def _mean(counts: Array, steps: int) -> list[int]:
    return [round(count / steps) for count in counts.tolist()]


def _table(setting: LossySetting, results: dict[str, Any], surroundings: dict[str, Any]) -> str:
    k = results["entries"]
    library = surroundings["mpi"].partition(",")[0] if surroundings["mpi"] else "no MPI"
    about = (
        f"{library}, {len(surroundings['hosts'])} host(s), {surroundings['cpus']} core(s): of {results['ranks']} x {setting.size:,} "
        f"{setting.dtype} values, k = {k:,} (density {setting.density:.4g})",
        f"{'non-blocking, ' if setting.non_blocking else ''}milliseconds of the slowest rank, median and quartiles of "
        f"{setting.experiments * setting.repeats}; words of {WORD} bytes that a rank sends, values and indices",
    )
    rows = [_cells(row, k) for row in (results["copy"], results["dense"], *results["algorithms"])]
    return "\n".join([*map(wrapped, about), "", *table_lines(_COLUMNS, rows)])


def _cells(row: dict[str, Any], k: int) -> dict[str, str]:
    cells = {key: f"{1e3 * row[key]:.3f}" for key in ("median", "lower_quartile", "upper_quartile")}
    cells |= {part: f"{1e3 * row[part]['median']:.3f}" for part in ("select", "communicate") if part in row}
    cells |= {key: "-" if row[key] is None else f"{row[key]:{form}}" for key, form in (("copies", ".2f"), ("ratio", ".4f"))}
    cells |= {"name": row["algorithm"], "slowest": f"{1e3 * np.max(row['seconds']):.3f}"}
    if "words" not in row:
        return cells
    return cells | {
        "words": f"{max(row['words']) / max(1, k):.3f}",
        "messages": f"{max(row['messages']):,}",
        "chosen": f"{row['contributed']:.3%}",
        "result": f"{row['result_density']:.3%}",
        "fault": "" if row["correct"] else "WRONG",
    }
