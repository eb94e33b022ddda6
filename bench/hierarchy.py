"""Sums on hosts of several ranks: hierarchical through memory that the ranks of a host share, hierarchical by messages, and "auto".

    tools/hosts.sh up 2 1gbit 2 && tools/hosts.sh run -n 4 python bench/hierarchy.py [--density 0.01 ...] [--same] [--json F]

Ranks with a host name in common are on one host. Positions are uniformly random: a set for each rank, or with --same one for all ranks of a
host. In every round each way has a sample, in a new order: a few sums of five streams in turn, each behind a barrier. A time is that of
the slowest rank, and the median over all sums. Results of both hierarchical ways are compared to the bit, and with the dense sum.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
from mpi4py import MPI
from ways import write_json

import sparseallreduce as sar
from sparseallreduce.cli.synthetic import draw_positions, draw_values, largest_deviation
from sparseallreduce.runtime.communicators import channel_of
from sparseallreduce.streams.operator import SUM

DENSITIES = (0.001, 0.01, 0.0625)
STREAMS = 5
SHARED, MESSAGES = "through memory", "by messages"


@click.command()
@click.option("--power", type=click.IntRange(4, 30), default=24, show_default=True, help="N is two to the power of this.")
@click.option("--density", "densities", type=click.FloatRange(0, 1), multiple=True, default=DENSITIES, show_default=True)
@click.option("--same", is_flag=True, help="The ranks of a host have the same positions.")
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
@click.option("--sums", type=click.IntRange(1), default=3, show_default=True, help="In a round, of each way.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
@click.pass_context
def compare(context: click.Context, power: int, densities: tuple[float, ...], same: bool, rounds: int, sums: int, json_path: Any) -> None:
    """Time the ways at every density, and print a table."""
    comm = MPI.COMM_WORLD
    hosts = comm.allgather(socket.gethostname())
    rows = []
    for density in densities:
        streams = streams_of(comm, hosts, 1 << power, round(density * 2**power), same)
        ways = ways_of(comm)
        check(ways, streams[0], comm)
        times = timed(ways, streams, comm, rounds, sums)
        rows.append({"density": density, **{name: float(np.median(found)) for name, found in times.items()}})
        if comm.rank == 0:
            found = ", ".join(f"{name} {1e3 * np.median(each):.2f} ({1e3 * np.quantile(each, 0.25):.2f})" for name, each in times.items())
            print(f"{100 * density:g} %: {found} ms", flush=True)
    write_json(json_path, comm, "hierarchy", context.params, {"hosts": sorted(set(hosts)), "rows": rows})


def streams_of(comm: MPI.Intracomm, hosts: list[str], size: int, count: int, same: bool) -> list[sar.SparseStream]:
    """Those of this rank."""
    set_of = hosts.index(hosts[comm.rank]) if same else comm.rank
    found = []
    for number in range(STREAMS):
        positions = draw_positions(np.random.default_rng((number, set_of)), size, count)
        found.append(sar.SparseStream(positions, draw_values(np.random.default_rng((number, 1, comm.rank)), count, "float32"), size))
    return found


def ways_of(comm: MPI.Intracomm) -> dict[str, Callable[[sar.SparseStream], sar.SparseStream]]:
    """By name."""
    channel = channel_of(comm)

    def by_messages(stream: sar.SparseStream) -> sar.SparseStream:
        memory, channel.host_memory = getattr(channel, "host_memory", None), None
        try:
            return sar.allreduce(stream, comm, algorithm="hierarchical")
        finally:
            channel.host_memory = memory

    ways = {
        SHARED: lambda stream: sar.allreduce(stream, comm, algorithm="hierarchical"),
        MESSAGES: by_messages,
        "auto": lambda stream: sar.allreduce(stream, comm),
        "recursive doubling": lambda stream: sar.allreduce(stream, comm, algorithm="ssar_recursive_doubling"),
    }
    return ways


def check(ways: dict[str, Any], stream: sar.SparseStream, comm: MPI.Intracomm) -> None:
    """Raise if a result is wrong, or not the same by messages as through memory.

    Raises
    ------
    click.ClickException
    """
    dense = stream.to_dense()
    expected, magnitude = np.empty_like(dense), np.empty_like(dense)
    comm.Allreduce(dense, expected)
    comm.Allreduce(np.abs(dense), magnitude)
    results = {name: call(stream) for name, call in ways.items()}
    for name, result in results.items():
        if comm.allreduce(largest_deviation(result, expected, magnitude, comm.size, SUM), MPI.MAX) > 1:
            raise click.ClickException(f"{name} gave a wrong sum")
    shared, messages = (results[name].to_dense().tobytes() for name in (SHARED, MESSAGES))
    if not comm.allreduce(shared == messages, MPI.LAND):
        raise click.ClickException("the hierarchical sum through memory is not that by messages")


def timed(ways: dict[str, Any], streams: list[sar.SparseStream], comm: MPI.Intracomm, rounds: int, sums: int) -> dict[str, Any]:
    """Seconds of every sum on the slowest rank, by way."""
    names = list(ways)
    own = np.empty((len(names), rounds, sums))
    for number in range(rounds):
        for place in np.random.default_rng(number).permutation(len(names)):
            for sum_number in range(-1, sums):  # the first one, after another way, is not counted
                stream = streams[(number + sum_number) % len(streams)]
                comm.Barrier()
                start = perf_counter()
                result = ways[names[place]](stream)
                if sum_number >= 0:
                    own[place, number, sum_number] = perf_counter() - start
                del result
    slowest = np.empty_like(own)
    comm.Allreduce(own, slowest, MPI.MAX)
    return {name: slowest[place].reshape(-1) for place, name in enumerate(names)}


if __name__ == "__main__":
    compare()
