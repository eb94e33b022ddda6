"""What ranks say to each other beside sums: values, arrays, and errors, which are raised by all or by none.

Everything travels in operations of the communicator's channel, as sums do. So a rank that fails between two of them tells the others in the
next (:func:`tell`), whatever that is, and an interrupt inside one fails as in any operation.
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

from sparseallreduce.algorithms.agreement import Intent, said_by_all
from sparseallreduce.algorithms.steps import DenseAllgather, Recv, Send, Share, Step
from sparseallreduce.errors import SparseAllreduceError
from sparseallreduce.runtime.communicators import known_channel, over_mpi
from sparseallreduce.runtime.launching import agree, launch
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
    "in_turns",
    "is_known",
    "leaves_on_failure",
    "mark_known",
    "tell",
    "together",
    "told",
]

Array = NDArray[Any]
Schedule = Callable[[int, int], Generator[Step, Any, Any]]
T = TypeVar("T")
P = ParamSpec("P")

_PAUSE, _LONGEST_PAUSE = 2e-5, 5e-4  # seconds between two looks of a rank that waits for others to compute
_SHORT = 248  # bytes that travel with their number
_HEAD = 8  # bytes of that number
_SAID = Intent((("operation", "an exchange of values"),), 0)
_END = Intent((("operation", "the end of a call"),), 0)
_leaving: list[tuple[Any, Any]] = []  # weak references to meetings in shared memory, each with its communicator


class _Entered(threading.local):
    """The communicators on which a call of this thread is under way that all ranks make."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []


_entered = _Entered()


def together(comm: Any, action: Callable[[], T]) -> T:
    """Return what ``action`` returns on this rank, once it has returned on all; if it raises on any rank, all raise. Collective.

    Every call of the library's that is more than one operation is made so. A rank on which something raises between two operations tells
    the others in the next one, which fails there; who has come to the end waits for all others there.

    Raises
    ------
    SparseAllreduceError
        On all ranks the same, where ``action`` raises on some alone; a rank that is interrupted raises what has interrupted it.
    """
    if comm.size == 1 or any(other is comm for (other,) in _entered.calls):
        return action()
    entry = [comm]
    _entered.calls = [other for other in _entered.calls if other[0] is not None] + [entry]
    try:
        result = action()
        if _talks(comm):
            agree(comm, _END, blocking=True)
        return result
    except GeneratorExit:
        raise
    except BaseException as error:
        shared = tell(comm, error)
        if shared is error:
            raise
        raise shared from error
    finally:
        entry[0] = None  # which is no call that could fail


def collective(function: Callable[P, T]) -> Callable[P, T]:
    """Have all ranks make the calls of a function :func:`together`. It has an argument ``comm``, a communicator, or the first has one."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        comm = bound.arguments["comm"] if "comm" in signature.parameters else args[0].comm  # type: ignore[attr-defined]
        return together(comm, lambda: function(*args, **kwargs))

    return made


def in_turns(comm: Any, steps: Generator[T, None, Any]) -> Generator[T, None, None]:
    """Yield what ``steps`` yields; each of them is made by all ranks :func:`together`."""
    end = object()
    while True:
        step: Any = together(comm, lambda: next(steps, end))
        if step is end:
            return
        yield step


def tell(comm: Any, error: BaseException) -> BaseException:
    """Tell the other ranks, in the next operation on the communicator, what has hit this one; return what is to be raised here.

    That is the common error where some ranks alone have one, and the given one where all have the same or know of it already. Whoever is
    interrupted waits for nobody.
    """
    if comm.size == 1 or is_known(error) or not _talks(comm):
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
        if not isinstance(error, Exception) or said_by_all(intent, shared):
            return error
        return shared
    return error


def leaves_on_failure(meeting: Any, comm: Any) -> None:
    """Have ``meeting.leave()`` be called before the ranks of ``comm`` are told that something has failed on this one."""
    _leaving[:] = [*(each for each in _leaving if each[0]() is not None), (weakref.ref(meeting), comm)]


def is_known(error: BaseException) -> bool:
    """Return whether the other ranks have been told of an error already."""
    return bool(getattr(error, "on_all_ranks", False) or getattr(error, "_told", ()))


def mark_known(comm: Any, error: BaseException) -> None:
    """Note that all ranks of a communicator know of an error."""
    channel = known_channel(comm)
    if channel is not None:
        channel.late.mark(error)


def gather(comm: Any, value: T, patient: bool = False) -> list[T]:
    """Return what every rank gives, in the order of ranks, on every rank; collective.

    Parameters
    ----------
    comm : communicator
    value : object
        That can be pickled.
    patient : bool
        Whether to leave the core to the others while waiting for them: where one may compute for much longer.
    """
    if comm.size == 1:
        return [value]
    if not _talks(comm):
        return cast("list[T]", comm.allgather(value))
    content, intent = b"", _SAID
    try:
        content = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        intent = Intent((), 0, error)
    return [pickle.loads(part) for part in _everyones(comm, intent, content, patient)]


def told(comm: Any, action: Callable[[], T], patient: bool = False) -> list[T]:
    """Return what ``action`` returns on every rank, in the order of ranks; if it raises on any, the lowest such rank's exception is raised
    on all. A rank that is interrupted raises what has interrupted it, and the others that it was. Collective.
    """
    value: Any = None
    failure: Exception | None = None
    try:
        value = action()
    except Exception as error:
        if comm.size == 1:
            raise
        failure = error
    except BaseException as error:
        raise tell(comm, error) from None
    everyones = gather(comm, (_portable(failure), value if failure is None else None), patient)
    for rank, (raised, _) in enumerate(everyones):
        if raised is not None:
            own = rank == comm.rank and failure is not None and type(failure) is type(raised)
            raised = failure if own else raised
            assert raised is not None
            mark_known(comm, raised)
            raise raised
    return [cast(T, each) for _, each in everyones]


def agreed(comm: Any, action: Callable[[], T], patient: bool = False) -> T:
    """Return what ``action`` returns on this rank; raise as :func:`told` does, if it raises on any. Collective."""
    result: list[T] = []
    told(comm, lambda: result.append(action()), patient)
    return result[0]


def broadcast_arrays(comm: Any, arrays: Mapping[str, Array] | None) -> dict[str, Array]:
    """Return the arrays by name that the first rank gives, on every rank; the others give None. Of any size; collective."""
    if comm.size == 1:
        return dict(arrays or {})

    def outline() -> list[tuple[str, Any, Any]]:
        return [(name, array.dtype, np.shape(array)) for name, array in (arrays or {}).items()]

    received = {}
    for name, dtype, shape in told(comm, outline)[0]:
        own = agreed(comm, lambda name=name: np.ascontiguousarray(arrays[name]) if arrays else np.empty(0))  # type: ignore[misc]
        nbytes = math.prod(shape) * dtype.itemsize
        whole = _joined(comm, _bytes(own), [nbytes] + [0] * (comm.size - 1))
        received[name] = own.reshape(shape) if comm.rank == 0 else whole[:nbytes].view(dtype).reshape(shape)
    return received


def gather_on_first(comm: Any, array: Array, lengths: list[int]) -> Array:
    """Return the arrays of all ranks, whose lengths are given, behind each other on the first rank; elsewhere the own. Of any size;
    collective.
    """
    if comm.size == 1:
        return array
    whole = agreed(comm, lambda: np.ascontiguousarray(array) if comm.rank else np.empty(sum(lengths), array.dtype))
    bounds = [0, *accumulate(lengths)]
    if comm.rank == 0:
        whole[: bounds[1]] = array
    for source in range(1, comm.size):  # one after the other, so that the first rank has memory for one

        step = Recv(source) if comm.rank == 0 else Send(0, _as_stream(_bytes(whole))) if comm.rank == source else None
        arrived = _carried_out(comm, _SAID, lambda _rank, _ranks, step=step: _nothing() if step is None else _one(step))  # type: ignore[misc]
        if comm.rank == 0:
            part = _bytes(whole[bounds[source] : bounds[source + 1]])
            part[:] = _bytes(arrived._stored)[: len(part)]
    return array if comm.rank else whole


def exchange(comm: Any, parts: list[Array]) -> list[Array]:
    """Return what every rank has for this one, in the order of ranks; each has an array for every rank, all of one dtype. Collective."""
    if comm.size == 1:
        return parts
    if not _talks(comm):
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


def _talks(comm: Any) -> bool:
    """Return whether the ranks of a communicator have a channel, as those of MPI's have."""
    return hasattr(comm, "Idup")


def _carried_out(comm: Any, intent: Intent, schedule: Schedule, patient: bool = False) -> Any:
    """Return the result of an operation of all ranks, whose bytes count in no trace."""
    request = launch(comm, intent, schedule, blocking=not patient, traced=False)
    operation, pause = request._operation, _PAUSE
    if operation is None:
        return request.wait()
    over = over_mpi()
    wait = LongWait(lambda: over.deadline.said_of(operation), limited=True)
    try:
        while patient and not operation.done:
            over.progress.advance()
            wait.look()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
    except BaseException as error:
        if not is_known(error):
            over.progress.give_up(operation, error)
        raise
    wait.over()
    return request.wait()


def _everyones(comm: Any, intent: Intent, content: bytes, patient: bool) -> list[Any]:
    """Return the bytes of every rank; short ones travel with their number."""
    step = Share((len(content).to_bytes(_HEAD, "little") + content[:_SHORT]).ljust(_HEAD + _SHORT, b"\0"))
    records: list[bytes] = _carried_out(comm, intent, lambda _rank, _ranks: _one(step), patient)
    lengths = [int.from_bytes(each[:_HEAD], "little") for each in records]
    if max(lengths) <= _SHORT:
        return [each[_HEAD : _HEAD + length] for each, length in zip(records, lengths)]
    whole = _joined(comm, np.frombuffer(content, np.uint8), lengths)
    return [whole[4 * start : 4 * start + length] for (start, _), length in zip(_ranges(lengths), lengths)]


def _joined(comm: Any, content: Array, lengths: Sequence[int]) -> Array:
    """Return the bytes of all ranks, of these lengths; those of each begin at a multiple of four."""
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
    """The schedule of a single step, which is made before: what fails in a schedule the others may have behind them already."""
    return (yield step)


def _ranges(lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Where the bytes of each rank lie, in words."""
    return tuple(pairwise([0, *accumulate(-(-length // 4) for length in lengths)]))


def _bytes(array: Array) -> Array:
    """The bytes of a contiguous array, on its memory."""
    return array.reshape(-1).view(np.uint8)


def _words(content: Array) -> Array:
    """Bytes as words, with zeros behind them where they do not fill the last; on their memory where they do, and it allows."""
    if len(content) % 4 == 0 and content.ctypes.data % 4 == 0:
        return content.view(np.int32)
    words = np.zeros(-(-len(content) // 4), np.int32)
    words.view(np.uint8)[: len(content)] = content
    return words


def _as_stream(content: Array) -> SparseStream:
    words = _words(content)
    return SparseStream._dense_form(words, len(words))


def _portable(error: Exception | None) -> Exception | None:
    """The error, or what other ranks can be told of it: some cannot be pickled, or not be made again from their pickle."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return SparseAllreduceError(f"{type(error).__name__}: {error}")
