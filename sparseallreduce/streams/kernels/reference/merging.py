"""The union and the intersection of two index sets with values, in plain NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels.contract import Indices, Values
from sparseallreduce.streams.kernels.reference.arrays import combine
from sparseallreduce.streams.operator import Operator

__all__ = ["merge", "shared"]


def merge(ia: Indices, va: Values, ib: Indices, vb: Values, op: Operator, iout: Indices, vout: Values) -> int:
    """Write the union of two sorted index sets, combining the values of shared indices; return its length."""
    if len(va) != len(ia) or len(vb) != len(ib) or min(len(iout), len(vout)) < len(ia) + len(ib):
        raise StreamError("merge needs a value for each index and room for len(ia) + len(ib) outputs")
    in_a = np.searchsorted(ia, ib)
    shared = in_a < len(ia)
    shared[shared] = ia[in_a[shared]] == ib[shared]
    only_b = ~shared
    to_a = np.arange(len(ia)) + np.searchsorted(ib[only_b], ia)
    to_b = in_a[only_b] + np.arange(np.count_nonzero(only_b))
    iout[to_a], vout[to_a] = ia, va
    iout[to_b], vout[to_b] = ib[only_b], vb[only_b]
    vout[to_a[in_a[shared]]] = combine(op, va[in_a[shared]], vb[shared])
    return len(to_a) + len(to_b)


def shared(ia: Indices, ib: Indices) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the positions of the indices that both sets contain."""
    _, in_a, in_b = np.intersect1d(ia, ib, assume_unique=True, return_indices=True)
    return in_a.astype(np.uint64), in_b.astype(np.uint64)
