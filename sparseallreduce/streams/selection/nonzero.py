"""The exact top k of vectors that may have few non-zeros, such as the residuals of sparse gradients: without zeros."""

from __future__ import annotations

from sparseallreduce.streams.kernels import selection as loops
from sparseallreduce.streams.kernels.backend import array_module, device_kernels, on_device
from sparseallreduce.streams.selection.base import Array, Selector, add, clear_places
from sparseallreduce.streams.selection.exact import choose_top, places_of_top
from sparseallreduce.streams.selection.threshold import key_from
from sparseallreduce.streams.stream import index_dtype

__all__ = ["NonZeroTopK", "choose_nonzero"]

_FEW = 4  # times k: with more candidates than that, a threshold is looked for before anything is copied


class NonZeroTopK(Selector):
    """The k values of largest magnitude, among equals those of lower index; fewer if no more are different from zero.

    One pass adds the gradient and copies what is not zero. If there is much more of that than k, it stops, and goes on as
    :class:`~sparseallreduce.streams.selection.ExactTopK`. For 1 % of 3.2 million values, of which a quarter per cent are not zero,
    that takes as long as a copy, and the exact top k, which has to fill up with zeros, 9 to 30 times as long.

    Examples
    --------
    >>> import numpy as np
    >>> NonZeroTopK(3)(np.array([0.5, 0.0, 0.0, -1.0])).indices
    array([0, 3], dtype=uint32)
    """

    passes = 3.0  # read twice, written once

    def choose(self, accumulator: Array, gradient: Array | None, clear: bool) -> tuple[Array, Array]:
        indices, values, _ = choose_nonzero(accumulator, gradient, self.k)
        if clear:
            clear_places(accumulator, indices)
        return indices, values


def choose_nonzero(
    accumulator: Array, gradient: Array | None, k: int, threshold: float = 0.0, least: int = 0
) -> tuple[Array, Array, int]:
    """Add the gradient, and take the k largest of the magnitudes that are at least a threshold and not zero.

    Parameters
    ----------
    accumulator, gradient : ndarray, shape (N,)
    k : int
    threshold : float
        A guess at the k-th magnitude, rather too low: it saves copying what is below, and comes to the same result.
    least : int
        Where fewer reach the threshold, it was misleading, and the vector is read again without.

    Returns
    -------
    indices, values : ndarray
    reached : int
        How many values reached the threshold; a lower bound if they were more than 4 k.
    """
    size, most = len(accumulator), _FEW * k
    over = key_from(threshold, accumulator.dtype) - 1
    if over == 0 and on_device(accumulator):  # where all values would be copied, however many they are
        return _nonzero_of_top(*choose_top(accumulator, gradient, k))
    indices, values, end = loops.select(accumulator, gradient, over, index_dtype(size), expected=most, most=most)
    reached = len(values)
    if end < size:
        add(accumulator[end:], None if gradient is None else gradient[end:])
        return *choose_top(accumulator, None, k), reached
    if threshold > 0 and reached < least:
        return *choose_nonzero(accumulator, None, k)[:2], reached
    if k < reached:
        places = places_of_top(values, k, indices.dtype) if k else slice(0)
        indices, values = indices[places], values[places]
    return indices, values, reached


def _nonzero_of_top(indices: Array, values: Array) -> tuple[Array, Array, int]:
    """What is not zero of the largest magnitudes, and how many these are."""
    count = int(array_module(values).count_nonzero(values))
    if count < len(values):
        present = device_kernels(values).marked(values != 0, count)
        indices, values = indices[present], values[present]
    return indices, values, count
