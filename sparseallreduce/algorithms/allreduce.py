"""A whole operation as a schedule: agree on it, choose the algorithm, run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from sparseallreduce.algorithms import ALGORITHMS, AUTO, checked_options
from sparseallreduce.algorithms.agreement import Intent, agree
from sparseallreduce.algorithms.choose import choose, choose_beginning
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.algorithms.steps import DenseAllreduce, Schedule
from sparseallreduce.errors import AlgorithmError, StreamTypeError
from sparseallreduce.streams import packed
from sparseallreduce.streams.operator import Operator, as_operator
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = [
    "FREE",
    "PACKED",
    "READY",
    "STAGED",
    "WRITTEN",
    "Call",
    "Staging",
    "Told",
    "allreduce",
    "begins",
    "make_call",
    "operation",
    "room",
]

# Bytes of a rank up to which its stream always travels with the agreement, and bytes of all ranks up to which it does where the model
# expects that to be fastest: 131,072 of a rank at P = 2. From 17 ranks on only words are exchanged. The MPI libraries send messages of
# 4 KiB at once, longer ones in part only when the receiver has answered.
_ALWAYS = 4000
_ROOM = 1 << 18
_ROOM_RANKS = 16
# Flags of the agreement: the stream travels with the agreement; this rank can enter the dense allreduce at once; its dense form lies
# where the other ranks of its host add up their parts; its sparse form does, where FREE tells which blocks for results this rank has no
# use for.
PACKED, READY, WRITTEN, STAGED = 1, 2, 4, 8
FREE = 4  # place of the first of their bits


class Call(NamedTuple):
    """The arguments of an operation on one rank, checked as far as one rank can."""

    stream: Any  # a SparseStream
    op: Operator
    algorithm: str
    options: dict[str, Any]
    switch_density: float | None
    machine: Machine | None


class Told(NamedTuple):
    """What a rank has said of how it begins."""

    flags: int
    # Makes the step for which it is READY, or has WRITTEN or STAGED what it takes, from the entries of all ranks and their common flags.
    ready: Callable[[Sequence[int], int], Any] | None = None
    leave: Callable[[], None] | None = None  # to be called when the operation is over, however it ends
    enters: DenseAllreduce | None = None  # that step, if this rank is READY
    decline: Callable[[], None] | None = None  # to be called if it turns out that not all ranks take the step


class Staging(NamedTuple):
    """Memory in which the ranks of a host can add up sparse streams."""

    room: int  # most bytes of a stream
    offer: Callable[[SparseStream, Reduction], Told | None]  # writes it there, if the memory is not in use


def make_call(stream: Any, op: Any, algorithm: Any, options: Mapping[str, Any]) -> tuple[Call | None, Intent]:
    """The call, or None if its arguments are wrong, and what to tell the other ranks of it.

    Of a mean the operation is the sum: who hands over the result divides it.

    Nothing is raised here: a rank that left now would let the others wait.
    """
    try:
        call = _checked(stream, op, algorithm, dict(options))
        vector, told = call.stream, call.op.told(call.stream.dtype)
        chosen = tuple(call.options.items())
        terms = _terms(vector.size, vector.dtype, vector.width, told, call.algorithm, chosen, call.switch_density, call.machine)
        return call, Intent(terms, vector.stored)
    except BaseException as error:
        return None, Intent((), 0, error)


def operation(
    call: Call | None,
    intent: Intent,
    rank: int,
    ranks: int,
    machine: Machine | None,
    patient: bool = False,
    told: Told | None = None,
    staging: Staging | None = None,
) -> Schedule:
    """The whole operation: agree, then :func:`allreduce`.

    "auto" knows three shortcuts. Short streams travel with the agreement, and each rank reduces them itself: the operation takes
    one latency. Where ranks share memory, they put sparse streams there, and if all have, they add them up without messages. And
    ``patient`` ranks, which have nothing else to do, make ready for the dense algorithm if they expect it before they agree; if all
    have, they can enter a blocking collective of MPI knowing that all others will.

    Parameters
    ----------
    call, intent
        Of :func:`make_call`.
    rank, ranks : int
    machine : Machine or None
        Measured, for "auto".
    patient : bool
        Whether this rank may block.
    told : Told, optional
        What this rank has told the others already, who are not all there yet; the step that says so is not carried out again.
    staging : Staging, optional
        Where all ranks share memory.
    """
    if call is None or ranks == 1:
        entries, _, _ = yield from agree(intent, rank, ranks, room=room(ranks))
        assert call is not None
        return (yield from allreduce(call, entries, rank, ranks, machine, Reduction(call.op, call.switch_density)))
    reduction, payload = Reduction(call.op, call.switch_density), b""
    if told is None:
        told = _beginning(call, ranks, reduction, machine, patient, staging)
        if told.flags == PACKED:
            payload = packed.pack(call.stream)
    try:
        entries, payloads, common = yield from agree(intent, rank, ranks, payload, room(ranks), told.flags, told.enters)
        if common == PACKED:
            kind = packed.Kind.of(call.stream, reduction)
            return packed.Rows.of(payloads).reduced(entries, list(map(len, payloads)), kind, reduction)
        if common:
            assert told.ready is not None
            return reduction.leave((yield told.ready(entries, common)))
        if told.decline is not None:
            told.decline()
    finally:
        if told.leave is not None:
            told.leave()
    return (yield from allreduce(call, entries, rank, ranks, machine, reduction))


def _beginning(call: Call, ranks: int, reduction: Reduction, machine: Machine | None, patient: bool, staging: Staging | None) -> Told:
    """How this rank begins, with what it takes to go on."""
    flags = begins(call, ranks, reduction, machine, 0 if staging is None else staging.room)
    if flags == STAGED and staging is not None:
        return staging.offer(call.stream, reduction) or Told(0)
    if flags == READY:
        if not patient:
            return Told(0)
        step = DenseAllreduce(reduction.densify(reduction.enter(call.stream)), call.op, soon=True)
        return Told(flags, lambda *_: step, enters=step)
    return Told(flags)


def allreduce(call: Call, entries: Sequence[int], rank: int, ranks: int, machine: Machine | None, reduction: Reduction) -> Schedule:
    """The reduced stream, by the algorithm that ``call`` names, or that the model picks for ``machine``."""
    name = _chosen(call, entries, reduction, machine)
    result = yield from ALGORITHMS[name].run(reduction.enter(call.stream), rank, ranks, reduction, **call.options)
    return reduction.leave(result.copy() if result.overlaps(call.stream) else result)


def _chosen(call: Call, entries: Sequence[int], reduction: Reduction, machine: Machine | None) -> str:
    if call.algorithm != AUTO:
        return call.algorithm
    return choose(call.stream, entries, reduction, call.machine or machine or Machine())


def room(ranks: int) -> int:
    """The most bytes of a stream that travel with the agreement."""
    return _ROOM // ranks if ranks <= _ROOM_RANKS else 0


def begins(call: Call, ranks: int, reduction: Reduction, machine: Machine | None, stage: int = 0) -> int:
    """How this rank begins the operation, taking all to have as many entries: PACKED, READY for MPI's own sum, or 0 for neither.

    Where ranks share a ``stage`` for streams of so many bytes, STAGED is another answer.

    Only "auto" has a choice: an algorithm by name takes the same steps, and so rounds alike, whether ranks block or not.
    """
    summed = call.op.is_sum
    if call.algorithm != AUTO or (call.stream.is_dense and not summed):
        return 0
    nbytes, most = packed.packed_bytes(call.stream), room(ranks)
    if nbytes <= min(_ALWAYS, most):
        return PACKED
    known = call.machine or machine or Machine()
    name = choose_beginning(call.stream, ranks, reduction, known, nbytes <= most and not call.stream.is_dense, summed and nbytes <= stage)
    return {"packed": PACKED, "staged": STAGED, "dense": READY * summed}.get(name, 0)


@lru_cache(maxsize=256)
def _terms(
    size: int,
    dtype: np.dtype[Any],
    width: int | None,
    operator: str,
    algorithm: str,
    options: tuple[tuple[str, Any], ...],
    switch_density: float | None,
    machine: Machine | None,
) -> tuple[tuple[str, str], ...]:
    return (
        ("size", str(size)),
        ("dtype", dtype.name),
        ("row width", str(width)),
        ("operator", operator),
        ("algorithm", algorithm),
        ("options", ", ".join(f"{name}={value!r}" for name, value in options) or "none"),
        ("switch_density", str(switch_density)),
        ("machine", str(machine)),
    )


def _checked(stream: Any, op: Any, algorithm: Any, options: dict[str, Any]) -> Call:
    if not isinstance(stream, SparseStream):
        raise StreamTypeError(f"allreduce takes a SparseStream, not {type(stream).__name__}: make one, as with SparseStream.from_dense")
    density, machine = options.pop("switch_density", None), options.pop("machine", None)
    if density is not None:
        if not (isinstance(density, Real) and 0 <= float(density) <= 1):
            raise AlgorithmError(f"switch_density is a share of the size, from 0 to 1, not {density!r}")
        density = float(density)
    if machine is not None:
        if not isinstance(machine, Machine):
            raise AlgorithmError(f"machine must be a sparseallreduce.Machine, not {type(machine).__name__}")
        for name, value in machine._asdict().items():
            known = value is None and Machine._field_defaults[name] is None
            if not (known or (isinstance(value, Real) and float(value) >= 0)):
                raise AlgorithmError(f"machine has {name}={value!r}: its constants are numbers, 0 or more")
    return Call(stream, as_operator(op), algorithm, checked_options(algorithm, options), density, machine)
