"""`sparseallreduce simulate`: run every algorithm with real data on a simulated alpha-beta network, in one process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce.algorithms import ALLREDUCE, AUTO
from sparseallreduce.algorithms.choose import problem_of
from sparseallreduce.algorithms.cost import PCIE4_X16, Machine, copy_time, predicted_time
from sparseallreduce.cli import simulate_collectives, simulate_lossy
from sparseallreduce.cli.collectives_option import collective_option
from sparseallreduce.cli.hosts_options import hosts_of, hosts_options
from sparseallreduce.cli.lossy_options import lossy_options
from sparseallreduce.cli.network import known_time, taken_by_auto
from sparseallreduce.cli.numbers import Whole
from sparseallreduce.cli.progress import progress_bar, progress_option
from sparseallreduce.cli.report import OUTPUT_FILE, check_output, environment, write_report
from sparseallreduce.cli.synthetic import algorithms_option, draw_positions, draw_values, entries_of, largest_deviation
from sparseallreduce.cli.terminal import Column, table_lines, wrapped
from sparseallreduce.runtime.launchers import launched_rank
from sparseallreduce.runtime.simulator import machine_of, same_bits
from sparseallreduce.streams.dtypes import DTYPES, is_float
from sparseallreduce.streams.operator import SUM
from sparseallreduce.streams.reduction import Reduction

Array = NDArray[Any]

_NETWORK = sar.Network()
_MACHINE = Machine()
_POSITIONS = ("uniform", "disjoint", "same")
_WITH_DENSE_RANKS = ("dense", "dsar_split_allgather", "dsar_early_switch", "dense_torus")  # each rank holds all N values


@click.command()
@click.option("--ranks", type=Whole(min=1), required=True, help="Number of simulated ranks, P.")
@click.option("--size", type=Whole(min=0), required=True, help="Dimension N.")
@click.option("--density", type=click.FloatRange(0, 1), help="Fraction of the N positions that each rank has: k = N * density.")
@collective_option()
@algorithms_option()
@click.option("--latency", type=click.FloatRange(min=0), default=_NETWORK.latency, show_default=True, help="Seconds per message (alpha).")
@click.option(
    "--bandwidth", type=click.FloatRange(0, min_open=True), default=_NETWORK.bandwidth, show_default=True, help="Bytes/second (1 / beta)."
)
@click.option("--positions", type=click.Choice(_POSITIONS), default="uniform", show_default=True, help="Positions of the ranks' entries.")
@click.option("--dtype", type=click.Choice([dtype.name for dtype in DTYPES]), default="float32", show_default=True)
@click.option("--seed", type=Whole(min=0), default=0, show_default=True, help="Seed of the data.")
@hosts_options()
@click.option(
    "--device",
    type=click.Choice(["cpu", "gpu"]),
    default="cpu",
    show_default=True,
    help="Where the simulated streams are. gpu adds the copies of messages between GPU and host, and needs no GPU.",
)
@click.option(
    "--copy-latency",
    type=click.FloatRange(min=0),
    default=_MACHINE.alpha_to_host,
    show_default=True,
    help="Seconds per copy between GPU and host.",
)
@click.option(
    "--copy-bandwidth",
    type=click.FloatRange(0, min_open=True),
    default=PCIE4_X16,
    show_default="PCI Express 4.0 x16, 3.15e10",
    help="Bytes per second in each direction.",
)
@lossy_options()
@progress_option()
@click.option("--json", "json_path", type=OUTPUT_FILE, help="File for the results.")
@click.pass_context
def simulate(
    context: click.Context, /, names: list[str], json_path: Path | None, lossy: bool, reducers: list[str] | None, **chosen: Any
) -> None:
    """Run every algorithm with real data on a simulated network with any number of ranks, in one process.

    A message of L bytes takes latency + L / bandwidth, and computation takes no time (thesis section 3.1.1). Every result is checked
    against the dense sum. The positions of the ranks' entries are independent and uniform, or disjoint, or the same on all ranks.

    With --device gpu, predictions and the choice of auto include the copies between GPU and host, which an extra column shows. The
    simulated time does not include them.

    With --collective another collective runs: reduce, reduce_scatter, allgather or bcast.

    With --lossy every rank has N values, and the words that the reducers send are counted. --density is then 0.01 by default.
    """
    if launched_rank() != 0:  # under mpiexec only the first process works
        return
    on_device = _checked_device(context, lossy)
    collective = chosen["collective"]
    if collective != ALLREDUCE and (lossy or on_device):
        raise click.UsageError(f"--lossy and --device gpu are for {ALLREDUCE}: leave them out, or leave out --collective")
    if lossy:
        simulate_lossy.run(context, reducers, json_path, chosen)
        return
    if chosen["density"] is None:
        raise click.UsageError("--density is missing: give the fraction of the N positions that each rank has")
    check_output(json_path)
    ranks, size, entries = chosen["ranks"], chosen["size"], entries_of(chosen["size"], chosen["density"])
    if chosen["positions"] == "disjoint" and entries * ranks > size:
        raise click.UsageError(f"{ranks} x {entries:,} entries are not disjoint in {size:,} positions: lower --density or --ranks", context)
    _check_memory(names, ranks, size, np.dtype(chosen["dtype"]).itemsize)
    network = sar.Network(chosen["latency"], chosen["bandwidth"], **hosts_of(chosen))
    copying = chosen["copy_latency"], 1 / chosen["copy_bandwidth"]
    streams = _streams(ranks, size, entries, chosen["positions"], chosen["dtype"], chosen["seed"])
    expected, magnitude = _dense_sums(streams)
    if collective == ALLREDUCE:
        rows = _rows(names, streams, network, expected, magnitude, copying if on_device else None)
        click.echo(_table(chosen, entries, rows))
    else:
        rows = simulate_collectives.rows_of(collective, names, streams, network, expected, magnitude)
        click.echo(simulate_collectives.table(collective, _about(chosen, entries), rows))
    results = {"entries": entries, "algorithms": rows}
    if json_path is not None:
        write_report(json_path, "simulate", context.params, environment(sar.SERIAL), results)
    wrong = [row["algorithm"] for row in rows if not row["correct"]]
    if wrong:
        raise click.ClickException(f"wrong results: this is a bug in sparseallreduce, please report it: {', '.join(wrong)}")


def _checked_device(context: click.Context, lossy: bool) -> bool:
    """Return True if streams are simulated on a GPU; raise UsageError for options that do not apply."""
    on_device: bool = context.params["device"] == "gpu"
    if on_device and lossy:
        raise click.UsageError("--device gpu predicts sums of streams: leave it out, or leave out --lossy")
    for name in ("copy_latency", "copy_bandwidth"):
        if not on_device and context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError(f"--{name.replace('_', '-')} is for --device gpu: leave it out, or give --device gpu too")
    return on_device


def _streams(ranks: int, size: int, entries: int, positions: str, dtype: str, seed: int) -> list[sar.SparseStream]:
    """Return one stream per rank; streams with the same positions share the array of them."""
    rng = np.random.default_rng(seed)
    if positions == "same":
        common = draw_positions(rng, size, entries)
        sets = [common] * ranks
    elif positions == "disjoint":
        every = draw_positions(rng, size, entries * ranks)
        rng.shuffle(every)
        sets = list(np.sort(every.reshape(ranks, entries), axis=1))
    else:
        sets = [draw_positions(rng, size, entries) for _ in range(ranks)]
    return [sar.SparseStream(indices, draw_values(rng, entries, dtype), size) for indices in sets]


def _dense_sums(streams: Sequence[sar.SparseStream]) -> tuple[Array, Array]:
    """Return the sum of the streams in their dtype (floats are rounded once), and the sum of their absolute values."""
    dtype = streams[0].dtype
    wide = np.dtype(np.float64) if is_float(dtype) else np.dtype(np.complex128) if dtype.kind == "c" else dtype
    total, magnitude = np.zeros((2, streams[0].size), wide)
    for stream in streams:
        indices, values = stream.indices, stream.values.astype(wide)
        total[indices] += values
        magnitude[indices] += np.abs(values)
    return total.astype(dtype), magnitude


def _rows(
    names: Sequence[str],
    streams: Sequence[sar.SparseStream],
    network: sar.Network,
    expected: Array,
    magnitude: Array,
    copying: tuple[float, float] | None,
) -> list[dict[str, Any]]:
    rows = []
    with progress_bar(sar.SERIAL, total=len(names)) as bar:
        for name in names:
            bar.set_description(name)
            rows.append(_row(name, streams, network, expected, magnitude, copying))
            bar.update()
    return rows


def _row(
    name: str,
    streams: Sequence[sar.SparseStream],
    network: sar.Network,
    expected: Array,
    magnitude: Array,
    copying: tuple[float, float] | None,
) -> dict[str, Any]:
    """Simulate one algorithm and return its row of the report.

    ``copying`` is the latency of a copy between GPU and host and the seconds per byte of it; None if the streams are on the host.
    """
    ranks, size, entries, dtype = len(streams), streams[0].size, streams[0].nnz, streams[0].dtype.name
    hosts, on_device = network.layout(ranks), copying is not None
    machine = machine_of(network, hosts)
    if copying is not None:
        machine = machine._replace(alpha_to_host=copying[0], beta_to_host=copying[1], alpha_to_device=copying[0], beta_to_device=copying[1])
    chosen = taken_by_auto(machine, size, entries, ranks, dtype, hosts=hosts, on_device=on_device).algorithm if name == AUTO else None
    start = perf_counter()
    out = sar.simulate(streams, chosen if chosen and on_device else name, network)
    seconds = perf_counter() - start
    first = out.outputs[0]
    identical = all(same_bits(first, other) for other in out.outputs[1:])
    problem = problem_of(streams[0], entries, ranks, Reduction(), hosts=hosts)._replace(entries=entries, on_device=on_device)
    return {
        "algorithm": name,
        "chosen": chosen,
        "time": out.time,
        "predicted_time": known_time(predicted_time(chosen or name, problem, machine)) if ranks > 1 else 0.0,
        "predicted_copies": copy_time(chosen or name, problem, machine) if ranks > 1 else 0.0,
        "bytes_sent": {"max": int(out.bytes_sent.max()), "mean": float(out.bytes_sent.mean())},
        "header_bytes": {"max": int(out.header_bytes.max()), "mean": float(out.header_bytes.mean())},
        "messages": {"max": int(out.messages.max()), "mean": float(out.messages.mean())},
        "result_density": first.density,
        "correct": identical and largest_deviation(first, expected, magnitude, ranks, SUM) <= 1,
        "seconds": seconds,  # wall-clock time of the simulation
    }


def _check_memory(names: Sequence[str], ranks: int, size: int, itemsize: int) -> None:
    """Raise an error early if the memory is too small: dense algorithms hold all N values on every rank."""
    dense = [name for name in names if name in _WITH_DENSE_RANKS]
    needed = ranks * size * itemsize
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if "SC_AVPHYS_PAGES" in os.sysconf_names else needed
    if dense and needed > available:
        raise click.ClickException(
            f"{', '.join(dense)} would need {needed / 1e9:.0f} GB for {ranks} dense vectors, but {available / 1e9:.0f} GB are free: "
            "leave them out with --algorithms, or lower --size or --ranks"
        )


def _about(chosen: dict[str, Any], entries: int) -> str:
    """Return a line that says what is simulated."""
    return (
        f"{chosen['ranks']:,} ranks x {entries:,} {chosen['dtype']} entries ({chosen['positions']} positions), N = {chosen['size']:,}; "
        f"latency {chosen['latency']:g} s, bandwidth {chosen['bandwidth']:g} bytes/s"
    )


def _table(chosen: dict[str, Any], entries: int, rows: Sequence[dict[str, Any]]) -> str:
    about = _about(chosen, entries) + "; of the rank that sends most"
    cells = [_cells(row, chosen["device"] == "gpu") for row in rows]
    return "\n".join([wrapped(about), "", *table_lines(_COLUMNS, cells)])


_COLUMNS = (
    Column("name", "algorithm", 0, 0, left=True),
    Column("time", "time, us", 0, 0),
    Column("predicted", "predicted", 0, 1),
    Column("copies", "copies", 0, 2),
    Column("sent", "sent, kB", 0, 0),
    Column("mean", "mean, kB", 0, 6),
    Column("headers", "headers", 0, 7),
    Column("messages", "messages", 0, 4),
    Column("result", "result", 0, 5),
    Column("computed", "computed in s", 0, 8),
    Column("chosen", "taken", 0, 3, left=True),
    Column("fault", "", 0, 0, left=True),
)


def _cells(row: dict[str, Any], copied: bool) -> dict[str, str]:
    return {
        "name": row["algorithm"],
        "time": f"{1e6 * row['time']:,.2f}",
        "predicted": "" if row["predicted_time"] is None else f"{1e6 * row['predicted_time']:,.2f}",
        "copies": f"{1e6 * row['predicted_copies']:,.2f}" if copied else "",
        "sent": f"{row['bytes_sent']['max'] / 1e3:,.2f}",
        "mean": f"{row['bytes_sent']['mean'] / 1e3:,.2f}",
        "headers": f"{row['header_bytes']['max'] / 1e3:,.2f}",
        "messages": f"{row['messages']['max']:,}",
        "result": f"{row['result_density']:.3%}",
        "computed": f"{row['seconds']:.2f}",
        "chosen": row["chosen"] or "",
        "fault": "" if row["correct"] else "WRONG",
    }
