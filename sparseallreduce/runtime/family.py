"""The collectives besides allreduce, in the style of mpi4py: ``reduce``, ``reduce_scatter``, ``allgather`` and ``bcast``.

Each has a non-blocking form, such as ``ireduce``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from sparseallreduce.algorithms.collectives.call import Collective
from sparseallreduce.runtime import communicators
from sparseallreduce.runtime.launching import leave, start_collective
from sparseallreduce.runtime.options import OperationOptions, RequestOptions
from sparseallreduce.runtime.request import Request
from sparseallreduce.streams.operator import Operator
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from mpi4py import MPI

    from sparseallreduce.runtime.serial import SerialCommunicator

__all__ = ["allgather", "bcast", "begun", "iallgather", "ibcast", "ireduce", "ireduce_scatter", "reduce", "reduce_scatter"]


def reduce(
    stream: SparseStream,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    op: str | Operator | MPI.Op = "sum",
    root: int = 0,
    algorithm: str = "auto",
    **options: Unpack[OperationOptions],
) -> SparseStream | None:
    """Reduce the streams of all ranks element by element, and return the result on one rank, the root.

    Parameters
    ----------
    stream, comm, op
        As for :func:`~sparseallreduce.allreduce`; one stream, not a list.
    root : int
        The rank that gets the result, the same on all ranks.
    algorithm : str
        One of ``algorithms("reduce")``; "auto" uses the one that the cost model predicts to be fastest.
    **options
        As for :func:`~sparseallreduce.allreduce`.

    Returns
    -------
    SparseStream or None
        The result on the root, None on the other ranks.

    Raises
    ------
    SparseAllreduceError
        The same error on every rank, as for :func:`~sparseallreduce.allreduce`.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> sar.reduce(sar.SparseStream([3], [2.0], 8), comm=sar.SERIAL).values
    array([2.])
    """
    return _done(Collective("reduce", root=root), stream, comm, op, algorithm, options)  # type: ignore[no-any-return]


def ireduce(
    stream: SparseStream,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    op: str | Operator | MPI.Op = "sum",
    root: int = 0,
    algorithm: str = "auto",
    **options: Unpack[RequestOptions],
) -> Request:
    """Start a :func:`reduce`, and return a request, as :func:`~sparseallreduce.iallreduce` does.

    Parameters
    ----------
    stream, comm, op, root, algorithm, **options
        As for :func:`reduce`, and ``progress`` as for :func:`~sparseallreduce.iallreduce`.

    Returns
    -------
    Request

    Raises
    ------
    StreamTypeError
        If ``comm`` is not an intracommunicator. All other errors are raised by ``test`` or ``wait``.
    """
    return begun(Collective("reduce", root=root), stream, comm, op, algorithm, options)


def reduce_scatter(
    stream: SparseStream,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    op: str | Operator | MPI.Op = "sum",
    bounds: Sequence[int] | None = None,
    algorithm: str = "auto",
    **options: Unpack[OperationOptions],
) -> SparseStream:
    """Reduce the streams of all ranks element by element, and return one index range of the result on each rank.

    A sharded optimiser (ZeRO, FSDP) uses it to get the gradients of each rank's own parameters. :func:`allgather` is the inverse.

    Parameters
    ----------
    stream, comm, op
        As for :func:`~sparseallreduce.allreduce`; one stream, not a list.
    bounds : sequence of int, shape (P + 1,), optional
        The bounds of the ranges: rank r gets ``[bounds[r], bounds[r + 1])``, which may be empty. They increase from 0 to the size of the
        stream, and must be the same on all ranks. By default ``bounds[r] = size * r // P``.
    algorithm : str
        One of ``algorithms("reduce_scatter")``; "auto" uses the one that the cost model predicts to be fastest.
    **options
        As for :func:`~sparseallreduce.allreduce`.

    Returns
    -------
    SparseStream
        This rank's range, of size ``bounds[rank + 1] - bounds[rank]``: position 0 is the first of the range.

    Raises
    ------
    SparseAllreduceError
        The same error on every rank, as for :func:`~sparseallreduce.allreduce`.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> sar.reduce_scatter(sar.SparseStream([3], [2.0], 8), comm=sar.SERIAL, bounds=[0, 8]).indices
    array([3], dtype=uint32)
    """
    return _done(Collective("reduce_scatter", bounds=_plain(bounds)), stream, comm, op, algorithm, options)  # type: ignore[no-any-return]


def ireduce_scatter(
    stream: SparseStream,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    op: str | Operator | MPI.Op = "sum",
    bounds: Sequence[int] | None = None,
    algorithm: str = "auto",
    **options: Unpack[RequestOptions],
) -> Request:
    """Start a :func:`reduce_scatter`, and return a request, as :func:`~sparseallreduce.iallreduce` does.

    Parameters
    ----------
    stream, comm, op, bounds, algorithm, **options
        As for :func:`reduce_scatter`, and ``progress`` as for :func:`~sparseallreduce.iallreduce`.

    Returns
    -------
    Request

    Raises
    ------
    StreamTypeError
        If ``comm`` is not an intracommunicator. All other errors are raised by ``test`` or ``wait``.
    """
    return begun(Collective("reduce_scatter", bounds=_plain(bounds)), stream, comm, op, algorithm, options)


def allgather(
    stream: SparseStream,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    join: str | Operator | MPI.Op = "ranges",
    algorithm: str = "auto",
    **options: Unpack[OperationOptions],
) -> SparseStream:
    """Join the streams of all ranks, and return the result on every rank.

    Parameters
    ----------
    stream, comm
        As for :func:`~sparseallreduce.allreduce`; one stream, not a list.
    join : str, Operator or mpi4py.MPI.Op
        "ranges": concatenate the streams in the order of the ranks, as MPI's ``Allgatherv`` does with arrays. Their sizes may differ.

        "disjoint": streams of equal size, no two of which have an entry at the same position.

        An operator, such as "sum": streams of equal size, whose entries at the same position are reduced.
    algorithm : str
        One of ``algorithms("allgather")``; "auto" uses the one that the cost model predicts to be fastest.
    **options
        As for :func:`~sparseallreduce.allreduce`.

    Returns
    -------
    SparseStream
        Bitwise identical on every rank. Its size is the sum of the sizes for "ranges", otherwise the common size of the streams.

    Raises
    ------
    SparseAllreduceError
        The same error on every rank, as for :func:`~sparseallreduce.allreduce`; MismatchError if "disjoint" streams share a position.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> stream = sar.SparseStream([3], [2.0], 8)
    >>> sar.allgather(sar.reduce_scatter(stream, comm=sar.SERIAL), comm=sar.SERIAL) == stream
    True
    """
    return _done(Collective("allgather", join=join), stream, comm, "sum", algorithm, options)  # type: ignore[no-any-return]


def iallgather(
    stream: SparseStream,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    join: str | Operator | MPI.Op = "ranges",
    algorithm: str = "auto",
    **options: Unpack[RequestOptions],
) -> Request:
    """Start an :func:`allgather`, and return a request, as :func:`~sparseallreduce.iallreduce` does.

    Parameters
    ----------
    stream, comm, join, algorithm, **options
        As for :func:`allgather`, and ``progress`` as for :func:`~sparseallreduce.iallreduce`.

    Returns
    -------
    Request

    Raises
    ------
    StreamTypeError
        If ``comm`` is not an intracommunicator. All other errors are raised by ``test`` or ``wait``.
    """
    return begun(Collective("allgather", join=join), stream, comm, "sum", algorithm, options)


def bcast(
    stream: SparseStream | None,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    root: int = 0,
    algorithm: str = "auto",
    **options: Unpack[OperationOptions],
) -> SparseStream:
    """Return the stream of one rank, the root, on every rank.

    Parameters
    ----------
    stream : SparseStream or None
        The stream that the root sends. The other ranks pass None, or any stream, which only determines whether the result is on the host or
        on a GPU.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        As for :func:`~sparseallreduce.allreduce`.
    root : int
        The rank that sends its stream, the same on all ranks.
    algorithm : str
        One of ``algorithms("bcast")``; "auto" uses the one that the cost model predicts to be fastest.
    **options
        As for :func:`~sparseallreduce.allreduce`.

    Returns
    -------
    SparseStream
        Bitwise identical on every rank.

    Raises
    ------
    SparseAllreduceError
        The same error on every rank, as for :func:`~sparseallreduce.allreduce`.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> sar.bcast(sar.SparseStream([3], [2.0], 8), comm=sar.SERIAL).nnz
    1
    """
    return _done(Collective("bcast", root=root), stream, comm, "sum", algorithm, options)  # type: ignore[no-any-return]


def ibcast(
    stream: SparseStream | None,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    root: int = 0,
    algorithm: str = "auto",
    **options: Unpack[RequestOptions],
) -> Request:
    """Start a :func:`bcast`, and return a request, as :func:`~sparseallreduce.iallreduce` does.

    Parameters
    ----------
    stream, comm, root, algorithm, **options
        As for :func:`bcast`, and ``progress`` as for :func:`~sparseallreduce.iallreduce`.

    Returns
    -------
    Request

    Raises
    ------
    StreamTypeError
        If ``comm`` is not an intracommunicator. All other errors are raised by ``test`` or ``wait``.
    """
    return begun(Collective("bcast", root=root), stream, comm, "sum", algorithm, options)


def _done(collective: Collective, stream: Any, comm: Any, op: Any, algorithm: Any, options: Any) -> Any:
    """Run an operation, and return its result on this rank."""
    before = None
    try:
        channel = communicators.known_channel(comm)
        before = 0 if channel is None else channel.sequence
        if channel is not None and _may_begin_at_once(collective, stream, op, algorithm, options):
            operation = communicators.over_mpi().fast.start(stream, op, algorithm, channel, True, None, collective)
            if operation is not None:
                if operation.error is not None:
                    raise operation.error
                return operation.work.finish(operation.result)
        return start_collective(collective, stream, comm, op, algorithm, dict(options), blocking=True).wait()
    except BaseException as error:
        leave(comm, error, before)
        raise


def begun(collective: Collective, stream: Any, comm: Any, op: Any, algorithm: Any, options: Any) -> Request:
    """Start an operation, and return its request."""
    before = None
    try:
        channel = communicators.known_channel(comm)
        before = 0 if channel is None else channel.sequence
        if channel is not None and _may_begin_at_once(collective, stream, op, algorithm, options):
            operation = communicators.over_mpi().fast.start(stream, op, algorithm, channel, False, None, collective)
            if operation is not None:
                return Request(operation, cut=operation.work.finish)
        return start_collective(collective, stream, comm, op, algorithm, dict(options), blocking=False)
    except BaseException as error:
        leave(comm, error, before)
        raise


def _may_begin_at_once(collective: Collective, stream: Any, op: Any, algorithm: Any, options: Any) -> bool:
    """Return whether the arguments have types for which the work of an earlier call can be looked up."""
    name, root, bounds, join = collective
    if options or type(op) is not str or type(algorithm) is not str:
        return False
    if type(stream) is not SparseStream and not (stream is None and name == "bcast"):
        return False
    return (root is None or type(root) is int) and (join is None or type(join) is str) and (bounds is None or type(bounds) is tuple)


def _plain(bounds: Any) -> Any:
    """Return a sequence of Python's integers as a tuple, another list or tuple as a list, and anything else unchanged."""
    if type(bounds) not in (list, tuple):
        return bounds
    return tuple(bounds) if all(type(bound) is int for bound in bounds) else list(bounds)
