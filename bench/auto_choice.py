"""Compare "auto" with the fastest of the algorithms that it chooses among, and with the dense sum, for several kinds of index sets.

mpiexec -n 2 python bench/auto_choice.py [--power 20 --power 22 --power 24] [--kind zipf ...] [--density 0.01 ...] [--json F] [--plot F.png]
python bench/auto_choice.py --join F... [--plot F.png]      the worst points of several runs together

or `make bench-hosts WHAT=auto`, on one, two and four hosts. Sets are uniform; of a Zipf law, where position i is drawn with a frequency of
1 / (i + 1), each at most once a rank; the same with positions permuted alike on all ranks; or clustered, in runs of 64. Every rank draws
its own. Powers above 22 are for densities of up to 1 %. Of the lopsided kinds, "alone" and "lopsided", one rank has uniform sets, in each
sum the next one, and the others have none, or 100 entries; their densities are others, up to 1, unless some are given:

    mpiexec -n 2 python bench/auto_choice.py --power 20 --kind alone --kind lopsided --samples 38 --sums 1 --seconds 30

A point holds if "auto" is within 10 % or 50 microseconds of the fastest fixed way, and at most 5 % or 50 microseconds slower than dense,
which makes the stream an array and calls `Allreduce`. All ways run in turn, in another order each round, and a time is that of the slowest
rank. Lower quartiles are more reliable where others use the machine: what holds by them is counted, too. The dense way runs twice: how
often it does not hold against itself is what the machine alone accounts for. Ways that take four times as long as
the fastest fixed one are timed once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from mpi4py import MPI
from never_slower import holds
from numpy.typing import NDArray
from ways import (
    DENSE,
    Timing,
    Variant,
    bytes_per_second,
    checked,
    densifying_way,
    in_turn,
    library_ways,
    variants_option,
    write_json,
)

import sparseallreduce as sar
from sparseallreduce.algorithms import AUTO
from sparseallreduce.cli.network import capacity_of, machine_of, taken_by_auto
from sparseallreduce.cli.synthetic import draw_positions, draw_values, entries_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[Any]

POWERS = (20, 22, 24)
DENSITIES = (0.0001, 0.001, 0.01, 0.0625, 0.125, 0.25, 0.5)
OF_LOPSIDED = (0.01, 0.1, 0.4, 0.7, 1.0)
SPARSE_ABOVE = 22, 0.01  # beyond this power, densities up to this
RUN = 64  # positions next to each other in a cluster
CONTROL = f"{DENSE} again"
WORST = 10
HOPELESS = 4  # times as long as the fastest


def uniform(rng: np.random.Generator, size: int, count: int) -> Array:
    return draw_positions(rng, size, count)


def zipf(rng: np.random.Generator, size: int, count: int) -> Array:
    """The positions whose clocks of rate 1 / (i + 1) ring first: as drawn one after the other without repetition."""
    clocks = rng.standard_exponential(size, np.float32) * np.arange(1, size + 1, dtype=np.float32)
    return np.sort(np.argpartition(clocks, count - 1)[:count])


def zipf_permuted(rng: np.random.Generator, size: int, count: int) -> Array:
    return np.sort(permutation(size)[zipf(rng, size, count)])


@cache
def permutation(size: int) -> Array:
    return np.random.default_rng(size).permutation(size)


def clustered(rng: np.random.Generator, size: int, count: int) -> Array:
    starts = RUN * draw_positions(rng, size // RUN, -(-count // RUN)).astype(np.int64)
    return (starts[:, np.newaxis] + np.arange(RUN)).reshape(-1)[:count]


KINDS: dict[str, Callable[[np.random.Generator, int, int], Array]] = {
    "uniform": uniform,
    "zipf": zipf,
    "zipf-permuted": zipf_permuted,
    "clustered": clustered,
    "alone": uniform,
    "lopsided": uniform,
}
LOPSIDED = {"alone": 0, "lopsided": 100}  # entries of all ranks but one, at most


@click.command()
@click.option("--power", "powers", type=click.IntRange(10, 31), multiple=True, default=POWERS, show_default=True, help="Of two, for N.")
@click.option("--kind", "kinds", type=click.Choice(list(KINDS)), multiple=True, default=tuple(KINDS), show_default=True, help="Of sets.")
@click.option(
    "--density",
    "densities",
    type=click.FloatRange(0, 1, min_open=True),
    multiple=True,
    help=f"k / N.  [default: {', '.join(map(str, DENSITIES))}; of lopsided sets {', '.join(map(str, OF_LOPSIDED))}]",
)
@variants_option()
@click.option("--rate", help="Of each host's link, as tc writes it; for the title.")
@click.option("--samples", type=click.IntRange(min=1), default=9, show_default=True, help="Rounds of a point.")
@click.option("--sums", type=click.IntRange(min=1), default=20, show_default=True, help="Back to back in a sample.")
@click.option("--streams", type=click.IntRange(min=1), default=3, show_default=True, help="That these take in turn.")
@click.option("--longest", type=click.FloatRange(0, min_open=True), default=0.05, show_default=True, help="Seconds of a sample.")
@click.option("--seconds", type=click.FloatRange(0), default=6.0, show_default=True, help="Of a point, about; at least three rounds.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
@click.option("--plot", "picture", type=click.Path(dir_okay=False, path_type=Path), help="Where to draw them.")
@click.option("--join", is_flag=True, help="Measure nothing, and take the results in the files that follow.")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def auto_choice(
    powers: Sequence[int],
    kinds: Sequence[str],
    densities: Sequence[float],
    variants: list[Variant],
    rate: str | None,
    streams: int,
    json_path: Path | None,
    picture: Path | None,
    join: bool,
    files: Sequence[Path],
    **turns: Any,
) -> None:
    """Print every point, how many hold, and the worst."""
    comm = MPI.COMM_WORLD
    if join != bool(files):
        raise click.UsageError("--join takes files that --json has written, and without it there are none")
    if rate is not None:
        bytes_per_second(rate)
    points: list[dict[str, Any]] = []
    if join:
        points = [point for file in files for point in json.loads(file.read_text())["results"]]
    else:
        where = placed(comm, rate)
        for power, kind, density in wanted(powers, kinds, densities):
            points.append({"where": where, **measured(comm, kind, 2**power, density, variants, streams, turns)})
            if comm.rank == 0:
                print("\n".join(lines(points[-1], header=len(points) == 1)), flush=True)
        arguments = {"rate": rate, "streams": streams, "with": [variant._asdict() for variant in variants], **turns}
        write_json(json_path, comm, "auto_choice", arguments, points)
    if comm.rank == 0 and points:
        print("\n".join(verdict(points)), flush=True)
        if picture is not None:
            draw(points, picture)


def placed(comm: MPI.Intracomm, rate: str | None) -> str:
    """Where the ranks are."""
    hosts = len(set(comm.allgather(MPI.Get_processor_name())))
    ranks = f", {comm.size} ranks" * (hosts < comm.size)
    return f"{hosts} host{'s' * (hosts > 1)}" + f" at {rate}" * (rate is not None and hosts > 1) + ranks


def wanted(powers: Sequence[int], kinds: Sequence[str], densities: Sequence[float]) -> Iterator[tuple[int, str, float]]:
    """The points, in the order in which they are measured."""
    power_above, density_above = SPARSE_ABOVE
    for power in powers:
        for kind in kinds:
            chosen = densities or (OF_LOPSIDED if kind in LOPSIDED else DENSITIES)
            yield from ((power, kind, density) for density in chosen if power <= power_above or density <= density_above)


def measured(
    comm: MPI.Intracomm, kind: str, size: int, density: float, variants: Sequence[Variant], streams: int, turns: dict[str, Any]
) -> dict[str, Any]:
    """The times of all ways at a point, and whether it holds; the same on all ranks."""
    count = max(1, entries_of(size, density))
    given = []
    for number in range(streams):
        rng = np.random.default_rng((number, comm.rank, comm.size))
        ours = count if kind not in LOPSIDED or comm.rank == number % comm.size else min(count, LOPSIDED[kind])
        given.append(sar.SparseStream(KINDS[kind](rng, size, ours), draw_values(rng, ours, "float32"), size))
    ways = [*library_ways(comm, sar.algorithms(), variants), densifying_way(comm, size), densifying_way(comm, size, CONTROL)]
    found = checked(ways, given[0], comm)
    timings = in_turn(found, given, comm, hopeless=HOPELESS, **turns)
    rounds = len(timings[AUTO].seconds)
    fixed = [way.name for way in found.ways if way.algorithm not in (None, AUTO) and len(timings[way.name].seconds) == rounds]
    machine = machine_of(comm)
    taken = None
    if machine is not None:
        taken = str(taken_by_auto(machine, size, count, comm.size, blocking=True, capacity=capacity_of(comm)))
    return {
        "kind": kind,
        "size": size,
        "density": density,
        "ranks": comm.size,
        "expected_choice": taken,
        **compared(timings, fixed, "median"),
        "by_quartiles": compared(timings, fixed, "quartile"),
        "ways": {name: {"median": timing.median, "quartile": timing.quartile, **timing._asdict()} for name, timing in timings.items()},
        "left_out": found.left_out,
    }


def compared(timings: dict[str, Timing], fixed: Sequence[str], figure: str) -> dict[str, Any]:
    """How "auto" stands by medians or lower quartiles of the times."""
    times = {name: float(getattr(timing, figure)) for name, timing in timings.items()}
    best = min(fixed, key=times.__getitem__)
    auto, dense = times[AUTO], times[DENSE]
    return {
        "best": best,
        "auto_to_best": auto / times[best],
        "auto_minus_best": auto - times[best],
        "auto_to_dense": auto / dense,
        "auto_minus_dense": auto - dense,
        "near_best": auto <= max(1.1 * times[best], times[best] + 50e-6),
        "near_dense": holds(auto, dense),
        "control_holds": holds(times[CONTROL], dense) if len(timings[CONTROL].seconds) > 1 else None,
    }


def lines(point: dict[str, Any], header: bool = False) -> Iterator[str]:
    """Of the table: how "auto" stands, and the times of all ways in milliseconds."""
    if header:
        yield f"{'where':22}{'set':>14}{'N':>6}{'density':>9}{'auto ms':>10}{'/ best':>9}{'+ us':>9}{'/ dense':>10}{'+ us':>9}  fastest"
    auto = point["ways"][AUTO]["median"]
    line = f"{point['where']:22}{point['kind']:>14}  2^{point['size'].bit_length() - 1}{point['density']:9.2%}{1e3 * auto:10.3f}"
    for other, near in (("best", "near_best"), ("dense", "near_dense")):
        line += f"{point[f'auto_to_{other}']:9.3f}{' ' if point[near] else '!'}{1e6 * point[f'auto_minus_{other}']:9,.0f}"
    yield f"{line}  {point['best']}; expected for uniform sets: {point['expected_choice']}"
    times = (f"{name} {1e3 * way['median']:.3f}" + " once" * (len(way["seconds"]) == 1) for name, way in point["ways"].items())
    yield f"{'':22}{', '.join(times)}"


def verdict(points: Sequence[dict[str, Any]]) -> Iterator[str]:
    """How many points hold, by place, and those at which "auto" loses most."""
    for where in dict.fromkeys(point["where"] for point in points):
        here = [point for point in points if point["where"] == where]
        yield f"\n{where}: of {len(here)} points {held(here)}"
        yield f"{'':{len(where)}}  by lower quartiles {held([{**point, **point['by_quartiles']} for point in here])}"
    yield f"\nthe {WORST} points at which auto / fastest is highest beyond 50 microseconds"
    worst = sorted(points, key=lambda point: (point["auto_minus_best"] > 50e-6, point["auto_to_best"]), reverse=True)[:WORST]
    for number, point in enumerate(worst):
        yield next(lines(point)) if number else "\n".join(list(lines(point, header=True))[:2])


def held(points: Sequence[dict[str, Any]]) -> str:
    near, dense = (sum(point[name] for point in points) for name in ("near_best", "near_dense"))
    control = [point["control_holds"] for point in points if point["control_holds"] is not None]
    both = sum(point["near_best"] and point["near_dense"] for point in points)
    return f"{both} hold: {near} near the fastest fixed way, {dense} no slower than dense (the control {sum(control)} of {len(control)})"


def draw(points: Sequence[dict[str, Any]], path: Path) -> None:
    """The ratios against density, a column a place: a colour a kind of sets, a marker a size, hollow where within 50 microseconds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    places = list(dict.fromkeys(point["where"] for point in points))
    figure = Figure(figsize=(1 + 5 * len(places), 8), layout="constrained")
    FigureCanvasAgg(figure)
    rows = (("auto_to_best", "near_best", 1.1, '"auto" / fastest fixed way'), ("auto_to_dense", "near_dense", 1.05, '"auto" / dense'))
    axes = figure.subplots(2, len(places), squeeze=False, sharex=True, sharey="row")
    for row, (ratio, near, limit, label) in zip(axes, rows):
        for place, cell in zip(places, row):
            draw_ratios(cell, [point for point in points if point["where"] == place], ratio, near)
            cell.axhline(limit, color="black", linewidth=0.8, linestyle="--")
            cell.set(title=place, xscale="log", yscale="log")
            cell.grid(alpha=0.3)
        row[0].set_ylabel(f"{label} (hollow: within the limits)")
    for cell in axes[1]:
        cell.set_xlabel("density")
    axes[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=150)


def draw_ratios(axes: Axes, points: Sequence[dict[str, Any]], ratio: str, near: str) -> None:
    for kind, colour in zip(KINDS, ("tab:blue", "tab:red", "tab:orange", "tab:green", "tab:purple", "tab:brown")):
        for size, marker in zip(sorted({point["size"] for point in points}), "osD^v*"):
            chosen = [point for point in points if (point["kind"], point["size"]) == (kind, size)]
            if not chosen:
                continue
            densities, ratios = [point["density"] for point in chosen], [point[ratio] for point in chosen]
            faces = ["none" if point[near] else colour for point in chosen]
            label = f"{kind}, N = 2^{size.bit_length() - 1}"
            axes.scatter(densities, ratios, 25, facecolors=faces, edgecolors=colour, marker=marker, label=label)


if __name__ == "__main__":
    auto_choice()
