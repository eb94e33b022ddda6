"""Sums of second derivatives over a rank's samples: row by row, or in blocks of dense rows if few values are zero."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.kernels import newton as kernels
from sparseallreduce.runtime.objects import gather_results

__all__ = ["DENSE", "add_curvature", "density"]

Array = NDArray[Any]

#: Fraction of non-zero values from which products of dense blocks are faster than sums over non-zeros.
DENSE = 0.1
_BLOCK = 1 << 18  # elements of a dense block of rows, 2 MB
_FEW = 32  # number of weights below which blocks do not pay off


def density(dataset: Dataset, comm: Any) -> float:
    """Return the fraction of non-zero values in the samples of all ranks. Collective over ``comm``."""
    ranks = gather_results(comm, lambda: (int(dataset.indptr[-1] - dataset.indptr[0]), dataset.rows))
    nonzeros, rows = (sum(column) for column in zip(*ranks, strict=True))
    return float(nonzeros / max(1, rows * dataset.features))


def add_curvature(rows: tuple[Array, ...], curvatures: Array, place: int, out: Array) -> None:
    """Add the outer product of each row with itself, times its curvature, to at least the lower triangle of ``out``.

    Parameters
    ----------
    rows : tuple of ndarray
        The samples' arrays in the order of the kernels' arguments.
    curvatures : ndarray
    place : int
        Position of the intercept, or -1.
    out : ndarray, shape (size, size)
    """
    indptr, size = rows[0], len(out)
    if size < _FEW or int(indptr[-1] - indptr[0]) < DENSE * len(curvatures) * size or (curvatures < 0).any():
        kernels.add_curvature(*rows, curvatures, place, out)
        return
    counted = np.flatnonzero(curvatures)
    factors, step = np.sqrt(curvatures[counted]), max(1, _BLOCK // size)
    for low in range(0, len(counted), step):
        chosen = counted[low : low + step]
        block = np.zeros((len(chosen), size))
        kernels.fill_rows(*rows, chosen, factors[low : low + step], place, block)
        out += block.T @ block
