"""What all reducers have in common: checked arguments, one operation at a time, the agreement that comes before it, and its state."""

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
from sparseallreduce.runtime.launching import Telling, launch
from sparseallreduce.streams.kernels.backend import MIXED, array_module, may_be_written, on_device
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from mpi4py import MPI

    from sparseallreduce.runtime.serial import SerialCommunicator

__all__ = ["Reduced", "Reducer", "ReducerOperation", "Reducing", "contributions"]

Array = NDArray[Any]


class Reduced(NamedTuple):
    """What an operation comes to."""

    update: SparseStream  # a sum over the ranks, the same on each to the bit
    # The indices of this rank's accumulator whose values are in that sum, in increasing order; slice(None) of a sum of all.
    contributed: Any


def contributions(contributed: Any, size: int) -> int:
    """How many values of an accumulator of this size have contributed."""
    return size if isinstance(contributed, slice) else len(contributed)


Reducing = Generator[Step, Any, Reduced]


class Reducer(ABC):
    """A lossy allreduce with its state; one for each tensor and rank.

    An operation that fails, whatever raises, leaves the state as it was, and the reducer ready for the next one. A rank that had all it
    needed by then has its result all the same, and counts the operation. The next one is then a MismatchError on all ranks, lest replicas
    that differ go on unnoticed: make them alike, as from a checkpoint, and :meth:`reset` or :meth:`restore` the reducers of all ranks.

    Parameters
    ----------
    size : int
        N, the elements of an accumulator.
    k : int
        How many of them to sum, about, from 1 to N (0 if N is 0).
    hosts : bool
        Whether the ranks of every host add their accumulators up first, and the hosts' sums are reduced: see
        :class:`~sparseallreduce.reducers.by_hosts.ByHosts`. The result then depends on which ranks are on which host.

    Attributes
    ----------
    returned : SparseStream or None
        Of the latest operation: partial sums that this rank took over from others and left out of the update, or what its own values lost
        as they were coded. Who keeps a residual adds them to it, or they are lost. With ``hosts``, all of its part of the host's sum but
        what is in the update.
    steps : int
        Operations completed.
    select_seconds : float
        Of the latest operation: how long this rank computed before it first said something, which is choosing what to send.
    reduction : Reduction
        What adds streams; its ``work`` is what the simulator charges.

    Raises
    ------
    StreamTypeError
        If ``size`` or ``k`` is no integer.
    AlgorithmError
        If ``size`` or ``k`` is out of range.
    """

    name: ClassVar[str]
    _changing: ClassVar[tuple[str, ...]] = ("steps", "returned")  # attributes that an operation changes, or replaces

    def __init__(self, size: int, k: int, *, hosts: bool = False) -> None:
        self.size = _integer("size", size)
        self.k = _integer("k", k)
        if self.size < 0:
            raise AlgorithmError(f"size is the number of elements of an accumulator, at least 0, not {size}")
        if not min(1, self.size) <= self.k <= self.size:
            raise AlgorithmError(f"k is the number of elements to sum, from 1 to the size, {size}, not {k}")
        self.steps = 0
        self.select_seconds = 0.0
        self.returned: SparseStream | None = None
        self.reduction = Reduction()
        self.hosts = bool(hosts)
        self._by_hosts = ByHosts(self._flat) if hosts else None
        self._generation = children.generation
        self._in_flight: weakref.ref[ReducerOperation] | None = None  # an operation that is forgotten, however that comes about, is over

    def __repr__(self) -> str:
        hosts = ", hosts=True" if self.hosts else ""
        return f"{type(self).__name__}(size={self.size}, k={self.k}{hosts}, steps={self.steps})"

    def allreduce(self, accumulator: Any, comm: MPI.Intracomm | SerialCommunicator | None = None) -> Reduced:
        """The sum over all ranks of what the system selects, and which of this rank's values are in it.

        Parameters
        ----------
        accumulator : ndarray of float32 or float64, shape (size,)
            Or anything with the buffer protocol, ``__array_interface__`` or DLPack, such as a PyTorch CPU tensor; it is read in place
            and left as it is. An array on a GPU, as of CuPy, is selected from there, and so it is on all ranks or on none.
        comm : mpi4py.MPI.Intracomm or SERIAL, optional
            ``MPI.COMM_WORLD`` by default.

        Returns
        -------
        update : SparseStream
            A sum, not a mean; the same on every rank, to the bit. It lies where the accumulator does.
        contributed : ndarray
            The indices, in increasing order, of the values of ``accumulator`` that are in it.

        Raises
        ------
        SparseAllreduceError
            On every rank the same: StreamTypeError or StreamError for an accumulator that does not fit, MismatchError if
            reducers, dtypes or the numbers of their operations differ, AlgorithmError if this reducer has one in flight.
        """
        with Telling(comm):
            result: Reduced = self.planned(accumulator).start(comm, blocking=True).wait()
            return result

    def iallreduce(
        self, accumulator: Any, comm: MPI.Intracomm | SerialCommunicator | None = None, *, progress: str = "manual"
    ) -> Request:
        """Start an :meth:`allreduce`, and return a request at once; ``accumulator`` has to stay as it is until that is done.

        If it is changed all the same, the sum is of what was there when this rank selected, which may be now or later.
        ``progress`` is that of :func:`sparseallreduce.iallreduce`. The selection is part of the operation: with "thread" it, too, runs
        beside the program. A reducer takes one operation at a time; those of several reducers may be in flight together.
        """
        with Telling(comm):
            return self.planned(accumulator).start(comm, blocking=False, progress=progress)

    def planned(self, accumulator: Any, *gradient: Any, kind: Callable[..., ReducerOperation] | None = None) -> ReducerOperation:
        """An operation about to start, during which this reducer takes no other.

        Nothing is raised here: a rank that left now would let the others wait.

        Parameters
        ----------
        accumulator : array
            With a gradient, a residual: an ndarray, which is increased by it on the way.
        *gradient : array or SparseStream
            None or one.
        kind : callable, optional
            Makes the operation, with the parameters of :class:`ReducerOperation`.
        """
        make = kind or ReducerOperation
        try:
            self._check_idle()
            vector = as_vector(accumulator, self.size)
            added = [self._checked_gradient(one, vector) for one in gradient]
            said = {"reducer": self.name, "size": self.size, "k": self.k, "dtype": vector.dtype.name, **self.options()}
            said["hosts first"] = self.hosts
            said["error feedback"] = bool(gradient)
            said["memory of the accumulators"] = "a GPU's" if on_device(vector) else "the host's"
            said["number of operations before this one"] = self.steps
            operation = make(self, Intent(tuple((name, str(value)) for name, value in said.items()), self.k), vector, *added)
        except BaseException as error:
            return make(self, Intent((), 0, error))
        self._in_flight = weakref.ref(operation)
        return operation

    def options(self) -> dict[str, Any]:
        """What besides size and k has to be the same on all ranks, by name."""
        return {}

    def schedule(self, accumulator: Array, gradient: Array | None, rank: int, ranks: int) -> Reducing:
        """As :meth:`reduce`, by hosts if that is so."""
        if self._by_hosts is None:
            return (yield from self.reduce(accumulator, gradient, rank, ranks))
        update, self.returned = yield from self._by_hosts.reduce(self, accumulator, gradient, rank, ranks)
        return Reduced(self.reduction.leave(update), slice(None))

    def _flat(self, size: int, k: int) -> Reducer:
        """One like this, of another vector, for which all ranks are alike."""
        raise AlgorithmError(f"{self.name} has no form by hosts: leave out hosts")

    @abstractmethod
    def reduce(self, accumulator: Array, gradient: Array | None, rank: int, ranks: int) -> Reducing:
        """The schedule behind the agreement.

        With ``gradient``, ``accumulator`` is increased by it before the first step, and neither is changed otherwise. If the operation
        fails, here or later, what it has changed of the reducer's state is taken back.
        """

    def reset(self) -> None:
        """Forget all operations, as if there had been none.

        Raises
        ------
        AlgorithmError
            If one is in flight.
        """
        self._check_idle()
        self.steps = 0
        self.returned = None
        if self._by_hosts is not None:
            self._by_hosts.reset()

    def state(self) -> dict[str, Any]:
        """All that later operations depend on, for checkpoints: numbers, texts and arrays by name.

        Raises
        ------
        AlgorithmError
            If an operation is in flight.
        """
        self._check_idle()
        own = {"reducer": self.name, "size": self.size, "k": self.k, "steps": self.steps}
        return own if self._by_hosts is None else own | self._by_hosts.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`.

        Raises
        ------
        CheckpointError
            If it is that of another kind of reducer, or of one for another size or k.
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
            raise AlgorithmError(f"this {self.name} has an operation in flight: wait for it, or take one reducer for each tensor")

    def _kept(self) -> dict[str, Any]:
        """What an operation changes, to be given to :meth:`_take_back`."""
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
                raise StreamError("the gradient lies in the memory of the residual, which changes: pass a copy")
        elif checked.size != self.size or checked.width is not None:
            shape = (checked.size,) if checked.width is None else (checked.size, checked.width)
            raise StreamError(f"this reducer takes gradients of shape ({self.size},), not {shape}")
        return checked


class ReducerOperation:
    """An operation of a reducer: what to tell the other ranks of it, and its schedule.

    The reducer is its own from :meth:`Reducer.planned` on, and until it is over: done, failed, abandoned or forgotten. What it has changed
    by then counts only if it is done.
    """

    def __init__(
        self, reducer: Reducer, intent: Intent, accumulator: Array | None = None, gradient: Array | SparseStream | None = None
    ) -> None:
        self.reducer = reducer
        self.intent = intent
        self.accumulator = accumulator
        self.gradient = gradient
        self._before: dict[str, Any] | None = None  # of the reducer, while this may have changed it

    def start(self, comm: Any, *, blocking: bool, progress: str = "manual") -> Request:
        """Start the operation over MPI."""
        try:
            return launch(comm, self.intent, self.run, close=self.abandon, blocking=blocking, progress=progress)
        except BaseException:
            self.abandon()  # it may not even have begun, as on what is no communicator, or be interrupted while others wait for it
            raise

    def run(self, rank: int, ranks: int) -> Generator[Step, Any, Any]:
        """The schedule behind the agreement."""
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
        """What comes before the selection."""
        if isinstance(self.gradient, SparseStream):
            assert self.accumulator is not None
            self.gradient.add_to(self.accumulator)
            self.gradient = None

    def completed(self, reduced: Reduced, ranks: int) -> Any:
        """The result of the operation, of what the reducer has come to."""
        return reduced

    def abandon(self) -> None:
        """Take back what is not done, and let the reducer go."""
        if self._owns():
            if self._before is not None:
                self.reducer._take_back(self._before)
            self.reducer._in_flight = None

    def _reduced(self, rank: int, ranks: int, start: float) -> Reducing:
        """The reducer's own schedule; the time from ``start`` to its first step is noted as that of selection."""
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
            raise AlgorithmError(f"this operation of {self.reducer.name} was given up on one of its ranks before it was done")


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise StreamTypeError(f"{name} must be an integer, not {value!r}") from None
