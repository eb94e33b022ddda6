"""Compare sums of skewed sets between hosts, by parts that fit the sets and by parts of equal widths.

tools/hosts.sh up 4 200mbit && tools/hosts.sh run -n 4 python bench/balance_hosts.py [--power 22] [--kind zipf ...] [--json F]

Sets are those of bench/auto_choice.py: of a Zipf law, from one eighth of all positions, or uniform. Both variants of "auto" and of each
algorithm run in turn, on communicators of their own, another order each round; a time is that of the slowest rank. Without boundaries the
ranks take samples of their sets as well, and the index space is cut in equal widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
from auto_choice import Array, uniform, zipf
from mpi4py import MPI
from ways import Way, checked, in_turn, write_json

import sparseallreduce as sar
from sparseallreduce.algorithms import overlap
from sparseallreduce.cli.synthetic import draw_positions, draw_values

EQUAL = "equal widths"


def cluster(rng: np.random.Generator, size: int, count: int) -> Array:
    """In the third eighth of all positions."""
    return size // 4 + draw_positions(rng, size // 8, count)


KINDS: dict[str, Callable[[np.random.Generator, int, int], Array]] = {"zipf": zipf, "cluster": cluster, "uniform": uniform}


@click.command()
@click.option("--power", type=click.IntRange(10, 31), default=22, show_default=True, help="Of two, for N.")
@click.option("--kind", "kinds", type=click.Choice(list(KINDS)), multiple=True, default=tuple(KINDS), show_default=True, help="Of sets.")
@click.option("--density", type=click.FloatRange(0, 1, min_open=True), default=0.01, show_default=True, help="k / N.")
@click.option("--algorithms", default="auto,ssar_split_allgather", show_default=True)
@click.option("--samples", type=click.IntRange(min=1), default=9, show_default=True, help="Rounds.")
@click.option("--sums", type=click.IntRange(min=1), default=20, show_default=True, help="Back to back in a sample.")
@click.option("--streams", type=click.IntRange(min=1), default=3, show_default=True, help="That these take in turn.")
@click.option("--longest", type=click.FloatRange(0, min_open=True), default=0.5, show_default=True, help="Seconds of a sample.")
@click.option("--seconds", type=click.FloatRange(0), default=30.0, show_default=True, help="Of a kind of sets, about.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
def balance_hosts(
    power: int, kinds: Sequence[str], density: float, algorithms: str, streams: int, json_path: Path | None, **turns: Any
) -> None:
    """Print the times of all ways, and how they compare."""
    comm, size = MPI.COMM_WORLD, 2**power
    results = []
    for kind in kinds:
        rngs = (np.random.default_rng((number, comm.rank, comm.size)) for number in range(streams))
        count = max(1, round(density * size))
        given = [sar.SparseStream(KINDS[kind](rng, size, count), draw_values(rng, count, "float32"), size) for rng in rngs]
        found = checked([way for name in algorithms.split(",") for way in ways_of(comm, name)], given[0], comm)
        timings = in_turn(found, given, comm, **turns)
        results.append({"kind": kind, "size": size, "entries": count, "ranks": comm.size, "received": found.received})
        results[-1]["ways"] = {name: {"median": timing.median, **timing._asdict()} for name, timing in timings.items()}
        if comm.rank == 0:
            print(f"\n{kind}, N = 2^{power}, k = {count:,}, {comm.size} ranks", flush=True)
            for name in algorithms.split(","):
                new, old = (timings[each].median for each in (name, f"{name}, {EQUAL}"))
                received = [found.received[each] / 1e6 for each in (name, f"{name}, {EQUAL}")]
                print(
                    f"{name:24} {1e3 * old:9.2f} -> {1e3 * new:9.2f} ms ({new / old:.3f}), "
                    f"received at most {received[1]:.3f} -> {received[0]:.3f} MB ({received[0] / received[1]:.3f})",
                    flush=True,
                )
    write_json(json_path, comm, "balance_hosts", {"algorithms": algorithms, "streams": streams, **turns}, results)


def ways_of(comm: MPI.Intracomm, name: str) -> list[Way]:
    """An algorithm that cuts where entries lie, and the same in equal widths."""
    fitting, equal = comm.Dup(), comm.Dup()

    def in_equal_widths(stream: sar.SparseStream) -> sar.SparseStream:
        with mock.patch.object(overlap, "MOST_POSITIONS", 0):  # beyond which it is not known where entries lie
            return sar.allreduce(stream, equal, algorithm=name)

    return [
        Way(name, lambda stream: sar.allreduce(stream, fitting, algorithm=name), name),
        Way(f"{name}, {EQUAL}", in_equal_widths, name),
    ]


if __name__ == "__main__":
    balance_hosts()
