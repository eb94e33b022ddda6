"""Simulation of one benchmark setting, for ranks that have not been started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce.algorithms import AUTO
from sparseallreduce.algorithms.choose import problem_of
from sparseallreduce.algorithms.cost import Machine, predicted_time
from sparseallreduce.cli.network import known_time, taken_by_auto
from sparseallreduce.cli.sweep import Setting
from sparseallreduce.cli.synthetic import draw_positions, draw_values, entries_of, largest_deviation
from sparseallreduce.runtime.simulator import machine_of, same_bits
from sparseallreduce.streams.operator import as_operator
from sparseallreduce.streams.reduction import Reduction

__all__ = ["network_of", "predicted", "simulated_point"]

Array = NDArray[Any]

_LARGEST = 1 << 24  # values on all ranks together; larger vectors are scaled down
_FEWEST = 64  # entries per rank after scaling down


def network_of(machine: Machine) -> sar.Network:
    """Return a network with the constants measured on this machine, with one rank per host."""
    return sar.Network(machine.alpha, 1 / machine.beta, machine.gamma, machine.gamma_dense)


def predicted(name: str, setting: Setting, dtype: str, op: str, machine: Machine) -> float | None:
    """Return the cost model's prediction of an algorithm's time in seconds, for uniformly random positions; None if it has no cost."""
    if setting.ranks == 1 or setting.size == 0:
        return 0.0
    entries, reduction = entries_of(setting.size, setting.density), Reduction(as_operator(op))
    empty = sar.SparseStream(np.empty(0, np.uint32), np.empty(0, dtype), setting.size)
    problem = problem_of(empty, entries, setting.ranks, reduction)._replace(entries=entries)
    if name == AUTO:
        name = taken_by_auto(machine, setting.size, entries, setting.ranks, dtype, as_operator(op)).algorithm
    return known_time(predicted_time(name, problem, machine))


def simulated_point(setting: Setting, names: Sequence[str], dtype: str, op: str, network: sar.Network, seed: int) -> dict[str, Any]:
    """Return the results of a setting in the format of ``bench``, with ``simulated`` true.

    If all ranks together have too many values, vectors of N / s values are simulated on a network whose bandwidth is divided by s and whose
    additions take s times as long. In the alpha-beta model the time is the same, except for the headers of messages. ``scaled_by`` is s;
    the bytes are those of the whole vector.
    """
    ranks, size = setting.ranks, setting.size
    entries = entries_of(size, setting.density)
    factor = max(1, min(-(-ranks * size // _LARGEST), entries // _FEWEST))
    small, few = size // factor, entries_of(size // factor, setting.density)
    dense = network.gamma / 8 if network.gamma_dense is None else network.gamma_dense
    scaled = network._replace(bandwidth=network.bandwidth / factor, gamma=network.gamma * factor, gamma_dense=dense * factor)
    rng = np.random.default_rng(seed)
    streams = [sar.SparseStream(draw_positions(rng, small, few), draw_values(rng, few, dtype), small) for _ in range(ranks)]
    expected, magnitude = _reduced(streams, op)
    machine = machine_of(network, network.layout(ranks))
    takes = taken_by_auto(machine, size, entries, ranks, dtype, as_operator(op)).algorithm
    rows = [
        _row(name, streams, scaled, op, factor, expected, magnitude, takes)
        | {"predicted_time": predicted(name, setting, dtype, op, machine)}
        for name in names
    ]
    point = {"ranks": ranks, "size": size, "density": setting.density, "entries": entries, "dtype": dtype, "op": op}
    return point | {"simulated": True, "scaled_by": factor, "auto_takes": takes, "algorithms": rows}


def _row(
    name: str,
    streams: Sequence[sar.SparseStream],
    network: sar.Network,
    op: str,
    factor: int,
    expected: Array,
    magnitude: Array | None,
    takes: str,
) -> dict[str, Any]:
    out = sar.simulate(streams, name if name != AUTO or factor == 1 else takes, network, op=op)
    first, sent = out.outputs[0], (out.bytes_sent - out.header_bytes) * factor + out.header_bytes
    identical = all(same_bits(first, other) for other in out.outputs[1:])
    return {
        "algorithm": name,
        **dict.fromkeys(("median", "lower_quartile", "upper_quartile"), out.time),
        "bytes_sent": sent.tolist(),
        "header_bytes": out.header_bytes.tolist(),
        "messages": out.messages.tolist(),
        "result_density": first.density,
        "chosen": takes if name == AUTO else None,
        "correct": identical and largest_deviation(first, expected, magnitude, len(streams), as_operator(op)) <= 1,
        "seconds": [[out.time]],
    }


def _reduced(streams: Sequence[sar.SparseStream], op: str) -> tuple[Array, Array | None]:
    """Return the dense reduction, and for sums that of the absolute values."""
    operator, dtype = as_operator(op), streams[0].dtype
    ufunc = {"sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    wide = np.dtype(np.float64) if dtype.kind == "f" else np.dtype(np.complex128) if dtype.kind == "c" else dtype
    total = np.full(streams[0].size, operator.neutral_of(dtype)).astype(wide)
    held, magnitude = np.zeros(len(total), np.bool_), np.zeros(len(total), wide)
    for stream in streams:
        total[stream.indices] = ufunc(total[stream.indices], stream.values.astype(wide))
        magnitude[stream.indices] += np.abs(stream.values)
        held[stream.indices] = True
    total[~held] = 0
    if op == "mean":
        total, magnitude = total / len(streams), magnitude / len(streams)
    return total.astype(dtype), magnitude if op in ("sum", "mean") and dtype.kind in "fc" else None
