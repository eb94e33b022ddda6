"""Locate bounds of index ranges in a sorted index set on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparseallreduce.errors import StreamError

__all__ = ["cuts"]


def cuts(indices: Any, bounds: Sequence[int], lo: int, hi: int, xp: Any) -> list[int]:
    """Return the positions at which bounds cut sorted indices, like the CPU's ``cuts``, in one transfer to the host.

    Parameters
    ----------
    indices : device array of uint32 or uint64, shape (n,)
        Strictly increasing, in ``[lo, hi)``.
    bounds : sequence of int
        In any order. Bounds outside of ``[lo, hi]`` cut at an end. The last may exceed the dtype by one.
    xp : module
        NumPy or CuPy.

    Returns
    -------
    list of int
        A position for each bound: ``indices[cuts[i]:cuts[i + 1]]`` are the indices from bound i up to, but not including, bound i + 1.

    Raises
    ------
    StreamError
        If the indices are not a vector of these dtypes.
    """
    if indices.ndim != 1 or indices.dtype not in (np.uint32, np.uint64):
        raise StreamError(f"indices are a vector of uint32 or uint64, not {indices.dtype} of shape {indices.shape}")
    inner = [bound for bound in bounds if lo < bound < hi]
    found = iter(xp.searchsorted(indices, xp.asarray(np.array(inner, indices.dtype))).tolist() if inner else [])
    return [0 if bound <= lo else len(indices) if bound >= hi else next(found) for bound in bounds]
