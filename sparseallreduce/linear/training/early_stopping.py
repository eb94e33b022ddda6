"""Early stopping: ending the training when more epochs do not improve the model."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["WATCHED", "EarlyStopping"]

#: Metrics that can be watched, and whether higher is better.
WATCHED = {
    "loss": False,
    "train_accuracy": True,
    "train_auc": True,
    "test_loss": False,
    "test_accuracy": True,
    "test_auc": True,
    "validation_loss": False,
    "validation_accuracy": True,
    "validation_auc": True,
    "progressive_loss": False,
    "progressive_accuracy": True,
}


@dataclass
class EarlyStopping:
    """Ends a training once a metric has not improved by more than ``tolerance`` for ``patience`` epochs in a row.

    Examples
    --------
    >>> stopping = EarlyStopping("loss", patience=2, tolerance=0.01)
    >>> [stopping.after_epoch(loss) for loss in (0.7, 0.6, 0.595, 0.595)]
    [False, False, False, True]
    """

    watch: str  # a key of WATCHED
    patience: int  # epochs
    tolerance: float = 0.0
    best: float = math.inf  # lowest cost so far
    waited: int = 0  # epochs

    def __post_init__(self) -> None:
        if self.watch not in WATCHED:
            raise ValueError(f"early stopping watches one of {', '.join(WATCHED)}, not {self.watch!r}")
        if self.patience < 1 or not self.tolerance >= 0:
            raise ValueError(f"patience must be at least 1 and tolerance at least 0, not {self.patience} and {self.tolerance}")

    def after_epoch(self, figure: float | None) -> bool:
        """Return True if training has to stop after an epoch with this metric; None never counts as an improvement."""
        cost = math.inf if figure is None else -figure if WATCHED[self.watch] else figure
        if cost < self.best - self.tolerance or (self.best == math.inf and cost < math.inf):
            self.best, self.waited = cost, 0
        else:
            self.waited += 1
        return self.reached

    @property
    def reached(self) -> bool:
        """True if training has to stop after the epochs so far."""
        return self.waited >= self.patience

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"best": self.best, "waited": self.waited}

    def restore(self, state: dict[str, float]) -> None:
        """Restore the state from a checkpoint."""
        self.best, self.waited = state["best"], int(state["waited"])
