"""Double sampling: the threshold of a sample, replaced by the exact one if it selects far too many or too few (DGC)."""

from __future__ import annotations

import math

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels import magnitude
from sparseallreduce.streams.kernels import selection as loops
from sparseallreduce.streams.selection.base import Array, Selector, add, before_adding, clear_places
from sparseallreduce.streams.selection.exact import choose_top
from sparseallreduce.streams.selection.nonzero import choose_nonzero
from sparseallreduce.streams.selection.seeds import seed_of
from sparseallreduce.streams.selection.threshold import choose_at_least

__all__ = ["DoubleSampling"]


class DoubleSampling(Selector):
    """Selects values that reach a random sample's top-k threshold, or the exact top k if that number is far from k; without zeros.

    If it is far more than k, the k largest are found among the selected values; if it is far less, in the whole vector.

    Parameters
    ----------
    k : int
        Approximate number of values to select.
    share : float
        Fraction of the vector that is sampled; DGC uses 0.001 to 0.01.
    overshoot : float
        The second selection is made if the number exceeds ``overshoot * k`` or is below ``k / overshoot``; at least 1.
    seed : int
        Seed of the sample. The result depends on it, on the number of previous selections, and on the values.

    Examples
    --------
    >>> import numpy as np
    >>> DoubleSampling(2, share=1.0)(np.array([0.1, -3.0, 0.2, 0.1, 2.0, -0.1])).indices
    array([1, 4], dtype=uint32)
    """

    passes: float = 3.0  # and a cache line for each sampled value; 4 if the sample is wrong

    def __init__(self, k: int, *, share: float = 0.01, overshoot: float = 1.3, seed: int = 0) -> None:
        super().__init__(k)
        if not 0 < share <= 1:
            raise StreamError(f"share is the part of the vector to sample, above 0 and at most 1, not {share}")
        if overshoot < 1:
            raise StreamError(f"overshoot is a multiple of k, at least 1, not {overshoot}")
        self.share = share
        self.overshoot = overshoot
        self.seed = seed
        self.steps: int = 0

    def choose(self, accumulator: Array, gradient: Array | None, clear: bool) -> tuple[Array, Array]:
        if self.k == 0:
            add(accumulator, gradient)
            return choose_at_least(accumulator[:0], None, 0.0)
        size = len(accumulator)
        count = math.ceil(self.share * size)
        with before_adding(accumulator, gradient):
            sampled = loops.sample(accumulator, gradient, count, seed_of(self.seed, self.steps))
            key, _ = loops.kth(sampled, max(1, round(self.k * count / size)))
        threshold = min(math.inf, magnitude.from_key(key, accumulator.dtype))  # not NaN, to select all infinities
        indices, values = choose_at_least(accumulator, gradient, threshold, False, self.k)
        if len(indices) > self.overshoot * self.k:
            places, values = choose_top(values, None, self.k)
            indices = indices[places]
        elif len(indices) * self.overshoot < self.k and threshold > 0:
            indices, values, _ = choose_nonzero(accumulator, None, self.k)
        if clear:
            clear_places(accumulator, indices)
        self.steps += 1
        return indices, values
