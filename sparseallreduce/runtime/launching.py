"""Start operations that are not on the fast path, on several ranks or on one."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from sparseallreduce.algorithms.agreement import Intent, common_error
from sparseallreduce.algorithms.allreduce import Call, allreduce, make_call
from sparseallreduce.algorithms.collectives.call import Collective, CollectiveCall, make_collective_call, run_collective
from sparseallreduce.algorithms.hierarchical import Hosts
from sparseallreduce.algorithms.many import ListCall, allreduce_list, make_list_call
from sparseallreduce.algorithms.steps import (
    Clock,
    Constants,
    DenseAllgather,
    DenseAllreduce,
    DeviceMessages,
    HostGather,
    HostReduceScatter,
    Layout,
    Quantise,
    Share,
    Step,
)
from sparseallreduce.errors import AlgorithmError, SparseAllreduceError
from sparseallreduce.runtime.communicators import channel_of, has_threads, known_channel, over_mpi, resolve, size_of
from sparseallreduce.runtime.request import Request, checked_timeout
from sparseallreduce.runtime.trace import active as traces
from sparseallreduce.runtime.work import Launched, Work, level
from sparseallreduce.streams.kernels.backend import current_queue
from sparseallreduce.streams.reduction import Reduction

if TYPE_CHECKING:
    from sparseallreduce.runtime.channel import Channel
    from sparseallreduce.streams.stream import SparseStream

__all__ = [
    "ErrorReporter",
    "WaitErrorReporter",
    "agree",
    "alone",
    "checked_intent",
    "latest",
    "launch",
    "launched",
    "leave",
    "start",
    "start_collective",
]


Made = tuple[Call | ListCall | None, Intent]


def start(stream: Any, comm: Any, op: Any, algorithm: Any, options: dict[str, Any], blocking: bool, made: Made | None = None) -> Request:
    """Start an allreduce. Parameters, errors and result are those of :mod:`~sparseallreduce.runtime.api`.

    With ``blocking`` the operation is complete when this returns, and its errors are raised here. ``made`` replaces the call and intent
    if an error has already hit this rank.
    """
    progress = options.pop("progress", "manual") if not blocking else "manual"
    timeout = options.pop("timeout", None) if blocking else None
    make: Callable[..., Made] = make_list_call if isinstance(stream, list | tuple) else make_call
    call, intent = made or make(stream, op, algorithm, options)
    comm = resolve(comm)
    ranks, intent = size_of(comm), checked_intent(intent, comm, progress, timeout)
    at_once = blocking and timeout is None
    if ranks == 1:
        request = alone(lambda: _serial(call, intent), intent, blocking)
    elif call is None or intent.error is not None:
        request = launched(comm, lambda _: Launched(intent), None, at_once, progress)
    else:
        single = call if isinstance(call, Call) else call.of(0) if len(call.fused) == 1 else None
        work_on = _groups(call, intent) if single is None else lambda channel: over_mpi().signature.Signature(single, intent, channel)
        request = launched(comm, work_on, single and single.stream, at_once, progress)
    if call is not None and call.op.is_mean:
        request._divisor = ranks
    request._timeout = _as_timeout(timeout)
    if isinstance(call, ListCall):
        request._cut = call.cutter()
    return request


def start_collective(
    collective: Collective, stream: Any, comm: Any, op: Any, algorithm: Any, options: dict[str, Any], blocking: bool
) -> Request:
    """Start a collective other than allreduce, with the arguments of :func:`start`."""
    progress = options.pop("progress", "manual") if not blocking else "manual"
    timeout = options.pop("timeout", None) if blocking else None
    comm = resolve(comm)
    ranks, rank = size_of(comm), comm.rank
    made, intent = make_collective_call(collective, stream, op, algorithm, options, rank, ranks)
    intent = checked_intent(intent, comm, progress, timeout)
    at_once = blocking and timeout is None
    if ranks == 1:
        request = alone(lambda: _collective_alone(made, intent), intent, blocking)
    elif made is None or intent.error is not None:
        request = launched(comm, lambda _: Launched(intent), None, at_once, progress)
    else:
        request = launched(comm, lambda channel: over_mpi().collective_work.work_of(made, intent, channel), stream, at_once, progress)
    if made is not None:
        request._cut = made.finish(rank, ranks)
    request._timeout = _as_timeout(timeout)
    return request


def _collective_alone(made: CollectiveCall | None, intent: Intent) -> Generator[Step, Any, Any]:
    assert made is not None
    return run_collective(made, (intent.entries,), 0, 1, None, Reduction(made.call.op, made.call.switch_density))


def _as_timeout(timeout: Any) -> float | None:
    """Return the timeout in seconds, or None for no limit; an invalid value counts as no limit, since the operation reports it."""
    try:
        return None if timeout is None else checked_timeout(timeout)
    except AlgorithmError:
        return None


def launch(
    comm: Any,
    intent: Intent,
    schedule: Callable[[int, int], Generator[Step, Any, Any]],
    *,
    close: Callable[[], None] | None = None,
    blocking: bool,
    progress: str = "manual",
    traced: bool = True,
) -> Request:
    """Start an operation of any kind, whose steps ``schedule(rank, ranks)`` generates.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
    intent : Intent
        Description of the operation, on which the ranks agree before the schedule starts.
    schedule : callable
    close : callable, optional
        Called if the operation fails, possibly before the schedule exists and possibly more than once.
    blocking : bool
        Whether the request is complete when this returns; errors are then raised here.
    progress : str
        As for :func:`~sparseallreduce.iallreduce`.
    traced : bool
        Whether traces count its bytes.
    """
    comm = resolve(comm)
    ranks, intent = size_of(comm), checked_intent(intent, comm, progress)
    if ranks == 1:
        try:
            return alone(lambda: schedule(0, 1), intent, blocking)
        finally:
            if close is not None:
                close()

    def work_on(channel: Channel) -> Work:
        return Launched(intent, lambda: schedule(channel.rank, ranks), close, traced=traced)

    return launched(comm, work_on, None, blocking, progress)


def agree(comm: Any, intent: Intent, *, blocking: bool) -> Request:
    """Start an operation in which ranks only agree on an intent, so that a rank with an error can report it to the waiting ranks."""
    return launch(comm, intent, _nothing, blocking=blocking, traced=False)


def _nothing(_rank: int, _ranks: int) -> Generator[Step, Any, None]:
    return
    yield


def checked_intent(intent: Intent, comm: Any, progress: str, timeout: Any = None) -> Intent:
    """Return the intent, with an error if ``progress`` or ``timeout`` is invalid."""
    if intent.error is None:
        try:
            if timeout is not None:
                checked_timeout(timeout)
        except AlgorithmError as error:
            return intent._replace(error=error)
        if progress not in ("manual", "thread"):
            return intent._replace(error=AlgorithmError(f"progress is 'manual' or 'thread', not {progress!r}"))
        if progress == "thread" and size_of(comm) > 1 and not has_threads():
            return intent._replace(error=AlgorithmError("progress='thread' needs MPI_THREAD_MULTIPLE, which this MPI does not provide"))
    return intent


def launched(comm: Any, work_on: Callable[[Channel], Work], stream: SparseStream | None, blocking: bool, progress: str) -> Request:
    """Start an operation, or queue it until it can start, and wait for it if ``blocking``."""
    over = over_mpi()
    if over.progress.freed:
        over.progress.give_back_freed()
    channel = channel_of(comm)
    with channel.start_lock:
        before = channel.sequence
        operation: Any = None
        try:
            work = work_on(channel)
            channel.sequence = before + 1
            operation = over.operation.Operation(channel, work, stream, before + 1, level(blocking))
            operation.queue = current_queue()
            if not work.traced:
                operation.traces = []
            operation.enlist()
            operation.advance(spin=blocking)
            if progress == "thread":
                over.progress.progress_thread()
            if not blocking:
                return Request(operation)
        except BaseException as error:
            channel.sequence = before + 1
            if operation is None:
                operation = over.operation.Operation(channel, Launched(Intent((), 0)), None, before + 1)
            over.progress.give_up(operation, error)
            if not isinstance(error, Exception):
                raise
    return Request(None, over.deadline.outcome(operation)) if blocking else Request(operation)


class ErrorReporter:
    """A context manager inside a library call that reports errors to the other ranks, unless they know of them.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
    """

    __slots__ = ("_before", "_comm")

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._before: int | None = None

    def __enter__(self) -> None:
        self._before = latest(self._comm)

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is not None:
            leave(self._comm, error, self._before)


class WaitErrorReporter(ErrorReporter):
    """The same for a call that waits for an operation instead of starting one.

    AlgorithmError, raised for wrong arguments, concerns this rank alone and is not reported.
    """

    def __enter__(self) -> None:
        self._before = -1

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is not None and not isinstance(error, AlgorithmError):
            leave(self._comm, error, self._before)


def latest(comm: Any) -> int:
    """Return the number of the latest operation on a communicator, 0 if there was none."""
    channel = known_channel(comm)
    return 0 if channel is None else channel.sequence


def leave(comm: Any, error: BaseException, before: int | None) -> None:
    """Report an error that a call raises on this rank to the other ranks, unless they know of it.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
    error : BaseException
    before : int, optional
        Number of the last operation at the start of the call; None if the call had not got that far.
    """
    if getattr(error, "on_all_ranks", False):
        return
    try:
        comm = resolve(comm)
        if size_of(comm) == 1:
            return
        channel = channel_of(comm)
    except SparseAllreduceError:  # there are no ranks to notify
        return
    if before is not None and channel.sequence > before:
        channel.late.leave(error, channel.sequence)
    elif not channel.late.is_reported(error):
        with channel.start_lock:
            channel.sequence += 1
            operation = over_mpi().operation.Operation(channel, Launched(Intent((), 0)), None, channel.sequence)
        over_mpi().progress.give_up(operation, error)


def _serial(call: Call | ListCall | None, intent: Intent) -> Generator[Step, Any, Any]:
    assert call is not None
    if isinstance(call, ListCall):
        return allreduce_list(call, 0, 1, None, call.reductions())
    return allreduce(call, (intent.entries,), 0, 1, None, Reduction(call.op, call.switch_density))


def _groups(call: Any, intent: Intent) -> Callable[[Channel], Work]:
    """Return a function that makes the work for a list of streams with no group or several groups."""

    def work_on(channel: Channel) -> Work:
        reductions = call.reductions()
        schedule = partial(allreduce_list, call, channel.rank, channel.ranks, channel.machine, reductions, channel.hosts)
        return Launched(intent, schedule, encoding=call.call.encoding)

    return work_on


def alone(schedule: Callable[[], Generator[Step, Any, Any]], intent: Intent, blocking: bool) -> Request:
    """Run the operation on a communicator of one rank."""
    if intent.error is not None and not isinstance(intent.error, Exception):
        raise intent.error
    try:
        if intent.error is not None:
            raise common_error([intent.announcement()])
        request = Request(None, _run_alone(schedule(), intent.entries))
        if not blocking:
            request._queue = current_queue()
        return request
    except Exception as error:
        if blocking:
            raise
        return Request(None, error=error)


def _run_alone(schedule: Generator[Step, Any, Any], entries: int) -> Any:
    """Run a schedule on one rank, whose collectives return the rank's own contribution."""
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
        elif isinstance(step, DenseAllreduce | DenseAllgather | Quantise | HostReduceScatter):
            value = step.stream
        elif isinstance(step, HostGather):
            value = step.part
        elif isinstance(step, Layout):
            value = Hosts(((0,),))
        elif isinstance(step, Constants | DeviceMessages):
            value = None
        else:
            assert isinstance(step, Clock), f"a rank alone has nobody for {step}"
            value = perf_counter()
