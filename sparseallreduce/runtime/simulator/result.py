"""What a simulated operation did: its results, its time, and what was sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Simulation"]


@dataclass
class Simulation:
    """What a simulated operation did; arrays have one element a rank."""

    outputs: list[Any]  # what each rank's schedule returned; streams of the same bits are one object
    time: float  # seconds until the last rank had finished
    times: NDArray[np.float64]  # seconds until each rank had finished
    bytes_sent: NDArray[np.int64]  # headers included
    bytes_received: NDArray[np.int64]
    messages: NDArray[np.int64]  # sent
    header_bytes: NDArray[np.int64]  # of the bytes sent
