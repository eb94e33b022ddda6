"""The binary search of MSTopK for two thresholds around the k-th magnitude (CommLib section 3.1, algorithm 1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparseallreduce.streams.kernels import magnitude

__all__ = ["thresholds"]


def thresholds(beyond: float, mean: float, largest: float, searches: int, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the keys of the upper and lower thresholds of lines 4 to 24: the upper selects at most k values, the lower more, if found.

    Parameters
    ----------
    beyond : float
        Magnitude of rank k + 1, infinity for NaN and -infinity if there is none. A threshold selects more than k values if it is at most
        this.
    mean, largest : float
        Mean and largest magnitude.
    searches : int
        Steps of the search.
    dtype : dtype of float32 or float64
    """
    upper, lower = None, None
    left, right = 0.0, 1.0
    for _ in range(searches):
        ratio = left + (right - left) / 2
        threshold = mean + ratio * (largest - mean)
        if threshold <= beyond:
            left, lower = ratio, threshold
        else:
            right, upper = ratio, threshold
    nothing = magnitude.mask(np.dtype(f"i{dtype.itemsize}")) + 1
    return nothing if upper is None else magnitude.key_of(upper, dtype), 0 if lower is None else magnitude.key_of(lower, dtype)
