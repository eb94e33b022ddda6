"""The checked arguments of an allreduce, and the schedule that the ranks run once they agree on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from sparseallreduce.algorithms import AUTO, FLAT, Algorithm, Hosts, algorithm_of, checked_options
from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.algorithms.choose import choose, choose_levels, dense_bits, problem_of
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.algorithms.overlap import Overlap
from sparseallreduce.algorithms.registration import as_name, term_of
from sparseallreduce.algorithms.staging import staged
from sparseallreduce.algorithms.steps import Schedule
from sparseallreduce.errors import AlgorithmError, StreamTypeError
from sparseallreduce.streams.kernels.backend import array_module
from sparseallreduce.streams.kernels.contract import LONG_FLOATS
from sparseallreduce.streams.operator import Operator, as_operator
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.streams.wire import INDEX_NAMES, VALUE_NAMES, Encoding, decoded

__all__ = ["Call", "allreduce", "arguments_of", "checked", "make_call", "memory_term", "no_stream", "operator_term", "takes_samples"]


class Call(NamedTuple):
    """The arguments of an operation on one rank, checked as far as one rank can."""

    stream: Any  # a SparseStream
    op: Operator
    algorithm: str
    options: dict[str, Any]
    switch_density: float | None
    machine: Machine | None
    encoding: Encoding


def make_call(stream: Any, op: Any, algorithm: Any, options: Mapping[str, Any]) -> tuple[Call | None, Intent]:
    """Return the call, or None if its arguments are wrong, and the intent to be agreed on.

    For a mean the operation is the sum; the caller divides the result. Nothing is raised here, since a rank that raised now would let the
    other ranks wait.
    """
    try:
        if not isinstance(stream, SparseStream):
            raise no_stream(stream)
        call = checked(stream, op, algorithm, dict(options))
        operator, chosen = operator_term(call, stream.dtype), tuple(call.options.items())
        dtype, device, algorithm = stream.dtype, stream.on_device, term_of(call.algorithm)
        terms = _terms(
            stream.size, dtype, stream.width, device, operator, algorithm, chosen, call.switch_density, call.machine, call.encoding
        )
        return call, Intent(terms, stream.stored)
    except BaseException as error:
        return None, Intent((), 0, error)


def no_stream(given: Any, collective: str = "allreduce") -> StreamTypeError:
    """Return the error for an argument that is not a stream, with the way to convert it."""
    if isinstance(given, list | tuple) and any(isinstance(each, SparseStream) for each in given):
        return StreamTypeError(f"{collective} takes one SparseStream, and not a list of them as allreduce does")
    if hasattr(given, "tocoo"):
        way = "SparseStream.from_scipy"
    elif isinstance(given, Mapping):
        way = "SparseStream.from_coo"
    else:
        way = "SparseStream.from_dense"
    return StreamTypeError(f"{collective} takes a SparseStream, not {type(given).__name__}: make one, as with {way}")


def allreduce(
    call: Call,
    entries: Sequence[int],
    rank: int,
    ranks: int,
    machine: Machine | None,
    reduction: Reduction,
    overlap: Overlap | None = None,
    hosts: Hosts | None = None,
) -> Schedule:
    """Return the schedule that reduces the streams, by the algorithm of ``call``, or the one that "auto" chooses for ``machine``.

    ``overlap`` is the estimated overlap of the ranks' index sets, if known. ``hosts`` is the layout of ranks; by default all are on one
    host.
    """
    name, options = call.algorithm, call.options
    hosts = hosts or Hosts((tuple(range(ranks)),))
    if name == AUTO or algorithm_of(name).by_hosts:
        machine = call.machine or machine or Machine()
        problem = problem_of(call.stream, sum(entries) / len(entries), len(entries), reduction, call.encoding, overlap, hosts)
        if name == AUTO:
            name = choose(problem, machine)
        if algorithm_of(name).by_hosts:
            levels = choose_levels(problem, machine) if algorithm_of(name).options else {}
            levels |= {level: chosen for level, chosen in options.items() if chosen != AUTO}
            flat = {each: _cutting(algorithm, call.stream, overlap) for each, algorithm in FLAT.items()}
            options = {**levels, "hosts": hosts, "run": flat}
    run = _cutting(algorithm_of(name), call.stream, overlap)
    schedule = run(reduction.enter(call.stream), rank, ranks, reduction, **options)
    if call.stream.on_device:
        schedule = staged(schedule, array_module(call.stream._stored), call.encoding.is_exact, call.stream.dtype)
    result = decoded((yield from schedule))
    return reduction.leave(result.copy() if result.overlaps(call.stream) else result)


def takes_samples(algorithm: str) -> bool:
    """Return True if the algorithm, or the choice of "auto", depends on the positions of the ranks' entries."""
    return algorithm == AUTO or algorithm_of(algorithm).cuts != ""


def _cutting(algorithm: Algorithm, stream: SparseStream, overlap: Overlap | None) -> Callable[..., Schedule]:
    """Return the generator function of an algorithm, with a cut of the index space bound if it accepts one and the positions are known."""
    if overlap is None or overlap.spread is None or not algorithm.cuts:
        return algorithm.run
    return partial(algorithm.run, cut=overlap.spread.cutter(dense_bits(stream) if algorithm.cuts == "dense" else 0))


def arguments_of(call: Call) -> tuple[tuple[str, str], ...]:
    """Return the terms of the arguments other than streams and operator."""
    return _arguments(term_of(call.algorithm), tuple(call.options.items()), call.switch_density, call.machine, call.encoding)


def memory_term(on_device: bool) -> tuple[str, str]:
    """Return the term that says whether streams are on the host or on a GPU."""
    return "memory of the streams", "a GPU's" if on_device else "the host's"


@lru_cache(maxsize=256)
def _terms(
    size: int,
    dtype: np.dtype[Any],
    width: int | None,
    on_device: bool,
    operator: str,
    algorithm: str,
    options: tuple[tuple[str, Any], ...],
    switch_density: float | None,
    machine: Machine | None,
    encoding: Encoding,
) -> tuple[tuple[str, str], ...]:
    vector = ("size", str(size)), ("dtype", dtype.name), ("row width", str(width))
    return (*vector, memory_term(on_device), ("operator", operator), *_arguments(algorithm, options, switch_density, machine, encoding))


def _arguments(
    algorithm: str, options: tuple[tuple[str, Any], ...], switch_density: float | None, machine: Machine | None, encoding: Encoding
) -> tuple[tuple[str, str], ...]:
    return (
        ("algorithm", algorithm),
        ("options", ", ".join(f"{name}={value!r}" for name, value in options) or "none"),
        ("switch_density", str(switch_density)),
        ("machine", str(machine)),
        *((name, str(value)) for name, value in encoding._asdict().items()),
    )


def checked(stream: Any, op: Any, algorithm: Any, options: dict[str, Any]) -> Call:
    """Return the call with all arguments except the stream checked.

    Raises
    ------
    AlgorithmError
        If an argument is unknown or out of range.
    """
    density, machine = options.pop("switch_density", None), options.pop("machine", None)
    if density is not None:
        if not (isinstance(density, Real) and 0 <= float(density) <= 1):
            raise AlgorithmError(f"switch_density is a fraction of the size, from 0 to 1, not {density!r}")
        density = float(density)
    if machine is not None:
        if not isinstance(machine, Machine):
            raise AlgorithmError(f"machine must be a sparseallreduce.Machine, not {type(machine).__name__}")
        for name, value in machine._asdict().items():
            known = value is None and Machine._field_defaults[name] is None
            if not (known or (isinstance(value, Real) and float(value) >= 0)):
                raise AlgorithmError(f"machine has {name}={value!r}: its constants are numbers, 0 or more")
    operator, algorithm = as_operator(op), as_name(algorithm)
    encoding = _encoding(options, operator)
    return Call(stream, operator, algorithm, checked_options(algorithm, options), density, machine, encoding)


def _encoding(options: dict[str, Any], op: Operator) -> Encoding:
    """Return the encoding of messages, from the ``options`` that define it."""
    default = Encoding()
    index, value, seed = (options.pop(name, getattr(default, name)) for name in Encoding._fields)
    for name, chosen, known in (("index_codec", index, INDEX_NAMES), ("value_codec", value, VALUE_NAMES)):
        if not isinstance(chosen, str) or chosen not in known:
            raise AlgorithmError(f"unknown {name} {chosen!r}: use one of {', '.join(known)}")
    if not isinstance(seed, Integral) or not 0 <= int(seed) < 2**64:
        raise AlgorithmError(f"seed is an integer from 0 to 2**64 - 1, not {seed!r}")
    if value != "exact" and not op.is_sum:
        raise AlgorithmError(f"value_codec={value!r} is for sums and means, not for {op.name!r}: leave the values exact")
    return Encoding(index, value, int(seed))


def operator_term(call: Call, dtype: np.dtype[Any]) -> str:
    """Return the term of the operator, for streams of a dtype.

    Raises
    ------
    StreamTypeError, AlgorithmError
        If the operator or the value codec does not support the dtype.
    """
    if not call.encoding.is_exact and dtype not in LONG_FLOATS:
        codec = call.encoding.value_codec
        raise StreamTypeError(f"value_codec={codec!r} is for values of float32 and float64, not of {dtype}: leave them exact")
    return call.op.term(dtype)
