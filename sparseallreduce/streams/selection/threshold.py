"""Selection of all values of at least a given magnitude."""

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
    """Select the non-zero values of at least a given magnitude, in one pass over memory that also adds the gradient.

    Parameters
    ----------
    accumulator : ndarray of float32 or float64, shape (N,)
        The gradient is added to it; with ``clear``, selected values are set to zero.
    threshold : float
        At least 0. Every threshold selects NaN values; a NaN threshold selects nothing else.
    gradient : ndarray, shape (N,), optional
        Of the same dtype.
    clear : bool
    expected : int, optional
        Expected number of values, which determines the memory used; N / 16 by default.

    Returns
    -------
    SparseStream
        Of size N, with the selected entries.

    Raises
    ------
    StreamTypeError, StreamError
        As :class:`~sparseallreduce.streams.selection.Selector`; StreamError also if the threshold is negative.

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
    """Return indices and values like :func:`select_at_least`, without checking the arrays."""
    size = len(accumulator)
    over = key_from(threshold, accumulator.dtype) - 1
    room = size // 16 if expected is None else expected + expected // 4
    indices, values, _ = loops.select(accumulator, gradient, over, index_dtype(size), clear=clear, expected=room)
    return indices, values


def key_from(threshold: float, dtype: np.dtype[np.floating]) -> int:
    """Return the smallest key that a threshold selects."""
    if threshold < 0:
        raise StreamError(f"a threshold of magnitudes is at least 0, not {threshold}")
    return max(1, magnitude.key_of(threshold, dtype))  # that of zero is 0


def stream_at_least(stream: SparseStream, threshold: float) -> SparseStream:
    """Return the non-zero entries of a stream of at least a given magnitude.

    Parameters
    ----------
    stream : SparseStream
        Of float32 or float64, not row-sparse; may be a part on a range of indices.
    threshold : float
        As for :func:`select_at_least`.

    Returns
    -------
    SparseStream
        The selected entries, of the same size.

    Examples
    --------
    >>> stream_at_least(SparseStream([1, 4, 6], [1.0, -7.0, 2.0], 8), 2.0).indices
    array([4, 6], dtype=uint32)
    """
    indices, values = stream_values(stream)
    places, chosen = choose_at_least(values, None, threshold, expected=len(values))
    return SparseStream._sparse_form(indices[places], chosen, stream.size, stream.lo, stream.hi, stream.switch_density)


class Threshold(Selector):
    """Selects every non-zero value of at least a given magnitude.

    Parameters
    ----------
    threshold : float
        At least 0. NaN values are always selected.

    Examples
    --------
    >>> Threshold(1.0)(np.array([0.5, -2.0, 0.0, 1.0])).indices
    array([1, 3], dtype=uint32)
    """

    passes: float = 3.0  # the accumulator is read and written, the gradient read

    def __init__(self, threshold: float) -> None:
        super().__init__(0)
        if threshold < 0:
            raise StreamError(f"a threshold of magnitudes is at least 0, not {threshold}")
        self.threshold: float = float(threshold)

    def choose(self, accumulator: Array, gradient: Array | None, clear: bool) -> tuple[Array, Array]:
        return choose_at_least(accumulator, gradient, self.threshold, clear)
