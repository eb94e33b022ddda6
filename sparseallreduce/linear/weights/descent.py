"""How a step of gradient descent changes the weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["UPDATES", "Descent"]

#: How a step may change the weights: all by one learning rate, or each by one of its own, by FTRL-Proximal or AROW.
UPDATES = ("sgd", "ftrl", "arow")


@dataclass(frozen=True)
class Descent:
    """How a step changes the weights, beside the gradient and the learning rate."""

    l2: float = 0.0  # factor of the penalty l2 / 2 * |w|^2, in units of the mean loss of a sample
    intercept: bool = False  # whether a number is added to every score; it is not regularised
    l1: float = 0.0  # factor of the penalty l1 * |w|_1, likewise
    momentum: float = 0.0  # the share of the velocity that is left after a step
    nesterov: bool = False  # whether the momentum is Nesterov's, which looks a step ahead
    average_from: int | None = None  # what is learned is the mean of the weights after all steps but the first so many
    columns: int | None = None  # weights of a feature, one a score of a sample: K classes at once; None for one score
    update: str = "sgd"  # one of UPDATES; all but "sgd" have neither momentum nor averages
    beta: float = 0.0  # of "ftrl", in units of a gradient: weights whose gradients come to less go by a common rate
    intercept_value: float = 1.0  # but for "sgd": the value of the feature whose weight, times that, is the intercept

    def __post_init__(self) -> None:
        if self.update not in UPDATES:
            raise ValueError(f"update must be one of {', '.join(UPDATES)}, not {self.update!r}")
        for name in ("l2", "l1", "beta"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        if not 0 < self.intercept_value < np.inf:
            raise ValueError(f"intercept_value must be above 0, not {self.intercept_value}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, not {self.momentum}")
        if self.nesterov and not self.momentum:
            raise ValueError("Nesterov's momentum needs a momentum above 0")
        if self.average_from is not None and self.average_from < 0:
            raise ValueError(f"average_from must be at least 0, not {self.average_from}")
        if self.columns is not None and self.columns < 1:
            raise ValueError(f"columns must be at least 1, not {self.columns}")
        if self.update != "sgd" and (self.momentum or self.averages):
            raise ValueError(f"momentum and averages are of the update sgd, not of {self.update}: leave them out, or take that")

        if self.beta and self.update != "ftrl":
            raise ValueError(f"beta is of the update ftrl, not of {self.update}: leave it out, or take that")
        if self.second_order and self.columns is not None:
            raise ValueError("the update arow has one score a sample, for two classes: take ftrl or sgd for more")

    @property
    def penalty_factor(self) -> float:
        """What a step draws weights to zero by, as a multiple of the penalty's slope.

        A gradient that stays the same moves the weights by so many times itself a step, as its velocity lasts. With this the weights
        settle where loss and penalty together are least, whatever the momentum.
        """
        return 1.0 / (1.0 - self.momentum)

    @property
    def width(self) -> int:
        """Weights of a feature."""
        return self.columns or 1

    @property
    def averages(self) -> bool:
        """Whether what is learned is an average."""
        return self.average_from is not None

    @property
    def adaptive(self) -> bool:
        """Whether every weight has a learning rate of its own."""
        return self.update != "sgd"

    @property
    def second_order(self) -> bool:
        """Whether every weight has a variance, by which it moves: of AROW."""
        return self.update == "arow"
