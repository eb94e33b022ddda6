"""Base class of aggregation strategies: how the gradients of all ranks update one model (thesis section 4.2.2)."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import AlgorithmError, MismatchError, StreamError
from sparseallreduce.linear import kernels
from sparseallreduce.linear.data.checks import own_samples
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.on_gpu import GpuSamples, room_for_samples
from sparseallreduce.linear.gradients.columns import new_batch
from sparseallreduce.linear.gradients.compact import CompactBatch
from sparseallreduce.linear.gradients.on_gpu import GpuBatch
from sparseallreduce.linear.models import Hinge, LinearModel
from sparseallreduce.linear.strategies.clock import Clock
from sparseallreduce.linear.weights import Descent, GpuWeights, Weights, batch_sums, check_on_gpu, new_gpu_weights, new_weights
from sparseallreduce.runtime.hosts import same_host, this_place
from sparseallreduce.runtime.objects import agreed, gather, gather_results, together
from sparseallreduce.runtime.threads import Threads
from sparseallreduce.streams.kernels.backend import device_module
from sparseallreduce.streams.stream import SparseStream

__all__ = ["Strategy"]

Array = NDArray[Any]
T = TypeVar("T")


class Strategy(ABC):
    """The parts of a training step that depend on how gradients are combined.

    A step is ``scores`` followed by ``step``, which is ``gradient`` and ``update``, on every rank that holds samples. Between
    steps the trainer may ask for the ``state``; after the last step of an epoch, or the one before a stop, it calls ``drain``: then
    ``weights`` include all steps so far, and are bitwise identical on every rank.

    A subclass that keeps a copy of the weights on every rank, as this class does, implements ``gradient`` and ``update``; one that
    keeps the weights elsewhere also implements the other methods. It checks its own arguments in ``_check_arguments``, and allocates
    memory in ``_prepare``: an error that these raise on one rank is raised on all. Creating a strategy is collective.

    Parameters
    ----------
    dataset : Dataset
        This rank's training samples; or all samples, the same on every rank, of which each rank takes its share.
    comm : communicator
        Communicator of all ranks of the training.
    descent : Descent, optional
        Rule by which a step updates the weights.
    threads : int, optional
        Number of threads of this rank that share the work on a batch. The results do not depend on it.
    device : {"cpu", "gpu"}
        Device for the work on samples and weights. "gpu" computes scores, derivatives, gradients and updates on a GPU, and sums gradients
        from there; it needs CuPy. The results are those of the host up to rounding.

    Attributes
    ----------
    dataset : Dataset
        The samples that this rank trains on, which subclasses have to use instead of the argument.
    size : int
        Number of weights, or of rows of K weights if the descent has columns, including the intercept.
    threads : Threads
        The threads.
    weights : Weights
        The model as this rank knows it; after ``drain`` the same on every rank.
    clock : Clock
        Times by phase: ``compute`` (scores and gradients), ``select`` (choosing entries to send), ``communicate`` (sending, receiving and
        adding), ``wait`` (for other ranks) and ``update`` (of the weights). The trainer sets a new clock for each epoch.
    given_densities, summed_densities : list of float
        For each step, the density of this rank's gradient, and that of the sum by which the weights changed. The trainer clears both lists
        after each epoch.

    Raises
    ------
    ValueError, TypeError
        On all ranks, if an argument of any rank is wrong.
    DatasetError
        On all ranks, if the arrays of any rank's data set are not as :class:`~sparseallreduce.linear.Dataset` requires.
    MismatchError
        On all ranks, if strategies, dtypes or features differ between ranks, or samples given as those of all ranks.
    StreamError
        On all ranks, if a rank that should use a GPU has none, or no CuPy.
    """

    name: str
    _batch: CompactBatch | GpuBatch  # set by strategies that have a batch
    #: Whether all workers take their steps together, so that they can communicate between two steps.
    in_step = True
    #: Whether no rank updates the weights in a step before all have computed their gradients: then ranks of a host can share a copy.
    in_unison = True
    #: Whether gradients can be sent together with sums over the samples of the batch, which AROW needs.
    sums_batches = False
    #: Whether this rank is a server, without samples.
    serves = False
    #: A checksum of the weights that were assigned last, or "zero".
    start: str = "zero"
    #: Whether the ranks of a host may share one copy of the weights; to be set before ``warm_up``.
    shares = True
    #: Whether ``warm_up`` has been called.
    warm: bool = False
    #: Allowed values of ``device``.
    devices: tuple[str, ...] = ("cpu",)
    #: Whether ``give_up`` reaches the other ranks wherever they wait, not only in their next sum.
    interrupts_waits = False

    def __init__(self, dataset: Dataset, comm: Any, descent: Descent | None = None, *, threads: int = 1, device: str = "cpu") -> None:
        self.comm = comm
        self.descent: Descent = descent or Descent()
        self.device = device
        self.clock: Clock = Clock()
        self.given_densities: list[float] = []
        self.summed_densities: list[float] = []
        together(comm, lambda: self._make(dataset, threads))

    def _make(self, dataset: Dataset, threads: int) -> None:
        """Store this rank's samples, and prepare for the steps. Collective."""
        self.threads: Threads = agreed(self.comm, lambda: self._begin(threads))
        self.dataset: Dataset = self._own(dataset)
        self._ranks_here = self._sharing()
        agreed(self.comm, self._prepare)

    def _own(self, dataset: Dataset) -> Dataset:
        """Return this rank's samples of a data set. Collective."""
        holders = self._holders(self.comm)
        return own_samples(dataset, self.comm, holders, f"strategy {self.name} on {holders} ranks with samples")

    def _begin(self, threads: int) -> Threads:
        """Return the threads after checking all arguments."""
        if not isinstance(self.descent, Descent):
            raise TypeError(f"descent must be a Descent, not {self.descent!r}")
        self._check_arguments()
        self._check_device(threads)
        if self.descent.second_order and not self.sums_batches:
            other = "use another update, or the strategy sparse or dense"
            raise AlgorithmError(f"the strategy {self.name} does not support the update arow: {other}")
        return Threads(threads)

    def _check_arguments(self) -> None:  # noqa: B027  # not abstract: some subclasses have no arguments
        """Raise an error if an argument stored by a subclass is wrong. Called on every rank before anything else; not collective."""

    def _check_device(self, threads: int) -> None:
        if self.device not in ("cpu", "gpu"):
            raise ValueError(f"device is 'cpu' or 'gpu', not {self.device!r}")
        if self.device not in self.devices:
            raise AlgorithmError(f"the strategy {self.name} works on the host: use dense, sparse or a lossy one, or device='cpu'")
        if self.on_gpu:
            if threads != 1:
                raise AlgorithmError("threads share the work of the host: leave them out, or use device='cpu'")
            check_on_gpu(self.descent)
        self.xp: Any = device_module() if self.on_gpu else np

    def _sharing(self) -> int:
        """Return the number of ranks that share the GPUs of this host. Collective."""
        if len(devices := set(gather(self.comm, self.device))) > 1:
            raise MismatchError(f"all ranks must train on one device, and there are {' and '.join(sorted(devices))}")
        return len(same_host(gather(self.comm, this_place()), self.comm.rank)) if self.on_gpu else 1

    @property
    def on_gpu(self) -> bool:
        """True if weights and gradients are in GPU memory."""
        return self.device == "gpu"

    def _prepare(self) -> None:
        """Allocate what the steps need, given this rank's samples. Called on every rank; not collective."""
        self.size: int = self.dataset.features + self.descent.intercept
        dtype = self.dataset.values.dtype
        if self.on_gpu:
            self._room = room_for_samples(self.xp, self._ranks_here)
            self.weights: Weights = new_gpu_weights(self.size, self.descent, dtype, self.xp, self._room)
        else:
            self.weights = new_weights(self.size, self.descent, dtype, self.threads)

    def _new_batch(self, buffers: int = 1) -> CompactBatch | GpuBatch:
        """Return the object that computes scores and gradients of batches, for strategies with sparse gradients or on a GPU."""
        if isinstance(self.weights, GpuWeights):
            self.weights.samples = GpuSamples(self.dataset, self.xp, self._room)
            return GpuBatch(self.weights.samples, self.size, self.columns, self.xp)
        return new_batch(self.dataset, self.size, self.threads, self.columns, buffers)

    @property
    def columns(self) -> int | None:
        """The number of scores per sample, K; None for a single score without an axis."""
        return self.descent.columns

    @property
    def workers_comm(self) -> Any:
        """A communicator of the ranks that hold samples; that of all ranks if there are no servers."""
        return self.comm

    def _holders(self, comm: Any) -> int:
        """Return the number of ranks that hold samples, which are the first ones."""
        return int(comm.size)

    @property
    def workers(self) -> int:
        """The number of ranks that hold samples: a global batch has ``batch_size * workers`` samples."""
        return int(self.workers_comm.size)

    def warm_up(self) -> None:
        """Compile the loops and set up communication, so that no epoch includes that time; the weights do not change. Collective."""
        self.warm = True
        if self.in_unison and self.shares:
            self.weights.share(self.comm, lambda seconds: self.clock.part("wait", seconds))
        if not self.on_gpu:
            kernels.warm_up(self.dataset.indices.dtype, self.dataset.values.dtype)
        self.weights.warm_up(self.dataset)
        rows = np.arange(min(1, self.dataset.rows))
        agreed(self.comm, lambda: self.gradient(rows, self.xp.ones(self._shape(len(rows)), self.dataset.values.dtype)))

    @property
    def between_sums(self) -> bool:
        """True if ranks have taken steps independently since their last sum, and cannot communicate before the next one."""
        return False

    def begin_pass(self, position: int, steps: int) -> None:  # noqa: B027  # not abstract: most strategies need no preparation
        """Prepare for the steps from ``position`` on, of ``steps`` in the pass."""

    def scores(self, rows: Array) -> Array:
        """Return ``w.x`` plus the intercept of this rank's rows, float64 of shape (len(rows),), or (len(rows), K) if weights have columns.

        On a GPU, the scores and the :meth:`coefficients` are in its memory.
        """
        if self.on_gpu:
            return self._batch.scores(rows, self.weights)
        return self.weights.scores(self.dataset, rows)

    def coefficients(self, model: LinearModel, rows: Array, scores: Array, count: int) -> Array:
        """Return the factor of each of these rows in the gradient: the derivative of the loss at its score, times the sample's weight.

        The factors have the dtype of the values, and are divided by ``count``; those of AROW, which needs a sum, are not divided.
        """
        if self.on_gpu:
            assert isinstance(self._batch, GpuBatch)
            return self._batch.coefficients(model, rows, scores, count)  # type: ignore[no-any-return]
        labels, weights = np.empty(len(rows)), self.dataset.weights
        kernels.gather(self.dataset.labels, rows, labels)
        if self.descent.second_order:
            assert isinstance(model, Hinge)
            derivatives, count = model.violation(scores, labels), 1
        else:
            derivatives = model.derivative(scores, labels)
        if weights is not None:
            derivatives = (derivatives.T * weights[rows]).T
        found = np.empty(scores.shape, self.dataset.values.dtype)
        np.divide(derivatives, count, out=found, casting="same_kind")
        return found

    @abstractmethod
    def gradient(self, rows: Array, coefficients: Array) -> SparseStream:
        """Return the sum of ``coefficients[i]`` (in the values' dtype) times this rank's row ``rows[i]``, valid until ``update`` returns.

        If weights have columns, there is one such sum per column, with ``coefficients[i, k]``, and the stream has width K.
        """

    def step(self, rows: Array, coefficients: Array, rate: float) -> None:
        """Call :meth:`gradient` and :meth:`update`, after :meth:`scores` of the same rows. The trainer calls this."""
        self.update(self.gradient(rows, coefficients), rate)

    @abstractmethod
    def update(self, gradient: SparseStream, rate: float) -> None:
        """Update the weights by the gradients of all ranks and the learning rate, now or in a later call.

        Raises
        ------
        DivergenceError
            On all ranks, if a weight is no longer finite.
        """

    def settle(self) -> None:  # noqa: B027  # not abstract: most strategies have no pending sums
        """Wait until all ranks have contributed to this step, before they communicate elsewhere; change nothing.

        Raises
        ------
        SparseAllreduceError
            If a rank has failed, and does not contribute.
        """

    def drain(self) -> None:
        """Wait until all updates are applied, and make ``weights`` equal on every rank. Collective, including servers."""
        self.weights.wait_for_peers()

    def finish(self) -> None:  # noqa: B027  # not abstract: with most strategies all is equal after every step
        """Make everything stored in ``weights`` equal on every rank. Called after ``drain`` when training is over. Collective."""

    def serve(self, asked_to_stop: Callable[[], str | None] = lambda: None) -> None:
        """On a rank that ``serves``, answer the workers until they drain; the trainer then calls ``drain`` here too.

        Once ``asked_to_stop`` returns a reason, it is passed on to the workers.
        """
        raise NotImplementedError(f"the strategy {self.name} has no servers")

    def ask_to_stop(self, reason: str) -> None:  # noqa: B027  # not abstract: workers that take steps together agree directly
        """On a worker between two steps, notify the other workers through the servers that training has to stop."""

    @property
    def received_stop(self) -> str | None:
        """The reason to stop training that a server has sent to this worker, or None."""
        return None

    def assign(self, array: Array) -> None:
        """Start from these weights, of shape (size,) or (size, K), the same on every rank. Collective; called before the first step.

        Raises
        ------
        StreamError, MismatchError
            On all ranks, if they do not have this shape, or differ between ranks.
        """
        self._check_start(array)
        self.weights.assign(array)

    def return_to(self, array: Array) -> None:
        """Restore these weights of an earlier step as the result. Collective.

        Adaptive weights keep the learning rates that they have reached; the effect of penalties is part of the weights.
        """
        memory = self.weights.memory() if self.descent.adaptive else None
        self.assign(array)
        if memory is not None:
            memory.pop("weights", None)
            self.weights.remember(memory | {"rates": 0.0})

    def state(self) -> dict[str, Any]:
        """Return all that later steps depend on, as numbers and arrays by name; complete on the first worker, which writes checkpoints.

        Collective over the workers, between two steps; servers take part in ``serve``. It changes nothing: later steps give bitwise
        the same results as without it, so pending sums are part of the state.
        """
        return self.weights.state()

    def drained_state(self) -> dict[str, Any]:
        """Return the ``state`` after ``drain``, when servers no longer answer. Collective over the workers."""
        return self.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a ``state``, which may come from another number of ranks. Collective; called before the first step."""
        self.weights.restore(state)

    def identity(self) -> dict[str, Any]:
        """Return the settings that must be the same for a run to continue from a checkpoint, under names that users know."""
        return {"strategy": self.name, **asdict(self.descent)}

    def measures(self) -> dict[str, Any]:
        """Return this strategy's own metrics of the epoch that ends, as JSON values. Collective; called after ``drain``."""
        return {}

    def meet(self, value: T) -> list[T]:
        """Return the values of all ranks at the end of an epoch; raise if a rank has given up. Collective."""
        return gather(self.comm, value)

    def give_up(self, error: Exception) -> Exception:
        """End pending communication after an error in a step; return the error to raise, of which the caller notifies other ranks."""
        return error

    def _descend(self, total: SparseStream, rate: float) -> None:
        """Update the weights by the sum of all gradients, as the last part of a step."""
        self.weights.descend(total, rate)
        self.clock.lap("update")

    def _check_start(self, array: Array) -> None:
        def check() -> None:
            if np.shape(array) != self._shape(self.size):
                wanted = f"{self.size}{'' if self.columns is None else f' times {self.columns}'} weights"
                raise StreamError(f"start from {wanted}, the intercept included, not from those of shape {np.shape(array)}")

        agreed(self.comm, check)
        checksums = gather_results(self.comm, lambda: zlib.crc32(np.ascontiguousarray(array).data))
        self.start = f"{checksums[self.comm.rank]:08x}"
        if len(set(checksums)) > 1:
            raise MismatchError("the weights to start from differ between ranks: give the same on all")

    def _sums(self, rows: Array, coefficients: Array) -> Array:
        """Return this rank's contribution to the sums of a batch."""
        counts = self.dataset.weights
        return batch_sums(coefficients, None if counts is None else counts[rows])

    def _shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of an array of ``length`` weights or scores, per column if there are columns."""
        return (length,) if self.columns is None else (length, self.columns)

    def _note(self, gradient: SparseStream, total: SparseStream) -> None:
        """Record the densities of a step."""
        self.given_densities.append(_density(gradient))
        self.summed_densities.append(_density(total))


def _density(stream: SparseStream) -> float:
    return 1.0 if stream.is_dense else stream.density
