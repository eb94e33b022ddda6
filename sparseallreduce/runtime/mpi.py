"""Sparse allreduce as an mpi4py user expects it: ``allreduce``, ``iallreduce``, and a ``Request`` to test and wait for.

mpi4py is imported when a communicator of more than one process first comes into play, so that a process alone needs no MPI library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from sparseallreduce.algorithms import ALGORITHMS, AUTO
from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.algorithms.allreduce import make_call, operation
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.algorithms.steps import Clock, DenseAllgather, DenseAllreduce, Schedule, Share, Step
from sparseallreduce.errors import AlgorithmError, MPIUnavailableError, StreamTypeError
from sparseallreduce.runtime.serial import SERIAL, SerialCommunicator
from sparseallreduce.runtime.trace import active as traces
from sparseallreduce.streams.operator import MEAN, Operator
from sparseallreduce.streams.reduction import divided
from sparseallreduce.streams.stream import SparseStream, index_dtype

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI

    from sparseallreduce.runtime.channel import Channel
    from sparseallreduce.runtime.operation import Operation

__all__ = ["Request", "allreduce", "iallreduce", "launch", "measured", "shares_memory", "stage_room", "warm_up", "world"]


def allreduce(
    stream: SparseStream,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    op: str | Operator | MPI.Op = "sum",
    algorithm: str = "auto",
    **options: Any,
) -> SparseStream:
    """The element-wise reduction of the streams of all ranks, on every rank (thesis section 3.1).

    Parameters
    ----------
    stream : SparseStream
        Of the same size, dtype and width on all ranks, each with its own positions. It is left as it is.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default, or ``SERIAL`` where there is no mpi4py. The library talks on a duplicate of it.
    op : str, Operator or mpi4py.MPI.Op
        ``"sum"``, ``"prod"``, ``"min"`` or ``"max"`` over what is present, or any associative, commutative
        :class:`~sparseallreduce.Operator`. All positions that no rank holds are absent from the result. ``"mean"`` is the sum divided
        by the number of ranks, of floats.
    algorithm : str
        One of :func:`~sparseallreduce.algorithms`; "auto" takes the one that the cost model expects to be fastest.
    **options
        ``switch_density``: share of the size above which streams go dense, if less than where that takes fewer bytes.
        ``group_size``: of ``dsar_early_switch``, 8 by default. ``machine``: a :class:`~sparseallreduce.Machine` for "auto"
        instead of the one measured on the first operation of a communicator.

    Returns
    -------
    SparseStream
        The same on every rank, to the bit, and from run to run. "auto" chooses by measured constants, for which earlier measurements
        of the same layout of ranks are kept in the cache folder; where that is lost, give the ``machine``. It may add in another order
        in :func:`iallreduce`, or while requests are in flight: dense vectors are summed fastest by ranks that wait.
        Ranks of one host may hold a sum in memory that they share, which is used again when none of them has an array of it any more.

    Raises
    ------
    SparseAllreduceError
        On every rank the same, and with the communicator fit for the next operation: StreamTypeError or AlgorithmError for bad
        arguments on any rank, MismatchError if size, dtype, width, operator, algorithm or options differ. So does whatever else goes
        wrong on one rank, which the text names: no memory, an operator that raises, Ctrl-C. A rank that is interrupted raises
        KeyboardInterrupt itself; one that needs nothing more of the others has the result.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> sar.allreduce(sar.SparseStream([3], [2.0], 8), comm=sar.SERIAL).values
    array([2.])
    """
    if type(algorithm) is str and algorithm == AUTO and not options:
        result = _briefly(stream, comm, op)
        if result is not None:
            return result
    return _start(stream, comm, op, algorithm, options, blocking=True).wait()  # type: ignore[no-any-return]


def _briefly(stream: Any, comm: Any, op: Any) -> SparseStream | None:
    """The result if the operation can take :mod:`~sparseallreduce.runtime.short`, else None."""
    if _short is None or type(stream) is not SparseStream or type(op) is not str:
        return None
    global _latest
    if comm is None:
        comm = _short.MPI.COMM_WORLD
    latest, channel = _latest
    if comm is not latest:
        if not isinstance(comm, _short.MPI.Intracomm) or not comm:
            return None
        channel = comm.Get_attr(_attribute()[0])
        if channel is None:
            return None
        _latest = comm, channel
    if not _short.at_ease(channel):
        return None
    result: SparseStream | None = _short.allreduce(stream, op, channel, not _pending)
    return result if result is None or op != MEAN.name else divided(result, channel.ranks)


def iallreduce(
    stream: SparseStream,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    op: str | Operator | MPI.Op = "sum",
    algorithm: str = "auto",
    **options: Any,
) -> Request:
    """Start an :func:`allreduce`, and return a request at once (thesis section 4.1.5).

    Several may be in flight on one communicator, and be completed in any order. All ranks start the operations of a communicator
    in the same order, as for any collective of MPI. With the first operation on a communicator begin its duplication and the
    measurement of the network, which take all ranks some milliseconds in the background.

    Parameters
    ----------
    stream, comm, op, algorithm, **options
        As for :func:`allreduce`. Besides, ``progress="thread"`` moves the operation on in a thread while the program computes,
        where MPI provides MPI_THREAD_MULTIPLE; by default it moves on in calls of ``test`` and ``wait``, of any request.

    Returns
    -------
    Request

    Raises
    ------
    StreamTypeError
        If ``comm`` is no intracommunicator. All other errors are raised by ``test`` or ``wait``.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> request = sar.iallreduce(sar.SparseStream([3], [2.0], 8), comm=sar.SERIAL)
    >>> request.wait().nnz
    1
    """
    return _start(stream, comm, op, algorithm, options, blocking=False)


class Request:
    """An operation in flight.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> first, second = (sar.iallreduce(sar.SparseStream([i], [1.0], 8), comm=sar.SERIAL) for i in range(2))
    >>> done, result = second.test()
    >>> [stream.nnz for stream in sar.Request.waitall([first, second])]
    [1, 1]
    """

    def __init__(self, operation: Operation | None, result: Any = None, error: BaseException | None = None) -> None:
        self._operation = operation
        self._result = result
        self._error = error
        self._divisor = 0  # by which the result is still to be divided, if it is a mean

    def __del__(self) -> None:
        _pending.discard(id(self))

    def test(self) -> tuple[bool, Any]:
        """Move on, and return ``(True, result)`` if done, else ``(False, None)``.

        Raises
        ------
        SparseAllreduceError
            If the operation failed, on all ranks the same.
        """
        if self._operation is not None:
            _over_mpi().progress.advance()
            if not self._operation.done:
                return False, None
        return True, self._outcome()

    def wait(self) -> Any:
        """The result, when done.

        Raises
        ------
        SparseAllreduceError
            If the operation failed, on all ranks the same.
        """
        self._finish()
        return self._outcome()

    @staticmethod
    def waitall(requests: Sequence[Request]) -> list[Any]:
        """The results of all requests, in their order.

        Raises
        ------
        SparseAllreduceError
            The error of the first request that failed, once all are done.
        """
        for request in requests:
            request._finish()
        return [request.wait() for request in requests]

    def _finish(self) -> None:
        if self._operation is not None:
            try:
                _over_mpi().progress.finish(self._operation)
            except BaseException:  # an interrupt, with whose traceback this request may be kept for long: it has failed
                _pending.discard(id(self))
                raise

    def _outcome(self) -> Any:
        if self._operation is not None:
            self._result, self._error = self._operation.result, self._operation.error
            self._operation = None
            _pending.discard(id(self))
        if self._error is not None:
            raise self._error
        if self._divisor:
            self._result, self._divisor = divided(self._result, self._divisor), 0
        return self._result


_short: ModuleType | None = None  # imported with the first channel
_latest: tuple[Any, Any] = None, None  # the communicator that was used last and its channel, until it is freed
_pending: set[int] = set()  # identities of requests that nobody has seen complete yet


def world() -> MPI.Intracomm | SerialCommunicator:
    """``MPI.COMM_WORLD``, or ``SERIAL`` where mpi4py or its MPI library is missing and this process was started alone.

    Raises
    ------
    MPIUnavailableError
        If it is missing and an mpiexec has started more than one process: each would take itself for the only one.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        started = max(int(os.environ.get(name, "1")) for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"))
        if started > 1:
            raise MPIUnavailableError(
                f"mpiexec has started {started} processes, but mpi4py cannot be loaded ({error}): install sparseallreduce[mpi]"
            ) from error
        return SERIAL
    return MPI.COMM_WORLD


def _start(stream: Any, comm: Any, op: Any, algorithm: Any, options: dict[str, Any], blocking: bool) -> Request:
    progress = options.pop("progress", "manual") if not blocking else "manual"
    call, intent = make_call(stream, op, algorithm, options)

    def schedule(intent: Intent, rank: int, ranks: int, channel: Channel | None, patient: bool, first: bool) -> Schedule:
        machine, staging = (None, None) if channel is None else (channel.machine, channel.staging)
        return operation(call, intent, rank, ranks, machine, patient, staging=staging if first else None)

    def collective(channel: Channel) -> bool:
        # What "auto" or a call without sense takes is not known beforehand.
        if call is None or call.algorithm == AUTO:
            return True
        return bool(_over_mpi().collectives.takes_collective(channel, ALGORITHMS[call.algorithm].dense_steps))

    request = _launched(comm, intent, schedule, collective, blocking, progress)
    if call is not None and call.op.is_mean:
        request._divisor = _size(world() if comm is None else comm)
    return request


def launch(
    comm: Any,
    intent: Intent,
    schedule: Callable[[Intent, int, int], Generator[Step, Any, Any]],
    *,
    blocking: bool,
    progress: str = "manual",
) -> Request:
    """Start an operation of any kind, of which ``schedule`` makes the steps from the intent, the rank and the number of ranks.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
    intent : Intent
        Which the schedule is to agree on first.
    schedule : callable
        Called with ``intent``, or with one that has an error besides: ``progress`` may not be what there is.
    blocking : bool
        Whether the request is done when this returns; errors are then raised here.
    progress : str
        As for :func:`iallreduce`.
    """

    def steps(intent: Intent, rank: int, ranks: int, _channel: Channel | None, _patient: bool, _first: bool) -> Generator[Step, Any, Any]:
        return schedule(intent, rank, ranks)

    return _launched(comm, intent, steps, lambda _: True, blocking, progress)


def _launched(
    comm: Any,
    intent: Intent,
    schedule: Callable[[Intent, int, int, Channel | None, bool, bool], Generator[Step, Any, Any]],
    collective: Callable[[Channel], bool],
    blocking: bool,
    progress: str = "manual",
) -> Request:
    comm = world() if comm is None else comm
    ranks = _size(comm)
    if intent.error is not None and not isinstance(intent.error, Exception):  # an interrupt waits for nobody
        hit = intent.error

        def schedule(*_: Any) -> Generator[Step, Any, Any]:
            raise hit
            yield

    elif progress not in ("manual", "thread"):
        intent = intent._replace(error=AlgorithmError(f"progress is 'manual' or 'thread', not {progress!r}"))
    if ranks == 1:
        try:
            return Request(None, _run_alone(schedule(intent, 0, 1, None, False, False), intent.entries))
        except Exception as error:
            if blocking:
                raise
            return Request(None, error=error)
    over_mpi = _over_mpi()
    if progress == "thread" and intent.error is None and not _threads():
        intent = intent._replace(error=AlgorithmError("progress='thread' needs MPI_THREAD_MULTIPLE, which this MPI does not provide"))
    channel = _channel(comm)

    # Whether a request is waited for, not whether it is done: what follows, and so the bits, must not be a matter of time.
    first = not _pending

    def steps() -> Generator[Step, Any, Any]:
        return schedule(intent, channel.rank, channel.ranks, channel, blocking and first and over_mpi.progress.alone(), first)

    if blocking:
        return Request(None, over_mpi.blocking.carry_out(channel, steps, intent.entries, lambda: collective(channel)))
    operation = over_mpi.operation.Operation(channel, steps, intent.entries, collective=lambda: collective(channel))
    try:
        request = Request(operation)
        _pending.add(id(request))
        if progress == "thread":
            over_mpi.progress.progress_thread()
    except BaseException as error:  # nobody could wait for it
        over_mpi.progress.give_up(operation, error)
        raise
    return request


def _run_alone(schedule: Generator[Step, Any, Any], entries: int) -> Any:
    """Carry out a schedule of one rank, whose collectives have nobody to talk to."""
    from time import perf_counter

    value: Any = None
    while True:
        try:
            step = schedule.send(value)
        except StopIteration as stop:
            for counts in traces:
                counts.complete(entries, stop.value)
            return stop.value
        if isinstance(step, Share):
            value = [step.record]
        elif isinstance(step, DenseAllreduce | DenseAllgather):
            value = step.stream
        else:
            assert isinstance(step, Clock), f"a rank alone has nobody for {step}"
            value = perf_counter()


def _size(comm: Any) -> int:
    if isinstance(comm, SerialCommunicator):
        return 1
    if not hasattr(comm, "Get_size") or not hasattr(comm, "Idup"):
        raise StreamTypeError(f"comm must be an mpi4py intracommunicator or sparseallreduce.SERIAL, not {type(comm).__name__}")
    if not comm:
        raise StreamTypeError("comm must be an intracommunicator, not MPI.COMM_NULL: it was freed, or this rank is not part of it")
    if comm.is_inter:
        raise StreamTypeError("comm must be an intracommunicator: merge the intercommunicator first")
    return int(comm.size)


def _threads() -> bool:
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def _channel(comm: MPI.Intracomm) -> Channel:
    """The library's state for ``comm``, made by the first operation on it and kept as an attribute of it."""
    keyval, make = _attribute()
    channel: Any = comm.Get_attr(keyval)
    if channel is None:
        global _short
        from sparseallreduce.runtime import short as _short

        channel = make(comm)
        comm.Set_attr(keyval, channel)  # before the duplicate: a rank that failed in between would make another one
    found: Channel = channel
    if found.messages is None:  # also if its first operation was interrupted before
        try:
            found.begin(comm)
        except BaseException as error:
            found.give_up(comm, error)
            raise
    return found


def measured(comm: MPI.Intracomm) -> Machine | None:
    """The constants of the network between the ranks of ``comm``, once they are measured; collective."""
    return _ready_channel(comm).machine


def shares_memory(comm: MPI.Intracomm) -> bool:
    """Whether the ranks of ``comm`` agree on their operations in memory that they share; collective."""
    return _ready_channel(comm).board is not None


def stage_room(comm: MPI.Intracomm) -> int:
    """Most bytes of a stream that the ranks of ``comm`` add up in memory that they share, 0 if they share none; collective."""
    staging = _ready_channel(comm).staging
    return 0 if staging is None else staging.room


def warm_up(comm: MPI.Intracomm | SerialCommunicator, size: int, dtype: np.dtype[Any]) -> None:
    """Compile, or load from disk, what the ranks of ``comm`` need to add up such streams in memory that they share; collective."""
    if _size(comm) > 1 and stage_room(cast("MPI.Intracomm", comm)):
        from sparseallreduce.runtime.stage_kernels import sum_parts_kernel

        sum_parts_kernel(index_dtype(size), dtype)


def _ready_channel(comm: MPI.Intracomm) -> Channel:
    channel = _channel(comm)
    _over_mpi().channel.prepare(channel)
    return channel


@lru_cache(maxsize=1)
def _attribute() -> tuple[int, Callable[[MPI.Intracomm], Channel]]:
    """The key of that attribute, and what makes it."""
    from mpi4py import MPI

    return MPI.Comm.Create_keyval(delete_fn=_freed), _over_mpi().channel.Channel


def _freed(_comm: MPI.Comm, _key: int, channel: Channel) -> None:
    global _latest
    _latest = None, None
    channel.free()


class _OverMPI(NamedTuple):
    blocking: Any
    channel: Any
    collectives: Any
    operation: Any
    progress: Any


@lru_cache(maxsize=1)
def _over_mpi() -> _OverMPI:
    """Modules that need MPI, imported when there is somebody to talk to."""
    from sparseallreduce.runtime import blocking, channel, collectives, operation, progress

    return _OverMPI(blocking, channel, collectives, operation, progress)
