"""`sparseallreduce simulate --collective`: reduce, reduce_scatter, allgather and bcast on a virtual network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

import sparseallreduce as sar
from sparseallreduce.algorithms import AUTO
from sparseallreduce.algorithms.collectives.call import Collective, collective_problem, make_collective_call
from sparseallreduce.algorithms.collectives.cost import choose, predicted_times
from sparseallreduce.cli.synthetic import largest_deviation
from sparseallreduce.runtime.simulator import machine_of, same_bits
from sparseallreduce.streams.operator import SUM
from sparseallreduce.streams.partition import boundaries

__all__ = ["rows_of", "table"]

Array = NDArray[Any]


def rows_of(
    collective: str, names: Sequence[str], streams: Sequence[sar.SparseStream], network: sar.Network, expected: Array, magnitude: Array
) -> list[dict[str, Any]]:
    """Return a row of results for each algorithm; ``expected`` is the dense sum, ``magnitude`` that of absolute values."""
    rows = []
    for name in (bar := tqdm(names, disable=None, leave=False, dynamic_ncols=True)):
        bar.set_description(name)
        start = perf_counter()
        out = sar.simulate(_given(collective, streams), name, network, collective=collective)
        seconds = perf_counter() - start
        chosen, predicted = _predicted(collective, name, streams, network)
        rows.append(
            {
                "algorithm": name,
                "chosen": chosen,
                "time": out.time,
                "predicted_time": predicted,
                **{
                    key: {"max": int(counts.max()), "mean": float(counts.mean())}
                    for key, counts in (("bytes_sent", out.bytes_sent), ("bytes_received", out.bytes_received), ("messages", out.messages))
                },
                "correct": _is_right(collective, out.outputs, streams, expected, magnitude),
                "seconds": seconds,
            }
        )
    return rows


def _given(collective: str, streams: Sequence[sar.SparseStream]) -> list[Any]:
    return [streams[0], *[None] * (len(streams) - 1)] if collective == "bcast" else list(streams)


def _predicted(collective: str, name: str, streams: Sequence[sar.SparseStream], network: sar.Network) -> tuple[str | None, float]:
    """Return the algorithm that "auto" takes (None for other algorithms), and the predicted seconds."""
    ranks = len(streams)
    hosts = network.layout(ranks)
    machine = machine_of(network, hosts)
    other = Collective.named(collective)
    assert other is not None
    made, _ = make_collective_call(other, streams[0], "sum", AUTO, {}, 0, ranks)
    assert made is not None
    entries = [made.collective.entries(stream, rank) for rank, stream in enumerate(streams)]
    problem = collective_problem(made, entries, hosts)
    chosen = choose(collective, problem, machine) if name == AUTO else None
    return chosen, predicted_times(collective, problem, machine)[chosen or name]


def _is_right(collective: str, outputs: Sequence[Any], streams: Sequence[sar.SparseStream], expected: Array, magnitude: Array) -> bool:
    """Return True if every rank has the result that it is to get."""
    ranks, size = len(streams), streams[0].size
    if collective == "reduce":
        return outputs[1:] == [None] * (ranks - 1) and largest_deviation(outputs[0], expected, magnitude, ranks, SUM) <= 1
    if collective == "reduce_scatter":
        ranges = pairwise(boundaries(size, ranks))
        parts = zip(outputs, ranges, strict=True)
        return all(largest_deviation(part, expected[lo:hi], magnitude[lo:hi], ranks, SUM) <= 1 for part, (lo, hi) in parts)
    first = outputs[0]
    if not all(same_bits(first, output) for output in outputs[1:]):
        return False
    if collective == "bcast":
        return bool(first == streams[0])
    places = np.concatenate([stream.indices.astype(np.int64) + rank * size for rank, stream in enumerate(streams)])
    return np.array_equal(first.indices, places) and np.array_equal(first.values, np.concatenate([stream.values for stream in streams]))


def table(collective: str, about: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    lines = [
        f"{collective}: {about}",
        "",
        f"{'':<12} {'time':>11} {'predicted':>11} {'kB sent':>12} {'kB received':>12} {'messages':>9} {'computed':>9}",
        f"{'algorithm':<12} {'us':>11} {'us':>11} {'most':>12} {'most':>12} {'most':>9} {'in s':>9}",
    ]
    for row in rows:
        line = f"{row['algorithm']:<12} {1e6 * row['time']:11,.2f} {1e6 * row['predicted_time']:11,.2f} "
        line += f"{row['bytes_sent']['max'] / 1e3:12,.2f} {row['bytes_received']['max'] / 1e3:12,.2f} {row['messages']['max']:9,} "
        line += f"{row['seconds']:9.2f}" + (f"  took {row['chosen']}" if row["chosen"] else "")
        lines.append(line + ("" if row["correct"] else "  WRONG"))
    return "\n".join(lines)
