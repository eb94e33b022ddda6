"""Create plans, sums that can be started repeatedly, whose fixed properties are set up once (MPI's persistent operations)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.algorithms.allreduce import make_call
from sparseallreduce.algorithms.many import make_list_call
from sparseallreduce.errors import AlgorithmError, StreamError, StreamTypeError
from sparseallreduce.runtime import launching
from sparseallreduce.runtime.api import iallreduce
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.device_plan import checked_place
from sparseallreduce.runtime.fixed_plan import FixedPlan, PlanInMemory, lay_out, unfit
from sparseallreduce.runtime.options import RequestOptions
from sparseallreduce.runtime.plan import MISMATCH, Common, Plan, Streams
from sparseallreduce.runtime.request import Request
from sparseallreduce.runtime.work import Launched
from sparseallreduce.streams.fusion import fusion_of
from sparseallreduce.streams.operator import Operator
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from mpi4py import MPI

    from sparseallreduce.runtime.serial import SerialCommunicator

__all__ = ["allreduce_init"]


def allreduce_init(
    stream: SparseStream | Streams,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    op: str | Operator | MPI.Op = "sum",
    algorithm: str | Callable[..., Any] = "auto",
    fixed_indices: bool = False,
    **options: Unpack[RequestOptions],
) -> Plan:
    """Create a plan for sums of streams like ``stream``, which can be started repeatedly. Collective.

    Parameters
    ----------
    stream : SparseStream, or list or tuple of SparseStream
        An example. It defines size, dtype and width, and with ``fixed_indices`` the positions. Its values are not used.
    comm, op
        As for :func:`~sparseallreduce.allreduce`.
    algorithm : str
        As for :func:`~sparseallreduce.allreduce`; with ``fixed_indices`` one of "auto", "ssar_recursive_doubling", "ssar_split_allgather"
        or "hierarchical".
    fixed_indices : bool
        Whether the positions of this rank stay the same in all sums. The index sets of all ranks are then exchanged once, here, and every
        sum sends values alone. The streams of a list with one dtype and width share messages.
    **options
        As for :func:`~sparseallreduce.iallreduce`; with ``fixed_indices`` only ``switch_density``, ``machine``, ``value_codec`` and its
        ``seed``, and ``progress``.

    Returns
    -------
    Plan

    Raises
    ------
    SparseAllreduceError
        The same error on every rank, as for :func:`~sparseallreduce.allreduce`.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> plan = sar.allreduce_init(sar.SparseStream([3, 5], [1.0, 1.0], 8), comm=sar.SERIAL, fixed_indices=True)
    >>> plan.start([2.0, 4.0])
    >>> plan.wait().values
    array([2., 4.])
    """
    comm = resolve(comm)
    with launching.ErrorReporter(comm):
        return _planned(stream, comm, op, algorithm, fixed_indices, options)  # type: ignore[arg-type]


def _planned(stream: Any, comm: Any, op: Any, algorithm: Any, fixed_indices: bool, options: dict[str, Any]) -> Plan:
    progress = options.pop("progress", "manual")
    is_list = isinstance(stream, list | tuple)
    make: Any = make_list_call if is_list else make_call
    call, intent = make(stream, op, algorithm, options)
    if intent.error is None:
        intent = intent._replace(error=_fault(call, is_list, algorithm, fixed_indices))
    intent = intent._replace(terms=(*intent.terms, ("plan", "of fixed indices" if fixed_indices else "of any indices")))
    common = Common(comm, call, intent, progress)
    if not fixed_indices:
        launching.agree(comm, common.checked(), blocking=True).wait()
        return FreePlan(common, stream, op, algorithm, options)
    laid_out = common.carry_out(lambda rank, ranks, machine: lay_out(common, stream, rank, ranks, machine))
    fusion, groups = laid_out
    if len(groups) == 1 and groups[0].fixed is None:
        return PlanInMemory(common, is_list, fusion, groups[0])
    return FixedPlan(common, is_list, fusion, groups)


def _fault(call: Any, is_list: bool, algorithm: Any, fixed_indices: bool) -> Exception | None:
    """Return an error if a plan cannot have these arguments, otherwise None."""
    fault = unfit(call.call if is_list else call, algorithm) if fixed_indices else None
    return None if fault is None else AlgorithmError(fault)


class FreePlan(Plan):
    """A plan for streams with any indices: every sum is an ``iallreduce`` with arguments that have been checked."""

    _fixed_indices = False

    def __init__(self, common: Common, stream: Any, op: Any, algorithm: Any, options: dict[str, Any]) -> None:
        super().__init__(common)
        self._is_list = isinstance(stream, list | tuple)
        streams = stream if self._is_list else [stream]
        self._fusion, self._there = fusion_of(streams), bool(streams) and streams[0].on_device
        self._arguments = op, algorithm, options
        common.settle()

    def _begun(self, stream: Any) -> Request:
        fault = self._mismatch(stream)
        if fault is not None:
            return self._common.begin(Launched(Intent((), 0, fault)), None)
        op, algorithm, options = self._arguments
        return iallreduce(stream, self._common.comm, op, algorithm, **options, progress=self._common.progress)  # type: ignore[arg-type]

    def _mismatch(self, stream: Any) -> Exception | None:
        """Return an error if a stream, or a list, does not match the plan, otherwise None."""
        if isinstance(stream, list | tuple) != self._is_list:
            return StreamTypeError(f"this plan takes {'a list of streams' if self._is_list else 'a stream'}, not {type(stream).__name__}")
        try:
            streams = stream if self._is_list else [stream]
            fusion = fusion_of(streams)
            for each in streams[:1]:
                checked_place(each, self._there)
        except StreamTypeError as error:
            return error
        same = fusion is self._fusion or (fusion.sizes, fusion.kinds) == (self._fusion.sizes, self._fusion.kinds)
        return None if same else StreamError(MISMATCH)
