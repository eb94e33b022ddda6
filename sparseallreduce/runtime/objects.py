"""What ranks say to each other beside sums: values, arrays, and errors, which are raised by all or by none.

Values are exchanged by an operation of the library, so that a rank that waits knows for whom, and a timeout and errors hold for all. Arrays
follow once all ranks have entered, on a duplicate of the user's communicator, where they meet no message and no collective of the user's.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import Intent, digest_of
from sparseallreduce.algorithms.steps import Share, Step
from sparseallreduce.errors import SparseAllreduceError, WaitTimeoutError
from sparseallreduce.runtime.communicators import over_mpi
from sparseallreduce.runtime.launching import launched
from sparseallreduce.runtime.stalls import LongWait, blocked
from sparseallreduce.runtime.work import Work

__all__ = ["agreed", "agreed_by_all", "broadcast", "broadcast_arrays", "exchange", "gather", "gather_on_first", "private"]

Array = NDArray[Any]
T = TypeVar("T")

_PAUSE, _LONGEST_PAUSE = 2e-5, 5e-4  # seconds between two looks of a rank that waits for others to compute
_PIECE = 1 << 30  # bytes of an array that one message holds at most
_TERMS = (("operation", "an exchange of values"),)
_keyval: Any = None  # of the attribute of a communicator that is its duplicate; none until there is a first


class _Exchange(Work):
    """An exchange of what every rank says, as bytes.

    Parameters
    ----------
    said : bytes
    error : BaseException or None
        What hit this rank as it wrote them.
    """

    digest = digest_of(_TERMS)
    counted = False

    def __init__(self, said: bytes, error: BaseException | None) -> None:
        self._said, self.error = said, error

    def intent(self, stream: Any) -> Intent:
        return Intent(_TERMS, len(self._said), self.error)

    def entries(self, stream: Any) -> int:
        return len(self._said)

    def schedule(self, stream: Any, entries: Sequence[int], notes: Sequence[bytes] = ()) -> Generator[Step, Any, list[bytes]]:
        records: list[bytes] = yield Share(self._said.ljust(max(entries), b"\0"))
        return [record[:length] for record, length in zip(records, entries, strict=True)]

    def takes_collectives(self) -> bool:
        return False


def _is_of_mpi(comm: Any) -> bool:
    """Whether this is a communicator of MPI's with several ranks, and not something that stands for one."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(comm, mpi.Intracomm) and comm.size > 1


def private(comm: Any) -> Any:
    """The duplicate of a communicator of MPI's, made when it is first asked for and freed with it; any other as it is. Collective."""
    if not _is_of_mpi(comm):
        return comm
    global _keyval
    if _keyval is None:
        _keyval = over_mpi().MPI.Comm.Create_keyval(delete_fn=lambda _comm, _key, kept: kept.Free())
    duplicate: Any = comm.Get_attr(_keyval)
    if duplicate is None:
        gather(comm, None)  # so that a rank which has not entered is waited for where it is known, and for no longer than the timeout
        duplicate, request = comm.Idup()
        over_mpi().progress.wait_until(request.Test, lambda: (_who(comm), "the duplication of the communicator, which all have entered"))
        comm.Set_attr(_keyval, duplicate)
    return duplicate


def _who(comm: Any) -> str:
    return f"rank {comm.rank} of {comm.size}"


def gather(comm: Any, value: T) -> list[T]:
    """What every rank gives, in the order of ranks, on every rank."""
    if comm.size == 1:
        return [value]
    if not _is_of_mpi(comm):
        return cast("list[T]", comm.allgather(value))
    said, failure = b"", None
    try:
        said = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # which the others are told
        failure = error
    records: list[bytes] = launched(comm, lambda _: _Exchange(said, failure), None, True, "manual").wait()
    return [pickle.loads(record) for record in records]


def broadcast(comm: Any, value: T) -> T:
    """What the first rank gives, on every rank; what the others give does not count. Of any size; collective."""
    if comm.size == 1:
        return value
    said = agreed(comm, lambda: None if comm.rank else {"value": np.frombuffer(bytearray(pickle.dumps(value)), np.uint8)})
    return cast("T", pickle.loads(broadcast_arrays(comm, said)["value"].tobytes()))


def broadcast_arrays(comm: Any, arrays: Mapping[str, Array] | None) -> dict[str, Array]:
    """The arrays by name that the first rank gives, on every rank; the others give None. Of any size; collective."""
    if comm.size == 1:
        return dict(arrays or {})
    own = private(comm)
    outline = gather(comm, None if own.rank else [(name, array.dtype.str, array.shape) for name, array in (arrays or {}).items()])[0] or []

    def allocated() -> dict[str, Array]:
        if arrays is not None:
            return {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        return {name: np.empty(shape, dtype) for name, dtype, shape in outline}

    received = agreed(comm, allocated)
    for array in received.values():
        for piece in _pieces(array):
            with _sending(own):
                own.Bcast(piece, 0)
    return received


def gather_on_first(comm: Any, array: Array, lengths: list[int]) -> Array:
    """The arrays of all ranks, whose lengths are given, behind each other on the first rank; elsewhere the own. Of any size; collective."""
    if comm.size == 1:
        return array
    own = private(comm)
    whole = agreed(comm, lambda: np.ascontiguousarray(array) if own.rank else np.empty(sum(lengths), array.dtype))
    if own.rank > 0:
        for piece in _pieces(whole):
            with _sending(own):
                own.Send(piece, 0)
        return array
    bounds = np.cumsum([0, *lengths])
    whole[: bounds[1]] = array
    for source in range(1, own.size):
        for piece in _pieces(whole[bounds[source] : bounds[source + 1]]):
            with _sending(own, f": rank {source} has not sent what is due"):
                own.Recv(piece, source)
    return whole


def exchange(comm: Any, parts: list[Array]) -> list[Array]:
    """What every rank has for this one, in the order of ranks, where each has an array for every rank, all of one dtype; collective."""
    own = private(comm)
    if own.size == 1 or not hasattr(own, "Alltoallv"):
        return parts if own.size == 1 else cast("list[Array]", own.alltoall(parts))
    lengths = [len(part) for part in parts]
    received = [each[own.rank] for each in gather(comm, lengths)]
    dtype = parts[0].dtype
    arrived = agreed(comm, lambda: np.empty(sum(received), dtype))
    entry = over_mpi().MPI.BYTE.Create_contiguous(dtype.itemsize).Commit()
    places = [np.cumsum([0, *counts]) for counts in (lengths, received)]
    sent = np.concatenate(parts)
    ours, theirs = (sent.view(np.uint8), lengths, places[0]), (arrived.view(np.uint8), received, places[1])
    with _sending(own):
        own.Alltoallv(*([array, counts, starts[:-1].tolist(), entry] for array, counts, starts in (ours, theirs)))
    entry.Free()
    return np.split(arrived, places[1][1:-1])


def _sending(own: Any, whom: str = ": all ranks have entered it, and MPI does not tell which is late") -> blocked:
    """Report a transfer of arrays that takes long."""
    return blocked(own.rank, own.size, f"a transfer of arrays between the ranks{whom}")


def _pieces(array: Array) -> list[Array]:
    """The bytes of an array, in pieces that fit into a message."""
    content = array.reshape(-1).view(np.uint8)
    return [content[start : start + _PIECE] for start in range(0, len(content), _PIECE)]


def agreed(comm: Any, action: Callable[[], T]) -> T:
    """What ``action`` returns on this rank; if it raises on any rank, the lowest such rank's exception is raised on all."""
    result: Any = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    for raised in gather(comm, failure if comm.size == 1 else _portable(failure)):
        if raised is not None:
            raise raised
    return cast(T, result)


def agreed_by_all(comm: Any, action: Callable[[], T], patient: bool = False) -> T:
    """As :func:`agreed`, and where ``action`` is interrupted on a rank, all raise: that one what has interrupted it.

    Parameters
    ----------
    comm : communicator
    action : callable
    patient : bool
        Whether a rank that has come to its end leaves the core to others, until all have: where one may take much longer.
    """
    interruption: list[BaseException] = []

    def guarded() -> T:
        try:
            try:
                return action()
            finally:
                if patient:
                    _wait_for_all(private(comm))
        except Exception:
            raise
        except BaseException as error:
            interruption.append(error)
            raise SparseAllreduceError(f"rank {comm.rank} was interrupted by a {type(error).__name__}") from error

    try:
        return agreed(comm, guarded)
    except SparseAllreduceError:
        if interruption:
            raise interruption[0] from None
        raise


def _wait_for_all(own: Any) -> None:
    """Wait until all ranks have come here; an interruption is raised then."""
    if own.size == 1 or not hasattr(own, "Ibarrier"):
        return
    request, pause = own.Ibarrier(), _PAUSE
    interruption: BaseException | None = None
    wait = LongWait(lambda: (_who(own), "the work between two exchanges of values: another rank is not done with its part"), limited=True)
    while True:
        try:
            if request.Test():
                break
            over_mpi().progress.advance()
            wait.look()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        except WaitTimeoutError:
            raise
        except BaseException as error:
            interruption = error
    wait.over()
    if interruption is not None:
        raise interruption


def _portable(error: Exception | None) -> Exception | None:
    """The error, or what other ranks can be told of it: some cannot be pickled, or not be made again from their pickle."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return SparseAllreduceError(f"{type(error).__name__}: {error}")
