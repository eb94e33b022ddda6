"""Selection of the largest values of each chunk of a vector, without a global threshold and in one pass (DeMo, SparseLoCo)."""

from __future__ import annotations

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels import selection as loops
from sparseallreduce.streams.kernels.backend import array_module, as_host, on_device
from sparseallreduce.streams.selection.base import Array, Selector, add, clear_places
from sparseallreduce.streams.stream import index_dtype

__all__ = ["ChunkTopK"]


class ChunkTopK(Selector):
    """Selects the largest magnitudes of each chunk, those of lower index among equals, and zeros if a chunk has nothing else.

    Every chunk has its share of the k values: the first m chunks together have ``floor(k * (their values) / N)``. Layers with small values
    therefore send as many as others, no rank searches for a threshold, and positions within a chunk of 4,096 take at most 12 bits. This is
    the selection of Sarfi et al., *Communication efficient LLM pre-training with SparseLoCo* (2025), after Peng et al., *DeMo* (2024).

    The algorithm has three steps. A pass over a chunk adds the gradient, and copies the values above a guess, which is slightly below the
    threshold of the previous chunk. Bisection of the range of the copied magnitudes finds the smallest one to select. If the guess was too
    high, it is lowered, and the chunk, which is in the cache, is read again.

    Parameters
    ----------
    k : int
        Exact number of values to select.
    chunk : int
        Values in a chunk, at least 1.

    Raises
    ------
    StreamError
        If ``chunk`` is less than 1.

    Examples
    --------
    >>> import numpy as np
    >>> ChunkTopK(2, chunk=3)(np.array([0.5, -7.0, 6.0, 0.0, 0.25, -0.125])).indices
    array([1, 4], dtype=uint32)
    """

    passes: float = 3.0  # read twice, written once

    def __init__(self, k: int, chunk: int = 4096) -> None:
        super().__init__(k)
        if chunk < 1:
            raise StreamError(f"a chunk holds at least one value, not {chunk}")
        self.chunk: int = int(chunk)

    def choose(self, accumulator: Array, gradient: Array | None, clear: bool) -> tuple[Array, Array]:
        indices = index_dtype(len(accumulator))
        if on_device(accumulator):
            add(accumulator, gradient)
            xp = array_module(accumulator)
            places = xp.asarray(loops.top_of_chunks(as_host(accumulator), None, self.chunk, self.k, indices)[0])
            chosen = places, accumulator[places]
        else:
            chosen = loops.top_of_chunks(accumulator, gradient, self.chunk, self.k, indices)
        if clear:
            clear_places(accumulator, chosen[0])
        return chosen
