"""Simulate operations of reducers, one for each rank, on a virtual network."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.algorithms.steps import Step
from sparseallreduce.errors import StreamError
from sparseallreduce.runtime.simulator.agreement import expect_agreement
from sparseallreduce.runtime.simulator.delivery import Order
from sparseallreduce.runtime.simulator.engine import run
from sparseallreduce.runtime.simulator.network import Network
from sparseallreduce.runtime.simulator.result import Simulation
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.wire import Encoding

__all__ = ["SimulatedOperation", "SimulatedReducer", "simulate_reducers"]


class SimulatedOperation(Protocol):
    """The interface of :class:`sparseallreduce.reducers.base.ReducerOperation` that the simulator uses."""

    intent: Intent

    def run(self, rank: int, ranks: int) -> Generator[Step, Any, Any]:
        """Return the schedule that follows the agreement."""

    def abandon(self) -> None:
        """End the operation without running it to its end."""


class SimulatedReducer(Protocol):
    """The interface of a reducer, or of error feedback, that the simulator uses."""

    reduction: Reduction

    def planned(self, accumulator: Any) -> SimulatedOperation:
        """Return an operation on an accumulator."""


def simulate_reducers(
    accumulators: Sequence[Any],
    reducers: Sequence[SimulatedReducer],
    network: Network,
    delivery: Order | None,
    through_wire: bool,
) -> Simulation:
    """Simulate one operation of each rank's reducer; on any error, no operation is left in flight."""
    if len(accumulators) != len(reducers):
        raise StreamError(f"simulate takes one reducer a rank: {len(accumulators)} accumulators but {len(reducers)} reducers were given")
    operations = [reducer.planned(accumulator) for reducer, accumulator in zip(reducers, accumulators)]
    try:
        expect_agreement([operation.intent for operation in operations])
        schedules = [operation.run(rank, len(operations)) for rank, operation in enumerate(operations)]
        reductions = [reducer.reduction for reducer in reducers]
        return run(schedules, network, delivery=delivery, through_wire=through_wire, reductions=reductions, encoding=Encoding())
    finally:
        for operation in operations:
            operation.abandon()
