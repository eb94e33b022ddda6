"""Sums over fixed index sets: the layout is computed once, and then only values are sent and added by position.

Kylix (Zhao and Canny 2014) calls the two halves configure and reduce. To configure, the ranks run an algorithm on their index sets, and
store for each step where every entry is placed in the union of the sets that meet there. To reduce, they run it on arrays of values.

An algorithm is composed of three kinds of stages: recursive doubling, a split of the index space, and a gathering of its parts. The split
and the gathering form the split-allgather algorithm. The hierarchical algorithm uses all three: the first between hosts, the others inside
hosts.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.boundaries import Cutter, bounds_of
from sparseallreduce.algorithms.choose import informed
from sparseallreduce.algorithms.cost import Machine, Problem, predicted_time
from sparseallreduce.algorithms.exchange import gather_parts, halvings, lower_power_of_two
from sparseallreduce.algorithms.groups import on_group
from sparseallreduce.algorithms.hierarchical import Hosts
from sparseallreduce.algorithms.overlap import Overlap, estimated, sample_bytes, sample_of, share_records
from sparseallreduce.algorithms.steps import Exchange, Layout, Quantise, Recv, RecvAny, Send, Step
from sparseallreduce.streams import kernels, memory
from sparseallreduce.streams.merging import Arriving, Merging
from sparseallreduce.streams.operator import Operator
from sparseallreduce.streams.partition import split
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream, index_dtype
from sparseallreduce.streams.wire import decoded

__all__ = ["FIXED", "FixedSum", "Kind", "configured"]

Array = NDArray[Any]
Steps: TypeAlias = Generator[Step, Any, Any]

#: The algorithms that support fixed index sets.
FIXED = ("ssar_recursive_doubling", "ssar_split_allgather", "hierarchical")

_LEAST = 4096  # new values needed before another step is worthwhile
_COUNT = struct.Struct("<q")


class Kind(NamedTuple):
    """Operator, dtype and row shape of the values."""

    op: Operator
    dtype: np.dtype[Any]
    row: tuple[int, ...]  # the shape of a row: empty, or the width alone

    def room(self, entries: int) -> Array:
        """Return an uninitialised array for ``entries`` values."""
        return memory.empty((entries, *self.row), self.dtype)


class Stage(Protocol):
    """The interface of a stage of an algorithm among some of the ranks."""

    def configure(self, indices: Array, size: int) -> Steps:
        """Compute the layout for the index set of each rank; return the result's set, or None if this rank has no part of it."""

    def run(self, values: Array) -> Steps:
        """Reduce values of the configured set; return those of the result, or None."""


def united(sets: Sequence[Array]) -> tuple[Array, list[Array | None]]:
    """Return the union of increasing index sets, and the positions of each set in it; None for a set equal to the union.

    Examples
    --------
    >>> united([np.uint32([1, 4]), np.uint32([4, 7]), np.uint32([1, 4, 7])])
    (array([1, 4, 7], dtype=uint32), [array([0, 1], dtype=uint32), array([1, 2], dtype=uint32), None])
    """
    every = np.concatenate(sets)
    every.sort(kind="stable")  # merges the sorted runs; np.unique takes a hundred times as long for a million
    first = np.ones(len(every), np.bool_)
    np.not_equal(every[1:], every[:-1], out=first[1:])
    union = every[first]
    dtype = index_dtype(len(union))
    return union, [None if len(each) == len(union) else np.searchsorted(union, each).astype(dtype) for each in sets]


def put(values: Array, places: Array | None, out: Array) -> None:
    """Write values to their positions."""
    if places is None:
        np.copyto(out, values)
    else:
        kernels.scatter_set(places, values, 0, out)


def add(op: Operator, out: Array, values: Array, places: Array | None) -> None:
    """Reduce the elements at these positions with values; the elements are the first operand."""
    if places is not None:
        kernels.scatter(places, values, 0, op, out)
        return
    with np.errstate(all="ignore"):
        if out.size > 1:
            op.ufunc(out, values, out=out)
        else:  # for a single element in place, NumPy swaps the operands, which shows in the sign of a NaN
            out[...] = op.ufunc(out, values)


class Placing(Merging):
    """The reduction of this rank's values with arriving ones, on the union of both sets; the lower rank's values are first operands."""

    def __init__(self, op: Operator, out: Array, ours: tuple[Array, Array | None], places: Array | None, first: bool) -> None:
        self._op, self._out, (self._values, self._own_places), self._places, self._first = op, out, ours, places, first
        self._done = -1  # number of placed values; -1 if this rank's own are not placed either

    def advance(self, theirs: Arriving) -> None:
        if theirs.arrived - max(self._done, 0) >= _LEAST:
            self._take(theirs.prefix()[1])

    def finish(self, theirs: SparseStream) -> Array:  # type: ignore[override]  # the array alone is needed
        self._take(decoded(theirs)._stored)
        if not self._first:
            add(self._op, self._out, self._values, self._own_places)
        return self._out

    def _take(self, values: Array) -> None:
        """Place the leading values that have not been placed."""
        if self._done < 0:
            self._out.fill(self._op.neutral_of(self._out.dtype))
            if self._first:
                put(self._values, self._own_places, self._out)
            self._done = 0
        new = slice(self._done, len(values))
        places = None if self._places is None else self._places[new]
        out = self._out[new] if places is None else self._out
        if self._first:
            add(self._op, out, values[new], places)
        else:
            put(values[new], places, out)
        self._done = len(values)


class _Round(NamedTuple):
    partner: int
    out: Array
    ours: Array | None
    theirs: Array | None


class Doubling:
    """Recursive doubling, from distant to near ranks; all ranks obtain the union."""

    def __init__(self, place: int, ranks: int, kind: Kind) -> None:
        self._place, self._kind = place, kind
        self._core = lower_power_of_two(ranks)
        self._excess = place + self._core if place + self._core < ranks else None  # the rank whose values this rank takes over
        self._rounds: list[_Round] = []

    def configure(self, indices: Array, size: int) -> Steps:
        core, place = self._core, self._place
        if place >= core:
            yield Send(place - core, set_of(indices, size))
            union = indices_of((yield Recv(place - core)))
            self.out: Array = self._kind.room(len(union))
            return union
        if self._excess is not None:
            indices = self._round(self._excess, indices, indices_of((yield Recv(self._excess))))
        for distance in halvings(core):
            partner = place ^ distance
            indices = self._round(partner, indices, indices_of((yield Exchange(partner, set_of(indices, size)))))
        if self._excess is not None:
            yield Send(self._excess, set_of(indices, size))
        self.out = self._rounds[-1].out
        return indices

    def _round(self, partner: int, ours: Array, theirs: Array) -> Array:
        union, (own_places, places) = united([ours, theirs])
        self._rounds.append(_Round(partner, self._kind.room(len(union)), own_places, places))
        return union

    def run(self, values: Array) -> Steps:
        place, core = self._place, self._core
        if place >= core:
            yield Send(place - core, (yield Quantise(stream_of(values), place, place - core)))
            np.copyto(self.out, decoded((yield Recv(place - core)))._stored)
            return self.out
        for each in self._rounds:
            if each.partner == self._excess:
                values = self._placing(each, values).finish((yield Recv(each.partner)))
                continue
            distance = place ^ each.partner
            mine: SparseStream = yield Quantise(stream_of(values), place % (2 * distance), distance)
            values = yield Exchange(each.partner, mine, self._placing(each, decoded(mine)._stored))
        if self._rounds:
            kernels.unify_nans(values)
        if self._excess is not None:
            yield Send(self._excess, stream_of(values))
        return values

    def _placing(self, each: _Round, values: Array) -> Placing:
        return Placing(self._kind.op, each.out, (values, each.ours), each.theirs, first=self._place < each.partner)


class Split:
    """A reduce-scatter: the index space is cut into parts, and each is sent directly to a rank that adds it."""

    def __init__(self, place: int, ranks: int, parts: int, kind: Kind, cut: Cutter | None = None) -> None:
        self._place, self._ranks, self._parts, self._kind, self._cut = place, ranks, parts, kind, cut

    def _others(self) -> list[int]:
        """Return the other ranks with parts, starting with the next one, so that messages are spread over receivers."""
        turn = [(self._place + distance) % self._parts for distance in range(1, self._parts + 1)]
        return [other for other in turn if other != self._place]

    def configure(self, indices: Array, size: int) -> Steps:
        ours = set_of(indices, size)
        parts = split(ours, bounds_of(ours, self._parts, self._cut))
        self._cuts = [0, *np.cumsum([part.stored for part in parts]).tolist()]
        for other in self._others():
            yield Send(other, parts[other])
        if self._place >= self._parts:
            return None
        sets = {self._place: indices_of(parts[self._place])}
        while len(sets) < self._ranks:
            source, part = yield RecvAny(set(range(self._ranks)) - set(sets))
            sets[source] = indices_of(part)
        union, self._places = united([sets[source] for source in range(self._ranks)])
        self._out = self._kind.room(len(union))
        return union

    def run(self, values: Array) -> Steps:
        place, op = self._place, self._kind.op
        parts = [values[low:high] for low, high in zip(self._cuts[:-1], self._cuts[1:], strict=True)]
        for other in self._others():
            yield Send(other, (yield Quantise(stream_of(parts[other]), place, other)))
        if place >= self._parts:
            return None
        here, missing = {place: parts[place]}, set(range(self._ranks)) - {place}
        self._out.fill(op.neutral_of(self._kind.dtype))
        for source in range(self._ranks):  # in the order of ranks, whatever the order of arrival
            while source not in here:
                other, part = yield RecvAny(missing)
                missing.remove(other)
                here[other] = decoded(part)._stored
            add(op, self._out, here.pop(source), self._places[source])
        return self._out


class Gather:
    """An allgather of the parts of the index space that the first ranks have."""

    def __init__(self, place: int, ranks: int, parts: int, kind: Kind) -> None:
        self._place, self._ranks, self._parts, self._kind = place, ranks, parts, kind

    def configure(self, indices: Array | None, size: int) -> Steps:
        sets = yield from self._gathered(None if indices is None else set_of(indices, size))
        parts = [indices_of(each) for each in sets]
        self._cuts = [0, *np.cumsum([len(part) for part in parts]).tolist()]
        self.out: Array = self._kind.room(self._cuts[-1])
        return np.concatenate(parts)

    def run(self, values: Array | None) -> Steps:
        streams = yield from self._gathered(None if values is None else stream_of(values))
        for number, stream in enumerate(streams):
            np.copyto(self.out[self._cuts[number] : self._cuts[number + 1]], decoded(stream)._stored)
        return self.out

    def _gathered(self, own: SparseStream | None) -> Generator[Step, Any, list[SparseStream]]:
        if self._parts == self._ranks:
            assert own is not None
            return (yield from gather_parts(own, self._place, self._ranks))
        found: list[Any] = [None] * self._parts
        if own is not None:
            own = found[self._place] = yield Quantise(own, self._place, self._place)
            for distance in range(1, self._ranks):
                yield Send((self._place + distance) % self._ranks, own)
        for number in range(self._parts):
            if found[number] is None:
                found[number] = yield Recv(number)
        return found


class FixedSum:
    """The state with which one rank repeats a sum over index sets that do not change.

    Attributes
    ----------
    indices : ndarray
        Positions of the result: the union of the sets of all ranks.
    algorithm : str
        One of :data:`FIXED`.
    """

    algorithm: str

    def __init__(self, algorithm: str, kind: Kind, rank: int, ranks: int, hosts: Hosts, cut: Cutter | None = None) -> None:
        self.algorithm, self._reduction = algorithm, Reduction(kind.op)
        all_ranks = tuple(range(ranks))
        # Each stage, its ranks, this rank's index among them, and whether a lossy value codec applies, which it does not inside a host.
        self._stages: list[tuple[Any, tuple[int, ...], int, bool]] = []
        if ranks > 1 and algorithm == "ssar_recursive_doubling":
            self._stages = [(Doubling(rank, ranks, kind), all_ranks, rank, True)]
        elif ranks > 1 and algorithm == "ssar_split_allgather":
            stages = Split(rank, ranks, ranks, kind, cut), Gather(rank, ranks, ranks, kind)
            self._stages = [(stage, all_ranks, rank, True) for stage in stages]
        elif ranks > 1:
            host, place = hosts.place_of(rank)
            members, lanes = hosts.members[host], hosts.lanes
            self._stages = [(Split(place, len(members), lanes, kind, cut), members, place, False)]
            if place < lanes and len(hosts.members) > 1:
                self._stages.append((Doubling(host, len(hosts.members), kind), hosts.lane(place), host, True))
            self._stages.append((Gather(place, len(members), lanes, kind), members, place, False))

    @property
    def out(self) -> Array | None:
        """The array of the result; None with a single rank, whose values are the result."""
        return self._stages[-1][0].out if self._stages else None

    def configure(self, indices: Array, size: int) -> Steps:
        """Compute the layouts of all stages."""
        for stage, members, place, _ in self._stages:
            indices = yield from on_group(stage.configure(indices, size), members, place, self._reduction)
        self.indices = indices

    def run(self, values: Array) -> Steps:
        """Reduce values of shape (entries,) or (entries, width), which must not change until the operation is done.

        Returns
        -------
        ndarray
            The values at ``indices``, in memory of this object that the next run overwrites; bitwise identical on all ranks.
        """
        for stage, members, place, lossy in self._stages:
            values = yield from on_group(stage.run(values), members, place, self._reduction, quantises=lossy)
        return values


def configured(
    indices: Array, size: int, kind: Kind, algorithm: str, rank: int, ranks: int, machine: Machine | None
) -> Generator[Step, Any, FixedSum]:
    """Set up a sum over the index sets of all ranks, which run this together.

    Parameters
    ----------
    indices : ndarray
        This rank's indices, increasing.
    size : int
        N.
    kind : Kind
    algorithm : str
        One of :data:`FIXED`, or "auto" for the one that is expected to be fastest.
    rank, ranks : int
    machine : Machine, optional
    """
    hosts: Hosts = yield Layout()
    overlap, cut = None, None
    if ranks > 1 and algorithm != FIXED[0]:
        record = _COUNT.pack(len(indices)) + sample_of(set_of(indices, size), rank, ranks)
        records = yield from share_records(record, _COUNT.size + sample_bytes(size))
        entries = sum(_COUNT.unpack_from(each)[0] for each in records) / ranks
        overlap = estimated([each[_COUNT.size :] for each in records], size)
        cut = None if overlap is None or overlap.spread is None else overlap.spread.cutter()
        if algorithm == "auto":
            algorithm = _fastest(entries, size, kind, ranks, machine or Machine(), hosts, overlap)
    fixed = FixedSum(FIXED[0] if algorithm == "auto" else algorithm, kind, rank, ranks, hosts, cut)
    yield from fixed.configure(indices, size)
    return fixed


def _fastest(entries: float, size: int, kind: Kind, ranks: int, machine: Machine, hosts: Hosts, overlap: Overlap | None) -> str:
    """Return the fastest algorithm by the model, with indices that take no bytes, so that dense forms never pay."""
    problem = Problem(
        entries=entries,
        size=size,
        ranks=ranks,
        value_bytes=kind.dtype.itemsize * int(np.prod(kind.row, dtype=np.int64)),
        index_bytes=0,
        index_codec="plain",
        local=hosts.in_a_row,
        hosts=len(hosts.members),
        lanes=hosts.lanes,
    )
    problem = problem if overlap is None else informed(problem, overlap)
    names = FIXED if len(hosts.members) > 1 and hosts.lanes > 1 else FIXED[:2]
    return min(names, key=lambda name: predicted_time(name, problem, machine))


def set_of(indices: Array, size: int) -> SparseStream:
    """Return an index set as a stream with dummy values."""
    return SparseStream._sparse_form(indices, np.zeros(len(indices), np.float16), size)


def indices_of(stream: SparseStream) -> Array:
    """Return the indices of a stream of :func:`set_of`."""
    return stream._entries()[0]


def stream_of(values: Array) -> SparseStream:
    """Return values alone as a stream."""
    return SparseStream._dense_form(values.view(), len(values))
