"""A sum of many streams at once: one agreement, and of the streams that have dtype and width in common one reduction."""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from sparseallreduce.algorithms import ALGORITHMS, Hosts
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

_ONCE = 16  # times as long as for samples that are remembered, as which messages have to take


class ListCall(NamedTuple):
    """The arguments of an operation on a list of streams, checked as far as one rank can."""

    call: Call  # without a stream
    fusion: Fusion
    fused: tuple[SparseStream, ...]  # one for each group

    @property
    def op(self) -> Operator:
        return self.call.op

    def of(self, group: int) -> Call:
        """The call of one group."""
        return self.call._replace(stream=self.fused[group])

    def reductions(self) -> list[Reduction]:
        """One for each group."""
        return [Reduction(self.op, self.call.switch_density) for _ in self.fused]

    def cutter(self) -> Callable[[Any], list[SparseStream]]:
        """Makes of the result of the operation the list of results; keeps no stream."""
        return partial(_cut, self.fusion, self.call.switch_density, self.op.is_sum)


def make_list_call(streams: Sequence[Any], op: Any, algorithm: Any, options: Mapping[str, Any]) -> tuple[ListCall | None, Intent]:
    """As :func:`~sparseallreduce.algorithms.allreduce.make_call`, for a list or tuple of streams."""
    try:
        fusion, call = fusion_of(streams), checked(None, op, algorithm, dict(options))
        return _made(fusion, fusion.fuse(streams, masked=not call.op.is_sum), call)
    except BaseException as error:
        return None, Intent((), 0, error)


def make_fused_call(fusion: Fusion, fused: SparseStream, op: Any, algorithm: Any) -> tuple[ListCall | None, Intent]:
    """The same of streams that are fused to one already."""
    try:
        return _made(fusion, (fused,), checked(None, op, algorithm, {}))
    except BaseException as error:
        return None, Intent((), 0, error)


def allreduce_list(
    call: ListCall, rank: int, ranks: int, machine: Machine | None, reductions: Sequence[Reduction], hosts: Hosts | None = None
) -> Generator[Step, Any, tuple[SparseStream, ...]]:
    """The reduced stream of each group, one after the other."""
    groups = len(call.fused)
    entries: list[Sequence[int]] = [()] * groups
    overlaps: list[Overlap | None] = [None] * groups
    algorithm = call.call.algorithm
    if groups and ranks > 1 and (takes_samples(algorithm) or ALGORITHMS[algorithm].by_hosts):
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
    """What has to be the same of each stream."""
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
