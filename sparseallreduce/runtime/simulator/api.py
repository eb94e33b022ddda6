"""``simulate``: reduce the streams of P ranks, or the accumulators of P reducers, on a virtual network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from sparseallreduce.algorithms.allreduce import Call, allreduce, make_call
from sparseallreduce.algorithms.collectives.call import Collective
from sparseallreduce.algorithms.steps import Schedule
from sparseallreduce.errors import StreamError
from sparseallreduce.runtime.options import OperationOptions
from sparseallreduce.runtime.simulator.agreement import expect_agreement, overlap_of
from sparseallreduce.runtime.simulator.delivery import Order
from sparseallreduce.runtime.simulator.engine import run
from sparseallreduce.runtime.simulator.family import simulate_collective
from sparseallreduce.runtime.simulator.lossy import SimulatedReducer, simulate_reducers
from sparseallreduce.runtime.simulator.many import simulate_lists
from sparseallreduce.runtime.simulator.network import Network, machine_of
from sparseallreduce.runtime.simulator.result import Simulation
from sparseallreduce.runtime.simulator.sharing import shared_reductions
from sparseallreduce.streams.operator import Operator
from sparseallreduce.streams.reduction import Reduction, divided
from sparseallreduce.streams.stream import SparseStream

__all__ = ["simulate"]


def simulate(
    streams: Sequence[Any],
    algorithm: str | Callable[..., Schedule] | Sequence[SimulatedReducer] = "auto",
    network: Network | None = None,
    op: str | Operator = "sum",
    *,
    delivery: Order | None = None,
    through_wire: bool = False,
    collective: str = "allreduce",
    root: int = 0,
    bounds: Sequence[int] | None = None,
    join: str | Operator = "ranges",
    **options: Unpack[OperationOptions],
) -> Simulation:
    """Simulate the sparse allreduce of P streams, one for each rank, or another collective, on a virtual network.

    Parameters
    ----------
    streams : sequence of SparseStream, or of lists of them
        The contributions of the P ranks; with reducers, their accumulators.
    algorithm : str, callable or sequence of P reducers
        As for :func:`~sparseallreduce.allreduce`. Reducers take neither operator nor options, and keep their state from call to call.
    network : Network, optional
    op : str or Operator
        As for :func:`~sparseallreduce.allreduce`.
    delivery : int or callable, optional
        By default messages arrive at the times that the network model gives. With a seed, ranks run and messages arrive in a random order
        (messages between two ranks keep theirs). A callable picks one of n possibilities, for tests that search for a bad order.
    through_wire : bool
        Whether every message is encoded to bytes and decoded, as over MPI.
    collective, root, bounds, join
        "allreduce", "reduce", "reduce_scatter", "allgather" or "bcast", and its arguments. A broadcast sends the root's stream.
    **options
        As for :func:`~sparseallreduce.allreduce`.

    Returns
    -------
    Simulation
        Results, times and bytes. The agreement that starts an operation over MPI is not simulated.

    Examples
    --------
    >>> streams = [SparseStream([rank], [1.0], 8) for rank in range(4)]
    >>> out = simulate(streams, "ssar_recursive_doubling", Network(latency=1e-6, bandwidth=1e9))
    >>> out.outputs[3].to_dense()
    array([1., 1., 1., 1., 0., 0., 0., 0.])
    >>> out.messages
    array([2, 2, 2, 2])
    """
    network = network or Network()
    if len(streams) == 0:
        raise StreamError("simulate takes a stream for each rank, but there is none")
    other = Collective.named(collective, root, bounds, join)
    if other is not None:
        return simulate_collective(streams, other, algorithm, network, op, delivery, through_wire, options)
    if not isinstance(algorithm, str) and not callable(algorithm):
        return simulate_reducers(streams, algorithm, network, delivery, through_wire)
    if any(isinstance(stream, list | tuple) for stream in streams):
        return simulate_lists(streams, algorithm, network, op, delivery, through_wire, options)
    return _simulate_streams(streams, algorithm, network, op, delivery, through_wire, options)


def _simulate_streams(
    streams: Sequence[Any],
    algorithm: Any,
    network: Network,
    op: str | Operator,
    delivery: Order | None,
    through_wire: bool,
    options: Mapping[str, Any],
) -> Simulation:
    """Simulate an allreduce of one stream for each rank."""
    calls, entries = _agreed_calls(streams, op, algorithm, options)
    reductions = shared_reductions([(call.op, call.switch_density) for call in calls])
    schedules = _schedules(calls, entries, network, reductions)
    simulation = run(schedules, network, delivery=delivery, through_wire=through_wire, reductions=reductions, encoding=calls[0].encoding)
    handed_over = {id(output): _handed_over(output, streams, reductions[0]) for output in simulation.outputs}
    simulation.outputs = [handed_over[id(output)] for output in simulation.outputs]
    return simulation


def _agreed_calls(
    streams: Sequence[Any], op: str | Operator, algorithm: Any, options: Mapping[str, Any]
) -> tuple[list[Call], tuple[int, ...]]:
    """Return the call of each rank, and the number of entries of each."""
    made = [make_call(stream, op, algorithm, options) for stream in streams]
    expect_agreement([intent for _, intent in made])
    return [call for call, _ in made if call is not None], tuple(intent.entries for _, intent in made)


def _schedules(calls: Sequence[Call], entries: Sequence[int], network: Network, reductions: Sequence[Reduction]) -> list[Schedule]:
    """Return the schedule of each rank; algorithm "auto" is resolved for this network."""
    hosts = network.layout(len(calls))
    machine = machine_of(network, hosts)
    overlap = overlap_of(calls, machine, hosts)
    return [allreduce(call, entries, rank, len(calls), machine, reductions[rank], overlap, hosts) for rank, call in enumerate(calls)]


def _handed_over(output: SparseStream, streams: Sequence[SparseStream], reduction: Reduction) -> SparseStream:
    """Return a rank's result in its public form, copied if it shares memory with an input."""
    if any(output.overlaps(stream) for stream in streams):
        output = reduction.leave(output.copy())
    return divided(output, len(streams)) if reduction.op.is_mean else output
