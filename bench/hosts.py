"""Sums of sparse streams between hosts: this library, and what there is without it, beside what the wire allows.

tools/hosts.sh up 2 1gbit && tools/hosts.sh run -n 2 python bench/hosts.py --rate 1gbit [--density 0.01 ...] [--json F]

or `make bench-hosts`, which makes the hosts and removes them. Positions are uniformly random, different ones on each rank. A sample is
20 sums back to back of five streams in turn, from a barrier on; fewer where these would take longer than --longest. In every round each
way has a sample, in a new order. A time is that of the slowest rank, and the median over the rounds. All results are checked once.

The COO limit is the time for which (P - 1) k index-value pairs of 8 bytes occupy the link into a rank at the configured rate. The entropy
limit is that of 4 bytes a value and H(d) / d bits an index, where H is the binary entropy of the density d.

What "auto" has measured of a network is kept in the cache folder, and a link of a tenth of the rate is taken for the same. For another rate
on as many hosts give SPARSEALLREDUCE_CACHE another folder, as `make bench-hosts` does.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import click
from mpi4py import MPI
from ways import (
    DENSE,
    Checked,
    Timing,
    Variant,
    bytes_per_second,
    checked,
    dense_way,
    faster,
    gloo_ways,
    in_turn,
    library_ways,
    numpy_ways,
    on_own_hosts,
    uniform_streams,
    variants_option,
    write_json,
)

from sparseallreduce.algorithms import AUTO
from sparseallreduce.cli.synthetic import algorithms_option, entries_of

DENSITIES = (0.001, 0.01, 0.0625)
NUMPY = ("allgather + np.add.at", "allgather + sort")


class Aim(NamedTuple):
    """Milliseconds at N = 2**24."""

    goal: float
    reference: float  # the C++ implementation of the thesis's authors


# By hosts, rate and density.
AIMS = {
    (2, "1gbit", 0.001): Aim(0.95, 1.38),
    (2, "1gbit", 0.01): Aim(7.7, 16.8),
    (2, "1gbit", 0.0625): Aim(47, 103),
    (4, "200mbit", 0.001): Aim(12, 17.7),
    (4, "200mbit", 0.01): Aim(121, 189),
    (4, "200mbit", 0.0625): Aim(655, 1149),
    (4, "1gbit", 0.001): Aim(5.6, 5.6),
    (4, "1gbit", 0.01): Aim(58, 58),
    (4, "1gbit", 0.0625): Aim(360, 360),
}


@click.command()
@click.option("--rate", default="1gbit", show_default=True, help="Of each host's link, as tc writes it: what the limits are taken from.")
@click.option("--power", type=click.IntRange(4, 31), default=24, show_default=True, help="Of two, for N.")
@click.option(
    "--density", "densities", type=click.FloatRange(0, 1, min_open=True), multiple=True, default=DENSITIES, show_default=True, help="k / N."
)
@algorithms_option()
@variants_option(["index_codec=plain"])
@click.option("--samples", type=click.IntRange(min=1), default=9, show_default=True, help="Rounds.")
@click.option("--sums", type=click.IntRange(min=1), default=20, show_default=True, help="Back to back in a sample.")
@click.option("--streams", type=click.IntRange(min=1), default=5, show_default=True, help="That these take in turn.")
@click.option("--longest", type=click.FloatRange(0, min_open=True), default=2.0, show_default=True, help="Seconds of a sample.")
@click.option("--seconds", type=click.FloatRange(0), default=300.0, show_default=True, help="Of a density, about; at least three rounds.")
@click.option("--torch/--no-torch", default=True, show_default=True, help="Whether to time PyTorch's gloo, if it is installed.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
def hosts(
    rate: str,
    power: int,
    densities: tuple[float, ...],
    names: list[str],
    variants: list[Variant],
    torch: bool,
    json_path: Path | None,
    streams: int,
    **turns: Any,
) -> None:
    """Print what every way takes at each density, and then the best beside the limits and the goals."""
    comm, size = MPI.COMM_WORLD, 2**power
    link = bytes_per_second(rate)
    results = []
    with gloo_ways(comm, torch) as gloo:
        for density in densities:
            count = entries_of(size, density)
            given = uniform_streams(comm, comm.rank, size, count, streams)
            sparse = library_ways(comm, [name for name in names if name != "dense"], variants)
            found = checked([*sparse, dense_way(comm, given[0]), *numpy_ways(comm), *gloo], given[0], comm)
            found = faster(found, NUMPY)
            timings = in_turn(found, given, comm, **turns)
            results.append(result(comm.size, rate, size, count, link, found, timings))
            if comm.rank == 0:
                print("\n".join(table(results[-1])), flush=True)
    own = on_own_hosts(comm)
    if comm.rank == 0:
        print("\n".join(summary(results, own)), flush=True)
    arguments = {"rate": rate, "streams": streams, "with": [variant._asdict() for variant in variants], **turns}
    write_json(json_path, comm, "hosts", arguments, results)


def result(ranks: int, rate: str, size: int, count: int, link: float, found: Checked, timings: dict[str, Timing]) -> dict[str, Any]:
    """What a density came to."""
    density = count / size
    coo, entropy = (ranks - 1) * count * 8, (ranks - 1) * count * (4 + entropy_of(density) / density / 8)
    aim = AIMS.get((ranks, rate, round(density, 5))) if size == 2**24 else None
    fixed = [way.name for way in found.ways if way.algorithm not in (None, AUTO) and not way.options]
    rows = [
        {
            "way": way.name,
            "algorithm": way.algorithm,
            "options": way.options,
            "median": timings[way.name].median,
            "seconds": timings[way.name].seconds,
            "sums": timings[way.name].sums,
            "bytes_received": found.received.get(way.name, pairs_received(way.name, coo)),
            "wire_bytes": timings[way.name].wire,
        }
        for way in found.ways
    ]
    return {
        "ranks": ranks,
        "rate": rate,
        "size": size,
        "density": density,
        "entries": count,
        "coo": {"bytes": coo, "seconds": coo / link},
        "entropy": {"bytes": entropy, "seconds": entropy / link},
        "goal": aim and aim.goal / 1e3,
        "reference": aim and aim.reference / 1e3,
        "best": min(fixed, key=lambda name: timings[name].median, default=None),
        "ways": rows,
        "left_out": found.left_out,
    }


def entropy_of(density: float) -> float:
    """Bits of a position that is taken with this probability."""
    return -sum(share * math.log2(share) for share in (density, 1 - density) if share > 0)


def pairs_received(name: str, coo: int) -> int | None:
    """Bytes of the ways whose messages are plain pairs; nobody knows those of the others."""
    return coo if name in NUMPY else None


def table(result: dict[str, Any]) -> list[str]:
    """A line for each way: its time, in multiples of the limits and of the dense sum, and its bytes."""
    coo, entropy, ways = result["coo"], result["entropy"], result["ways"]
    dense = next(row["median"] for row in ways if row["way"] == DENSE)
    width = max(len(row["way"]) for row in ways) + 2
    lines = [
        f"\n{result['ranks']} ranks, {result['rate']}: N = {result['size']:,}, density {result['density']:.4g}, k = {result['entries']:,}; "
        f"COO limit {1e3 * coo['seconds']:.2f} ms, entropy limit {1e3 * entropy['seconds']:.2f} ms",
        f"{'':{width}} {'':>9} {'':>9} {'time / limit of':>16} {'time /':>8} {'received / limit of':>20} {'on the wire':>12} {'':>8}",
        f"{'way':{width}} {'ms':>9} {'fastest':>9} {'COO':>8}{'entropy':>8} {'dense':>8} {'COO':>10}{'entropy':>10} {'/ COO':>12}  samples",
    ]
    for row in ways:
        name, moved, wire = row["way"] + " *" * (row["way"] == result["best"]), row["bytes_received"], row["wire_bytes"]
        line = f"{name:{width}} {1e3 * row['median']:9.2f} {1e3 * min(row['seconds']):9.2f} "
        line += f"{row['median'] / coo['seconds']:8.2f}{row['median'] / entropy['seconds']:8.2f} {row['median'] / dense:8.4f} "
        line += f"{share(moved, coo['bytes']):>10}{share(moved, entropy['bytes']):>10} {share(wire, coo['bytes']):>12} "
        lines.append(line + f"{len(row['seconds']):4}x{row['sums']:<3}")
    lines += [f"left out: {name}: {why}" for name, why in result["left_out"].items()]
    return [*lines, "* the fastest algorithm of this library"]


def share(part: float | None, whole: float) -> str:
    return "-" if part is None else f"{part / whole:.3f}"


def summary(results: list[dict[str, Any]], own: bool) -> list[str]:
    """A line for each density: "auto" and the best algorithm beside other libraries, the limits and the goal, in milliseconds."""
    columns = [name for name in dict.fromkeys(row["way"] for each in results for row in each["ways"]) if name.startswith(AUTO)]
    autos = " ".join(f"{name:>{max(9, len(name))}}" for name in columns)
    header = f"{'density':>8} {'best':>9} {autos} {'dense':>9} {'NumPy':>9} {'gloo':>9}"
    lines = [
        f"\nmilliseconds, {results[0]['ranks']} ranks, {results[0]['rate']}" + ", NOT on hosts of their own" * (not own),
        f"{header} {'COO':>9} {'entropy':>9} {'C++':>9} {'goal':>9} {'auto/COO':>9} {'auto/goal':>10}",
    ]
    for each in results:
        times = {row["way"]: row["median"] for row in each["ways"]}
        numpy = next((times[name] for name in NUMPY if name in times), None)
        figures = [times.get(each["best"]), *(times.get(name) for name in columns), times[DENSE], numpy, times.get("gloo, sparse")]
        figures += [each["coo"]["seconds"], each["entropy"]["seconds"], each["reference"], each["goal"]]
        widths = [9, *(max(9, len(name)) for name in columns), *[9] * 7]
        line = f"{each['density']:8.4g} " + " ".join(f"{milliseconds(figure):>{width}}" for figure, width in zip(figures, widths))
        auto, goal = times.get(AUTO), each["goal"]
        line += f" {'-' if auto is None else format(auto / each['coo']['seconds'], '.3f'):>9}"
        line += f" {'-' if auto is None or goal is None else format(auto / goal, '.3f'):>9}"
        lines.append(line + ("!" if auto is not None and goal is not None and auto > goal else " "))
    return [*lines, "! slower than the goal; C++ and goal were measured and set in other runs"]


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"


if __name__ == "__main__":
    hosts()
