"""Simulate sums of lists of streams, one list for each rank, on a virtual network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.algorithms.allreduce import make_call
from sparseallreduce.algorithms.many import ListCall, allreduce_list, make_list_call
from sparseallreduce.runtime.simulator.agreement import expect_agreement
from sparseallreduce.runtime.simulator.delivery import Order
from sparseallreduce.runtime.simulator.engine import run
from sparseallreduce.runtime.simulator.network import Network, machine_of
from sparseallreduce.runtime.simulator.result import Simulation
from sparseallreduce.runtime.simulator.sharing import Outputs, shared_reductions
from sparseallreduce.streams.operator import Operator
from sparseallreduce.streams.reduction import divided

__all__ = ["simulate_lists"]


def simulate_lists(
    lists: Sequence[Any],
    algorithm: Any,
    network: Network,
    op: str | Operator,
    delivery: Order | None,
    through_wire: bool,
    options: Mapping[str, Any],
) -> Simulation:
    """Simulate the sum of a list of streams, as :func:`~sparseallreduce.simulate` does for one stream."""
    made: list[tuple[Any, Intent]] = []
    for streams in lists:
        make: Any = make_list_call if isinstance(streams, list | tuple) else make_call
        made.append(make(streams, op, algorithm, options))
    expect_agreement([intent for _, intent in made])
    calls: list[ListCall] = [call for call, _ in made]
    ranks = len(calls)
    hosts = network.layout(ranks)
    machine = machine_of(network, hosts)
    # The ranks share the latest results of each group; a rank is charged for its work in all groups.
    shared = [shared_reductions([(call.op, call.call.switch_density) for call in calls]) for _ in calls[0].fused]
    schedules = [allreduce_list(call, rank, ranks, machine, [each[rank] for each in shared], hosts) for rank, call in enumerate(calls)]
    works = [_Work([each[rank] for each in shared]) for rank in range(ranks)]
    simulation = run(
        schedules,
        network,
        delivery=delivery,
        through_wire=through_wire,
        reductions=works,  # type: ignore[arg-type]
        encoding=calls[0].call.encoding,
    )
    firsts = [Outputs() for _ in calls[0].fused]
    results: dict[tuple[int, ...], Any] = {}
    outputs = [tuple(first.once(one) for first, one in zip(firsts, output, strict=True)) for output in simulation.outputs]
    for output in outputs:
        key = tuple(map(id, output))
        if key not in results:
            whole = tuple(divided(one, ranks) for one in output) if calls[0].op.is_mean else output
            results[key] = calls[0].cutter()(whole)
    simulation.outputs = [list(results[tuple(map(id, output))]) for output in outputs]
    return simulation


class _Work:
    """The total work of a rank's reductions."""

    def __init__(self, reductions: Sequence[Any]) -> None:
        self._reductions = reductions

    @property
    def work(self) -> int:
        return sum(reduction.work for reduction in self._reductions)

    @property
    def dense_work(self) -> int:
        return sum(reduction.dense_work for reduction in self._reductions)
