"""A whole operation as a schedule: agree on it, choose the algorithm, run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from sparseallreduce.algorithms import ALGORITHMS, AUTO, checked_options
from sparseallreduce.algorithms.agreement import Intent, agree
from sparseallreduce.algorithms.choose import choose
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.algorithms.steps import Schedule
from sparseallreduce.errors import AlgorithmError, SparseAllreduceError, StreamTypeError
from sparseallreduce.streams.operator import Operator, as_operator
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["Call", "allreduce", "make_call", "operation"]


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
    terms = (
        ("size", str(vector.size)),
        ("dtype", vector.dtype.name),
        ("row width", str(vector.width)),
        ("operator", call.op.name),
        ("algorithm", call.algorithm),
        ("options", ", ".join(f"{name}={value!r}" for name, value in call.options.items()) or "none"),
        ("switch_density", str(call.switch_density)),
        ("machine", str(call.machine)),
    )
    return call, Intent(terms, vector.stored)


def operation(call: Call | None, intent: Intent, rank: int, ranks: int, machine: Machine | None) -> Schedule:
    """The whole operation: agree, then :func:`allreduce`."""
    entries = yield from agree(intent, rank, ranks)
    assert call is not None
    return (yield from allreduce(call, entries, rank, ranks, machine, Reduction(call.op, call.switch_density)))


def allreduce(
    call: Call, entries: Sequence[int], rank: int, ranks: int, machine: Machine | None, reduction: Reduction
) -> Schedule:
    """The reduced stream, by the algorithm that ``call`` names, or that the model picks for ``machine``."""
    name = call.algorithm
    if name == AUTO:
        name = choose(call.stream, entries, reduction, call.machine or machine or Machine())
    result = yield from ALGORITHMS[name].run(reduction.enter(call.stream), rank, ranks, reduction, **call.options)
    return reduction.leave(result.copy() if result.overlaps(call.stream) else result)


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
