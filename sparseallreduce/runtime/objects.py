"""Exchange values, arrays and errors between ranks; errors are raised by all ranks or by none.

All data travels in operations of the communicator's channel, as sums do. A rank that fails between two of them therefore reports the error
in the next one (:func:`report_error`), whichever it is, and an interrupt inside one fails as in any operation.
"""

from __future__ import annotations

import functools
import inspect
import math
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import Intent, is_common_error
from sparseallreduce.algorithms.steps import DenseAllgather, Recv, Send, Share, Step
from sparseallreduce.errors import MismatchError, SparseAllreduceError
from sparseallreduce.runtime.communicators import known_channel, over_mpi
from sparseallreduce.runtime.launching import agree, latest, launch
from sparseallreduce.runtime.stalls import LongWait
from sparseallreduce.streams.operator import SUM
from sparseallreduce.streams.stream import SparseStream

__all__ = [
    "agreed",
    "broadcast_arrays",
    "collective",
    "exchange",
    "gather",
    "gather_on_first",
    "steps_together",
    "is_known",
    "leaves_on_failure",
    "mark_known",
    "portable",
    "report_error",
    "together",
    "gather_results",
]

Array = NDArray[Any]
Schedule = Callable[[int, int], Generator[Step, Any, Any]]
T = TypeVar("T")
P = ParamSpec("P")

_PAUSE, _LONGEST_PAUSE = 2e-5, 5e-4  # seconds between polls of a long wait: first and longest
_SHORT = 248  # bytes sent in the same message as their length
_HEAD = 8  # bytes of that length
_SAID = Intent((("operation", "an exchange of values"),), 0)
_END = Intent((("operation", "the end of a call"),), 0)
_leaving: list[tuple[Any, Any]] = []  # weak references to meetings in shared memory, each with its communicator


class _Entered(threading.local):
    """The communicators on which this thread is inside a collective call of the library."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []


_entered = _Entered()


def together(comm: Any, action: Callable[[], T]) -> T:
    """Return what ``action`` returns on this rank once it has returned on all ranks; if it raises on any rank, all raise. Collective.

    Every call of the library that consists of more than one operation is made this way. A rank on which something raises between two
    operations reports the error in the next one, which fails there. A rank that reaches the end waits there for all others.

    Raises
    ------
    SparseAllreduceError
        If ``action`` raises on some ranks only; the same error on all ranks. A rank that is interrupted raises its interrupt.
    """
    if comm.size == 1 or any(other is comm for (other,) in _entered.calls):
        return action()
    entry = [comm]
    _entered.calls = [other for other in _entered.calls if other[0] is not None] + [entry]
    try:
        result = action()
        if _has_channel(comm):
            agree(comm, _END, blocking=True)
        return result
    except GeneratorExit:
        raise
    except BaseException as error:
        shared = report_error(comm, error)
        if shared is error:
            raise
        raise shared from error
    finally:
        entry[0] = None  # an assignment cannot fail, unlike a call


def collective(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that its calls are made :func:`together` by all ranks.

    The function has an argument ``comm``, a communicator, or its first argument has an attribute ``comm``.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        comm = bound.arguments["comm"] if "comm" in signature.parameters else args[0].comm  # type: ignore[attr-defined]
        return together(comm, lambda: function(*args, **kwargs))

    return made


def steps_together(comm: Any, steps: Generator[T, None, Any]) -> Generator[T, None, None]:
    """Yield what ``steps`` yields; all ranks make each step :func:`together`."""
    end = object()
    while True:
        step: Any = together(comm, lambda: next(steps, end))
        if step is end:
            return
        yield step


def report_error(comm: Any, error: BaseException) -> BaseException:
    """Report an error of this rank to the other ranks in the next operation on the communicator; return the exception to raise here.

    That is the common error if only some ranks have one, and ``error`` itself if all ranks have the same or know of it already. A rank that
    is interrupted does not wait for the others.
    """
    if comm.size == 1 or is_known(error) or not _has_channel(comm):
        return error
    intent = Intent((), 0, error)
    try:
        for reference, where in _leaving:
            meeting = reference()
            if where is comm and meeting is not None:
                meeting.leave()
        agree(comm, intent, blocking=True)
    except BaseException as shared:
        mark_known(comm, error)
        if not isinstance(error, Exception) or is_common_error(intent, shared):
            return error
        return shared
    return error


def leaves_on_failure(meeting: Any, comm: Any) -> None:
    """Register ``meeting.leave()`` to be called before a failure on this rank is reported to the ranks of ``comm``."""
    _leaving[:] = [*(each for each in _leaving if each[0]() is not None), (weakref.ref(meeting), comm)]


def is_known(error: BaseException) -> bool:
    """Return True if the other ranks already know of an error."""
    return bool(getattr(error, "on_all_ranks", False) or getattr(error, "_reported_on", ()))


def mark_known(comm: Any, error: BaseException) -> None:
    """Record that all ranks of a communicator know of an error."""
    channel = known_channel(comm)
    if channel is not None:
        channel.late.mark(error)


def gather(comm: Any, value: T, long_wait: bool = False) -> list[T]:
    """Return the values of all ranks, in the order of ranks, on every rank. Collective.

    Parameters
    ----------
    comm : communicator
    value : object
        Must be picklable.
    long_wait : bool
        Whether to sleep between polls, for waits in which another rank may compute for much longer.
    """
    return _gathered(comm, value, _SAID, long_wait)


def _gathered(comm: Any, value: T, intent: Intent, long_wait: bool) -> list[T]:
    if comm.size == 1:
        return [value]
    if not _has_channel(comm):
        return cast("list[T]", comm.allgather(value))
    content = b""
    try:
        content = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        intent = Intent((), 0, error)
    return [pickle.loads(part) for part in _gather_bytes(comm, intent, content, long_wait)]


def gather_results(comm: Any, action: Callable[[], T], long_wait: bool = False) -> list[T]:
    """Return what ``action`` returns on each rank, in the order of ranks. Collective.

    If it raises on any rank, all ranks raise the exception of the lowest such rank. A rank that is interrupted raises its interrupt, and
    the other ranks raise an error that names it.
    """
    value: Any = None
    failure: Exception | None = None
    before = _latest(comm)
    _nested.depth += 1
    try:
        intent = _of_results(_nested.depth)
        try:
            value = action()
        except Exception as error:
            if comm.size == 1:
                raise
            if is_known(error) and _latest(comm) != before:  # all ranks raise it, in an operation of the action
                if isinstance(error, MismatchError):
                    _name_failure(comm, None)
                raise
            failure = error
        except BaseException as error:
            raise report_error(comm, error) from None
        several = _latest(comm) != before
        try:
            everyones = _gathered(comm, (portable(failure), value if failure is None else None), intent, long_wait)
        except MismatchError:
            if failure is not None or several:
                _name_failure(comm, failure)
            raise
    finally:
        _nested.depth -= 1
    for rank, (raised, _) in enumerate(everyones):
        if raised is not None:
            own = rank == comm.rank and failure is not None and type(failure) is type(raised)
            raised = failure if own else raised
            assert raised is not None
            mark_known(comm, raised)
            raise raised
    return [cast(T, each) for _, each in everyones]


class _Nested(threading.local):
    """The number of calls of :func:`gather_results` that this thread is in."""

    depth = 0


_nested = _Nested()


@functools.cache
def _of_results(depth: int) -> Intent:
    """Return the intent of an exchange of results at this depth.

    An action may have operations of its own. A rank that fails between them comes to the exchange of results while other ranks are still in
    the action, and must not be taken for a rank that has reached the same operation.
    """
    return Intent((*_SAID.terms, ("depth of the exchange", str(depth))), 0)


def _name_failure(comm: Any, failure: Exception | None) -> None:
    """Raise the failure of the lowest rank that has left an action between its operations, on all ranks that have met it there."""
    error = None if failure is None or is_known(failure) else failure
    try:
        agree(comm, Intent((), 0, error), blocking=True)
    except SparseAllreduceError as shared:
        raise shared from failure


def _latest(comm: Any) -> int:
    """Return the number of the latest operation on a communicator, 0 if there was none."""
    return latest(comm) if comm.size > 1 and _has_channel(comm) else 0


def agreed(comm: Any, action: Callable[[], T], long_wait: bool = False) -> T:
    """Return what ``action`` returns on this rank; if it raises on any rank, all raise as :func:`gather_results` does. Collective."""
    result: list[T] = []
    gather_results(comm, lambda: result.append(action()), long_wait)
    return result[0]


def broadcast_arrays(comm: Any, arrays: Mapping[str, Array] | None) -> dict[str, Array]:
    """Return the named arrays of the first rank on every rank; the other ranks pass None. Arrays may have any size. Collective."""
    if comm.size == 1:
        return dict(arrays or {})

    def outline() -> list[tuple[str, Any, Any]]:
        return [(name, array.dtype, np.shape(array)) for name, array in (arrays or {}).items()]

    received = {}
    for name, dtype, shape in gather_results(comm, outline)[0]:
        own = agreed(comm, lambda name=name: np.ascontiguousarray(arrays[name]) if arrays else np.empty(0))  # type: ignore[misc]
        nbytes = math.prod(shape) * dtype.itemsize
        whole = _joined(comm, _bytes(own), [nbytes] + [0] * (comm.size - 1))
        received[name] = own.reshape(shape) if comm.rank == 0 else whole[:nbytes].view(dtype).reshape(shape)
    return received


def gather_on_first(comm: Any, array: Array, lengths: list[int]) -> Array:
    """Concatenate the arrays of all ranks on the first rank, and return this rank's own array elsewhere. Collective.

    Arrays may have any size; ``lengths`` are those of all ranks.
    """
    if comm.size == 1:
        return array
    whole = agreed(comm, lambda: np.ascontiguousarray(array) if comm.rank else np.empty(sum(lengths), array.dtype))
    bounds = [0, *accumulate(lengths)]
    if comm.rank == 0:
        whole[: bounds[1]] = array
    for source in range(1, comm.size):  # one at a time, so that the first rank needs memory for one only
        step = Recv(source) if comm.rank == 0 else Send(0, _as_stream(_bytes(whole))) if comm.rank == source else None
        arrived = _carried_out(comm, _SAID, lambda _rank, _ranks, step=step: _nothing() if step is None else _one(step))  # type: ignore[misc]
        if comm.rank == 0:
            part = _bytes(whole[bounds[source] : bounds[source + 1]])
            part[:] = _bytes(arrived._stored)[: len(part)]
    return array if comm.rank else whole


def exchange(comm: Any, parts: list[Array]) -> list[Array]:
    """Return the arrays that all ranks have for this one, in the order of ranks. Collective.

    Each rank passes an array for every rank; all have one dtype.
    """
    if comm.size == 1:
        return parts
    if not _has_channel(comm):
        return cast("list[Array]", comm.alltoall(parts))
    own = agreed(comm, lambda: [np.ascontiguousarray(part) for part in parts])
    lengths = [each[comm.rank] for each in gather(comm, [len(part) for part in own])]
    others = [(comm.rank + distance) % comm.size for distance in range(1, comm.size)]
    sends, received = [Send(dest, _as_stream(_bytes(own[dest]))) for dest in others], [None] * comm.size

    def schedule(_rank: int, _ranks: int) -> Generator[Step, Any, list[Any]]:
        yield from sends
        for source in reversed(others):
            received[source] = yield Recv(source)
        return received

    arrived, dtype = _carried_out(comm, _SAID, schedule), own[0].dtype
    return [
        own[rank] if stream is None else _bytes(stream.to_dense())[: length * dtype.itemsize].view(dtype)
        for rank, (stream, length) in enumerate(zip(arrived, lengths, strict=True))
    ]


def _has_channel(comm: Any) -> bool:
    """Return True if the ranks of a communicator have a channel, as MPI communicators do."""
    return hasattr(comm, "Idup")


def _carried_out(comm: Any, intent: Intent, schedule: Schedule, long_wait: bool = False) -> Any:
    """Run an operation of all ranks, whose bytes are not traced, and return its result."""
    request = launch(comm, intent, schedule, blocking=not long_wait, traced=False)
    operation, pause = request._operation, _PAUSE
    if operation is None:
        return request.wait()
    over = over_mpi()
    wait = LongWait(lambda: over.deadline.describe_wait(operation), limited=True)
    try:
        while long_wait and not operation.done:
            over.progress.advance()
            wait.check()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
    except BaseException as error:
        if not is_known(error):
            over.progress.give_up(operation, error)
        raise
    wait.over()
    return request.wait()


def _gather_bytes(comm: Any, intent: Intent, content: bytes, long_wait: bool) -> list[Any]:
    """Return the bytes of every rank; short ones are sent in the same message as their length."""
    step = Share((len(content).to_bytes(_HEAD, "little") + content[:_SHORT]).ljust(_HEAD + _SHORT, b"\0"))
    records: list[bytes] = _carried_out(comm, intent, lambda _rank, _ranks: _one(step), long_wait)
    lengths = [int.from_bytes(each[:_HEAD], "little") for each in records]
    if max(lengths) <= _SHORT:
        return [each[_HEAD : _HEAD + length] for each, length in zip(records, lengths)]
    whole = _joined(comm, np.frombuffer(content, np.uint8), lengths)
    return [whole[4 * start : 4 * start + length] for (start, _), length in zip(_ranges(lengths), lengths)]


def _joined(comm: Any, content: Array, lengths: Sequence[int]) -> Array:
    """Return the concatenated bytes of all ranks, given their lengths; each rank's bytes start at a multiple of four."""
    ranges = _ranges(lengths)
    size = ranges[-1][1]
    if not size:
        return np.empty(0, np.uint8)

    step = DenseAllgather(SparseStream._dense_form(_words(content), size, *ranges[comm.rank]), ranges, SUM)
    return _bytes(_carried_out(comm, _SAID, lambda _rank, _ranks: _one(step))._stored)


def _nothing() -> Generator[Step, Any, None]:
    return
    yield


def _one(step: Step) -> Generator[Step, Any, Any]:
    """Return the schedule of a single step.

    The step is constructed by the caller, since an error inside a schedule may occur after other ranks have completed theirs.
    """
    return (yield step)


def _ranges(lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the range of words that holds the bytes of each rank."""
    return tuple(pairwise([0, *accumulate(-(-length // 4) for length in lengths)]))


def _bytes(array: Array) -> Array:
    """Return a view of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8)


def _words(content: Array) -> Array:
    """Return bytes as 32-bit words, padded with zeros; a view if length and alignment allow."""
    if len(content) % 4 == 0 and content.ctypes.data % 4 == 0:
        return content.view(np.int32)
    words = np.zeros(-(-len(content) // 4), np.int32)
    words.view(np.uint8)[: len(content)] = content
    return words


def _as_stream(content: Array) -> SparseStream:
    words = _words(content)
    return SparseStream._dense_form(words, len(words))


def portable(error: Exception | None) -> Exception | None:
    """Return the error if it can be pickled and restored, otherwise a SparseAllreduceError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return SparseAllreduceError(f"{type(error).__name__}: {error}")
