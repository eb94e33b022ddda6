"""The non-blocking sparse allreduce: the gradients of a batch are summed while those of the next are computed (thesis section 4.1.5)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import SparseAllreduceError
from sparseallreduce.linear.strategies.sparse import SparseStrategy
from sparseallreduce.runtime.api import Request, iallreduce
from sparseallreduce.streams.stream import SparseStream

__all__ = ["OverlappedStrategy"]

Array = NDArray[Any]
T = TypeVar("T")

# Seconds between two polls of pending messages, first and longest: short at first, because an operation starts with short messages.
# Polling every 0.1 ms all the time slows computing by a quarter if each rank has one core.
_INTERVALS = (1e-4, 1e-3)


@dataclass(frozen=True)
class _InFlight:
    """A sum in flight, with this rank's gradient and the learning rate of its step."""

    request: Request
    given: SparseStream
    rate: float


class OverlappedStrategy(SparseStrategy):
    """The sparse strategy with sums that update the weights one step later.

    So gradients are one step stale: those of step t are computed with weights that include the steps up to t - 2, also on one rank.
    In return, messages are transferred while this rank computes; the CPU time that they need is not saved. A thread does the computing
    without the interpreter's lock, while the main thread progresses the messages: MPI is only called from the thread that trains.
    """

    name = "overlapped"
    devices: tuple[str, ...] = ("cpu",)  # kernels of the host run concurrently with the messages
    sums_batches = False  # the sums would belong to older weights than those that they update
    in_unison = False
    stale_steps = 1
    buffers = 2  # for the gradient being computed, and the pending one

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_flight: _InFlight | None = None
        self._computing = ThreadPoolExecutor(1, thread_name_prefix="sparseallreduce-compute")

    def scores(self, rows: Array) -> Array:
        return self._meanwhile(lambda: super(OverlappedStrategy, self).scores(rows))

    def gradient(self, rows: Array, coefficients: Array) -> SparseStream:
        return self._meanwhile(lambda: super(OverlappedStrategy, self).gradient(rows, coefficients))

    def give_up(self, error: Exception) -> Exception:
        if self._in_flight is not None and self.comm.size > 1:  # the other ranks complete that sum before the next
            try:
                self._in_flight.request.wait()
            except SparseAllreduceError as shared:
                return shared
        return super().give_up(error)

    def update(self, gradient: SparseStream, rate: float) -> None:
        started = _InFlight(iallreduce(gradient, self.comm, algorithm=self.algorithm), gradient, rate)
        self.clock.lap("communicate")
        self.drain()
        self._in_flight = started

    def settle(self) -> None:
        if self._in_flight is not None:
            self._in_flight.request.wait()

    def drain(self) -> None:
        if self._in_flight is None:
            return
        total = self._in_flight.request.wait()
        self.clock.lap("wait")
        self._note(self._in_flight.given, total)
        self._descend(total, self._in_flight.rate)
        self._in_flight = None

    def state(self) -> dict[str, Any]:
        state = super().state() | {"in_flight": self._in_flight is not None}
        if self._in_flight is not None:
            total = self._in_flight.request.wait()
            state["in_flight_rate"] = self._in_flight.rate
            state["in_flight_values"] = total._stored
            state["in_flight_indices"] = np.empty(0, np.uint32) if total.is_dense else total.indices
        return state

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._in_flight = None
        if state["in_flight"]:
            indices, values = state["in_flight_indices"], state["in_flight_values"]
            dense = len(values) == self.size
            if not dense:
                SparseStream(indices, values, self.size)  # raises an error if they are invalid
            total = SparseStream._dense_form(values, self.size) if dense else SparseStream._sparse_form(indices, values, self.size)
            self._in_flight = _InFlight(Request(None, total), total, float(state["in_flight_rate"]))

    def measures(self) -> dict[str, Any]:
        """Return ``stale_steps``, the delay of updates in steps compared with other strategies."""
        return {"stale_steps": self.stale_steps}

    def _meanwhile(self, compute: Callable[[], T]) -> T:
        """Return the result of ``compute``, which a thread runs while this one progresses the pending sum."""
        if self._in_flight is None or self.comm.size == 1:
            return compute()
        task, interval = self._computing.submit(compute), _INTERVALS[0]
        try:
            while not _done_within(task, interval) and not self._in_flight.request.test()[0]:
                interval = min(2 * interval, _INTERVALS[1])
        finally:
            result = task.result()
        return result


def _done_within(task: Future[T], seconds: float) -> bool:
    try:
        task.exception(seconds)
    except TimeoutError:
        return False
    return True
