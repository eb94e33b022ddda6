"""Selection by a threshold: everything of at least a magnitude."""

from __future__ import annotations

import numpy as np

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels import magnitude
from sparseallreduce.streams.kernels import selection as loops
from sparseallreduce.streams.selection.base import Array, Selector, checked
from sparseallreduce.streams.selection.exact import stream_values
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["Threshold", "key_from", "select_at_least", "stream_at_least"]


def select_at_least(
    accumulator: Array, threshold: float, gradient: Array | None = None, *, clear: bool = False, expected: int | None = None
) -> SparseStream:
    """The values of at least a magnitude that are not zero, chosen in one pass over memory, in which a gradient is added first.

    Parameters
    ----------
    accumulator : ndarray of float32 or float64, shape (N,)
        Increased by ``gradient``, if there is one; with ``clear``, zero afterwards where a value was chosen.
    threshold : float
        At least 0. NaN chooses NaN alone, which any other threshold chooses, too.
    gradient : ndarray, shape (N,), optional
        Of the same dtype.
    clear : bool
    expected : int, optional
        About how many values to expect, which saves memory; N / 16 by default.

    Raises
    ------
    StreamTypeError, StreamError
        As :class:`~sparseallreduce.streams.selection.Selector` raises them; StreamError also for a negative threshold.

    Examples
    --------
    >>> select_at_least(np.array([0.5, -2.0, 0.0, 1.0]), 1.0).values
    array([-2.,  1.])
    """
    checked(accumulator, gradient, clear)
    indices, values = choose_at_least(accumulator, gradient, threshold, clear, expected)
    return SparseStream(indices, values, len(accumulator))


def choose_at_least(
    accumulator: Array, gradient: Array | None, threshold: float, clear: bool = False, expected: int | None = None
) -> tuple[Array, Array]:
    """Indices and values of :func:`select_at_least`, for arrays known to be sound."""
    size = len(accumulator)
    over = key_from(threshold, accumulator.dtype) - 1
    room = size // 16 if expected is None else expected + expected // 4
    indices, values, _ = loops.select(accumulator, gradient, over, index_dtype(size), clear=clear, expected=room)
    return indices, values


def key_from(threshold: float, dtype: np.dtype[np.floating]) -> int:
    """The smallest key that a threshold chooses."""
    if threshold < 0:
        raise StreamError(f"a threshold of magnitudes is at least 0, not {threshold}")
    return max(1, magnitude.key_of(threshold, dtype))  # that of zero is 0


def stream_at_least(stream: SparseStream, threshold: float) -> SparseStream:
    """The entries of a stream of at least a magnitude that are not zero.

    Parameters
    ----------
    stream : SparseStream
        Of float32 or float64, not row-sparse; also a part on a range of indices.
    threshold : float
        As for :func:`select_at_least`.

    Examples
    --------
    >>> stream_at_least(SparseStream([1, 4, 6], [1.0, -7.0, 2.0], 8), 2.0).indices
    array([4, 6], dtype=uint32)
    """
    indices, values = stream_values(stream)
    places, chosen = choose_at_least(values, None, threshold, expected=len(values))
    return SparseStream._sparse_form(indices[places], chosen, stream.size, stream.lo, stream.hi, stream.switch_density)


class Threshold(Selector):
    """Every value of at least a magnitude, except zeros.

    Parameters
    ----------
    threshold : float
        At least 0. NaN is chosen whatever the threshold.

    Examples
    --------
    >>> Threshold(1.0)(np.array([0.5, -2.0, 0.0, 1.0])).indices
    array([1, 3], dtype=uint32)
    """

    passes = 3.0  # the accumulator is read and written, the gradient read

    def __init__(self, threshold: float) -> None:
        super().__init__(0)
        if threshold < 0:
            raise StreamError(f"a threshold of magnitudes is at least 0, not {threshold}")
        self.threshold = float(threshold)

    def choose(self, accumulator: Array, gradient: Array | None, clear: bool) -> tuple[Array, Array]:
        return choose_at_least(accumulator, gradient, self.threshold, clear)
