"""Plans of the collectives besides allreduce: operations that are started again and again (MPI's persistent operations)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.algorithms.collectives.call import Collective, CollectiveCall, make_collective_call
from sparseallreduce.errors import StreamError, StreamTypeError
from sparseallreduce.runtime import launching
from sparseallreduce.runtime.communicators import resolve, size_of
from sparseallreduce.runtime.device_plan import checked_place
from sparseallreduce.runtime.family import begun
from sparseallreduce.runtime.options import RequestOptions
from sparseallreduce.runtime.plan import Common, Plan
from sparseallreduce.runtime.request import Request
from sparseallreduce.runtime.work import Launched
from sparseallreduce.streams.operator import Operator
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from mpi4py import MPI

    from sparseallreduce.runtime.serial import SerialCommunicator

__all__ = ["allgather_init", "bcast_init", "reduce_init", "reduce_scatter_init"]


def reduce_init(
    stream: SparseStream,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    op: str | Operator | MPI.Op = "sum",
    root: int = 0,
    algorithm: str = "auto",
    **options: Unpack[RequestOptions],
) -> Plan:
    """Plan reductions to one rank of streams like this one, to be started again and again; collective.

    Parameters
    ----------
    stream : SparseStream
        One of those to come: it sets size, dtype and width. Its entries are not used.
    comm, op, root, algorithm, **options
        As for :func:`~sparseallreduce.ireduce`.

    Returns
    -------
    Plan

    Raises
    ------
    SparseAllreduceError
        On every rank the same, as for :func:`~sparseallreduce.allreduce`.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> stream = sar.SparseStream([3], [2.0], 8)
    >>> plan = sar.reduce_init(stream, comm=sar.SERIAL)
    >>> plan.start(stream)
    >>> plan.wait().values
    array([2.])
    """
    return _planned(Collective("reduce", root=root), stream, comm, op, algorithm, options)


def reduce_scatter_init(
    stream: SparseStream,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    op: str | Operator | MPI.Op = "sum",
    bounds: Sequence[int] | None = None,
    algorithm: str = "auto",
    **options: Unpack[RequestOptions],
) -> Plan:
    """Plan reductions of which each rank gets one index range, of streams like this one; collective.

    Parameters
    ----------
    stream : SparseStream
        As for :func:`reduce_init`.
    comm, op, bounds, algorithm, **options
        As for :func:`~sparseallreduce.ireduce_scatter`.

    Returns
    -------
    Plan

    Raises
    ------
    SparseAllreduceError
        On every rank the same, as for :func:`~sparseallreduce.allreduce`.
    """
    return _planned(Collective("reduce_scatter", bounds=bounds), stream, comm, op, algorithm, options)


def allgather_init(
    stream: SparseStream,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    join: str | Operator | MPI.Op = "ranges",
    algorithm: str = "auto",
    **options: Unpack[RequestOptions],
) -> Plan:
    """Plan allgathers of streams like this one; collective.

    Parameters
    ----------
    stream : SparseStream
        As for :func:`reduce_init`.
    comm, join, algorithm, **options
        As for :func:`~sparseallreduce.iallgather`.

    Returns
    -------
    Plan

    Raises
    ------
    SparseAllreduceError
        On every rank the same, as for :func:`~sparseallreduce.allreduce`.
    """
    return _planned(Collective("allgather", join=join), stream, comm, "sum", algorithm, options)


def bcast_init(
    stream: SparseStream | None,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    root: int = 0,
    algorithm: str = "auto",
    **options: Unpack[RequestOptions],
) -> Plan:
    """Plan broadcasts; collective. All ranks start each of them, those besides the root with ``plan.start(None)``.

    Parameters
    ----------
    stream : SparseStream or None
        On the root one of those to come, as for :func:`reduce_init`.
    comm, root, algorithm, **options
        As for :func:`~sparseallreduce.ibcast`.

    Returns
    -------
    Plan

    Raises
    ------
    SparseAllreduceError
        On every rank the same, as for :func:`~sparseallreduce.allreduce`.
    """
    return _planned(Collective("bcast", root=root), stream, comm, "sum", algorithm, options)


def _planned(collective: Collective, stream: Any, comm: Any, op: Any, algorithm: Any, given: Any) -> Plan:
    options = dict(given)
    comm = resolve(comm)
    with launching.ErrorReporter(comm):
        progress = options.pop("progress", "manual")
        made, intent = make_collective_call(collective, stream, op, algorithm, options, comm.rank, size_of(comm))
        intent = intent._replace(terms=(*intent.terms, ("plan", "of any indices")))
        common = Common(comm, None, intent, progress)
        launching.agree(comm, common.checked(), blocking=True).wait()
        assert made is not None, "all ranks have been told of an error"
        return CollectivePlan(common, made, op, options)


class CollectivePlan(Plan):
    """A plan of streams with any indices, whose arguments are known to be right."""

    _fixed_indices = False

    def __init__(self, common: Common, made: CollectiveCall, op: Any, options: dict[str, Any]) -> None:
        super().__init__(common)
        self._collective, self._op, self._algorithm, self._options = made.collective, op, made.call.algorithm, options
        if made.collective.join is not None:  # by name again, as the call is made anew for every stream
            self._collective = made.collective._replace(join=made.join)
        stream = made.call.stream
        self._takes_stream = made.collective.name != "bcast" or common.comm.rank == made.collective.root
        self._kind = None if stream is None else (stream.size, stream.dtype, stream.width)
        self._there = stream is not None and stream.on_device

    def _begun(self, stream: Any) -> Request:
        fault = self._fault(stream) if self._takes_stream else None
        if fault is not None:
            return self._common.begin(Launched(Intent((), 0, fault)), None)
        options = {**self._options, "progress": self._common.progress} if self._common.progress != "manual" else self._options
        return begun(self._collective, stream, self._common.comm, self._op, self._algorithm, options)

    def _fault(self, stream: Any) -> Exception | None:
        """Return the error for a stream that does not go with the plan, None if it does."""
        if not isinstance(stream, SparseStream):
            return StreamTypeError(f"this plan takes a stream, not {type(stream).__name__}")
        try:
            checked_place(stream, self._there)
        except StreamTypeError as error:
            return error
        if (stream.size, stream.dtype, stream.width) == self._kind:
            return None
        return StreamError(f"size, dtype or width of a stream are not those of the plan: make another by {self._collective.name}_init")
