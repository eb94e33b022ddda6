"""A whole operation as a schedule: agree on it, choose the algorithm, run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from sparseallreduce.algorithms import ALGORITHMS, AUTO, checked_options
from sparseallreduce.algorithms.agreement import Intent, agree
from sparseallreduce.algorithms.choose import choose
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.algorithms.steps import DenseAllreduce, Schedule
from sparseallreduce.errors import AlgorithmError, SparseAllreduceError, StreamTypeError
from sparseallreduce.streams.operator import Operator, as_operator
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["PACKED", "READY", "Call", "allreduce", "expects_dense", "make_call", "operation", "packed", "room", "unpacked"]

# What travels with the agreement: up to 4,000 bytes of a rank at P = 2, and 500 at P = 16, above which only words are exchanged. The
# MPI libraries send messages of 4 KiB at once, longer ones in part only when the receiver has answered.
_ROOM = 8000
_ROOM_RANKS = 16
PACKED, READY = 1, 2  # flags of the agreement: the stream travels with the agreement; this rank can enter the dense allreduce at once


class Call(NamedTuple):
    """The arguments of an operation on one rank, checked as far as one rank can."""

    stream: SparseStream
    op: Operator
    algorithm: str
    options: dict[str, Any]
    switch_density: float | None
    machine: Machine | None


def make_call(stream: Any, op: Any, algorithm: Any, options: Mapping[str, Any]) -> tuple[Call | None, Intent]:
    """The call, or None if its arguments are wrong, and what to tell the other ranks of it.

    Nothing is raised here: a rank that left now would let the others wait.
    """
    try:
        call = _checked(stream, op, algorithm, dict(options))
    except SparseAllreduceError as error:
        return None, Intent((), 0, error)
    vector = call.stream
    chosen = tuple(call.options.items())
    terms = _terms(vector.size, vector.dtype, vector.width, call.op.name, call.algorithm, chosen, call.switch_density, call.machine)
    return call, Intent(terms, vector.stored)


def operation(
    call: Call | None, intent: Intent, rank: int, ranks: int, machine: Machine | None, patient: bool = False
) -> Schedule:
    """The whole operation: agree, then :func:`allreduce`.

    "auto" knows two shortcuts. Streams of a few kilobytes travel with the agreement, and each rank reduces them itself: the
    operation takes one latency. And ``patient`` ranks, which have nothing else to do, make ready for the dense algorithm if they
    expect it before they agree; if all have, they can enter a blocking collective of MPI knowing that all others will.

    Parameters
    ----------
    call, intent
        Of :func:`make_call`.
    rank, ranks : int
    machine : Machine or None
        Measured, for "auto".
    patient : bool
        Whether this rank may block.
    """
    if call is None or ranks == 1:
        entries, _, _ = yield from agree(intent, rank, ranks, room=room(ranks))
        assert call is not None
        return (yield from allreduce(call, entries, rank, ranks, machine, Reduction(call.op, call.switch_density)))
    reduction = Reduction(call.op, call.switch_density)
    payload = packed(call, room(ranks))
    flags, ready = PACKED * (payload is not None), None
    if patient and payload is None and expects_dense(call, ranks, reduction, machine):
        flags, ready = READY, reduction.densify(reduction.enter(call.stream))
    entries, payloads, common = yield from agree(intent, rank, ranks, payload or b"", room(ranks), flags)
    if common & PACKED:
        return reduction.leave(reduction.many(unpacked(payloads, entries, call.stream, reduction)))
    if ready is not None and common & READY:
        return reduction.leave((yield DenseAllreduce(ready, call.op, soon=True)))
    return (yield from allreduce(call, entries, rank, ranks, machine, reduction))


def allreduce(
    call: Call, entries: Sequence[int], rank: int, ranks: int, machine: Machine | None, reduction: Reduction
) -> Schedule:
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


def packed(call: Call, room: int) -> bytes | None:
    """The stream as it travels with the agreement: its values, and behind them its indices unless it is dense."""
    stream = call.stream
    if call.algorithm != AUTO or stream.nbytes > room:
        return None
    if stream._array is None:
        indices, values = stream._entries()
        return values.tobytes() + indices.tobytes()
    return stream._array.tobytes() if call.op.is_sum else None


def unpacked(
    payloads: Sequence[bytes], entries: Sequence[int], ours: SparseStream, reduction: Reduction
) -> list[SparseStream]:
    """The streams of all ranks, :func:`packed`: of the kind of ``ours`` and with that many entries each."""
    stored, size, density = ours._stored, ours.size, reduction.switch_density
    dtype, shape, indices_of = stored.dtype, stored.shape[1:], index_dtype(size)
    limit, row = reduction.limit(ours), dtype.itemsize * (ours.width or 1)
    streams = []
    for payload, count in zip(payloads, entries, strict=True):
        values = np.frombuffer(payload, dtype, count * row // dtype.itemsize)
        if shape:
            values = values.reshape(count, *shape)
        if len(payload) == count * row and count:
            stream = SparseStream._dense_form(values, size, density=density)
        else:
            stream = SparseStream._sparse_form(np.frombuffer(payload, indices_of, count, count * row), values, size, density=density)
            if count > limit:
                stream = reduction.densify(stream)
        streams.append(stream)
    return streams


def expects_dense(call: Call, ranks: int, reduction: Reduction, machine: Machine | None) -> bool:
    """Whether the dense algorithm is chosen if all ranks have as many entries as this one, and takes MPI's own sum.

    It then begins at once, while an operation with messages of its own is set up in the time that two of them take. And it blocks:
    Open MPI takes half the time of the non-blocking sum by which the machine was measured, less for a byte than for one of a message.
    """
    if not call.op.is_sum or call.algorithm not in (AUTO, "dense"):
        return False
    known = call.machine or Machine()
    if machine is not None and call.machine is None:
        known = machine._replace(beta_dense=min(machine.beta_dense, machine.beta))
    entries = [call.stream.stored] * ranks
    return call.algorithm == "dense" or choose(call.stream, entries, reduction, known, 2 * known.alpha) == "dense"


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
    if machine is not None and not isinstance(machine, Machine):
        raise AlgorithmError(f"machine must be a sparseallreduce.Machine, not {type(machine).__name__}")
    return Call(stream, as_operator(op), algorithm, checked_options(algorithm, options), density, machine)
