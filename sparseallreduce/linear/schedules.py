"""Learning-rate schedules: the rate eta_t of every step of SGD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["SCHEDULES", "Constant", "InverseScaling", "Schedule"]

#: The learning rate of step t = 0, 1, ..., counted over all epochs.
Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """The same rate at every step.

    >>> Constant(0.5)(1000)
    0.5
    """

    rate: float

    def __call__(self, step: int) -> float:
        return self.rate


@dataclass(frozen=True)
class InverseScaling:
    """``rate / (1 + step / halving)``: half the rate after ``halving`` steps, a third after twice as many, and so on.

    The rates add up to infinity and their squares do not, as Robbins and Monro ask (thesis section 2.1).

    >>> InverseScaling(0.5, halving=100)(300)
    0.125
    """

    rate: float
    halving: float = 1000.0  # steps

    def __call__(self, step: int) -> float:
        return self.rate / (1.0 + step / self.halving)


SCHEDULES: dict[str, Callable[[float], Schedule]] = {"constant": Constant, "inverse-scaling": InverseScaling}
