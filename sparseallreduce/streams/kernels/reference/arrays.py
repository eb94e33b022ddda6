"""Building blocks of the NumPy kernels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels.contract import Indices, Positions, Values
from sparseallreduce.streams.operator import Operator

__all__ = ["combine", "places", "split_mix"]


def combine(op: Operator, a: Values, b: Values) -> Values:
    """Return ``op.ufunc(a, b)`` in the dtype of ``a``, without warnings of overflow or NaN, like the compiled kernels."""
    out = np.empty_like(a)
    with np.errstate(all="ignore"):
        op.ufunc(a, b, out=out)
    return out


def places(indices: Indices, lo: int, length: int) -> NDArray[np.intp]:
    """Return the positions of indices in an array of length ``length`` that starts at index ``lo``.

    Raises
    ------
    StreamError
        If an index is out of range; NumPy would interpret some as positions counted from the end.
    """
    at = indices.astype(np.uint64) - np.uint64(lo)  # an index below lo becomes one far beyond the end
    if len(at) and int(at.max()) >= length:
        raise StreamError(f"indices {indices.min()}..{indices.max()} leave the range {lo}..{lo + length} of the dense array")
    return at.astype(np.intp)


def split_mix(numbers: Positions) -> Positions:
    """Return a 64-bit hash (SplitMix64)."""
    hashed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashed ^ (hashed >> np.uint64(31))
