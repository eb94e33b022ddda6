"""What ranks say to each other beside sums: values, arrays, and errors, which are raised by all or by none.

It travels on a duplicate of the user's communicator, where it meets no message and no collective of the user's.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import SparseAllreduceError
from sparseallreduce.runtime import children
from sparseallreduce.runtime.communicators import check_owner, over_mpi

__all__ = ["agreed", "agreed_by_all", "broadcast_arrays", "exchange", "gather", "gather_on_first", "private"]

Array = NDArray[Any]
T = TypeVar("T")

_PAUSE, _LONGEST_PAUSE = 2e-5, 5e-4  # seconds between two looks of a rank that waits for others to compute
_PIECE = 1 << 30  # bytes of an array that one message holds at most
_keyval: Any = None  # of the attribute of a communicator that is its duplicate; none until there is a first


def private(comm: Any) -> Any:
    """The duplicate of a communicator of MPI's, made when it is first asked for and freed with it; any other as it is. Collective."""
    check_owner(comm)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(comm, mpi.Intracomm) or comm.size == 1:
        return comm
    global _keyval
    if _keyval is None:
        _keyval = mpi.Comm.Create_keyval(delete_fn=_freed)
    duplicate: Any = comm.Get_attr(_keyval)
    if duplicate is None:
        duplicate, request = comm.Idup()
        over_mpi().progress.wait_until(request.Test)
        comm.Set_attr(_keyval, duplicate)
    return duplicate


def _freed(_comm: Any, _key: int, duplicate: Any) -> None:
    if not children.generation:  # in a forked process it is the parent's
        duplicate.Free()


def gather(comm: Any, value: T) -> list[T]:
    """What every rank gives, in the order of ranks, on every rank."""
    return [value] if comm.size == 1 else cast("list[T]", private(comm).allgather(value))


def broadcast_arrays(comm: Any, arrays: Mapping[str, Array] | None) -> dict[str, Array]:
    """The arrays by name that the first rank gives, on every rank; the others give None. Of any size; collective."""
    if comm.size == 1:
        return dict(arrays or {})
    own = private(comm)
    outline = own.bcast(None if own.rank else [(name, array.dtype.str, array.shape) for name, array in (arrays or {}).items()])

    def allocated() -> dict[str, Array]:
        if arrays is not None:
            return {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        return {name: np.empty(shape, dtype) for name, dtype, shape in outline}

    received = agreed(comm, allocated)
    for array in received.values():
        for piece in _pieces(array):
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
            own.Send(piece, 0)
        return array
    bounds = np.cumsum([0, *lengths])
    whole[: bounds[1]] = array
    for source in range(1, own.size):
        for piece in _pieces(whole[bounds[source] : bounds[source + 1]]):
            own.Recv(piece, source)
    return whole


def exchange(comm: Any, parts: list[Array]) -> list[Array]:
    """What every rank has for this one, in the order of ranks, where each has an array for every rank, all of one dtype; collective."""
    own = private(comm)
    if own.size == 1 or not hasattr(own, "Alltoallv"):
        return parts if own.size == 1 else cast("list[Array]", own.alltoall(parts))
    lengths, received = [len(part) for part in parts], own.alltoall([len(part) for part in parts])
    dtype = parts[0].dtype
    arrived = agreed(comm, lambda: np.empty(sum(received), dtype))
    entry = over_mpi().MPI.BYTE.Create_contiguous(dtype.itemsize).Commit()
    places = [np.cumsum([0, *counts]) for counts in (lengths, received)]
    sent = np.concatenate(parts)
    own.Alltoallv(
        [sent.view(np.uint8), lengths, places[0][:-1].tolist(), entry], [arrived.view(np.uint8), received, places[1][:-1].tolist(), entry]
    )
    entry.Free()
    return np.split(arrived, places[1][1:-1])


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
    while True:
        try:
            if request.Test():
                break
            over_mpi().progress.advance()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        except BaseException as error:
            interruption = error
    if interruption is not None:
        raise interruption


def _portable(error: Exception | None) -> Exception | None:
    """The error, or what other ranks can be told of it: some cannot be pickled, or not be made again from their pickle."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return SparseAllreduceError(f"{type(error).__name__}: {error}")
