"""Weights of a linear model on a GPU, plain and adaptive, with the same update rules as on the host."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.errors import AlgorithmError, DatasetError
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.on_gpu import GpuSamples, TakenRows
from sparseallreduce.linear.weights.descent import Descent
from sparseallreduce.linear.weights.plain import Intercept, Weights, as_numbers
from sparseallreduce.streams.kernels.backend import as_host
from sparseallreduce.streams.stream import SparseStream

__all__ = ["GpuAdaptiveWeights", "GpuWeights", "check_on_gpu", "new_gpu_weights"]

Array = NDArray[Any]


def check_on_gpu(descent: Descent) -> None:
    """Raise AlgorithmError if weights on a GPU do not support this update rule."""
    refused = {
        f"the update {descent.update}": descent.second_order,
        "momentum": bool(descent.momentum),
        "an average of the weights": descent.averages,
        "an L1 penalty with the update sgd": bool(descent.l1) and not descent.adaptive,
    }
    for what, holds in refused.items():
        if holds:
            raise AlgorithmError(f"weights on a GPU do not support {what}: leave it out, or use device='cpu'")


def new_gpu_weights(size: int, descent: Descent, dtype: DTypeLike, xp: Any, room: int) -> GpuWeights:
    """Return zero weights on a GPU, as :func:`~sparseallreduce.linear.weights.new_weights`; ``room`` is for the samples to score."""
    return (GpuAdaptiveWeights if descent.adaptive else GpuWeights)(size, descent, dtype, xp, room)


class GpuWeights(Weights):
    """Weights whose arrays and gradients are in GPU memory.

    After each step one number per intercept and one flag are copied to the host. States are those of :class:`Weights`, on the host: a run
    on a GPU can be resumed on the host, and the other way round.

    Parameters
    ----------
    size, descent, dtype
        As for :class:`Weights`.
    xp : module
        CuPy.
    room : int
        Bytes of GPU memory for samples to score: see :class:`~sparseallreduce.linear.data.on_gpu.GpuSamples`.

    Attributes
    ----------
    samples : GpuSamples or None
        Training samples, which are in GPU memory already.
    """

    samples: GpuSamples | None = None
    xp: Any
    size: int
    descent: Descent
    columns: int | None
    steps: int
    unscaled: Any

    def __init__(self, size: int, descent: Descent, dtype: DTypeLike, xp: Any, room: int) -> None:
        check_on_gpu(descent)
        self.xp, self.size, self.descent, self.columns = xp, size, descent, descent.columns
        self._room = room
        self._kernels = import_module("sparseallreduce.linear.kernels.cuda.weights")
        self._rows = import_module("sparseallreduce.linear.kernels.cuda.rows")
        self.steps, self.scale, self._rate = 0, 1.0, 0.0
        self._replica, self._changing = None, False
        entries = self.features * descent.width
        try:
            self._allocate(entries, np.dtype(dtype))
        except MemoryError:
            nbytes = entries * np.dtype(dtype).itemsize
            raise DatasetError(f"there is no memory on the GPU for weights of {nbytes:,} bytes: use fewer features or classes") from None
        self._shifts = xp.zeros(descent.width + 1, np.float64)  # intercepts, and a flag that a value is no longer finite
        self.intercept: Intercept = self._intercept_of(0.0)

    def _allocate(self, entries: int, dtype: np.dtype[Any]) -> None:
        self.unscaled = self.xp.zeros(entries, dtype)

    def share(self, comm: Any, waited: Callable[[float], object]) -> None:
        """Do nothing, because each rank keeps its own weights, even if ranks share a GPU."""

    def shared_by(self, threads: Any) -> None:
        """Do nothing, because the GPU's threads do the work."""

    def warm_up(self, dataset: Dataset) -> None:
        """Do nothing, because kernels are compiled in the first step."""

    def to_array(self) -> Array:
        array = np.empty(self.shape, self.unscaled.dtype)
        np.multiply(as_host(self.unscaled), self.scale, out=array.reshape(-1)[: len(self.unscaled)])
        array[self.features :] = self.intercept
        return array

    def at(self, indices: Array) -> Array:
        return self.to_array()[indices.astype(np.int64)]

    def penalty(self) -> float:
        return self.descent.l2 / 2 * self.scale**2 * float(self.xp.dot(self.unscaled, self.unscaled)) if self.descent.l2 else 0.0

    def stretch(self, features: Array, factors: Array) -> None:
        raise NotImplementedError("weights on a GPU are not stretched: features are scaled while they are on the host")

    def final_scores(self, dataset: Dataset) -> Array:
        return self.scores(dataset, None)

    def scores(self, dataset: Dataset, rows: Array | None) -> Array:
        """Return the scores on the host, like :meth:`Weights.scores`; ``rows`` None means all.

        Rows that are not on the GPU are copied there in parts that fit.
        """
        samples = self.samples
        if samples is None or samples.dataset is not dataset:
            samples = GpuSamples(dataset, self.xp, self._room, whole=False)
        found = np.empty(self._shape(dataset.rows if rows is None else len(rows)))
        done = 0
        for part in samples.parts() if rows is None else np.array_split(rows, max(1, -(-len(rows) // _ROWS))):
            found[done : done + len(part)] = as_host(self.row_scores(samples.take(part)))
            done += len(part)
        return found

    def row_scores(self, taken: TakenRows) -> Any:
        """Return ``w.x`` plus the intercept of rows on the GPU, in GPU memory, of shape (rows,) or (rows, K)."""
        given = self._rows.Taken(*taken[:4])
        found = self._rows.scores(given, self.unscaled, self._shifts[:-1], self.scale, self.xp, **self._reading())
        return found if self.columns is None else found.reshape(-1, self.columns)

    def _reading(self) -> dict[str, Any]:
        """Return how kernels compute a weight, if it is not stored in ``unscaled`` as it is."""
        return {}

    def descend(self, gradient: SparseStream, rate: float) -> None:
        self.steps += 1
        self._rate = rate
        self._shrink(1.0 - rate * self.descent.l2 * self.descent.penalty_factor)
        values = gradient._stored
        width = 1 if values.ndim == 1 else values.shape[1]
        self._change(None if gradient.is_dense else gradient.indices, values.reshape(-1), width, rate)
        *shifts, fault = as_host(self._shifts).tolist()
        self.intercept = self._intercept_of(shifts)
        self._check(not fault)

    def _change(self, indices: Any, values: Any, width: int, rate: float) -> None:
        step = self.unscaled.dtype.type(rate / self.scale)
        self._kernels.descend(self.unscaled, indices, values, width, step, rate, self._shifts[:-1], self._shifts[-1:], self.xp)

    def state(self) -> dict[str, Any]:
        direction = as_host(self.unscaled)
        return {"steps": self.steps, "scale": self.scale, "direction": direction, "intercept": as_numbers(self.intercept)}

    def restore(self, state: dict[str, Any]) -> None:
        self.steps, self.scale, self.intercept = int(state["steps"]), float(state["scale"]), self._intercept_of(state["intercept"])
        self._write(unscaled=state["direction"])

    def assign(self, array: Array) -> None:
        self.scale = 1.0
        self.intercept = self._intercept_of(array[self.features] if self.descent.intercept else 0.0)
        self._write(unscaled=array[: self.features].reshape(-1))

    def assign_model(self, weights: Array, intercept: Any) -> None:
        """Set these weights, of shape (features,) or (features, K), and intercepts, which are not rounded."""
        self.scale, self.intercept = 1.0, self._intercept_of(intercept)
        self._write(unscaled=weights.reshape(-1))

    def _write(self, **arrays: Any) -> None:
        for name, values in arrays.items():
            getattr(self, name)[:] = self.xp.asarray(np.ascontiguousarray(np.broadcast_to(values, len(getattr(self, name)))))
        self._shifts[:-1] = self.xp.asarray(np.atleast_1d(np.asarray(self.intercept, np.float64)))
        self._shifts[-1:] = 0.0

    def _shrink(self, factor: float) -> None:
        self.scale *= factor
        if self.scale < self._SMALLEST_SCALE:
            self.unscaled *= self.unscaled.dtype.type(self.scale)
            self.scale: float = 1.0


class GpuAdaptiveWeights(GpuWeights):
    """The :class:`AdaptiveWeights` on a GPU: FTRL-Proximal."""

    def _allocate(self, entries: int, dtype: np.dtype[Any]) -> None:
        super()._allocate(entries, dtype)
        self._norms = self.xp.zeros(entries, dtype)
        self._intercept_norms = self.xp.zeros(self.descent.width, np.float64)
        self._rates = 0.0

    @property
    def _read(self) -> Any:
        """The factors from which a weight is computed."""
        return self.xp.asarray(np.array([self.descent.beta, self.descent.l1 * self._rates, self.descent.l2 * self._rates]))

    @property
    def current(self) -> bool:
        return not (self._rates and (self.descent.l1 or self.descent.l2))

    def to_array(self) -> Array:
        array = np.empty(self.shape, self.unscaled.dtype)
        read = self.unscaled if self.current else self._kernels.read_adaptive(self.unscaled, self._norms, self._read, self.xp)
        array.reshape(-1)[: len(read)] = as_host(read)
        array[self.features :] = self.intercept
        return array

    def penalty(self) -> float:
        l1, l2 = self.descent.l1, self.descent.l2
        if not (l1 or l2):
            return 0.0
        weights = self.to_array()[: self.features].reshape(-1)
        return l2 / 2 * float(np.dot(weights, weights)) + l1 * float(np.abs(weights).sum(dtype=np.float64))

    def _reading(self) -> dict[str, Any]:
        return {} if self.current else {"norms": self._norms, "read": self._read, "weight_at": self._kernels.adaptive_weight}

    def _shrink(self, factor: float) -> None:
        """Do nothing, because penalties are applied when a weight is read."""

    def _change(self, indices: Any, values: Any, width: int, rate: float) -> None:
        penalties = self.descent.l1 * self._rates, self.descent.l2 * self._rates
        kept = self.unscaled, self._norms
        further = rate, self.descent.beta, penalties, self.descent.intercept_value
        numbers = self._shifts[:-1], self._intercept_norms, self._shifts[-1:]
        self._kernels.descend_adaptively(*kept, indices, values, width, *further, *numbers, self.xp)
        self._rates += rate

    def state(self) -> dict[str, Any]:
        norms = as_numbers(self._intercept_of(as_host(self._intercept_norms)))
        return super().state() | {"norms": as_host(self._norms), "rates": self._rates, "intercept_norm": norms}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._write(_norms=np.abs(state["norms"]))
        self._rates = float(state["rates"])
        self._intercept_norms[:] = self.xp.asarray(np.atleast_1d(np.asarray(state["intercept_norm"], np.float64)))

    def assign(self, array: Array) -> None:
        super().assign(array)
        self._norms[:] = 0
        self._intercept_norms[:] = 0
        self._rates = 0.0

    def memory(self) -> dict[str, Any]:
        memory = super().memory() | {"norms": as_host(self._norms), "rates": self._rates}
        memory["intercept_norm"] = as_host(self._intercept_norms)
        if not self.current:
            memory["weights"] = as_host(self.unscaled)  # before penalties
        return memory

    def remember(self, memory: dict[str, Any], stretch: Array | float = 1.0) -> None:
        self.steps: int = int(memory["steps"])
        self._rates = memory["rates"]
        self._write(_norms=memory["norms"] / stretch)
        if "weights" in memory:
            self._write(unscaled=memory["weights"] * stretch)
        self._intercept_norms[:] = self.xp.asarray(memory["intercept_norm"])


_ROWS = 1 << 14  # rows of a data set scored in one call
