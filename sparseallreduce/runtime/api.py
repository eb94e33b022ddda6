"""The public reductions ``allreduce`` and ``iallreduce``, with the conventions that mpi4py users expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack, overload

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
    algorithm: str | Callable[..., Any] = "auto",
    **options: Unpack[OperationOptions],
) -> SparseStream: ...


@overload
def allreduce(
    stream: Streams,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    op: str | Operator | MPI.Op = "sum",
    algorithm: str | Callable[..., Any] = "auto",
    **options: Unpack[OperationOptions],
) -> list[SparseStream]: ...


def allreduce(
    stream: SparseStream | Streams,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    op: str | Operator | MPI.Op = "sum",
    algorithm: str | Callable[..., Any] = "auto",
    **options: Unpack[OperationOptions],
) -> SparseStream | list[SparseStream]:
    """Reduce the streams of all ranks element by element and return the result on every rank (thesis section 3.1).

    Parameters
    ----------
    stream : SparseStream, or list or tuple of SparseStream
        The stream of this rank, or several; they are not modified. Sizes, dtypes and widths must be the same on all ranks, positions may
        differ. Streams of a list that have one dtype and width share messages.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        The communicator, by default ``MPI.COMM_WORLD``, or ``SERIAL`` if mpi4py is not installed. The library communicates on a duplicate.
    op : str, Operator or mpi4py.MPI.Op
        "sum", "prod", "min" or "max" over the entries present, "mean" (of floats), or an :class:`~sparseallreduce.Operator`.
    algorithm : str or callable
        One of :func:`~sparseallreduce.algorithms` ("auto": what the cost model expects to be fastest), or a schedule function.
    **options
        ``switch_density``: density above which a stream becomes dense, by default and at most where the dense form is smaller.
        ``group_size``: group size of ``dsar_early_switch``, 8 by default. ``timeout``: seconds, as in :meth:`Request.wait`. ``machine``: a
        :class:`~sparseallreduce.Machine` for "auto", instead of the measured one. ``index_codec``: encoding of positions between hosts,
        "auto", "plain", "bitmap" or "gaps". ``value_codec``: encoding of values between hosts in sums of float32 and float64, "exact",
        "float16", "bfloat16", "qsgd8" or "qsgd4" (stochastic quantisation of QSGD, drawn with ``seed``).

    Returns
    -------
    SparseStream, or list of SparseStream
        Bitwise identical on every rank, and from run to run: "auto" chooses by measured constants, which are kept in the cache folder; if
        that does not persist, pass ``machine``. :func:`iallreduce`, or other requests in flight, may change the order of additions.

    Raises
    ------
    SparseAllreduceError
        The same error on every rank: StreamTypeError or AlgorithmError if any rank passes bad arguments, MismatchError if they differ
        between ranks, and an error that names the rank if one fails: out of memory, in an operator, or by Ctrl-C. A rank that already has
        the result returns it; all ranks then raise in the next operation, and the one after that works.

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
    algorithm: str | Callable[..., Any] = "auto",
    **options: Unpack[RequestOptions],
) -> Request:
    """Start an :func:`allreduce` and return a request immediately (thesis section 4.1.5).

    Several requests may be in flight on one communicator and complete in any order. All ranks must start the operations of a communicator
    in the same order, as for any MPI collective. The first operation on a communicator also starts its duplication and, unless the same
    processes have done so before, the measurement of the network. Both run in the background and take a few milliseconds.

    Parameters
    ----------
    stream, comm, op, algorithm, **options
        As for :func:`allreduce`. In addition, ``progress="thread"`` progresses the operation in a thread while the program computes; this
        needs an MPI library that provides MPI_THREAD_MULTIPLE. By default it progresses in calls of ``test`` and ``wait`` of any request.

    Returns
    -------
    Request
        The request. For a list of streams there is one request, and its result is the list of sums.

    Raises
    ------
    StreamTypeError
        If ``comm`` is not an intracommunicator. All other errors are raised by ``test`` or ``wait``.

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
