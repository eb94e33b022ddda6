"""Selectors: which values of a vector are worth sending.

All have one interface: an accumulator in, a stream out. With a gradient, the accumulator (a residual then) is first increased by it,
in the same pass where the selector can; with ``clear``, what was chosen is set to zero in the accumulator, which so becomes the
residual of what was sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["ExactTopK", "Selector"]

Array = NDArray[Any]


class Selector(ABC):
    """Chooses values of vectors of one size.

    Parameters
    ----------
    k : int
        How many to choose, from 0 to the size.

    Attributes
    ----------
    passes : float
        Memory traffic of a selection with gradient and ``clear``, in multiples of reading N values.
    """

    passes: ClassVar[float]

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, accumulator: Array, gradient: Array | None = None, *, clear: bool = False) -> SparseStream:
        """The chosen values, as a stream.

        Parameters
        ----------
        accumulator : ndarray of float32 or float64, shape (N,)
            Increased by ``gradient``, if there is one; with ``clear``, zero afterwards where a value was chosen.
        gradient : ndarray, shape (N,), optional
            Of the same dtype.
        """
        if gradient is not None:
            np.add(accumulator, gradient, out=accumulator)
        indices = self.choose(accumulator).astype(index_dtype(len(accumulator)))
        values = accumulator[indices]
        if clear:
            accumulator[indices] = 0
        return SparseStream(indices, values, len(accumulator))

    @abstractmethod
    def choose(self, accumulator: Array) -> Array:
        """The indices to take, in increasing order."""


class ExactTopK(Selector):
    """The k values of largest magnitude."""

    passes = 8

    def choose(self, accumulator: Array) -> Array:
        order = np.argsort(-np.abs(accumulator), kind="stable")
        return np.sort(order[: self.k])
