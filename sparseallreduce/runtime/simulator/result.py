"""The result of a simulated operation: outputs, times and traffic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Simulation"]


@dataclass
class Simulation:
    """The outputs of a simulated operation, its time, and its traffic. Arrays have one element for each rank."""

    outputs: list[Any]  # the result of each rank; bitwise identical streams are one object
    time: float  # seconds until the last rank had finished
    times: NDArray[np.float64]  # seconds until each rank had finished
    bytes_sent: NDArray[np.int64]  # including headers
    bytes_received: NDArray[np.int64]
    messages: NDArray[np.int64]  # sent
    header_bytes: NDArray[np.int64]  # part of bytes_sent
