"""The weights of a linear model, and how a step of gradient descent changes them without a pass over all of them."""

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
Intercept = float | Array  # one number, or with columns one a column


class Weights(Journalled):
    """The weight vector w, kept as ``scale * unscaled``; and the intercept, which is the last entry where there is one.

    The L2 term shrinks all weights at every step. Here that is one product of two numbers, so that a step costs as much as the
    gradient has entries and not N. When the scale gets small it is multiplied into the unscaled weights, which is the only pass over N.

    If the descent has columns, there are K weights a feature and K intercepts, all of one scale, and gradients are row-sparse streams of
    width K. Those of a feature lie together: the arrays kept here are flat, and column k of feature i is entry ``i * K + k``.

    Parameters
    ----------
    size : int
        Entries, or rows of K: the features, and one for the intercept. Gradients are streams of this size.
    descent : Descent, optional
    dtype : optional
        float32 or float64, that of the gradients.
    threads : Threads, optional
        Threads that share the work; how many there are changes no bit.

    Examples
    --------
    >>> w = Weights(3, Descent(l2=0.2))
    >>> w.descend(SparseStream([1], np.float32([2]), 3), rate=0.5)
    >>> w.descend(SparseStream([2], np.float32([4]), 3), rate=0.5)
    >>> w.to_array()
    array([ 0. , -0.9, -2. ], dtype=float32)
    """

    # A scale this small is still far from where float32 loses precision (1e-38), and reached seldom: after 140,000 steps at
    # rate * l2 = 1e-4.
    _SMALLEST_SCALE = 1e-6
    _NUMBERS: tuple[str, ...] = ("steps", "scale", "intercept", "_rate")

    #: Numbers that follow a gradient, sums over the samples of its batch.
    sums = 0

    def __init__(self, size: int, descent: Descent | None = None, dtype: DTypeLike = np.float32, threads: Threads | None = None) -> None:
        self.size = size
        self.descent = descent or Descent()
        self._threads = threads or Threads()
        self.steps = 0
        self.scale = 1.0
        self.columns = self.descent.columns
        self.unscaled = zeros(size, self.descent, dtype)
        self.intercept: Intercept = self._intercept_of(0.0)
        self._replica: Replica | None = None
        self._changing = False  # whether other ranks may still be making their changes
        self._rate = 0.0  # of the last step
        self._waited: Callable[[float], object] = float
        self._first, self._parts = 0, self._threads.count  # of all parts of a change, the first that is for this rank's threads

    def share(self, comm: Any, waited: Callable[[float], object]) -> None:
        """Keep one replica for all ranks of each host, of which each changes a part, if that is of any use; collective.

        From then on ``assign``, ``descend`` and ``restore`` are collective over the ranks of the host, and no rank may call ``descend``
        while another may still read the weights: ranks that sum their gradients before see to that. Who reads weights waits until the
        others have made their changes, tells ``waited`` how many seconds that took, and raises what ``descend`` would.
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
        """Have these threads share the work from now on; of weights that no ranks share."""
        self._threads = threads
        self._first, self._parts = 0, threads.count

    def wait_for_peers(self) -> None:
        """Wait until all ranks have made the changes of the last step.

        Raises
        ------
        DivergenceError
            If a weight is no finite number after it; on all ranks.
        """
        if self._changing and self._replica is not None:
            self._changing = False
            begin = time.perf_counter()
            all_well = self._replica.meeting.wait()
            self._waited(time.perf_counter() - begin)
            self._check(all_well)

    @property
    def features(self) -> int:
        """How many features there are."""
        return self.size - self.descent.intercept

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weights: (size,), or (size, K) with K columns."""
        return self._shape(self.size)

    def to_array(self) -> Array:
        """A copy of the weights, of this shape, with the intercept last."""
        self.wait_for_peers()
        array = np.empty(self.shape, self.unscaled.dtype)
        np.multiply(self.unscaled, self.scale, out=array.reshape(-1)[: len(self.unscaled)])
        array[self.features :] = self.intercept
        return array

    def assign(self, array: Array) -> None:
        """Start from these weights, of this shape."""
        self.scale = 1.0
        self._write(unscaled=array[: self.features].reshape(-1))
        if self.descent.intercept:
            self.intercept = self._intercept_of(array[self.features])

    def penalty(self) -> float:
        """The regularisation term of the loss; one pass over N."""
        self.wait_for_peers()
        return self.descent.l2 / 2 * self.scale**2 * float(np.dot(self.unscaled, self.unscaled))

    def at(self, indices: Array) -> Array:
        """The weights at sorted positions, of shape (len(indices),), or (len(indices), K)."""
        self.wait_for_peers()
        inside = np.searchsorted(indices, self.features) if self.descent.intercept else len(indices)
        found = np.full(self._shape(len(indices)), self.intercept, self.unscaled.dtype)
        found[:inside] = self._by_feature(self.unscaled)[indices[:inside]] * self.scale
        return found

    def learned_at(self, features: Array) -> Array:
        """What ``to_array`` says of some features, in any order and as often as they are given."""
        return self.at(features)

    @property
    def learned_intercept(self) -> Intercept:
        """What ``to_array`` says of the intercept, unrounded."""
        return self.intercept

    def stretch(self, features: Array, factors: Array) -> None:
        """Multiply the weights of some features, each given once, because samples have been divided by these factors since."""
        places, factors = self._places(features), np.repeat(factors, self.descent.width)
        self.note(places)
        self._stretch(places, factors)

    @property
    def current(self) -> bool:
        """Whether ``unscaled`` is what all steps have led to, at every feature."""
        return True

    def scores(self, dataset: Dataset, rows: Array) -> Array:
        """``w.x`` plus the intercept of the given rows of this rank's samples, float64 of shape (len(rows),), or (len(rows), K)."""
        self.wait_for_peers()
        return self._scored(self.unscaled, dataset, rows)

    def compact_scores(self, samples: Rows, features: Array | None = None) -> Array:
        """The scores of all samples, whose features are only these of all, increasing, if any are given; see :class:`CompactBatch`."""
        self.wait_for_peers()
        unscaled, scores = self.unscaled if features is None else self._gathered(features), np.empty(self._shape(len(samples.starts)))
        fill_scores = kernels.compact_scores if self.columns is None else kernels.compact_column_scores

        def fill(low: int, high: int) -> None:
            entries, starts = (samples.indptr[low : high + 1], samples.indices, samples.values), samples.starts[low:high]
            fill_scores(*entries, starts, unscaled, scores[low:high])

        self._threads.share(self._threads.cuts(len(scores)), fill)
        return self._completed(scores)

    def _gathered(self, features: Array) -> Array:
        """The unscaled weights at some features."""
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
        """The scores of rows by unscaled weights of as many features."""
        scores = np.empty(self._shape(len(rows)))
        fill_scores = kernels.scores if self.columns is None else kernels.column_scores

        def fill(low: int, high: int) -> None:
            fill_scores(dataset.indptr, dataset.indices, dataset.values, rows[low:high], unscaled, scores[low:high])

        self._threads.share(self._threads.cuts(len(rows)), fill)
        return self._completed(scores)

    def _completed(self, scores: Array) -> Array:
        """Scores by the unscaled weights, with scale and intercept."""
        if self.scale != 1.0:
            scores *= self.scale
        if self.columns is not None or self.intercept:
            scores += self.intercept
        return scores

    def final(self) -> Weights:
        """What has been learned, ``to_array``, as weights that give scores: these, or others where they are not the same."""
        return self

    def final_scores(self, dataset: Dataset) -> Array:
        """The scores of all of this rank's samples by what has been learned."""
        return self.final().scores(dataset, np.arange(dataset.rows))

    def descend(self, gradient: SparseStream, rate: float) -> None:
        """One step of gradient descent in place: ``w = (1 - rate * l2) * w - rate * gradient``.

        Parameters
        ----------
        gradient : SparseStream
            Of the dtype of the weights and this size, in either form; with columns of width K, or flat, with an entry for every weight.
        rate : float
            Learning rate; ``rate * l2`` must be below 1, with momentum below 1 - momentum.

        Raises
        ------
        DivergenceError
            If a weight that the gradient touches is not finite afterwards; where a replica is shared, ``wait_for_peers`` may raise it.
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
            self._replica.meeting.come(finite)
            self._changing = finite = True
        self._check(finite and _is_finite(self.intercept))

    def warm_up(self, dataset: Dataset) -> None:
        """Compile what ``scores``, ``descend`` and ``to_array`` need for such samples; the weights stay as they are."""
        size = 2 + self.descent.intercept  # features of a single one would lie as in other arrays
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
        """All that later steps depend on, as arrays and numbers."""
        self.wait_for_peers()
        # By "direction" checkpoints have called it from the first.
        return {"steps": self.steps, "scale": self.scale, "direction": self.unscaled, "intercept": as_numbers(self.intercept)}

    def restore(self, state: dict[str, Any]) -> None:
        """Become what the weights were when ``state`` was taken."""
        self.steps, self.scale, self.intercept = int(state["steps"]), float(state["scale"]), self._intercept_of(state["intercept"])
        self._write(unscaled=state["direction"])

    def memory(self) -> dict[str, Any]:
        """What later steps depend on beside the weights, for a run that goes on from these: see :meth:`remember`. Collective as ``share``.

        Copies, of which those of an array have an entry for every feature.
        """
        self.wait_for_peers()
        return {"steps": self.steps}

    def remember(self, memory: dict[str, Any], stretch: Array | float = 1.0) -> None:
        """Go on with this memory of a run with the same descent, after :meth:`assign`.

        Parameters
        ----------
        memory : dict
        stretch : ndarray or float
            Per feature, what weights have been multiplied by since, because samples have been divided by it.
        """
        self.steps = int(memory["steps"])

    def _shared_names(self) -> list[str]:
        """Of the arrays with an entry for every feature."""
        return ["unscaled"]

    def _blocks(self) -> list[str]:
        """Of the arrays in memory that hold those."""
        return self._shared_names()

    def _keep(self, name: str, block: Array) -> None:
        """Have one of those arrays from now on."""
        setattr(self, name, block)

    def _cuts(self, length: int) -> list[int]:
        """Where to cut this rank's share of so many things for its threads: threads + 1 bounds."""
        return [length * part // self._parts for part in range(self._first, self._first + self._threads.count + 1)]

    def _own(self, length: int) -> slice:
        """This rank's share of so many things."""
        cuts = self._cuts(length)
        return slice(cuts[0], cuts[-1])

    def _check(self, finite: bool) -> None:
        if not finite:
            lower = f"lower the learning rate ({self._rate:g} there)"
            raise DivergenceError(f"a weight is no finite number after step {self.steps}: {lower}")

    def _meet(self) -> None:
        """Wait until all ranks have made a change, in the middle of one or apart from steps."""
        if self._replica is not None:
            self._replica.meeting.come()
            self._replica.meeting.wait()

    def _write(self, **arrays: Any) -> None:
        """Make the arrays of these names hold these values."""
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
        """Those of the single weights of some features."""
        return features if self.columns is None else flat_indices(features, self.columns, self.size)

    def _parted(self, gradient: SparseStream) -> tuple[Array | None, Array, Intercept]:
        """The indices (None if dense) and values of a gradient's features, and its entry of the intercept.

        Values of a sparse gradient with columns have the shape (features, K), and indices are those of features; where each weight has an
        entry of its own, both are flat, as of any dense gradient. See :meth:`_flat`.
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
        """Indices and values of a gradient's features as those of single weights, for loops over these."""
        if values.ndim == 1 or indices is None:
            return indices, values
        return flat_indices(indices, self.descent.width, self.size), values.reshape(-1)

    def _subtract(self, indices: Array | None, values: Array, rate: float) -> bool:
        """Take this rank's share of the gradient, times the rate, from the weights; returns whether what becomes of them is finite."""
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
        """Of an array with so many scores, or weights, a column."""
        return (length,) if self.columns is None else (length, self.columns)

    def _by_feature(self, array: Array) -> Array:
        """A flat array with its columns as a second axis."""
        return array if self.columns is None else array.reshape(-1, self.columns)

    def _intercept_of(self, numbers: Any) -> Intercept:
        """A number, or one for each column, as an intercept is kept: a float, or a float64 array of its own."""
        if self.columns is None:
            return float(np.asarray(numbers).item())
        return np.array(np.broadcast_to(numbers, self.columns), np.float64)


def flat_indices(features: Array, width: int, size: int) -> Array:
    """The places of all columns of some features among the weights of ``size`` features, of so many columns each.

    >>> flat_indices(np.uint32([1, 4]), 3, 5)
    array([ 3,  4,  5, 12, 13, 14], dtype=uint32)
    """
    dtype = index_dtype(size * width)
    places = features.astype(dtype)[:, np.newaxis] * dtype.type(width) + array_module(features).arange(width, dtype=dtype)
    return places.reshape(-1)  # type: ignore[no-any-return]


def zeros(size: int, descent: Descent, dtype: DTypeLike, numbers: int = 1) -> Array:
    """So many zeros for every weight but the intercepts."""
    features, columns = size - descent.intercept, descent.width
    try:
        return np.zeros(features * columns * numbers, dtype)
    except (MemoryError, OverflowError, ValueError):
        nbytes = features * columns * numbers * np.dtype(dtype).itemsize
        needed = f"{features:,} features times {columns:,} columns of weights take {nbytes:.3g} bytes"
        raise DatasetError(f"{needed}, and there is no memory for them: take fewer features or classes") from None


def as_numbers(intercept: Intercept) -> float | tuple[float, ...]:
    """An intercept as plain numbers, which are not taken for a part of the features."""
    return tuple(intercept.tolist()) if isinstance(intercept, np.ndarray) else intercept


def _is_finite(intercept: Intercept) -> bool:
    return math.isfinite(intercept) if isinstance(intercept, float) else bool(np.isfinite(intercept).all())
