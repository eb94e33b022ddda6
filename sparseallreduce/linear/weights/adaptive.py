"""Weights with one learning rate each, which decreases as its gradients accumulate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.kernels import adaptive as adaptive_kernels
from sparseallreduce.linear.weights.descent import Descent
from sparseallreduce.linear.weights.numbered import Numbered
from sparseallreduce.linear.weights.plain import Intercept, Weights, as_numbers, flat_indices, zeros
from sparseallreduce.runtime.threads import Threads

__all__ = ["AdaptiveWeights"]

Array = NDArray[Any]


_SCORED = 1 << 20  # largest number of entries of rows whose features are numbered during scoring: more may be scored in bands


class AdaptiveWeights(Weights):
    """Weights updated by FTRL-Proximal (McMahan et al., *Ad click prediction: a view from the trenches*, 2013, algorithm 1).

    Without penalties a step is that of AdaGrad (Duchi et al., 2011): ``n += g**2; w -= rate * g / sqrt(n)`` for every entry g of the
    gradient, including the intercept's. So the scale of the loss has no effect, and a rarely touched weight takes large steps. With the
    paper's beta above 0 a step is divided by ``beta + sqrt(n)``: as long as the norm of its gradients is below beta, a weight changes at a
    common rate, as with SGD, and a rare feature does not outweigh frequent ones.

    L1 and L2 are those of the mean loss: with S the sum of all rates so far and v the weight without penalties, ``w`` is v moved
    towards zero by ``l1 * S / h``, at most to zero, and divided by ``1 + l2 * S / h``, where h is ``beta + sqrt(n)``. This differs from
    the paper's penalties, which do not grow with the steps, and follows McMahan (*Follow-the-regularized-leader and mirror descent*, 2011,
    section 2), so that the sum of loss and penalties is minimised. A weight without gradients does not change, with or without penalties.

    If the features are ``features_scaled``, a weight without gradients so far ignores those that may be rounding errors of sums that
    cancel, because its first step goes equally far for any gradient: they have to exceed 64 epsilons of the largest entry. For features
    of different scales such small gradients may be correct.

    A weight and its norm are adjacent in memory, because a step needs both. With columns, the weights of a feature are adjacent instead,
    and so are its norms.

    Steps change only the entries of the gradient, and reading never writes, because ranks read different weights: so all copies stay
    bitwise identical.

    Attributes
    ----------
    features_scaled : bool
        Whether the largest values of all features are of similar magnitude, as those of scaled features are. False by default; it has to be
        the same on all ranks.

    Examples
    --------
    >>> from sparseallreduce import SparseStream
    >>> w = AdaptiveWeights(3, Descent(update="ftrl"))
    >>> for slope in (2, 1e-3):
    ...     w.descend(SparseStream([1], np.float32([slope]), 3), rate=0.5)
    >>> w.to_array()
    array([ 0.     , -0.50025,  0.     ], dtype=float32)
    """

    unscaled: Array
    steps: int

    _NUMBERS = (*Weights._NUMBERS, "_rates", "_intercept_norm")
    _numbered: Numbered | None = None  # only for weights without columns
    _times: Array = np.empty(0)  # factors of the weights' rates, or empty
    _intercept_times = 1.0
    _most_counted = True  # whether most rows of the last step had a coefficient other than 0

    def __init__(self, size: int, descent: Descent | None = None, dtype: DTypeLike = np.float32, threads: Threads | None = None) -> None:
        super().__init__(size, descent or Descent(update="ftrl"), dtype, threads)
        if self.columns is None:
            self._keep("_pairs", zeros(size, self.descent, dtype, 2))
        else:
            self._norms = np.zeros_like(self.unscaled)
        self._rates = 0.0  # sum over all steps
        self._intercept_norm: Intercept = self._intercept_of(0.0)
        self.features_scaled = False
        self._eps = float(np.finfo(self.unscaled.dtype).eps)
        self._largest = 0.0  # largest magnitude in the present gradient, without the intercept

    @property
    def _norms(self) -> Array:
        """The norms of all weights, by position."""
        if self._numbered is not None:
            self._numbered.put_back()
        return self._kept_norms

    @_norms.setter
    def _norms(self, norms: Array) -> None:
        self._kept_norms, self._numbered = norms, None

    def set_rate_factors(self, places: Array, times: Array, intercept: float) -> None:
        """Multiply the rates of the weights at ``places`` by ``times``, and that of the intercept, until :meth:`clear_rate_factors`."""
        if not len(self._times):
            self._times = np.ones(len(self.unscaled), np.min_scalar_type(int(intercept)))
        self._times[places], self._intercept_times = times, intercept

    def clear_rate_factors(self) -> None:
        """Remove the factors of the rates."""
        self._times, self._intercept_times = np.empty(0), 1.0

    @property
    def _penalties(self) -> tuple[float, float]:
        """The factors of both penalties, times the sum of all rates."""
        return self.descent.l1 * self._rates, self.descent.l2 * self._rates

    @property
    def current(self) -> bool:
        return not any(self._penalties)

    def to_array(self) -> Array:
        self.wait_for_peers()
        array = np.empty(self.shape, self.unscaled.dtype)
        self._read(self.unscaled, self._norms, array.reshape(-1)[: len(self.unscaled)])
        array[self.features :] = self.intercept
        return array

    def assign(self, array: Array) -> None:
        super().assign(array)
        self._write(_norms=0)
        self._rates, self._intercept_norm = 0.0, self._intercept_of(0.0)

    def penalty(self) -> float:
        if not (self.descent.l1 or self.descent.l2):
            return 0.0
        weights = self.to_array()[: self.features].reshape(-1)
        return self.descent.l2 / 2 * float(np.dot(weights, weights)) + self.descent.l1 * float(np.abs(weights).sum(dtype=np.float64))

    def at(self, indices: Array) -> Array:
        self.wait_for_peers()
        inside = indices[: np.searchsorted(indices, self.features)].astype(np.int64)
        found = np.full(self._shape(len(indices)), self.intercept, self.unscaled.dtype)
        places = inside if self.columns is None else flat_indices(inside, self.columns, self.size)
        self._read(self.unscaled[places], self._norms[places], found.reshape(-1)[: len(places)])
        return found

    def scores(self, dataset: Dataset, rows: Array) -> Array:
        """Return the scores like :meth:`Weights.scores`; with penalties, after a pass over all weights."""
        self.wait_for_peers()
        return self._scored(self._read(self.unscaled, self._norms), dataset, rows)

    def _gathered(self, features: Array) -> Array:
        free = super()._gathered(features)
        return free if self.current else self._read(free, self._each_gathered(self._norms, features), free)

    def row_scores(self, dataset: Dataset, rows: Array) -> Array:
        """Return the scores of rows with which :meth:`descend_rows` is likely to be called next, under the same conditions."""
        numbered = self._numbered
        if numbered is None or not self._most_counted or self.noting or len(rows) * dataset.nnz > _SCORED * dataset.rows:
            return self.scores(dataset, rows)
        return self._completed(numbered.scores(dataset, rows))

    def descend_rows(self, dataset: Dataset, rows: Array, coefficients: Array, rate: float) -> int:
        """Take a step by the sum of ``coefficients[i]`` times row ``rows[i]``; only without penalties, on one rank with one thread.

        The result is bitwise identical to that of ``descend`` with the sum as a sparse stream. Weights must have no columns, and rows at
        most
        :data:`~sparseallreduce.linear.weights.numbered.MOST_ENTRIES` entries.

        Returns
        -------
        int
            Number of non-zero entries of that sum.
        """
        assert self._numbered is not None
        self.steps += 1
        self._rate = rate
        counting = coefficients != 0
        counted = int(np.count_nonzero(counting))
        self._most_counted = 2 * counted >= len(rows)
        factors = coefficients
        if self._numbered.rows is not rows:
            counting_rows, factors = (rows, coefficients) if counted == len(rows) else (rows[counting], coefficients[counting])
            self._numbered.scores(dataset, counting_rows)
        entries, finite, self._largest = self._numbered.descend(dataset, factors, rate, self.descent.beta, self._noise, self._times)
        self._rates += rate
        if self.descent.intercept and len(rows):
            slope = float(coefficients.dtype.type(coefficients.sum(dtype=np.float64)))
            self._subtract_intercept(slope, rate)
            entries += slope != 0
        self._check(finite and math.isfinite(self.intercept))
        return entries

    def warm_up_rows(self, dataset: Dataset) -> None:
        """Compile what ``row_scores`` and ``descend_rows`` need for samples of this form; the weights do not change."""
        assert self._numbered is not None
        self._numbered.warm_up(dataset)

    def state(self) -> dict[str, Any]:
        state = super().state()
        return state | {
            "direction": np.ascontiguousarray(state["direction"]),
            "norms": np.ascontiguousarray(self._norms),
            "rates": self._rates,
            "intercept_norm": as_numbers(self._intercept_norm),
        }

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._write(_norms=np.abs(state["norms"]))  # norms must not have a sign
        self._rates, self._intercept_norm = float(state["rates"]), self._intercept_of(state["intercept_norm"])

    def memory(self) -> dict[str, Any]:
        memory = super().memory() | {"norms": self._norms.copy(), "rates": self._rates}
        memory["intercept_norm"] = self._intercept_norm
        if not self.current:
            memory["weights"] = self.unscaled.copy()  # before penalties
        return memory

    def remember(self, memory: dict[str, Any], stretch: Array | float = 1.0) -> None:
        super().remember(memory, stretch)
        if "norms" not in memory:  # the memory is of weights with a common rate
            return
        if isinstance(stretch, np.ndarray) and len(stretch) == self.features:
            stretch = np.repeat(stretch, self.descent.width)
        self._rates = memory["rates"]
        self._write(_norms=memory["norms"] / stretch)
        if "weights" in memory:
            self._write(unscaled=memory["weights"] * stretch)
        if self.descent.intercept:
            self._intercept_norm = self._intercept_of(memory["intercept_norm"])

    def _stretch(self, places: Array, factors: Array) -> None:
        super()._stretch(places, factors)
        self._norms[places] /= factors

    def _shared_names(self) -> list[str]:
        return ["unscaled", "_norms"]

    def _blocks(self) -> list[str]:
        return self._shared_names() if self.columns is not None else ["_pairs"]

    def _keep(self, name: str, block: Array) -> None:
        super()._keep(name, block)
        if name == "_pairs":
            self.unscaled, self._norms = block[::2], block[1::2]
            self._numbered = Numbered(self.unscaled, self._norms)

    def _shrink(self, factor: float) -> None:
        """Do nothing, because penalties are applied when a weight is read."""

    def _subtract(self, indices: Array | None, values: Array, rate: float) -> bool:
        indices, values = self._flat(indices, values)
        self._largest = float(np.abs(values).max(initial=0.0))
        cuts, step = self._cuts(len(values)), (rate, self.descent.beta, *self._penalties, self._least(self._largest))

        def subtract(part: int) -> bool:
            if indices is None:
                mine = slice(cuts[part], cuts[part + 1])
                each = self.unscaled[mine], self._norms[mine], values[mine]
                return bool(adaptive_kernels.adaptive_descend_dense(*each, *step, self._times[mine]))
            given = self.unscaled, self._norms, indices, values, *step, self._times
            return bool(adaptive_kernels.adaptive_descend(*given, self._first + part, self._parts))

        finite = all(self._threads.each(subtract))
        self._rates += rate
        return finite

    def _subtract_intercept(self, slope: Intercept, rate: float) -> None:
        value = self.descent.intercept_value
        slope, rate = value * slope, rate * value * self._intercept_times
        if isinstance(slope, np.ndarray):
            least = self._least(max(self._largest, float(np.abs(slope).max())))
            slope = np.where((np.abs(slope) <= least) & (self._intercept_norm == 0), 0.0, slope)
            self._intercept_norm = np.hypot(self._intercept_norm, slope)
            norm = self._intercept_norm + self.descent.beta
            with np.errstate(invalid="ignore"):  # NaN ends the training after the step
                self.intercept = self.intercept - rate * np.divide(slope, norm, out=np.zeros_like(norm), where=slope != 0)
        elif slope != 0 and (self._intercept_norm or not abs(slope) <= self._least(self._largest)):
            self._intercept_norm = math.hypot(self._intercept_norm, slope)
            self.intercept -= rate * slope / (self._intercept_norm + self.descent.beta)

    @property
    def _noise(self) -> float:
        """The fraction of the largest entry of a gradient that may be a rounding error of a sum, if that can be known."""
        return adaptive_kernels.NOISE * self._eps if self.features_scaled else 0.0

    def _least(self, largest: float) -> float:
        """Return the bound that a first gradient has to exceed, given the largest entry; 0 if that is not finite, which fails the step."""
        return self._noise * largest if largest < math.inf else 0.0

    def _read(self, free: Array, norms: Array, out: Array | None = None) -> Array:
        """Return some weights after penalties, in ``out`` if it is given; otherwise the given array itself if there are no penalties."""
        if self.current:
            if out is None:
                return free
            out[:] = free
            return out
        out = np.empty_like(free) if out is None else out
        l1, l2 = self._penalties

        def read(low: int, high: int) -> None:
            adaptive_kernels.adaptive_values(free[low:high], norms[low:high], self.descent.beta, l1, l2, out[low:high])

        self._threads.share(self._threads.cuts(len(free)), read)
        return out
