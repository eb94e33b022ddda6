"""Compare the times that the simulator gives for sums between hosts with those that they take there.

tools/hosts.sh up 2 1gbit && tools/hosts.sh run -n 2 python bench/simulated.py --rate 1gbit [--density 0.01 ...] [--json F] [--plot F.png]

or `make bench-hosts WHAT=simulated`, which makes the hosts and removes them. The simulated network has the configured bandwidth. Its
latency is half the time of a round trip between two ranks, unless --latency gives it. Its gamma is what it takes to add two of the streams
that are summed, for each entry, and its gamma_dense what it takes to fill or to copy a dense vector, for each value, by all ranks at once.
A simulated time is that of one sum, a measured one the median of samples of many sums back to back, of all algorithms in turn. Positions
are uniformly random, different ones on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import click
import numpy as np
from mpi4py import MPI
from ways import Checked, Timing, Variant, bytes_per_second, checked, in_turn, library_ways, uniform_streams, variants_option, write_json

import sparseallreduce as sar
from sparseallreduce.cli.network import machine_of
from sparseallreduce.cli.synthetic import algorithms_option, entries_of

DENSITIES = (0.001, 0.01, 0.0625)
MANY = 2**15  # entries
NEAR = 0.25  # of the simulated time


@click.command()
@click.option("--rate", default="1gbit", show_default=True, help="Of each host's link, as tc writes it.")
@click.option("--latency", type=click.FloatRange(min=0), help="Seconds a message; measured by default.")
@click.option("--power", type=click.IntRange(4, 31), default=24, show_default=True, help="Of two, for N.")
@click.option(
    "--density", "densities", type=click.FloatRange(0, 1, min_open=True), multiple=True, default=DENSITIES, show_default=True, help="k / N."
)
@algorithms_option()
@variants_option()
@click.option("--samples", type=click.IntRange(min=1), default=9, show_default=True, help="Rounds.")
@click.option("--sums", type=click.IntRange(min=1), default=20, show_default=True, help="Back to back in a sample.")
@click.option("--streams", type=click.IntRange(min=1), default=5, show_default=True, help="That these take in turn.")
@click.option("--longest", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True, help="Seconds of a sample.")
@click.option("--seconds", type=click.FloatRange(0), default=90.0, show_default=True, help="Of a density, about; at least three rounds.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
@click.option("--plot", "picture", type=click.Path(dir_okay=False, path_type=Path), help="Where to draw them.")
def simulated(
    rate: str,
    latency: float | None,
    power: int,
    densities: tuple[float, ...],
    names: list[str],
    variants: list[Variant],
    streams: int,
    json_path: Path | None,
    picture: Path | None,
    **turns: Any,
) -> None:
    """Print both times of every algorithm, their ratio, and which are within 25 %."""
    comm, size, link = MPI.COMM_WORLD, 2**power, bytes_per_second(rate)
    if comm.size < 2:
        raise click.UsageError("a single rank sends nothing: start two or more under mpiexec")
    results = []
    for density in densities:
        count = entries_of(size, density)
        given = uniform_streams(comm, comm.rank, size, count, streams)
        alpha = half_round_trip(comm) if latency is None else latency
        network = sar.Network(alpha, link, seconds_an_entry(comm, size, count), seconds_a_value(comm, size))
        found = checked(library_ways(comm, names, variants), given[0], comm)
        timings = in_turn(found, given, comm, **turns)
        times = alone(comm, lambda count=count, found=found, network=network: simulated_times(comm, size, count, found, network))
        results.append(result(comm, rate, size, count, network, found, timings, times))
        if comm.rank == 0:
            print("\n".join(table(results[-1], header=len(results) == 1)), flush=True)
    arguments = {"rate": rate, "latency": latency, "streams": streams, "with": [variant._asdict() for variant in variants], **turns}
    write_json(json_path, comm, "simulated", arguments, results)
    if comm.rank == 0:
        print(verdict(results), flush=True)
        if picture is not None:
            draw(results, picture)


def half_round_trip(comm: MPI.Intracomm, rounds: int = 200) -> float:
    """Seconds of an empty message between ranks 0 and 1: the median; the same on all ranks."""
    nothing, times = np.empty(0, np.uint8), []
    comm.Barrier()
    if comm.rank < 2:
        other = 1 - comm.rank
        for _ in range(rounds):
            start = perf_counter()
            if comm.rank == 0:
                comm.Send(nothing, other)
            comm.Recv(nothing, other)
            if comm.rank == 1:
                comm.Send(nothing, other)
            times.append(perf_counter() - start)
    return float(comm.bcast(np.median(times) / 2 if times else None))


def seconds_an_entry(comm: MPI.Intracomm, size: int, count: int, repeats: int = 9) -> float:
    """Of adding two streams, while all ranks do so: the median of the slowest rank.

    They have the entries of those that are summed, or so many that what a call takes besides is little.
    """
    first, second = uniform_streams(comm, comm.rank, size, max(count, min(MANY, size // 4)), 2, seed=1)
    return by_all(comm, lambda: first + second, repeats) / (first.nnz + second.nnz)


def seconds_a_value(comm: MPI.Intracomm, size: int, repeats: int = 9) -> float:
    """Of a pass that fills or copies a dense vector, on memory that was used before, while all ranks do so."""
    array, copied = np.empty((2, size), np.float32)

    def passes() -> None:
        array.fill(0)
        np.copyto(copied, array)

    return by_all(comm, passes, repeats) / (2 * size)


def by_all(comm: MPI.Intracomm, action: Callable[[], Any], repeats: int) -> float:
    """Seconds of something that all ranks do at once: the median of the slowest rank."""
    action()  # compiles, and takes fresh memory
    times = []
    for _ in range(repeats):
        comm.Barrier()
        start = perf_counter()
        action()
        times.append(perf_counter() - start)
    return float(comm.allreduce(np.median(times), MPI.MAX))


def alone(comm: MPI.Intracomm, action: Callable[[], Any]) -> Any:
    """What rank 0 finds while the others leave the cores to it."""
    found = action() if comm.rank == 0 else None
    done = comm.Ibarrier()
    while not done.Test():
        sleep(1e-3)
    return comm.bcast(found)


def simulated_times(comm: MPI.Intracomm, size: int, count: int, found: Checked, network: sar.Network) -> dict[str, float]:
    """Seconds of a sum by each way, of the streams that are each rank's first."""
    given = [uniform_streams(comm, rank, size, count, 1)[0] for rank in range(comm.size)]
    return {way.name: float(sar.simulate(given, way.algorithm, network, **way.options).time) for way in found.ways}


def result(
    comm: MPI.Intracomm,
    rate: str,
    size: int,
    count: int,
    network: sar.Network,
    found: Checked,
    timings: dict[str, Timing],
    times: dict[str, float],
) -> dict[str, Any]:
    """What a density came to."""
    rows = []
    for way in found.ways:
        timing = timings[way.name]
        ratio = timing.median / times[way.name]
        row = {"way": way.name, "algorithm": way.algorithm, "options": way.options, "simulated": times[way.name]}
        rows.append(row | {"measured": timing.median, "ratio": ratio, "near": abs(ratio - 1) <= NEAR, **timing._asdict()})
    machine = machine_of(comm)
    return {
        "ranks": comm.size,
        "rate": rate,
        "size": size,
        "density": count / size,
        "entries": count,
        "network": network._asdict(),
        "machine": machine and machine._asdict(),  # what the library has measured itself
        "ways": rows,
        "left_out": found.left_out,
    }


def table(result: dict[str, Any], header: bool) -> Iterator[str]:
    """A line for each way."""
    network, machine = result["network"], result["machine"]
    if header:
        yield f"{result['ranks']} ranks, {result['rate']}, N = {result['size']:,}"
    yield (
        f"\ndensity {result['density']:.4g}, k = {result['entries']:,}: latency {1e6 * network['latency']:.1f} us, "
        f"bandwidth {network['bandwidth'] / 1e6:.0f} MB/s, gamma {_nanoseconds(network, 'gamma', 'gamma_dense')}"
        f' ("auto" takes {1e6 * machine["alpha"]:.1f} us, {1e-6 / machine["beta"]:.0f} MB/s, '
        f"{_nanoseconds(machine, 'gamma', 'gamma_dense', 'gamma_far')})"
    )
    width = max(len(row["way"]) for row in result["ways"])
    yield f"{'way':{width}} {'simulated ms':>13} {'measured ms':>12} {'fastest':>9} {'measured / simulated':>21}"
    for row in result["ways"]:
        mark = "" if row["near"] else "  not within 25 %"
        times = f"{1e3 * row['simulated']:13.3f} {1e3 * row['measured']:12.3f} {1e3 * min(row['seconds']):9.3f}"
        yield f"{row['way']:{width}} {times} {row['ratio']:21.3f}{mark}"
    yield from (f"left out: {name}: {why}" for name, why in result["left_out"].items())


def _nanoseconds(constants: dict[str, float], *names: str) -> str:
    return ", ".join(f"{1e9 * constants[name]:.2f}" for name in names) + " ns"


def verdict(results: Sequence[dict[str, Any]]) -> str:
    """How many times are near, and of which ways all are."""
    ways: dict[str, list[bool]] = {}
    for row in (row for each in results for row in each["ways"]):
        ways.setdefault(row["way"], []).append(row["near"])
    every, near = sum(map(len, ways.values())), sum(map(sum, ways.values()))
    always = ", ".join(name for name, found in ways.items() if all(found)) or "none"
    return f"\nwithin 25 % of the simulated time: {near} of {every}; at every density: {always}"


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Measured against simulated times: a colour a way, a marker a density, between them what is within 25 %."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = list(dict.fromkeys(row["way"] for each in results for row in each["ways"]))
    for each, marker in zip(results, "osD^v*P"):
        for row in each["ways"]:
            place = 1e3 * row["simulated"], 1e3 * row["measured"]
            axes.plot(*place, marker, color=f"C{names.index(row['way'])}", label=f"{row['way']}, {each['density']:.4g}")
    ends = np.array([min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])])
    ends[0] = max(ends[0], 0.5e3 * min(row["simulated"] for each in results for row in each["ways"]))
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(ends, (1 - NEAR) * ends, (1 + NEAR) * ends, color="tab:gray", alpha=0.2)
    title = f"{results[0]['ranks']} ranks, {results[0]['rate']}, N = {results[0]['size']:,}"
    axes.set(xscale="log", yscale="log", xlabel="simulated milliseconds", ylabel="measured milliseconds", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    simulated()
