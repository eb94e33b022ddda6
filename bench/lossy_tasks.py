"""The tasks on which lossy optimisers are measured, and training of P replicas in one process.

Two tasks with real data: the perceptron of `examples/perceptron.py` on scikit-learn's digits, whose gradients are dense, and logistic
regression on a data set in svmlight form, whose gradients are as sparse as the samples of a batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce import optim
from sparseallreduce.linear import load
from sparseallreduce.optim import Optimizer, simulated_step

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from perceptron import OPTIMISERS, Perceptron, batches, digits  # noqa: E402 - the model is that of the example

__all__ = ["OPTIMISERS", "Digits", "Logistic", "Measure", "Step", "replicas", "training"]

Array = NDArray[Any]


class Measure(NamedTuple):
    """How good a model is."""

    loss: float  # mean, of the training samples
    accuracy: float  # of the test samples


class Digits:
    """Two hidden layers, N = 50,826 parameters, 15 steps of 100 samples an epoch."""

    name = "perceptron"

    def __init__(
        self,
        epochs: int = 40,
        batch: int = 100,
        widths: Sequence[int] = (64, 256, 128, 10),
        learning_rate: float = 0.05,
        momentum: float = 0.9,
    ) -> None:
        self.epochs = epochs
        self.batch = batch
        self.widths = widths
        self.learning_rate = learning_rate
        self.settings: dict[str, Any] = {"momentum": momentum}  # of the optimisers
        (self.x, self.y), self.test = digits()
        self.model = Perceptron(widths)

    @property
    def epoch_steps(self) -> int:
        return len(self.y) // self.batch

    def parameters(self) -> list[Array]:
        return Perceptron(self.widths).parameters

    def gradients(self, parameters: list[Array], rows: Array) -> list[Array]:
        """Of the mean loss of some training samples."""
        self.model.parameters = parameters
        gradients: list[Array] = self.model.loss_and_gradients(self.x[rows], self.y[rows])[1]
        return gradients

    def evaluate(self, parameters: list[Array]) -> Measure:
        self.model.parameters = parameters
        return Measure(self.model.loss_and_gradients(self.x, self.y)[0], self.model.accuracy(*self.test))


class Logistic:
    """Logistic regression without a penalty on `NAME.svm.bz2` and `NAME.t.svm.bz2` of a folder."""

    name = "logistic"

    def __init__(
        self,
        folder: Path,
        features: int,
        data: str = "phishing_url",
        epochs: int = 1,
        batch: int = 500,
        learning_rate: float = 1.0,
        momentum: float = 0.0,
    ) -> None:
        self.epochs = epochs
        self.batch = batch
        self.learning_rate = learning_rate
        self.settings: dict[str, Any] = {"momentum": momentum}  # of the optimisers
        train, test = load(folder / f"{data}.svm.bz2", folder / f"{data}.t.svm.bz2", comm=sar.SERIAL, n_features=features)
        self.x, self.y = train.to_scipy(), np.where(train.labels > 0, 1.0, -1.0)
        self.test = test.to_scipy(), np.where(test.labels > 0, 1.0, -1.0)

    @property
    def epoch_steps(self) -> int:
        return len(self.y) // self.batch

    def parameters(self) -> list[Array]:
        return [np.zeros(self.x.shape[1], np.float32)]

    def gradients(self, parameters: list[Array], rows: Array) -> list[Array]:
        """Of the mean loss of some training samples."""
        x, y = self.x[rows], self.y[rows]
        slopes = -y / (1 + np.exp(y * (x @ parameters[0])))
        return [x.T @ (slopes / len(rows)).astype(np.float32)]

    def evaluate(self, parameters: list[Array]) -> Measure:
        loss = np.logaddexp(0, -self.y * (self.x @ parameters[0])).mean()
        x, y = self.test
        return Measure(float(loss), float(((x @ parameters[0] > 0) == (y > 0)).mean()))


Task = Digits | Logistic


@dataclass(eq=False)
class Step:
    """One step of a training, just before it is taken, and what came of it."""

    number: int  # from 0
    optimizers: list[Optimizer]
    gradients: list[list[Array]]  # of each rank
    rate: float
    out: list[sar.Simulation] = field(default_factory=list)  # of each pack, once it is taken

    def accumulators(self) -> list[Array]:
        """What each rank selects from: its residual and what it adds to that. Parameters are packed into one vector."""
        ranks = len(self.optimizers)
        fed = (optimizer.prepare(own, self.rate, ranks)[0].vector for optimizer, own in zip(self.optimizers, self.gradients))
        return [optimizer.residuals[0] + vector for optimizer, vector in zip(self.optimizers, fed)]

    def mean_gradient(self) -> Array:
        """Of all ranks, as one vector."""
        return np.mean([np.concatenate([np.ravel(array) for array in own]) for own in self.gradients], axis=0, dtype=np.float64)


def replicas(task: Task, kind: type[Optimizer], ranks: int, density: Any, settings: dict[str, Any]) -> list[Optimizer]:
    """An optimiser for each of P ranks, on parameters of its own; ``settings`` and options."""
    own = [{"seed": rank} if kind is optim.ApproximateTopKSGD else {} for rank in range(ranks)]
    return [kind(task.parameters(), task.learning_rate, density, sar.SERIAL, **settings, **own[rank]) for rank in range(ranks)]


def training(
    task: Task,
    optimizers: list[Optimizer],
    before: Callable[[Step], None] = lambda step: None,
    after: Callable[[Step], None] = lambda step: None,
) -> Iterator[Measure]:
    """The measures after every epoch; ``before`` and ``after`` see every step."""
    ranks, number = len(optimizers), 0
    for epoch in range(task.epochs):
        for shares in zip(*(batches(len(task.y), task.batch, epoch, rank, ranks) for rank in range(ranks))):
            parameters = optimizers[0].parameters  # of which all ranks have the same bits
            gradients = [task.gradients(parameters, rows) for rows in shares]
            step = Step(number, optimizers, gradients, task.learning_rate)
            before(step)
            step.out = simulated_step(optimizers, gradients)
            after(step)
            number += 1
        yield task.evaluate(optimizers[0].parameters)
