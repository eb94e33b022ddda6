"""Weights of a linear model, updated by gradient descent without a pass over all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.errors import DatasetError, DivergenceError
from sparseallreduce.linear import kernels
from sparseallreduce.linear.data.dataset import Dataset, Rows
from sparseallreduce.linear.weights.descent import Descent
from sparseallreduce.linear.weights.journal import Journalled
from sparseallreduce.linear.weights.shared import Replica, shared_replica
from sparseallreduce.runtime.threads import Threads
from sparseallreduce.streams.kernels.backend import array_module
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["Intercept", "Weights", "as_numbers", "flat_indices", "zeros"]

Array = NDArray[Any]
Intercept = float | Array  # one number, or with columns one per column


class Weights(Journalled):
    """The weight vector w, stored as ``scale * unscaled``, and the intercept, which is the last entry if there is one.

    The L2 term shrinks all weights in every step. Here that is one product of two numbers, so that a step costs as much as the
    gradient has entries and not N. When the scale gets small it is multiplied into the unscaled weights, which is the only pass over N.

    If the descent has columns, there are K weights per feature and K intercepts with a common scale, and gradients are row-sparse streams
    of width K. The weights of a feature are adjacent: the arrays stored here are flat, and column k of feature i is entry ``i * K + k``.

    Parameters
    ----------
    size : int
        Number of weights, or of rows of K: the features, and one for the intercept. Gradients are streams of this size.
    descent : Descent, optional
    dtype : optional
        Data type of weights and gradients, float32 or float64.
    threads : Threads, optional
        Threads that share the work. The results do not depend on their number.

    Examples
    --------
    >>> w = Weights(3, Descent(l2=0.2))
    >>> w.descend(SparseStream([1], np.float32([2]), 3), rate=0.5)
    >>> w.descend(SparseStream([2], np.float32([4]), 3), rate=0.5)
    >>> w.to_array()
    array([ 0. , -0.9, -2. ], dtype=float32)
    """

    # Still far above the scale at which float32 loses precision (1e-38), and rarely reached: after 140,000 steps with rate * l2 = 1e-4.
    _SMALLEST_SCALE = 1e-6
    _NUMBERS: tuple[str, ...] = ("steps", "scale", "intercept", "_rate")

    #: Number of sums over the samples of a batch that are appended to its gradient.
    sums = 0

    def __init__(self, size: int, descent: Descent | None = None, dtype: DTypeLike = np.float32, threads: Threads | None = None) -> None:
        self.size = size
        self.descent: Descent = descent or Descent()
        self._threads = threads or Threads()
        self.steps: int = 0
        self.scale: float = 1.0
        self.columns: int | None = self.descent.columns
        self.unscaled: Array = zeros(size, self.descent, dtype)
        self.intercept: Intercept = self._intercept_of(0.0)
        self._replica: Replica | None = None
        self._changing = False  # whether other ranks may still update shared weights
        self._rate = 0.0  # rate of the last step
        self._waited: Callable[[float], object] = float
        self._first, self._parts = 0, self._threads.count  # number of this rank's first part of an update, and number of all parts

    def share(self, comm: Any, waited: Callable[[float], object]) -> None:
        """Keep one copy of the weights for all ranks of each host, if that pays off; each rank updates a part. Collective.

        From then on ``assign``, ``descend`` and ``restore`` are collective over the ranks of the host, and no rank may call ``descend``
        while another may still read the weights, which holds if the ranks sum their gradients before. A rank that reads weights waits until
        the others have made their updates, calls ``waited`` with the seconds that took, and raises the errors of ``descend``.
        """
        if self._replica is None:
            names = self._blocks()
            self._replica = shared_replica([getattr(self, name) for name in names], comm, self._threads.count)
            if self._replica is not None:
                self._waited = waited
                self._first, self._parts = self._replica.first, self._replica.parts
                for name, array in zip(names, self._replica.arrays, strict=True):
                    self._keep(name, array)

    def shared_by(self, threads: Threads) -> None:
        """Let these threads share the work from now on. Not for weights shared by ranks."""
        self._threads = threads
        self._first, self._parts = 0, threads.count

    def wait_for_peers(self) -> None:
        """Wait until all ranks have made the updates of the last step.

        Raises
        ------
        DivergenceError
            On all ranks, if a weight is not finite after it.
        """
        if self._changing and self._replica is not None:
            self._changing = False
            begin = time.perf_counter()
            all_well = self._replica.meeting.wait()
            self._waited(time.perf_counter() - begin)
            self._check(all_well)

    @property
    def features(self) -> int:
        """The number of features."""
        return self.size - self.descent.intercept

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights: (size,), or (size, K) with K columns."""
        return self._shape(self.size)

    def to_array(self) -> Array:
        """Return a copy of the weights, with ``shape`` and the intercept last."""
        self.wait_for_peers()
        array = np.empty(self.shape, self.unscaled.dtype)
        np.multiply(self.unscaled, self.scale, out=array.reshape(-1)[: len(self.unscaled)])
        array[self.features :] = self.intercept
        return array

    def assign(self, array: Array) -> None:
        """Set the weights to an array of this ``shape``."""
        self.scale = 1.0
        self._write(unscaled=array[: self.features].reshape(-1))
        if self.descent.intercept:
            self.intercept = self._intercept_of(array[self.features])

    def penalty(self) -> float:
        """Return the regularisation term of the loss, which takes one pass over N."""
        self.wait_for_peers()
        return self.descent.l2 / 2 * self.scale**2 * float(np.dot(self.unscaled, self.unscaled))

    def at(self, indices: Array) -> Array:
        """Return the weights at sorted positions, of shape (len(indices),) or (len(indices), K)."""
        self.wait_for_peers()
        inside = np.searchsorted(indices, self.features) if self.descent.intercept else len(indices)
        found = np.full(self._shape(len(indices)), self.intercept, self.unscaled.dtype)
        found[:inside] = self._by_feature(self.unscaled)[indices[:inside]] * self.scale
        return found

    def learned_at(self, features: Array) -> Array:
        """Return the entries of ``to_array`` for some features, in any order and with duplicates."""
        return self.at(features)

    @property
    def learned_intercept(self) -> Intercept:
        """The intercept in ``to_array``, unrounded."""
        return self.intercept

    def stretch(self, features: Array, factors: Array) -> None:
        """Multiply the weights of some distinct features by the factors by which samples have been divided since."""
        places, factors = self._places(features), np.repeat(factors, self.descent.width)
        self.note(places)
        self._stretch(places, factors)

    @property
    def current(self) -> bool:
        """True if ``unscaled`` includes all steps for every feature."""
        return True

    def scores(self, dataset: Dataset, rows: Array) -> Array:
        """Return ``w.x`` plus the intercept of some rows of this rank's samples, float64 of shape (len(rows),) or (len(rows), K)."""
        self.wait_for_peers()
        return self._scored(self.unscaled, dataset, rows)

    def compact_scores(self, samples: Rows, features: Array | None = None) -> Array:
        """Return the scores of all samples, whose features are numbers in ``features``, ascending, if given; see :class:`CompactBatch`."""
        self.wait_for_peers()
        unscaled, scores = self.unscaled if features is None else self._gathered(features), np.empty(self._shape(len(samples.starts)))
        fill_scores = kernels.compact_scores if self.columns is None else kernels.compact_column_scores

        def fill(low: int, high: int) -> None:
            entries, starts = (samples.indptr[low : high + 1], samples.indices, samples.values), samples.starts[low:high]
            fill_scores(*entries, starts, unscaled, scores[low:high])

        self._threads.share(self._threads.cuts(len(scores)), fill)
        return self._completed(scores)

    def _gathered(self, features: Array) -> Array:
        """Return the unscaled weights of some features."""
        return self._each_gathered(self.unscaled, features)

    def _each_gathered(self, array: Array, features: Array) -> Array:
        width = self.descent.width
        found = np.empty(len(features) * width, array.dtype)

        def gather(low: int, high: int) -> None:
            if self.columns is None:
                kernels.gather(array, features[low:high], found[low:high])
            else:
                kernels.gather_columns(array, features[low:high], width, found[low * width : high * width])

        self._threads.share(self._threads.cuts(len(features)), gather)
        return found

    def _scored(self, unscaled: Array, dataset: Dataset, rows: Array) -> Array:
        """Return the scores of rows, given unscaled weights."""
        scores = np.empty(self._shape(len(rows)))
        fill_scores = kernels.scores if self.columns is None else kernels.column_scores

        def fill(low: int, high: int) -> None:
            fill_scores(dataset.indptr, dataset.indices, dataset.values, rows[low:high], unscaled, scores[low:high])

        self._threads.share(self._threads.cuts(len(rows)), fill)
        return self._completed(scores)

    def _completed(self, scores: Array) -> Array:
        """Apply scale and intercept to scores that were computed with the unscaled weights, and return them."""
        if self.scale != 1.0:
            scores *= self.scale
        if self.columns is not None or self.intercept:
            scores += self.intercept
        return scores

    def final(self) -> Weights:
        """Return weights that score by the result, ``to_array``: these, or others if they differ."""
        return self

    def final_scores(self, dataset: Dataset) -> Array:
        """Return the scores of all of this rank's samples by the result."""
        return self.final().scores(dataset, np.arange(dataset.rows))

    def descend(self, gradient: SparseStream, rate: float) -> None:
        """Take one step of gradient descent in place: ``w = (1 - rate * l2) * w - rate * gradient``.

        Parameters
        ----------
        gradient : SparseStream
            Gradient in the dtype and size of the weights, sparse or dense; with columns of width K, or flat with one entry per weight.
        rate : float
            Learning rate; ``rate * l2`` must be below 1, with momentum below 1 - momentum.

        Raises
        ------
        DivergenceError
            If a weight that the gradient touches is not finite afterwards; with shared weights, ``wait_for_peers`` may raise it.
        """
        self.wait_for_peers()
        self.steps += 1
        self._rate = rate
        indices, values, slope = self._parted(gradient)
        if self._journal is not None:
            self.note(self._flat(indices, values)[0])
        self._shrink(1.0 - rate * self.descent.l2 * self.descent.penalty_factor)
        finite = self._subtract(indices, values, rate)
        self._subtract_intercept(slope, rate)
        if self._replica is not None:
            self._replica.meeting.arrive(finite)
            self._changing = finite = True
        self._check(finite and _is_finite(self.intercept))

    def warm_up(self, dataset: Dataset) -> None:
        """Compile what ``scores``, ``descend`` and ``to_array`` need for samples of this form; the weights do not change."""
        size = 2 + self.descent.intercept  # with one feature, arrays would have another memory layout
        if self.columns is not None:
            kernels.warm_up_columns(dataset.indices.dtype, dataset.values.dtype)
        others = type(self)(size, self.descent, self.unscaled.dtype)
        others.scores(dataset, np.arange(0))
        zeros, given = np.zeros(others._shape(size + self.sums), self.unscaled.dtype), size + self.sums
        nothing = SparseStream(np.empty(0, index_dtype(self.size + self.sums)), zeros[:0], given)
        for gradient in (nothing, SparseStream._dense_form(zeros, given)):
            others.descend(gradient, 0.0)
        others._gathered(np.empty(0, dataset.indices.dtype))
        others.to_array()

    def state(self) -> dict[str, Any]:
        """Return all that later steps depend on, as arrays and numbers."""
        self.wait_for_peers()
        # Checkpoints have always called it "direction".
        return {"steps": self.steps, "scale": self.scale, "direction": self.unscaled, "intercept": as_numbers(self.intercept)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the weights from a ``state``."""
        self.steps, self.scale, self.intercept = int(state["steps"]), float(state["scale"]), self._intercept_of(state["intercept"])
        self._write(unscaled=state["direction"])

    def memory(self) -> dict[str, Any]:
        """Return copies of the state of later steps other than the weights, for :meth:`remember`. Collective after ``share``.

        Arrays have one entry per feature.
        """
        self.wait_for_peers()
        return {"steps": self.steps}

    def remember(self, memory: dict[str, Any], stretch: Array | float = 1.0) -> None:
        """Restore the memory of a run with the same descent, after :meth:`assign`.

        Parameters
        ----------
        memory : dict
        stretch : ndarray or float
            Factor per feature by which weights have been multiplied since, because samples have been divided by it.
        """
        self.steps = int(memory["steps"])

    def _shared_names(self) -> list[str]:
        """Return the names of the arrays with one entry per feature."""
        return ["unscaled"]

    def _blocks(self) -> list[str]:
        """Return the names of the memory blocks that hold these arrays."""
        return self._shared_names()

    def _keep(self, name: str, block: Array) -> None:
        """Replace one of these blocks."""
        setattr(self, name, block)

    def _cuts(self, length: int) -> list[int]:
        """Return the threads + 1 bounds that divide this rank's part of ``length`` items among its threads."""
        return [length * part // self._parts for part in range(self._first, self._first + self._threads.count + 1)]

    def _own(self, length: int) -> slice:
        """Return this rank's part of ``length`` items."""
        cuts = self._cuts(length)
        return slice(cuts[0], cuts[-1])

    def _check(self, finite: bool) -> None:
        if not finite:
            lower = f"lower the learning rate ({self._rate:g} there)"
            raise DivergenceError(f"a weight is not finite after step {self.steps}: {lower}")

    def _meet(self) -> None:
        """Wait until all ranks reach this point of an update."""
        if self._replica is not None:
            self._replica.meeting.arrive()
            self._replica.meeting.wait()

    def _write(self, **arrays: Any) -> None:
        """Set the named arrays to these values."""
        self._changing = False
        self._meet()
        for name, values in arrays.items():
            array = getattr(self, name)
            own = self._own(len(array))
            array[own] = np.broadcast_to(values, len(array))[own]
        self._meet()

    def _shrink(self, factor: float) -> None:
        self.scale *= factor
        if self.scale < self._SMALLEST_SCALE:
            self.note(None)
            self._meet()
            self.unscaled[self._own(len(self.unscaled))] *= self.scale
            self.scale = 1.0
            self._meet()

    def _stretch(self, places: Array, factors: Array) -> None:
        self.unscaled[places] *= factors

    def _places(self, features: Array) -> Array:
        """Return the positions of the single weights of some features."""
        return features if self.columns is None else flat_indices(features, self.columns, self.size)

    def _parted(self, gradient: SparseStream) -> tuple[Array | None, Array, Intercept]:
        """Return indices (None if dense) and values of a gradient's features, and its entry for the intercept.

        Values of a sparse gradient with columns have the shape (features, K), and indices are those of features; if each weight has its own
        entry, both are flat, as for any dense gradient. See :meth:`_flat`.
        """
        features, weights = self.features, len(self.unscaled)
        if gradient.is_dense:
            values = gradient._stored.reshape(-1)
            return None, values[:weights], self._intercept_of(values[weights:]) if self.descent.intercept else 0.0
        indices, values = gradient.indices, gradient.values
        if values.ndim == 1 and self.columns is not None:
            inside = np.searchsorted(indices, weights)
            slope = np.zeros(self.columns)
            slope[indices[inside:].astype(np.int64) - weights] = values[inside:]
            return indices[:inside], values[:inside], slope
        if self.descent.intercept and len(indices) and indices[-1] == features:
            return indices[:-1], values[:-1], float(values[-1]) if self.columns is None else self._intercept_of(values[-1])
        return indices, values, 0.0

    def _flat(self, indices: Array | None, values: Array) -> tuple[Array | None, Array]:
        """Return indices and values of a gradient's features as those of single weights."""
        if values.ndim == 1 or indices is None:
            return indices, values
        return flat_indices(indices, self.descent.width, self.size), values.reshape(-1)

    def _subtract(self, indices: Array | None, values: Array, rate: float) -> bool:
        """Subtract the rate times this rank's part of the gradient from the weights; return True if the results are finite."""
        cuts = self._cuts(len(values))
        step = self.unscaled.dtype.type(rate / self.scale)
        subtract_at = kernels.descend if values.ndim == 1 else kernels.descend_columns

        def subtract(part: int) -> bool:
            if indices is None:
                mine = slice(cuts[part], cuts[part + 1])
                return bool(kernels.descend_dense(self.unscaled[mine], values[mine], step))
            return bool(subtract_at(self.unscaled, indices, values, step, self._first + part, self._parts))

        return all(self._threads.each(subtract))

    def _subtract_intercept(self, slope: Intercept, rate: float) -> None:
        self.intercept = self.intercept - rate * slope

    def _shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of an array with ``length`` scores or weights, per column if there are columns."""
        return (length,) if self.columns is None else (length, self.columns)

    def _by_feature(self, array: Array) -> Array:
        """Return a flat array with its columns as a second axis."""
        return array if self.columns is None else array.reshape(-1, self.columns)

    def _intercept_of(self, numbers: Any) -> Intercept:
        """Return an intercept as it is stored: a float, or a new float64 array with one number per column."""
        if self.columns is None:
            return float(np.asarray(numbers).item())
        return np.array(np.broadcast_to(numbers, self.columns), np.float64)


def flat_indices(features: Array, width: int, size: int) -> Array:
    """Return the positions of all columns of some features among the weights of ``size`` features with ``width`` columns.

    >>> flat_indices(np.uint32([1, 4]), 3, 5)
    array([ 3,  4,  5, 12, 13, 14], dtype=uint32)
    """
    dtype = index_dtype(size * width)
    places = features.astype(dtype)[:, np.newaxis] * dtype.type(width) + array_module(features).arange(width, dtype=dtype)
    return places.reshape(-1)  # type: ignore[no-any-return]


def zeros(size: int, descent: Descent, dtype: DTypeLike, numbers: int = 1) -> Array:
    """Return an array of ``numbers`` zeros per weight, not counting intercepts."""
    features, columns = size - descent.intercept, descent.width
    try:
        return np.zeros(features * columns * numbers, dtype)
    except (MemoryError, OverflowError, ValueError):
        nbytes = features * columns * numbers * np.dtype(dtype).itemsize
        needed = f"{features:,} features times {columns:,} columns of weights take {nbytes:.3g} bytes"
        raise DatasetError(f"{needed}, and there is no memory for them: use fewer features or classes") from None


def as_numbers(intercept: Intercept) -> float | tuple[float, ...]:
    """Return an intercept as plain numbers, which are not mistaken for an array with one entry per feature."""
    return tuple(intercept.tolist()) if isinstance(intercept, np.ndarray) else intercept


def _is_finite(intercept: Intercept) -> bool:
    return math.isfinite(intercept) if isinstance(intercept, float) else bool(np.isfinite(intercept).all())
