"""Training with lossy sums on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce.cli.paper_figures.tasks import Task
from sparseallreduce.reducers import REDUCERS
from sparseallreduce.reducers.base import Reducer
from sparseallreduce.runtime.simulator import Network
from sparseallreduce.streams.selection import ApproximateTopK, MSTopK

__all__ = ["Epoch", "Method", "Step", "Training", "method_of"]

Array = NDArray[Any]

_WARM_UP = (0.25, 0.0725, 0.015, 0.004)  # densities of the first epochs (gTop-k section IV-B)
_LABELS = {"dense": "Dense", "topka": "TopkA", "topkdsa": "TopkDSA", "gtopk": "gTopk", "gaussiank": "Gaussiank", "oktopk": "Ok-Topk"}
_BUCKET = 512  # values of which the thesis selects 32, 8 or 2


class Epoch(NamedTuple):
    """The communication time, loss and test accuracy after an epoch."""

    seconds: float  # since the start: simulated communication and measured selection
    loss: float
    accuracy: float  # on the test samples


class Step(NamedTuple):
    """A step of training, before the parameters change."""

    number: int
    accumulators: list[Array]  # gradients times the learning rate, plus residuals
    gradient: Array  # the mean over ranks, times the learning rate
    update: Array
    contributed: list[int]  # values that each rank selected


@dataclass(frozen=True)
class Method:
    """A way to add gradients: a reducer with error feedback, or the dense sum.

    ``make`` returns the reducer of a rank, given N, k and the rank; None is the dense sum.
    """

    label: str
    make: Callable[[int, int, int], Reducer] | None
    density: float = 1.0
    warm_up: bool = False  # begin with higher densities

    def reducer(self, size: int, epoch: int, epochs: int, rank: int) -> Reducer:
        """Return the reducer of a rank in an epoch."""
        assert self.make is not None
        warm = _WARM_UP[: epochs // 5] if self.warm_up else ()
        density = max(self.density, warm[epoch]) if epoch < len(warm) else self.density
        return self.make(size, min(size, max(1, round(density * size))), rank)


def method_of(name: str, density: float = 1.0, warm_up: bool = False, label: str = "") -> Method:
    """Return a method: "dense", the name of a reducer, "MSTopK", or the thesis's "Top32", that is 32 of every 512 values."""
    if name == "dense":
        return Method(label or "Dense", None)
    if name.startswith("Top"):
        return Method(label or name, _top_of_buckets, int(name.removeprefix("Top")) / _BUCKET)
    make = _ms_topk if name == "MSTopK" else partial(_reducer, name)
    return Method(label or _LABELS.get(name, name), make, density, warm_up)


def _reducer(name: str, size: int, k: int, rank: int) -> Reducer:
    return REDUCERS[name](size, k)


def _ms_topk(size: int, k: int, rank: int) -> Reducer:
    return sar.TopkA(size, k, selector=MSTopK)


def _top_of_buckets(size: int, k: int, rank: int) -> Reducer:
    selector = partial(ApproximateTopK, bucket=_BUCKET, seed=rank)
    return sar.TopkDSA(size, k, algorithm="ssar_recursive_doubling", selector=selector)


@dataclass(frozen=True)
class Training:
    """Stochastic gradient descent for a task; ``batch`` is the batch size of all ranks together."""

    task: Task
    method: Method
    ranks: int
    batch: int
    epochs: int
    network: Network
    seed: int = 0

    def run(self, watch: Callable[[Step], None] | None = None) -> Iterator[Epoch]:
        """Train, call ``watch`` in each step, and yield the results of each epoch."""
        task, rng, seconds, number = self.task, np.random.default_rng(self.seed), 0.0, 0
        parameters, feedbacks = task.start(self.seed), self._feedbacks(0, None)
        per_step = self._dense_seconds() if feedbacks is None else self._selecting()
        for epoch in range(self.epochs):
            feedbacks = self._feedbacks(epoch, feedbacks)
            order = rng.permutation(task.count)
            for begin in range(0, task.count - self.batch + 1, self.batch):
                parts = np.array_split(order[begin : begin + self.batch], self.ranks)
                gradients = [np.float32(task.rate) * task.gradient(parameters, rows) for rows in parts]
                step, spent = self._step(number, gradients, feedbacks, watch is not None)
                if watch is not None:
                    watch(step)
                parameters -= step.update
                seconds += spent + per_step
                number += 1
            yield Epoch(seconds, task.loss(parameters), task.accuracy(parameters))

    def _feedbacks(self, epoch: int, before: list[sar.ErrorFeedback] | None) -> list[sar.ErrorFeedback] | None:
        """Return the error feedback of all ranks in an epoch, with the residuals from before."""
        if self.method.make is None:
            return None
        reducers = [self.method.reducer(self.task.size, epoch, self.epochs, rank) for rank in range(self.ranks)]
        if before is not None and before[0].reducer.k == reducers[0].k:
            return before
        made = [sar.ErrorFeedback(reducer) for reducer in reducers]
        for new, old in zip(made, before or ()):
            new.residual[:] = old.residual
        return made

    def _step(self, number: int, gradients: list[Array], feedbacks: list[Any] | None, watched: bool) -> tuple[Step, float]:
        mean: Array = np.add.reduce(gradients) / np.float32(self.ranks)
        if feedbacks is None:
            return Step(number, gradients, mean, mean, [self.task.size] * self.ranks), 0.0
        sums = [feedback.residual + gradient for feedback, gradient in zip(feedbacks, gradients)] if watched else []
        out = sar.simulate(gradients, feedbacks, self.network)
        contributed = [len(feedback.contributed) for feedback in feedbacks] if watched else []
        return Step(number, sums, mean, out.outputs[0].to_dense(), contributed), float(out.time)

    def _dense_seconds(self) -> float:
        streams = [sar.SparseStream.from_dense(np.ones(self.task.size, np.float32)) for _ in range(self.ranks)]
        return float(sar.simulate(streams, "dense", self.network).time)

    def _selecting(self) -> float:
        """Return the seconds that selection takes: the median of five operations on one rank, after a warm-up."""
        reducer, times = self.method.reducer(self.task.size, self.epochs, self.epochs, 0), []
        values = np.random.default_rng(self.seed).laplace(size=reducer.size).astype(np.float32)
        for _ in range(6):
            start = perf_counter()
            reducer.allreduce(values, sar.SERIAL)
            times.append(perf_counter() - start)
        return float(np.median(times[1:]))
