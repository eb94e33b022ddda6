"""Schedules of the density: more values in the first epochs, when the parameters change fast (gTop-k section IV-B)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparseallreduce.errors import AlgorithmError

__all__ = ["Density", "DensityWarmup"]

#: A fraction of the elements, or a function of the step number (from 0).
Density = float | Callable[[int], float]


@dataclass(frozen=True)
class DensityWarmup:
    """A density schedule with one density for each of the first epochs, and a final density after them.

    The defaults are those of gTop-k section IV-B, where learning rates are also small in these epochs.

    Parameters
    ----------
    density : float
        Density after the warm-up.
    epoch_steps : int
        Number of steps of each of ``densities``.
    densities : tuple of float

    Raises
    ------
    AlgorithmError
        If a density is not above 0 and at most 1, or an epoch has no steps.

    Examples
    --------
    >>> density = DensityWarmup(0.001, epoch_steps=100)
    >>> [density(step) for step in (0, 99, 100, 200, 399, 400, 10_000)]
    [0.25, 0.25, 0.0725, 0.015, 0.004, 0.001, 0.001]
    """

    density: float
    epoch_steps: int
    densities: tuple[float, ...] = (0.25, 0.0725, 0.015, 0.004)

    def __post_init__(self) -> None:
        if self.epoch_steps < 1:
            raise AlgorithmError(f"a density of the warm-up lasts for at least 1 step, not {self.epoch_steps}")
        for density in (self.density, *self.densities):
            if not 0 < density <= 1:
                raise AlgorithmError(f"a density is a share of the elements, above 0 and at most 1, not {density}")

    def __call__(self, step: int) -> float:
        epoch = step // self.epoch_steps
        return self.densities[epoch] if epoch < len(self.densities) else self.density
