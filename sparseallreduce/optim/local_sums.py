"""Sums of the ranks' changes: sparse with error feedback, or complete with momentum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.reducers import ErrorFeedback, TopkA
from sparseallreduce.runtime.api import allreduce, iallreduce
from sparseallreduce.runtime.launching import ErrorReporter
from sparseallreduce.runtime.simulator import Network, Simulation, simulate
from sparseallreduce.streams.selection import ChunkTopK
from sparseallreduce.streams.stream import SparseStream

__all__ = ["ChangeSum", "FeedbackSum", "MomentumSum"]

Array = NDArray[Any]


class ChangeSum(ABC):
    """Sums the changes of one fragment of the parameters. Each rank has its own object, with the same settings."""

    @abstractmethod
    def sum(self, change: Array, comm: Any) -> SparseStream:
        """Return the mean of the ranks' changes, or of the values that are sent. Collective."""

    @abstractmethod
    def start(self, change: Array, comm: Any, progress: Any) -> Any:
        """Start a :meth:`sum` and return a request. ``change`` must not be modified before it is done."""

    @abstractmethod
    def simulate(self, others: Sequence[Any], changes: Sequence[Array], network: Network | None, how: Mapping[str, Any]) -> Simulation:
        """Return a simulated :meth:`sum` of all ranks, whose objects are ``others``."""

    @abstractmethod
    def combined(self, mean: SparseStream) -> SparseStream | Array:
        """Return what all ranks subtract from their parameters, before multiplication by ``outer_lr``."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state that later sums depend on: numbers, texts, and arrays that later sums do not modify."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state`."""

    def shared_state(self) -> dict[str, Any]:
        """Return the part of the :meth:`state` that is the same on all ranks."""
        return self.state()

    def join(self, state: Mapping[str, Any]) -> None:
        """Load the :meth:`shared_state` of another rank."""
        self.restore(state)

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply the residual by a factor, because the mean is now taken over another number of ranks."""


class FeedbackSum(ChangeSum):
    """Sends the largest values of each chunk in few bits, with error feedback: see :class:`~sparseallreduce.ErrorFeedback`."""

    def __init__(self, size: int, dtype: Any, density: float, beta: float, codec: str, chunk: int, average: str) -> None:
        k = min(size, max(1, round(density * size)))
        reducer = TopkA(size, k, selector=partial(ChunkTopK, chunk=chunk), value_codec=codec, average=average)
        self._of_ranks = average == "ranks"
        self.feedback: ErrorFeedback = ErrorFeedback(reducer, dtype, decay=beta)

    def sum(self, change: Array, comm: Any) -> SparseStream:
        return self.feedback.step(change, comm)

    def start(self, change: Array, comm: Any, progress: Any) -> Any:
        return self.feedback.istep(change, comm, progress=progress)

    def simulate(self, others: Sequence[Any], changes: Sequence[Array], network: Network | None, how: Mapping[str, Any]) -> Simulation:
        return simulate(changes, [each.feedback for each in others], network, **how)

    def combined(self, mean: SparseStream) -> SparseStream | Array:
        return mean

    def state(self) -> dict[str, Any]:
        return self.feedback.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.feedback.restore(state)

    def shared_state(self) -> dict[str, Any]:
        return {name: value for name, value in self.state().items() if name != "residual"}

    def join(self, state: Mapping[str, Any]) -> None:
        self.feedback.restore({**state, "residual": np.zeros_like(self.feedback.residual)})

    def scale(self, factor: float) -> None:
        if self._of_ranks:
            self.feedback.residual *= self.feedback.residual.dtype.type(factor)


class MomentumSum(ChangeSum):
    """Sends complete changes. Their mean is the gradient of SGD with momentum, whose velocity is the same on all ranks."""

    momentum: float
    nesterov: bool

    def __init__(self, momentum: float, nesterov: bool) -> None:
        self.momentum, self.nesterov = momentum, nesterov
        self.velocity: Array | None = None

    def sum(self, change: Array, comm: Any) -> SparseStream:
        mean: SparseStream = allreduce(SparseStream.from_dense(change), comm, "mean")
        return mean

    def start(self, change: Array, comm: Any, progress: Any) -> Any:
        with ErrorReporter(comm):
            return iallreduce(SparseStream.from_dense(change), comm, "mean", progress=progress)

    def simulate(self, others: Sequence[Any], changes: Sequence[Array], network: Network | None, how: Mapping[str, Any]) -> Simulation:
        return simulate([SparseStream.from_dense(change) for change in changes], "auto", network, "mean", **how)

    def combined(self, mean: SparseStream) -> SparseStream | Array:
        change = mean.to_dense()
        if not self.momentum:
            return change
        factor = change.dtype.type(self.momentum)
        velocity = change.copy() if self.velocity is None else factor * self.velocity + change
        combined = change + factor * velocity if self.nesterov else velocity
        self.velocity = velocity
        return combined

    def state(self) -> dict[str, Any]:
        return {} if self.velocity is None else {"velocity": self.velocity}

    def restore(self, state: Mapping[str, Any]) -> None:
        velocity = state.get("velocity")
        self.velocity = None if velocity is None else np.array(velocity)

    def scale(self, factor: float) -> None:
        pass  # a velocity consists of means
