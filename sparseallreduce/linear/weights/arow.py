"""Weights with one precision each, which grows with the gradients that touch it: diagonal AROW."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.kernels import arow as arow_kernels
from sparseallreduce.linear.weights.adaptive import AdaptiveWeights
from sparseallreduce.linear.weights.descent import Descent
from sparseallreduce.runtime.threads import Threads
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["ArowWeights", "batch_sums", "with_sums"]

Array = NDArray[Any]


class ArowWeights(AdaptiveWeights):
    """Weights updated by AROW with a diagonal covariance, for the hinge loss.

    The method is that of Crammer, Kulesza and Dredze, *Adaptive regularization of weight vectors*, 2009, equations 7 to 9. A weight's
    precision A is 1 at first. The rate is 1 / r, with the paper's r. A step has three parts, given the violations ``l_i = 1 - y_i w.x_i >
    0`` of n_v samples of the batch, and the gradient ``g = -sum(l_i y_i x_i)`` of half their squares:

    1. The spread of the batch is ``s = sum(g**2 / A) / sum(l_i**2)``.
    2. Every weight changes by ``-g / A / (s + r)``.
    3. Every precision grows by ``g**2 * n_v / sum(l_i**2) / r``.

    For a single sample, s is ``x.(x / A)`` and the growth is ``x**2 / r``: this is the paper's algorithm. It differs for larger batches,
    which the paper does not consider. Then part 2 takes one direction for all samples, and goes at most as far as is best for the sum of
    the ``l_i**2``: by the Cauchy-Schwarz inequality it assumes the lowest possible curvature. And part 3 has the square of a feature's sum
    where the paper has the sum of squares, which would need a second value per entry. So the precision of a feature grows more if the
    violating samples agree on it, and less if they do not; the division of the batch among ranks has no effect.

    The message is the gradient, followed by three numbers: see :func:`with_sums`. Steps change only the entries of the gradient.

    L1 and L2 are those of the mean of ``l_i**2 / 2``: with S the number of all samples so far divided by r, and v the weight without
    penalties, ``w`` is v moved towards zero by ``l1 * S / A``, at most to zero, and divided by ``1 + l2 * S / A``. The paper has no
    penalties.

    Examples
    --------
    >>> w = ArowWeights(2)
    >>> violation, x = 1.0, np.float32([3, 4])  # a sample of class +1
    >>> gradient = SparseStream([0, 1], -violation * x, 2)
    >>> w.descend(with_sums(gradient, np.float32([1, violation**2, 1])), rate=1 / 5)
    >>> w.to_array()  # the margin is 25 / (25 + 5)
    array([0.1       , 0.13333334], dtype=float32)
    """

    steps: int
    intercept: float

    sums = 3

    def __init__(self, size: int, descent: Descent | None = None, dtype: DTypeLike = np.float32, threads: Threads | None = None) -> None:
        # ``_norms`` are the precisions; 0 stands for 1, the precision of weights without gradients.
        super().__init__(size, descent or Descent(update="arow"), dtype, threads)

    def descend(self, gradient: SparseStream, rate: float) -> None:
        """Update the weights and their variances by one AROW step.

        Parameters
        ----------
        gradient : SparseStream
            A gradient with sums, from :func:`with_sums`.
        rate : float
            1 / r.

        Raises
        ------
        DivergenceError
            As for other weights.
        """
        self.wait_for_peers()
        self.steps += 1
        self._rate = rate
        indices, values, slope, (violators, squares, samples) = self._taken_apart(gradient)
        finite = math.isfinite(violators + squares + samples)
        if squares > 0 and finite:
            spread = self._spread(indices, values, float(slope))
            self._meet()  # no rank may update weights that others still read
            step, gain = rate / (1.0 + rate * spread / squares), rate * violators / squares
            finite = self._move(indices, values, step, gain)
            if slope:
                before, value = float(self._intercept_norm) or 1.0, self.descent.intercept_value
                self.intercept = float(self.intercept) - step * value**2 * float(slope) / before
                self._intercept_norm = before + gain * (value * float(slope)) ** 2
        self._rates += rate * samples
        if self._replica is not None:
            self._replica.meeting.arrive(finite)
            self._changing = finite = True
        self._check(finite and math.isfinite(float(self.intercept)))

    def warm_up(self, dataset: Dataset) -> None:
        super().warm_up(dataset)
        others = ArowWeights(2 + self.descent.intercept, self.descent, self.unscaled.dtype)
        nothing = np.empty(0, index_dtype(self.size)), np.empty(0, self.unscaled.dtype)
        for indices, values in (nothing, (None, np.zeros(2, self.unscaled.dtype))):
            others._spread(indices, values, 0.0)
            others._move(indices, values, 0.0, 0.0)

    def _taken_apart(self, gradient: SparseStream) -> tuple[Array | None, Array, Any, list[float]]:
        """Return indices (None if dense) and values of the features, the intercept's entry, and the sums."""
        if gradient.is_dense:
            stored = gradient._stored
            parts = self._parted(SparseStream._dense_form(stored[: self.size], self.size))
            return *parts, stored[self.size :].tolist()
        indices, values = gradient.indices, gradient.values
        inside = int(np.searchsorted(indices, self.size))
        sums = np.zeros(self.sums)
        sums[indices[inside:].astype(np.int64) - self.size] = values[inside:]
        return *self._parted(SparseStream._sparse_form(indices[:inside], values[:inside], self.size)), sums.tolist()

    def _spread(self, indices: Array | None, values: Array, slope: float) -> float:
        """Return the sum of the squares of a gradient, each times the variance of its weight."""
        if indices is None:
            spread = arow_kernels.arow_spread_dense(self._norms, values)
        else:
            spread = arow_kernels.arow_spread(self._norms, indices, values)
        return float(spread) + (self.descent.intercept_value * slope) ** 2 / (float(self._intercept_norm) or 1.0)

    def _move(self, indices: Array | None, values: Array, step: float, gain: float) -> bool:
        """Update this rank's part of the weights; return True if the results are finite."""
        cuts, how = self._cuts(len(values)), (step, gain, *self._penalties)

        def move(part: int) -> bool:
            if indices is None:
                mine = slice(cuts[part], cuts[part + 1])
                return bool(arow_kernels.arow_descend_dense(self.unscaled[mine], self._norms[mine], values[mine], *how))
            given = self.unscaled, self._norms, indices, values, *how
            return bool(arow_kernels.arow_descend(*given, self._first + part, self._parts))

        return all(self._threads.each(move))

    def memory(self) -> dict[str, Any]:
        memory = super().memory()
        return memory | {"precisions": memory.pop("norms")}

    def remember(self, memory: dict[str, Any], stretch: Array | float = 1.0) -> None:
        known = {name: value for name, value in memory.items() if name not in ("norms", "precisions")}
        if "precisions" in memory:  # the memory is of AROW
            # The stretch counts twice, because they are sums of squares; at least the precision of a weight without gradients.
            touched = memory["precisions"] > 0
            known["norms"] = np.where(touched, np.maximum(memory["precisions"] / stretch, stretch), 0)
        super().remember(known, stretch)


def batch_sums(coefficients: Array, counts: Array | None) -> Array:
    """Return a rank's part of the sums of a batch: violating samples, squares of their violations, and all samples.

    Parameters
    ----------
    coefficients : ndarray
        Violation of each sample times -y, times its weight.
    counts : ndarray or None
        Weight of each sample; None for 1.
    """
    given = coefficients.astype(np.float64)
    if counts is None:
        sums = np.count_nonzero(given), np.dot(given, given), len(given)
    else:
        violating = given != 0
        sums = counts[violating].sum(), (np.square(given[violating]) / counts[violating]).sum(), counts.sum()
    return np.array(sums, coefficients.dtype)


def with_sums(gradient: SparseStream, sums: Array) -> SparseStream:
    """Return a gradient with the sums of its batch appended as entries.

    Parameters
    ----------
    gradient : SparseStream
    sums : ndarray, shape (3,)
        Number of samples that violate the margin, sum of their squared violations, and number of all samples.
    """
    size = gradient.size + len(sums)
    if gradient.is_dense:
        return SparseStream._dense_form(np.concatenate([gradient._stored, sums.astype(gradient.dtype)]), size)
    dtype = index_dtype(size)
    indices = np.concatenate([gradient.indices.astype(dtype, copy=False), np.arange(gradient.size, size, dtype=dtype)])
    joined = SparseStream._sparse_form(indices, np.concatenate([gradient.values, sums.astype(gradient.dtype)]), size)
    joined._switch()
    return joined
