"""The exact k-th magnitude and top k in linear time: a sample brackets the threshold, and one pass over memory finds it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sparseallreduce.errors import StreamError, StreamTypeError
from sparseallreduce.streams.kernels import magnitude
from sparseallreduce.streams.kernels import selection as loops
from sparseallreduce.streams.kernels.backend import array_module, on_device
from sparseallreduce.streams.selection.base import Array, Selector, add, before_adding, checked, clear_places
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["ExactTopK", "bracket", "choose_top", "key_and_ties", "kth_magnitude", "places_of_top", "stream_values", "top_of_stream"]

SMALL = 2**15  # vectors up to this size are processed in the cache
SHARE = 1024  # one value in this many is sampled before the pass
FEWEST = 4096
DEVIATIONS = 4.0  # standard deviations on either side; about one vector in 10,000 is then read again


def kth_magnitude(array: Array, k: int) -> float:
    """Return the exact k-th largest magnitude of a vector, in time linear in N.

    Parameters
    ----------
    array : ndarray of float32 or float64, shape (N,)
        It is not modified.
    k : int
        From 1 to N.

    Returns
    -------
    float
        The magnitude; NaN if at least k values are NaN, which count as larger than infinity.

    Raises
    ------
    StreamTypeError
        If the dtype is not supported. StreamError
            If k is out of range, or the array is not a contiguous vector.

    Notes
    -----
    The algorithm has three steps. A sample of one value in 1024 brackets the k-th magnitude. One pass over memory counts the values above
    the bracket, and copies those inside. A radix selection among these finds the result. If the bracket misses it, the counts show on
    which side it is, and that range is copied in a second pass.

    Examples
    --------
    >>> kth_magnitude(np.array([1.0, -4.0, 0.5, 3.0]), 2)
    3.0
    """
    checked(array)
    if not 1 <= k <= len(array):
        raise StreamError(f"k is from 1 to {len(array)}, the number of values, not {k}")
    return magnitude.from_key(key_and_ties(array, k)[0], array.dtype)


def key_and_ties(array: Array, k: int) -> tuple[int, int]:
    """Return the key of the k-th magnitude, and how many of the k largest equal it."""
    if len(array) <= SMALL or on_device(array):  # on a device, histograms of the whole vector replace the sample
        return loops.kth(array, k)
    low, high = bracket(array, None, k)
    above, inside, found = loops.collect(array, low - 1, high, len(array) // 16)
    if above < k <= above + inside and low == high:
        return low, k - above
    if k <= above:
        low, high, above, inside = high + 1, magnitude.last(array), 0, above
    elif k > above + inside:
        low, high, above, inside = 0, low - 1, above + inside, len(array) - above - inside
    if len(found) < inside:
        _, _, found = loops.collect(array, low - 1, high, inside)
    return loops.kth(found, k - above)


def places_of_top(array: Array, k: int, dtype: np.dtype[np.unsignedinteger[Any]]) -> Array:
    """Return the positions of the k >= 1 largest magnitudes (the first among equals), in increasing order."""
    if on_device(array):
        return loops.largest(array, k, dtype)
    return loops.top(array, *key_and_ties(array, k), k, dtype)


def bracket(array: Array, gradient: Array | None, k: int) -> tuple[int, int]:
    """Return keys that are almost certainly not above, and not below, the key of the k-th magnitude."""
    if len(array) <= SMALL:
        return 0, magnitude.last(array)
    count, share = max(FEWEST, len(array) // SHARE), k / len(array)
    sampled = loops.sample(array, gradient, count)
    margin = DEVIATIONS * math.sqrt(count * share * (1 - share)) + DEVIATIONS
    lower, upper = math.ceil(count * share + margin), math.floor(count * share - margin)
    low = loops.kth(sampled, lower)[0] if lower <= count else 0
    high = loops.kth(sampled, upper)[0] if upper >= 1 else magnitude.last(array)
    return low, high if high < magnitude.nan(magnitude.bits_of(array).dtype) else magnitude.last(array)


class ExactTopK(Selector):
    """Selects the k largest magnitudes, those of lower index among equals, and zeros if there is nothing else.

    A sample gives a lower bound of the threshold. One pass adds the gradient and copies everything above it, slightly more than k values,
    among which the k largest are found in the cache.

    Examples
    --------
    >>> residual = np.array([0.5, -2.0, 0.0, 1.0])
    >>> ExactTopK(1)(residual, np.array([0.0, -1.0, 0.0, 0.0]), clear=True)
    SparseStream(size=4, nnz=1, dtype=float64, sparse)
    >>> residual
    array([0.5, 0. , 0. , 1. ])
    """

    passes: float = 3.0  # read twice, written once

    def choose(self, accumulator: Array, gradient: Array | None, clear: bool) -> tuple[Array, Array]:
        indices, values = choose_top(accumulator, gradient, self.k)
        if clear:
            clear_places(accumulator, indices)
        return indices, values


def choose_top(accumulator: Array, gradient: Array | None, k: int) -> tuple[Array, Array]:
    """Add the gradient, and select the k largest magnitudes."""
    size = len(accumulator)
    indices = index_dtype(size)
    reached = 0
    if size > SMALL and k > 0 and not on_device(accumulator):
        with before_adding(accumulator, gradient):
            low, _ = bracket(accumulator, gradient, k)
        found, values, reached = loops.select(accumulator, gradient, low - 1, indices, expected=k + k // 2, most=2 * k + size // 16)
        if reached == size and len(found) >= k:
            places = loops.top(values, *loops.kth(values, k), k, indices)
            return found[places], values[places]
    # Small, or the sample was wrong, or so many values are equal that copying them all would take longer than a second pass.
    add(accumulator[reached:], None if gradient is None else gradient[reached:])
    if k == 0:
        xp = array_module(accumulator)
        return xp.empty(0, indices), xp.empty(0, accumulator.dtype)
    places = places_of_top(accumulator, k, indices)
    return places, accumulator[places]


def top_of_stream(stream: SparseStream, k: int) -> SparseStream:
    """Return the k entries of largest magnitude of a stream, those of lower index among equals; all entries if there are fewer.

    Parameters
    ----------
    stream : SparseStream
        Of float32 or float64, not row-sparse; may be a part on a range of indices.
    k : int
        At least 0.

    Returns
    -------
    SparseStream
        The selected entries, of the same size.

    Examples
    --------
    >>> top_of_stream(SparseStream([1, 4, 6], [1.0, -7.0, 2.0], 8), 2).indices
    array([4, 6], dtype=uint32)
    """
    if k < 0:
        raise StreamError(f"k is the number of entries to keep, at least 0, not {k}")
    indices, values = stream_values(stream)
    if k >= len(indices):
        return stream
    places = places_of_top(values, k, np.dtype(np.uint64)) if k else array_module(values).empty(0, np.uint64)
    return SparseStream._sparse_form(indices[places], values[places], stream.size, stream.lo, stream.hi, stream.switch_density)


def stream_values(stream: SparseStream) -> tuple[Array, Array]:
    """Return indices and values of a stream; raise an error unless its entries can be compared by magnitude."""
    if stream.width is not None:
        raise StreamError(f"rows have no magnitude, and this stream has rows of {stream.width} values: select among plain vectors")
    if stream.dtype not in (np.float32, np.float64):
        raise StreamTypeError(f"values are selected from a stream of float32 or float64, not {stream.dtype}: convert it")
    return stream._entries()
