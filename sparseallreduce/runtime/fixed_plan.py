"""Plans for streams whose indices stay fixed: routes and result memory are set up once, and each sum sends values alone."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms import AUTO
from sparseallreduce.algorithms.agreement import Intent, digest_of
from sparseallreduce.algorithms.allreduce import Call
from sparseallreduce.algorithms.fixed import FIXED, FixedSum, Kind, configured
from sparseallreduce.algorithms.steps import Step
from sparseallreduce.errors import StreamError, StreamTypeError
from sparseallreduce.runtime.communicators import over_mpi
from sparseallreduce.runtime.device_plan import DeviceEnds, checked_place, moved
from sparseallreduce.runtime.plan import MISMATCH, Common, Plan
from sparseallreduce.runtime.request import Request
from sparseallreduce.runtime.work import Work
from sparseallreduce.streams import kernels, memory
from sparseallreduce.streams.fusion import Fusion, Group, fusion_of
from sparseallreduce.streams.kernels.backend import array_module
from sparseallreduce.streams.operator import Operator
from sparseallreduce.streams.reduction import divide
from sparseallreduce.streams.stream import SparseStream, index_dtype, switch_point
from sparseallreduce.streams.wire import Encoding

__all__ = ["FixedPlan", "GroupPlan", "PlanInMemory", "lay_out", "unfit"]

Array = NDArray[Any]


class GroupPlan:
    """The streams of one dtype and width in a plan: their values in one array, the schedule of the sum, and the results.

    Parameters
    ----------
    group : Group
    streams : sequence of SparseStream
    op : Operator
    density : float, optional
        The switch density of results.
    """

    group: Group
    density: float | None

    def __init__(self, group: Group, streams: Sequence[SparseStream], op: Operator, density: float | None) -> None:
        self.group, self.density = group, density
        self.kind: Kind = Kind(op, group.dtype, group.row)
        self.ends: DeviceEnds | None = None  # None for streams on the host
        if streams[0].on_device:
            self.ends = DeviceEnds(array_module(streams[0]._stored), [stream._entries()[0] for stream in streams])
            streams = [stream.to_host() for stream in streams]
        entries = [stream._entries() for stream in streams]
        self._sets = [np.array(indices) for indices, _ in entries]  # a copy, since the user may change the original
        self.indices: Array = group.fuse_sparse(*zip(*entries, strict=True))._entries()[0]
        cuts = [0, *np.cumsum([len(each) for each in self._sets]).tolist()]
        self.values: Array = self.kind.room(cuts[-1]) if self.ends is None else self.ends.room((cuts[-1], *group.row), group.dtype)
        self._parts = [self.values[low:high] for low, high in pairwise(cuts)]
        self.fixed: FixedSum | None = None

    def take(self, number: int, given: Any) -> None:
        """Copy the values of stream ``number``, given as a stream or an array.

        Raises
        ------
        StreamError, StreamTypeError
            If indices, shape or dtype do not match the plan.
        """
        part = self._parts[number]
        checked_place(given, self.ends is not None)
        if isinstance(given, SparseStream):
            self._check_kind(number, given)
        if self.ends is not None:
            self.ends.take(number, given, part)
            return
        if isinstance(given, SparseStream):
            given = self._values_of(number, given)
        values = np.asarray(given)
        if values.dtype != part.dtype and not np.can_cast(values.dtype, part.dtype, "same_kind"):
            raise StreamTypeError(f"this plan is for values of {part.dtype}, not {values.dtype}: convert them")
        if values.shape != part.shape:
            raise StreamError(f"this plan takes values of shape {part.shape}, one for each of its positions, not {values.shape}")
        np.copyto(part, values, casting="same_kind")

    def settle(self) -> None:
        """Wait until copies of values from a GPU are complete."""
        if self.ends is not None:
            self.ends.settle()

    def _check_kind(self, number: int, stream: SparseStream) -> None:
        group = self.group
        if stream.size != group.sizes[number] or stream.dtype != group.dtype or stream._stored.shape[1:] != group.row:
            raise StreamError(MISMATCH)

    def _values_of(self, number: int, stream: SparseStream) -> Array:
        """Return the values of a stream, whose positions must be those of the plan."""
        indices = self._sets[number]
        if stream._indices is None:
            values: Array = stream._stored[indices.astype(np.intp)]
            present = values != 0 if values.ndim == 1 else values.any(axis=1)
            if stream._present is None and np.count_nonzero(present) == stream.nnz:
                return values
        theirs, values = stream._entries()
        if not np.array_equal(theirs, indices):
            raise StreamError(f"the {len(theirs)} indices of the stream differ from the {len(indices)} of the plan: create another plan")
        return values

    def lay_out_results(self, ranks: int) -> list[SparseStream]:
        """Create and return the result streams, whose values later sums fill in; for streams on a GPU, their host templates."""
        assert self.fixed is not None
        union, group = self.fixed.indices, self.group
        self._divisor = ranks if self.kind.op.is_mean else 0
        out = self.fixed.out
        self._sums = self.kind.room(len(union)) if out is None or self._divisor else out
        cuts = [0 if bound == 0 else len(union) if bound == group.size else _place(union, bound) for bound in group.bounds]
        width = group.row[0] if group.row else None
        self._results, self._dense = [], []
        for (low, high), size, offset in zip(pairwise(cuts), group.sizes, group.bounds[:-1], strict=True):
            indices = (union[low:high] - union.dtype.type(min(offset, group.size))).astype(index_dtype(size))
            sums = self._sums[low:high]
            if high - low <= switch_point(size, group.dtype, size, width, self.density):
                indices.flags.writeable = False
                self._results.append(SparseStream._sparse_form(indices, sums, size, density=self.density))
                continue
            array = memory.full((size, *group.row), group.dtype.type(0))
            present = None
            if not self.kind.op.is_sum:
                present = np.zeros(size, np.bool_)
                present[indices.astype(np.intp)] = True
            self._dense.append((indices, sums, array))
            self._results.append(SparseStream._dense_form(array, size, present=present, density=self.density))
        if self.ends is not None:
            self.ends.lay_out(self._results, [indices for indices, _, _ in self._dense])
        return self._results

    def finish(self, sums: Array) -> list[SparseStream]:
        """Write the sums into the results, and return these."""
        if self._divisor:
            divide(sums, self._divisor, self._sums)
        elif sums is not self._sums:
            np.copyto(self._sums, sums)
        if self.ends is not None:
            return self.ends.results(self._sums)
        for indices, values, array in self._dense:
            kernels.scatter_set(indices, values, 0, array)
        return self._results


class _Sums:
    """The reduced values at all positions of the union, one array for each group of streams."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.arrays = arrays

    @property
    def stored(self) -> int:
        return sum(map(len, self.arrays))


class _Sum(Work):
    """The work of one sum with fixed index sets; the same object is used for every sum of the plan."""

    def __init__(self, groups: Sequence[GroupPlan], intent: Intent, encoding: Encoding) -> None:
        self._groups, self._intent, self.encoding = groups, intent, encoding
        self.digest, self.error = digest_of(intent.terms), intent.error

    def intent(self, stream: SparseStream | None = None) -> Intent:
        return self._intent

    def entries(self, stream: SparseStream | None) -> int:
        return sum(len(group.values) for group in self._groups)

    def schedule(
        self, stream: SparseStream | None = None, entries: Sequence[int] = (), notes: Sequence[bytes] = ()
    ) -> Generator[Step, Any, _Sums]:
        results = []
        for group in self._groups:
            assert group.fixed is not None
            group.settle()
            results.append((yield from group.fixed.run(group.values)))
        return _Sums(results)

    def takes_collectives(self) -> bool:
        return False


class FixedPlan(Plan):
    """A plan for streams whose indices stay fixed."""

    def __init__(self, common: Common, is_list: bool, fusion: Fusion, groups: Sequence[GroupPlan]) -> None:
        super().__init__(common)
        self._is_list, self._fusion, self._groups = is_list, fusion, groups
        self._results: list[Any] = [None] * len(fusion.sizes)
        self._place: list[Any] = [None] * len(fusion.sizes)  # group of each stream, and its number in the group
        for group in groups:
            group.lay_out_results(common.ranks)
            for number, place in enumerate(group.group.members):
                self._place[place] = group, number
        encoding = getattr(common.call, "call", common.call).encoding
        self._encoding = Encoding("plain", encoding.value_codec, encoding.seed)
        self._sound = _Sum(groups, common.intent, self._encoding)
        common.settle()

    @property
    def algorithm(self) -> str | None:
        """The algorithm by which values are reduced; None if there are several groups of streams, or none."""
        names = {group.fixed.algorithm for group in self._groups if group.fixed is not None}
        return names.pop() if len(names) == 1 else None

    def _begun(self, stream: Any) -> Request:
        fault = self._taken(stream)
        return self._common.begin(self._sound, self._sound.schedule) if fault is None else self._failing(fault)

    def _failing(self, fault: BaseException) -> Request:
        """Start a sum that raises this rank's error on all ranks."""
        work = _Sum(self._groups, self._common.intent._replace(error=fault), self._encoding)
        return self._common.begin(work, work.schedule)

    def _release(self) -> None:
        self._groups, self._results, self._place = [], [], []

    def _taken(self, given: Any) -> BaseException | None:
        """Copy the values of all streams; return the error if that fails."""
        try:
            if self._is_list and not isinstance(given, list | tuple):
                raise StreamTypeError(f"this plan takes a list of streams or arrays, not {type(given).__name__}")
            each = given if self._is_list else [given]
            if len(each) != len(self._place):
                raise StreamError(f"this plan takes {len(self._place)} streams, not {len(each)}")
            for (group, number), one in zip(self._place, each, strict=True):
                group.take(number, one)
        except BaseException as error:
            return error
        return None

    def _finished(self, result: Any) -> Any:
        for group, sums in zip(self._groups, result.arrays, strict=True):
            for place, each in zip(group.group.members, group.finish(sums), strict=True):
                self._results[place] = each
        return list(self._results) if self._is_list else self._results[0]


class PlanInMemory(FixedPlan):
    """A plan with fixed indices for one group of streams on ranks that share memory, where a sum in memory beats messages."""

    def __init__(self, common: Common, is_list: bool, fusion: Fusion, group: GroupPlan) -> None:
        Plan.__init__(self, common)
        self._is_list, self._fusion, self._groups, self._density = is_list, fusion, [group], group.density
        self._place = [(group, number) for number in range(len(fusion.sizes))]
        call = common.call.of(0) if is_list else common.call
        self._encoding, self._divisor = call.encoding, common.ranks if call.op.is_mean else 0
        self._stream = SparseStream._sparse_form(group.indices, group.values, group.group.size, density=group.density)
        assert common.channel is not None
        if group.ends is not None:
            call = call._replace(stream=self._stream)
        self._work: Work = over_mpi().signature.Signature(call, common.intent, common.channel)
        common.settle()

    def _begun(self, stream: Any) -> Request:
        fault = self._taken(stream)
        if fault is not None:
            return super()._failing(fault)
        self._groups[0].settle()
        request = self._common.begin(self._work, None, self._stream)
        request._divisor = self._divisor
        return request

    def _finished(self, result: Any) -> Any:
        ends = self._groups[0].ends
        if ends is not None:
            result = moved(result, ends.xp)
        if not self._is_list:
            return result
        return self._fusion.cut((result,), self._density, is_sum=True)

    @property
    def algorithm(self) -> str | None:
        return "auto"


def _takes_memory(common: Common, groups: Sequence[GroupPlan]) -> bool:
    """Return True if sums in shared memory are fastest. All ranks return the same."""
    channel, call = common.channel, getattr(common.call, "call", common.call)
    one = len(groups) == 1 and call.algorithm == AUTO and call.op.is_sum and call.encoding.is_exact
    return one and channel is not None and channel.shares_memory and len(channel.near) == channel.ranks


def lay_out(common: Common, stream: Any, rank: int, ranks: int, machine: Any) -> Generator[Step, Any, tuple[Fusion, list[GroupPlan]]]:
    """Set up the sums of all groups, one after the other."""
    call = getattr(common.call, "call", common.call)
    streams = stream if isinstance(stream, list | tuple) else [stream]
    fusion = fusion_of(streams)
    groups = [GroupPlan(group, [streams[place] for place in group.members], call.op, call.switch_density) for group in fusion.groups]
    if _takes_memory(common, groups):
        return fusion, groups
    for group in groups:
        sets = group.indices, group.group.size, group.kind
        group.fixed = yield from configured(*sets, call.algorithm, rank, ranks, call.machine or machine)
    return fusion, groups


def _place(union: Array, bound: int) -> int:
    return int(np.searchsorted(union, union.dtype.type(bound)))


def unfit(call: Call, algorithm: str) -> str | None:
    """Return the reason why a plan with fixed indices cannot have these arguments, or None."""
    if algorithm not in (*FIXED, "auto"):
        return f"fixed_indices goes with algorithm 'auto' or one of {', '.join(FIXED)}, not with {algorithm!r}"
    given = [*call.options, *(["index_codec"] if call.encoding.index_codec != "auto" else [])]
    return f"options of streams whose indices travel mean nothing with fixed_indices: leave out {', '.join(given)}" if given else None
