"""The binary search of MSTopK for two thresholds around the k-th magnitude (CommLib section 3.1, algorithm 1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparseallreduce.streams.kernels import magnitude

__all__ = ["thresholds"]


def thresholds(beyond: float, mean: float, largest: float, searches: int, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Lines 4 to 24, in keys: the upper threshold chooses at most k values, the lower one more, if they were found.

    Parameters
    ----------
    beyond : float
        The magnitude of rank k + 1, infinity for NaN and -infinity if there is none: it tells of any threshold whether it chooses more
        than k values.
    mean, largest : float
        Of the magnitudes.
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
