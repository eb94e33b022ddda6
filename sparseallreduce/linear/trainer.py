"""The trainer: data-parallel mini-batch SGD on a linear model (thesis sections 2.1, algorithm 1, and 4.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import DivergenceError
from sparseallreduce.linear.clock import Clock
from sparseallreduce.linear.datasets import Dataset, gather
from sparseallreduce.linear.models import LinearModel
from sparseallreduce.linear.schedules import Schedule
from sparseallreduce.linear.strategies import Strategy
from sparseallreduce.linear.weights import Weights
from sparseallreduce.runtime.trace import trace

__all__ = ["Epoch", "Options", "Trainer", "batches"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Options:
    """What a training run is told beside its model, strategy and learning rate."""

    epochs: int = 10  # passes over the training set
    batch_size: int = 100  # samples a rank and step, the paper's B: a step averages over B * P samples
    seed: int = 0  # of the order of samples

    def __post_init__(self) -> None:
        for name, lowest in (("epochs", 0), ("batch_size", 1), ("seed", 0)):
            if not getattr(self, name) >= lowest:
                raise ValueError(f"{name} must be at least {lowest}, not {getattr(self, name)}")


@dataclass(frozen=True)
class Epoch:
    """What one pass over the training set came to, over all ranks."""

    epoch: int  # from 1
    loss: float  # mean loss of a training sample, plus the L2 term, after the epoch
    train_accuracy: float | None  # share of training samples classified rightly; None where labels are no classes
    test_accuracy: float | None  # likewise of the test set, if there is one
    seconds: dict[str, float]  # mean over the ranks: compute, communicate, update, evaluate, and their total
    bytes_sent: int  # by all ranks together, in training
    steps: int
    gradient_density: float  # share of the N entries in what a rank gave to be summed: mean over steps and ranks
    total_density: float  # share of the N entries in the sum: mean over steps
    measures: dict[str, Any]  # what the strategy alone has to report: see its ``measures``


class Trainer:
    """Trains the weights of a model on the samples of all ranks.

    A step has three parts: every rank computes the gradient of those samples of the global batch that it holds, the strategy sums
    these gradients, and every rank subtracts the sum from its own copy of the weights.

    Parameters
    ----------
    model : LinearModel
    strategy : Strategy
        Made of this rank's training samples and the communicator.
    schedule : callable
        From the number of a step to its learning rate.
    options : Options
    """

    def __init__(self, model: LinearModel, strategy: Strategy, schedule: Schedule, options: Options) -> None:
        self.model = model
        self.strategy = strategy
        self.schedule = schedule
        self.options = options
        self.dataset = strategy.dataset
        self.comm = strategy.comm
        self.step = 0
        l2 = strategy.descent.l2
        if schedule(0) * l2 >= 1:
            raise ValueError(f"learning rate times l2 must be below 1, not {schedule(0):g} * {l2:g}: lower one of them")

    @property
    def weights(self) -> Weights:
        """What has been learned, the same on every rank."""
        return self.strategy.weights

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        return -(-self.dataset.total // (self.options.batch_size * self.strategy.workers))

    def run(self, test: Dataset | None = None, on_step: Callable[[], object] | None = None) -> Iterator[Epoch]:
        """Train epoch by epoch; collective over the strategy's communicator.

        Parameters
        ----------
        test : Dataset, optional
            Samples to measure the accuracy on, with the features and the label coding of the training set.
        on_step : callable, optional
            Called after every step.

        Yields
        ------
        Epoch
            After every epoch, the same on all ranks.

        Raises
        ------
        DivergenceError
            On every rank, if a weight or the loss is no longer finite.
        """
        self.strategy.warm_up()
        threshold = _threshold(self.model, self.dataset, self.comm)
        for epoch in range(1, self.options.epochs + 1):
            clock = self.strategy.clock = Clock()
            with trace() as traffic:
                self._train(epoch, on_step)
            loss, train_accuracy = self._evaluated(self.dataset, threshold)
            test_accuracy = None if test is None else self._evaluated(test, threshold)[1]
            clock.lap("evaluate")
            if not math.isfinite(loss):
                raise DivergenceError(f"the loss is {loss} after epoch {epoch}: lower the learning rate ({self.schedule(self.step):g} now)")
            yield self._report(epoch, loss, train_accuracy, test_accuracy, traffic.bytes_sent)

    def _train(self, epoch: int, on_step: Callable[[], object] | None) -> None:
        """One pass over the training set."""
        try:
            if self.strategy.serves:
                self.strategy.serve()
            else:
                for rows, count in batches(self.dataset, self.options.batch_size * self.strategy.workers, (self.options.seed, epoch)):
                    self._step(rows, count)
                    if on_step is not None:
                        on_step()
            self.strategy.drain()
        except Exception as error:
            raise self.strategy.give_up(error) from error.__cause__
        self.step = epoch * self.steps

    def _step(self, rows: Array, count: int) -> None:
        """One step, to which this rank gives its rows of a batch of ``count`` samples."""
        derivatives = self.model.derivative(self.strategy.scores(rows), self.dataset.labels[rows])
        if self.dataset.weights is not None:
            derivatives = derivatives * self.dataset.weights[rows]
        gradient = self.strategy.gradient(rows, (derivatives / count).astype(self.dataset.values.dtype))
        self.strategy.update(gradient, self.schedule(self.step))
        self.step += 1

    def _evaluated(self, dataset: Dataset, threshold: float | None) -> tuple[float, float | None]:
        """The mean loss of all ranks' samples, penalty included, and the share of them on the right side of the threshold."""
        scores = self.weights.scores(dataset, np.arange(dataset.rows))
        losses = self.model.loss(scores, dataset.labels)
        loss = float(losses.sum() if dataset.weights is None else np.dot(losses, dataset.weights))
        right = 0 if threshold is None else int(((scores > threshold) == (dataset.labels > threshold)).sum())
        ranks = gather(self.comm, (loss, right))
        mean = sum(loss for loss, _ in ranks) / dataset.total + self.weights.penalty()
        return mean, None if threshold is None else sum(right for _, right in ranks) / dataset.total

    def _report(self, epoch: int, loss: float, train_accuracy: float | None, test_accuracy: float | None, bytes_sent: int) -> Epoch:
        """What the epoch came to, from what every rank has noted of it; collective."""
        strategy = self.strategy
        ranks = gather(self.comm, (dict(strategy.clock.seconds), bytes_sent, strategy.given_densities, strategy.summed_densities))
        strategy.given_densities, strategy.summed_densities = [], []
        phases = dict.fromkeys(phase for seconds, *_ in ranks for phase in seconds)
        seconds = {phase: _mean([seconds.get(phase, 0.0) for seconds, *_ in ranks]) for phase in phases}
        seconds["total"] = sum(seconds.values())
        return Epoch(
            epoch=epoch,
            loss=loss,
            train_accuracy=train_accuracy,
            test_accuracy=test_accuracy,
            seconds=seconds,
            bytes_sent=sum(sent for _, sent, _, _ in ranks),
            steps=self.steps,
            gradient_density=_mean([density for _, _, given, _ in ranks for density in given]),
            total_density=_mean([density for _, _, _, summed in ranks for density in summed]),
            measures=strategy.measures(),
        )


def batches(dataset: Dataset, size: int, seed: tuple[int, int]) -> Iterator[tuple[Array, int]]:
    """The batches of one epoch: of each, the rows that this rank holds, and how many samples all ranks hold of it.

    All samples are shuffled by their numbers over all ranks, so that the batches are the same for any number of ranks; thesis
    algorithm 1 lines 3 to 6, but for the division of a batch among the ranks, which is by who has read the sample.

    Parameters
    ----------
    dataset : Dataset
    size : int
        Samples of a batch, over all ranks; the last batch of an epoch may have fewer.
    seed : (int, int)
        Of the run, and the number of the epoch.

    Examples
    --------
    >>> halves = [Dataset(np.zeros(4, int), np.empty(0), np.empty(0), np.zeros(3), 1, first, 6) for first in (0, 3)]
    >>> for first, second in zip(*(batches(half, 4, (0, 1)) for half in halves)):
    ...     print(first, second)
    (array([1, 0]), 4) (array([1, 0]), 4)
    (array([2]), 2) (array([2]), 2)
    """
    order = np.random.default_rng(seed).permutation(dataset.total)
    positions = np.flatnonzero((order >= dataset.first) & (order < dataset.first + dataset.rows))
    rows = order[positions] - dataset.first
    starts = np.arange(0, dataset.total, size)
    bounds = np.append(np.searchsorted(positions, starts), len(positions))
    for batch, start in enumerate(starts.tolist()):
        yield rows[bounds[batch] : bounds[batch + 1]], min(size, dataset.total - start)


def _threshold(model: LinearModel, dataset: Dataset, comm: Any) -> float | None:
    """The score that parts the classes: zero, or for regression the middle of the two labels if there are no more than two."""
    if model.classifies:
        return 0.0
    labels = sorted(set().union(*gather(comm, np.unique(dataset.labels)[:3].tolist())))
    return sum(labels) / 2 if len(labels) == 2 else None


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
