"""Sums of a list of streams: one agreement, and one reduction for all streams of the same dtype and width."""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from sparseallreduce.algorithms import Hosts, algorithm_of
from sparseallreduce.algorithms.agreement import STREAMS, Intent, digest_of
from sparseallreduce.algorithms.allreduce import Call, allreduce, arguments_of, checked, memory_term, operator_term, takes_samples
from sparseallreduce.algorithms.choose import is_worth_a_sample
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.algorithms.overlap import Overlap, estimated, sample_bytes, sample_of, share_records
from sparseallreduce.algorithms.steps import Share, Step
from sparseallreduce.errors import StreamTypeError
from sparseallreduce.streams.fusion import Fusion, fusion_of
from sparseallreduce.streams.operator import Operator
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["ListCall", "allreduce_list", "make_fused_call", "make_list_call"]

_ONCE = 16  # messages must take this many times as long as for remembered samples


class ListCall(NamedTuple):
    """The arguments of an operation on a list of streams, checked as far as one rank can."""

    call: Call  # without a stream
    fusion: Fusion
    fused: tuple[SparseStream, ...]  # one for each group

    @property
    def op(self) -> Operator:
        return self.call.op

    def of(self, group: int) -> Call:
        """Return the call of one group."""
        return self.call._replace(stream=self.fused[group])

    def reductions(self) -> list[Reduction]:
        """Return a reduction for each group."""
        return [Reduction(self.op, self.call.switch_density) for _ in self.fused]

    def cutter(self) -> Callable[[Any], list[SparseStream]]:
        """Return a function that cuts the result of the operation into the list of results; it keeps no stream."""
        return partial(_cut, self.fusion, self.call.switch_density, self.op.is_sum)


def make_list_call(streams: Sequence[Any], op: Any, algorithm: Any, options: Mapping[str, Any]) -> tuple[ListCall | None, Intent]:
    """Return the call and intent for a list or tuple, like :func:`~sparseallreduce.algorithms.allreduce.make_call` for a stream."""
    try:
        fusion, call = fusion_of(streams), checked(None, op, algorithm, dict(options))
        return _made(fusion, fusion.fuse(streams, masked=not call.op.is_sum), call)
    except BaseException as error:
        return None, Intent((), 0, error)


def make_fused_call(fusion: Fusion, fused: SparseStream, op: Any, algorithm: Any) -> tuple[ListCall | None, Intent]:
    """Return the call and intent for streams that are already fused."""
    try:
        return _made(fusion, (fused,), checked(None, op, algorithm, {}))
    except BaseException as error:
        return None, Intent((), 0, error)


def allreduce_list(
    call: ListCall, rank: int, ranks: int, machine: Machine | None, reductions: Sequence[Reduction], hosts: Hosts | None = None
) -> Generator[Step, Any, tuple[SparseStream, ...]]:
    """Return the schedule that reduces the fused stream of each group, one after the other."""
    groups = len(call.fused)
    entries: list[Sequence[int]] = [()] * groups
    overlaps: list[Overlap | None] = [None] * groups
    algorithm = call.call.algorithm
    if groups and ranks > 1 and (takes_samples(algorithm) or algorithm_of(algorithm).by_hosts):
        layout = struct.Struct(f"<{groups}q")
        records: list[bytes] = yield Share(layout.pack(*[stream.stored for stream in call.fused]))
        entries = list(zip(*map(layout.unpack, records), strict=True))
        if takes_samples(algorithm):
            overlaps = yield from _overlaps(call, entries, rank, ranks, machine, hosts)
    results = []
    for group, reduction in enumerate(reductions):
        given = entries[group] or (call.fused[group].stored,)
        results.append((yield from allreduce(call.of(group), given, rank, ranks, machine, reduction, overlaps[group], hosts)))
    return tuple(results)


def _overlaps(
    call: ListCall, entries: Sequence[Sequence[int]], rank: int, ranks: int, machine: Machine | None, hosts: Hosts | None
) -> Generator[Step, Any, list[Overlap | None]]:
    """Exchange samples of each group's index sets, and return the overlap estimated for each group."""
    machine, near, found = call.call.machine or machine or Machine(), hosts is None or len(hosts.members) == 1, []
    for stream, counts in zip(call.fused, entries, strict=True):
        overlap = None
        if is_worth_a_sample(stream, sum(counts) / ranks / _ONCE, ranks, machine, near):
            samples = yield from share_records(sample_of(stream, rank, ranks), sample_bytes(stream.size))
            overlap = estimated(samples, stream.size)
        found.append(overlap)
    return found


def _cut(fusion: Fusion, density: float | None, is_sum: bool, result: Any) -> list[SparseStream]:
    return fusion.cut(result if isinstance(result, tuple) else (result,), density, is_sum)


def _made(fusion: Fusion, fused: tuple[SparseStream, ...], call: Call) -> tuple[ListCall, Intent]:
    operators = []
    for group in fusion.groups:
        try:
            operators.append(operator_term(call, group.dtype))
        except StreamTypeError as error:
            raise StreamTypeError(f"element {group.members[0]} of the list: {error}") from error
    on_device = bool(fused) and fused[0].on_device
    terms = _terms(fusion, on_device, "; ".join(dict.fromkeys(operators)), *arguments_of(call))
    return ListCall(call, fusion, fused), Intent(terms, sum(stream.stored for stream in fused), parts=_parts(fusion))


@lru_cache(maxsize=256)
def _parts(fusion: Fusion) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return the terms of each stream."""
    return tuple(
        (
            (f"size of stream {place} of the list", str(size)),
            (f"dtype of stream {place} of the list", dtype.name),
            (f"row width of stream {place} of the list", str(row[0] if row else None)),
        )
        for place, (size, (dtype, row)) in enumerate(zip(fusion.sizes, fusion.kinds, strict=True))
    )


@lru_cache(maxsize=256)
def _terms(fusion: Fusion, on_device: bool, operator: str, *arguments: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    count = len(fusion.sizes)
    return (
        ("size", f"a list of {count} stream{'' if count == 1 else 's'}"),
        (STREAMS, f"{digest_of(sum(_parts(fusion), ())):x}"),
        memory_term(on_device),
        ("operator", operator or "none"),
        *arguments,
    )
