"""`sparseallreduce bench`: compare every algorithm with the dense allreduce on uniform synthetic data (thesis section 5.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce.algorithms import ALLREDUCE, AUTO
from sparseallreduce.cli import bench_collectives, bench_lossy
from sparseallreduce.cli.bench_sweep import point_header, point_line, refuse_wrong, swept, write_csv
from sparseallreduce.cli.collectives_option import collective_option
from sparseallreduce.cli.lossy_options import lossy_options
from sparseallreduce.cli.network import Taken, capacity_of, machine_of, taken_by_auto
from sparseallreduce.cli.numbers import Whole
from sparseallreduce.cli.progress import progress_bar, progress_option, write_line
from sparseallreduce.cli.report import OUTPUT_FILE, check_output, environment, on_rank_0, write_report
from sparseallreduce.cli.sweep import Setting as Point
from sparseallreduce.cli.sweep import grid, sweep_option
from sparseallreduce.cli.synthetic import algorithms_option, draw_positions, draw_values, entries_of, largest_deviation
from sparseallreduce.cli.terminal import Column, columns_of_terminal, fitting, row_of, titles_of, wrapped
from sparseallreduce.cli.timing import checksum, mpi_operator, slowest, spread, timed
from sparseallreduce.runtime.communicators import world
from sparseallreduce.runtime.objects import agreed, gather
from sparseallreduce.streams.kernels.backend import device_module
from sparseallreduce.streams.operator import MEAN, OPERATORS, Operator
from sparseallreduce.streams.wire import INDEX_NAMES

Array = NDArray[Any]

DENSE = "MPI Allreduce"  # of dense arrays that already exist: the reference of the ratios
DENSIFY = "  and making it dense"  # the cost for users who have sparse streams but no sparse allreduce


class Setting(NamedTuple):
    """The setting of a benchmark."""

    size: int
    density: float
    dtype: str
    op: str
    experiments: int  # each with new data
    repeats: int  # of every algorithm in an experiment
    seed: int
    non_blocking: bool
    cold_caches: bool
    index_codec: str = "auto"


DTYPES_OF_MPI = ["float32", "float64", "int32", "int64", "complex64", "complex128"]  # those that MPI's predefined sum supports


@dataclass
class Measured:
    """The measurements of one algorithm; the same on all ranks."""

    seconds: list[list[float]] = field(default_factory=list)  # by experiment and repeat, on the slowest rank
    bytes_sent: list[int] = field(default_factory=list)  # per rank, mean over the experiments
    header_bytes: list[int] = field(default_factory=list)  # the part of bytes_sent in headers
    messages: list[int] = field(default_factory=list)
    density: float = 0.0  # of the result, mean over the experiments
    chosen: Taken | None = None  # the algorithm that auto chose
    faults: list[str] = field(default_factory=list)


@click.command()
@click.option("--size", type=Whole(min=0), help="Dimension N.")
@click.option("--density", type=click.FloatRange(0, 1), help="Fraction of the N positions that each rank has: k = N * density.")
@collective_option()
@algorithms_option()
@click.option("--dtype", type=click.Choice(DTYPES_OF_MPI), default="float32", show_default=True)
@click.option("--op", type=click.Choice([*OPERATORS, MEAN.name]), default="sum", show_default=True)
@click.option("--repeats", type=Whole(min=1), default=9, show_default=True, help="Timings of each algorithm per experiment.")
@click.option("--experiments", type=Whole(min=1), default=5, show_default=True, help="Number of experiments, each with new data.")
@click.option("--seed", type=Whole(min=0), default=0, show_default=True, help="Seed of the data.")
@click.option("--non-blocking", is_flag=True, help="Time iallreduce and wait instead of allreduce.")
@click.option(
    "--cold-caches", is_flag=True, help="Alternate between the algorithms, so that each starts with another's data in the caches."
)
@click.option(
    "--index-codec", type=click.Choice(INDEX_NAMES), default="auto", show_default=True, help="Encoding of indices sent between hosts."
)
@lossy_options()
@click.option(
    "--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True, help="Where the data are; gpu needs CuPy and a GPU."
)
@progress_option()
@sweep_option()
@click.option("--latency", type=click.FloatRange(min=0), help="--sweep: seconds per message between simulated ranks  [measured].")
@click.option("--bandwidth", type=click.FloatRange(0, min_open=True), help="--sweep: bytes per second between simulated ranks  [measured].")
@click.option("--json", "json_path", type=OUTPUT_FILE, help="File for the results, with every single time.")
@click.option("--csv", "csv_path", type=OUTPUT_FILE, help="File for every single time as a table.")
@click.pass_context
def bench(
    context: click.Context,
    /,
    names: list[str],
    json_path: Path | None,
    csv_path: Path | None,
    device: str,
    collective: str,
    lossy: bool,
    reducers: Any,
    sweeps: dict[str, list[Any]],
    latency: float | None,
    bandwidth: float | None,
    **chosen: Any,
) -> None:
    """Compare every algorithm with the dense allreduce of the MPI library.

    Every rank has k entries at random positions. Timing starts at a barrier and ends when the slowest rank has finished. The repeats of an
    algorithm follow each other. The order of the algorithms changes from experiment to experiment. Every result is checked against the
    dense reduction.

    With --collective reduce, reduce_scatter, allgather or bcast is measured, and compared with that of the MPI library on dense arrays and
    on packed indices and values.

    With --lossy every rank has a dense gradient and a residual, and the reducers run instead. The report has the times of selection, of
    communication and in total, also as multiples of an array copy. The checks are that all ranks end with bitwise identical results, and
    that update and residuals together keep every contribution. --density is then 0.01 by default.

    With --device gpu the streams (with --lossy the gradients and residuals) and the results are in GPU memory; a timing ends when the
    device is idle. The dense baselines stay on the host; the array copy of --lossy is a copy on the device.

    With --sweep all this happens at every point of a grid, and one line per point names the fastest algorithm. Points with more ranks than
    were started are simulated, on a network with the latency and bandwidth measured here, or with --latency and --bandwidth. `plot` draws
    the curves.
    """
    _check_options(context)
    if collective != ALLREDUCE:
        bench_collectives.run(context, names, json_path, {**chosen, "collective": collective})
        return
    xp = _array_module(device)
    if lossy:
        bench_lossy.run(context, reducers, json_path, chosen, xp)
        return
    grid(sweeps, 1, chosen["size"], chosen["density"])  # reports missing options before MPI starts
    comm = world()
    points = grid(sweeps, comm.size, chosen["size"], chosen["density"])
    setting = Setting(**chosen | {"size": points[0].size, "density": points[0].density})
    on_rank_0(comm, lambda: check_output(json_path, csv_path))
    if sweeps:
        network = None if latency is None and bandwidth is None else _network(latency, bandwidth)
        _sweep(context, setting, points, names, comm, network, json_path, csv_path, xp)
        return
    steps = setting.experiments * (len(names) + (len(names) + 2) * setting.repeats)
    with progress_bar(comm, total=steps, desc="measuring") as bar:
        measured = measure(setting, names, comm, bar.update, xp)
    surroundings = environment(comm)
    results = _results(setting, measured, comm.size)
    if comm.rank == 0:
        click.echo(_table(setting, results, surroundings))
    if json_path is not None:
        on_rank_0(comm, lambda: write_report(json_path, "bench", context.params, surroundings, results))
    if csv_path is not None:
        on_rank_0(comm, lambda: write_csv(csv_path, [results]))
    faults = dict.fromkeys(f"{name}: {fault}" for name, each in measured.items() for fault in each.faults)
    if faults:
        raise click.ClickException(f"wrong results: this is a bug in sparseallreduce, please report it: {'; '.join(faults)}")


def _check_options(context: click.Context) -> None:
    """Raise UsageError for options that do not go together."""
    given = context.params
    dtype, op, sweeps, table = given["dtype"], given["op"], given["sweeps"], given["csv_path"] is not None
    if given["collective"] != ALLREDUCE and (given["lossy"] or sweeps or table or given["device"] != "cpu"):
        raise click.UsageError(f"--lossy, --sweep, --csv and --device gpu are for {ALLREDUCE}: leave out either them or --collective")
    if (given["latency"], given["bandwidth"]) != (None, None) and not sweeps:
        raise click.UsageError("--latency and --bandwidth are for ranks that --sweep simulates: leave them out, or sweep ranks")
    if given["lossy"] and (sweeps or table):
        raise click.UsageError("--sweep and --csv are for the lossless algorithms: leave them out, or leave out --lossy")
    if given["lossy"] and given["size"] is None:
        raise click.UsageError("--size is missing: give the dimension N")
    if dtype.startswith("complex") and op in ("min", "max"):
        raise click.UsageError(f"{dtype} values have no order, so there is no {op}: give --op sum or prod")
    if op == MEAN.name and np.dtype(dtype).kind == "i":
        raise click.UsageError(f"the mean of {dtype} values is not {dtype}: give --op sum, or --dtype float32")


def _network(latency: float | None, bandwidth: float | None) -> sar.Network:
    default = sar.Network()
    return sar.Network(default.latency if latency is None else latency, default.bandwidth if bandwidth is None else bandwidth)


def _sweep(
    context: click.Context,
    setting: Setting,
    points: list[Point],
    names: list[str],
    comm: Any,
    network: sar.Network | None,
    json_path: Path | None,
    csv_path: Path | None,
    xp: Any,
) -> None:
    """Measure or simulate all points, and print one line for each; collective."""

    def measured(point: Point, part: Any) -> dict[str, Any]:
        return measured_results(setting._replace(size=point.size, density=point.density), names, part, xp)

    if comm.rank == 0:
        click.echo(point_header())
    with progress_bar(comm, desc="measuring", total=len(points)) as bar:

        def on_point(point: dict[str, Any]) -> None:
            if comm.rank == 0:
                write_line(point_line(point))
            bar.update()

        results = swept(
            points, comm, measured, names, dtype=setting.dtype, op=setting.op, seed=setting.seed, network=network, on_point=on_point
        )
    results = {"sweep": context.params["sweeps"], **results}
    surroundings = environment(comm)
    if json_path is not None:
        on_rank_0(comm, lambda: write_report(json_path, "bench", context.params, surroundings, results))
    if csv_path is not None:
        on_rank_0(comm, lambda: write_csv(csv_path, results["points"]))
    agreed(comm, lambda: refuse_wrong(results["points"]))


def _array_module(device: str) -> Any:
    """Return CuPy for "gpu" and None for "cpu"; raise UsageError if CuPy or the GPU is missing."""
    if device == "cpu":
        return None
    try:
        return device_module()
    except sar.StreamError as error:
        raise click.UsageError(f"--device gpu: {error}") from error


def measured_results(setting: Setting, names: list[str], comm: Any, xp: Any = None) -> dict[str, Any]:
    """Run the experiments and return the results for the report; collective."""
    return _results(setting, measure(setting, names, comm, xp=xp), comm.size)


def measure(
    setting: Setting, names: list[str], comm: Any, on_step: Callable[[], object] = lambda: None, xp: Any = None
) -> dict[str, Measured]:
    """Run the experiments; collective over ``comm``. With ``xp``, which is CuPy, the streams are created on the device.

    Returns
    -------
    dict
        The measurements by name: first of the two dense baselines, then of the algorithms in ``names``.
    """
    dense = _Dense(setting, comm)
    stream: Any = None  # on the host; ``summed`` is the same stream where it is reduced
    summed: Any = None

    options: Any = {} if setting.index_codec == "auto" else {"index_codec": setting.index_codec}

    def make_dense() -> None:
        _fill(dense.ours, stream, dense.neutral)
        dense.reduce()

    def algorithm(name: str) -> Callable[[], sar.SparseStream]:
        def blocking() -> Any:
            return sar.allreduce(summed, comm, setting.op, name, **options)

        def in_two_steps() -> Any:
            return sar.iallreduce(summed, comm, setting.op, name, **options).wait()

        call = in_two_steps if setting.non_blocking else blocking
        return call if xp is None else lambda: _finished(call(), xp)

    calls: dict[str, Callable[[], Any]] = {DENSE: dense.reduce, DENSIFY: make_dense} | {name: algorithm(name) for name in names}
    measured = {name: Measured() for name in calls}
    count = entries_of(setting.size, setting.density)
    for experiment in range(setting.experiments):
        rng = np.random.default_rng((setting.seed, experiment, comm.rank))
        stream = sar.SparseStream(draw_positions(rng, setting.size, count), draw_values(rng, count, setting.dtype), setting.size)
        summed = stream if xp is None else stream.to_device(xp)
        dense.expect(stream)
        for name in names:  # this also compiles the kernels, and measures the network for auto
            _check(calls[name], dense, comm, measured[name])
            on_step()
        times = np.empty((len(calls), setting.repeats))
        for place, repeat in _timing_order(setting, experiment, len(calls)):
            times[place, repeat] = timed(list(calls.values())[place], comm)
            on_step()
        for each, row in zip(measured.values(), slowest(times, comm)):
            each.seconds.append(row.tolist())
    if AUTO in names:
        machine = machine_of(comm)
        if machine is not None:
            kind, where = (setting.dtype, dense.op, True, capacity_of(comm)), xp is not None
            measured[AUTO].chosen = taken_by_auto(machine, setting.size, count, comm.size, *kind, on_device=where)
    for name in names:
        _finish(measured[name], setting.experiments)
    return measured


def _finished(result: sar.SparseStream, xp: Any) -> sar.SparseStream:
    """Return a result once the device has finished it."""
    xp.cuda.Device().synchronize()
    return result


class _Dense:
    """The dense reduction of MPI on arrays that are allocated once; a copy if there is only one process."""

    def __init__(self, setting: Setting, comm: Any) -> None:
        self.comm = comm
        self.divisor = comm.size if setting.op == MEAN.name else 1
        self.op: Operator = OPERATORS["sum" if setting.op == MEAN.name else setting.op]
        self.neutral = self.op.neutral_of(setting.dtype)
        self.ours = np.full(setting.size, self.neutral, setting.dtype)
        self.total = np.empty_like(self.ours)
        self.expected: Array = self.total
        self.magnitude: Array | None = None

    def reduce(self) -> None:
        if self.comm.size == 1:
            np.copyto(self.total, self.ours)
            return
        self.comm.Allreduce(self.ours, self.total, mpi_operator(self.op))
        if self.divisor > 1:
            self.total /= self.divisor

    def expect(self, stream: sar.SparseStream) -> None:
        """Store the data of a new experiment, and compute the result that rank 0 will compare with."""
        _fill(self.ours, stream, self.neutral)
        self.reduce()
        self.expected = self.total.copy()
        self.magnitude = None
        if self.op.is_sum and self.ours.dtype.kind in "fc":
            self.magnitude = self._reduced(np.abs(self.ours), self.op) / self.divisor
        if not self.op.is_sum:
            held = np.zeros(len(self.ours), np.int8)
            held[stream.indices] = 1
            self.expected[self._reduced(held, OPERATORS["max"]) == 0] = 0

    def _reduced(self, array: Array, op: Operator) -> Array:
        total = array.copy()
        if self.comm.size > 1:
            self.comm.Allreduce(array, total, mpi_operator(op))
        return total


def _fill(array: Array, stream: sar.SparseStream, neutral: Any) -> None:
    array.fill(neutral)
    array[stream.indices] = stream.values


def _check(call: Callable[[], sar.SparseStream], dense: _Dense, comm: Any, measured: Measured) -> None:
    """Run once, untimed: check rank 0's result, check that all ranks have identical bits, and record what was sent."""
    with sar.trace() as traffic:
        result = call().to_host()
    ranks = comm.size
    ours = (checksum(result), traffic.bytes_sent, traffic.header_bytes, traffic.messages)
    rows = gather(comm, ours)
    deviation = 0.0
    if comm.rank == 0:
        deviation = largest_deviation(result, dense.expected, dense.magnitude, ranks, dense.op)
    deviation = gather(comm, deviation)[0]
    if deviation > 1:
        measured.faults.append(f"the error is {deviation:.3g} times the rounding bound")
    if len({row[0] for row in rows}) > 1:
        measured.faults.append("the ranks have different results")
    for name, column in zip(("bytes_sent", "header_bytes", "messages"), list(zip(*rows))[1:]):
        before = getattr(measured, name) or [0] * ranks
        setattr(measured, name, [a + b for a, b in zip(before, column)])
    measured.density += result.density


def _finish(measured: Measured, experiments: int) -> None:
    measured.density /= experiments
    for name in ("bytes_sent", "header_bytes", "messages"):
        setattr(measured, name, [round(count / experiments) for count in getattr(measured, name)])


def _timing_order(setting: Setting, experiment: int, calls: int) -> list[tuple[int, int]]:
    """Return the order of an experiment's timings, as pairs of call number and repeat: random, and the same on all ranks."""
    rng = np.random.default_rng((setting.seed, experiment))
    if setting.cold_caches:
        return [(int(place), repeat) for repeat in range(setting.repeats) for place in rng.permutation(calls)]
    return [(int(place), repeat) for place in rng.permutation(calls) for repeat in range(setting.repeats)]


def _results(setting: Setting, measured: dict[str, Measured], ranks: int) -> dict[str, Any]:
    baseline = float(np.median(measured[DENSE].seconds))
    rows = [_row(name.strip(), each, baseline) for name, each in measured.items()]
    return {
        **setting._asdict(),
        "ranks": ranks,
        "entries": entries_of(setting.size, setting.density),
        "dense": rows[0],
        "dense_with_densifying": rows[1],
        "algorithms": rows[2:],
    }


def _row(name: str, measured: Measured, baseline: float) -> dict[str, Any]:
    row: dict[str, Any] = {"algorithm": name, **spread(measured.seconds)}
    row["ratio"] = row["median"] / baseline if baseline else None
    if measured.bytes_sent:
        row |= {
            "bytes_sent": measured.bytes_sent,
            "header_bytes": measured.header_bytes,
            "messages": measured.messages,
            "result_density": measured.density,
            "chosen": None if measured.chosen is None else measured.chosen.algorithm,
            "in_shared_memory": measured.chosen is not None and measured.chosen.shared,
            "correct": not measured.faults,
        }
    row["seconds"] = measured.seconds
    return row


def _table(setting: Setting, results: dict[str, Any], surroundings: dict[str, Any]) -> str:
    timings = setting.experiments * setting.repeats
    variant = ("non-blocking, " if setting.non_blocking else "") + ("cold caches, " if setting.cold_caches else "")
    columns = fitting(_COLUMNS, columns_of_terminal())
    about = (
        f"{_short(surroundings['mpi'])}, {len(surroundings['hosts'])} host(s), {surroundings['cpus']} core(s): "
        f"{setting.op} of {results['ranks']} x {results['entries']:,} {setting.dtype} entries, N = {setting.size:,} "
        f"(density {setting.density:.4g})"
    )
    lines = [
        wrapped(about),
        wrapped(f"{variant}milliseconds of the slowest rank, median and quartiles of {timings}"),
        "",
        titles_of(columns).rstrip(),
    ]
    dense = (DENSE, results["dense"]), (DENSIFY, results["dense_with_densifying"])
    rows = (*dense, *((row["algorithm"], row) for row in results["algorithms"]))
    return "\n".join([*lines, *(row_of(columns, _cells(name, row)).rstrip() for name, row in rows)])


_COLUMNS = (
    Column("name", "algorithm", 24, 0, left=True),
    Column("median", "median", 9, 0),
    Column("lower_quartile", "25 %", 9, 3),
    Column("upper_quartile", "75 %", 9, 3),
    Column("ratio", "/ dense", 8, 0),
    Column("sent", "sent, kB", 10, 1),
    Column("headers", "headers", 8, 5),
    Column("result", "result", 8, 4),
    Column("note", "chosen", 23, 2, left=True),
)


def _cells(name: str, row: dict[str, Any]) -> dict[str, str]:
    cells = {key: f"{1e3 * row[key]:.3f}" for key in ("median", "lower_quartile", "upper_quartile")}
    cells |= {"name": name, "ratio": "-" if row["ratio"] is None else f"{row['ratio']:.4f}"}
    if "bytes_sent" not in row:
        return cells
    sent, headers = sum(row["bytes_sent"]), sum(row["header_bytes"])
    if not row["correct"]:
        cells["ratio"] = "WRONG"
    return cells | {
        "sent": f"{max(row['bytes_sent']) / 1e3:,.1f}",
        "headers": f"{headers / sent if sent else 0:.3%}",
        "result": f"{row['result_density']:.3%}",
        "note": _taken(row),
    }


def _taken(row: dict[str, Any]) -> str:
    if not row["chosen"]:
        return ""
    return str(row["chosen"]) if columns_of_terminal() is not None else str(Taken(row["chosen"], row["in_shared_memory"]))


def _short(library: str | None) -> str:
    return "no MPI" if library is None else library.partition(",")[0]
