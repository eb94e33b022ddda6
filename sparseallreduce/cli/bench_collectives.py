"""`sparseallreduce bench --collective`: reduce, reduce_scatter, allgather and bcast, and MPI's own of dense arrays and of packed pairs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce.cli.report import environment, on_rank_0, write_report
from sparseallreduce.cli.synthetic import draw_positions, draw_values, entries_of, largest_deviation
from sparseallreduce.cli.timing import mpi_operator, slowest, spread, timed
from sparseallreduce.runtime.communicators import world
from sparseallreduce.runtime.objects import gather
from sparseallreduce.streams.operator import OPERATORS, Operator
from sparseallreduce.streams.partition import boundaries
from sparseallreduce.streams.stream import index_dtype

__all__ = ["DENSE", "PACKED", "measure", "run"]

Array = NDArray[Any]

DENSE, PACKED = "MPI, dense", "MPI, packed pairs"  # of arrays that are dense already; of indices and values, and NumPy


class Data(NamedTuple):
    """The same vector of one rank as a stream, as a dense array and as packed pairs, which are measured beside each other."""

    stream: sar.SparseStream
    dense: Array
    pairs: Array  # the bytes of indices, and behind them of values


class Ways(NamedTuple):
    """Functions that carry out a collective with MPI alone, for comparison."""

    dense: Callable[[Data], Any]  # the rank's part of the result as an array, or None
    packed: Callable[[Data], Any] | None  # the same of pairs


def run(context: click.Context, names: list[str], json_path: Path | None, chosen: dict[str, Any]) -> None:
    """Carry out `bench --collective`."""
    collective = chosen["collective"]
    if chosen["op"] not in OPERATORS:
        raise click.UsageError(f"--op {chosen['op']} is for allreduce: give --op sum, or leave out --collective")
    if chosen["size"] is None or chosen["density"] is None:
        raise click.UsageError("--size and --density are missing: give the dimension N, and the share of positions that each rank has")
    comm = world()
    results = measure(collective, names, comm, chosen)
    surroundings = environment(comm)
    if comm.rank == 0:
        click.echo(_table(results))
    if json_path is not None:
        on_rank_0(comm, lambda: write_report(json_path, "bench", context.params, surroundings, results))
    wrong = [row["algorithm"] for row in results["algorithms"] if not row["correct"]]
    if wrong:
        raise click.ClickException(f"wrong results, which is a defect of sparseallreduce; please report it: {', '.join(wrong)}")


def measure(collective: str, names: list[str], comm: Any, chosen: dict[str, Any]) -> dict[str, Any]:
    """Run the experiments, and return the results of a report; collective over ``comm``."""
    op, count = OPERATORS[chosen["op"]], entries_of(chosen["size"], chosen["density"])
    ways = _ways(collective, comm, op, chosen["size"], count, np.dtype(chosen["dtype"]))
    calls = _calls(collective, names, comm, chosen)
    baselines = {DENSE: ways.dense} | ({} if ways.packed is None else {PACKED: ways.packed})
    seconds: dict[str, list[list[float]]] = {name: [] for name in (*baselines, *calls)}
    sent, right = dict.fromkeys(calls, 0), dict.fromkeys(calls, True)
    for experiment in range(chosen["experiments"]):
        data = _drawn(np.random.default_rng((chosen["seed"], experiment, comm.rank)), chosen["size"], count, chosen["dtype"], op)
        expected = _copied(ways.dense(data))
        magnitude = _magnitude(collective, ways, data, op)
        for name, call in calls.items():
            with sar.trace() as traffic:
                result = call(data)
            right[name] &= all(gather(comm, _is_right(result, expected, magnitude, comm.size, op)))
            sent[name] = max(gather(comm, traffic.bytes_sent))
        every = [*baselines.items(), *calls.items()]
        times = np.empty((len(every), chosen["repeats"]))
        for place in np.random.default_rng((chosen["seed"], experiment)).permutation(len(every)):
            name, call = every[place]
            for repeat in range(chosen["repeats"]):
                times[place, repeat] = timed(partial(call, data), comm)
        for (name, _), row in zip(every, slowest(times, comm), strict=True):
            seconds[name].append(row.tolist())
    medians = {name: float(np.median(found)) for name, found in seconds.items()}
    rows = [
        {
            "algorithm": name,
            **spread(found),
            "ratio": medians[name] / medians[DENSE],
            "packed_ratio": medians[name] / medians[PACKED] if PACKED in medians else None,
            "bytes_sent": sent.get(name),
            "correct": right.get(name, True),
            "seconds": found,
        }
        for name, found in seconds.items()
    ]
    about = {key: chosen[key] for key in ("size", "density", "dtype", "op", "repeats", "experiments", "non_blocking")}
    return {"collective": collective, **about, "ranks": comm.size, "entries": count, "algorithms": rows}


def _drawn(rng: np.random.Generator, size: int, count: int, dtype: str, op: Operator) -> Data:
    stream = sar.SparseStream(draw_positions(rng, size, count), draw_values(rng, count, dtype), size)
    dense = np.full(size, op.neutral_of(dtype), dtype)
    dense[stream.indices] = stream.values
    pairs = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in (stream.indices, stream.values)])
    return Data(stream, dense, pairs)


def _calls(collective: str, names: list[str], comm: Any, chosen: dict[str, Any]) -> dict[str, Callable[[Data], Any]]:
    """Return the calls of this library that are measured, by algorithm."""
    options = {} if collective in ("allgather", "bcast") else {"op": chosen["op"]}
    blocking, started = getattr(sar, collective), getattr(sar, "i" + collective)

    def call(data: Data, *, name: str) -> Any:
        stream: Any = data.stream if collective != "bcast" or comm.rank == 0 else None
        if chosen["non_blocking"]:
            return started(stream, comm, algorithm=name, **options).wait()
        return blocking(stream, comm, algorithm=name, **options)

    return {name: partial(call, name=name) for name in names}


def _ways(collective: str, comm: Any, op: Operator, size: int, count: int, dtype: np.dtype[Any]) -> Ways:
    """Return the calls of MPI that are compared with; a process alone copies."""
    ranks, rank, by = comm.size, comm.rank, None if comm.size == 1 else mpi_operator(op)
    bounds = boundaries(size, ranks)
    widths = np.diff(bounds).tolist()
    room = {
        "reduce": size if rank == 0 else 0,
        "reduce_scatter": widths[rank],
        "allgather": size * ranks,
        "bcast": size,
    }[collective]
    out = np.empty(room, dtype)
    pairs = np.empty((ranks, count * (4 + dtype.itemsize)), np.uint8)  # of all ranks

    def dense(data: Data) -> Any:
        if ranks == 1:
            np.copyto(out, data.dense)
        elif collective == "reduce":
            comm.Reduce(data.dense, out if rank == 0 else None, by)
        elif collective == "reduce_scatter":
            comm.Reduce_scatter(data.dense, out, widths, by)
        elif collective == "allgather":
            comm.Allgather(data.dense, out)
        else:
            if rank == 0:
                np.copyto(out, data.dense)
            comm.Bcast(out)
        return out if rank == 0 or collective != "reduce" else None

    def packed(data: Data) -> Any:
        if ranks == 1:
            pairs[0] = data.pairs
        elif collective == "reduce":
            comm.Gather(data.pairs, pairs if rank == 0 else None)
        elif collective == "bcast":
            if rank == 0:
                pairs[0] = data.pairs
            comm.Bcast(pairs[0])
        elif collective == "allgather":
            comm.Allgather(data.pairs, pairs)
        else:
            return _alltoall(data, comm, bounds)
        if collective != "reduce":
            return pairs[0] if collective == "bcast" else _split_pairs(pairs, count, dtype, size)
        if rank == 0:
            total = np.zeros(size, dtype)
            for indices, values in _each(pairs, count, dtype):
                total[indices] += values
            return total
        return None

    return Ways(dense, packed if op.name == "sum" and size <= 2**32 else None)


def _each(pairs: Array, count: int, dtype: np.dtype[Any]) -> list[tuple[Array, Array]]:
    return [(row[: 4 * count].view(np.uint32), row[4 * count :].view(dtype)) for row in pairs]


def _split_pairs(pairs: Array, count: int, dtype: np.dtype[Any], size: int) -> tuple[Array, Array]:
    """Return the indices into the ranges of all ranks, and the values."""
    each = _each(pairs, count, dtype)
    kind = index_dtype(size * len(each))
    indices = np.concatenate([indices.astype(kind) + kind.type(rank * size) for rank, (indices, _) in enumerate(each)])
    return indices, np.concatenate([values for _, values in each])


def _alltoall(data: Data, comm: Any, bounds: list[int]) -> Array:
    """Pairs sent to the rank of their range, which adds them to a dense array."""
    indices, values = data.stream.indices, data.stream.values
    cuts = np.searchsorted(indices, bounds).astype(int)
    counts = np.diff(cuts)
    theirs = np.empty_like(counts)
    comm.Alltoall(counts, theirs)
    places, came = np.concatenate([[0], np.cumsum(theirs)]), int(theirs.sum())
    got = [np.empty(came, indices.dtype), np.empty(came, values.dtype)]
    for ours, room in zip((indices, values), got, strict=True):
        comm.Alltoallv([ours, (counts, cuts[:-1])], [room, (theirs, places[:-1])])
    lo, hi = bounds[comm.rank], bounds[comm.rank + 1]
    total = np.zeros(hi - lo, values.dtype)
    for first, last in pairwise(places):
        total[got[0][first:last] - np.uint32(lo)] += got[1][first:last]
    return total


def _magnitude(collective: str, ways: Ways, data: Data, op: Operator) -> Any:
    """Return the reduction of absolute values, to which rounding is in proportion; None where nothing is rounded."""
    if not op.is_sum or data.dense.dtype.kind not in "fc" or not collective.startswith("reduce"):
        return None
    return _copied(ways.dense(data._replace(dense=np.abs(data.dense).astype(data.dense.dtype))))


def _copied(array: Any) -> Any:
    return None if array is None else array.copy()


def _is_right(result: Any, expected: Any, magnitude: Array | None, ranks: int, op: Operator) -> bool:
    if expected is None or result is None:
        return expected is result
    if op.name in ("min", "max", "prod"):  # whose neutral element stands in the dense arrays where no rank has an entry
        return bool(largest_deviation(result, np.where(expected == op.neutral_of(expected.dtype), 0, expected), None, ranks, op) <= 1)
    return bool(largest_deviation(result, expected, magnitude, ranks, op) <= 1)


def _table(results: dict[str, Any]) -> str:
    lines = [
        f"{results['collective']} of {results['ranks']} x {results['entries']:,} {results['dtype']} entries, N = {results['size']:,} "
        f"(density {results['density']:.4g}), {results['op']}",
        f"milliseconds of the slowest rank, median and quartiles of {results['experiments'] * results['repeats']}",
        "",
        f"{'algorithm':<20} {'median':>9} {'25 %':>9} {'75 %':>9} {'/ dense':>9} {'/ packed':>9} {'sent, kB':>11}",
    ]
    for row in results["algorithms"]:
        line = f"{row['algorithm']:<20} " + " ".join(f"{1e3 * row[key]:9.3f}" for key in ("median", "lower_quartile", "upper_quartile"))
        line += f" {row['ratio']:9.4f} " + (f"{row['packed_ratio']:9.4f}" if row["packed_ratio"] is not None else f"{'-':>9}")
        line += f" {row['bytes_sent'] / 1e3:11,.1f}" if row["bytes_sent"] is not None else ""
        lines.append((line if row["correct"] else line + "  WRONG").rstrip())
    return "\n".join(lines)
