"""Count the words that reducers send, beside Ok-Topk's table 1, and time its two balancings, beside its figure 7; in the simulator.

    python bench/lossy_volumes.py [--ranks 4,16,64,256] [--share 2,4,8,16] [--reducers oktopk,gtopk] [--figure 16,32,64] [--json FILE]

The first table has the words that the busiest rank sends or receives. A value is one word, an index another. Counts, bounds and
thresholds are included, headers are not. k is 2048, or with --share so many times P: where k is small, the counts weigh. OkTopk makes two
operations: the first evaluates everything, the second reuses it. The paper's bounds are for the busiest rank (OkTopk, TopkA, GaussianK;
GTopk, whose rank 0 sends and receives half of it each), or for the mean of all ranks (TopkDSA).

The second table trains a perceptron of two hidden layers on scikit-learn's digits with OkTopk, and times both phases of a step with and
without their balancing, on a network whose latency is to k as in the paper's experiment. Exit status 1 if a volume is out of bounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import log2
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce.reducers.oktopk.gather import balance_and_gather, plan
from sparseallreduce.reducers.oktopk.regions import averaged, equal, rebalanced
from sparseallreduce.reducers.oktopk.split import split_and_reduce
from sparseallreduce.runtime.simulator import run
from sparseallreduce.streams import wire
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.selection import ExactTopK, kth_magnitude, stream_at_least

K, SIZES = 2**11, 64  # N is so many times k
WORD = 4  # bytes of a float32, and of an index
BANDWIDTH = 12.5e9  # bytes a second
PAPER_K, PAPER_LATENCY = 1_335_473, 1.5e-6  # of BERT at 1 %, and about that of the Aries network, in seconds
PERIOD = 64  # operations from one evaluation of the regions to the next
BUCKET = 4
FIGURE_7 = {"reduce": "1.13 to 1.75", "allgatherv": "1.12 to 1.43", "same, regions of one length": "1.12 to 1.43"}


class Row(NamedTuple):
    """One volume, in words; ``low`` and ``high`` are the paper's."""

    reducer: str
    values: str
    ranks: int
    k: int
    sent: float  # by the busiest rank
    received: float
    mean: float
    low: float
    high: float
    messages: int
    entries: int  # of the update

    @property
    def holds(self) -> bool:
        if self.reducer == "topkdsa":
            return self.low * 0.99 <= self.mean <= self.high * 1.01
        together = self.sent + self.received if self.reducer == "gtopk" else max(self.sent, self.received)
        return together <= self.high


def accumulators(values: str, ranks: int, k: int, seed: int) -> list[NDArray[np.float32]]:
    """Of all ranks: k large values in the places that ``values`` names."""
    rng, size, arrays = np.random.default_rng([seed, ranks]), SIZES * k, []
    for rank in range(ranks):
        array = np.zeros(size, np.float32)
        every = np.arange(k) * SIZES + rank % SIZES
        places = {
            "anywhere": lambda: rng.choice(size, k, replace=False),
            "same places": lambda: np.arange(k) * SIZES,
            "one region": lambda: rng.choice(2 * k, k, replace=False),
            "own regions": lambda own=rank * size // ranks: (own + rng.choice(2 * k, k, replace=False)) % size,
            "clusters": lambda: rng.choice(_clusters(rng, k, size), k, replace=False),
            "sums on one rank": lambda every=every: every,
        }[values]()
        array[places] = rng.choice([-1, 1], k) * (1 + rng.random(k))
        if values == "sums on one rank":
            array[every[: max(1, k // ranks)]] *= 100
        arrays.append(array)
    return arrays


def _clusters(rng: np.random.Generator, k: int, size: int) -> NDArray[np.int64]:
    """Eight places and what lies behind each."""
    return np.unique((rng.choice(size, (8, 1)) + np.arange(k)) % size)


def bounds_of(name: str, ranks: int, k: int) -> tuple[float, float]:
    """The paper's table 1."""
    share = (ranks - 1) / ranks
    return {
        "oktopk": (2 * k * share, 6 * k * share),
        "gtopk": (4 * k * log2(ranks), 4 * k * log2(ranks)),
        "topka": (2 * k * (ranks - 1), 2 * k * (ranks - 1)),
        "gaussiank": (2 * k * (ranks - 1), 2 * k * (ranks - 1)),
        "topkdsa": (4 * k * share, (2 * k + SIZES * k) * share),
    }[name]


def volumes(ranks: int, k: int, reducers: Sequence[str]) -> Iterator[Row]:
    """The rows of one number of ranks."""
    cases = [(sar.OkTopk, values, 2) for values in ("anywhere", "one region", "own regions", "clusters", "sums on one rank")]
    cases += [(reducer, values, 1) for reducer in (sar.GTopk, sar.TopkA, sar.TopkDSA) for values in ("same places", "anywhere")]
    cases.append((sar.GaussianK, "anywhere", 1))
    for reducer, values, operations in cases:
        if reducer.name not in reducers:
            continue
        group = [reducer(SIZES * k, k) for _ in range(ranks)]
        outs = [sar.simulate(accumulators(values, ranks, k, seed), group) for seed in range(operations)]
        sent = max(out.bytes_sent.max() for out in outs) / WORD
        received = max(out.bytes_received.max() for out in outs) / WORD
        means = max(out.bytes_sent.mean() for out in outs) / WORD
        messages, entries = max(int(out.messages.max()) for out in outs), outs[0].outputs[0].update.nnz
        yield Row(reducer.name, values, ranks, k, sent, received, means, *bounds_of(reducer.name, ranks, k), messages, entries)


class Perceptron:
    """Two hidden layers on scikit-learn's digits, and the gradients of its ranks."""

    def __init__(self, widths: tuple[int, ...] = (64, 384, 192, 10)) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        self.samples, self.labels = (digits.data / 16).astype(np.float32), np.eye(10, dtype=np.float32)[digits.target]
        self.rng = np.random.default_rng(0)
        self.shapes = list(pairwise(widths))
        self.parameters = np.concatenate([(self.rng.standard_normal(shape) * np.sqrt(2 / shape[0])).ravel() for shape in self.shapes])
        self.parameters = self.parameters.astype(np.float32)

    def gradient(self, batch: int = 16) -> NDArray[np.float32]:
        """Of the cross entropy of some samples."""
        chosen = self.rng.choice(len(self.samples), batch, replace=False)
        ends = np.cumsum([rows * columns for rows, columns in self.shapes])
        weights = [part.reshape(shape) for part, shape in zip(np.split(self.parameters, ends[:-1]), self.shapes)]
        layers = [self.samples[chosen]]
        for weight in weights:
            layers.append(np.maximum(layers[-1] @ weight, 0) if weight is not weights[-1] else layers[-1] @ weight)
        scores = np.exp(layers[-1] - layers[-1].max(axis=1, keepdims=True))
        error, gradients = (scores / scores.sum(axis=1, keepdims=True) - self.labels[chosen]) / batch, []
        for layer, weight in zip(reversed(layers[:-1]), reversed(weights)):
            gradients.append((layer.T @ error).ravel())
            error = (error @ weight.T) * (layer > 0)
        return np.concatenate(gradients[::-1]).astype(np.float32)


def figure_7(ranks: int, steps: int) -> dict[str, Any]:
    """How many times faster the two phases are with their balancing, over the steps of a training."""
    model = Perceptron()
    size, k = len(model.parameters), len(model.parameters) // 100
    network = sar.Network(latency=PAPER_LATENCY * k / PAPER_K, bandwidth=BANDWIDTH)
    feedbacks = [sar.ErrorFeedback(sar.OkTopk(size, k)) for _ in range(ranks)]
    ratios: dict[str, list[float]] = {phase: [] for phase in FIGURE_7}
    imbalances = []
    for _ in range(steps):
        gradients = [model.gradient() for _ in range(ranks)]
        mine = [ExactTopK(k)(feedback.residual + gradient) for feedback, gradient in zip(feedbacks, gradients)]
        naive = run([naive_reduce(stream, rank, ranks) for rank, stream in enumerate(mine)], network)
        bounds = run([averaged(stream.indices, size, k, rank, ranks) for rank, stream in enumerate(mine)], network)
        balanced = run([balanced_reduce(stream, bounds.outputs[rank], k, rank, ranks) for rank, stream in enumerate(mine)], network)
        ratios["reduce"].append(naive.time / (balanced.time + bounds.time / PERIOD))
        for phase, regions in (("allgatherv", balanced.outputs), ("same, regions of one length", naive.outputs)):
            threshold = kth_magnitude(np.concatenate([region.values for region in regions]), k)
            chosen = [stream_at_least(region, threshold) for region in regions]
            sizes = [stream.stored for stream in chosen]
            imbalances.append(max(sizes) * ranks / sum(sizes))
            if plan(sizes, k, 4.0):
                ratios[phase].append(gather_time(chosen, sizes, k, None, network) / gather_time(chosen, sizes, k, 4.0, network))
        model.parameters -= 0.1 * sar.simulate(gradients, feedbacks).outputs[0].to_dense()
    return {"ranks": ranks, **ratios, "imbalance": {"balanced": mean(imbalances[::2]), "one length": mean(imbalances[1::2])}}


def naive_reduce(stream: sar.SparseStream, rank: int, ranks: int) -> Any:
    return split_and_reduce(stream, equal(stream.size, ranks), rank, ranks, Reduction(), BUCKET)


def balanced_reduce(stream: sar.SparseStream, bounds: list[int], k: int, rank: int, ranks: int) -> Any:
    bounds = yield from rebalanced(stream.indices, bounds, False, k, rank, ranks)
    return (yield from split_and_reduce(stream, bounds, rank, ranks, Reduction(), BUCKET))


def gather_time(chosen: list[sar.SparseStream], sizes: list[int], k: int, limit: float | None, network: sar.Network) -> float:
    ranks = len(sizes)
    return run([balance_and_gather(stream, sizes, k, rank, ranks, limit) for rank, stream in enumerate(chosen)], network).time


def print_row(row: Row) -> None:
    paper = f"{row.high:.0f}" if row.low == row.high else f"{row.low:.0f} .. {row.high:.0f}"
    print(
        f"{row.ranks:>4} {row.k:>6} {row.reducer:<9} {row.values:<17} {row.sent:>9.0f} {row.received:>9.0f} {row.mean:>9.0f} {paper:>17} "
        f"{max(row.sent, row.received) / row.high:>6.3f} {row.messages:>5} {row.entries:>7}  {'yes' if row.holds else 'NO'}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="4,16,64,256", help="powers of two, separated by commas (default: %(default)s)")
    parser.add_argument("--share", default="", help=f"k / P, separated by commas (default: k = {K})")
    parser.add_argument("--reducers", default=",".join(sar.reducers.REDUCERS), help="separated by commas (default: all)")
    parser.add_argument("--figure", default="16,32,64", help="numbers of ranks for figure 7 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="of the training for figure 7 (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the tables to FILE")
    arguments = parser.parse_args()
    wire.message.HEADER_BYTES = 0  # counted apart: none is counted here
    rows = []
    print(f"N = {SIZES} k, float32; words of the busiest rank, and on the mean")
    print(
        f"{'P':>4} {'k':>6} {'reducer':<9} {'large values':<17} {'sent':>9} {'received':>9} {'mean':>9} {'table 1':>17} {'/ high':>6} "
        f"{'msgs':>5} {'entries':>7}  holds"
    )
    for ranks in map(int, filter(None, arguments.ranks.split(","))):
        for k in [int(float(share) * ranks) for share in arguments.share.split(",")] if arguments.share else [K]:
            for row in volumes(ranks, k, arguments.reducers.split(",")):
                print_row(row)
                rows.append(row)
    missed = sum(not row.holds for row in rows)
    print(f"\n{len(rows) - missed} of {len(rows)} within the paper's bounds\n")
    print("Simulated time without / with balancing, where there is something to balance: mean (least to most) over the steps of a training")
    figures = [figure_7(ranks, arguments.steps) for ranks in map(int, filter(None, arguments.figure.split(",")))]
    for figure in figures:
        for phase, paper in FIGURE_7.items():
            ratios = figure[phase]
            ours = f"{mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "never needed"
            print(f"P = {figure['ranks']:<4} {phase:<27} {ours:<22} in {len(ratios):>3} steps   paper: {paper}", flush=True)
        shares = ", ".join(f"{share:.1f} (regions {kind})" for kind, share in figure["imbalance"].items())
        print(f"         global top-k values on the rank with most, times the mean: {shares}")
    if arguments.json:
        document = {"schema": 1, "arguments": vars(arguments), "N / k": SIZES}
        document["results"] = [{**row._asdict(), "holds": row.holds} for row in rows]
        document["figure_7"] = figures
        with open(arguments.json, "w") as file:
            json.dump(document, file, indent=1)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
