"""Compare sums of skewed sets with sums of the same sets whose positions are permuted, in the simulator.

    python bench/balance.py [--ranks 4,16,64] [--kinds zipf-1.2,cluster] [--data FOLDER] [--algorithms a,b] [--hashed] [--json FILE]

Every rank draws its own set of about 7,000 to 10,000 of N = 2**20 positions: uniformly; by a Zipf law with low numbers frequent; from one
range of 40,000 positions, or two of 20,000; or by the Zipf law of exponent 1.2 with 30 times as many draws on one rank. Of real data each
rank sums the gradient of a batch, whose positions are the features of its rows: as they are numbered, or numbered by frequency. Values are
float32. The network has a latency of 2 microseconds and 10 Gbit/s.

A line has the simulated milliseconds of "auto", of the fastest algorithm and of each that cuts the index space, those of "auto" and of the
fastest for the permuted sets, and what (k + union) entries of 8 bytes take on the wire. "balanced" is "auto" divided by "auto" of the
permuted sets, and holds up to 1.15; "choice" is "auto" divided by the fastest, and holds up to 1.1. A permutation of positions is what
hashing them comes to, without the time to permute, to sort, and to do so with the result again. With --hashed the permutation is a
multiplicative hash, and behind the line stand these milliseconds, measured on this machine, and the bytes of an entry with its position as
a gap: of a rank and of the sum, and of both hashed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce.cli.report import environment
from sparseallreduce.streams import kernels

Array = NDArray[Any]
Sets = list[Array]  # the positions of each rank

SIZE = 1 << 20
DRAWS = {1.05: 20_000.0, 1.2: 40_000.0, 2.0: 26.4e6}  # by exponent, for about as many different positions
HEAVY = 30
ENTRIES, RANGE = 10_000, 40_000
FEATURES, ROWS = {"phishing_url": 3_231_961, "reviews_trigram": 16_777_216}, {"phishing_url": 128, "reviews_trigram": 16}
CUTTING = ("ssar_split_allgather", "ssar_ring", "dsar_split_allgather")
LEFT_OUT = {"dense_torus", "hierarchical", "auto"}
BALANCED, CHOICE = 1.15, 1.1


class Row(NamedTuple):
    """What a kind of sets came to on so many ranks; times in milliseconds."""

    kind: str
    ranks: int
    size: int
    entries: float  # of a rank, on average
    union: int
    wire: float  # of entries and union at 8 bytes each
    auto: float
    received: float  # kilobytes at the busiest rank, by "auto"
    times: dict[str, float]  # by algorithm
    permuted_auto: float
    permuted_received: float
    permuted_times: dict[str, float]
    hashing: float = 0.0  # to hash and sort the entries of a rank, and those of the sum back
    gap_bytes: tuple[float, ...] = ()  # of an entry of a rank and of the sum, and of both hashed

    @property
    def best(self) -> str:
        return min(self.times, key=self.times.__getitem__)

    @property
    def choice(self) -> float:
        """"auto" divided by the fastest algorithm."""
        return self.auto / self.times[self.best]

    @property
    def balanced(self) -> float:
        """"auto" divided by "auto" of the permuted sets."""
        return self.auto / self.permuted_auto


def uniform(ranks: int) -> Sets:
    return _drawn(ranks, lambda rng, _: rng.choice(SIZE, ENTRIES, replace=False))


def zipf(ranks: int, exponent: float, heavy: float = 1.0) -> Sets:
    """A position is in a set if any of many draws gives it; on rank 1, of ``heavy`` times as many."""
    shares = _shares(exponent)

    def draw(rng: np.random.Generator, rank: int) -> Array:
        draws = DRAWS[exponent] * (heavy if rank == 1 else 1.0)
        return np.flatnonzero(rng.random(SIZE) < -np.expm1(-draws * shares))

    return _drawn(ranks, draw)


@cache
def _shares(exponent: float) -> Array:
    shares = np.arange(1, SIZE + 1) ** -exponent
    return np.asarray(shares / shares.sum())


def clusters(ranks: int, starts: Sequence[int]) -> Sets:
    """In ranges of as many positions, together 40,000."""
    places = np.concatenate([start + np.arange(RANGE // len(starts)) for start in starts])
    return _drawn(ranks, lambda rng, _: rng.choice(places, ENTRIES, replace=False))


def own_clusters(ranks: int) -> Sets:
    """In a range of 40,000 positions of each rank's own."""
    return _drawn(ranks, lambda rng, rank: (SIZE - RANGE) * rank // ranks + rng.choice(RANGE, ENTRIES, replace=False))


def _drawn(ranks: int, draw: Callable[[np.random.Generator, int], Array]) -> Sets:
    return [np.sort(draw(np.random.default_rng((rank, 38)), rank)) for rank in range(ranks)]


def batches(ranks: int, path: Path, name: str, by_frequency: bool) -> Sets:
    """The features of a batch of rows of each rank."""
    rows, count = _matrix(path, name), ROWS[name]
    order = np.random.default_rng(0).permutation(rows.shape[0])
    numbers = np.arange(rows.shape[1])
    if by_frequency:
        numbers[np.argsort(-np.bincount(rows.indices, minlength=rows.shape[1]), kind="stable")] = np.arange(rows.shape[1])
    chosen = (np.take(order, np.arange(count * rank, count * (rank + 1)), mode="wrap") for rank in range(ranks))
    return [np.unique(numbers[rows[each].indices]) for each in chosen]


@cache
def _matrix(path: Path, name: str) -> Any:
    from sklearn.datasets import load_svmlight_file

    return load_svmlight_file(str(path / f"{name}.svm.bz2"), n_features=FEATURES[name], zero_based=False)[0]


KINDS: dict[str, Callable[[int], Sets]] = {
    "uniform": uniform,
    **{f"zipf-{exponent:g}": partial(zipf, exponent=exponent) for exponent in DRAWS},
    "one-heavy": partial(zipf, exponent=1.2, heavy=HEAVY),
    "cluster": partial(clusters, starts=[300_000]),
    "two-clusters": partial(clusters, starts=[100_000, 700_000]),
    "own-clusters": own_clusters,
}
REAL = {f"{name}{'-by-frequency' * by}": (name, bool(by)) for name in FEATURES for by in (0, 1)}


@click.command()
@click.option("--ranks", "counts", default="4,16,64", show_default=True, help="Numbers of ranks.")
@click.option("--kinds", default="all", show_default=True, help=f"Of {', '.join(KINDS)}; with --data of {', '.join(REAL)}.")
@click.option("--algorithms", default="all", show_default=True, help='Compared with "auto".')
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A folder with the real sets.")
@click.option("--hosts", type=click.IntRange(min=1), help="Ranks of a host that share a link; none do by default.")
@click.option("--hashed", is_flag=True, help="Permute by a multiplicative hash, and measure what that takes.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
def balance(counts: str, kinds: str, algorithms: str, data: Path | None, hosts: int | None, hashed: bool, json_path: Path | None) -> None:
    """Print a line for each kind of sets and number of ranks."""
    names = [name for name in sar.algorithms() if name not in LEFT_OUT] if algorithms == "all" else algorithms.split(",")
    if hosts is not None and algorithms == "all":
        names.append("hierarchical")
    network = sar.Network(latency=2e-6, bandwidth=1.25e9)
    if hosts is not None:
        network = network._replace(hosts=hosts, local_latency=1e-6, local_bandwidth=1e10)
    print(header(), flush=True)
    rows = []
    for ranks in map(int, counts.split(",")):
        for kind, size, sets in drawn(ranks, kinds, data):
            rows.append(measured(kind, size, sets, names, network, hashed))
            print(line(rows[-1]), flush=True)
    print(verdict(rows))
    if json_path is not None:
        results = [{**row._asdict(), "best": row.best, "choice": row.choice, "balanced": row.balanced} for row in rows]
        given = {"environment": environment(sar.SERIAL), "network": network._asdict()}
        report = {"schema": 1, "command": "balance", **given, "results": results}
        json_path.write_text(json.dumps(report, indent=1) + "\n")


def drawn(ranks: int, kinds: str, data: Path | None) -> Iterator[tuple[str, int, Sets]]:
    """Each kind that is asked for, its dimension, and its sets."""
    known = [*KINDS, *(REAL if data is not None else ())]
    for kind in known if kinds == "all" else kinds.split(","):
        if kind in KINDS:
            yield kind, SIZE, KINDS[kind](ranks)
        elif kind in known:
            assert data is not None
            name, by_frequency = REAL[kind]
            yield kind, FEATURES[name], batches(ranks, data, name, by_frequency)
        else:
            raise click.UsageError(f"{kind!r} is none of {', '.join(known)}")


def measured(kind: str, size: int, sets: Sets, names: Sequence[str], network: sar.Network, hashed: bool) -> Row:
    """The times of all algorithms, for these sets and for the same with their positions permuted."""
    numbers = np.arange(size) * factor_of(size) % size if hashed else np.random.default_rng(1).permutation(size)
    permuted_sets, union = [np.sort(numbers[positions]) for positions in sets], np.unique(np.concatenate(sets))
    entries = float(np.mean([len(positions) for positions in sets]))
    wire = 1e3 * (entries + len(union)) * 8 / network.bandwidth
    own, permuted = (times_of(streams_of(each, size), names, network) for each in (sets, permuted_sets))
    row = Row(kind, len(sets), size, entries, len(union), wire, *own, *permuted)
    if not hashed:
        return row
    gaps = [gap_bytes(each) for each in (sets[0], union, permuted_sets[0], np.sort(numbers[union]))]
    return row._replace(hashing=1e3 * (hash_seconds(sets[0], size) + hash_seconds(union, size)), gap_bytes=tuple(gaps))


def factor_of(size: int) -> int:
    """A multiplier that is coprime to N, near its golden section."""
    return next(factor for factor in range(int(size * 0.6180339887) | 1, 2 * size, 2) if math.gcd(factor, size) == 1)


def hash_seconds(positions: Array, size: int) -> float:
    """Of hashing positions and sorting them with their values, or as long of doing so with hashed ones again; the least of nine."""
    factor, values, seconds = np.uint64(factor_of(size)), np.ones(len(positions), np.float32), []
    given = positions.astype(np.uint32)
    for _ in range(9):
        start = time.perf_counter()
        keys = given * factor % np.uint64(size) << np.uint64(32) | np.arange(len(given), dtype=np.uint64)
        keys.sort()
        values[keys & np.uint64(0xFFFFFFFF)]
        (keys >> np.uint64(32)).astype(np.uint32)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def gap_bytes(positions: Array) -> float:
    """Bytes of an entry with a value of four, and its position as a gap."""
    room = np.empty(kernels.gaps_bound(len(positions), np.dtype(np.uint32)), np.uint8)
    return 4 + kernels.encode_gaps(positions.astype(np.uint32), 0, room) / max(len(positions), 1)


def streams_of(sets: Sets, size: int) -> list[sar.SparseStream]:
    rng = np.random.default_rng(2)
    return [sar.SparseStream(each, rng.standard_normal(len(each), np.float32), size) for each in sets]


def times_of(streams: list[sar.SparseStream], names: Sequence[str], network: sar.Network) -> tuple[float, float, dict[str, float]]:
    """Of "auto", kilobytes that its busiest rank receives, and of each algorithm."""
    auto = sar.simulate(streams, "auto", network)
    times = {name: 1e3 * sar.simulate(streams, name, network).time for name in names}
    return 1e3 * auto.time, float(auto.bytes_received.max()) / 1e3, times


def header() -> str:
    shown = "".join(f"{name.removesuffix('_allgather')[-10:]:>11}" for name in CUTTING)
    first = f"{'sets':28}{'P':>4}{'k':>8}{'union':>9}{'wire':>8}{'auto':>8}{'kB':>7}{shown}{'best':>8}  {'of':24}"
    return f"{first}{'permuted':>9}{'kB':>7}{'balanced':>9}{'choice':>8}"


def line(row: Row) -> str:
    shown = "".join(f"{row.times.get(name, np.nan):11.3f}" for name in CUTTING)
    marks = " " if row.balanced <= BALANCED else "!", " " if row.choice <= CHOICE else "!"
    gaps = ", ".join(f"{each:.2f}" for each in row.gap_bytes)
    hashed = f"  hashing {row.hashing:.3f} ms, bytes of an entry {gaps}" if gaps else ""
    return (
        f"{row.kind:28}{row.ranks:4}{row.entries:8,.0f}{row.union:9,}{row.wire:8.3f}{row.auto:8.3f}{row.received:7,.0f}{shown}"
        f"{row.times[row.best]:8.3f}  {row.best:24}{row.permuted_auto:9.3f}{row.permuted_received:7,.0f}"
        f"{row.balanced:8.3f}{marks[0]}{row.choice:7.3f}{marks[1]}{hashed}"
    )


def verdict(rows: Sequence[Row]) -> str:
    balanced, chosen = sum(row.balanced <= BALANCED for row in rows), sum(row.choice <= CHOICE for row in rows)
    return f"of {len(rows)}: balanced {balanced} (at most {BALANCED}), well chosen {chosen} (at most {CHOICE})"


if __name__ == "__main__":
    balance()
