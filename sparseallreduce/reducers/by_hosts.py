"""Lossy sums on two levels: the ranks of a host add their vectors up, and a reducer works between hosts (CommLib section 3.2)."""

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
    """How a reducer works where every host is to be as one rank: each of a host's ranks has a reducer of its own for a part.

    The operation has four steps (CommLib algorithm 2), with L the ranks of the smallest host:

    1. Dense reduce-scatter inside every host: its first L ranks have the sums of a part of about N/L values each.
    2. Of its part a rank selects k/L values, rounded up.
    3. The ranks at one place of all hosts reduce what they have selected, by a reducer of that part.
    4. The ranks of a host gather the parts.

    All values of a rank are so in the sum of its host. What is not selected of a part, or not in the result, stays with the rank that has
    the part.

    Parameters
    ----------
    make : callable
        The reducer of a part, from its size and its k.
    """

    def __init__(self, make: Callable[[int, int], Reducer]) -> None:
        self._make = make
        self.part: Reducer | None = None  # of this rank, once it is known what it is
        self._pending: Mapping[str, Any] = {}  # a state for it

    def reduce(
        self, owner: Reducer, accumulator: Array, gradient: Array | None, rank: int, ranks: int
    ) -> Generator[Step, Any, tuple[SparseStream, SparseStream]]:
        """The schedule: the update, and what of this rank's part is left out of it."""
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
            values = sums._stored.copy()  # of a host of one rank these are the accumulator's
            part = self._reducer_of(len(values), min(len(values), -(-owner.k // lanes)), owner)
            part.returned = nothing(part.size, accumulator)
            lane = hosts.lane(place)
            reduced: Reduced = yield from on_group(timed(part.reduce(values, None, host, len(lane)), owner), lane, host, reduction)
            update = _moved(reduced.update, bounds[place], bounds[place + 1], owner.size)
            left = _left(values, reduced.contributed, part.returned, bounds[place], owner.size)
        total: SparseStream = yield HostGather(update, members, bounds, reduction)
        return total, left

    def _reducer_of(self, size: int, k: int, owner: Reducer) -> Reducer:
        """That of this rank's part, the same as before if the part is."""
        part = self.part
        if part is None or (part.size, part.k) != (size, k):
            part = self.part = self._make(size, k)
            if self._pending and (self._pending["size"], self._pending["k"]) == (size, k):
                part.restore(self._pending)
            self._pending = {}
        part.reduction = owner.reduction  # whose work is counted
        return part

    def reset(self) -> None:
        """Forget all operations."""
        self.part, self._pending = None, {}

    def state(self) -> dict[str, Any]:
        """What later operations depend on, by names that begin alike."""
        own = self._pending if self.part is None else self.part.state()
        return {_PREFIX + name: value for name, value in own.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, if this rank has the same part again."""
        self.part = None
        self._pending = {name.removeprefix(_PREFIX): value for name, value in state.items() if name.startswith(_PREFIX)}

    def kept(self) -> Any:
        """What an operation changes."""
        return self.part, self._pending, None if self.part is None else self.part._kept()

    def take_back(self, kept: Any) -> None:
        """Have it as it was."""
        self.part, self._pending, of_part = kept
        if self.part is not None:
            self.part._take_back(of_part)


def timed(schedule: Reducing, owner: Reducer) -> Reducing:
    """The schedule of a reducer that works for another one, whose time of selection is that up to the first step."""
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
    """The stream of a part as the whole vector's on the range of that part."""
    if stream.is_dense:
        return SparseStream._dense_form(stream._stored, size, lo, hi, stream._present)
    indices, values = stream._entries()
    dtype = index_dtype(size)
    return SparseStream._sparse_form(indices.astype(dtype) + dtype.type(lo), values, size, lo, hi)


def _left(values: Array, contributed: Any, returned: SparseStream | None, lo: int, size: int) -> SparseStream:
    """Of the sums of a part, those that are not in the result, dense on its range; ``values`` become these."""
    if isinstance(contributed, slice):
        values[contributed] = 0
    else:
        clear_places(values, contributed)
    if returned is not None and returned.stored:
        returned.add_to(values)
    return SparseStream._dense_form(values, size, lo, lo + len(values))
