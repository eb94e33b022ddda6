"""Simulation of the collectives besides allreduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.algorithms.collectives.call import Collective, CollectiveCall, make_collective_call, run_collective
from sparseallreduce.runtime.simulator.agreement import expect_agreement
from sparseallreduce.runtime.simulator.delivery import Order
from sparseallreduce.runtime.simulator.engine import run
from sparseallreduce.runtime.simulator.network import Network, machine_of
from sparseallreduce.runtime.simulator.result import Simulation
from sparseallreduce.runtime.simulator.sharing import shared_reductions
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["simulate_collective"]


def simulate_collective(
    streams: Sequence[Any],
    collective: Collective,
    algorithm: Any,
    network: Network,
    op: Any,
    delivery: Order | None,
    through_wire: bool,
    options: Mapping[str, Any],
) -> Simulation:
    """Simulate a collective as :func:`~sparseallreduce.simulate` simulates an allreduce of one stream a rank."""
    ranks = len(streams)
    calls, entries = _agreed_calls(streams, collective, op, algorithm, options)
    hosts = network.layout(ranks)
    machine = machine_of(network, hosts)
    reductions = shared_reductions([(made.call.op, made.call.switch_density) for made in calls])
    schedules = [run_collective(made, entries, rank, ranks, machine, reductions[rank], hosts) for rank, made in enumerate(calls)]
    simulation = run(
        schedules, network, delivery=delivery, through_wire=through_wire, reductions=reductions, encoding=calls[0].call.encoding
    )
    finished = {}
    for rank, output in enumerate(simulation.outputs):
        key = id(output), rank if collective.name in ("reduce", "reduce_scatter") else 0
        if key not in finished:
            finished[key] = calls[rank].finish(rank, ranks)(_apart(output, streams, reductions[rank]))
        simulation.outputs[rank] = finished[key]
    return simulation


def _agreed_calls(
    streams: Sequence[Any], collective: Collective, op: Any, algorithm: str, options: Mapping[str, Any]
) -> tuple[list[CollectiveCall], tuple[int, ...]]:
    """Return the call of each rank, and the number of entries that each announces."""
    made: list[tuple[CollectiveCall | None, Intent]] = [
        make_collective_call(collective, stream, op, algorithm, options, rank, len(streams)) for rank, stream in enumerate(streams)
    ]
    expect_agreement([intent for _, intent in made])
    return [call for call, _ in made if call is not None], tuple(intent.entries for _, intent in made)


def _apart(output: Any, streams: Sequence[Any], reduction: Reduction) -> Any:
    """Return the output, copied if it shares memory with any rank's input."""
    given = (stream for stream in streams if isinstance(stream, SparseStream))
    if isinstance(output, SparseStream) and any(output.overlaps(stream) for stream in given):
        return reduction.leave(output.copy())
    return output
