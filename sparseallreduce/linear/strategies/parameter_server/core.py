"""The logic of a parameter server for its part of the model, independent of how messages are sent.

A server answers two calls of its workers, each of which returns the answers that can be given now, and their recipients:

* ``pull``: the weights at some indices of the part;
* ``push``: a gradient, by which the part is updated with a learning rate.

In a part for the indices ``[lo, hi)`` of the model, position 0 is index lo.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import DivergenceError
from sparseallreduce.linear.weights import Weights
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["AsynchronousServer", "Server", "SynchronousServer"]

Array = NDArray[Any]
Answers = list[tuple[int, Array]]


class Server(ABC):
    """A parameter server: it holds one part of the model, and applies the gradients of the workers to it.

    Parameters
    ----------
    weights : Weights
        Weights of this part.
    workers : int
        Number of workers, which are numbered from 0.

    Attributes
    ----------
    staleness : list of Counter
        For each worker, how many of its gradients had which staleness: the number of updates applied since it pulled the weights with which
        it computed the gradient.
    entries : list of int
        Number of entries of the gradient of each update.
    """

    def __init__(self, weights: Weights, workers: int) -> None:
        self.weights = weights
        self.workers = workers
        self.staleness: list[Counter[int]] = [Counter() for _ in range(workers)]
        self.entries: list[int] = []
        self._updates = 0
        self._pulled = [0] * workers  # number of updates applied when each worker last pulled

    def warm_up(self) -> None:
        """Compile the loops that sum gradients."""
        one = np.zeros(1 if self.weights.columns is None else (1, self.weights.columns), self.weights.unscaled.dtype)
        Reduction().many([SparseStream([place], one, 8) for place in range(2)])

    @abstractmethod
    def pull(self, worker: int, indices: Array) -> Answers:
        """Answer a worker's request for the weights at sorted indices."""

    @abstractmethod
    def push(self, worker: int, gradient: SparseStream, rate: float) -> Answers:
        """Accept a worker's gradient, of the size of this part, and its learning rate."""

    def _answer(self, worker: int, indices: Array) -> tuple[int, Array]:
        self._pulled[worker] = self._updates
        return worker, self.weights.at(indices)

    def _note(self, worker: int) -> None:
        self.staleness[worker][self._updates - self._pulled[worker]] += 1

    def _apply(self, gradient: SparseStream, rate: float) -> None:
        self._updates += 1
        self.entries.append(gradient.stored)
        self.weights.descend(gradient, rate)


class SynchronousServer(Server):
    """Applies the sum of all workers' gradients once all have arrived, in the order of workers.

    Until then, workers that have pushed are not answered. So the weights take the same steps as with an allreduce, and are bitwise
    reproducible.

    Examples
    --------
    >>> server = SynchronousServer(Weights(4), workers=2)
    >>> server.push(0, SparseStream([1], np.float32([2]), 4), rate=0.5)
    []
    >>> server.pull(0, np.uint32([1]))
    []
    >>> server.push(1, SparseStream([1, 3], np.float32([4, 2]), 4), rate=0.5)
    [(0, array([-3.], dtype=float32))]
    """

    def __init__(self, weights: Weights, workers: int) -> None:
        super().__init__(weights, workers)
        self._given: dict[int, SparseStream] = {}
        self._waiting: list[tuple[int, Array]] = []
        self._reduction = Reduction()

    def pull(self, worker: int, indices: Array) -> Answers:
        if worker in self._given:
            self._waiting.append((worker, indices))
            return []
        return [self._answer(worker, indices)]

    def push(self, worker: int, gradient: SparseStream, rate: float) -> Answers:
        self._note(worker)
        self._given[worker] = gradient
        if len(self._given) < self.workers:
            return []
        streams = [self._reduction.enter(self._given[number]) for number in range(self.workers)]
        self._apply(self._reduction.leave(self._reduction.many(streams)), rate)
        waiting, self._waiting = self._waiting, []
        self._given.clear()
        return [self._answer(asking, indices) for asking, indices in waiting]


class AsynchronousServer(Server):
    """Applies each gradient when it arrives, and answers immediately: no worker waits for another.

    Examples
    --------
    >>> server = AsynchronousServer(Weights(4), workers=2)
    >>> for worker in (0, 1):
    ...     answers = server.pull(worker, np.uint32([1]))
    >>> for worker in (0, 1):
    ...     answers = server.push(worker, SparseStream([1], np.float32([2]), 4), rate=0.5)
    >>> server.pull(0, np.uint32([1])), server.staleness
    ([(0, array([-2.], dtype=float32))], [Counter({0: 1}), Counter({1: 1})])
    """

    def pull(self, worker: int, indices: Array) -> Answers:
        return [self._answer(worker, indices)]

    def push(self, worker: int, gradient: SparseStream, rate: float) -> Answers:
        self._note(worker)
        try:
            self._apply(gradient, rate)
        except DivergenceError:
            raise DivergenceError(
                f"a weight is no longer a finite number after {self._updates} gradients, the last from worker {worker} at rate {rate:g}: "
                "lower the learning rate"
            ) from None
        return []
