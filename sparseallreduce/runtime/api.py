"""Sparse allreduce as an mpi4py user expects it: ``allreduce``, ``iallreduce``, and a ``Request`` to test and wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack, overload

from sparseallreduce.runtime import communicators
from sparseallreduce.runtime.launching import leave
from sparseallreduce.runtime.many import start
from sparseallreduce.runtime.options import OperationOptions, RequestOptions
from sparseallreduce.runtime.request import Request
from sparseallreduce.streams.operator import MEAN, Operator
from sparseallreduce.streams.reduction import divided
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from mpi4py import MPI

    from sparseallreduce.runtime.serial import SerialCommunicator

__all__ = ["Request", "allreduce", "iallreduce"]

Streams = list[SparseStream] | tuple[SparseStream, ...]


@overload
def allreduce(
    stream: SparseStream,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    op: str | Operator | MPI.Op = "sum",
    algorithm: str = "auto",
    **options: Unpack[OperationOptions],
) -> SparseStream: ...


@overload
def allreduce(
    stream: Streams,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    op: str | Operator | MPI.Op = "sum",
    algorithm: str = "auto",
    **options: Unpack[OperationOptions],
) -> list[SparseStream]: ...


def allreduce(
    stream: SparseStream | Streams,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    op: str | Operator | MPI.Op = "sum",
    algorithm: str = "auto",
    **options: Unpack[OperationOptions],
) -> SparseStream | list[SparseStream]:
    """The element-wise reduction of the streams of all ranks, on every rank (thesis section 3.1).

    Parameters
    ----------
    stream : SparseStream, or list or tuple of SparseStream
        Of the same size, dtype and width on all ranks, each with its own positions. It is left as it is. The streams of a list, as many
        and alike on all ranks, are reduced at once: those of one dtype and width as one, several kinds one after the other.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default, or ``SERIAL`` where there is no mpi4py. The library talks on a duplicate of it.
    op : str, Operator or mpi4py.MPI.Op
        ``"sum"``, ``"prod"``, ``"min"`` or ``"max"`` over what is present, an :class:`~sparseallreduce.Operator`, or ``"mean"`` of floats.
    algorithm : str
        One of :func:`~sparseallreduce.algorithms`; "auto" takes the one that the cost model expects to be fastest.
    **options
        ``switch_density``: share of the size above which streams go dense, if less than where that takes fewer bytes.
        ``group_size``: of ``dsar_early_switch``, 8 by default. ``timeout``: seconds, as of :meth:`Request.wait`. ``machine``: a
        :class:`~sparseallreduce.Machine` for "auto" instead of the one measured on the first operation of a communicator.
        ``index_codec``: how positions are written between hosts, "auto", "plain", "bitmap" or "gaps"; ``value_codec``: how values are,
        "exact", "float16", "bfloat16", "qsgd8" or "qsgd4" (QSGD, whose draws have a ``seed``), in sums of float32 and float64.

    Returns
    -------
    SparseStream, or list of SparseStream
        Bitwise identical on every rank, and from run to run: "auto" chooses by measured constants, which are kept in the cache folder;
        where that is lost, give the ``machine``. It may add in another order in :func:`iallreduce`, or while requests are in flight.

    Raises
    ------
    SparseAllreduceError
        On every rank the same: StreamTypeError or AlgorithmError for bad arguments on any rank, MismatchError if they differ, and what
        else goes wrong on a rank, which the text names: no memory, an operator that raises, Ctrl-C (that rank raises KeyboardInterrupt).
        A rank that has the result by then keeps it, and all ranks raise the error in the next operation. The one after that works.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> sar.allreduce(sar.SparseStream([3], [2.0], 8), comm=sar.SERIAL).values
    array([2.])
    """
    before = None
    try:
        channel = communicators.known_channel(comm)
        before = 0 if channel is None else channel.sequence
        if channel is not None and not options and type(stream) is SparseStream and type(op) is str and type(algorithm) is str:
            operation = communicators.over_mpi().fast.start(stream, op, algorithm, channel, True)
            if operation is not None:
                if operation.error is not None:
                    raise operation.error
                return operation.result if op != MEAN.name else divided(operation.result, channel.ranks)
        return start(stream, comm, op, algorithm, options, blocking=True).wait()  # type: ignore[arg-type, no-any-return]
    except BaseException as error:
        leave(comm, error, before)
        raise


def iallreduce(
    stream: SparseStream | Streams,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    op: str | Operator | MPI.Op = "sum",
    algorithm: str = "auto",
    **options: Unpack[RequestOptions],
) -> Request:
    """Start an :func:`allreduce`, and return a request at once (thesis section 4.1.5).

    Several may be in flight on one communicator, and be completed in any order. All ranks start the operations of a communicator
    in the same order, as for any collective of MPI. With the first operation on a communicator begin its duplication and, unless the
    same processes have it behind them, the measurement of the network, which take all ranks some milliseconds in the background.

    Parameters
    ----------
    stream, comm, op, algorithm, **options
        As for :func:`allreduce`. Besides, ``progress="thread"`` moves the operation on in a thread while the program computes,
        where MPI provides MPI_THREAD_MULTIPLE; by default it moves on in calls of ``test`` and ``wait``, of any request.

    Returns
    -------
    Request
        Of a list of streams, that of all: its result is the list.

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
    before = None
    try:
        channel = communicators.known_channel(comm)
        before = 0 if channel is None else channel.sequence
        if channel is not None and not options and type(stream) is SparseStream and type(op) is str and type(algorithm) is str:
            operation = communicators.over_mpi().fast.start(stream, op, algorithm, channel, False)
            if operation is not None:
                return Request(operation, divisor=channel.ranks if op == MEAN.name else 0)
        return start(stream, comm, op, algorithm, options, blocking=False)  # type: ignore[arg-type]
    except BaseException as error:
        leave(comm, error, before)
        raise
