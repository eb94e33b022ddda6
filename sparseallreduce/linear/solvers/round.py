"""What a round of any solver comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

__all__ = ["PHASES", "Round", "State"]

#: Weights that a solver keeps: those that all ranks have alike, and those of the rank's own features.
State = tuple[NDArray[Any], NDArray[Any]]

#: What the seconds of a round are spent on: its passes, the sum of changes, and the objectives.
PHASES = ("compute", "communicate", "evaluate")


@dataclass(frozen=True)
class Round:
    """What one round came to, the same on every rank but for the seconds."""

    round: int  # from 1
    dual: float  # objective, a lower bound of the optimum; it never falls but by rounding
    primal: float | None  # objective of the weights after the round; None where it was not computed, which takes a pass
    gap: float | None  # the lowest primal objective so far minus ``dual``: the returned weights are no farther from the optimum
    active: int  # samples that the next round visits, over all ranks
    sigma: float  # how often a rank's change counted in its own problem
    seconds: dict[str, float]  # of this rank, by PHASES
    bytes_sent: int  # by all ranks
    gathered: bool = False  # whether the first rank went over the active samples of all
