"""A learning task for lossy sums: softmax regression on random features of scikit-learn's digits.

Gradients are dense, as those of the papers' networks, and an epoch takes about a second on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce.reducers.base import Reducer
from sparseallreduce.runtime.simulator import Network

__all__ = ["CLASSES", "Epoch", "epochs_of", "make_task"]

Array = NDArray[Any]

CLASSES = 10
_TEST = 297  # samples
_RATE, _MOMENTUM = 0.1, 0.0


class Task(NamedTuple):
    """Features and classes of the training and test samples."""

    x: Array
    y: Array
    test_x: Array
    test_y: Array


class Epoch(NamedTuple):
    """The communication time, loss and test accuracy after an epoch."""

    seconds: float  # since the start: simulated communication and measured selection
    loss: float
    accuracy: float  # on the test samples


def make_task(features: int, seed: int) -> Task:
    """Return scikit-learn's digits with ``features`` random features, each the positive part of a random projection."""
    from sklearn.datasets import load_digits

    rng = np.random.default_rng(seed)
    images, digits = load_digits(return_X_y=True)
    order = rng.permutation(len(digits))
    images = (images - images.mean()) / images.std()
    projected = np.maximum(images @ rng.standard_normal((images.shape[1], features)) / 8, 0).astype(np.float32)
    projected *= np.float32(1 / np.sqrt((projected**2).sum(axis=1).mean()))
    projected *= 4
    train, test = order[_TEST:], order[:_TEST]
    return Task(projected[train], digits[train], projected[test], digits[test])


def epochs_of(
    task: Task, make: Callable[[int], Reducer] | None, ranks: int, batch: int, epochs: int, network: Network, seed: int
) -> Iterator[Epoch]:
    """Train with error feedback, and yield the results of each epoch.

    ``make`` returns a reducer for N values; None stands for the dense sum. ``batch`` is the batch size of all ranks together.
    """
    weights = np.zeros((task.x.shape[1], CLASSES), np.float32)
    size, rng, seconds = weights.size, np.random.default_rng(seed), 0.0
    feedbacks: list[Any] | None = None if make is None else [sar.ErrorFeedback(make(size)) for _ in range(ranks)]
    dense_time = _dense_time(size, ranks, network)
    selecting = 0.0 if make is None else _selecting(make(size), seed)
    for _ in range(epochs):
        order = rng.permutation(len(task.y))
        for step in range(len(order) // batch):
            parts = np.array_split(order[step * batch : (step + 1) * batch], ranks)
            gradients = [np.float32(_RATE * 40) * _gradient(task, weights, rows).reshape(-1) for rows in parts]
            if feedbacks is None:
                update = np.mean(gradients, axis=0)
                seconds += dense_time
            else:
                out = sar.simulate(gradients, feedbacks, network)
                update = out.outputs[0].to_dense()
                seconds += out.time + selecting
            weights -= update.reshape(weights.shape)
        yield Epoch(seconds, _loss(task, weights), float((np.argmax(task.test_x @ weights, axis=1) == task.test_y).mean()))


def _dense_time(size: int, ranks: int, network: Network) -> float:
    streams = [sar.SparseStream.from_dense(np.ones(size, np.float32)) for _ in range(ranks)]
    return float(sar.simulate(streams, "dense", network).time)


def _selecting(reducer: Reducer, seed: int) -> float:
    """Return the seconds that selection takes: the median of five operations on one rank, after a warm-up."""
    values, times = np.random.default_rng(seed).laplace(size=reducer.size).astype(np.float32), []
    for _ in range(6):
        start = perf_counter()
        reducer.allreduce(values, sar.SERIAL)
        times.append(perf_counter() - start)
    return float(np.median(times[1:]))


def _probabilities(task: Task, weights: Array, rows: Any) -> Array:
    scores = task.x[rows] @ weights
    probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
    normalised: Array = probabilities / probabilities.sum(axis=1, keepdims=True)
    return normalised


def _gradient(task: Task, weights: Array, rows: Array) -> Array:
    probabilities = _probabilities(task, weights, rows)
    probabilities[np.arange(len(rows)), task.y[rows]] -= 1
    gradient: Array = task.x[rows].T @ (probabilities / max(1, len(rows))).astype(np.float32)
    return gradient


def _loss(task: Task, weights: Array) -> float:
    probabilities = _probabilities(task, weights, slice(None))
    return float(-np.log(np.maximum(probabilities[np.arange(len(task.y)), task.y], 1e-12)).mean())
