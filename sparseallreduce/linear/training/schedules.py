"""Learning-rate schedules: the rate eta_t of every step of SGD.

MPI-SGD has two strategies of adapting the rate (thesis section 4.2, point 3), which the thesis does not name; it refers to Robbins and
Monro for the conditions that they must satisfy (section 2.1), and builds on the code of Hogwild!, which multiplies the rate by a constant
after each epoch: :class:`StepDecay`. The schedules here are of both kinds, and well-tried later ones; each names its source.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "SCHEDULES",
    "BoldDriver",
    "Constant",
    "InverseScaling",
    "InverseTime",
    "LargeBatch",
    "Onward",
    "Plateau",
    "Reactive",
    "Schedule",
    "StepDecay",
]

#: A function that returns the learning rate of step t = 0, 1, ..., counted over all epochs.
Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """The same rate in every step.

    >>> Constant(0.5)(1000)
    0.5
    """

    rate: float

    def __call__(self, step: int) -> float:
        return self.rate


@dataclass(frozen=True)
class InverseScaling:
    """The rate ``rate / (1 + step / every)**power``, which scikit-learn calls "invscaling" for ``every=1``.

    For a power above 1/2 and up to 1 the rates sum to infinity and their squares do not, as Robbins and Monro require (thesis section
    2.1; *A stochastic approximation method*, 1951); with averaged weights a power below 1 is best (Polyak and Juditsky, 1992).

    >>> InverseScaling(0.5, power=0.5)(99)
    0.05
    """

    rate: float
    power: float = 0.25
    every: int = 1  # steps

    def __post_init__(self) -> None:
        _require(self.power >= 0, f"the power must be at least 0, not {self.power}")
        _require(self.every >= 1, f"the rate must decay over at least 1 step, not {self.every}")

    def __call__(self, step: int) -> float:
        return float(self.rate / (1.0 + step / self.every) ** self.power)


@dataclass(frozen=True)
class InverseTime:
    """The rate ``rate / (1 + step / halving)``: a half after ``halving`` steps, a third after twice as many, and so on.

    With an L2 term of factor lambda, ``halving = 1 / (rate * lambda)`` is the schedule of Bottou (*Stochastic gradient descent
    tricks*, 2012, section 5.2), which approaches 1 / (lambda t), that of Pegasos (Shalev-Shwartz et al., 2007).

    >>> InverseTime(0.5, halving=100)(300)
    0.125
    """

    rate: float
    halving: float = 1000.0  # steps

    def __post_init__(self) -> None:
        _require(self.halving > 0, f"the number of steps after which the rate has halved must be above 0, not {self.halving}")

    def __call__(self, step: int) -> float:
        return self.rate / (1.0 + step / self.halving)


@dataclass(frozen=True)
class StepDecay:
    """A rate that is multiplied by ``factor`` after every ``every`` steps.

    If that is an epoch, it is the schedule of Hogwild! (Niu et al., 2011, section 7), on whose code MPI-SGD builds.

    >>> [round(StepDecay(0.5, factor=0.9, every=10)(step), 4) for step in (9, 10, 25)]
    [0.5, 0.45, 0.405]
    """

    rate: float
    factor: float = 0.9
    every: int = 1000  # steps

    def __post_init__(self) -> None:
        _require(0 < self.factor <= 1, f"the factor must be above 0 and at most 1, not {self.factor}")
        _require(self.every >= 1, f"the rate must decay after at least 1 step, not {self.every}")

    def __call__(self, step: int) -> float:
        return self.rate * self.factor ** (step // self.every)


class Reactive(ABC):
    """Base class of schedules that depend on the training loss of each epoch, which is the same on all ranks."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the rate of a step."""

    @abstractmethod
    def react(self, loss: float) -> None:
        """Adapt to the loss of the training set, including penalty, after an epoch."""

    def limit(self, rate: float) -> None:  # noqa: B027  # not abstract: few schedules increase the rate
        """Keep the rate below this value if it increases. Schedules that never increase it can ignore this."""

    @abstractmethod
    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""

    @abstractmethod
    def restore(self, state: dict[str, float]) -> None:
        """Restore the state from a checkpoint."""


@dataclass
class BoldDriver(Reactive):
    """A rate that grows by 5 % after an epoch in which the loss decreased, and halves after one in which it increased.

    An increase to a :meth:`limit` or above is skipped.

    The heuristic of Battiti (*Accelerated backpropagation learning*, 1989) in the form of Gemulla et al. (*Large-scale matrix
    factorization with distributed stochastic gradient descent*, 2011, section 5.1).

    >>> schedule = BoldDriver(0.5)
    >>> for loss in (0.7, 0.6, 0.65):
    ...     schedule.react(loss)
    >>> round(schedule(0), 4)
    0.2625
    """

    rate: float
    growth: float = 1.05
    cut: float = 0.5
    last: float = math.inf  # loss of the last epoch
    most: float = field(default=math.inf, repr=False)  # limit of the rate when it grows

    def __post_init__(self) -> None:
        _require(self.growth >= 1, f"the growth must be at least 1, not {self.growth}")
        _require(0 < self.cut < 1, f"the cut must be between 0 and 1, not {self.cut}")

    def __call__(self, step: int) -> float:
        return self.rate

    def react(self, loss: float) -> None:
        if self.last < math.inf and not loss < self.last:
            self.rate *= self.cut
        elif self.last < math.inf and self.rate * self.growth < self.most:
            self.rate *= self.growth
        self.last = loss

    def limit(self, rate: float) -> None:
        self.most = rate

    def state(self) -> dict[str, float]:
        return {"rate": self.rate, "last": self.last}

    def restore(self, state: dict[str, float]) -> None:
        self.rate, self.last = state["rate"], state["last"]


@dataclass
class Plateau(Reactive):
    """A rate that is multiplied by ``factor`` if the loss has not decreased by ``tolerance`` for ``patience`` epochs in a row.

    It is the schedule "adaptive" of scikit-learn's ``SGDClassifier``, with its defaults.

    >>> schedule = Plateau(0.5, patience=2)
    >>> for loss in (0.7, 0.6, 0.6, 0.61):
    ...     schedule.react(loss)
    >>> schedule(0)
    0.1
    """

    rate: float
    factor: float = 0.2
    patience: int = 5  # epochs
    tolerance: float = 1e-3
    best: float = math.inf  # lowest loss
    waited: int = 0  # epochs

    def __post_init__(self) -> None:
        _require(0 < self.factor < 1, f"the factor must be between 0 and 1, not {self.factor}")
        _require(self.patience >= 1, f"the patience must be at least 1 epoch, not {self.patience}")

    def __call__(self, step: int) -> float:
        return self.rate

    def react(self, loss: float) -> None:
        self.waited = 0 if loss < self.best - self.tolerance else self.waited + 1
        self.best = min(self.best, loss)
        if self.waited >= self.patience:
            self.rate *= self.factor
            self.waited = 0

    def state(self) -> dict[str, float]:
        return {"rate": self.rate, "best": self.best, "waited": self.waited}

    def restore(self, state: dict[str, float]) -> None:
        self.rate, self.best, self.waited = state["rate"], state["best"], int(state["waited"])


@dataclass
class LargeBatch(Reactive):
    """Another schedule scaled with the batch: its rates times ``factor``, reached by a linear warm-up over the first ``steps``.

    If the batch gets k times as large, the rate gets k times as large too, and starts unscaled, because the first steps, in which
    the weights change fast, would diverge (Goyal et al., *Accurate, large minibatch SGD*, 2017, sections 2.1 and 2.2, to which
    the thesis refers in section 2.1).

    >>> schedule = LargeBatch(Constant(0.5), factor=4, steps=10)
    >>> [schedule(step) for step in (0, 5, 10, 1000)]
    [0.5, 1.25, 2.0, 2.0]
    """

    schedule: Schedule
    factor: float = 1.0
    steps: int = 0  # length of the warm-up

    def __post_init__(self) -> None:
        _require(self.factor > 0, f"the factor of the batch must be above 0, not {self.factor}")
        _require(self.steps >= 0, f"the warm-up must take at least 0 steps, not {self.steps}")

    def __call__(self, step: int) -> float:
        climbed = min(1.0, step / self.steps) if self.steps else 1.0
        return self.schedule(step) * (1.0 + (self.factor - 1.0) * climbed)

    def react(self, loss: float) -> None:
        if isinstance(self.schedule, Reactive):
            self.schedule.react(loss)

    def limit(self, rate: float) -> None:
        if isinstance(self.schedule, Reactive):
            self.schedule.limit(rate / max(1.0, self.factor))

    def state(self) -> dict[str, float]:
        return self.schedule.state() if isinstance(self.schedule, Reactive) else {}

    def restore(self, state: dict[str, float]) -> None:
        if isinstance(self.schedule, Reactive):
            self.schedule.restore(state)


@dataclass
class Onward(Reactive):
    """Another schedule shifted by a number of steps, for a run that continues earlier ones.

    >>> Onward(InverseTime(1.0, halving=1), 3)(0)
    0.25
    """

    schedule: Schedule
    steps: int  # number of steps of the earlier runs

    def __call__(self, step: int) -> float:
        return self.schedule(step + self.steps)

    def react(self, loss: float) -> None:
        if isinstance(self.schedule, Reactive):
            self.schedule.react(loss)

    def limit(self, rate: float) -> None:
        if isinstance(self.schedule, Reactive):
            self.schedule.limit(rate)

    def state(self) -> dict[str, float]:
        return self.schedule.state() if isinstance(self.schedule, Reactive) else {}

    def restore(self, state: dict[str, float]) -> None:
        if isinstance(self.schedule, Reactive):
            self.schedule.restore(state)


SCHEDULES: dict[str, Callable[..., Any]] = {
    "constant": Constant,
    "inverse-scaling": InverseScaling,
    "inverse-time": InverseTime,
    "step-decay": StepDecay,
    "bold-driver": BoldDriver,
    "plateau": Plateau,
}


def _require(held: bool, message: str) -> None:
    if not held:
        raise ValueError(message)
