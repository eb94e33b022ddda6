"""What all reducers have in common: checked arguments, one operation at a time, and the agreement that comes before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import Intent, agree
from sparseallreduce.algorithms.steps import Step
from sparseallreduce.errors import AlgorithmError, SparseAllreduceError, StreamError, StreamTypeError
from sparseallreduce.runtime import mpi
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream, index_dtype

if TYPE_CHECKING:
    from mpi4py import MPI

    from sparseallreduce.runtime.serial import SerialCommunicator

__all__ = ["Plan", "Reduced", "Reducer", "Reducing"]

Array = NDArray[Any]


class Reduced(NamedTuple):
    """What an operation comes to."""

    update: SparseStream  # a sum over the ranks, the same on each to the bit
    contributed: Array  # the indices of this rank's accumulator whose values are in that sum, in increasing order


Reducing = Generator[Step, Any, Reduced]


class Reducer(ABC):
    """A lossy allreduce with its state; one for each tensor and rank.

    Parameters
    ----------
    size : int
        N, the elements of an accumulator.
    k : int
        How many of them to sum, about, from 1 to N (0 if N is 0).

    Attributes
    ----------
    returned : SparseStream
        Of the latest operation: partial sums that this rank took over from others and left out of the update. Who keeps a residual
        adds them to it, or they are lost.
    steps : int
        Operations completed.
    select_seconds : float
        Of the latest operation: how long this rank computed before it first said something, which is choosing what to send.

    Raises
    ------
    AlgorithmError
        If ``size`` or ``k`` is out of range.
    """

    name: ClassVar[str]

    def __init__(self, size: int, k: int) -> None:
        if size < 0:
            raise AlgorithmError(f"size is the number of elements of an accumulator, at least 0, not {size}")
        if not min(1, size) <= k <= size:
            raise AlgorithmError(f"k is the number of elements to sum, from 1 to the size, {size}, not {k}")
        self.size = int(size)
        self.k = int(k)
        self.steps = 0
        self.select_seconds = 0.0
        self.returned: SparseStream | None = None
        self.reduction = Reduction()  # its ``work`` is what the simulator charges
        self._busy = False

    def allreduce(self, accumulator: Any, comm: MPI.Intracomm | SerialCommunicator | None = None) -> Reduced:
        """The sum over all ranks of what the system selects, and which of this rank's values are in it.

        Parameters
        ----------
        accumulator : ndarray of float32 or float64, shape (size,)
            Or anything with the buffer protocol, ``__array_interface__`` or DLPack. It is left as it is.
        comm : mpi4py.MPI.Intracomm or SERIAL, optional
            ``MPI.COMM_WORLD`` by default.

        Returns
        -------
        update : SparseStream
            A sum, not a mean; the same on every rank, to the bit.
        contributed : ndarray
            The indices, in increasing order, of the values of ``accumulator`` that are in it.

        Raises
        ------
        SparseAllreduceError
            On every rank the same: StreamTypeError or StreamError for an accumulator that does not fit, MismatchError if
            reducers, dtypes or the numbers of their operations differ, AlgorithmError if this reducer has one in flight.
        """
        result: Reduced = self.start(accumulator, None, comm, blocking=True).wait()
        return result

    def iallreduce(self, accumulator: Any, comm: MPI.Intracomm | SerialCommunicator | None = None) -> mpi.Request:
        """Start an :meth:`allreduce`, and return a request at once; ``accumulator`` has to stay as it is until that is done."""
        return self.start(accumulator, None, comm, blocking=False)

    def start(self, accumulator: Any, gradient: Any, comm: Any, *, blocking: bool) -> mpi.Request:
        """Start an operation, as error feedback does: ``accumulator``, a residual, is increased by ``gradient`` on the way."""
        plan = self.planned(accumulator, gradient)
        return mpi.launch(comm, plan.intent, plan.agree_and_run, blocking=blocking)

    def planned(self, accumulator: Any, gradient: Any = None) -> Plan:
        """An operation about to start, during which this reducer takes no other.

        Nothing is raised here: a rank that left now would let the others wait.
        """
        try:
            if self._busy:
                raise AlgorithmError(f"this {self.name} has an operation in flight: wait for it, or take one reducer for each tensor")
            arrays = [_checked(array, self.size) for array in (accumulator, gradient) if array is not None]
            if len({array.dtype for array in arrays}) > 1:
                raise StreamTypeError(f"the gradient is of {arrays[1].dtype}, but the residual of {arrays[0].dtype}")
        except SparseAllreduceError as error:
            return Plan(self, Intent((), 0, error))
        said = {"reducer": self.name, "size": self.size, "k": self.k, "dtype": arrays[0].dtype.name, **self.options()}
        said["number of operations before this one"] = self.steps
        terms = tuple((name, str(value)) for name, value in said.items())
        self._busy = True
        return Plan(self, Intent(terms, self.k), *arrays)

    def state(self) -> dict[str, Any]:
        """What later operations of this rank's reducer depend on, as numbers and arrays that JSON can express as lists."""
        return {"steps": self.steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Become what the reducer was when ``state`` was taken, by as many ranks."""
        self.steps = int(state["steps"])

    def options(self) -> dict[str, Any]:
        """What besides size and k has to be the same on all ranks, by name."""
        return {}

    @abstractmethod
    def reduce(self, accumulator: Array, gradient: Array | None, rank: int, ranks: int) -> Reducing:
        """The schedule behind the agreement.

        It changes the reducer's state once nothing can fail any more. With ``gradient``, ``accumulator`` ends as their sum.
        """


class Plan:
    """An operation of a reducer: what to tell the other ranks of it, and its schedule."""

    def __init__(self, reducer: Reducer, intent: Intent, accumulator: Array | None = None, gradient: Array | None = None) -> None:
        self.reducer = reducer
        self.intent = intent
        self._arrays = accumulator, gradient

    def agree_and_run(self, rank: int, ranks: int) -> Reducing:
        """The schedule, agreement included."""
        try:
            yield from agree(self.intent, rank, ranks)
        except BaseException:
            self.abandon()
            raise
        return (yield from self.run(rank, ranks))

    def run(self, rank: int, ranks: int) -> Reducing:
        """The schedule behind the agreement."""
        accumulator, gradient = self._arrays
        assert accumulator is not None
        reducer = self.reducer
        try:
            reducer.returned = SparseStream(no_indices(reducer.size), np.empty(0, accumulator.dtype), reducer.size)
            reduced = yield from self._timed(reducer.reduce(accumulator, gradient, rank, ranks))
            reducer.steps += 1
            return reduced
        finally:
            self.abandon()

    def _timed(self, schedule: Reducing) -> Reducing:
        """The schedule; until its first step, the time is noted as that of selection."""
        start = perf_counter()
        try:
            step = next(schedule)
        except StopIteration as stop:
            reduced: Reduced = stop.value
            return reduced
        finally:
            self.reducer.select_seconds = perf_counter() - start
        return (yield from _resumed(schedule, step))

    def abandon(self) -> None:
        """Let the reducer go."""
        if self.intent.error is None:
            self.reducer._busy = False


def _resumed(schedule: Reducing, step: Step) -> Reducing:
    """The rest of a schedule that has yielded its first step."""
    while True:
        try:
            try:
                value = yield step
            except Exception as error:
                step = schedule.throw(error)
            else:
                step = schedule.send(value)
        except StopIteration as stop:
            reduced: Reduced = stop.value
            return reduced


def _checked(array: Any, size: int) -> Array:
    """``array`` as an ndarray of the right shape, without a copy."""
    if hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray):
        array = np.from_dlpack(array)
    checked: Array = np.asarray(array)
    if checked.dtype not in (np.float32, np.float64):
        raise StreamTypeError(f"an accumulator holds float32 or float64, not {checked.dtype}: convert it")
    if checked.shape != (size,):
        raise StreamError(f"this reducer takes accumulators of shape ({size},), not {checked.shape}")
    if not checked.flags.c_contiguous:
        raise StreamError("an accumulator has to be contiguous: pass a copy")
    return checked


def no_indices(size: int) -> Array:
    """An empty set of indices of a vector of that size."""
    return np.empty(0, index_dtype(size))
