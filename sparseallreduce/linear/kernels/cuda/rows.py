"""Scores and weighted sums of rows on a GPU.

Both are bitwise reproducible for the same rows: each sum has a fixed order, whatever the number of blocks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numpy.typing import DTypeLike

from sparseallreduce.linear.kernels.cuda.weights import plain_weight
from sparseallreduce.streams.kernels.cuda.arrays import smaller
from sparseallreduce.streams.kernels.cuda.launching import BLOCK, device, exclusive, kernel, launch

__all__ = ["LANES", "SEGMENT", "Taken", "scores", "total"]

LANES = 32  # threads per row
SEGMENT = 256  # largest number of entries of one feature that one thread adds; another kernel adds the sums of several threads
_THREADS = 128  # threads per block of the scoring kernel, a multiple of LANES


class Taken(NamedTuple):
    """Rows of a batch on a GPU, in the order of the batch."""

    indptr: Any  # int64
    indices: Any  # uint32 or uint64
    values: Any  # float32 or float64
    rows: Any  # int64: numbers of the batch's rows


@functools.cache
def _scoring(weight_at: Any) -> Any:
    """Return the kernel that scores rows, given a device function that reads a weight."""

    @kernel
    def score(
        indptr: Any, indices: Any, values: Any, rows: Any, weights: Any, norms: Any, read: Any, columns: Any, lanes: Any, scale: Any,
        intercepts: Any, out: Any,
    ) -> None:  # fmt: skip
        sums = cuda.shared.array(_THREADS, np.float64)
        i, thread = cuda.grid(1), cuda.threadIdx.x
        score = i // lanes
        lane, column = i - score * lanes, score % columns
        found = 0.0
        if score < out.shape[0]:
            row = rows[score // columns]
            for entry in range(indptr[row] + lane, indptr[row + 1], lanes):
                place = np.int64(indices[entry]) * columns + column
                if place < weights.shape[0]:  # features without a weight are ignored
                    found += np.float64(values[entry]) * np.float64(weight_at(weights, norms, place, read))
        sums[thread] = found
        cuda.syncthreads()
        if lane == 0 and score < out.shape[0]:
            for other in range(1, lanes):
                found += sums[thread + other]
            out[score] = found * scale + intercepts[column]

    return score


def scores(
    taken: Taken, weights: Any, intercepts: Any, scale: float, xp: Any, *, norms: Any = None, read: Any = None, weight_at: Any = None
) -> Any:
    """Return the inner product of each row with the weights, times a scale, plus the intercept.

    Parameters
    ----------
    taken : Taken
    weights : device array, shape (features * K,)
        The K weights of a feature are adjacent.
    intercepts : device array of float64, shape (K,)
    scale : float
    xp : module
        NumPy or CuPy.
    norms, read, weight_at
        For weights that are stored in another form: the stored arrays, and the device function that computes a weight from them; see
        :mod:`~sparseallreduce.linear.kernels.cuda.weights`.

    Returns
    -------
    device array of float64, shape (len(rows) * K,)
        Nothing is copied to the host.
    """
    columns = len(intercepts)
    out = xp.empty(len(taken.rows) * columns, np.float64)
    norms, read = weights if norms is None else norms, xp.zeros(3, np.float64) if read is None else read
    given = *taken, weights, norms, read, columns, LANES, scale, intercepts, out
    launch(_scoring(weight_at or plain_weight), len(out) * LANES, _THREADS, xp, *given)
    return out


def total(taken: Taken, coefficients: Any, index_dtype: DTypeLike, intercept: int | None, xp: Any) -> tuple[Any, Any, int]:
    """Return the sum over rows of coefficients times values, for each feature of a row with a coefficient other than 0.

    The entries of the rows are sorted by feature, which copies the batch to compressed columns; each feature is summed in the order of the
    rows in double precision. No two threads write to the same place.

    Parameters
    ----------
    taken : Taken
    coefficients : device array, shape (len(rows), K)
        In the dtype of the values.
    index_dtype : {uint32, uint64}
    intercept : int, optional
        Index of an additional last entry, the sum of the coefficients; no such entry by default.
    xp : module
        NumPy or CuPy.

    Returns
    -------
    indices : device array, shape (n,)
        In ascending order.
    values : device array, shape (n, K)
    entries : int
        Number of entries of the rows with a coefficient other than 0. It is copied to the host, and so is n.
    """
    columns, dtype = coefficients.shape[1], taken.values.dtype
    counting = xp.any(coefficients != 0, axis=1)
    lengths = (taken.indptr[taken.rows + 1] - taken.indptr[taken.rows]) * counting
    starts, count = exclusive(lengths, xp)
    entries = int(count[0])
    features, places, own = xp.empty(entries, taken.indices.dtype), xp.empty(entries, np.int64), xp.empty(entries, np.int64)
    launch(_expand, entries, BLOCK, xp, taken.indptr, taken.indices, taken.rows, starts, features, places, own)
    order = xp.argsort(features, kind="stable")
    features = features[order]
    first = xp.ones(entries, np.bool_)
    first[1:] = features[1:] != features[:-1]
    begins = xp.flatnonzero(first)
    found, more = len(begins), intercept is not None and len(taken.rows) > 0
    indices, values = xp.empty(found + more, index_dtype), xp.empty((found + more, columns), dtype)
    indices[:found] = features[begins]
    if found:
        ends = xp.concatenate([begins[1:], xp.full(1, entries, begins.dtype)])
        segments = (ends - begins + (SEGMENT - 1)) // SEGMENT
        before, _ = exclusive(segments, xp)
        most = entries // SEGMENT + found  # upper bound on the segments: saves copying their number to the host
        sums = xp.empty(most * columns, np.float64)
        batch = taken.values, places[order], own[order], coefficients.reshape(-1)
        launch(_add_segments, len(sums), BLOCK, xp, *batch, begins, ends, before, segments, columns, SEGMENT, sums)
        launch(_join_segments, found * columns, BLOCK, xp, sums, before, segments, columns, values.reshape(-1)[: found * columns])
    if more:
        indices[found:] = intercept
        values[found:] = xp.sum(coefficients, axis=0, dtype=np.float64)
    return indices, values, entries


@device
def _last_at_most(array: Any, value: Any) -> Any:
    """Return the last position of an ascending array, whose first element is 0, that holds at most ``value``."""
    lo, hi = 0, array.shape[0]
    while lo < hi:
        middle = (lo + hi) // 2
        if array[middle] <= value:
            lo = middle + 1
        else:
            hi = middle
    return lo - 1


@kernel
def _expand(indptr: Any, indices: Any, rows: Any, starts: Any, features: Any, places: Any, own: Any) -> None:
    """Write the feature of each entry, its position among all values, and its row in the batch."""
    i = cuda.grid(1)
    if i < features.shape[0]:
        row = _last_at_most(starts, i)  # rows that are left out have no entries and the same start as the next row
        place = indptr[rows[row]] + i - starts[row]
        features[i], places[i], own[i] = indices[place], place, row


@kernel
def _add_segments(
    values: Any, places: Any, own: Any, coefficients: Any, begins: Any, ends: Any, before: Any, segments: Any, columns: Any, length: Any,
    sums: Any,
) -> None:  # fmt: skip
    """Sum one segment of a feature in one column per thread."""
    i = cuda.grid(1)
    if i < sums.shape[0]:
        segment, column = i // columns, i % columns
        feature = _last_at_most(before, segment)
        number = segment - before[feature]
        if number < segments[feature]:
            start = begins[feature] + number * length
            found = 0.0
            for entry in range(start, smaller(start + length, ends[feature])):
                found += np.float64(values[places[entry]]) * np.float64(coefficients[own[entry] * columns + column])
            sums[i] = found


@kernel
def _join_segments(sums: Any, before: Any, segments: Any, columns: Any, out: Any) -> None:
    i = cuda.grid(1)
    if i < out.shape[0]:
        feature, column = i // columns, i % columns
        found = 0.0
        for segment in range(before[feature], before[feature] + segments[feature]):
            found += sums[segment * columns + column]
        out[i] = found
