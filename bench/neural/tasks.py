"""A network as a task of `bench/lossy_tasks.py`, which trains P replicas in one process, on the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lossy_tasks import Measure
from numpy.typing import NDArray

from .data import Samples, data_of
from .models import make
from .training import RATES, loss_of

__all__ = ["Network"]

Array = NDArray[Any]


class Network:
    """A model, and what it learns; parameters are arrays."""

    def __init__(self, model: str, batch: int, steps: int, width: int = 32) -> None:
        torch.set_num_threads(1)
        self.name, self.batch, self.epochs = model, batch, 1
        self.learning_rate, momentum = RATES[model]
        self.settings: dict[str, Any] = {"momentum": momentum}  # of the optimisers
        data = data_of(model)
        passes = -(-steps * batch // len(data.train.y))
        self.rows = np.tile(np.arange(len(data.train.y)), passes)[: steps * batch]  # an epoch of the task is all steps
        self.y = self.rows
        self.train, self.test = data.train, data.test
        self.model = make(model, data.classes, 0, width)

    @property
    def epoch_steps(self) -> int:
        return len(self.rows) // self.batch

    def parameters(self) -> list[Array]:
        """A copy of those of a new model."""
        return [parameter.detach().numpy().copy() for parameter in self.model.parameters()]

    def gradients(self, parameters: list[Array], rows: Array) -> list[Array]:
        """Of the mean loss of some training samples."""
        self._take(parameters)
        self.model.zero_grad()
        chosen = self.rows[rows]
        loss_of(self.model, Samples(self.train.x[chosen], self.train.y[chosen])).backward()
        return [parameter.grad.numpy().copy() for parameter in self.model.parameters()]

    def evaluate(self, parameters: list[Array]) -> Measure:
        self._take(parameters)
        with torch.no_grad():  # in the mode of training, so that normalisation takes the statistics of these samples
            scores = torch.cat([self.model(x) for x in self.test.x.split(128)]).flatten(0, -2)
        labels = self.test.y.reshape(-1)
        loss = float(torch.nn.functional.cross_entropy(scores, labels))
        return Measure(loss, float((scores.argmax(1) == labels).float().mean()))

    def _take(self, parameters: list[Array]) -> None:
        with torch.no_grad():
            for own, given in zip(self.model.parameters(), parameters):
                own.copy_(torch.from_numpy(np.asarray(given)))
