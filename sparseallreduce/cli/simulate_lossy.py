"""`sparseallreduce simulate --lossy`: run every reducer on a simulated network, and count words as in table 1 of Ok-Topk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce.cli.hosts_options import hosts_of
from sparseallreduce.cli.lossy_options import WORD, lossy_density, refuse_lossless
from sparseallreduce.cli.progress import progress_bar
from sparseallreduce.cli.report import check_output, environment, write_report
from sparseallreduce.cli.synthetic import draw_values, entries_of, largest_deviation
from sparseallreduce.cli.terminal import Column, table_lines, wrapped
from sparseallreduce.reducers import REDUCERS, Reducer
from sparseallreduce.reducers.base import contributions
from sparseallreduce.runtime.simulator import Simulation, same_bits
from sparseallreduce.streams.operator import SUM

__all__ = ["run"]

Array = NDArray[Any]


def run(context: click.Context, names: list[str] | None, json_path: Path | None, chosen: dict[str, Any]) -> None:
    """Simulate reducers with the options of simulate, print a table and write a report."""
    refuse_lossless(context, {"names": "--algorithms", "positions": "--positions"}, chosen["dtype"])
    check_output(json_path)
    size, density = chosen["size"], lossy_density(chosen["density"])
    k = min(size, max(1, entries_of(size, density)))
    rng = np.random.default_rng(chosen["seed"])
    accumulators = [draw_values(rng, size, chosen["dtype"]) for _ in range(chosen["ranks"])]
    network = sar.Network(chosen["latency"], chosen["bandwidth"], **hosts_of(chosen))
    rows = []
    names = names or list(REDUCERS)
    with progress_bar(sar.SERIAL, total=len(names)) as bar:
        for name in names:
            bar.set_description(name)
            rows.append(_row(name, accumulators, k, network))
            bar.update()
    click.echo(_table(chosen, k, rows))
    if json_path is not None:
        results = {"lossy": True, "density": density, "entries": k, "algorithms": rows}
        write_report(json_path, "simulate", context.params, environment(sar.SERIAL), results)
    wrong = [row["algorithm"] for row in rows if not row["correct"]]
    if wrong:
        raise click.ClickException(f"wrong results: this is a bug in sparseallreduce, please report it: {', '.join(wrong)}")


def _row(name: str, accumulators: Sequence[Array], k: int, network: sar.Network) -> dict[str, Any]:
    """Simulate two operations of a reducer; the first evaluates thresholds and regions, the second may reuse them."""
    reducers = [REDUCERS[name](len(accumulators[0]), k) for _ in accumulators]
    start = perf_counter()
    first, second = (sar.simulate(accumulators, reducers, network) for _ in range(2))
    seconds = perf_counter() - start
    update = second.outputs[0].update
    return {
        "algorithm": name,
        "time": second.time,
        "first_time": first.time,
        "words": _figures(_words(second)),
        "first_words": _figures(_words(first)),
        "bytes_sent": _figures(second.bytes_sent),
        "header_bytes": _figures(second.header_bytes),
        "messages": _figures(second.messages),
        "result_density": update.density,
        "contributed": float(np.mean([contributions(output.contributed, update.size) for output in second.outputs])) / max(1, update.size),
        "correct": _is_right(second, accumulators, reducers),
        "seconds": seconds / 2,  # wall-clock time of a simulation
    }


def _words(out: Simulation) -> Array:
    counts: Array = (out.bytes_sent - out.header_bytes) // WORD
    return counts


def _figures(counts: Array) -> dict[str, float]:
    return {"max": int(counts.max()), "mean": float(counts.mean())}


def _is_right(out: Simulation, accumulators: Sequence[Array], reducers: Sequence[Reducer]) -> bool:
    """Check that all ranks have identical bits, and that they are the sum of the contributions less the returned values."""
    update = out.outputs[0].update
    expected, magnitude = np.zeros((2, update.size), np.float64)
    for accumulator, output, reducer in zip(accumulators, out.outputs, reducers):
        expected[output.contributed] += accumulator[output.contributed]
        magnitude[output.contributed] += np.abs(accumulator[output.contributed])
        if reducer.returned is not None:
            returned = reducer.returned.to_dense()
            expected -= returned
            magnitude += np.abs(returned)
    identical = all(same_bits(update, other.update) for other in out.outputs[1:])
    return identical and largest_deviation(update, expected.astype(update.dtype), magnitude, len(accumulators), SUM) <= 1


def _table(chosen: dict[str, Any], k: int, rows: Sequence[dict[str, Any]]) -> str:
    about = (
        f"{chosen['ranks']:,} ranks x {chosen['size']:,} {chosen['dtype']} values, k = {k:,}; latency {chosen['latency']:g} s, bandwidth "
        f"{chosen['bandwidth']:g} bytes/s; the second operation, where thresholds and regions may be reused, and words of the first"
    )
    return "\n".join([wrapped(about), "", *table_lines(_COLUMNS, [_cells(row, k) for row in rows])])


_COLUMNS = (
    Column("name", "reducer", 0, 0, left=True),
    Column("time", "time, us", 0, 0),
    Column("most", "words / k", 0, 0),
    Column("mean", "on average", 0, 3),
    Column("first", "in the first", 0, 2),
    Column("messages", "messages", 0, 1),
    Column("result", "result", 0, 1),
    Column("computed", "computed in s", 0, 4),
    Column("fault", "", 0, 0, left=True),
)


def _cells(row: dict[str, Any], k: int) -> dict[str, str]:
    words = {"most": row["words"]["max"], "mean": row["words"]["mean"], "first": row["first_words"]["max"]}
    return {key: f"{count / max(1, k):,.3f}" for key, count in words.items()} | {
        "name": row["algorithm"],
        "time": f"{1e6 * row['time']:,.2f}",
        "messages": f"{row['messages']['max']:,}",
        "result": f"{row['result_density']:.3%}",
        "computed": f"{row['seconds']:.2f}",
        "fault": "" if row["correct"] else "WRONG",
    }
