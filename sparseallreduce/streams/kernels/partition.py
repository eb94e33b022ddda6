"""Locate bounds in an index set, and indices in an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparseallreduce.streams.kernels import reference
from sparseallreduce.streams.kernels.backend import device_kernels
from sparseallreduce.streams.kernels.contract import Indices

__all__ = ["cuts", "places"]


def cuts(indices: Indices, bounds: Sequence[int], lo: int, hi: int) -> list[int]:
    """Return the positions at which bounds cut sorted indices.

    Parameters
    ----------
    indices : ndarray of uint32 or uint64, shape (n,)
        Strictly increasing, in ``[lo, hi)``.
    bounds : sequence of int
        Increasing. Bounds outside of ``[lo, hi]`` cut at an end. The last may exceed the dtype by one.

    Returns
    -------
    list of int
        A position for each bound: ``indices[cuts[i]:cuts[i + 1]]`` are the indices from bound i up to, but not including, bound i + 1.

    Examples
    --------
    >>> cuts(np.uint32([1, 4, 6]), [0, 4, 8], 0, 8)
    [0, 1, 3]
    """
    if type(indices) is not np.ndarray:
        device = device_kernels(indices)
        if device is not None:
            return device.cuts(indices, bounds, lo, hi)  # type: ignore[no-any-return]
    inner = np.asarray([bound for bound in bounds if lo < bound < hi], dtype=indices.dtype)
    found = iter(np.searchsorted(indices, inner).tolist())
    return [0 if bound <= lo else len(indices) if bound >= hi else next(found) for bound in bounds]


def places(indices: Indices, lo: int, length: int) -> Any:
    """Return the positions of indices in an array of length ``length`` that starts at index ``lo``.

    Raises
    ------
    StreamError
        If an index is out of range.
    """
    if type(indices) is not np.ndarray:
        device = device_kernels(indices)
        if device is not None:
            return device.places(indices, lo, length)
    return reference.places(indices, lo, length)
