"""The exact top k without zeros, for vectors that may have few non-zeros, such as the residuals of sparse gradients."""

from __future__ import annotations

from sparseallreduce.streams.kernels import selection as loops
from sparseallreduce.streams.kernels.backend import array_module, device_kernels, on_device
from sparseallreduce.streams.selection.base import Array, Selector, add, clear_places
from sparseallreduce.streams.selection.exact import choose_top, places_of_top
from sparseallreduce.streams.selection.threshold import key_from
from sparseallreduce.streams.stream import index_dtype

__all__ = ["NonZeroTopK", "choose_nonzero"]

_FEW = 4  # times k: with more candidates, a threshold is found before anything is copied


class NonZeroTopK(Selector):
    """Selects the k largest non-zero magnitudes, those of lower index among equals; fewer if there are not k non-zeros.

    One pass adds the gradient and copies non-zeros. If there are many more than k, it stops and continues like
    :class:`~sparseallreduce.streams.selection.ExactTopK`. For 1 % of 3.2 million values, of which 0.25 % are non-zero, it takes as long as
    a copy; the exact top k, which has to fill up with zeros, takes 9 to 30 times as long.

    Examples
    --------
    >>> import numpy as np
    >>> NonZeroTopK(3)(np.array([0.5, 0.0, 0.0, -1.0])).indices
    array([0, 3], dtype=uint32)
    """

    passes: float = 3.0  # read twice, written once

    def choose(self, accumulator: Array, gradient: Array | None, clear: bool) -> tuple[Array, Array]:
        indices, values, _ = choose_nonzero(accumulator, gradient, self.k)
        if clear:
            clear_places(accumulator, indices)
        return indices, values


def choose_nonzero(accumulator: Array, gradient: Array | None, k: int, threshold: float = 0.0, least: int = 0) -> tuple[Array, Array, int]:
    """Add the gradient, and select the k largest of the non-zero magnitudes that are at least a threshold.

    Parameters
    ----------
    accumulator, gradient : ndarray, shape (N,)
    k : int
    threshold : float
        A guess of the k-th magnitude, better too low than too high: it avoids copying lower values, without changing the result.
    least : int
        If fewer values reach the threshold, the vector is read again without it.

    Returns
    -------
    indices, values : ndarray
    reached : int
        Number of values that reached the threshold; a lower bound if there were more than 4 k.
    """
    size, most = len(accumulator), _FEW * k
    over = key_from(threshold, accumulator.dtype) - 1
    if over == 0 and on_device(accumulator):  # a device kernel would copy all values
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
    """Return the non-zeros of the largest magnitudes, and their number."""
    count = int(array_module(values).count_nonzero(values))
    if count < len(values):
        present = device_kernels(values).marked(values != 0, count)
        indices, values = indices[present], values[present]
    return indices, values, count
