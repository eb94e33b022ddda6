"""The base class of reducers: checked arguments, agreement, one operation at a time, and the state."""

from __future__ import annotations

import operator
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.algorithms.staging import staged
from sparseallreduce.algorithms.steps import Step
from sparseallreduce.errors import AlgorithmError, CheckpointError, StreamError, StreamTypeError
from sparseallreduce.reducers.arrays import as_vector, nothing
from sparseallreduce.reducers.by_hosts import ByHosts
from sparseallreduce.runtime import children
from sparseallreduce.runtime.api import Request
from sparseallreduce.runtime.launching import ErrorReporter, launch
from sparseallreduce.streams.kernels.backend import MIXED, array_module, may_be_written, on_device
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from mpi4py import MPI

    from sparseallreduce.runtime.serial import SerialCommunicator

__all__ = ["Reduced", "Reducer", "ReducerOperation", "Reducing", "contributions"]

Array = NDArray[Any]


class Reduced(NamedTuple):
    """The result of a reducer's operation: the update, and the values of this rank that are in it."""

    update: SparseStream  # a sum over the ranks, bitwise identical on each
    # Increasing indices of this rank's accumulator whose values are in that sum; slice(None) for all.
    contributed: Any


def contributions(contributed: Any, size: int) -> int:
    """Return how many values of an accumulator of this size have contributed."""
    return size if isinstance(contributed, slice) else len(contributed)


Reducing = Generator[Step, Any, Reduced]


class Reducer(ABC):
    """A lossy allreduce with its state; create one for each tensor on each rank.

    An operation that fails leaves the state unchanged, and the reducer ready for the next one. A rank that already had everything it needed
    still returns its result and counts the operation. The next operation then raises MismatchError on all ranks, so that different replicas
    are noticed: make the replicas equal, for example from a checkpoint, and :meth:`reset` or :meth:`restore` the reducers of all ranks.

    Parameters
    ----------
    size : int
        N, the number of elements of an accumulator.
    k : int
        Approximate number of elements to sum, from 1 to N (0 if N is 0).
    hosts : bool
        Whether the ranks of every host first add their accumulators, and the hosts' sums are then reduced: see
        :class:`~sparseallreduce.reducers.by_hosts.ByHosts`. The result then depends on which ranks are on which host.

    Attributes
    ----------
    returned : SparseStream or None
        Partial sums of the latest operation that this rank received and that are not in the update, or the quantisation errors of its own
        values. Add them to a residual, or they are lost. With ``hosts``, this rank's part of the host's sum without what is in the update.
    steps : int
        Number of completed operations.
    select_seconds : float
        Time that this rank computed in the latest operation before its first message, which is the selection.
    reduction : Reduction
        Adds streams; the simulator charges its ``work``.

    Raises
    ------
    StreamTypeError
        If ``size`` or ``k`` is not an integer.
    AlgorithmError
        If ``size`` or ``k`` is out of range.
    """

    name: ClassVar[str]
    _changing: ClassVar[tuple[str, ...]] = ("steps", "returned")  # attributes that an operation modifies or replaces

    def __init__(self, size: int, k: int, *, hosts: bool = False) -> None:
        self.size: int = _integer("size", size)
        self.k: int = _integer("k", k)
        if self.size < 0:
            raise AlgorithmError(f"size is the number of elements of an accumulator, at least 0, not {size}")
        if not min(1, self.size) <= self.k <= self.size:
            raise AlgorithmError(f"k is the number of elements to sum, from 1 to the size, {size}, not {k}")
        self.steps: int = 0
        self.select_seconds: float = 0.0
        self.returned: SparseStream | None = None
        self.reduction: Reduction = Reduction()
        self.hosts: bool = bool(hosts)
        self._by_hosts = ByHosts(self._flat) if hosts else None
        self._generation = children.generation
        self._in_flight: weakref.ref[ReducerOperation] | None = None  # a weak reference: an operation that is garbage-collected is over

    def __repr__(self) -> str:
        hosts = ", hosts=True" if self.hosts else ""
        return f"{type(self).__name__}(size={self.size}, k={self.k}{hosts}, steps={self.steps})"

    def allreduce(self, accumulator: Any, comm: MPI.Intracomm | SerialCommunicator | None = None) -> Reduced:
        """Return the sum over all ranks of selected values, and the indices of this rank's values in it.

        Parameters
        ----------
        accumulator : ndarray of float32 or float64, shape (size,)
            Or any object with the buffer protocol, ``__array_interface__`` or DLPack, such as a PyTorch CPU tensor. It is read in place and
            not modified. If it is on a GPU, such as a CuPy array, values are selected there; all ranks or none must pass GPU arrays.
        comm : mpi4py.MPI.Intracomm or SERIAL, optional
            ``MPI.COMM_WORLD`` by default.

        Returns
        -------
        update : SparseStream
            A sum, not a mean; bitwise identical on every rank. It is on the GPU if the accumulator is.
        contributed : ndarray
            The indices, in increasing order, of the values of ``accumulator`` in the sum.

        Raises
        ------
        SparseAllreduceError
            The same error on every rank: StreamTypeError or StreamError for an unsuitable accumulator, MismatchError if reducers, dtypes or
            the numbers of their operations differ, AlgorithmError if this reducer has an operation in flight.
        """
        with ErrorReporter(comm):
            result: Reduced = self.planned(accumulator).start(comm, blocking=True).wait()
            return result

    def iallreduce(self, accumulator: Any, comm: MPI.Intracomm | SerialCommunicator | None = None, *, progress: str = "manual") -> Request:
        """Start an :meth:`allreduce` and return a request immediately; do not modify ``accumulator`` until it is complete.

        If it is modified nevertheless, the sum contains the values at the time of this rank's selection, which may be now or later.
        ``progress`` is as in :func:`sparseallreduce.iallreduce`. The selection is part of the operation and, with "thread", also runs in
        the background. A reducer has one operation at a time; operations of several reducers may be in flight together.
        """
        with ErrorReporter(comm):
            return self.planned(accumulator).start(comm, blocking=False, progress=progress)

    def planned(self, accumulator: Any, *gradient: Any, kind: Callable[..., ReducerOperation] | None = None) -> ReducerOperation:
        """Return an operation that is about to start, and reserve this reducer for it.

        Nothing is raised here, since a rank that raised now would let the other ranks wait.

        Parameters
        ----------
        accumulator : array
            With a gradient, it is a residual, an ndarray to which the gradient is added.
        *gradient : array or SparseStream
            At most one.
        kind : callable, optional
            Creates the operation, with the parameters of :class:`ReducerOperation`.

        Returns
        -------
        ReducerOperation
            It has the error, if the arguments are wrong.
        """
        make = kind or ReducerOperation
        try:
            self._check_idle()
            vector = as_vector(accumulator, self.size)
            added = [self._checked_gradient(one, vector) for one in gradient]
            described = {"reducer": self.name, "size": self.size, "k": self.k, "dtype": vector.dtype.name, **self.options()}
            described["hosts first"] = self.hosts
            described["error feedback"] = bool(gradient)
            described["memory of the accumulators"] = "a GPU's" if on_device(vector) else "the host's"
            described["number of operations before this one"] = self.steps
            operation = make(self, Intent(tuple((name, str(value)) for name, value in described.items()), self.k), vector, *added)
        except BaseException as error:
            return make(self, Intent((), 0, error))
        self._in_flight = weakref.ref(operation)
        return operation

    def options(self) -> dict[str, Any]:
        """Return what must be equal on all ranks in addition to size and k, by name."""
        return {}

    def schedule(self, accumulator: Array, gradient: Array | None, rank: int, ranks: int) -> Reducing:
        """Return the schedule of :meth:`reduce`, by hosts if requested."""
        if self._by_hosts is None:
            return (yield from self.reduce(accumulator, gradient, rank, ranks))
        update, self.returned = yield from self._by_hosts.reduce(self, accumulator, gradient, rank, ranks)
        return Reduced(self.reduction.leave(update), slice(None))

    def _flat(self, size: int, k: int) -> Reducer:
        """Return a reducer with the same settings for a vector of another size, without hosts."""
        raise AlgorithmError(f"{self.name} cannot reduce between hosts: leave out hosts")

    @abstractmethod
    def reduce(self, accumulator: Array, gradient: Array | None, rank: int, ranks: int) -> Reducing:
        """Return the schedule that follows the agreement.

        ``gradient``, if given, is added to ``accumulator`` before the first step; neither is modified otherwise. If the operation fails,
        here or later, its changes to the reducer's state are undone.
        """

    def divisor(self, ranks: int) -> int | Array:
        """Return what error feedback divides the update of the latest operation by: the number of ranks, or a number for each value."""
        return ranks

    def reset(self) -> None:
        """Reset the state to that of a new reducer.

        Raises
        ------
        AlgorithmError
            If an operation is in flight.
        """
        self._check_idle()
        self.steps = 0
        self.returned = None
        if self._by_hosts is not None:
            self._by_hosts.reset()

    def state(self) -> dict[str, Any]:
        """Return everything that later operations depend on, for checkpoints: numbers, strings and arrays by name.

        Raises
        ------
        AlgorithmError
            If an operation is in flight.
        """
        self._check_idle()
        own = {"reducer": self.name, "size": self.size, "k": self.k, "steps": self.steps}
        return own if self._by_hosts is None else own | self._by_hosts.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state`.

        Raises
        ------
        CheckpointError
            If it belongs to another kind of reducer, or to another size or k.
        AlgorithmError
            If an operation is in flight.
        """
        ours = self.state()
        for term in ("reducer", "size", "k"):
            if state.get(term) != ours[term]:
                raise CheckpointError(f"this state is of a reducer with {term} {state.get(term)!r}, and this one has {ours[term]!r}")
        self.steps = int(state["steps"])
        self.returned = None
        if self._by_hosts is not None:
            self._by_hosts.restore(state)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_in_flight": None}  # a copy has no operation

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._generation = children.generation  # a copy belongs to the process that has made it

    def _check_idle(self) -> None:
        children.check_generation(self._generation, f"this {self.name}")
        if self._in_flight is not None and self._in_flight() is not None:
            raise AlgorithmError(f"this {self.name} has an operation in flight: wait for it, or use one reducer for each tensor")

    def _kept(self) -> dict[str, Any]:
        """Return what an operation may change, for :meth:`_take_back`."""
        by_hosts = {} if self._by_hosts is None else {"by hosts": self._by_hosts.kept()}
        return {name: getattr(self, name) for name in self._changing} | by_hosts

    def _take_back(self, kept: dict[str, Any]) -> None:
        if self._by_hosts is not None:
            self._by_hosts.take_back(kept.pop("by hosts"))
        vars(self).update(kept)

    def _checked_gradient(self, gradient: Any, residual: Array) -> Array | SparseStream:
        checked = gradient if isinstance(gradient, SparseStream) else as_vector(gradient, self.size)
        if checked.dtype != residual.dtype:
            raise StreamTypeError(f"the gradient is of {checked.dtype}, but the residual of {residual.dtype}: convert one of them")
        place = checked._stored if isinstance(checked, SparseStream) else checked
        if on_device(place) != on_device(residual):
            raise StreamTypeError(MIXED)
        if not may_be_written(residual):
            raise StreamError("the residual is read-only, and a gradient cannot be added to it: make it writeable")
        if not isinstance(checked, SparseStream):
            if array_module(residual).may_share_memory(checked, residual):
                raise StreamError("the gradient shares memory with the residual, which changes: pass a copy")
        elif checked.size != self.size or checked.width is not None:
            shape = (checked.size,) if checked.width is None else (checked.size, checked.width)
            raise StreamError(f"this reducer takes gradients of shape ({self.size},), not {shape}")
        return checked


class ReducerOperation:
    """An operation of a reducer: its intent for the agreement, and its schedule.

    It reserves the reducer from :meth:`Reducer.planned` on until it is done, failed, abandoned or garbage-collected. Its changes to the
    reducer's state are kept only if it is done.
    """

    def __init__(
        self, reducer: Reducer, intent: Intent, accumulator: Array | None = None, gradient: Array | SparseStream | None = None
    ) -> None:
        self.reducer = reducer
        self.intent = intent
        self.accumulator = accumulator
        self.gradient = gradient
        self._before: dict[str, Any] | None = None  # state of the reducer before the operation, while it may have to be restored

    def start(self, comm: Any, *, blocking: bool, progress: str = "manual") -> Request:
        """Start the operation over MPI."""
        try:
            return launch(comm, self.intent, self.run, close=self.abandon, blocking=blocking, progress=progress)
        except BaseException:
            self.abandon()  # it may not have started, for example with an invalid communicator
            raise

    def run(self, rank: int, ranks: int) -> Generator[Step, Any, Any]:
        """Return the schedule that follows the agreement."""
        try:
            self._check_owner()
            self._before = self.reducer._kept()
            start = perf_counter()
            self.take_in()
            outcome = self.completed((yield from self._reduced(rank, ranks, start)), ranks)
            self.reducer.steps += 1
            self._before = None
            return outcome
        finally:
            self.abandon()

    def take_in(self) -> None:
        """Add a sparse gradient, before the selection."""
        if isinstance(self.gradient, SparseStream):
            assert self.accumulator is not None
            self.gradient.add_to(self.accumulator)
            self.gradient = None

    def completed(self, reduced: Reduced, ranks: int) -> Any:
        """Return the result of the operation, given that of the reducer."""
        return reduced

    def abandon(self) -> None:
        """Undo the changes of an unfinished operation, and release the reducer."""
        if self._owns():
            if self._before is not None:
                self.reducer._take_back(self._before)
            self.reducer._in_flight = None

    def _reduced(self, rank: int, ranks: int, start: float) -> Reducing:
        """Run the reducer's own schedule; the time from ``start`` to its first step is recorded as the selection time."""
        accumulator, reducer = self.accumulator, self.reducer
        assert accumulator is not None
        assert not isinstance(self.gradient, SparseStream)
        reducer.returned = nothing(reducer.size, accumulator)
        schedule: Any = reducer.schedule(accumulator, self.gradient, rank, ranks)
        if not isinstance(accumulator, np.ndarray):
            schedule = staged(schedule, array_module(accumulator), True, accumulator.dtype)
        with closing(schedule):
            try:
                step = next(schedule)
            except StopIteration as stop:
                alone: Reduced = stop.value
                return alone
            finally:
                reducer.select_seconds = perf_counter() - start
            while True:
                value = yield step
                self._check_owner()
                try:
                    step = schedule.send(value)
                except StopIteration as stop:
                    reduced: Reduced = stop.value
                    return reduced

    def _owns(self) -> bool:
        in_flight = self.reducer._in_flight
        return in_flight is not None and in_flight() is self

    def _check_owner(self) -> None:
        if not self._owns():
            raise AlgorithmError(f"one rank has abandoned this operation of {self.reducer.name} before it was done")


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise StreamTypeError(f"{name} must be an integer, not {value!r}") from None
