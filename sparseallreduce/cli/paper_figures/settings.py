"""Settings that all figures share, and the networks on which they are simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sparseallreduce as sar
from sparseallreduce.cli.pictures.panels import Picture
from sparseallreduce.runtime.objects import agreed

__all__ = ["ETHERNET", "GREINA", "PIZ_DAINT", "Figure", "Settings", "described", "on_first"]

# The papers give no constants. These are typical of such networks; additions take as long as on one core of a current machine.
PIZ_DAINT = sar.Network(1.5e-6, 10e9, 2e-9, 3e-10)  # Aries
GREINA = sar.Network(5e-6, 3.2e9, 2e-9, 3e-10)  # InfiniBand QDR
ETHERNET = sar.Network(4.4e-4, 1.2e8, 2e-9, 3e-10)  # 1 Gbit/s: gTop-k's figure 8 has 0.436 ms per message, 1.1e-8 s per byte


@dataclass
class Settings:
    """The communicator, the measuring function and the size of a figure."""

    comm: Any  # its ranks measure the points that do not need more ranks
    measure: Callable[..., dict[str, Any]]  # points of a grid, see cli.bench_sweep.swept
    small: bool = False  # whether to use a size that takes seconds
    seed: int = 0

    def sizes(self, small: Sequence[Any], full: Sequence[Any]) -> list[Any]:
        """Return the values for the chosen size: ``small`` or ``full``."""
        return list(small if self.small else full)


class Figure(NamedTuple):
    """A figure of a paper."""

    name: str
    summary: str
    make: Callable[[Settings], Picture]  # collective; rank 0's result is used


def on_first(settings: Settings, make: Callable[[], Picture]) -> Picture:
    """Let rank 0 make a picture; collective. Return an empty one on the other ranks."""
    return agreed(settings.comm, lambda: make() if settings.comm.rank == 0 else Picture("", []), long_wait=True)


def described(network: sar.Network) -> str:
    """Return a description of a network.

    >>> described(ETHERNET)
    '440 µs per message, 0.12 GB/s'
    """
    return f"{1e6 * network.latency:.3g} µs per message, {network.bandwidth / 1e9:.3g} GB/s"
