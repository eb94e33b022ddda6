"""What all figures are told, and the networks that they are simulated on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sparseallreduce as sar
from sparseallreduce.cli.pictures.panels import Picture

__all__ = ["ETHERNET", "GREINA", "PIZ_DAINT", "Figure", "Settings", "described"]

# The papers give no constants. These are what such networks are known for; additions take what they take on one core of today's machines.
PIZ_DAINT = sar.Network(1.5e-6, 10e9, 2e-9, 3e-10)  # Aries
GREINA = sar.Network(5e-6, 3.2e9, 2e-9, 3e-10)  # InfiniBand QDR
ETHERNET = sar.Network(4.4e-4, 1.2e8, 2e-9, 3e-10)  # 1 Gbit/s: gTop-k's figure 8 has 0.436 ms a message, 1.1e-8 s a byte


@dataclass
class Settings:
    """The communicator, the measuring function and the size by which a figure is made."""

    comm: Any  # whose ranks measure what they are enough for
    measure: Callable[..., dict[str, Any]]  # points of a grid, see cli.bench_sweep.swept
    small: bool = False  # a size that takes seconds
    seed: int = 0

    def sizes(self, small: Sequence[Any], full: Sequence[Any]) -> list[Any]:
        """Return what a figure is drawn over: the small choice, or the full one."""
        return list(small if self.small else full)


class Figure(NamedTuple):
    """A figure of a paper."""

    name: str
    summary: str
    make: Callable[[Settings], Picture]  # collective; the picture counts on rank 0


def described(network: sar.Network) -> str:
    """Return a network in words.

    >>> described(ETHERNET)
    '440 µs a message, 0.12 GB/s'
    """
    return f"{1e6 * network.latency:.3g} µs a message, {network.bandwidth / 1e9:.3g} GB/s"
