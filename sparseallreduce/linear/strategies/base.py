"""What an aggregation strategy is: how the gradients of all ranks change one model (thesis section 4.2.2)."""

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
from sparseallreduce.runtime.objects import agreed, gather, together, told
from sparseallreduce.runtime.threads import Threads
from sparseallreduce.streams.kernels.backend import device_module
from sparseallreduce.streams.stream import SparseStream

__all__ = ["Strategy"]

Array = NDArray[Any]
T = TypeVar("T")


class Strategy(ABC):
    """The steps of training that depend on how gradients are brought together.

    A step is ``scores`` and ``step``, which is ``gradient`` and ``update``, in this order, on every rank that holds samples. Between
    steps the trainer may ask for the ``state``; after the last step of an epoch, or the one before a stop, it calls ``drain``: then
    ``weights`` are those that all steps so far led to, on every rank to the bit.

    A subclass with a replica of the weights on every rank, which this class keeps, writes ``gradient`` and ``update``; one that
    keeps the weights elsewhere also writes the other methods. It checks its own arguments in ``_check_arguments``, and makes what
    takes memory in ``_prepare``: what these raise on one rank is raised on all.

    Parameters
    ----------
    dataset : Dataset
        This rank's training samples; or all there are, the same on every rank, of which this one takes its share.
    comm : communicator
        All ranks of the run, which make their strategies together.
    descent : Descent, optional
        How a step changes the weights.
    threads : int, optional
        Threads of this rank, which share the work on a batch; how many there are changes no bit.
    device : {"cpu", "gpu"}
        Where the work on samples and weights is done: on a GPU, scores, derivatives, gradients and updates are made there, and gradients
        are summed from there. It takes CuPy. Results are those of the host but for rounding.

    Attributes
    ----------
    dataset : Dataset
        The samples that this rank trains on: what a subclass reads, rather than what it was given.
    size : int
        Entries of the weights, or rows of K where the descent has columns, the intercept included.
    threads : Threads
        The threads.
    weights : Weights
        The model as far as this rank knows it; after ``drain`` the same on every rank.
    clock : Clock
        To be told where the time goes: ``compute`` (scores and gradients), ``select`` (choosing entries to send), ``communicate``
        (sending, receiving and adding up), ``wait`` (for others) and ``update`` (of the weights). A new one for every epoch.
    given_densities, summed_densities : list of float
        For each step, the share of entries in the gradient that this rank gave, and in the sum that changed the weights. The
        trainer empties them after every epoch.

    Raises
    ------
    ValueError, TypeError
        On all ranks alike, if an argument of any rank is wrong.
    DatasetError
        On all ranks alike, if the arrays of any rank's data set are not what :class:`~sparseallreduce.linear.Dataset` says.
    MismatchError
        On all ranks alike, if strategies, dtypes or features differ, or samples that are said to be all.
    StreamError
        On all ranks alike, if one that is to work on a GPU has none, or no CuPy.
    """

    name: str
    _batch: CompactBatch | GpuBatch  # of those that have one
    #: Whether all workers take their steps together, so that they can agree on things between two steps.
    in_step = True
    #: Whether no rank changes the weights in a step before all have computed their gradients of it: then those of a host share a replica.
    in_unison = True
    #: Whether gradients can bring sums over the samples of the batch, which AROW needs.
    sums_batches = False
    #: Whether this rank holds no samples, and serves those that do.
    serves = False
    #: What stands for the weights that were assigned last; these are zero at first.
    start = "zero"
    #: Whether the ranks of a host may share a replica of the weights; to be said before ``warm_up``.
    shares = True
    #: Whether ``warm_up`` has been called.
    warm = False
    #: Where the work on samples and weights may be done, by the names of ``device``.
    devices: tuple[str, ...] = ("cpu",)
    #: Whether ``give_up`` reaches the other ranks wherever they wait, not in their next sum alone.
    heard_anywhere = False

    def __init__(self, dataset: Dataset, comm: Any, descent: Descent | None = None, *, threads: int = 1, device: str = "cpu") -> None:
        self.comm = comm
        self.descent = descent or Descent()
        self.device = device
        self.clock = Clock()
        self.given_densities: list[float] = []
        self.summed_densities: list[float] = []
        together(comm, lambda: self._make(dataset, threads))

    def _make(self, dataset: Dataset, threads: int) -> None:
        """Keep this rank's samples, and make what steps need; collective."""
        self.threads = agreed(self.comm, lambda: self._begin(threads))
        self.dataset = self._own(dataset)
        self._ranks_here = self._sharing()
        agreed(self.comm, self._prepare)

    def _own(self, dataset: Dataset) -> Dataset:
        """This rank's samples of a data set; collective."""
        holders = self._holders(self.comm)
        return own_samples(dataset, self.comm, holders, f"strategy {self.name} on {holders} ranks with samples")

    def _begin(self, threads: int) -> Threads:
        """The threads, if the arguments are right."""
        if not isinstance(self.descent, Descent):
            raise TypeError(f"descent must be a Descent, not {self.descent!r}")
        self._check_arguments()
        self._check_device(threads)
        if self.descent.second_order and not self.sums_batches:
            other = "take another update, or the strategy sparse or dense"
            raise AlgorithmError(f"the strategy {self.name} does without the update arow: {other}")
        return Threads(threads)

    def _check_arguments(self) -> None:  # noqa: B027  # not abstract: some have none of their own
        """Raise if the arguments that a subclass has kept are wrong. On every rank, before anything else; not collective."""

    def _check_device(self, threads: int) -> None:
        if self.device not in ("cpu", "gpu"):
            raise ValueError(f"device is 'cpu' or 'gpu', not {self.device!r}")
        if self.device not in self.devices:
            raise AlgorithmError(f"the strategy {self.name} works on the host: take dense, sparse or a lossy one, or device='cpu'")
        if self.on_gpu:
            if threads != 1:
                raise AlgorithmError("threads share the work of the host: leave them out, or take device='cpu'")
            check_on_gpu(self.descent)
        self.xp = device_module() if self.on_gpu else np

    def _sharing(self) -> int:
        """How many ranks share the GPUs of this host; collective."""
        if len(devices := set(gather(self.comm, self.device))) > 1:
            raise MismatchError(f"all ranks must train on one device, and there are {' and '.join(sorted(devices))}")
        return len(same_host(gather(self.comm, this_place()), self.comm.rank)) if self.on_gpu else 1

    @property
    def on_gpu(self) -> bool:
        """Whether weights and gradients lie on a GPU."""
        return self.device == "gpu"

    def _prepare(self) -> None:
        """Make what steps need, of the samples of this rank. On every rank; not collective."""
        self.size = self.dataset.features + self.descent.intercept
        dtype = self.dataset.values.dtype
        if self.on_gpu:
            self._room = room_for_samples(self.xp, self._ranks_here)
            self.weights: Weights = new_gpu_weights(self.size, self.descent, dtype, self.xp, self._room)
        else:
            self.weights = new_weights(self.size, self.descent, dtype, self.threads)

    def _new_batch(self, buffers: int = 1) -> CompactBatch | GpuBatch:
        """What makes scores and gradients of batches, for strategies that have sparse gradients, or work on a GPU."""
        if isinstance(self.weights, GpuWeights):
            self.weights.samples = GpuSamples(self.dataset, self.xp, self._room)
            return GpuBatch(self.weights.samples, self.size, self.columns, self.xp)
        return new_batch(self.dataset, self.size, self.threads, self.columns, buffers)

    @property
    def columns(self) -> int | None:
        """Scores of a sample, K; None if it has one, without an axis for it."""
        return self.descent.columns

    @property
    def workers_comm(self) -> Any:
        """A communicator of the ranks that hold samples; the one of all ranks where there are no servers."""
        return self.comm

    def _holders(self, comm: Any) -> int:
        """How many ranks, the first ones, hold samples."""
        return int(comm.size)

    @property
    def workers(self) -> int:
        """Ranks that hold samples: a global batch has ``batch_size * workers`` samples."""
        return int(self.workers_comm.size)

    def warm_up(self) -> None:
        """Compile the loops and meet the other ranks, so that this counts in no epoch; the weights stay. Collective."""
        self.warm = True
        if self.in_unison and self.shares:
            self.weights.share(self.comm, lambda seconds: self.clock.part("wait", seconds))
        if not self.on_gpu:
            kernels.warm_up(self.dataset.indices.dtype, self.dataset.values.dtype)
        self.weights.warm_up(self.dataset)
        rows = np.arange(min(1, self.dataset.rows))
        agreed(self.comm, lambda: self.gradient(rows, self.xp.ones(self._shape(len(rows)), self.dataset.values.dtype)))

    @property
    def apart(self) -> bool:
        """Whether ranks have taken steps by themselves since they last met, and agree on nothing before they meet again."""
        return False

    def begin_pass(self, position: int, steps: int) -> None:  # noqa: B027  # not abstract: most do the same in every step
        """Be told that the steps from ``position`` on come next, of so many in the pass."""

    def scores(self, rows: Array) -> Array:
        """``w.x`` plus the intercept of this rank's rows, float64 of shape (len(rows),), or (len(rows), K) where weights have columns.

        On a GPU where the strategy works there, and so are :meth:`coefficients`.
        """
        if self.on_gpu:
            return self._batch.scores(rows, self.weights)
        return self.weights.scores(self.dataset, rows)

    def coefficients(self, model: LinearModel, rows: Array, scores: Array, count: int) -> Array:
        """What the gradient has of each of these rows, by their scores: the derivative of the loss, times what the sample counts.

        Of the dtype of the values, and divided by ``count``; but of AROW, which goes by a sum, by one.
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
        """The sum of ``coefficients[i]`` (of the values' dtype) times this rank's row ``rows[i]``; valid until ``update`` returns.

        Where weights have columns, there is such a sum a column, of ``coefficients[i, k]``, and the stream is of width K.
        """

    def step(self, rows: Array, coefficients: Array, rate: float) -> None:
        """:meth:`gradient` and :meth:`update` in one, after :meth:`scores` of the same rows; what the trainer calls."""
        self.update(self.gradient(rows, coefficients), rate)

    @abstractmethod
    def update(self, gradient: SparseStream, rate: float) -> None:
        """Have the gradients of all ranks change the weights by the learning rate, now or soon.

        Raises
        ------
        DivergenceError
            If a weight is no longer finite; on all ranks alike.
        """

    def settle(self) -> None:  # noqa: B027  # not abstract: most have nothing in flight
        """Wait until all ranks have given what this step needs of them, before they meet elsewhere; it changes nothing.

        Raises
        ------
        SparseAllreduceError
            If one has failed, and so does not come.
        """

    def drain(self) -> None:
        """Wait until all updates are applied, and make ``weights`` the same on every rank. Collective, servers included."""
        self.weights.wait_for_peers()

    def finish(self) -> None:  # noqa: B027  # not abstract: most have it so after every step
        """After ``drain``, when training is over: make all that ``weights`` hold the same on every rank. Collective."""

    def serve(self, asked_to_stop: Callable[[], str | None] = lambda: None) -> None:
        """On a rank that ``serves``: answer the workers until they drain; the trainer then calls ``drain`` here too.

        Once ``asked_to_stop`` gives a reason, the workers are told it.
        """
        raise NotImplementedError(f"the strategy {self.name} has no servers")

    def ask_to_stop(self, reason: str) -> None:  # noqa: B027  # not abstract: workers in step ask each other
        """On a worker between two steps: let the others know, by the servers, that training is to stop."""

    @property
    def told_to_stop(self) -> str | None:
        """Why training is to stop, where a server has told this worker so."""
        return None

    def assign(self, array: Array) -> None:
        """Start from these weights, of shape (size,) or (size, K), the same on every rank. Collective, before the first step.

        Raises
        ------
        StreamError, MismatchError
            On all ranks alike, if they are not of this shape, or differ between ranks.
        """
        self._check_start(array)
        self.weights.assign(array)

    def return_to(self, array: Array) -> None:
        """Have these weights, of an earlier step, be what has been learned; collective.

        Adaptive weights keep what gradients have told of their rates; what penalties come to is in the weights.
        """
        memory = self.weights.memory() if self.descent.adaptive else None
        self.assign(array)
        if memory is not None:
            memory.pop("weights", None)
            self.weights.remember(memory | {"rates": 0.0})

    def state(self) -> dict[str, Any]:
        """All that later steps depend on, as numbers and arrays by name; whole on the first worker, which writes checkpoints.

        Collective over the workers, between two steps, which servers answer in ``serve``. It changes nothing: later steps do to the
        bit what they would have done without it, so what is in flight is part of the state.
        """
        return self.weights.state()

    def drained_state(self) -> dict[str, Any]:
        """As ``state``, but after ``drain``, when servers no longer answer. Collective over the workers."""
        return self.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a ``state``, perhaps one that another number of ranks has taken. Collective, before the first step."""
        self.weights.restore(state)

    def identity(self) -> dict[str, Any]:
        """What of this strategy must be the same for a run to go on from a checkpoint, by names that users know."""
        return {"strategy": self.name, **asdict(self.descent)}

    def measures(self) -> dict[str, Any]:
        """What this strategy alone has to report of the epoch that ends, as JSON can express it. Collective, after ``drain``."""
        return {}

    def meet(self, value: T) -> list[T]:
        """Return what every rank gives at the end of an epoch, where ranks may still hear that one has given up. Collective."""
        return gather(self.comm, value)

    def give_up(self, error: Exception) -> Exception:
        """End what is under way where a step has raised; return the error to raise here, of which the other ranks are told behind that."""
        return error

    def _descend(self, total: SparseStream, rate: float) -> None:
        """Have the sum of all gradients change the weights: the last that a step does."""
        self.weights.descend(total, rate)
        self.clock.lap("update")

    def _check_start(self, array: Array) -> None:
        def check() -> None:
            if np.shape(array) != self._shape(self.size):
                wanted = f"{self.size}{'' if self.columns is None else f' times {self.columns}'} weights"
                raise StreamError(f"start from {wanted}, the intercept included, not from those of shape {np.shape(array)}")

        agreed(self.comm, check)
        checksums = told(self.comm, lambda: zlib.crc32(np.ascontiguousarray(array).data))
        self.start = f"{checksums[self.comm.rank]:08x}"
        if len(set(checksums)) > 1:
            raise MismatchError("the weights to start from differ between ranks: give the same on all")

    def _sums(self, rows: Array, coefficients: Array) -> Array:
        """What this rank adds to the sums of a batch."""
        counts = self.dataset.weights
        return batch_sums(coefficients, None if counts is None else counts[rows])

    def _shape(self, length: int) -> tuple[int, ...]:
        """Of an array with so many weights, or scores, a column."""
        return (length,) if self.columns is None else (length, self.columns)

    def _note(self, gradient: SparseStream, total: SparseStream) -> None:
        """Write down the densities of a step."""
        self.given_densities.append(_density(gradient))
        self.summed_densities.append(_density(total))


def _density(stream: SparseStream) -> float:
    return 1.0 if stream.is_dense else stream.density
