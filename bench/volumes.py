"""Count bytes and messages of every algorithm in the simulator, beside thesis table 3.1.

    python bench/volumes.py [--ranks 4,16,64,256,1024] [--json FILE]

Index sets are the same on all ranks, disjoint, or uniformly random, at P = 4 to 1024. Printed are the bytes that a rank sends without
headers, the bounds of the table (for uniform sets the expectation), the quotient of the two, and the header bytes apart. An entry
(float32 and a 32-bit index) counts 8 bytes where the table counts k, a value 4 bytes where it counts N. The exit status is 1 if a figure
is out of bounds, or further than 2 % from the expectation. All five take some minutes on one core and 4 GiB of memory; up to P = 64
seconds, and that is part of the tests.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from collections.abc import Iterator
from math import log2
from time import perf_counter
from typing import NamedTuple

import numpy as np

import sparseallreduce as sar

SIZE = 2**18  # N
ENTRY, VALUE, HEADER = 8, 4, 80  # bytes
GROUP = 8  # of dsar_early_switch
SETS = ("full overlap", "disjoint", "uniform")
ALGORITHMS = [name for name in sar.algorithms() if name not in ("auto", "hierarchical", "dense_torus")]  # those of the table


class Bound(NamedTuple):
    """What a rank sends according to the thesis: a range of bytes; the two are the same where it is exact, or an expectation."""

    messages: int
    low: float
    high: float


class Row(NamedTuple):
    """One measurement; bytes are means over the ranks, without headers."""

    algorithm: str
    index_sets: str
    ranks: int
    entries: int  # k
    result: int  # K, entries of the result
    expected_result: float  # f(k, N, P), or what the sets make it
    messages: int
    messages_thesis: int
    sent: float
    low: float
    high: float
    most: int  # sent by any one rank
    headers: float
    seconds: float  # to simulate

    @property
    def quotient(self) -> float:
        """Sent / thesis: the upper bound, or the expectation."""
        return self.sent / self.high

    @property
    def holds(self) -> bool:
        """Whether the thesis's statements do."""
        if self.messages != self.messages_thesis:
            return False
        if self.index_sets == "uniform":
            return abs(self.quotient - 1) <= 0.02 and abs(self.result / self.expected_result - 1) <= 0.02
        return self.low <= self.sent <= self.high and self.result == self.expected_result


def entries_of(sets: str, ranks: int) -> int:
    """k: the same for all ranks with full overlap, and a 2**16th part of the ranks' sum where the sets differ."""
    return 2**14 if sets == "full overlap" else 2**16 // ranks


def make_streams(sets: str, ranks: int, seed: int = 1) -> list[sar.SparseStream]:
    """The streams of all ranks. Disjoint sets consist of pairs of neighbours, dealt to the ranks in turn."""
    k, rng = entries_of(sets, ranks), np.random.default_rng(seed)
    for_rank = {
        "full overlap": lambda rank: np.arange(k) * (SIZE // k),
        "disjoint": lambda rank: (np.arange(rank, k * ranks // 2, ranks)[:, None] * (2 * SIZE // (k * ranks)) + [0, 1]).ravel(),
        "uniform": lambda rank: np.sort(rng.choice(SIZE, k, replace=False, shuffle=False)),
    }[sets]
    return [sar.SparseStream(for_rank(rank), np.ones(k, np.float32), SIZE) for rank in range(ranks)]


def f(k: float, size: float, ranks: int) -> float:
    """The paper's f(k, N, P), in closed form (thesis section 3.2.1)."""
    return size * (1 - (1 - k / size) ** ranks)


def thesis(algorithm: str, sets: str, ranks: int) -> Bound:
    """Latency in messages and bandwidth in bytes a rank (table 3.1; for those it leaves out, their docstrings)."""
    k, share, rounds = entries_of(sets, ranks), (ranks - 1) / ranks, int(log2(ranks))
    union = {"full overlap": k, "disjoint": ranks * k, "uniform": f(k, SIZE, ranks)}[sets]
    if algorithm == "dense":
        return Bound(2 * rounds, *[2 * share * SIZE * VALUE] * 2)
    if algorithm == "allgather":
        return Bound(rounds, *[(ranks - 1) * k * ENTRY] * 2)
    if algorithm == "ssar_recursive_doubling":
        stages = [{"full overlap": k, "disjoint": 2**i * k, "uniform": f(k, SIZE, 2**i)}[sets] for i in range(rounds)]
        return Bound(rounds, *[sum(stages) * ENTRY] * 2)
    if algorithm == "ssar_split_allgather":
        if sets == "disjoint":
            return Bound(ranks - 1 + rounds, (ranks - 1) * k * ENTRY, ranks * k * ENTRY)
        return Bound(ranks - 1 + rounds, *[(share * k + share * union) * ENTRY] * 2)
    if algorithm == "ssar_ring":
        part = {"full overlap": lambda hop: k / ranks, "disjoint": lambda hop: hop * k / ranks}
        partial = part.get(sets, lambda hop: f(k / ranks, SIZE / ranks, hop))
        return Bound(2 * (ranks - 1), *[(sum(partial(hop) for hop in range(1, ranks)) + share * union) * ENTRY] * 2)
    if algorithm == "dsar_split_allgather":
        gather, split = share * SIZE * VALUE, k * ENTRY
        low, high = (gather + share * split,) * 2 if sets == "uniform" else (gather, gather + split)
        return Bound(ranks - 1 + rounds, low, high)
    group = min(GROUP, ranks)
    dense = (1 / group - 1 / ranks + share) * SIZE * VALUE
    split = (group - 1) / group * k * ENTRY
    return Bound(group - 1 + int(log2(ranks // group)) + rounds, *[dense + split] * 2)


def measure(ranks: int) -> Iterator[Row]:
    """The rows of one number of ranks."""
    for sets in SETS:
        streams, k = make_streams(sets, ranks), entries_of(sets, ranks)
        expected = {"full overlap": k, "disjoint": k * ranks, "uniform": f(k, SIZE, ranks)}[sets]
        for algorithm in ALGORITHMS:
            start = perf_counter()
            out = sar.simulate(streams, algorithm)
            seconds = perf_counter() - start
            messages, low, high = thesis(algorithm, sets, ranks)
            payload = out.bytes_sent - out.header_bytes
            assert out.bytes_sent.sum() == out.bytes_received.sum()
            yield Row(
                algorithm,
                sets,
                ranks,
                k,
                out.outputs[0].nnz,
                expected,
                int(out.messages.max()),
                messages,
                float(payload.mean()),
                low,
                high,
                int(payload.max()),
                float(out.header_bytes.mean()),
                seconds,
            )
            del out
            if ranks > 64:  # what is left over there fills the memory
                gc.collect()


def print_header() -> None:
    print(f"N = {SIZE}, float32, kB (1000 bytes) sent by a rank, mean over the ranks; thesis: bounds, or the expectation if uniform\n")
    print(
        f"{'P':>5} {'k':>6} {'sets':<13} {'algorithm':<24} {'messages':>8} {'thesis':>7} {'sent kB':>11} {'thesis kB':>24} "
        f"{'quotient':>8} {'headers kB':>10} {'K':>7} {'f or K':>9}  holds"
    )


def print_row(row: Row) -> None:
    bounds = f"{row.high / 1e3:.3f}" if row.low == row.high else f"{row.low / 1e3:.3f} .. {row.high / 1e3:.3f}"
    print(
        f"{row.ranks:>5} {row.entries:>6} {row.index_sets:<13} {row.algorithm:<24} {row.messages:>8} {row.messages_thesis:>7} "
        f"{row.sent / 1e3:>11.3f} {bounds:>24} {row.quotient:>8.4f} {row.headers / 1e3:>10.3f} {row.result:>7} "
        f"{row.expected_result:>9.1f}  {'yes' if row.holds else 'NO'}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="4,16,64,256,1024", help="powers of two, separated by commas (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the table to FILE")
    arguments = parser.parse_args()
    rows = []
    print_header()
    for ranks in map(int, arguments.ranks.split(",")):
        for row in measure(ranks):
            print_row(row)
            rows.append(row)
    missed = sum(not row.holds for row in rows)
    print(f"\n{len(rows) - missed} of {len(rows)} within the thesis's bounds, simulated in {sum(row.seconds for row in rows):.0f} s")
    if arguments.json:
        environment = {"python": platform.python_version(), "numpy": np.__version__, "sparseallreduce": sar.__version__}
        document = {"schema": 1, "arguments": vars(arguments), "environment": environment, "size": SIZE}
        document["results"] = [{**row._asdict(), "quotient": row.quotient, "holds": row.holds} for row in rows]
        with open(arguments.json, "w") as file:
            json.dump(document, file, indent=1)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
