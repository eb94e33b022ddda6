"""`sparseallreduce simulate --lossy`: run every reducer on a simulated network, and count words as in table 1 of Ok-Topk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

import sparseallreduce as sar
from sparseallreduce.cli.hosts_options import hosts_of
from sparseallreduce.cli.lossy_options import WORD, lossy_density, refuse_lossless
from sparseallreduce.cli.report import check_output, environment, write_report
from sparseallreduce.cli.synthetic import draw_values, entries_of, largest_deviation
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
    for name in (bar := tqdm(names or list(REDUCERS), disable=None, leave=False, dynamic_ncols=True)):
        bar.set_description(name)
        rows.append(_row(name, accumulators, k, network))
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
    lines = [
        f"{chosen['ranks']:,} ranks x {chosen['size']:,} {chosen['dtype']} values, k = {k:,}; latency {chosen['latency']:g} s, bandwidth "
        f"{chosen['bandwidth']:g} bytes/s; the second operation, where thresholds and regions may be reused, and words of the first",
        "",
        f"{'':<10} {'time':>11} {'words / k that a rank sends':>31} {'messages':>9} {'result':>8} {'computed':>9}",
        f"{'reducer':<10} {'us':>11} {'most':>10} {'mean':>10} {'first':>9} {'most':>9} {'density':>8} {'in s':>9}",
    ]
    for row in rows:
        words = (row["words"]["max"], row["words"]["mean"], row["first_words"]["max"])
        most, mean, first = (count / max(1, k) for count in words)
        line = f"{row['algorithm']:<10} {1e6 * row['time']:11,.2f} {most:10,.3f} {mean:10,.3f} {first:9,.3f} "
        line += f"{row['messages']['max']:9,} {row['result_density']:8.3%} {row['seconds']:9.2f}"
        lines.append(line + ("" if row["correct"] else "  WRONG"))
    return "\n".join(lines)
