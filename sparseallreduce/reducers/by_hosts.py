"""Two-level lossy sums: the ranks of a host add their vectors, and a reducer works between hosts (CommLib section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from sparseallreduce.algorithms.groups import on_group
from sparseallreduce.algorithms.hierarchical import Hosts
from sparseallreduce.algorithms.steps import HostGather, HostReduceScatter, Layout, Step
from sparseallreduce.reducers.arrays import nothing
from sparseallreduce.streams.partition import boundaries
from sparseallreduce.streams.selection.base import clear_places
from sparseallreduce.streams.stream import SparseStream, index_dtype

if TYPE_CHECKING:
    from sparseallreduce.reducers.base import Reduced, Reducer, Reducing

__all__ = ["ByHosts", "timed"]

Array = NDArray[Any]

_PREFIX = "by hosts."


class ByHosts:
    """Runs a reducer between hosts, where each of a host's ranks has a separate reducer for a part.

    The operation has four steps (CommLib algorithm 2), with L the ranks of the smallest host:

    1. Dense reduce-scatter inside every host: its first L ranks obtain the sums of a part of about N/L values each.
    2. A rank selects k/L values of its part, rounded up.
    3. The ranks at one place of all hosts reduce the selected values, by a reducer for that part.
    4. The ranks of a host gather the parts.

    All values of a rank are thus in the sum of its host. Values of a part that are not selected, or not in the result, stay with the rank
    that has the part.

    Parameters
    ----------
    make : callable
        Returns the reducer of a part, given its size and k.
    """

    def __init__(self, make: Callable[[int, int], Reducer]) -> None:
        self._make = make
        self.part: Reducer | None = None  # the reducer of this rank's part, once the part is known
        self._pending: Mapping[str, Any] = {}  # a restored state for it

    def reduce(
        self, owner: Reducer, accumulator: Array, gradient: Array | None, rank: int, ranks: int
    ) -> Generator[Step, Any, tuple[SparseStream, SparseStream]]:
        """Yield the steps of the operation; return the update, and the values of this rank's part that are not in it."""
        if gradient is not None:
            accumulator += gradient
        hosts: Hosts = yield Layout()
        host, place = hosts.place_of(rank)
        members, lanes, reduction = hosts.members[host], hosts.lanes, owner.reduction
        bounds = tuple(boundaries(owner.size, lanes))
        own = reduction.enter(SparseStream._dense_form(accumulator.view(), owner.size))
        sums: SparseStream | None = yield HostReduceScatter(own, members, bounds, reduction)
        update, left = None, nothing(owner.size, accumulator)
        if sums is not None:
            values = sums._stored.copy()  # with one rank per host they would be the accumulator's memory
            part = self._reducer_of(len(values), min(len(values), -(-owner.k // lanes)), owner)
            part.returned = nothing(part.size, accumulator)
            lane = hosts.lane(place)
            reduced: Reduced = yield from on_group(timed(part.reduce(values, None, host, len(lane)), owner), lane, host, reduction)
            update = _moved(reduced.update, bounds[place], bounds[place + 1], owner.size)
            left = _left(values, reduced.contributed, part.returned, bounds[place], owner.size)
        total: SparseStream = yield HostGather(update, members, bounds, reduction)
        return total, left

    def _reducer_of(self, size: int, k: int, owner: Reducer) -> Reducer:
        """Return the reducer of this rank's part, which is kept while the part is the same."""
        part = self.part
        if part is None or (part.size, part.k) != (size, k):
            part = self.part = self._make(size, k)
            if self._pending and (self._pending["size"], self._pending["k"]) == (size, k):
                part.restore(self._pending)
            self._pending = {}
        part.reduction = owner.reduction  # so that its work is counted
        part.steps = owner.steps  # on which depends what a value codec draws
        return part

    def reset(self) -> None:
        """Reset the state."""
        self.part, self._pending = None, {}

    def state(self) -> dict[str, Any]:
        """Return what later operations depend on, by names with a common prefix."""
        own = self._pending if self.part is None else self.part.state()
        return {_PREFIX + name: value for name, value in own.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, if this rank has the same part again."""
        self.part = None
        self._pending = {name.removeprefix(_PREFIX): value for name, value in state.items() if name.startswith(_PREFIX)}

    def kept(self) -> Any:
        """Return what an operation may change."""
        return self.part, self._pending, None if self.part is None else self.part._kept()

    def take_back(self, kept: Any) -> None:
        """Restore what an operation has changed."""
        self.part, self._pending, of_part = kept
        if self.part is not None:
            self.part._take_back(of_part)


def timed(schedule: Reducing, owner: Reducer) -> Reducing:
    """Run the schedule of a reducer on behalf of another; the time to its first step is recorded as the selection time."""
    start, value, first = perf_counter(), None, True
    while True:
        try:
            step = schedule.send(value)
        except StopIteration as stop:
            reduced: Reduced = stop.value
            return reduced
        finally:
            if first:
                owner.select_seconds, first = perf_counter() - start, False
        value = yield step


def _moved(stream: SparseStream, lo: int, hi: int, size: int) -> SparseStream:
    """Return the stream of a part as a stream of the whole vector on the part's range."""
    if stream.is_dense:
        return SparseStream._dense_form(stream._stored, size, lo, hi, stream._present)
    indices, values = stream._entries()
    dtype = index_dtype(size)
    return SparseStream._sparse_form(indices.astype(dtype) + dtype.type(lo), values, size, lo, hi)


def _left(values: Array, contributed: Any, returned: SparseStream | None, lo: int, size: int) -> SparseStream:
    """Return the sums of a part that are not in the result, dense on its range; ``values`` are overwritten with them."""
    if isinstance(contributed, slice):
        values[contributed] = 0
    else:
        clear_places(values, contributed)
    if returned is not None and returned.stored:
        returned.add_to(values)
    return SparseStream._dense_form(values, size, lo, lo + len(values))
