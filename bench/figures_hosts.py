"""Repeat figures 7 and 8 of CommLib (sections 5.1 and 5.3) in the simulator, and compare all algorithms on 64 hosts of 16 ranks.

    python bench/figures_hosts.py --figure 7 [--json F]        seconds of a sum by TreeAR, 2DTAR, NaiveAG and HiTopKComm, by dimension
    python bench/figures_hosts.py --figure 8 [--json F]        HiTopKComm's four steps at 25 and 110 million parameters
    python bench/figures_hosts.py --figure ranks [--json F]    every algorithm flat, and between hosts in a hierarchical sum, P = 1,024

The paper's cluster has 16 hosts of 8 GPUs: 25 Gbit/s between hosts, NVLink inside (a V100 sends 150 GB/s). It gives no latencies; taken are
30 microseconds between hosts, as of TCP between virtual machines, and 5 inside. k is 0.01 N in all. Values are float32, also in figure 7,
where the paper's are float16: dense methods take half of the time with those, pairs of an index and a value three quarters. Computation
takes no time on the network; what the selection takes on one core of this machine is beside figure 8.

A vector of N values is simulated by one of N/s, on a network whose bandwidths are divided by s: in the alpha-beta model the time is that
of the whole one, but for the headers of messages, which weigh s times as much. The tree is like NCCL's: two binary trees over the hosts
that have half of the vector each, with a chain in each host, in pieces that follow one another. NaiveAG gathers in a ring, as NCCL does,
and beside it as this library does.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

import sparseallreduce as sar
from sparseallreduce.algorithms.steps import Clock, HostGather, HostReduceScatter, Recv, RecvAny, Send, Step
from sparseallreduce.cli.report import environment, write_report
from sparseallreduce.runtime.simulator import run
from sparseallreduce.streams.selection import ExactTopK, MSTopK

Array = NDArray[Any]
Steps = Generator[Step, Any, Any]

HOSTS, LANES = 16, 8
CLOUD = sar.Network(30e-6, 25e9 / 8, hosts=LANES, local_latency=5e-6, local_bandwidth=150e9)
SHARE = 0.01  # k / N
DIMENSIONS = (1, 4, 16, 25, 64, 110)  # million values
LARGEST = 2**18  # values that a simulated rank has at most, about
PIECES = 32  # of half a vector, in the tree
BREAKDOWN = (("ResNet-50", 25_000_000), ("Transformer", 110_000_000))

MANY = sar.Network(30e-6, 25e9 / 8, hosts=16, local_latency=1e-6, local_bandwidth=10e9)
MANY_RANKS, MANY_SIZE, MANY_SHARES = 1024, 2**20, (1e-4, 1e-3)


@click.command()
@click.option("--figure", type=click.Choice(["7", "8", "ranks"]), required=True)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
@click.pass_context
def figures(context: click.Context, figure: str, json_path: Path | None) -> None:
    """Simulate a figure, and print it as a table."""
    rows = {"7": figure_7, "8": figure_8, "ranks": of_many_ranks}[figure]()
    if json_path is not None:
        write_report(json_path, "figures_hosts", context.params, environment(sar.SERIAL), {"rows": rows})


def figure_7() -> list[dict[str, Any]]:
    """Seconds of a sum, by method and dimension."""
    rows = []
    print(f"{HOSTS} hosts x {LANES} ranks, float32, k = {SHARE} N; milliseconds")
    print(f"{'million values':>14} {'TreeAR':>9} {'2DTAR':>9} {'NaiveAG':>9} {'(ours)':>9} {'HiTopKComm':>11}")
    for million in tqdm(DIMENSIONS, disable=None, leave=False):
        arrays, network, size = scaled(million * 1_000_000)
        row = {"size": million * 1_000_000, **dict(times_of(arrays, network, size))}
        rows.append(row)
        print(f"{million:14} " + " ".join(f"{1e3 * row[name]:{width}.2f}" for name, width in COLUMNS))
    return rows


COLUMNS = (("TreeAR", 9), ("2DTAR", 9), ("NaiveAG", 9), ("NaiveAG, ours", 9), ("HiTopKComm", 11))


def scaled(size: int) -> tuple[list[Array], sar.Network, int]:
    """The vectors of all ranks in a lower dimension, the network on which they take as long, and that dimension."""
    factor = -(-size // LARGEST)
    small = size // factor
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(small).astype(np.float32) for _ in range(HOSTS * LANES)]
    network = CLOUD._replace(bandwidth=CLOUD.bandwidth / factor, local_bandwidth=CLOUD.near_bandwidth / factor)
    return arrays, network, small


def times_of(arrays: Sequence[Array], network: sar.Network, size: int) -> Iterator[tuple[str, float]]:
    """Of each method: its name and its seconds; every result is compared to what it should be."""
    ranks, k = len(arrays), round(SHARE * size)
    total = np.sum(arrays, axis=0, dtype=np.float64)
    out = run([Tree(array, rank, ranks).run() for rank, array in enumerate(arrays)], network)
    check(out.outputs, total)
    yield "TreeAR", out.time
    out = sar.simulate([sar.SparseStream.from_dense(array) for array in arrays], "dense_torus", network)
    check([output.to_dense() for output in out.outputs], total)
    yield "2DTAR", out.time
    chosen = [stream_of_top_k(array, k) for array in arrays]
    total = np.sum([stream.to_dense() for stream in chosen], axis=0, dtype=np.float64)
    out = run([ring_gather(stream, rank, ranks) for rank, stream in enumerate(chosen)], network)
    check([sum_of(streams) for streams in out.outputs[:1]], total)
    yield "NaiveAG", out.time
    yield "NaiveAG, ours", sar.simulate(arrays, [sar.TopkA(size, k) for _ in arrays], network).time
    out = sar.simulate(arrays, [sar.HiTopK(size, k) for _ in arrays], network)
    assert 0 < out.outputs[0].update.nnz <= HOSTS * (k + LANES)
    yield "HiTopKComm", out.time


def check(results: Sequence[Array], expected: Array) -> None:
    """Whether all are the sum, as float32 rounds it."""
    for result in results:
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)


def stream_of_top_k(array: Array, k: int) -> sar.SparseStream:
    indices = np.sort(np.argpartition(-np.abs(array), k)[:k]).astype(np.uint32)
    return sar.SparseStream(indices, array[indices], len(array))


def sum_of(streams: Sequence[sar.SparseStream]) -> Array:
    return np.sum([stream.to_dense() for stream in streams], axis=0, dtype=np.float64)


def ring_gather(stream: sar.SparseStream, rank: int, ranks: int) -> Steps:
    """All ranks' streams, each passed on from neighbour to neighbour (NCCL's allgather)."""
    streams, passed = [stream], stream
    for _ in range(ranks - 1):
        yield Send((rank + 1) % ranks, passed)
        passed = yield Recv((rank - 1) % ranks)
        streams.append(passed)
    return streams


class Tree:
    """The sum by two binary trees over the hosts, each for half of the values, in pieces that go their ways independently."""

    def __init__(self, array: Array, rank: int, ranks: int) -> None:
        self.total = array.copy()
        pieces = np.array_split(self.total, 2 * PIECES)  # those of the two trees in turn
        places = [binary_tree(rank, ranks, mirrored) for mirrored in (False, True)]
        self._pieces = [(piece, *places[number % 2]) for number, piece in enumerate(pieces)]
        self._missing = [len(children) for _, _, children in self._pieces]
        self._sources = {other for parent, children in places for other in (parent, *children) if other is not None}

    def run(self) -> Steps:
        """The schedule; a message is the number of a piece, and its values."""
        left = sum(len(children) + (parent is not None) for _, parent, children in self._pieces)
        for number, missing in enumerate(self._missing):
            if not missing:
                yield from self._reduced(number)
        for _ in range(left):
            source, message = yield RecvAny(self._sources)
            number = int.from_bytes(message[:4], "little")
            piece, parent, _ = self._pieces[number]
            values = np.frombuffer(message, np.float32, offset=4)
            if source == parent:
                piece[:] = values
                yield from self._down(number)
                continue
            piece += values
            self._missing[number] -= 1
            if not self._missing[number]:
                yield from self._reduced(number)
        return self.total

    def _reduced(self, number: int) -> Steps:
        piece, parent, _ = self._pieces[number]
        if parent is None:
            yield from self._down(number)
        else:
            yield Send(parent, number.to_bytes(4, "little") + piece.tobytes())

    def _down(self, number: int) -> Steps:
        piece, _, children = self._pieces[number]
        for child in children:
            yield Send(child, number.to_bytes(4, "little") + piece.tobytes())


def binary_tree(rank: int, ranks: int, mirrored: bool) -> tuple[int | None, list[int]]:
    """The parent and the children of a rank: a chain in each host, to a rank that has a place in an in-order binary tree of hosts.

    In the second tree hosts are counted from the other end, and shifted by one if they are odd in number, so that inner ones are leaves of
    the other.
    """
    hosts = ranks // LANES
    host, lane = divmod(rank, LANES)

    def head(number: int) -> int:
        return (hosts - 1 - number if mirrored else number) * LANES + int(mirrored) % LANES

    chain = [head(0) % LANES, *(each for each in range(LANES) if each != head(0) % LANES)]
    at = chain.index(lane)
    below = [host * LANES + chain[at + 1]] if at + 1 < LANES else []
    if at > 0:
        return host * LANES + chain[at - 1], below
    parent, children = in_order(hosts - 1 - host if mirrored else host, hosts)
    return (None if parent is None else head(parent)), [head(child) for child in children] + below


def in_order(node: int, nodes: int) -> tuple[int | None, list[int]]:
    """The parent and the children of a node of a binary tree whose leaves are the odd nodes (Sanders, Speck, Traff 2009).

    >>> in_order(0, 8), in_order(4, 8), in_order(6, 8)
    ((None, [4]), (0, [2, 6]), (4, [5, 7]))
    """
    low = node & -node if node else 1 << (nodes - 1).bit_length()
    parent = None
    if node:
        parent = (node ^ low) | (low << 1)
        if parent >= nodes:
            parent = node ^ low
    children = []
    if node and low > 1:
        children.append(node - low // 2)
    step = low // 2
    while step and node + step >= nodes:
        step //= 2
    if step:
        children.append(node + step)
    return parent, children


def figure_8() -> list[dict[str, Any]]:
    """Seconds of HiTopKComm's steps."""
    rows = []
    print(f"{HOSTS} hosts x {LANES} ranks, float32, k = {SHARE} N; milliseconds of the slowest rank, and of selections on a core here")
    names = ("reduce_scatter", "between", "inside", "time", "MSTopK", "exact")
    print(f"{'':12} {'million':>8} " + " ".join(f"{name:>14}" for name in names))
    for name, size in BREAKDOWN:
        arrays, network, small = scaled(size)
        marks: list[list[float]] = [[] for _ in arrays]
        reducers = [sar.HiTopK(small, round(SHARE * small)) for _ in arrays]
        operations = [reducer.planned(array) for reducer, array in zip(reducers, arrays, strict=True)]
        schedules = [marked(operation.run(rank, len(arrays)), marks[rank]) for rank, operation in enumerate(operations)]
        out = run(schedules, network, encoding=sar.streams.wire.Encoding())
        into, of_host, between, inside = np.max(marks, axis=0) - np.concatenate([[0], np.max(marks, axis=0)[:-1]])
        row = {"model": name, "size": size, "reduce_scatter": into + of_host, "between": between, "inside": inside, "time": out.time}
        row |= {"MSTopK": seconds_of(MSTopK, size // LANES), "exact": seconds_of(ExactTopK, size // LANES)}
        rows.append(row)
        print(f"{name:12} {size / 1e6:8.0f} " + " ".join(f"{1e3 * row[each]:14.2f}" for each in names))
    return rows


def marked(schedule: Steps, marks: list[float]) -> Steps:
    """The schedule, which notes the times before and after each of the two steps inside a host."""
    value = None
    while True:
        try:
            step = schedule.send(value)
        except StopIteration as stop:
            return stop.value
        if isinstance(step, HostReduceScatter | HostGather):
            marks.append((yield Clock()))
            value = yield step
            marks.append((yield Clock()))
        else:
            value = yield step


def seconds_of(selector: Any, size: int) -> float:
    """The least of five selections of k of so many values."""
    values, select, times = np.random.default_rng(0).standard_normal(size).astype(np.float32), selector(round(SHARE * size)), []
    for _ in range(5):
        start = perf_counter()
        select(values)
        times.append(perf_counter() - start)
    return min(times)


def of_many_ranks() -> list[dict[str, Any]]:
    """Every algorithm on all ranks, and between hosts."""
    rows = []
    hosts = MANY_RANKS // int(MANY.hosts or 1)
    print(f"{hosts} hosts x {MANY.hosts} ranks, N = {MANY_SIZE:,}, float32, uniform; milliseconds, and bytes that the busiest rank sends")
    for share in MANY_SHARES:
        rng, k = np.random.default_rng(0), round(share * MANY_SIZE)
        streams = [uniform(rng, k) for _ in range(MANY_RANKS)]
        print(f"k = {k:,} ({share:.2%})")
        for name in sar.algorithms():
            both: dict[str, Any] = {"algorithm": name, "density": share}
            ways: dict[str, tuple[str, dict[str, str]]] = {"flat": (name, {})}
            if name not in ("hierarchical", "dense_torus", "auto"):
                ways["hierarchical"] = "hierarchical", {"outer": name}
            for way, (algorithm, options) in ways.items():
                out = sar.simulate(streams, algorithm, MANY, **options)
                both[way] = {"time": out.time, "bytes": int(out.bytes_sent.max())}
            rows.append(both)
            shown = "   ".join(f"{way} {1e3 * both[way]['time']:9.2f} ms {both[way]['bytes'] / 1e3:9.0f} kB" for way in ways)
            print(f"  {name:24} {shown}", flush=True)
    return rows


def uniform(rng: np.random.Generator, count: int) -> sar.SparseStream:
    indices = np.sort(rng.choice(MANY_SIZE, count, replace=False)).astype(np.uint32)
    return sar.SparseStream(indices, np.ones(count, np.float32), MANY_SIZE)


if __name__ == "__main__":
    figures()
