"""The rule by which a step of gradient descent updates the weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["UPDATES", "Descent"]

#: Update rules: one learning rate for all weights, or one per weight by FTRL-Proximal or AROW.
UPDATES = ("sgd", "ftrl", "arow")


@dataclass(frozen=True)
class Descent:
    """The rule by which a step updates the weights, given the gradient and the learning rate."""

    l2: float = 0.0  # factor of the penalty l2 / 2 * |w|^2, relative to the mean loss
    intercept: bool = False  # whether the model has an intercept, which is not penalised
    l1: float = 0.0  # factor of the penalty l1 * |w|_1, relative to the mean loss
    momentum: float = 0.0  # fraction of the velocity that remains after a step
    nesterov: bool = False  # whether to use Nesterov's momentum
    average_from: int | None = None  # the result is the mean of the weights after all steps but this many first ones; None: no mean
    columns: int | None = None  # number of weights per feature, one for each score of a sample; None for one score
    update: str = "sgd"  # one of UPDATES; only "sgd" supports momentum and averages
    beta: float = 0.0  # for "ftrl", in units of a gradient: weights with a smaller gradient norm change at a common rate
    intercept_value: float = 1.0  # not for "sgd": value of the constant feature; its weight times this is the intercept

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
            raise ValueError(f"momentum and averages are for the update sgd, not for {self.update}: leave them out, or use sgd")

        if self.beta and self.update != "ftrl":
            raise ValueError(f"beta is for the update ftrl, not for {self.update}: leave it out, or use ftrl")
        if self.second_order and self.columns is not None:
            raise ValueError("the update arow has one score per sample, for two classes: use ftrl or sgd for more")

    @property
    def penalty_factor(self) -> float:
        """The factor of the penalty's slope in a step.

        With momentum, a constant gradient changes the weights by this many times itself per step. With the same factor for the penalty, the
        weights converge to the minimum of loss and penalty together, whatever the momentum.
        """
        return 1.0 / (1.0 - self.momentum)

    @property
    def width(self) -> int:
        """The number of weights per feature."""
        return self.columns or 1

    @property
    def averages(self) -> bool:
        """True if the result is an average of weights."""
        return self.average_from is not None

    @property
    def adaptive(self) -> bool:
        """True if every weight has its own learning rate."""
        return self.update != "sgd"

    @property
    def second_order(self) -> bool:
        """True if every weight has a variance, as in AROW."""
        return self.update == "arow"
