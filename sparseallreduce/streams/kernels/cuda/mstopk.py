"""MSTopK on the device: the key of rank k + 1, found by histograms, answers all of its searches (CommLib section 3.1)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels import magnitude
from sparseallreduce.streams.kernels.cuda.launching import BLOCK, RUN
from sparseallreduce.streams.kernels.cuda.norms import mean_and_largest
from sparseallreduce.streams.kernels.cuda.ranking import count_around, kth, places_of
from sparseallreduce.streams.kernels.cuda.selection import check_selected
from sparseallreduce.streams.kernels.searches import thresholds

__all__ = ["choose_between", "mstopk"]


def mstopk(
    accumulator: Any,
    gradient: Any | None,
    k: int,
    index_dtype: DTypeLike,
    xp: Any,
    *,
    searches: int = 30,
    seed: int = 0,
    step: int = 0,
    clear: bool = False,
    run: int = RUN,
    block: int = BLOCK,
) -> tuple[Any, Any]:
    """Select all values above the upper of two thresholds, and a random run of those between the two, together k.

    Parameters
    ----------
    accumulator : device array of float32 or float64, shape (N,)
        The gradient is added to it; with ``clear``, selected values are set to zero.
    gradient : device array of the same shape and dtype, or None
    k : int
        From 0 to N.
    index_dtype : {uint32, uint64}
    xp : module
        NumPy or CuPy.
    searches, seed : int
        As for ``streams.selection.MSTopK``.
    step : int
        Number of previous selections.

    Returns
    -------
    indices, values : device arrays, shape (k,)
        In increasing order. They equal those of the CPU if the mean does; it may differ by rounding in float64
        (:func:`~sparseallreduce.streams.kernels.cuda.norms.mean_and_largest`), which may change the choice among nearly equal magnitudes. A
        few numbers are copied to the host, three times.

    Raises
    ------
    StreamError
        For arrays of other dtypes or dimensions or that are not contiguous, and if k is out of range.
    """
    check_selected(accumulator, gradient)
    if not 0 <= k <= len(accumulator):
        raise StreamError(f"k = {k} values cannot be chosen of {len(accumulator)}: take k from 0 to that")
    if searches < 1:
        raise StreamError(f"searches is the number of thresholds to try, at least 1, not {searches}")
    mean, largest = mean_and_largest(accumulator, gradient, xp, run=run, block=block)
    indices = choose_between(accumulator, k, (mean, largest), index_dtype, xp, searches, (seed, step), run=run, block=block)
    places = indices.astype(np.int64)
    values = accumulator[places]
    if clear:
        accumulator[places] = 0
    return indices, values


def choose_between(
    accumulator: Any,
    k: int,
    measures: tuple[float, float],
    index_dtype: DTypeLike,
    xp: Any,
    searches: int,
    seeds: tuple[int, int],
    *,
    run: int = RUN,
    block: int = BLOCK,
) -> Any:
    """Return the positions of all magnitudes from the upper threshold on, and of a random run of those from the lower one on, together k.

    Parameters
    ----------
    measures : (float, float)
        Mean and maximum of the magnitudes, between which the thresholds are searched.
    seeds : (int, int)
        Seed of the random run, and number of previous selections.
    """
    beyond = -math.inf
    if len(accumulator) > k:
        beyond = magnitude.from_key(kth(accumulator, k + 1, xp, block=block)[0], accumulator.dtype)
        beyond = math.inf if math.isnan(beyond) else beyond
    upper, lower = thresholds(beyond, *measures, searches, accumulator.dtype)
    counted = count_around(accumulator, lower, upper - 1, xp, run=run, block=block)
    _, all_above, _, all_inside = counted
    above, inside = xp.concatenate([all_above, all_inside]).tolist()
    wanted = k - above
    first = int(np.random.default_rng(list(seeds)).integers(0, inside - wanted + 1))
    return places_of(accumulator, lower, upper - 1, (first, wanted), counted, k, index_dtype, xp, run=run, block=block)
