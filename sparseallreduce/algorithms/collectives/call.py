"""A call of a collective: its checked arguments, the schedule of a rank, and the conversion of the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from numbers import Integral
from typing import Any, NamedTuple

from sparseallreduce.algorithms import ALGORITHMS, ALLREDUCE, AUTO, Hosts, algorithms
from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.algorithms.allreduce import Call, arguments_of, checked, memory_term, no_stream, operator_term
from sparseallreduce.algorithms.boundaries import Figures
from sparseallreduce.algorithms.choose import problem_of, rounded
from sparseallreduce.algorithms.collectives import COLLECTIVES
from sparseallreduce.algorithms.collectives.allgather import DISJOINT, RANGES, join_streams
from sparseallreduce.algorithms.collectives.cost import choose
from sparseallreduce.algorithms.cost import Machine, Problem
from sparseallreduce.algorithms.staging import staged
from sparseallreduce.algorithms.steps import Schedule
from sparseallreduce.errors import AlgorithmError
from sparseallreduce.streams.kernels.backend import array_module
from sparseallreduce.streams.operator import MEAN, OPERATORS, SUM, as_operator
from sparseallreduce.streams.partition import boundaries, slice_range
from sparseallreduce.streams.reduction import Reduction, divided
from sparseallreduce.streams.stream import SparseStream, index_dtype
from sparseallreduce.streams.wire import decoded

__all__ = ["Collective", "CollectiveCall", "Finish", "collective_problem", "make_collective_call", "run_collective"]

_JOINED = "operator"  # join by an operator
_ANY_SIZE = 1 << 32  # a size at which streams stay sparse, for ranks that do not know the sizes of each other's streams
_WORD = 8  # bytes of a float32 entry with its index


class Collective(NamedTuple):
    """A collective, and the arguments that its result depends on besides streams and operator."""

    name: str
    root: Any = None  # a rank, for reduce and bcast
    bounds: Any = None  # the P + 1 bounds of the ranks' ranges, for reduce_scatter; None for ranges of equal width
    join: Any = None  # "ranges", "disjoint" or an operator, for allgather

    @classmethod
    def named(cls, name: str, root: Any = 0, bounds: Any = None, join: Any = RANGES) -> Collective | None:
        """Return the collective with the given name, with those arguments that it takes; None for allreduce.

        Raises
        ------
        AlgorithmError
            If there is no such collective.
        """
        algorithms(name)  # raises the AlgorithmError
        if name == ALLREDUCE:
            return None
        return {
            "reduce": cls(name, root=root),
            "reduce_scatter": cls(name, bounds=bounds),
            "allgather": cls(name, join=join),
            "bcast": cls(name, root=root),
        }[name]

    def terms(self) -> tuple[tuple[str, str], ...]:
        """Return the arguments that must be the same on all ranks, with their names."""
        details = zip(("root", "bounds", "join"), self[1:], strict=True)
        return ("operation", self.name), *((name, str(detail)) for name, detail in details if detail is not None)

    def entries(self, stream: Any, rank: int) -> int:
        """Return the number of entries that a rank announces to the others.

        For a broadcast this is the number of 8-byte words, because the other ranks do not know the dtype.
        """
        if self.name != "bcast":
            return 0 if stream is None else stream.stored
        return 0 if stream is None or rank != self.root else -(-stream.nbytes // _WORD)


class CollectiveCall(NamedTuple):
    """The arguments of a collective on one rank, checked as far as one rank can check them."""

    collective: Collective
    call: Call

    @property
    def join(self) -> Any:
        """The ``join`` argument of an allgather as the user passed it: a name or an operator."""
        if self.collective.join != _JOINED:
            return self.collective.join
        return self.call.op.name if self.call.op.name in (*OPERATORS, MEAN.name) else self.call.op

    def finish(self, rank: int, ranks: int) -> Finish:
        """Return the function that converts the operation's result for the user. It keeps no stream alive."""
        return Finish(self.collective, self.call.op.is_mean, rank, ranks, self.call.switch_density)


@dataclass(frozen=True)
class Finish:
    """Converts the result of an operation, which may be the reduction of all streams, to the result of one rank."""

    collective: Collective
    is_mean: bool
    rank: int
    ranks: int
    switch_density: float | None

    def __call__(self, result: Any) -> Any:
        """Return the result of this rank.

        Raises
        ------
        MismatchError
            If "disjoint" streams have entries at the same position.
        """
        if isinstance(result, Exception):
            raise result
        name, root, bounds, _ = self.collective
        if name == "reduce" and self.rank != root:
            return None
        if name == "reduce_scatter":
            result = _own_range(result, bounds[self.rank], bounds[self.rank + 1], self.switch_density)
        return divided(result, self.ranks) if self.is_mean else result


def make_collective_call(
    collective: Collective, stream: Any, op: Any, algorithm: Any, options: Mapping[str, Any], rank: int, ranks: int
) -> tuple[CollectiveCall | None, Intent]:
    """Return the call, or None if its arguments are wrong, and what to tell the other ranks about it. It raises no error.

    A mean is computed as a sum, which :class:`Finish` divides.
    """
    try:
        _check_stream(stream, collective, rank)
        if collective.join is not None:
            op, collective = _joining(collective)
        call = _checked_call(stream, op, collective.name, algorithm, dict(options))
        collective = _checked_details(collective, stream, ranks)
        if collective.name == "bcast":
            if rank == collective.root:
                operator_term(call, stream.dtype)
            terms = (*collective.terms(), *arguments_of(call))
            return CollectiveCall(collective, call), Intent(terms, collective.entries(stream, rank))
        vector = [("dtype", stream.dtype.name), ("row width", str(stream.width)), memory_term(stream.on_device)]
        if collective.join != RANGES:
            vector.insert(0, ("size", str(stream.size)))
        terms = (*collective.terms(), *vector, ("operator", operator_term(call, stream.dtype)), *arguments_of(call))
        return CollectiveCall(collective, call), Intent(terms, collective.entries(stream, rank))
    except BaseException as error:
        return None, Intent((), 0, error)


def _check_stream(stream: Any, collective: Collective, rank: int) -> None:
    needed = collective.name != "bcast" or rank == collective.root
    if not isinstance(stream, SparseStream) and (needed or stream is not None):
        raise no_stream(stream, collective.name)


def _joining(collective: Collective) -> tuple[Any, Collective]:
    """Return the operator that joins the streams, if any, and the collective with the kind of join."""
    join = collective.join
    if isinstance(join, str) and join in (RANGES, DISJOINT):
        return SUM, collective
    try:
        return as_operator(join), collective._replace(join=_JOINED)
    except AlgorithmError:
        raise AlgorithmError(f"join is {RANGES!r}, {DISJOINT!r}, or an operator such as 'sum', not {join!r}") from None


def _checked_call(stream: Any, op: Any, name: str, algorithm: Any, options: dict[str, Any]) -> Call:
    """Return the call after checking that the algorithm belongs to the collective."""
    known = COLLECTIVES[name]
    if not isinstance(algorithm, str) or (algorithm not in known and algorithm != AUTO):
        near = get_close_matches(str(algorithm), known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        hint = " (that is an algorithm of allreduce)" if algorithm in ALGORITHMS and not near else hint
        raise AlgorithmError(f"unknown algorithm {algorithm!r} of {name}: use one of {', '.join([*known, AUTO])}{hint}")
    return checked(stream, op, AUTO, options)._replace(algorithm=algorithm)


def _checked_details(collective: Collective, stream: Any, ranks: int) -> Collective:
    """Return the collective after checking the root and the bounds."""
    name, root = collective.name, collective.root
    if name in ("reduce", "bcast"):
        if not isinstance(root, Integral) or isinstance(root, bool) or not 0 <= int(root) < ranks:
            raise AlgorithmError(f"root is a rank, from 0 to {ranks - 1}, not {root!r}")
        return collective._replace(root=int(root))
    if name == "reduce_scatter":
        bounds = boundaries(stream.size, ranks) if collective.bounds is None else _checked_bounds(collective.bounds, stream.size, ranks)
        return collective._replace(bounds=tuple(bounds))
    return collective


def _checked_bounds(bounds: Any, size: int, ranks: int) -> list[int]:
    given = bounds.tolist() if hasattr(bounds, "tolist") else list(bounds) if isinstance(bounds, Iterable) else [bounds]
    if not all(isinstance(bound, Integral) for bound in given) or len(given) != ranks + 1:
        raise AlgorithmError(f"bounds are {ranks + 1} integers for {ranks} rank{'s' if ranks > 1 else ''}, not {str(bounds)[:200]}")
    if given[0] != 0 or given[-1] != size or any(low > high for low, high in pairwise(given)):
        raise AlgorithmError(f"bounds increase from 0 to the size of the stream, {size}: these are {str(given)[:200]}")
    return [int(bound) for bound in given]


def collective_problem(made: CollectiveCall, entries: Sequence[int], hosts: Hosts | None) -> Problem:
    """Return the problem for the cost model. It is the same on all ranks, because it uses only what they know of each other.

    Parameters
    ----------
    made : CollectiveCall
        The call of this rank.
    entries : sequence of int
        The number of entries of each rank; for a broadcast, the number of 8-byte words of the root's stream.
    hosts : Hosts, optional
        The hosts of the ranks.
    """
    (name, _, bounds, join), call = made
    ranks, mean = len(entries), sum(entries) / len(entries)
    local = 1 if hosts is None else hosts.in_a_row
    if name == "bcast":
        return Problem(rounded(sum(entries)), _ANY_SIZE, ranks, index_codec=call.encoding.index_codec, local=local)
    problem = problem_of(call.stream, mean, ranks, Reduction(call.op, call.switch_density), call.encoding, hosts=hosts)
    problem = problem._replace(imbalance=max(1.0, rounded(max(entries)) / rounded(mean)) if mean else 1.0)
    if name == "reduce_scatter" and call.stream.size:
        widest = max(high - low for low, high in pairwise(bounds))
        problem = problem._replace(parts=Figures(entries=max(1.0, rounded(widest * ranks) / call.stream.size)))
    return problem._replace(size=_ANY_SIZE, index_bytes=4) if join == RANGES else problem


def run_collective(
    made: CollectiveCall,
    entries: Sequence[int],
    rank: int,
    ranks: int,
    machine: Machine | None,
    reduction: Reduction,
    hosts: Hosts | None = None,
) -> Schedule:
    """Return the schedule of one rank, with the algorithm of the call or the one that the model chooses for ``machine``.

    Its result must be passed through :class:`Finish`.
    """
    (name, root, bounds, join), call = made
    hosts = hosts or Hosts((tuple(range(ranks)),))
    chosen = call.algorithm
    if chosen == AUTO:
        chosen = choose(name, collective_problem(made, entries, hosts), call.machine or machine or Machine())
    run = COLLECTIVES[name][chosen]
    if name == "bcast":
        return (yield from _broadcast(run(_as_sent(call.stream, reduction), rank, ranks, reduction, root=root), call.stream, reduction))
    details: dict[str, Any] = {"root": root} if name == "reduce" else {"join": join}
    if name == "reduce_scatter":
        details = {"bounds": bounds, "hosts": hosts}
    schedule = run(reduction.enter(call.stream), rank, ranks, reduction, **details)
    if call.stream.on_device:
        schedule = staged(schedule, array_module(call.stream._stored), call.encoding.is_exact, call.stream.dtype)
    result = yield from schedule
    if not isinstance(result, SparseStream):
        return result  # None, or an error
    result = decoded(result)
    return reduction.leave(result.copy() if result.overlaps(call.stream) else result)


def entered(made: CollectiveCall, stream: SparseStream, reduction: Reduction) -> SparseStream:
    """Return a stream as a rank sends it in an allgather, or the root in a broadcast."""
    return _as_sent(stream, reduction) if made.collective.name == "bcast" else reduction.enter(stream)


def joined(made: CollectiveCall, streams: Sequence[SparseStream], reduction: Reduction) -> Any:
    """Return the result of an allgather or a broadcast, to be passed through :class:`Finish`, given the streams that ranks send."""
    result = streams[0] if made.collective.name == "bcast" else join_streams(streams, reduction, made.collective.join)
    return reduction.leave(decoded(result)) if isinstance(result, SparseStream) else result


def _as_sent(stream: Any, reduction: Reduction) -> Any:
    """Return the root's stream of a broadcast on the host, with all of its entries, on read-only arrays."""
    if stream is None:
        return None
    stream = stream.to_host()
    if not stream.is_dense:
        return reduction.enter(stream)
    return reduction.freeze(SparseStream._dense_form(stream._stored.view(), stream.size, present=stream._present))


def _broadcast(schedule: Schedule, given: Any, reduction: Reduction) -> Schedule:
    """Run a broadcast, and move the result to the device of this rank's own stream. All messages use the host's memory."""
    result = decoded((yield from schedule))
    if given is None:
        return reduction.leave(result)
    if given.on_device:
        return reduction.leave(result.to_device(array_module(given._stored)))
    return reduction.leave(result.copy() if result.overlaps(given) else result)


def _own_range(stream: SparseStream, lo: int, hi: int, density: float | None) -> SparseStream:
    """Return the entries in ``[lo, hi)`` as a stream of that size, copied if the given stream covers a wider range."""
    part, copied = slice_range(stream, lo, hi), stream.extent != hi - lo
    if part.is_dense:
        array, present = part._stored, part._present
        if copied:
            array, present = array.copy(), None if present is None else present.copy()
        own = SparseStream._dense_form(array, hi - lo, present=present, density=density)
    else:
        indices, values = part._entries()
        moved = (indices - indices.dtype.type(lo)).astype(index_dtype(hi - lo), copy=False)
        own = SparseStream._sparse_form(moved, values.copy() if copied else values, hi - lo, density=density)
        own._switch()
    return Reduction.freeze(own)
